import os

# Set before torch is imported. oneDNN's AMX code, which PyTorch uses for bf16 matrix products, crashes with SIGILL on
# some virtual machines. Models are built from configs, never downloaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # the problems are tiny, and the tests run in parallel

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: runs on a GPU; skipped where there is none")


def pytest_collection_modifyitems(items):
    for item in items:
        if any(mark.kwargs.get("reason") == "no CUDA device" for mark in item.iter_markers("skipif")):
            item.add_marker("cuda")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def dtype(device):
    """For tests that hold for any type: the CPU's most accurate one, a GPU's usual one."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
