"""Training steps of a transformer neural process, with each fused piece switched on alone and together.

The model is examples/transformer_np's, so a source checkout is needed. Every row of a shape has the same model, data and
seed, and its first loss must agree with that of the first row that ran.
"""

import contextlib
import gc
import json
import pathlib
import statistics
import sys
import time

SHAPES = {"small": (64, 64, 500), "mid": (4, 10_000, 1_000), "large": (1, 200_000, 5_000)}  # B, M, N
PLAIN = dict(attention="sdpa-cudnn", mlp="pytorch", mixture="pytorch", norms="pytorch")
BASELINE = "sdpa-cudnn"
# Name -> switches; graph is the step's, the others are the model's.
ROWS = {
    "sdpa-fa2": PLAIN | dict(attention="sdpa-fa2"),
    "sdpa-cudnn": PLAIN,
    "sdpa-cudnn+compile": PLAIN | dict(compile=True),
    "sdpa-cudnn+graph": PLAIN | dict(graph=True),
    "sdpa-cudnn+checkpointing": PLAIN | dict(checkpointing=True),
    "attention": PLAIN | dict(attention="tessera"),
    "attention-deterministic": PLAIN | dict(attention="tessera-deterministic"),
    "attention-fp8": PLAIN | dict(attention="tessera-fp8"),
    "mlp": PLAIN | dict(mlp="tessera"),
    "mixture": PLAIN | dict(mixture="tessera"),
    "norms": PLAIN | dict(norms="tessera"),
    "all": {},
    "all+deterministic": dict(attention="tessera-deterministic"),
    "all+fp8": dict(attention="tessera-fp8"),
    "all+compile": dict(compile=True),
    "all+checkpointing": dict(checkpointing=True),
    "all+graph": dict(graph=True),
    "all+checkpointing+graph": dict(checkpointing=True, graph=True),
}
LARGE = ("sdpa-cudnn", "all", "all+fp8", "all+checkpointing", "all+graph")
STAGES = ("attention", "projections", "mlp", "norms", "heads", "loss", "optimizer")
LOSS_AGREEMENT = 0.01  # of the first loss: bf16 rounds it to 0.4 %


def find_example(given=None):
    """The folder with the model: the one given, or that of the checkout around this file or the working directory."""
    places = [pathlib.Path(given)] if given else [
        base / "examples" / "transformer_np" for base in (pathlib.Path(__file__).resolve().parents[3], pathlib.Path.cwd())
    ]
    return next((place for place in places if (place / "model.py").is_file()), None)


@contextlib.contextmanager
def importing_from(folder):
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def cells(text):
    """(shape, row) of every cell whose name, "shape/row", contains the text; "small/all$" means that one alone."""
    names = [(shape, row) for shape in SHAPES for row in (ROWS if shape != "large" else LARGE)]
    if text.endswith("$"):
        return [cell for cell in names if "/".join(cell) == text[:-1]]
    return [cell for cell in names if text in "/".join(cell)]


class Bench:
    def __init__(self, folder, device, dtype, size=None, shapes=SHAPES):
        import torch

        with importing_from(folder):
            import model
            import step
        self.torch, self.model, self.step = torch, model, step
        self.device, self.dtype, self.shapes = device, dtype, shapes
        self.size = size or model.Size()
        self.first_loss, self.stage_times = {}, {}

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def clear(self):
        gc.collect()
        if self.device == "cuda":
            self.torch._C._cuda_clearCublasWorkspaces()  # one per stream that was used; they count as allocated
            self.torch.cuda.empty_cache()

    def boundaries(self, run, count):
        """Seconds of each of `count` calls in a row. The host does not wait in between."""
        if self.device != "cuda":
            times = [time.perf_counter()]
            for _ in range(count):
                run()
                times.append(time.perf_counter())
            return [after - before for before, after in zip(times, times[1:])]
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.wait()
        return [before.elapsed_time(after) * 1e-3 for before, after in zip(events, events[1:])]

    def row(self, shape, name, steps, warm_up):
        """One case of the record."""
        torch = self.torch
        batch, context, target = self.shapes[shape]
        case = {"family": "transformer_np", "op": "step", "name": f"{shape}/{name}",
                "fields": {"shape": shape, "batch": batch, "context": context, "target": target}, "tags": [shape]}
        switches = dict(ROWS[name])
        graph = switches.pop("graph", False)
        begin = time.monotonic()
        step = net = None
        self.clear()
        try:
            torch.manual_seed(1)
            with torch.device(self.device):
                net = self.model.TransformerNP(self.size, self.model.Switches(**switches))
            x, y = (torch.randn(batch, context + target, device=self.device) for _ in range(2))
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step = self.step.Step(net, self.device, self.dtype, 1e-4, graph=graph)
            loss = step(x, y, context)[0].item()
            for _ in range(warm_up - 1):
                step(x, y, context)
            self.wait()
            case["prepared_s"] = time.monotonic() - begin
            samples = self.boundaries(lambda: step(x, y, context), steps)
        except Exception as problem:  # what does not fit or compile is a row that says so
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            case["refused"] = f"{type(problem).__name__}: {first[:160]}"
            return case
        finally:
            del step, net
            if "compile" in name:
                torch.compiler.reset()
            self.clear()
        case["loss"] = loss
        expected = self.first_loss.setdefault(shape, loss)
        if not abs(loss - expected) <= LOSS_AGREEMENT * max(1.0, abs(expected)):
            case["wrong"] = f"the first loss is {loss:.5f}, that of the first row {expected:.5f}"
            return case
        ordered = sorted(samples)
        case |= {"median_s": statistics.median(ordered), "p05_s": ordered[0], "p95_s": ordered[-1], "samples_s": samples}
        case["fields"]["tokens_per_s"] = round(batch * (context + target) / case["median_s"])
        if self.device == "cuda":
            case["fields"]["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        case["stages_s"] = self.stages(shape, switches)
        return case

    def stages(self, shape, switches):
        """Seconds of each stage of a step, forward and backward, run by itself and summed over the layers."""
        m, size = self.model, self.size
        kinds = m.Switches(**switches)
        batch, context, target = self.shapes[shape]
        rows, components, F = context + target, size.components, self.torch.nn.functional

        def tensor(*dims):
            return self.torch.randn(dims, device=self.device).mul_(0.1).to(self.dtype).requires_grad_()

        def attention():
            q, kv = tensor(batch, rows, size.width), tensor(batch, context, 2 * size.width)
            q, k, v = (t.unflatten(-1, (size.heads, -1)).detach().requires_grad_() for t in (q, *kv.split(size.width, -1)))
            return lambda: m.attend(kinds.attention, q, k, v), (q, k, v)

        def projections():
            x, qkv, out = tensor(batch, rows, size.width), tensor(3 * size.width, size.width), tensor(size.width, size.width)
            return lambda: (*m.Project.apply(x, qkv, context), F.linear(x, out)), (x, qkv, out)

        def mlp():
            of = (tensor(batch, rows, size.width), tensor(size.hidden, size.width), tensor(size.width, size.hidden),
                  tensor(batch, rows, size.width))
            return lambda: m.mlp(kinds.mlp, *of), of

        def norms():
            x, residual, weight = tensor(batch, rows, size.width), tensor(batch, rows, size.width), tensor(size.width)
            # Both of a layer's.
            return (lambda: (*m.norm(kinds.norms, x, weight), *m.add_norm(kinds.norms, x, residual, weight)),
                    (x, residual, weight))

        def heads():
            of = (tensor(batch, target, size.width), tensor(components, size.hidden, size.width),
                  tensor(components, 3, size.hidden))
            return lambda: m.mixture(kinds.mixture, *of), of

        def loss():
            params, wanted = tensor(batch, target, components, 3), self.torch.randn(batch, target, device=self.device)
            return lambda: m.mixture_nll(kinds.mixture, params, wanted), (params,)

        counts = dict.fromkeys(("attention", "projections", "mlp", "norms"), size.layers)
        found = {}
        for stage in (attention, projections, mlp, norms, heads, loss):
            name = stage.__name__
            kind = getattr(kinds, {"heads": "mixture", "loss": "mixture"}.get(name, name), "")
            key = (shape, name, kind)
            if key not in self.stage_times:
                self.stage_times[key] = self.stage_time(stage, 1 if shape == "large" else 5)
            found[name] = self.stage_times[key] * counts.get(name, 1)
        if "optimizer" not in self.stage_times:
            self.stage_times["optimizer"] = self.optimizer_time()
        return found | {"optimizer": self.stage_times["optimizer"]}

    def stage_time(self, stage, repeats):
        function, of = stage()

        def both():
            out = function()
            outs = out if isinstance(out, tuple) else (out,)
            self.torch.autograd.grad(outs, of, [o.detach() for o in outs])

        return self.replayed(both, repeats)

    def optimizer_time(self):
        """Copies between fp32 and the model's type, clipping and AdamW, of the whole model."""
        with self.torch.device(self.device):
            step = self.step.Step(self.model.TransformerNP(self.size), self.device, self.dtype, 1e-4)
        for p in (*step.given, *step.masters):
            p.grad = self.torch.zeros_like(p)

        def both():
            with self.torch.no_grad():
                self.torch._foreach_copy_(step.given, step.masters)
                self.torch._foreach_copy_([p.grad for p in step.masters], [p.grad for p in step.given])
            step._update()

        return self.replayed(both)

    def replayed(self, call, repeats=5):
        """Seconds of a call, on a GPU replayed from a graph: the host is slower than the short stages."""
        torch = self.torch
        if self.device != "cuda":
            call()
            return statistics.median(self.boundaries(call, 2))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        return statistics.median(self.boundaries(graph.replay, repeats))


def finish(cases):
    """Speedups over the baseline of the same shape, beside the other fields."""
    base = {c["fields"]["shape"]: c["median_s"] for c in cases if "median_s" in c and c["name"].endswith(f"/{BASELINE}")}
    for case in cases:
        if "median_s" in case and case["fields"]["shape"] in base:
            case["fields"]["speedup"] = round(base[case["fields"]["shape"]] / case["median_s"], 2)
        for stage, seconds in case.get("stages_s", {}).items():
            case["fields"][f"{stage}_ms"] = round(seconds * 1e3, 3)
    return cases


def table(cases):
    """The cases as Markdown, one table per shape."""
    out = []
    for shape in dict.fromkeys(c["fields"]["shape"] for c in cases):
        mine = [c for c in cases if c["fields"]["shape"] == shape]
        f = mine[0]["fields"]
        out += [f"{shape}: B={f['batch']}, M={f['context']:,}, N={f['target']:,}", "",
                "| row | step ms | tokens/s | peak GB | speedup | " + " | ".join(STAGES) + " |",
                "|---" * (5 + len(STAGES)) + "|"]
        for case in mine:
            name, f = case["name"].split("/", 1)[1], case["fields"]
            if "median_s" not in case:
                out.append(f"| {name} | {case.get('refused') or case['wrong']} " + "| " * (3 + len(STAGES)) + "|")
                continue
            timed = case.get("stages_s", {})
            stages = " | ".join(f"{timed[s] * 1e3:.2f}" if s in timed else "-" for s in STAGES)
            out.append(f"| {name} | {case['median_s'] * 1e3:.2f} | {f['tokens_per_s']:,} | {f.get('peak_GB', '-')} | "
                       f"{f.get('speedup', '-')} | {stages} |")
        out.append("")
    return "\n".join(out)


def main(options, environment, state):
    """Runs the cells that the options name; returns an exit code."""
    import torch

    folder = find_example(options.example)
    if folder is None:
        print("error: --suite np trains examples/transformer_np: run it in a checkout of the source, or name that folder "
              "with --example", file=sys.stderr)
        return 3
    chosen = [cell for part in options.filter.split(",") for cell in cells(part)]
    if not chosen:
        print(f"error: no row has '{options.filter}' in its name: SHAPE/ROW, with SHAPE {', '.join(SHAPES)} and ROW "
              f"{', '.join(ROWS)}", file=sys.stderr)
        return 2
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    bench = Bench(folder, options.device, dtype)
    record = {"environment": environment, "suite": "np", "dtype": options.dtype, "gpu_before": state(), "cases": []}
    begin = time.monotonic()
    for shape, name in dict.fromkeys(chosen):
        few = shape == "large"
        case = bench.row(shape, name, min(options.rounds, 3) if few else min(options.rounds, 10), 1 if few else 3)
        record["cases"].append(case)
        said = f"{case['median_s'] * 1e3:.2f} ms" if "median_s" in case else case.get("refused") or case["wrong"]
        print(f"{case['name']:<32} {said}   [{time.monotonic() - begin:.0f} s]", file=sys.stderr, flush=True)
        if options.json:  # after each row, so that a run that is cut short leaves what it has
            pathlib.Path(options.json).write_text(json.dumps(record | {"cases": finish(record["cases"])}, indent=1) + "\n")
    record["gpu_after"], record["seconds"] = state(), time.monotonic() - begin
    print(table(finish(record["cases"])))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any("wrong" in case for case in record["cases"]) else 0
