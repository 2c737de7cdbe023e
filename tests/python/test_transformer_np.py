"""examples/transformer_np and `python -m tessera.bench --suite np`: each fused piece against fp64, and the training step."""

import argparse
import functools
import importlib
import json
import math
import pathlib
import sys

import pytest
import torch
from conftest import DEVICES

import reference
import tessera
from tessera.bench import transformer_np as bench

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "transformer_np"))
model, step, task, train = (importlib.import_module(name) for name in ("model", "step", "task", "train"))

PLAIN = model.Switches("sdpa-fa2", "pytorch", "pytorch", "pytorch")
TINY = model.Size(layers=2, heads=2, width=32, hidden=53, components=3)
CUDA = [DEVICES[1]]
CURVE_RATE = 1e-4  # rounding takes more than 40 steps to grow to what another seed does
LATE_DEVIATION = 0.046  # of the mean loss of steps 101 to 200, among seeds


def pieces():
    """Name -> (the function of a kind and its inputs, the plain kind, Tessera's kinds)."""
    torch.manual_seed(3)
    # More queries than keys, and fewer; k and v lie side by side.
    few = (torch.randn(2, 50, 4, 16), *torch.randn(2, 7, 2, 4, 16).unbind(2))
    many = (torch.randn(1, 70, 2, 64), *torch.randn(1, 65, 2, 2, 64).unbind(2))
    fused = ("tessera", "tessera-deterministic")
    rows, up, down = torch.randn(2, 37, 32), torch.randn(53, 32) / 6, torch.randn(32, 53) / 7
    heads = torch.randn(3, 53, 32) / 6, torch.randn(3, 3, 53) / 7
    nll = lambda kind, params, target: model.mixture_nll(kind, params, target.detach())  # noqa: E731
    return {
        "attention, few keys": (model.attend, few, "sdpa-fa2", fused),
        "attention, many keys": (model.attend, many, "sdpa-fa2", fused),
        "mlp": (model.mlp, (rows, up, down, torch.randn(2, 37, 32)), "pytorch", ("tessera",)),
        "heads": (model.mixture, (rows, *heads), "pytorch", ("tessera",)),
        "likelihood": (nll, (torch.randn(2, 37, 3, 3), torch.randn(2, 37)), "pytorch", ("tessera",)),
        "norm": (model.norm, (rows, torch.rand(32) + 0.5), "pytorch", ("tessera",)),
        "residual and norm": (model.add_norm, (rows, torch.randn(2, 37, 32), torch.rand(32) + 0.5), "pytorch", ("tessera",)),
    }


PIECES = pieces()
BROKEN = {"attention, few keys": "attention", "attention, many keys": "attention", "mlp": "mlp", "heads": "grouped_mlp",
          "likelihood": "gmm_nll", "residual and norm": "rms_norm"}


def with_gradients(function, kind, inputs, device, dtype):
    leaves = [t.to(device, dtype).requires_grad_() for t in inputs]
    outs = function(kind, *leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(4)
    ups = [torch.randn(o.shape).to(device, o.dtype) for o in outs]
    grads = torch.autograd.grad(outs, leaves, ups, allow_unused=True)
    return [t.detach().cpu() for t in (*outs, *grads) if t is not None]


def check_piece(name, kind, device, dtype):
    function, inputs, plain, _ = PIECES[name]
    inputs = [t.to(dtype) for t in inputs]
    exact = with_gradients(function, plain, inputs, "cpu", torch.float64)
    ours, theirs = (with_gradients(function, k, inputs, device, dtype) for k in (kind, plain))
    assert len(ours) == len(exact)
    for i, (got, right, usual) in enumerate(zip(ours, exact, theirs)):
        reference.assert_accurate(got, right, usual, f"{name}, {kind}, tensor {i}")


KINDS = [(name, kind) for name, piece in PIECES.items() for kind in piece[3]]


@pytest.mark.parametrize("name,kind", KINDS)
def test_piece_and_its_gradients_are_accurate(name, kind, device, dtype):
    check_piece(name, kind, device, dtype)


@pytest.mark.parametrize("name", PIECES)
def test_a_broken_piece_is_noticed(name, monkeypatch):
    owner, function = (model.Norm, "apply") if name == "norm" else (tessera, BROKEN[name])
    right = getattr(owner, function)

    def broken(*args, **options):
        out = right(*args, **options)
        return (out[0] * 1.001, out[1]) if isinstance(out, tuple) else out * 1.001

    monkeypatch.setattr(owner, function, broken)
    with pytest.raises(AssertionError, match="error"):
        check_piece(name, PIECES[name][3][0], "cpu", torch.float32)


@pytest.mark.parametrize("rows", [11, 1000])
def test_heads_and_likelihood_by_parts_are_accurate(rows, device, dtype, monkeypatch):
    monkeypatch.setattr(model, "HEAD_ROWS", rows)
    _, (x, up, down), _, _ = PIECES["heads"]
    target = torch.randn(2, 37)

    def loss(kind, *leaves):
        return model.mixture_loss(kind, *leaves, target.to(leaves[0].device, model.widened(leaves[0]).dtype))

    inputs = [t.to(dtype) for t in (x, up, down)]
    exact = with_gradients(loss, "pytorch", inputs, "cpu", torch.float64)
    ours, theirs = (with_gradients(loss, kind, inputs, device, dtype) for kind in ("tessera", "pytorch"))
    for i, found in enumerate(zip(ours, exact, theirs)):
        reference.assert_accurate(*found, f"tensor {i}")
    leaves = [t.to(device, dtype) for t in (x, up, down)]
    close = max(torch.finfo(dtype).eps, 1e-6)  # without a gradient, parameters may stay in fp32
    assert loss("tessera", *leaves).item() == pytest.approx(ours[0].item(), rel=close)


def test_deterministic_attention_repeats_its_bits(device, dtype):
    _, inputs, _, _ = PIECES["attention, few keys"]
    first, *others = (with_gradients(model.attend, "tessera-deterministic", inputs, device, dtype) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


def test_projection_leaves_k_and_v_in_place_and_has_the_plain_gradients():
    x, weight = torch.randn(3, 11, 16, dtype=torch.float64), torch.randn(48, 16, dtype=torch.float64)

    def plain(x, weight, context):
        q, k, v = torch.nn.functional.linear(x, weight).split(16, -1)
        return q, k[:, :context], v[:, :context]

    found = []
    for function in (model.Project.apply, plain):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        outs = function(*leaves, 4)
        torch.manual_seed(4)
        found.append((*outs, *torch.autograd.grad(outs, leaves, [torch.randn_like(o) for o in outs])))
    assert [t.shape for t in found[0]] == [t.shape for t in found[1]]
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*found))
    assert found[0][2].data_ptr() - found[0][1].data_ptr() == 16 * 8 and found[0][1].stride(1) == 32


def whole_gradients(switches, device, dtype, size=TINY, shape=(3, 8, 13)):
    torch.manual_seed(5)
    net = model.TransformerNP(size, switches).to(device, dtype)
    batch, context, target = shape
    x, y = (torch.randn(batch, context + target).to(device, torch.promote_types(dtype, torch.float32)) for _ in range(2))
    loss = net(x, y, context)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double().cpu() for p in net.parameters()])


@pytest.mark.parametrize(
    "switches",
    [dict(attention="tessera"), dict(attention="tessera-deterministic"), dict(mlp="tessera"), dict(mixture="tessera"),
     dict(norms="tessera"), {}, dict(checkpointing=True)],
    ids=lambda s: "+".join(map(str, s)) or "all",
)  # fmt: skip
def test_gradients_of_two_layers_are_as_good_as_plain_ones(switches, device):
    dtype = torch.bfloat16
    size = TINY if device == "cpu" else model.Size(layers=2)
    shape = (3, 8, 13) if device == "cpu" else (2, 64, 100)
    alone = vars(PLAIN) | switches if switches and "checkpointing" not in switches else vars(model.Switches()) | switches
    exact_loss, exact = whole_gradients(PLAIN, "cpu", torch.float64, size, shape)
    errors = []
    for of in (model.Switches(**alone), PLAIN):
        loss, grads = whole_gradients(of, device, dtype, size, shape)
        assert math.isclose(loss, exact_loss, rel_tol=0.01), (of, loss, exact_loss)
        errors.append(((grads - exact).norm() / exact.norm()).item())
    assert errors[0] <= 2 * errors[1], errors


def test_fp8_attention_has_gradients_near_those_of_bf16(device):
    size, shape = (TINY, (3, 8, 13)) if device == "cpu" else (model.Size(layers=2), (2, 64, 100))
    exact_loss, exact = whole_gradients(PLAIN, "cpu", torch.float64, size, shape)
    loss, grads = whole_gradients(model.Switches(attention="tessera-fp8"), device, torch.bfloat16, size, shape)
    assert math.isclose(loss, exact_loss, rel_tol=0.01), (loss, exact_loss)
    assert (grads - exact).norm() <= 0.1 * exact.norm()
    assert not torch.equal(grads, whole_gradients(model.Switches(), device, torch.bfloat16, size, shape)[1])


def test_checkpointing_changes_no_bit_and_runs_each_block_twice(monkeypatch):
    calls = []
    right = model.attend
    monkeypatch.setattr(model, "attend", lambda *args: calls.append(1) or right(*args))
    kept = whole_gradients(model.Switches(), "cpu", torch.float32)
    assert len(calls) == TINY.layers
    again = whole_gradients(model.Switches(checkpointing=True), "cpu", torch.float32)
    assert len(calls) == 3 * TINY.layers
    assert kept[0] == again[0] and torch.equal(kept[1], again[1])


def test_the_exact_loss_is_that_of_the_process():
    of = task.Task(context=6, target=5)
    x, y = of.batch(3, 7)
    total = 0.0
    for points, values in zip(x.double(), y.double()):
        for t in range(6, 11):
            at = torch.cat((points[:6], points[t : t + 1]))
            joint = torch.distributions.MultivariateNormal(torch.zeros(7, dtype=torch.float64), of.with_noise(at[None])[0])
            known = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=torch.float64), of.with_noise(at[None, :6])[0])
            total += (known.log_prob(values[:6]) - joint.log_prob(torch.cat((values[:6], values[t : t + 1])))).item()
    assert math.isclose(of.exact_nll(x, y), total / 15, rel_tol=1e-9)
    again = of.batch(3, 7)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1]) and not torch.equal(y, of.batch(3, 8)[1])


def test_a_batch_has_the_covariance_of_the_process():
    of = task.Task(context=2, target=0)
    x, y = of.batch(40_000, 1)
    expected = of.covariance(x[:, :1], x[:, 1:])[:, 0, 0]
    assert abs((y**2).mean().item() - 1 - of.noise**2) < 0.03
    assert abs((y[:, 0] * y[:, 1] - expected).mean().item()) < 0.02
    assert abs(((y[:, 0] * y[:, 1] - expected) * expected).mean().item()) < 0.02


ARGUMENTS = ["--device", "cpu", "--layers", "2", "--heads", "2", "--width", "32", "--hidden", "40", "--batch", "8",
             "--context", "12", "--target", "8"]  # fmt: skip


def test_training_lowers_the_loss_and_draws_its_curve(tmp_path, capsys):
    assert train.main([*ARGUMENTS, "--steps", "60", "--lr", "5e-3", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    before, after = (float(t) for t in said.split("held out: loss ")[1].split(" in ")[0].split(" -> "))
    assert after < before - 0.15, said
    assert "gradient norm" in said and "tokens/s" in said and "exact" in said
    curve = (tmp_path / "curve.svg").read_text()
    assert curve.startswith("<svg") and "polyline" in curve
    rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert rows[0] == "step,loss,gradient_norm" and len(rows) == 61


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(dtype, device, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["--device", device, "--attention", "tessera-deterministic"]
    if device == "cuda":
        dtype = dtype if dtype != "fp32" else "bf16"
        more += ["--graph"] * (dtype == "bf16")
    arguments = [*ARGUMENTS, *more, "--steps", "6", "--dtype", dtype, "--out"]
    assert train.main([*arguments, str(whole)]) == 0
    right = task.Task.batch

    def interrupted(self, functions, seed, device="cpu"):
        if seed == 3:
            raise KeyboardInterrupt
        return right(self, functions, seed, device)

    monkeypatch.setattr(train.Task, "batch", interrupted)
    assert train.main([*arguments, str(parts)]) == 130
    monkeypatch.setattr(train.Task, "batch", right)
    assert train.main([*arguments, str(parts), "--resume"]) == 0
    assert "interrupted after step 3" in capsys.readouterr().out
    first, second = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, parts))
    assert first["curve"] == second["curve"] and len(first["curve"]) == 6
    assert first["state"]["scaler"] == second["state"]["scaler"]
    for name, tensor in first["state"]["parameters"].items():
        assert torch.equal(tensor, second["state"]["parameters"][name]), name
    for one, other in zip(first["state"]["moments"], second["state"]["moments"]):
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_run_without_steps_has_no_picture(tmp_path, monkeypatch):
    assert train.main([*ARGUMENTS, "--steps", "0", "--out", str(tmp_path / "none")]) == 0

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Step, "__call__", interrupted)
    assert train.main([*ARGUMENTS, "--steps", "2", "--out", str(tmp_path / "interrupted")]) == 130
    for folder in ("none", "interrupted"):
        assert (tmp_path / folder / "checkpoint.pt").exists() and not (tmp_path / folder / "curve.svg").exists()


def test_data_depends_on_the_seed_and_the_step_and_not_on_how_many_there_are(monkeypatch):
    right, drawn = task.Task.batch, {}

    def batch(self, functions, seed, device="cpu"):
        x, y = right(self, functions, seed, device)
        drawn[run].setdefault(seed >= train.HELD_OUT, []).append(tuple(y.flatten().tolist()))
        return x, y

    monkeypatch.setattr(train.Task, "batch", batch)
    for run in ((0, 2), (0, 3), (255, 2)):
        drawn[run] = {}
        assert train.main([*ARGUMENTS, "--seed", str(run[0]), "--steps", str(run[1])]) == 0
    assert drawn[0, 2][False] == drawn[0, 3][False][:2]
    held_out = set(drawn[0, 2][True])
    assert held_out == set(drawn[255, 2][True])
    trained = [set(drawn[run][False]) for run in ((0, 3), (255, 2))]
    assert not trained[0] & trained[1] and not held_out & (trained[0] | trained[1])


def test_the_trainer_refuses_what_it_cannot_do(tmp_path, capsys):
    for wrong, said in ((["--resume"], "--resume needs --out"), (["--graph"], "--graph needs a CUDA device"),
                        (["--width", "24"], "multiple of 8"), (["--seed", "256"], "0 to 255 are accepted")):  # fmt: skip
        with pytest.raises(SystemExit):
            train.main([*ARGUMENTS, *wrong])
        assert said in capsys.readouterr().err
    assert train.main([*ARGUMENTS, "--steps", "1", "--out", str(tmp_path)]) == 0
    assert train.main([*ARGUMENTS, "--layers", "1", "--out", str(tmp_path), "--resume"]) == 2
    assert "the checkpoint's model" in capsys.readouterr().err
    with pytest.raises(ValueError, match="attention is 'none'"):
        model.Switches(attention="none")


def test_an_overflowing_fp16_step_changes_only_the_scale():
    torch.manual_seed(0)
    one = step.Step(model.TransformerNP(TINY, model.Switches()), "cpu", torch.float16, 1e-3)
    x, y = torch.randn(2, 20), torch.randn(2, 20)
    one(x, y, 8)
    before, scale = one.state(), one.scaler.get_scale()
    one(x, y * 1e30, 8)
    after = one.state()
    assert one.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before["parameters"].values(), after["parameters"].values()))


def tiny_bench():
    return bench.Bench(ROOT / "examples" / "transformer_np", "cpu", torch.bfloat16, TINY, {"small": (2, 8, 12)})


def test_bench_rows_have_figures_and_a_wrong_one_is_marked(monkeypatch):
    harness = tiny_bench()
    cases = [harness.row("small", name, 1, 1) for name in ("sdpa-cudnn", "all", "all+fp8")]
    for case in bench.finish(cases):
        assert case["median_s"] > 0 and case["fields"]["speedup"] > 0 and set(case["stages_s"]) == set(bench.STAGES)
    assert bench.table(cases).count("\n|") == 5
    refused = harness.row("small", "all+graph", 1, 1)
    assert "needs a CUDA device" in refused["refused"] and "CUDA device" in bench.table([refused])
    right = tessera.gmm_nll
    monkeypatch.setattr(tessera, "gmm_nll", lambda *args: right(*args) * 1.05)
    assert "the first loss" in harness.row("small", "all", 1, 1)["wrong"]


def test_bench_names_its_rows_and_needs_the_example(tmp_path, capsys, monkeypatch):
    assert bench.cells("small/all$") == [("small", "all")]
    assert len(bench.cells("large/")) == 5 and len(bench.cells("")) == 2 * len(bench.ROWS) + 5
    assert bench.find_example(tmp_path) is None
    options = argparse.Namespace(example=str(tmp_path), filter="", dtype="bf16", device="cpu", rounds=1, json=None)
    assert bench.main(options, {}, dict) == 3 and "--example" in capsys.readouterr().err
    options.example, options.filter = str(ROOT / "examples" / "transformer_np"), "tiny/"
    assert bench.main(options, {}, dict) == 2 and "no row" in capsys.readouterr().err


@pytest.mark.parametrize("device", CUDA)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_replayed_step_has_the_bits_of_an_eager_one(dtype, checkpointing, device):
    switches = model.Switches("tessera-deterministic", checkpointing=checkpointing)
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        one = step.Step(model.TransformerNP(model.Size(layers=2), switches), device, dtype, 1e-3, graph=graph)
        of = task.Task(64, 100)
        results = [one(*of.batch(4, seed, device), 64, 1e-3 / (1 + seed)) for seed in range(4)]
        found.append([t for pair in results for t in pair] + one.masters)
    assert all(torch.equal(a, b) for a, b in zip(*found))


@functools.cache
def curve_batches(device, steps=200):
    return [task.Task(64, 500).batch(16, at, device) for at in range(steps)]


def smoothed_curve(row, seed, device, rate=CURVE_RATE):
    """Losses of the benchmark's first steps on small, with 16 functions instead of 64, as means of ten steps each."""
    switches = {name: value for name, value in bench.ROWS[row].items() if name != "graph"}
    torch.manual_seed(seed)
    with torch.device(device):
        net = model.TransformerNP(switches=model.Switches(**switches))
    one = step.Step(net, device, torch.bfloat16, rate, graph=True)
    losses = [one(*batch, 64, rate * min(1, (at + 1) / 100))[0] for at, batch in enumerate(curve_batches(device))]
    return torch.stack(losses).float().cpu().unflatten(0, (-1, 10)).mean(1)


def distance(a, b):
    return (a - b).square().mean().sqrt().item()


def unlike(curve, seeds):
    """What tells a curve from the baseline's, if anything does. It has the first one's seed.

    Its first 40 steps must be nearly those, because rounding takes longer to grow to what another seed does. Then only
    the loss that it reaches means something.
    """
    early, late = slice(4), slice(10, 20)
    noise = max(distance(a[early], b[early]) for a in seeds for b in seeds)
    apart = distance(curve[early], seeds[0][early])
    higher = curve[late].mean().item() - sum(c[late].mean().item() for c in seeds) / len(seeds)
    allowed = 5 * LATE_DEVIATION * math.sqrt(1 + 1 / len(seeds))
    print(f"{apart:.4f} from the baseline early, {noise:.4f} between seeds; {higher:+.4f} late, {allowed:.4f} allowed")
    return [name for name, found in (("early", apart > noise / 4), ("late", abs(higher) > allowed)) if found]


def test_recorded_curves_of_a_broken_forward_are_told_from_those_of_seeds():
    recorded = json.loads((ROOT / "results" / "h200" / "loss_curves.json").read_text())
    plain, fp8, broken = (torch.tensor(recorded[row]) for row in ("sdpa-cudnn", "attention-fp8", "forgets_the_scale_of_q"))
    for seed in range(8):
        seeds = plain.roll(-seed, 0)[:3]
        assert not unlike(fp8[seed], seeds)
        if seed < len(broken):
            assert unlike(broken[seed], seeds) == ["early", "late"]
    assert plain[:, 10:].mean(1).var() + fp8[:, 10:].mean(1).var() <= 2 * LATE_DEVIATION**2


@pytest.mark.parametrize("device", CUDA)
def test_loss_curves_of_all_rows_are_within_the_noise_of_seeds(device):
    seeds = [smoothed_curve(bench.BASELINE, seed, device) for seed in range(3)]
    assert all(curve[-1] < curve[0] - 0.3 for curve in seeds), "they learn"
    rows = [row for row in bench.ROWS if not {"graph", "compile"} & bench.ROWS[row].keys() and row != bench.BASELINE]
    found = {}
    for row in rows:
        print(f"{row}:", end=" ")
        found[row] = unlike(smoothed_curve(row, 0, device), seeds)
    assert not any(found.values()), found
