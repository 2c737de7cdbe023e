import os

# Before torch is imported. oneDNN's AMX code, which PyTorch's own bf16 products take, dies with SIGILL on some virtual
# machines; models come from configs, never from a hub.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # the problems are tiny, and the tests run side by side

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def dtype(device):
    """The type a test takes where it does not care: the CPU's most exact one, a GPU's usual one."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
