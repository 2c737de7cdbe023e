"""The Python examples of README.md and docs/ run as they are written, on the CPU; what they leave open is given here."""

import contextlib
import io
import pathlib
import re

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = [(page, number, code)
            for page in ("README.md", "docs/python.md", "docs/explain.md")
            for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S))]


def test_there_are_examples():
    assert {page for page, _, _ in EXAMPLES} == {"README.md", "docs/python.md", "docs/explain.md"}


@pytest.mark.parametrize("page, number, code", EXAMPLES, ids=[f"{page}-{number}" for page, number, _ in EXAMPLES])
def test_an_example_runs_as_written(page, number, code, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {}
    if "transformers" in code:
        transformers = pytest.importorskip("transformers", minversion="5.5")
        config = transformers.MixtralConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64,
                                            num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
        given["model"] = transformers.AutoModelForCausalLM.from_config(config)
        given["name"] = tmp_path
        given["model"].save_pretrained(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, f"{page}, example {number}", "exec"), given)  # noqa: S102
