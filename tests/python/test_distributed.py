"""The operators under DDP and FSDP2, two processes over Gloo."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tessera

WORLD = 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).unbind(2)
        return x + self.out(tessera.attention(q, k, v, causal=True).flatten(2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def batches():
    return torch.randn(WORLD, 2, 12, 64, generator=torch.Generator().manual_seed(1))


def single_process_gradients():
    model = Model()
    for batch in batches():
        (model(batch).square().mean() / WORLD).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def work(rank, kind, folder):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = Model()
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    wrapped(batches()[rank]).square().mean().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    if rank == 0:
        torch.save(grads, f"{folder}/grads.pt")
    dist.barrier()
    # On a busy machine, a normal exit sometimes aborts in a Gloo thread (with SDPA as well).
    os._exit(0)


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(kind):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(kind, folder), nprocs=WORLD)
        got = torch.load(f"{folder}/grads.pt")
    want = single_process_gradients()
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() < 1e-6, name
