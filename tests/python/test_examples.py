"""The examples run as documented."""

import pathlib
import subprocess
import sys

import pytest

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


def test_generate_compares_tokens():
    pytest.importorskip("transformers", minversion="5.5")
    script = [sys.executable, ROOT / "examples" / "generate.py", "--models", "mistral", "--new", "12", "--steps", "3"]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "mistral, static cache, float32" in run.stdout
