"""The comparison with peers: its arithmetic, its accuracy check, and a complete run on the CPU."""

import contextlib
import io
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from tessera.bench import __main__, accuracy, cells, entrants, library, report

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = os.environ.get("TESSERA_LIBRARY") or str(ROOT / "build" / "lib" / "libtessera.so")
needs_library = pytest.mark.skipif(not os.path.exists(LIBRARY), reason=f"no library at {LIBRARY}")


def run(*arguments, **environment):
    # The same package as this file imports, installed or not.
    names = {"PYTHONPATH": str(pathlib.Path(library.__file__).parents[2]), "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return subprocess.run([sys.executable, "-m", "tessera.bench", *arguments], capture_output=True, text=True,
                          env=os.environ | names | environment)


def called(*arguments):
    """As run, in this process: PyTorch takes seconds to start."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = __main__.main(list(arguments))
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def a_cell(batch, seq_k, heads_q, dim, seq_q=None, heads_kv=None, tags=()):
    fields = dict(dtype="bf16", batch=batch, seq_q=seq_q or seq_k, seq_k=seq_k, heads_q=heads_q,
                  heads_kv=heads_kv or heads_q, dim_qk=dim, dim_v=dim, causal=False)
    return cells.Cell("a", fields, tags)


def test_there_are_32_cells_of_16384_tokens_and_their_work_counts_visible_pairs():
    chosen = cells.suite("table")
    assert len(chosen) == len({c.name for c in chosen}) == 32
    assert all(c.batch * c.seq_q == 16384 and c.seq_k == c.seq_q and c.heads_kv == c.heads_q for c in chosen)
    assert {c.heads_q for c in chosen if c.dim_qk == 80} == {25}
    assert all(c.ops == ("forward", "backward") and not c.small for c in chosen)
    for c in chosen:
        b, s, h, d = c.q_shape
        forward, backward = c.work["forward"], c.work["backward"]
        assert forward.flops == 4 * b * h * d * (s * (s + 1) // 2 if c.causal else s * s)
        assert backward.flops == 2.5 * forward.flops
        tensor, lse, scores = b * s * h * d * 2, b * s * h * 4, b * h * s * s * 2
        assert forward.bytes == 4 * tensor + lse and backward.bytes == 8 * tensor + lse
        assert forward.unfused_bytes == forward.bytes + 4 * scores
        assert backward.unfused_bytes == backward.bytes + 7 * scores


def test_decode_has_one_query_and_counts_keys_and_values_once():
    chosen = cells.suite("decode")
    usual = [(1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096)]
    assert [(c.batch, c.seq_k) for c in chosen] == usual + 4 * [(16, 8192)]  # then other head dims, and no groups
    assert all(c.q_shape == (c.batch, 1, 32, 128) and c.k_shape == (c.batch, c.seq_k, 8, 128) for c in chosen[:5])
    assert [(c.k_shape[2], c.k_shape[3]) for c in chosen[5:]] == [(8, 64), (8, 80), (8, 256), (32, 128)]
    one = chosen[0]
    assert one.name == "bf16/b1_s1024_h32:8_d128" and one.ops == ("decode",) and one.small and one.decode
    assert one.work["decode"].bytes == 2 * (1024 * 8 * 128 * 2) + 2 * (32 * 128 * 2)
    assert one.work["decode"].flops == 4 * 32 * 1024 * 128


def test_suites_do_not_overlap_and_have_both_types():
    sizes = {name: len(cells.suite(name)) for name in cells.SUITES}
    assert sizes == {"table": 32, "odd": 7, "small": 5, "decode": 9, "toy": 3}
    assert [(c.small, c.decode) for c in cells.suite("toy")] == [(False, False), (True, False), (True, True)]
    for bf16, fp16 in zip(cells.suite("small"), cells.suite("small", "fp16")):
        assert fp16.name == bf16.name.replace("bf16", "fp16") and fp16.dtype == "fp16" and fp16.work == bf16.work
        assert fp16.q_shape == bf16.q_shape and bf16.dtype == "bf16"


def row_of(cell, entrants, op="forward", tags=("table",), **rest):
    fields = dict(dtype="bf16", batch=1, seq_q=8, seq_k=8, heads_q=1, heads_kv=1, dim_qk=8, dim_v=8, causal=False)
    return {"op": op, "cell": cell, "fields": fields, "tags": list(tags), "flops": 1e12, **rest, "entrants": entrants}


def record_of(times):
    """times: {cell: {entrant: seconds, or "wrong"}}"""
    rows = [row_of(cell, {
        name: {"status": "ok", "median_s": t} if t != "wrong" else {"status": "wrong", "detail": "out has NaN"}
        for name, t in row.items()}) for cell, row in times.items()]
    return {"entrants": ["tessera", "fa2", "cudnn"], "rows": rows}


def test_a_record_of_an_older_version_is_read_and_compared(tmp_path):
    def older(row):
        fields = row["fields"]
        columns = {"dtype": fields["dtype"], "batch": fields["batch"], "seq": fields["seq_k"],
                   "heads": fields["heads_q"], "heads_kv": fields["heads_kv"], "dim": fields["dim_qk"],
                   "causal": fields["causal"], "small": cells.is_small(row["tags"])}
        return {name: value for name, value in row.items() if name not in ("fields", "tags")} | columns

    entrant = {"tessera": {"status": "ok", "median_s": 1.0}}
    new = {"entrants": ["tessera"], "rows": [
        row_of("a", entrant), row_of("a", entrant, tags=["small"]), row_of("a", entrant, "decode", ["decode"])]}
    new["rows"][2]["fields"]["seq_q"] = 1
    names = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    pathlib.Path(names[0]).write_text(json.dumps(new | {"rows": [older(row) for row in new["rows"]]}))
    pathlib.Path(names[1]).write_text(json.dumps(new))
    assert report.read(names[0]) == report.read(names[1]) == new
    for pair in (names, names[::-1]):
        answer = called("--compare", *pair)
        assert answer.returncode == 0 and "over 3 cells" in answer.stdout, answer.stdout + answer.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/peers.json")), ids=lambda p: p.parent.name)
def test_the_committed_results_are_read(path):
    record = report.read(path)
    names = {c.name: c for suite in cells.SUITES for c in cells.suite(suite)}
    for row in record["rows"]:
        cell = names[row["cell"]]
        assert {name: row["fields"][name] for name in cell.fields} == cell.fields
        assert row["tags"] == list(cell.tags)
        # An older record counts half of all pairs under a causal mask, the diagonal left out.
        assert row["flops"] == pytest.approx(cell.work[row["op"]].flops, rel=1.5 / cell.seq_k)
        assert [row[name] for name in ("bytes", "unfused_bytes")] == [
            getattr(cell.work[row["op"]], name) for name in ("bytes", "unfused_bytes")]
    assert "geometric mean" in report.text_of(record)
    assert report.compare(record, record)[1] == ""


def test_small_shapes_are_compared_by_graph_replay_and_the_time_around_the_call_is_shown():
    first, second = ({"entrants": ["tessera"], "rows": [row_of("a", {
        "tessera": {"status": "ok", "median_s": around, "graph_s": 0.5}}, tags=["small"])]} for around in (1.0, 3.0))
    text, apart = report.compare(first, second)
    assert not apart and "forward   geometric mean 1.0000" in text and "around    geometric mean 3.0000" in text
    second["rows"][0]["entrants"]["tessera"]["graph_s"] = 0.6
    assert "tessera takes 1.2" in report.compare(first, second)[1]


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
    answer = called("--compare", *names)
    return answer.returncode, answer.stdout + answer.stderr


def test_two_records_within_3_percent_agree(tmp_path):
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
    assert code == 1 and f"error: fa2 takes {factor:.4f} of its first time" in said


def test_records_with_a_different_status_or_nothing_in_common_do_not_agree(tmp_path):
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


def test_the_check_accepts_a_correct_result_and_rejects_nan_and_a_skipped_tile():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cell = a_cell(2, 128, 3, 64)
    q, k, v, do = (torch.randn(2, 128, 3, 64).bfloat16() for _ in range(4))
    reference = accuracy.Reference(cell, q, k, v, do)

    def attend(keys):
        with torch.no_grad():
            one = torch.softmax(torch.einsum("bshd,bthd->bhst", q.float(), k[:, :keys].float()) / 8, -1)
            return torch.einsum("bhst,bthd->bshd", one, v[:, :keys].float()).bfloat16()

    error, wrong, relative = reference.judge(out=attend(128))
    assert wrong == "" and 0 < error < 1
    assert reference.judge(out=attend(120))[1] != ""
    broken = attend(128)
    broken[0, 5, 1, 7] = float("nan")  # in a head that is not compared
    assert "NaN" in reference.judge(out=broken)[1]


def test_the_check_of_decode_uses_the_key_head_of_the_group():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cell = a_cell(2, 100, 4, 64, seq_q=1, heads_kv=2, tags=("decode",))
    q, k, v, do = (torch.randn(s).bfloat16() for s in (cell.q_shape, cell.k_shape, cell.k_shape, cell.q_shape))
    reference = accuracy.Reference(cell, q, k, v, do)

    def attend(key_heads):
        keys, values = k[:, :, key_heads].float(), v[:, :, key_heads].float()
        weights = torch.softmax(torch.einsum("bshd,bthd->bhst", q.float(), keys) / 8, -1)
        return torch.einsum("bhst,bthd->bshd", weights, values).bfloat16()

    assert reference.judge(out=attend([0, 0, 1, 1]))[1] == ""
    assert reference.judge(out=attend([0, 1, 0, 0]))[1] != ""


def test_gradients_of_a_key_head_are_summed_over_its_query_heads():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    fields = a_cell(1, 96, 4, 64, heads_kv=2).fields
    cell = cells.Cell("a", fields, (), {"backward": cells.Work(1, 1, 1)})
    q, k, v, do = (torch.randn(s).bfloat16() for s in (cell.q_shape, cell.k_shape, cell.k_shape, cell.q_shape))
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(2, dim=2) for t in leaves[1:])
    weights = torch.softmax(torch.einsum("bshd,bthd->bhst", leaves[0], keys) / 8, -1)
    out = torch.einsum("bhst,bthd->bshd", weights, values)
    dq, dk, dv = (g.bfloat16() for g in torch.autograd.grad(out, leaves, do.float()))
    reference = accuracy.Reference(cell, q, k, v, do)
    _, wrong, relative = reference.judge(dq=dq, dk=dk, dv=dv)
    assert wrong == "" and set(relative) == {"dq", "dk", "dv"} and 0 < max(relative.values()) < 5e-3
    assert reference.judge(dq=dq, dk=dk, dv=dv / 2)[1] != ""


def test_every_peer_has_a_name_and_missing_packages_are_skipped():
    assert set(entrants.PACKAGES) <= set(entrants.PEERS)
    names, missing = entrants.chosen_of("all", entrants.PEERS, entrants.installed)
    assert "fa2" in names and set(names) | set(missing) == set(entrants.PEERS)
    with pytest.raises(ValueError, match="nonsense"):
        entrants.chosen_of("fa2,nonsense", entrants.PEERS, entrants.installed)


def test_a_wrong_peer_is_named_and_left_out_of_the_best():
    def ok(seconds, error):
        return {"status": "ok", "median_s": seconds, "relative_errors": {"dq": error}}

    def wrong(detail):
        return {"status": "wrong", "detail": detail, "relative_errors": {"dq": 1.0}}

    names = ["tessera", "tessera-det", "fa4", "fa4-det", "cudnn-det"]
    rows = [row_of("a", {"tessera": ok(1, 2e-3), "tessera-det": ok(2, 2e-3), "fa4": ok(3, 4e-3), "fa4-det": ok(4, 4e-3),
                         "cudnn-det": ok(6, 4e-3)}, "backward"),
            row_of("b", {"tessera": ok(1, 9e-3), "tessera-det": ok(2, 9e-3), "fa4": wrong("dq is off by 8 times"),
                         "fa4-det": wrong("dq is off by 9 times"), "cudnn-det": ok(8, 4e-3)}, "backward")]
    text = report.text_of({"entrants": names, "rows": rows})
    assert "fa4: wrong in 1 rows, and left out of the best of them there; backward b: dq is off by 8 times" in text
    assert "WRONG" in text
    best = next(line for line in text.splitlines() if line.strip().startswith("deterministic, the best"))
    assert "2.828" in best and "minimum 2.000 (a)" in best  # 4 / 2 and 8 / 2
    errors = next(line for line in text.splitlines() if line.startswith("backward dq, 1 rows"))
    assert errors.split()[-5:] == ["2.00e-03", "2.00e-03", "4.00e-03", "4.00e-03", "4.00e-03"]


def test_help_lists_what_is_accepted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    answer = called("--help")
    assert answer.returncode == 0 and "--compare FILE FILE" in answer.stdout and "more than 3%" in answer.stdout


def test_without_a_gpu_it_ends_with_a_message():
    answer = run(CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 3
    assert answer.stderr.startswith("error: ") and "GPU" in answer.stderr
    assert called("--device", "cpu", "--library", "/nonexistent.so").returncode == 3


def test_a_library_of_another_kind_is_refused_with_a_message():
    import _ctypes

    answer = called("--device", "cpu", "--library", _ctypes.__file__)
    assert answer.returncode == 2 and "has no tessera_last_error" in answer.stderr


@pytest.mark.parametrize(
    "arguments, part",
    [(["--json", "/nonexistent/x"], "cannot write /nonexistent/x"), (["--compare", "none.json", "none.json"], "none.json"),
     (["--compare", __file__, __file__], "cannot read"), (["--rounds", "0"], "--rounds is 0")],
)  # fmt: skip
def test_options_that_cannot_be_met_are_named_before_anything_runs(capsys, arguments, part):
    from tessera.bench import __main__ as program

    assert program.main(["--device", "cpu", *arguments]) == 2
    said = capsys.readouterr()
    assert part in said.err and not said.out


@needs_library
def test_invalid_options_are_named():
    for arguments, part in ((("--suite", "nonsense"), "nonsense"), (("--filter", "no_such"), "no_such"),
                            (("--peers", "nobody"), "nobody"), (("--ops", "sideways"), "sideways")):
        answer = called("--device", "cpu", "--library", LIBRARY, *arguments)
        assert answer.returncode == 2 and part in answer.stderr, answer.stderr


@needs_library
def test_a_run_on_the_cpu_times_all_entrants_and_writes_the_record(tmp_path):
    file = tmp_path / "bench.json"
    answer = run("--device", "cpu", "--suite", "toy", "--peers", "fa2,math", "--rounds", "3", "--json", str(file),
                 "--library", LIBRARY)
    assert answer.returncode == 0, answer.stderr
    assert "geometric mean" in answer.stdout
    record = json.loads(file.read_text())
    assert [row["op"] for row in record["rows"]] == ["forward", "backward", "forward", "backward", "decode"]
    toys = [c for c in cells.suite("toy") for _ in c.ops]
    for row, cell in zip(record["rows"], toys):
        assert row["cell"] == cell.name and row["fields"] == cell.fields and row["tags"] == list(cell.tags)
        assert not {"batch", "seq", "heads", "dim", "causal", "small"} & set(row)
        assert row["flops"] == cell.work[row["op"]].flops
        assert row["entrants"]["tessera"]["kernel"] and isinstance(row["entrants"]["tessera"]["config"], dict)
        assert set(row["entrants"]) >= {"tessera", "fa2", "math"}
        for result in row["entrants"].values():
            assert result["status"] == "ok" and len(result["samples_s"]) == 3
            assert result["p05_s"] <= result["median_s"] <= result["p95_s"]
            assert 0 < result["error_over_allowed"] <= 1
    assert ["tessera-det" in row["entrants"] for row in record["rows"]] == [False, True, False, True, False]
    assert record["rows"][4]["entrants"]["tessera"]["through"] == "decode"
    assert "tessera ran the decode" in answer.stdout and "TB/s, K and V once" in answer.stdout


@needs_library
def test_a_run_that_is_stopped_leaves_what_it_has_measured(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    measured = __main__.Run.cell

    def cell(self, one):
        if self.rows:
            raise KeyboardInterrupt
        measured(self, one)

    monkeypatch.setattr(__main__.Run, "cell", cell)
    file = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        __main__.main(["--device", "cpu", "--suite", "toy", "--peers", "math", "--rounds", "1", "--json", str(file),
                       "--library", LIBRARY])
    assert not file.exists()
    record = json.loads((tmp_path / "bench.json.partial").read_text())
    assert [row["op"] for row in record["rows"]] == ["forward", "backward"] and record["environment"]


@needs_library
def test_decode_falls_back_to_the_forward_and_says_so():
    torch = pytest.importorskip("torch")
    lib = library.Library(LIBRARY)
    refused = [{"kernel": "attention_decode", "reason": "not on this device"}]

    class NoDecode:
        """The library, refusing one op, as it does if no kernel serves it."""

        def __getattr__(self, name):
            return getattr(lib.lib, name)

        def tessera_attention_plan_create(self, op, *arguments):
            if op == library.DECODE:
                return library.UNSUPPORTED
            return lib.lib.tessera_attention_plan_create(op, *arguments)

    class Without(library.Library):
        def __init__(self):
            self.lib = NoDecode()

        def explain(self, op, args):
            real = super().explain(op, args)
            assert real["chosen"]["kernel"] and isinstance(real["refused"], list)
            return real | {"chosen": None, "refused": refused}

    cell = cells.suite("toy")[2]
    q, k, v = (torch.randn(s).bfloat16() for s in (cell.q_shape, cell.k_shape, cell.k_shape))
    through = [entrants.Tessera(cell, q, k, v, one) for one in (lib, Without())]
    assert [one.through for one in through] == ["decode", "forward"]
    assert through[1].refusal == "attention_decode: not on this device"
    assert torch.allclose(through[0].forward().float(), through[1].forward().float(), atol=0.02)


def test_decode_is_shown_with_its_losses_and_the_op_that_ran():
    entrant = {"status": "ok", "median_s": 2e-5, "graph_s": 1e-5, "host_s": 1e-6}
    row = row_of("d", {"tessera": entrant | {"through": "forward", "decode_refused": "refused: none"},
                       "fa2": entrant | {"median_s": 1e-5}}, op="decode", tags=["decode"], bytes=4e7)
    text = report.text_of({"entrants": ["tessera", "tessera-det", "fa2"], "rows": [row]})
    assert "tessera ran the forward: refused: none" in text
    assert "behind in 1 of 1" in text and "decode, fa2" in text
    assert [line.split() for line in text.splitlines() if line.startswith("d ")] == [
        ["d", "20.0", "10.0", "0.50"], ["d", "10.0", "/", "1", "10.0", "/", "1"], ["d", "2.00", "4.00"]]


def test_the_library_is_found_by_option_or_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSERA_LIBRARY", "/from/environment.so")
    assert str(library.find_library()) == "/from/environment.so"
    assert str(library.find_library("/given.so")) == "/given.so"
