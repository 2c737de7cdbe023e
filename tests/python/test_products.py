"""`python -m tessera.bench --suite products`: every row runs, and a wrong result is told."""

import argparse
import json
import pathlib

import pytest
import torch

from tessera.bench import product_rows
from tessera.bench import products as bench
from tessera.bench.__main__ import main as bench_main

TINY = product_rows.Sizes(16, 24, 16, 13, 16, (8, 16, 24), (12, 3), ((10, 4, 2, 16, 24), (12, 5, 3, 16, 24)), (8, 16, 40), (6, 32), (5, 2, 16))


def made(dtype=torch.float32):
    return bench.Bench("cpu", dtype, TINY)


def test_every_row_runs_and_agrees_where_it_is_compared():
    cases = [made().measured(row, 1) for row in made().rows()]
    assert len({case["name"] for case in cases}) == len(cases) > 20
    for case in cases:
        assert "wrong" not in case and "refused" not in case, case
        assert "tessera" in case["entrants"] and any(name.startswith("pytorch") for name in case["entrants"])
    text = bench.table(cases)
    assert text.count("\n") == len(cases) + 1 and "moe/forward+backward" in text


def test_every_gradient_is_compared():
    one = made()
    values = torch.ones(3), torch.ones(3), torch.ones(2)
    assert one.distance(values, values, 3) == 0
    assert one.distance((values[0], values[1], values[2] * 1.1), values, 3) == pytest.approx(0.1)
    assert one.distance((values[0], values[1] * 1.1), values) == 0
    assert not one.distance((values[0], values[1] * float("nan"), values[2]), values, 3) <= product_rows.AGREEMENT
    rows = {row.name.split("/")[0] + "/" + row.name.split("/")[1]: row for row in one.rows()}
    assert rows["layer_norm+residual/backward"].compared == 3
    assert rows["gmm_nll/forward+backward"].compared == 2


@pytest.mark.parametrize("name", ("linear", "gemm", "mlp", "moe", "rms_norm"))
def test_a_wrong_result_is_told(name, monkeypatch):
    one = made()
    real = getattr(one.tessera, name)
    monkeypatch.setattr(one.tessera, name, lambda *args, **options: real(*args, **options) * 1.1)
    rows = {"linear": "gemm/", "gemm": "product/dup", "mlp": "mlp/forward/", "moe": "moe/forward/", "rms_norm": "rms_norm/forward"}
    row = next(row for row in one.rows() if row.name.startswith(rows[name]))
    assert "differs from PyTorch's" in one.measured(row, 1)["wrong"]


def test_what_does_not_run_is_a_row_that_says_so():
    def fails():
        raise RuntimeError("no such thing\nmore")

    case = made().measured(product_rows.Row("row", "us", 1, fails), 1)
    assert case["refused"] == "RuntimeError: no such thing" and "no such thing" in bench.table([case])


def test_main_writes_what_the_filter_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.SIZES, "cpu", TINY)
    options = argparse.Namespace(device="cpu", dtype="fp32", filter="gmm,rotary", rounds=1, peers=None, resume=False,
                                 json=str(tmp_path / "p.json"))
    assert bench.main(options, {}, dict) == 0
    record = json.loads((tmp_path / "p.json").read_text())
    assert [case["name"] for case in record["cases"]] == ["gmm_nll/forward/12x3", "gmm_nll/forward+backward/12x3",
                                                          "rotary/5x2x16"]
    assert "rotary/5x2x16" in capsys.readouterr().out

    options.filter, options.resume = "rms_norm/forward", True
    assert bench.main(options, {}, dict) == 0
    resumed = json.loads((tmp_path / "p.json").read_text())["cases"]
    assert [case["name"] for case in resumed][2:] == ["rms_norm/forward/6x32", "rotary/5x2x16"]
    assert [case for case in resumed if case["name"] != "rms_norm/forward/6x32"] == record["cases"]

    monkeypatch.setattr(bench, "library_hash", lambda: "of another library")
    assert bench.main(options, {}, dict) == 0
    assert [case["name"] for case in json.loads((tmp_path / "p.json").read_text())["cases"]] == ["rms_norm/forward/6x32"]
    options.filter = "no such row"
    assert bench.main(options, {}, dict) == 2


def test_the_docs_have_the_table_of_the_results():
    root = pathlib.Path(__file__).resolve().parents[2]
    cases = json.loads((root / "results" / "h200" / "products.json").read_text())["cases"]
    assert bench.table(cases) in (root / "docs" / "products.md").read_text()


def test_a_command_writes_the_table_of_the_results_into_the_page(tmp_path):
    root = pathlib.Path(__file__).resolve().parents[2]
    results, page = root / "results" / "h200" / "products.json", tmp_path / "products.md"
    text = (root / "docs" / "products.md").read_text()
    page.write_text(text.replace("| TFLOP/s |", "| an older unit |", 3))
    assert bench_main(["--table", str(results), str(page)]) == 0
    assert page.read_text() == text
    page.write_text("No table here.")
    assert bench_main(["--table", str(results), str(page)]) == 2 and page.read_text() == "No table here."


def test_another_library_that_fails_or_differs_is_left_out_of_its_row():
    one = bench.Bench("cpu", torch.float32, TINY, peers=("quack", "liger"))

    def fails():
        raise ImportError("no module of that name")

    def make():
        x = torch.ones(3)
        return {"tessera": lambda: x, "pytorch": lambda: x, "pytorch compiled": fails, "quack": fails, "liger": lambda: 1.1 * x,
                "pytorch 1376": lambda: 2 * x, "tessera 1376": lambda: 2 * x, "quack 1376": lambda: torch.ones(4)}

    case = one.measured(product_rows.Row("row", "us", 1, make), 1)
    assert list(case["entrants"]) == ["tessera", "pytorch", "pytorch 1376", "tessera 1376"]
    assert case["left_out"]["quack"] == "ImportError: no module of that name"
    assert case["left_out"]["liger"].startswith("differs from PyTorch's by 0.1")
    assert "size" in case["left_out"]["quack 1376"]  # another shape
    assert "pytorch compiled" not in case["left_out"]  # which was not asked for
    assert "quack left out, liger left out, quack 1376 left out" in bench.table([case])


def test_a_compiled_row_agrees():
    one = bench.Bench("cpu", torch.float32, TINY, peers=("compiled",))
    row = next(row for row in one.rows() if row.name.startswith("rms_norm+residual/backward"))
    case = one.measured(row, 1)
    assert "pytorch compiled" in case["entrants"], case


def test_peers_that_do_not_exist_are_refused(capsys):
    options = argparse.Namespace(device="cpu", dtype="fp32", filter="", rounds=1, peers="fa2", resume=False, json=None)
    assert bench.main(options, {}, dict) == 2
    assert "--peers has 'fa2'" in capsys.readouterr().err
