"""The examples run as documented."""

import argparse
import importlib.util
import json
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


def test_finetune_phi_keeps_attention_and_computes_it_once(finetune, capsys, monkeypatch):
    forward, calls = finetune.tessera._native.forward, []
    monkeypatch.setattr(finetune.tessera._native, "forward", lambda *args: calls.append(None) or forward(*args))
    counts, losses = [], []
    for keeps in ([], ["--keep-attention"]):
        calls.clear()
        code, said = finetune.run(capsys, "--steps", 2, "--checkpointing", *keeps)
        assert code == 0, said
        counts.append(len(calls))
        losses.append(said.rsplit("gradient norm", 1)[0].rsplit("loss", 1)[1])
    assert losses[0] == losses[1] and counts[0] == 2 * counts[1] > 0, (losses, counts)
    checkpointing = "needs --checkpointing, without --offload"
    for wrong, why in (([], checkpointing), (["--checkpointing", "--offload"], checkpointing),
                       (["--checkpointing", "--attention", "eager"], "tessera or sdpa, not eager")):
        with pytest.raises(SystemExit):
            finetune.run(capsys, "--keep-attention", *wrong)
        assert why in capsys.readouterr().err


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
    code, said = finetune.run(capsys, "--model", tmp_path / "model", "--steps", 2, "--dtype", "float16", "--json",
                              tmp_path / "run.json")
    assert code == 0 and "torch.float16 weights" in said, said
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["seq"] == 64 and len(record["losses"]) == len(record["gradient_norms"]) == len(record["seconds"]) == 2


def test_finetune_phi_reads_text_with_the_models_tokenizer(finetune, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    assert len(finetune.text(1000, tmp_path)) > 1000  # bytes: the folder has no tokenizer
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"import": 1, "?": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    tokens = finetune.text(1000, tmp_path)
    assert set(tokens.tolist()) == {1, 2}


def test_finetune_records_become_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("finetune_results", ROOT / "scripts" / "finetune_results.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    runs = tmp_path / "runs"
    for folder in (runs, tmp_path / "docs", tmp_path / "results" / "h200"):
        folder.mkdir(parents=True)
    record = dict(attention="tessera", layers=4, dtype="bfloat16", four_bit=False, batch=1, seq=4096, checkpointing=True,
                  offload=False, tokens_per_s=1234.5, peak_GiB=3.0, seconds=[1.0, 1.0], losses=[9.0, 8.0], gradient_norms=[1, 1])
    for name, of in (("memory_1", {}), ("memory_2", dict(seq=8192, peak_GiB=5.0)), ("curve_t", {}), ("curve_s", dict(attention="sdpa"))):
        (runs / f"{name}.json").write_text(json.dumps(record | of))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune_results.py", str(runs)])
    script.main()
    assert capsys.readouterr().out.count("| 4 |") == 4
    assert (tmp_path / "docs" / "finetune_phi.svg").read_text().count("<polyline") == 3
    assert set(json.loads((tmp_path / "results" / "h200" / "finetune.json").read_text())) == {"memory_1", "memory_2", "curve_t", "curve_s"}


def test_generate_compares_tokens():
    pytest.importorskip("transformers", minversion="5.5")
    script = [sys.executable, ROOT / "examples" / "generate.py", "--models", "mistral", "--new", "12", "--steps", "3"]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "mistral, static cache, float32" in run.stdout
