"""Regression on draws from a Gaussian process, and the exact answer: what a perfect model's loss would be."""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Task:
    """Noisy values of functions from a Gaussian process with a squared-exponential kernel, at points in [-2, 2]."""

    context: int = 64
    target: int = 64
    length: float = 0.5
    noise: float = 0.2

    def covariance(self, a, b):
        return torch.exp(-0.5 * ((a[:, :, None] - b[:, None, :]) / self.length) ** 2)

    def with_noise(self, a):
        return self.covariance(a, a) + self.noise**2 * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)

    def batch(self, functions, seed, device="cpu"):
        """x and y, fp32 [functions, context + target]; the same for the same seed, on one kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        shape = (functions, self.context + self.target)
        x = torch.rand(shape, generator=generator, device=device) * 4 - 2
        draw = torch.randn((*shape, 1), generator=generator, device=device)
        # The noise's variance on the diagonal keeps the matrix positive definite in fp32. cholesky_ex does not wait for
        # the GPU, which cholesky does to look for errors.
        root, _ = torch.linalg.cholesky_ex(self.with_noise(x))
        return x, (root @ draw).squeeze(-1)

    def exact_nll(self, x, y):
        """The mean of -log p(y_t | x_t, context) over targets, in fp64: no model has a lower one on average."""
        x, y = x.double(), y.double()
        (known, new), (value, wanted) = (t.split([self.context, self.target], 1) for t in (x, y))
        cross = self.covariance(known, new)
        solved = torch.cholesky_solve(cross, torch.linalg.cholesky(self.with_noise(known)))
        mean = (solved * value[..., None]).sum(1)
        variance = 1 + self.noise**2 - (solved * cross).sum(1)
        return (0.5 * ((wanted - mean) ** 2 / variance + variance.log() + math.log(2 * math.pi))).mean().item()
