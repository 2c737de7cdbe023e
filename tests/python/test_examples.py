"""The examples run as documented."""

import argparse
import importlib.util
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("weights", [[], ["--four-bit"]])
def test_finetune_phi_trains_a_toy(weights):
    pytest.importorskip("transformers", minversion="5.5")
    if weights:
        pytest.importorskip("bitsandbytes")
    script = [sys.executable, ROOT / "examples" / "finetune_phi.py"]
    options = ["--steps", "3", "--seq", "64", "--checkpointing", *weights]
    run = subprocess.run([*script, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "2 of 2 attention layers run on tessera" in run.stdout
    assert "tokens/s" in run.stdout and "peak memory" in run.stdout


@pytest.fixture(scope="module")
def finetune():
    pytest.importorskip("transformers", minversion="5.5")
    spec = importlib.util.spec_from_file_location("finetune_phi", ROOT / "examples" / "finetune_phi.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(capsys, *options):
        with mock.patch.object(sys, "argv", ["finetune_phi.py", "--seq", "64", *map(str, options)]):
            code = module.main()
        return code, capsys.readouterr().out

    module.run = run
    return module


def test_finetune_phi_checks_itself_and_notices_a_wrong_kernel(finetune, capsys, monkeypatch):
    code, said = finetune.run(capsys, "--check", "kernel", "integration", "trainer")
    assert (code, said.count("ok ")) == (0, 3), said
    right = finetune.tessera.attention
    monkeypatch.setattr(finetune.tessera, "attention", lambda *args, **options: right(*args, **options) * 1.001)
    code, said = finetune.run(capsys, "--check", "kernel")
    assert (code, said.startswith("FAILED  kernel")) == (1, True), said


def test_finetune_phi_resumes_offloads_and_reads_sharded_weights(finetune, capsys, tmp_path):
    _, whole = finetune.run(capsys, "--steps", 4, "--checkpointing")
    for part in range(2):  # the second goes on where the first stopped
        code, said = finetune.run(capsys, "--steps", 2, "--checkpointing", "--offload", "--state", tmp_path / "lora.pt")
        assert code == 0 and ("goes on after step 2" in said) == (part == 1), said
    last = lambda text: text.rsplit("gradient norm", 1)[0].rsplit("loss", 1)[1]  # noqa: E731
    assert last(whole) == last(said), (whole, said)

    options = argparse.Namespace(model=None, size="toy", layers=2, seq=64, attention="eager")
    model = finetune.make_model(options, torch.device("cpu"), torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="500KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    code, said = finetune.run(capsys, "--model", tmp_path / "model", "--steps", 2, "--dtype", "float16")
    assert code == 0 and "torch.float16 weights" in said, said


def test_generate_compares_tokens():
    pytest.importorskip("transformers", minversion="5.5")
    script = [sys.executable, ROOT / "examples" / "generate.py", "--models", "mistral", "--new", "12", "--steps", "3"]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "mistral, static cache, float32" in run.stdout
