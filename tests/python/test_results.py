"""scripts/collect_results.py: the output of a GPU machine becomes the committed results."""

import importlib.util
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("collect_results", ROOT / "scripts" / "collect_results.py")
collect_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(collect_results)


def verify_report(cases):
    return {"date": "2026-01-02", "version": "0.1.0", "suite": "full", "device": "cuda:0", "arch_code": "native",
            "seed": 1, "repeat": 1, "passed": 1, "failed": 1, "refused": 2, "worst_error_over_allowed": 1.5,
            "worst_case": "b", "seconds": 3.0, "cases": cases}


def test_cases_are_kept_with_their_errors_and_refusals_by_reason(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results" / "gpu"
    out.mkdir()
    (out / "verify_full_native.json").write_text(json.dumps(verify_report([
        {"name": "a", "outcome": "passed", "error_over_allowed": 0.123456},
        {"name": "b", "outcome": "failed", "error_over_allowed": 1.5, "detail": "dq: off"},
        {"name": "c", "outcome": "refused", "detail": "no fp32"},
        {"name": "d", "outcome": "refused", "detail": "no fp32"}])))
    (out / "doctor.json").write_text(json.dumps({"version": "0.1.0", "nvrtc": {"path": "/home/x", "places": [1]}}))
    (out / "sanitizer_memcheck.txt").write_text("sanitize on cuda: 23 passed, 0 failed\n========= ERROR SUMMARY: 0 errors\n")
    (out / "racecheck_sources.txt").write_text("a.cuh: bar.arrive is bar.sync\n")
    collect_results.collect(out, results)
    suite = json.loads((results / "verify.json").read_text())["full_native"]
    assert suite["cases"] == {"a": 0.1235, "b": {"failed": "dq: off", "error": 1.5}}
    assert suite["refusals"] == {"no fp32": 2}
    assert "/home" not in (results / "doctor.json").read_text()
    said = (results / "sanitizer.txt").read_text()
    assert "memcheck: ERROR SUMMARY: 0 errors; sanitize on cuda: 23 passed" in said
    assert "a.cuh: bar.arrive is bar.sync" in said


def test_a_run_for_several_architectures_is_a_suite_for_each(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    older = verify_report([{"name": "a", "outcome": "passed", "error_over_allowed": 0.5}]) | {"arch_code": "sm_75"}
    (out / "verify_full.json").write_text(json.dumps([verify_report([]), older]))
    collect_results.collect(out, results)
    kept = json.loads((results / "verify.json").read_text())
    assert set(kept) == {"full_native", "full_sm_75"}
    assert kept["full_sm_75"]["cases"] == {"a": 0.5}


def test_random_problems_that_were_drawn_side_by_side_are_added_up(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    for n in (1, 2):
        run = dict.fromkeys(("date", "version", "device", "arch_code"), "x")
        run |= {"problems": 10 * n, "failed": n - 1, "refused": 1, "passed_over": 2, "instances": 3, "first_seed": n,
                "last_seed": n + 5, "seconds": n, "failures": ["a"] * (n - 1),
                "kernels": {"k": {"problems": 10 * n, "worst_ratio": 0.1 * n}}}
        (out / f"fuzz_{n}.json").write_text(json.dumps(run))
    collect_results.collect(out, results)
    kept = json.loads((results / "fuzz.json").read_text())
    assert (kept["problems"], kept["failed"], kept["failures"]) == (30, 1, ["a"])
    assert kept["seeds"] == [[1, 6], [2, 7]]
    assert kept["kernels"] == {"k": {"problems": 30, "worst_ratio": 0.2}}


def test_what_was_not_measured_again_stays(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    results.mkdir()
    (results / "verify.json").write_text(json.dumps({"hostile": {"cases": {"x": 0.5}}, "old": {"cases": []}}))
    (out / "verify_long.json").write_text(json.dumps(verify_report([])))
    collect_results.collect(out, results)
    kept = json.loads((results / "verify.json").read_text())
    assert set(kept) == {"hostile", "long"}
    assert kept["hostile"]["cases"] == {"x": 0.5}


def test_rows_keep_their_family_fields_and_tags(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    row = {"family": "moe", "op": "grouped", "cell": "bf16/e8", "tags": ["table"],
           "fields": {"dtype": "bf16", "experts": 8, "path": "sorted", "cache": True},
           "flops": 1e9, "entrants": {"tessera": {"status": "ok", "median_s": 1e-5}}}
    case = {"name": "moe/e8", "family": "moe", "op": "moe_grouped", "fields": {"experts": 8, "file": 1}, "median_s": 1e-5}
    (out / "peers.json").write_text(json.dumps({"environment": {"library": "/home/x"}, "rows": [row]}))
    (out / "bench.json").write_text(json.dumps({"date": "2026-01-02", "cases": [case]}))
    (out / "evidence.json").write_text(json.dumps({"date": "2026-01-02", "cases": [case]}))
    for name in ("training", "products"):
        (out / f"{name}.json").write_text(json.dumps({"suite": "np", "cases": [case]}))
    collect_results.collect(out, results)
    assert json.loads((results / "peers.json").read_text()) == {"environment": {}, "rows": [row]}
    for name in ("bench", "evidence", "training", "products"):
        assert json.loads((results / f"{name}.json").read_text())["cases"] == [case]


def test_rows_of_products_that_were_not_measured_again_stay(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    out.mkdir()
    results.mkdir()
    (results / "products.json").write_text(json.dumps({"cases": [{"name": name, "date": 1} for name in "abc"]}))
    (out / "products.json").write_text(json.dumps({"cases": [{"name": name, "date": 2} for name in "db"]}))
    collect_results.collect(out, results)
    kept = json.loads((results / "products.json").read_text())["cases"]
    assert [(case["name"], case["date"]) for case in kept] == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]


def test_each_row_has_a_line():
    text = collect_results.dump({"rows": [{"a": 1}, {"a": 2}], "facts": {"b": 3}})
    assert json.loads(text) == {"rows": [{"a": 1}, {"a": 2}], "facts": {"b": 3}}
    assert ' {"a": 1},\n' in text
