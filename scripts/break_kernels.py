#!/usr/bin/env python3
"""Mutation tests: break kernels on purpose, one change at a time, and show that `tessera verify` and the benchmarks
catch it.

For each mutation, a copy of kernels/ is changed, the library compiles from it (TESSERA_KERNEL_SOURCES), and the checks
that should catch it run: verify's suites, `tessera bench --check`, a GPU test for what only many calls show, and
`python -m tessera.bench` if this Python has a PyTorch that sees the GPU. Races that an idle GPU hides are looked for with
late warps (delayed_sources.py), which unchanged kernels must survive. On an emulated GPU (emulated_gpu.sh), whose times mean
nothing and which shows races by itself, verify alone runs. Every command also runs on an
unchanged copy and must pass there: a check that always fails catches nothing. The table, the output of every command
and break_kernels.json go to OUT; a later run with the same OUT keeps what was caught with the same sources, so that a
run that was stopped can go on.

Exit code: 0 if all were caught, 1 if one was not or was left for a later run, 2 for bad usage or a mutation that does
not match its source, 3 if there is no GPU.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import delayed_sources
from mutations import MUTATIONS, PEERS, Mutation

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 75  # kernels that wait for each other
EMULATED = "Fake GPU"
LARGE = "its case is too large to emulate"


class Misfit(Exception):
    """The text of a mutation does not occur exactly once in its source."""


def edited(mutation, text):
    for old, new in mutation.edits:
        if text.count(old) != 1:
            raise Misfit(f"{mutation.name}: {mutation.file} has this {text.count(old)} times, not once:\n{old}")
        text = text.replace(old, new)
    return text


def apply(mutation, folder):
    file = folder / mutation.file
    file.write_text(edited(mutation, file.read_text()))


class Checks:
    def __init__(self, options, scratch):
        self.tessera, self.python = pathlib.Path(options.tessera), options.python
        self.out, self.scratch, self.kernels = options.out, scratch, pathlib.Path(options.kernels)
        self.cache = options.cache.resolve() if options.cache else f"{scratch}/cache"
        self.controls, self.lock = {}, threading.Lock()
        self.emulated, self.timeout, self.seconds = False, TIMEOUT_S, None  # seconds: that verify may take

    def copy(self, mutations, delayed=False):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.scratch)) / "kernels"
        shutil.copytree(self.kernels, folder)
        for mutation in mutations:
            apply(mutation, folder)
        if delayed:
            delayed_sources.delay(folder)
        return folder

    def run(self, name, folder, command, record):
        """(exit code, or None after a timeout; what the command wrote to `record`, or {})."""
        # Caches of its own, so that no broken kernel gets into the user's.
        names = {"TESSERA_KERNEL_SOURCES": str(folder), "TESSERA_CACHE_DIR": str(self.cache),
                 "CUDA_CACHE_PATH": f"{self.scratch}/driver", "TESSERA_NO_TUNING": "1",
                 "TESSERA_CODE_ARCH": "", "NO_COLOR": "1"}
        record.unlink(missing_ok=True)
        with open(self.out / f"{name}.txt", "w") as log:
            try:
                code = subprocess.run([str(c) for c in command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                                      env=os.environ | names, timeout=self.timeout).returncode
            except subprocess.TimeoutExpired:
                return None, {}
        try:
            return code, json.loads(record.read_text())
        except (OSError, ValueError):
            return code, {}

    # Each check returns (bad, of, a note): bad of `of` results are wrong.
    def gate(self, label, folder, m):
        record = self.out / f"{label}.json"
        # A mutation that the gate must catch has to fail in one instance. Of the others, whose instances are compiled where
        # they run, one shows that it compiles, without ptxas, which takes most of the time.
        code, found = self.run(label, folder, [
            self.tessera, "compile", "--arch", m.compile[0], "--kernel", m.compile[1], "--json", record,
            *(["--stop"] if m.gate else ["--ptx", "--brief"])], record)
        rows = found.get("rows", [])
        broken = [row for row in rows if row["registers"] < 0 and not row["passed"]]
        if broken or not rows:
            return 0, 0, "does not compile" if broken else f"compile exited with {code}"
        bad = [row["failure"].splitlines()[0] for row in rows if not row["passed"]]
        return len(bad), len(rows), bad[0] if bad else ""

    def verify(self, label, folder, m):
        record = self.out / f"{label}.json"
        code, found = self.run(label, folder, [
            self.tessera, "verify", "--device", "cuda", "--arch-code", m.arch_code, "--suite", m.verify[0],
            "--filter", m.verify[1], "--repeat", m.repeat, "--json", record,
            *(["--seconds", self.seconds] if self.seconds else [])], record)
        if code is None and self.emulated:
            return 0, 0, LARGE
        if code is None:
            return 1, 1, f"did not finish within {self.timeout} s"
        cases = found.get("cases", [])
        served = [c for c in cases if c.get("kernel") == m.kernel]
        if not served:
            why = next((c["detail"].splitlines()[0] for c in cases if c.get("detail")), f"verify exited with {code}")
            others = {c.get("kernel", "") for c in cases} - {""}
            return 0, 0, f"{m.kernel} served no case, but {', '.join(sorted(others))}" if others else why
        bad = [c["detail"].splitlines()[0] for c in served if c["outcome"] == "failed"]
        return len(bad), len(served), bad[0] if bad else ""

    def bench(self, label, folder, m):
        record = self.out / f"{label}.json"
        code, found = self.run(label, folder, [
            self.tessera, "bench", "--device", "cuda", "--arch-code", m.arch_code, "--check", "--suite", m.bench[0],
            "--filter", m.bench[1], "--min-time", "0.01", "--json", record], record)
        rows = [c for c in found.get("cases", []) if "refused" not in c]
        bad = [c["wrong"] for c in rows if "wrong" in c]
        # A wrong row must not be timed, and must make the command fail.
        if bad and (code != 1 or any("wrong" in c and "median_s" in c for c in rows)):
            return 0, len(rows), f"rows are wrong, but bench exited with {code} or timed them"
        return len(bad), len(rows), "" if rows else f"bench exited with {code}"

    def cuda_test(self, label, folder, m):
        record = self.out / f"{label}.json"
        program = self.tessera.parent / "cuda_test"
        if not program.is_file():
            return 0, 0, f"no {program}"
        code, found = self.run(label, folder, [program, f"--gtest_filter={m.gtest}", f"--gtest_output=json:{record}"],
                               record)
        tests = [t for suite in found.get("testsuites", []) for t in suite["testsuite"] if t["result"] == "COMPLETED"]
        return sum("failures" in t for t in tests), len(tests), "" if tests else f"cuda_test exited with {code}"

    def peers(self, label, folder, _):
        record = self.out / f"{label}.json"
        path = pathlib.Path(self.scratch) / "path"  # tessera itself need not be installed
        if not path.exists():
            shutil.copytree(ROOT / "python/tessera/bench", path / "tessera_bench")
        code, found = self.run(label, folder, [
            "env", f"PYTHONPATH={path}", self.python, "-m", "tessera_bench", "--suite", "toy", "--peers", "none",
            "--rounds", "3", "--library", self.tessera.parent.parent / "lib/libtessera.so", "--json", record], record)
        rows = [r for row in found.get("rows", []) for r in row["entrants"].values()]
        bad = [r for r in rows if r["status"] == "wrong"]
        if bad and code != 1:
            return 0, len(rows), f"rows are wrong, but the benchmark exited with {code}"
        return len(bad), len(rows), "" if rows else f"the benchmark exited with {code}"

    def control(self, check, m, key):
        """A note if the check fails on unchanged kernels, else "". Each command runs once, for all mutations."""
        with self.lock:
            mine = concurrent.futures.Future()
            said = self.controls.setdefault((check.__name__,) + key, mine)
            label = f"control_{len(self.controls)}_{check.__name__}"
        if said is mine:
            try:
                bad, of, note = check(label, self.copy((), m.delayed), m)
                mine.set_result(f"{bad} of {of} fail on unchanged kernels: {note}" if bad or not of else "")
            except BaseException as problem:
                mine.set_exception(problem)
        return said.result()

    def judge(self, m, folder, steps):
        """A row of the table; caught is whether every step caught the mutation."""
        row = {"mutation": m.name, "kernel": m.kernel, "race": race_of(m), "caught": True, "notes": []}
        for check, key in steps:
            bad, of, note = check(f"{m.name}_{check.__name__}", folder, m)
            if note == LARGE:
                row["left"] = "not run"
            row[check.__name__] = [bad, of]
            control = self.control(check, m, key)
            row["caught"] &= bad > 0 and not control
            row["notes"] += [text for text in (control, note) if text]
        if m.excuse and not row["caught"]:
            row.update(caught=None, notes=[m.excuse])
        return row


def race_of(m):
    return "race, late warps" if m.delayed else "race" if m.race else ""


def steps_of(checks, m):
    if m.gate:
        yield checks.gate, m.compile
        return
    if checks.emulated:
        if m.verify:
            yield checks.verify, (m.kernel, m.arch_code, m.verify, m.repeat)
        return
    if m.verify:
        yield checks.verify, (m.kernel, m.arch_code, m.verify, m.repeat, m.delayed)
    if m.bench:
        yield checks.bench, (m.arch_code, m.bench)
    if m.gtest:
        yield checks.cuda_test, (m.gtest,)


def number(arch):
    return int("".join(c for c in arch if c.isdigit()) or 0)


def sees_gpu(python):
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def key_of(m, kernels):
    """Changes with the mutation, its checks on a GPU, and the code of every kernel that has its file in it."""
    texts = {str(file.relative_to(kernels)): file.read_text() for file in kernels.rglob("*") if file.is_file()}
    included = {name: [other for other in re.findall(r'#include "([^"]+)"', text) if other in texts]
                for name, text in texts.items()}

    def closure(names, edges):
        found, new = set(), set(names)
        while new:
            found |= new
            new = {other for name in new for other in edges[name]} - found
        return found

    including = {name: [other for other in texts if name in included[other]] for name in texts}
    files = closure(closure([m.file] if m.file else texts, including), included)
    checked = repr(dataclasses.replace(m, compile=()))
    return hashlib.sha256((checked + "".join(name + texts[name] for name in sorted(files))).encode()).hexdigest()[:16]


def earlier_rows(out):
    try:
        return {row["key"]: row for row in json.loads((out / "break_kernels.json").read_text())["rows"]
                if row.get("key") and row["caught"]}
    except (OSError, ValueError):
        return {}


def table(rows):
    lines = [("mutation", "kernel", "", "failed/run", "bench wrong/rows", "caught", "")]
    for row in rows:
        figures = ["{}/{}".format(*row[c]) if c in row else "" for c in ("verify", "bench")]
        for other in ("cuda_test", "gate", "peers"):
            if other in row:
                found = "{}/{} ({})".format(*row[other], other.replace("_", " "))
                figures[other == "peers"] += f", {found}" if figures[other == "peers"] else found
        caught = row.get("left") or ("-" if row["caught"] is None else "yes" if row["caught"] else "NO")
        note = row["notes"][0] if row["notes"] else ""
        lines.append((row["mutation"], row["kernel"], row["race"], *figures, caught, note[:100]))
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[6]]).rstrip() for line in lines)


def batches_of(chosen, kernels):
    """Mutations that one compilation can show to compile: of the same instance, and none in another's way."""
    batches = []
    for m in chosen:
        texts = {m.file: edited(m, (kernels / m.file).read_text())}  # it must fit the sources as they are
        for batch, mutated in batches:
            if m.gate or batch[0].gate or batch[0].compile != m.compile:
                continue
            try:
                texts = {m.file: edited(m, mutated.get(m.file, (kernels / m.file).read_text()))}
            except Misfit:
                continue
            batch.append(m)
            mutated.update(texts)
            break
        else:
            batches.append(([m], texts))
    return [batch for batch, _ in batches]


def compile_all(checks, chosen, jobs):
    def gate(batch):
        """[(mutation, what the gate said)]; a batch that does not compile is tried one by one."""
        said = checks.gate(f"{batch[0].name}_compile", checks.copy(batch, any(m.delayed for m in batch)), batch[0])
        if said[1] > 0 or len(batch) == 1:
            return [(m, said) for m in batch]
        return [pair for m in batch for pair in gate([m])]

    rows = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for m, (bad, of, note) in itertools.chain.from_iterable(pool.map(gate, batches_of(chosen, checks.kernels))):
            good = of > 0 and (bad > 0 or not m.gate)
            rows.append(good)
            print(f"{'ok' if good else 'FAILED':<7} {m.name}: {of} compiled"
                  f"{', the gate reports: ' + note if m.gate and bad else ''}"
                  f"{'' if good else '; ' + (note or 'the compile gate passes')}", flush=True)
    return 0 if all(rows) else 1


def compile_ahead(checks, chosen, jobs):
    """Fills the cache with what verify runs, with a driver that runs nothing (compile_ahead.sh)."""
    known, work = earlier_rows(checks.out), {}
    for m in chosen:
        if m.verify and key_of(m, checks.kernels) not in known:
            work[m.name] = m, (m,)
            work.setdefault((m.arch_code, m.verify, m.delayed), (m, ()))  # unchanged kernels, for all of them
    checks.seconds = 0.001
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: checks.verify(f"{one[0].name}_{len(one[1])}", checks.copy(one[1], one[0].delayed), one[0]),
                      work.values()))
    print(f"{sum(bool(mutations) for _, mutations in work.values())} mutations compiled")
    return 0


def break_all(checks, chosen, arch, options):
    """Runs several at once: compiling takes most of the time, and a busy GPU makes races more likely."""
    begin, lock, rows = time.monotonic(), threading.Lock(), {}
    earlier = earlier_rows(checks.out)
    work = list(chosen)
    if not options.only and sees_gpu(options.python):
        work.append(Mutation("every_kernel_skips_a_tile", "", (), (), "as chosen"))

    def judged(m):
        if not m.compile:
            folder, steps = checks.copy([one for one in MUTATIONS if one.name in PEERS]), [(checks.peers, ())]
        elif number(m.compile[0]) > number(arch) or (m.compile[0] == "sm_90a" and arch != "sm_90a"):
            return {"mutation": m.name, "kernel": m.kernel, "race": race_of(m), "caught": None,
                    "notes": [f"needs {m.compile[0]}, this is {arch}"]}
        else:
            folder, steps = checks.copy((m,), m.delayed), list(steps_of(checks, m))
        if not steps:
            return {"mutation": m.name, "kernel": m.kernel, "race": race_of(m), "caught": None,
                    "notes": ["needs a GPU: no case of verify shows it"]}
        since = time.monotonic()
        row = checks.judge(m, folder, steps)
        row["seconds"] = round(time.monotonic() - since, 1)
        return row

    today = datetime.date.today().isoformat()

    def judge(m):
        key = key_of(m, checks.kernels)
        if key in earlier:
            row = earlier[key]
        elif options.seconds and time.monotonic() - begin > options.seconds:
            row = {"mutation": m.name, "kernel": m.kernel, "race": race_of(m), "caught": False, "left": "not run",
                   "notes": []}
        else:
            row = judged(m) | {"key": key}
            print(table([row]).splitlines()[1], flush=True)
        with lock:
            rows[m.name] = row
            found = [rows[one.name] for one in work if one.name in rows]
            (checks.out / "break_kernels.json").write_text(json.dumps({"date": today, "arch": arch, "rows": found}, indent=1) + "\n")

    for m in chosen:  # before anything runs
        edited(m, (checks.kernels / m.file).read_text())
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(judge, work))
    rows = [rows[m.name] for m in work]
    text = table(rows)
    (checks.out / "break_kernels.txt").write_text(text + "\n")
    left = sum("left" in row for row in rows)
    ran = sum(row["caught"] is not None for row in rows) - left
    caught = sum(row["caught"] is True for row in rows)
    print(f"\n{text}\n\n{caught} of {ran} caught on {arch}; {len(rows) - ran - left} more do not count"
          f"{f'; {left} not run' if left else ''}")
    return 0 if caught == ran and not left and ran else 1


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", metavar="OUT", type=pathlib.Path, help="folder for the table and all output")
    parser.add_argument("--list", action="store_true", help="list the mutations and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="NAME",
                        help="run only this mutation; may be repeated")
    parser.add_argument("--delayed", action="store_true", help="warps are late at random for every race, not only for those "
                        "that are not seen otherwise")
    parser.add_argument("--compile", action="store_true",
                        help="without a GPU: check that each mutation matches its source and compiles, and that the "
                        "compile gate fails if it should")
    parser.add_argument("--ahead", action="store_true", help="compile into --cache what a run would, and run nothing: "
                        "compile_ahead.sh has the driver for that")
    parser.add_argument("--tessera", default=ROOT / "build/bin/tessera", metavar="PATH",
                        help="default: build/bin/tessera")
    parser.add_argument("--kernels", default=ROOT / "kernels", metavar="DIR", help="sources to copy and change")
    parser.add_argument("--cache", type=pathlib.Path, metavar="DIR",
                        help="keep compiled kernels there for later runs, and take them from there")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), metavar="N",
                        help="mutations at a time; default: half of the cores, %(default)s here")
    parser.add_argument("--seconds", type=float, default=0, metavar="S", help="start none after this time; a later run "
                        "with the same OUT goes on")
    parser.add_argument("--python", default=sys.executable, metavar="PATH",
                        help="a Python with PyTorch, for the comparison with peers; default: this one")
    options = parser.parse_args(arguments)
    if options.list:
        for m in MUTATIONS:
            print(f"{m.name:<42} {m.file}{'  race' if m.race else ''}{'  compile gate' if m.gate else ''}")
        return 0
    unknown = set(options.only) - {m.name for m in MUTATIONS}
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: 1 or more")
    if unknown or options.out is None:
        parser.error(f"--only {min(unknown)}: --list shows the names" if unknown else "OUT is missing")
    chosen = [m for m in MUTATIONS if not options.only or m.name in options.only]
    if options.delayed:
        chosen = [dataclasses.replace(m, delayed=m.race) for m in chosen]
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(options, scratch)
        try:
            if options.compile:
                return compile_all(checks, chosen, options.jobs)
            if options.ahead:
                return compile_ahead(checks, chosen, options.jobs)
            record = options.out / "doctor.json"
            _, found = checks.run("doctor", "", [options.tessera, "doctor", "--json", record], record)
            devices = found.get("cuda", {}).get("devices", [])
            if not devices:
                print("error: no GPU here; --compile needs none", file=sys.stderr)
                return 3
            if devices[0]["name"] == EMULATED:
                checks.emulated, checks.timeout, checks.seconds = True, 4 * TIMEOUT_S, 4 * TIMEOUT_S / 5
                chosen = [dataclasses.replace(m, delayed=False, repeat=min(m.repeat, 2)) for m in chosen if not m.gate]
            return break_all(checks, chosen, devices[0]["arch"], options)
        except (Misfit, delayed_sources.Misfit) as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
