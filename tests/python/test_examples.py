"""The examples run as they are shown."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_finetune_phi_trains_a_toy():
    pytest.importorskip("transformers", minversion="5.5")
    script = [sys.executable, ROOT / "examples" / "finetune_phi.py"]
    run = subprocess.run([*script, "--steps", "3", "--seq", "64", "--checkpointing"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "2 of 2 attention layers run on tessera" in run.stdout
    assert "tokens/s" in run.stdout and "peak memory" in run.stdout
