"""python -m tessera.check, on the CPU."""

import json

import pytest
import torch

import tessera
from tessera import check


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(check, "seconds_of", lambda call, device: (call(), 1e-3)[1])


def test_it_passes_and_says_what_a_bug_report_needs(capsys, tmp_path):
    assert check.main(["--device", "cpu", "--json", str(tmp_path / "check.json")]) == 0
    said = capsys.readouterr().out
    for part in (f"tessera {tessera.__version__}", f"PyTorch {torch.__version__}", "cpu  ", "nvrtc", "SDPA", "16 of 16 checks"):
        assert part in said, said
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["failed"] == 0
    assert {row["check"] for row in found["checks"]} == set(check.CHECKS)
    assert all(0 < row["error_over_allowed"] <= 1 for row in found["checks"])


@pytest.mark.parametrize(
    "arguments, part",
    [(["--device", "foo"], "'foo' is none of cpu"), (["--device", "cuda:99"], "'cuda:99' is none of cpu"),
     (["--device", "meta"], "'meta'"), (["--json", "/nonexistent/x"], "cannot write /nonexistent/x")],
)  # fmt: skip
def test_options_that_cannot_be_met_are_named_before_anything_runs(capsys, arguments, part):
    with pytest.raises(SystemExit) as stopped:
        check.main(arguments)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and part in said.err and not said.out


def test_a_wrong_result_and_an_error_fail_and_the_other_checks_go_on(capsys, monkeypatch):
    right = tessera.attention
    monkeypatch.setattr(tessera, "attention", lambda *args, **options: right(*args, **options) * 1.02)

    def fails(*args, **options):
        raise tessera.Error("no such thing")

    monkeypatch.setattr(tessera, "decode", fails)
    assert check.main(["--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED  forward") + said.count("FAILED forward") >= 4, said
    assert "Error: no such thing" in said
    assert "ok     linear layer with SiLU, float32" in said
    assert "FAILED of 16 checks" in said
