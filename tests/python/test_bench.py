"""The comparison with peers: its sums, its gate, and a run of the whole on the CPU, where its figures mean nothing."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from tessera.bench import accuracy, cells, entrants, library, report

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = os.environ.get("TESSERA_LIBRARY") or str(ROOT / "build" / "lib" / "libtessera.so")
needs_library = pytest.mark.skipif(not os.path.exists(LIBRARY), reason=f"no library at {LIBRARY}")


def run(*arguments, **environment):
    # The package that this file imported, installed or not.
    names = {"PYTHONPATH": str(pathlib.Path(library.__file__).parents[2]), "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return subprocess.run([sys.executable, "-m", "tessera.bench", *arguments], capture_output=True, text=True,
                          env=os.environ | names | environment)


def test_there_are_32_cells_of_16384_tokens_and_their_work_is_counted_as_the_field_does():
    chosen = cells.table_cells()
    assert len(chosen) == len({c.name for c in chosen}) == 32
    assert all(c.batch * c.seq == 16384 for c in chosen)
    assert {c.heads for c in chosen if c.dim == 80} == {25}
    one = cells.Cell(2, 4, 3, 8, False)
    assert one.flops("forward") == 4 * 2 * 3 * 4 * 4 * 8
    assert cells.Cell(2, 4, 3, 8, True).flops("backward") == 2.5 * one.flops("forward") / 2
    assert one.bytes("forward") == 4 * (2 * 4 * 3 * 8 * 2) + 2 * 4 * 3 * 4
    assert one.unfused_bytes("forward") - one.bytes("forward") == 4 * 2 * 3 * 4 * 4 * 2


def record_of(times):
    """times: {cell: {entrant: seconds, or "wrong"}}"""
    rows = [{"op": "forward", "cell": cell, "small": False, "flops": 1e12, "entrants": {
        name: {"status": "ok", "median_s": t} if t != "wrong" else {"status": "wrong", "detail": "out has NaN"}
        for name, t in row.items()}} for cell, row in times.items()]
    return {"entrants": ["tessera", "fa2", "cudnn"], "rows": rows}


def test_ratios_have_geometric_means_minimum_and_losses():
    record = record_of({"a": {"tessera": 1.0, "fa2": 2.0, "cudnn": 0.5}, "b": {"tessera": 1.0, "fa2": 0.5, "cudnn": 4}})
    pairs = report.speedups(record, "forward", "tessera", "fa2")
    assert pairs == [("a", 2.0), ("b", 0.5)]
    assert math.isclose(report.geometric_mean([r for _, r in pairs]), 1.0)
    assert report.against_best(record, "forward", "tessera", ["fa2", "cudnn"]) == [("a", 0.5), ("b", 0.5)]
    text = report.text_of(record)
    assert "minimum 0.500 (b)   behind in 1 of 2" in text
    assert "behind in 2 of 2" in text


def test_a_wrong_result_is_shown_as_wrong_and_counts_in_no_mean():
    record = record_of({"a": {"tessera": "wrong", "fa2": 2.0}, "b": {"tessera": 1.0, "fa2": 1.5}})
    assert report.speedups(record, "forward", "tessera", "fa2") == [("b", 1.5)]
    text = report.text_of(record)
    assert "WRONG" in text and "out has NaN" in text


def test_two_records_are_compared_by_entrant():
    first = record_of({"a": {"tessera": 1.0, "fa2": 2.0}})
    second = record_of({"a": {"tessera": 1.02, "fa2": 2.0}})
    assert "tessera      1.0200 over 1 cells" in report.compare(first, second)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_what_autograd_says_in_fp64(causal):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(50, 16, dtype=torch.float64) for _ in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].T / 4
    if causal:
        scores = scores.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    out = torch.softmax(scores, -1) @ leaves[2]
    want = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, do)), out=out)
    chunk, accuracy.CHUNK = accuracy.CHUNK, 16
    try:
        got = accuracy.one_head(q, k, v, do, causal, exact=True)
    finally:
        accuracy.CHUNK = chunk
    for name in want:
        assert torch.allclose(got[name], want[name].detach(), rtol=1e-12, atol=1e-12), name


def test_the_gate_lets_a_right_result_through_and_stops_nan_and_a_skipped_tile():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cell = cells.Cell(2, 128, 3, 64, False)
    q, k, v, do = (torch.randn(2, 128, 3, 64).bfloat16() for _ in range(4))
    reference = accuracy.Reference(cell, q, k, v, do)

    def attend(keys):
        with torch.no_grad():
            one = torch.softmax(torch.einsum("bshd,bthd->bhst", q.float(), k[:, :keys].float()) / 8, -1)
            return torch.einsum("bhst,bthd->bshd", one, v[:, :keys].float()).bfloat16()

    error, wrong = reference.judge(out=attend(128))
    assert wrong == "" and 0 < error < 1
    assert reference.judge(out=attend(120))[1] != ""
    broken = attend(128)
    broken[0, 5, 1, 7] = float("nan")  # in a head that is not compared
    assert "NaN" in reference.judge(out=broken)[1]


def test_every_peer_has_a_name_and_what_is_not_installed_is_left_out():
    assert set(entrants.PACKAGES) <= set(entrants.PEERS)
    from tessera.bench.__main__ import chosen_entrants

    names, missing = chosen_entrants("all")
    assert "fa2" in names and set(names) | set(missing) == set(entrants.PEERS)
    with pytest.raises(ValueError, match="nonsense"):
        chosen_entrants("fa2,nonsense")


def test_without_a_gpu_it_ends_with_a_sentence():
    answer = run(CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 3
    assert answer.stderr.startswith("error: ") and "GPU" in answer.stderr
    assert run("--device", "cpu", "--library", "/nonexistent.so").returncode == 3


@needs_library
def test_bad_usage_is_named():
    for arguments, part in ((("--suite", "nonsense"), "nonsense"), (("--filter", "no_such"), "no_such"),
                            (("--peers", "nobody"), "nobody"), (("--ops", "sideways"), "sideways")):
        answer = run("--device", "cpu", "--library", LIBRARY, *arguments)
        assert answer.returncode == 2 and part in answer.stderr, answer.stderr


@needs_library
def test_a_run_on_the_cpu_times_everyone_and_writes_it_down(tmp_path):
    file = tmp_path / "bench.json"
    answer = run("--device", "cpu", "--suite", "toy", "--peers", "fa2,math", "--rounds", "3", "--json", str(file),
                 "--library", LIBRARY)
    assert answer.returncode == 0, answer.stderr
    assert "geometric mean" in answer.stdout
    record = json.loads(file.read_text())
    assert len(record["rows"]) == 4
    for row in record["rows"]:
        assert set(row["entrants"]) >= {"tessera", "fa2", "math"}
        for result in row["entrants"].values():
            assert result["status"] == "ok" and len(result["samples_s"]) == 3
            assert result["p05_s"] <= result["median_s"] <= result["p95_s"]
            assert 0 < result["error_over_allowed"] <= 1
    assert ["tessera-det" in row["entrants"] for row in record["rows"]] == [False, True, False, True]


def test_the_library_is_where_it_is_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_LIBRARY", "/from/environment.so")
    assert str(library.find_library()) == "/from/environment.so"
    assert str(library.find_library("/given.so")) == "/given.so"
