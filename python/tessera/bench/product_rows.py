"""The rows of `--suite products`: what each entrant is called with, and what it computes."""

import dataclasses
import typing

from . import product_peers
from .product_peers import compiled

AGREEMENT = 0.03  # relative Frobenius distance from PyTorch's result: bf16 rounds hidden rows and results to 0.4 %


@dataclasses.dataclass
class Row:
    name: str
    unit: str  # TFLOP/s or GFLOP/s of `work`, GB/s of it (a copy reads and writes), or us
    work: float
    make: typing.Callable  # -> {entrant: call}; Tessera's are called "tessera..."
    graph: bool = False  # replayed from a CUDA graph
    compared: int = 1  # results, of those that there are
    agreement: float = AGREEMENT
    copied: float = 0  # bytes that the entrant "copy" reads and writes


@dataclasses.dataclass
class Sizes:
    square: int
    tokens: int
    width: int
    hidden: int
    padded: int
    gated: tuple  # tokens, width, hidden
    heads: tuple  # tokens, heads
    experts: tuple  # of (tokens, experts, top_k, width, hidden)
    vocabulary: tuple  # tokens, width, words
    rows: tuple  # of a norm: rows, columns
    rotary: tuple  # tokens, heads, dims


SIZES = {
    "cuda": Sizes(8192, 36_096, 512, 1365, 1376, (8192, 4096, 11_008), (32_000, 10),
                  ((8192, 8, 2, 4096, 14_336), (8192, 64, 8, 2048, 1408)), (8192, 4096, 128_256), (16_384, 4096),
                  (16_384, 32, 128)),
    "cpu": Sizes(1024, 2048, 512, 1365, 1376, (256, 1024, 2752), (1000, 10), ((512, 8, 2, 512, 1024),), (256, 512, 8192),
                 (2048, 4096), (2048, 16, 128)),
}


class Rows:
    """All rows, with tensors on a device."""

    def __init__(self, device, dtype, sizes):
        import tessera
        import torch

        self.torch, self.tessera, self.F = torch, tessera, torch.nn.functional
        self.device, self.dtype, self.sizes = device, dtype, sizes
        self.rate = "TFLOP/s" if device == "cuda" else "GFLOP/s"

    def tensor(self, *shape, scale=1.0):
        """Values like those between layers: products of `scale` weights keep their size."""
        return self.torch.randn(shape, device=self.device).mul_(scale).to(self.dtype)

    def weight(self, *shape):
        return self.tensor(*shape, scale=shape[-1] ** -0.5)

    def padded(self, tensor):
        """The same matrix with rows at multiples of 128 bytes."""
        columns = tensor.shape[1]
        return self.F.pad(tensor, (0, -columns % 64))[:, :columns]

    def trained(self, function, inputs):
        """A call of the function and of its gradients."""
        leaves = [t.detach().requires_grad_() for t in inputs]
        dout = []

        def call():
            with self.torch.enable_grad():
                out = function(*leaves)
            if not dout:
                self.torch.manual_seed(2)  # the same for all entrants; that of a loss is 1, which some need not multiply by
                how = dict(dtype=out.dtype, device=out.device)  # not out's strides, which entrants need not share
                dout.append(self.torch.randn(out.shape, **how) if out.ndim else self.torch.ones((), **how))
            return self.torch.autograd.grad(out, leaves, dout[0])

        return call

    def rows(self):
        for family in (self.square, self.five, self.mlps, self.heads, self.likelihood, self.grouped, self.experts,
                       self.vocabulary, self.norms, self.rotary):
            yield from family()

    def square(self):
        n, t, F = self.sizes.square, self.tessera, self.F

        def make():
            x, w = self.tensor(n, n), self.weight(n, n)
            return {"tessera": lambda: t.linear(x, w), "pytorch": lambda: F.linear(x, w),
                    "pytorch compiled": compiled(lambda: F.linear(x, w)), "quack": lambda: product_peers.quack_gemm(x, w.T)}

        yield Row(f"gemm/{n}x{n}x{n}", self.rate, 2 * n**3, make)

    def five(self):
        """The five products of an MLP whose hidden rows are not aligned: contiguous, at a padded stride, and PyTorch's with
        more columns instead."""
        s, t, torch = self.sizes, self.tessera, self.torch
        m, k = s.tokens, s.width

        def tensors(h):
            return self.tensor(m, k), self.weight(h, k), self.weight(k, h), self.tensor(m, h), self.tensor(m, k)

        def own(name, x, up, down, hidden, dout, padded=False):
            if padded:
                up, down, hidden = self.padded(up), self.padded(down), self.padded(hidden)
            return {
                "up": lambda: t.gemm(x, up, padded=padded),
                "down": lambda: t.gemm(hidden, down),
                "dhidden": lambda: t.gemm(dout, down, transpose_b=True, padded=padded),
                "dup": lambda: t.gemm(hidden, x, transpose_a=True, transpose_b=True),
                "ddown": lambda: t.gemm(dout, hidden, transpose_a=True, transpose_b=True),
            }[name]

        def by(multiply, name, x, up, down, hidden, dout):
            a, b = {"up": (x, up.T), "down": (hidden, down.T), "dhidden": (dout, down), "dup": (hidden.T, x),
                    "ddown": (dout.T, hidden)}[name]
            return lambda: multiply(a, b)

        for name in ("up", "down", "dhidden", "dup", "ddown"):
            def make(name=name):
                given, wider = tensors(s.hidden), tensors(s.padded)
                return {
                    "tessera": own(name, *given),
                    "tessera padded": own(name, *given, padded=True),
                    f"tessera {s.padded}": own(name, *wider),
                    "pytorch": by(torch.mm, name, *given),
                    f"pytorch {s.padded}": by(torch.mm, name, *wider),
                    f"pytorch compiled {s.padded}": by(compiled(torch.mm), name, *wider),
                    f"quack {s.padded}": by(product_peers.quack_gemm_split if name in ("dup", "ddown") else
                                            product_peers.quack_gemm, name, *wider),
                }

            yield Row(f"product/{name}/{m}x{k}x{s.hidden}", self.rate, 2 * m * k * s.hidden, make)

    def mlps(self):
        s, t, torch, F = self.sizes, self.tessera, self.torch, self.F
        m, k, h = s.tokens, s.width, s.hidden

        def composed(x, up, down):
            return F.linear(F.silu(F.linear(x, up)), down)

        plain = {"tessera": t.mlp, "pytorch": composed, "pytorch compiled": compiled(composed),
                 "pytorch padded": composed, "quack padded": product_peers.quack_mlp}

        def inputs(m, k, h):
            return self.tensor(m, k), self.weight(h, k), self.weight(k, h)

        def padded(x, up, down):
            """With more hidden columns, all zeros: the same function."""
            more = s.padded - h
            return x, F.pad(up, (0, 0, 0, more)), F.pad(down, (0, more))

        def given_to(name, given):
            return padded(*given) if "padded" in name else given

        def forward():
            given = inputs(m, k, h)
            return {name: lambda f=f, own=given_to(name, given): f(*own) for name, f in plain.items()}

        def trained():
            given = inputs(m, k, h)
            return {name: self.trained(f, given_to(name, given)) for name, f in plain.items()}

        yield Row(f"mlp/forward/{m}x{k}x{h}", self.rate, 4 * m * k * h, forward)
        yield Row(f"mlp/forward+backward/{m}x{k}x{h}", self.rate, 12 * m * k * h, trained)
        gm, gk, gh = s.gated

        def gated():
            x, up, down = inputs(gm, gk, gh)
            gate = self.weight(gh, gk)
            both = torch.cat([gate, up])

            def composed():
                return F.linear(F.linear(x, up) * F.silu(F.linear(x, gate)), down)

            return {"tessera": lambda: t.mlp(x, up, down, gate), "pytorch": composed, "pytorch compiled": compiled(composed),
                    "quack": lambda: product_peers.quack_gated_mlp(x, both, down),
                    "liger": lambda: product_peers.liger_gated_mlp(x, up, down, gate)}

        yield Row(f"gated mlp/forward/{gm}x{gk}x{gh}", self.rate, 6 * gm * gk * gh, gated)

    def heads(self):
        s, t, torch, F = self.sizes, self.tessera, self.torch, self.F
        (m, g), k, h = s.heads, s.width, s.hidden

        def one_by_one(x, up, down):
            return torch.stack([F.linear(F.silu(F.linear(x, u)), d) for u, d in zip(up, down)], -2)

        def together(x, up, down):
            """One product for all heads, and a batched one. torch.compile searches tiles for two products, not for twenty."""
            hidden = F.silu(F.linear(x, up.flatten(0, 1))).unflatten(-1, (g, h))
            return torch.bmm(hidden.transpose(0, 1), down.transpose(1, 2)).transpose(0, 1)

        def inputs():
            return self.tensor(m, k), self.weight(g, h, k), self.weight(g, 3, h)

        def forward():
            x, up, down = inputs()
            return {"tessera": lambda: t.grouped_mlp(x[:, None], up, down), "pytorch": lambda: one_by_one(x, up, down),
                    "pytorch compiled": compiled(lambda: together(x, up, down))}

        def trained():
            given = inputs()
            return {"tessera": self.trained(lambda x, u, d: t.grouped_mlp(x[:, None], u, d), given),
                    "pytorch": self.trained(one_by_one, given),
                    "pytorch compiled": self.trained(compiled(together), given)}

        flop = 2 * m * g * (k * h + 3 * h)
        yield Row(f"heads/forward/{m}x{k}x{g}x{h}x3", self.rate, flop, forward)
        yield Row(f"heads/forward+backward/{m}x{k}x{g}x{h}x3", self.rate, 3 * flop, trained)

        def with_likelihood():
            (x, up, down), target = inputs(), self.tensor(m)

            def composed(heads):
                return self.mixture_nll(heads(x, up, down), target)

            return {"tessera": lambda: t.mlp_gmm_nll(x, up, down, target),
                    "tessera apart": lambda: t.gmm_nll(t.grouped_mlp(x[:, None], up, down), target),
                    "pytorch": lambda: composed(one_by_one), "pytorch compiled": compiled(lambda: composed(together))}

        yield Row(f"heads+likelihood/forward/{m}x{k}x{g}x{h}x3", self.rate, flop, with_likelihood)

    def mixture_nll(self, params, target):
        torch = self.torch
        logit, mu, log_sigma = params.float().unbind(-1)
        z = (target.float()[:, None] - mu) * torch.exp(-log_sigma)
        each = torch.log_softmax(logit, -1) - 0.5 * z * z - log_sigma - 0.9189385332046727
        return -torch.logsumexp(each, -1).mean()

    def likelihood(self):
        t, torch = self.tessera, self.torch
        m, g = self.sizes.heads
        composed = self.mixture_nll

        for name, gradient in (("forward", False), ("forward+backward", True)):
            def make(gradient=gradient):
                params, target = self.tensor(m, g, 3), self.tensor(m)
                if not gradient:
                    return {"tessera": lambda: t.gmm_nll(params, target), "pytorch": lambda: composed(params, target),
                            "pytorch compiled": compiled(lambda: composed(params, target))}
                leaf = params.detach().requires_grad_()
                dout = torch.tensor(float(m), device=self.device)  # the gradients that Tessera saves are not divided by it

                def trained(function):
                    def call():
                        with torch.enable_grad():
                            loss = function(leaf, target)
                            return loss, *torch.autograd.grad(loss, leaf, dout)

                    return call

                return {"tessera": lambda: torch.ops.tessera.gmm_nll(params, target, 1, True), "pytorch": trained(composed),
                        "pytorch compiled": trained(compiled(composed))}

            yield Row(f"gmm_nll/{name}/{m}x{g}", "us", 1, make, graph=True, compared=2)

    def offsets(self, rows, groups, uneven):
        torch = self.torch
        first = rows // 2 if uneven else 0
        sizes = [first] * uneven + [(rows - first) // (groups - uneven)] * (groups - uneven)
        sizes[-1] += rows - sum(sizes)
        ends = torch.tensor(sizes).cumsum(0)
        return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(self.device, torch.int32)

    def grouped(self):
        t, torch = self.tessera, self.torch
        for tokens, groups, top_k, k, h in self.sizes.experts:
            rows = tokens * top_k
            for uneven in (False, True):
                def make(rows=rows, groups=groups, k=k, h=h, uneven=uneven):
                    x, w, offsets = self.tensor(rows, k), self.weight(groups, h, k), self.offsets(rows, groups, uneven)
                    ends = offsets[1:].contiguous()
                    if self.device == "cuda":
                        return {"tessera": lambda: t.grouped_linear(x, w, offsets),
                                "pytorch": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
                                "quack": lambda: product_peers.quack_gemm(x, w.transpose(1, 2), cu_seqlens_m=offsets)}
                    sizes = offsets.diff().tolist()
                    return {"tessera": lambda: t.grouped_linear(x, w, offsets),
                            "pytorch": lambda: torch.cat([a @ b.T for a, b in zip(x.split(sizes), w)])}

                name = f"grouped/{groups} experts/{rows}x{k}x{h}" + ("/half" if uneven else "")
                yield Row(name, self.rate, 2 * rows * k * h, make)

    def experts(self):
        t, torch, F = self.tessera, self.torch, self.F
        for tokens, groups, top_k, k, h in self.sizes.experts:
            pairs = tokens * top_k

            def layer(x, router, up, down, gate, top_k=top_k):
                return t.moe(x, F.linear(x, router), up, down, gate, top_k=top_k)

            def route(x, router, top_k=top_k):
                scores, chosen = F.linear(x, router).float().topk(top_k, -1)
                return torch.softmax(scores, -1).to(x.dtype), chosen

            def composed(x, router, up, down, gate, top_k=top_k, groups=groups, route=route):
                weights, chosen = route(x, router)
                order = chosen.flatten().argsort(stable=True)
                rows = x[order // top_k]
                counts = chosen.flatten().bincount(minlength=groups)
                if x.is_cuda:
                    ends = counts.cumsum(0).to(torch.int32)

                    def product(a, w):
                        return torch._grouped_mm(a, w.transpose(1, 2), offs=ends)
                else:
                    sizes = counts.tolist()

                    def product(a, w):
                        return torch.cat([part @ one.T for part, one in zip(a.split(sizes), w)])

                made = product(product(rows, up) * F.silu(product(rows, gate)), down)
                made = made * weights.flatten()[order][:, None]
                return torch.zeros_like(x).index_add(0, order // top_k, made)

            def inputs(tokens=tokens, groups=groups, k=k, h=h):
                return (self.tensor(tokens, k), self.weight(groups, k), self.weight(groups, h, k), self.weight(groups, k, h),
                        self.weight(groups, h, k))

            def products(given, backward, pairs=pairs, top_k=top_k):
                """The layer's own grouped products alone, one after the other, with its own numbers of rows."""
                x, router, up, down, gate = given
                counts = F.linear(x, router).float().topk(top_k, -1)[1].flatten().bincount(minlength=up.shape[0])
                offsets = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
                rows, hidden, other = self.tensor(pairs, x.shape[1]), self.tensor(pairs, up.shape[1]), self.tensor(pairs, up.shape[1])
                both = dict(transpose_a=True, transpose_b=True)

                def forward():
                    if not backward:
                        t.grouped_gemm(rows, up, offsets, gate=gate, activation="silu")
                    else:
                        t.grouped_gemm(rows, up, offsets)
                        t.grouped_gemm(rows, gate, offsets)
                    t.grouped_gemm(hidden, down, offsets)

                def all_of_them():
                    forward()
                    t.grouped_gemm(rows, down, offsets, transpose_b=True)
                    t.grouped_gemm(rows, hidden, offsets, **both)
                    t.grouped_gemm(hidden, rows, offsets, **both)
                    t.grouped_gemm(other, rows, offsets, **both)
                    dx = t.grouped_gemm(hidden, up, offsets, transpose_b=True)
                    t.grouped_gemm(other, gate, offsets, transpose_b=True, residual=dx)

                return all_of_them if backward else forward

            def liger(x, router, gate_and_up, down, route=route):
                weights, chosen = route(x, router)
                return product_peers.liger_experts(x, gate_and_up, down, chosen.int(), weights)

            def for_liger(x, router, up, down, gate):
                return x, router, torch.cat([gate, up], 1), down

            def forward(inputs=inputs, layer=layer, composed=composed, products=products, liger=liger):
                given = inputs()
                joined = for_liger(*given)
                return {"tessera": lambda: layer(*given), "tessera products": products(given, False),
                        "pytorch": lambda: composed(*given), "liger": lambda: liger(*joined)}

            def trained(inputs=inputs, layer=layer, composed=composed, products=products, liger=liger):
                given = inputs()
                return {"tessera": self.trained(layer, given), "tessera products": products(given, True),
                        "pytorch": self.trained(composed, given), "liger": self.trained(liger, for_liger(*given))}

            flop = 6 * pairs * k * h
            shape = f"{groups} experts top-{top_k}/{tokens}x{k}x{h}"
            yield Row(f"moe/forward/{shape}", self.rate, flop, forward)
            yield Row(f"moe/forward+backward/{shape}", self.rate, 3 * flop, trained)

    def vocabulary(self):
        t, F = self.tessera, self.F
        m, k, words = self.sizes.vocabulary

        def make():
            x, w = self.tensor(m, k), self.weight(words, k)
            target = self.torch.randint(words, (m,), device=self.device)

            def composed(x, w):
                return F.cross_entropy(F.linear(x, w), target)

            of = {"tessera": lambda x, w: t.linear_cross_entropy(x, w, target), "pytorch": composed,
                  "pytorch compiled": compiled(composed),
                  "quack": lambda x, w: product_peers.quack_linear_cross_entropy(x, w, target),
                  "liger": lambda x, w: product_peers.liger_linear_cross_entropy(x, w, target)}
            return {name: self.trained(f, (x, w)) for name, f in of.items()}

        yield Row(f"linear_cross_entropy/{m}x{k}x{words}", self.rate, 6 * m * k * words, make)

    def norms(self):
        t, torch, F = self.tessera, self.torch, self.F
        rows, columns = self.sizes.rows
        matrix = rows * columns * self.dtype.itemsize
        kinds = {
            "rms_norm": (False, False), "rms_norm+residual": (False, True), "layer_norm+residual": (True, True),
        }

        # (x, weight, bias, residual) -> the norm; with a residual, and the sum.
        def pytorch(centered):
            def call(x, w, b, r):
                h = x if r is None else x + r
                normed = F.layer_norm(h, (columns,), w, b) if centered else F.rms_norm(h, (columns,), w, 1e-6)
                return normed if r is None else (normed, h)

            return call

        def liger_layer_norm(x, w, b, r):
            h = x + r
            return product_peers.liger_layer_norm(h, w, b), h

        def others(centered):
            of = {"pytorch": pytorch(centered), "pytorch compiled": compiled(pytorch(centered))}
            if centered:
                return of | {"liger": liger_layer_norm}
            return of | {"quack": lambda x, w, b, r: product_peers.quack_rms_norm(x, w, r),
                         "liger": lambda x, w, b, r: product_peers.liger_rms_norm(x, w, r)}

        for kind, (centered, residual) in kinds.items():
            def forward(centered=centered, residual=residual):
                x, w, b = self.tensor(rows, columns), self.tensor(columns), self.tensor(columns)
                r = self.tensor(rows, columns) if residual else None
                to = torch.empty_like(x)
                own = (lambda: t.layer_norm(x, w, b, r)) if centered else (lambda: t.rms_norm(x, w, r))
                return {"tessera": own, **{name: lambda f=f: f(x, w, b, r) for name, f in others(centered).items()},
                        "copy": lambda: to.copy_(x)}

            def backward(centered=centered, residual=residual):
                x, dout, dsum, w = (self.tensor(rows, columns), self.tensor(rows, columns), self.tensor(rows, columns),
                                    self.tensor(columns))
                wide = x.float()
                rstd = (wide.var(1, correction=0) if centered else wide.square().mean(1)).rsqrt()
                mean = wide.mean(1) if centered else rstd.new_empty(0)
                given = dout, x, w, rstd, mean, dsum if residual else None, centered, True, centered
                leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
                bias = torch.zeros_like(w).requires_grad_()
                leaves = (leaf, weight, bias) if centered else (leaf, weight)
                to = torch.empty_like(x)

                def gradients(function):
                    made = []  # the forward, in the first call

                    def call():
                        with torch.enable_grad():
                            if not made:
                                made.append(function(leaf, weight, bias, torch.zeros_like(x) if residual else None))
                            douts = (dout, dsum) if residual else dout
                            return torch.autograd.grad(made[0], leaves, douts, retain_graph=True)

                    return call

                return {"tessera": lambda: torch.ops.tessera.norm_backward(*given),
                        **{name: gradients(f) for name, f in others(centered).items()}, "copy": lambda: to.copy_(x)}

            yield Row(f"{kind}/forward/{rows}x{columns}", "GB/s", matrix * (4 if residual else 2), forward,
                      copied=2 * matrix)
            yield Row(f"{kind}/backward/{rows}x{columns}", "GB/s", matrix * (4 if residual else 3), backward,
                      copied=2 * matrix, compared=3,
                      agreement=0.06 if self.device == "cpu" else AGREEMENT)  # PyTorch's bf16 sums on a CPU are 4 % off

    def rotary(self):
        t, torch = self.tessera, self.torch
        tokens, heads, dims = self.sizes.rotary

        def make():
            x = self.tensor(1, tokens, heads, dims)
            angles = torch.randn(tokens, dims // 2, device=self.device)
            cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
            to, both = torch.empty_like(x), (torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None])

            def composed():
                first, second = x.chunk(2, -1)
                return x * both[0] + torch.cat([-second, first], -1) * both[1]

            return {"tessera": lambda: t.rotary(x, cos, sin), "pytorch": composed, "pytorch compiled": compiled(composed),
                    "quack": lambda: product_peers.quack_rotary(x, cos, sin), "copy": lambda: to.copy_(x)}

        copied = 2 * tokens * heads * dims * self.dtype.itemsize
        tables = tokens * dims * self.dtype.itemsize
        yield Row(f"rotary/{tokens}x{heads}x{dims}", "GB/s", copied + tables, make, copied=copied)
