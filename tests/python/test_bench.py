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


def test_decode_has_one_query_and_counts_keys_and_values_once():
    chosen = cells.decode_cells()
    assert [(c.batch, c.seq) for c in chosen] == [(1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096)]
    assert all(c.q_shape == (c.batch, 1, 32, 128) and c.k_shape == (c.batch, c.seq, 8, 128) for c in chosen)
    one = chosen[0]
    assert one.name == "bf16/b1_s1024_h32:8_d128" and one.ops == ("decode",)
    assert one.bytes("decode") == 2 * (1024 * 8 * 128 * 2) + 2 * (32 * 128 * 2)
    assert one.flops("decode") == 4 * 32 * 1024 * 128


def record_of(times):
    """times: {cell: {entrant: seconds, or "wrong"}}"""
    rows = [{"op": "forward", "cell": cell, "small": False, "flops": 1e12, "entrants": {
        name: {"status": "ok", "median_s": t} if t != "wrong" else {"status": "wrong", "detail": "out has NaN"}
        for name, t in row.items()}} for cell, row in times.items()]
    return {"entrants": ["tessera", "fa2", "cudnn"], "rows": rows}


def test_small_shapes_are_compared_by_their_graphs_and_the_host_s_part_is_shown():
    first, second = ({"entrants": ["tessera"], "rows": [{"op": "forward", "cell": "a", "small": True, "entrants": {
        "tessera": {"status": "ok", "median_s": around, "graph_s": 0.5}}}]} for around in (1.0, 3.0))
    text, apart = report.compare(first, second)
    assert not apart and "forward   geometric mean 1.0000" in text and "around    geometric mean 3.0000" in text
    second["rows"][0]["entrants"]["tessera"]["graph_s"] = 0.6
    assert "tessera is 1.2" in report.compare(first, second)[1]


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


def compared(tmp_path, first, second):
    """(exit code, what was printed) of --compare"""
    names = []
    for number, times in enumerate((first, second)):
        names.append(str(tmp_path / f"{number}.json"))
        pathlib.Path(names[-1]).write_text(json.dumps(record_of(times)))
    answer = run("--compare", *names)
    return answer.returncode, answer.stdout + answer.stderr


def test_two_records_that_agree_within_3_percent_are_said_to(tmp_path):
    first = {"a": {"tessera": 1.0, "fa2": 2.0}, "b": {"tessera": 1.0, "fa2": 1.0}}
    second = {"a": {"tessera": 1.10, "fa2": 2.0}, "b": {"tessera": 0.95, "fa2": 1.0}}
    code, said = compared(tmp_path, first, second)
    assert code == 0, said
    assert "tessera      forward   geometric mean 1.0223 over 2 cells   min 0.950 (b)   max 1.100 (a)" in said
    assert "fa2          forward   geometric mean 1.0000 over 2 cells   min 1.000" in said


@pytest.mark.parametrize("factor", [1.035, 0.965])
def test_two_records_further_apart_fail_and_the_entrant_is_named(tmp_path, factor):
    first = {"a": {"tessera": 1.0, "fa2": 2.0}, "b": {"tessera": 1.0, "fa2": 1.0}}
    second = {cell: {"tessera": times["tessera"], "fa2": times["fa2"] * factor} for cell, times in first.items()}
    code, said = compared(tmp_path, first, second)
    assert code == 1 and f"error: fa2 is {factor:.4f} of its first time" in said


def test_records_with_another_status_or_nothing_in_common_do_not_agree(tmp_path):
    first = {"a": {"tessera": 1.0, "fa2": 2.0}}
    code, said = compared(tmp_path, first, {"a": {"tessera": 1.0, "fa2": "wrong"}})
    assert code == 1 and "forward a fa2: ok, then wrong" in said
    code, said = compared(tmp_path, first, {"b": {"tessera": 1.0, "fa2": 2.0}})
    assert code == 1 and "no cell was timed in both" in said


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


def test_the_gate_of_decode_takes_the_key_head_of_the_group():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cell = cells.Cell(2, 100, 4, 64, False, decode=True, heads_kv=2)
    q, k, v, do = (torch.randn(s).bfloat16() for s in (cell.q_shape, cell.k_shape, cell.k_shape, cell.q_shape))
    reference = accuracy.Reference(cell, q, k, v, do)

    def attend(key_heads):
        keys, values = k[:, :, key_heads].float(), v[:, :, key_heads].float()
        weights = torch.softmax(torch.einsum("bshd,bthd->bhst", q.float(), keys) / 8, -1)
        return torch.einsum("bhst,bthd->bshd", weights, values).bfloat16()

    assert reference.judge(out=attend([0, 0, 1, 1]))[1] == ""
    assert reference.judge(out=attend([0, 1, 0, 0]))[1] != ""


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
    assert [row["op"] for row in record["rows"]] == ["forward", "backward", "forward", "backward", "decode"]
    for row in record["rows"]:
        assert set(row["entrants"]) >= {"tessera", "fa2", "math"}
        for result in row["entrants"].values():
            assert result["status"] == "ok" and len(result["samples_s"]) == 3
            assert result["p05_s"] <= result["median_s"] <= result["p95_s"]
            assert 0 < result["error_over_allowed"] <= 1
    assert ["tessera-det" in row["entrants"] for row in record["rows"]] == [False, True, False, True, False]
    assert record["rows"][4]["entrants"]["tessera"]["through"] == "decode"
    assert "tessera ran the decode" in answer.stdout and "TB/s, K and V once" in answer.stdout


@needs_library
def test_decode_falls_back_to_the_forward_and_says_so():
    torch = pytest.importorskip("torch")
    lib = library.Library(LIBRARY)
    real = lib.lib.tessera_plan_create

    class NoDecode:
        """The library, refusing one op, as it does where no kernel serves it."""

        def __getattr__(self, name):
            return getattr(lib.lib, name)

        def tessera_plan_create(self, op, *arguments):
            if op.value == library.DECODE:
                raise library.Refused("decode of bf16\nrefused attention_decode: not on this device")
            return real(op, *arguments)

    class Without(library.Library):
        def __init__(self):
            self.lib = NoDecode()

    cell = cells.toy_cells()[2]
    q, k, v = (torch.randn(s).bfloat16() for s in (cell.q_shape, cell.k_shape, cell.k_shape))
    through = [entrants.Tessera(cell, q, k, v, one) for one in (lib, Without())]
    assert [one.through for one in through] == ["decode", "forward"]
    assert through[1].refusal == "refused attention_decode: not on this device"
    assert torch.allclose(through[0].forward().float(), through[1].forward().float(), atol=0.02)


def test_decode_is_shown_with_its_losses_and_what_ran():
    entrant = {"status": "ok", "median_s": 2e-5, "graph_s": 1e-5, "host_s": 1e-6}
    row = {"op": "decode", "cell": "d", "small": True, "flops": 1e9, "bytes": 4e7, "entrants": {
        "tessera": entrant | {"through": "forward", "decode_refused": "refused: none"},
        "fa2": entrant | {"median_s": 1e-5}}}
    text = report.text_of({"entrants": ["tessera", "tessera-det", "fa2"], "rows": [row]})
    assert "tessera ran the forward: refused: none" in text
    assert "behind in 1 of 1" in text and "decode, fa2" in text
    assert [line.split() for line in text.splitlines() if line.startswith("d ")] == [
        ["d", "20.0", "10.0", "0.50"], ["d", "10.0", "/", "1", "10.0", "/", "1"], ["d", "2.00", "4.00"]]


def test_the_library_is_where_it_is_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_LIBRARY", "/from/environment.so")
    assert str(library.find_library()) == "/from/environment.so"
    assert str(library.find_library("/given.so")) == "/given.so"
