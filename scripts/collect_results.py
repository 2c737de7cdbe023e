#!/usr/bin/env python3
"""collect_results.py OUT RESULTS: turns what scripts/gpu_check.sh left in OUT into the files that are committed.

verify.json has each suite's counts and, one case per line, the error divided by the allowed error; fuzz.json adds up the
runs that were side by side. peers.json, peers_unfused.json, bench.json, training.json, products.json, evidence.json, dram_bytes.json,
break_kernels.json, doctor.json and verified.json are kept as they were written, without paths of the machine: every row keeps its family, op, fields and tags,
whatever a family calls them. Files that OUT does not have stay as they are, and so do products.json's rows.
"""

import json
import pathlib
import sys

KEPT = ("peers", "peers_unfused", "bench", "training", "products", "evidence", "dram_bytes", "break_kernels", "doctor", "verified")


def verify_summary(report):
    """Counts, and the error of each case; refused cases are only counted by reason."""
    reasons = {}
    cases = {}
    for case in report["cases"]:
        if case["outcome"] == "refused":
            reasons[case["detail"]] = reasons.get(case["detail"], 0) + 1
        elif case["outcome"] == "failed":
            cases[case["name"]] = {"failed": case.get("detail", ""), "error": case.get("error_over_allowed")}
        else:
            cases[case["name"]] = round(case["error_over_allowed"], 4)
    kept = {key: report[key] for key in ("date", "version", "suite", "device", "arch_code", "seed", "repeat", "passed", "failed", "refused",
                                         "worst_error_over_allowed", "worst_case", "seconds")}
    return kept | {"refusals": reasons, "cases": cases}


def fuzz_summary(runs):
    kernels = {}
    for run in runs:
        for name, found in run["kernels"].items():
            kernel = kernels.setdefault(name, {"problems": 0, "worst_ratio": 0})
            kernel["problems"] += found["problems"]
            kernel["worst_ratio"] = max(kernel["worst_ratio"], found["worst_ratio"])
    summed = {key: sum(run[key] for run in runs) for key in ("problems", "failed", "refused", "passed_over")}
    summed["instances"] = sum(run["instances"] for run in runs)  # at most: two runs may share some
    return {key: runs[0][key] for key in ("date", "version", "device", "arch_code")} | summed | {
        "seeds": [[run["first_seed"], run["last_seed"]] for run in runs],
        "seconds": max(run["seconds"] for run in runs), "kernels": dict(sorted(kernels.items())),
        "failures": [failure for run in runs for failure in run.get("failures", [])]}


def dump(value, depth=0):
    """JSON with one line per case or row, so that a diff shows cases."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and value and depth < 4:
        inner = ",\n".join(f"{pad}{json.dumps(key)}: {dump(item, depth + 1)}" for key, item in value.items())
        return "{\n" + inner + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)) and depth < 4:
        return "[\n" + ",\n".join(pad + json.dumps(item) for item in value) + "\n" + " " * depth + "]"
    return json.dumps(value)


def without_paths(value):
    """Drops the measuring machine's folders. Names inside "fields" belong to the family and are kept."""
    if isinstance(value, dict):
        dropped = ("directory", "path", "file", "library", "places", "cache")
        return {key: item if key == "fields" else without_paths(item)
                for key, item in value.items() if key not in dropped}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return value


def with_earlier_rows(record, file):
    """The record, and the rows of the file that it has not measured. Each row says when, and with which library."""
    earlier = json.loads(file.read_text())["cases"] if file.exists() else []
    new = {case["name"]: case for case in record["cases"]}
    cases = [new.pop(case["name"], case) for case in earlier] + list(new.values())
    return record | {"cases": cases}


def collect(out, results):
    out, results = pathlib.Path(out), pathlib.Path(results)
    results.mkdir(parents=True, exist_ok=True)
    target = results / "verify.json"
    verify = json.loads(target.read_text()) if target.exists() else {}
    verify = {key: value for key, value in verify.items() if isinstance(value.get("cases"), dict)}
    for file in sorted(out.glob("verify_*.json")):
        suite, read = file.stem.removeprefix("verify_"), json.loads(file.read_text())
        if isinstance(read, dict):  # one run; else one for each architecture's code
            verify[suite] = verify_summary(read)
            continue
        for report in read:
            own = report["arch_code"] == "native" and suite != "full"
            verify[suite if own else f"{suite}_{report['arch_code']}"] = verify_summary(report)
    if verify:
        target.write_text(dump(verify) + "\n")
    for name in KEPT:
        file = out / f"{name}.json"
        if file.exists():
            record = without_paths(json.loads(file.read_text()))
            if name == "products":  # which takes longer than one run, and is resumed
                record = with_earlier_rows(record, results / file.name)
            (results / file.name).write_text(dump(record) + "\n")
    fuzz = [json.loads(file.read_text()) for file in sorted(out.glob("fuzz_*.json"))]
    if fuzz:
        (results / "fuzz.json").write_text(dump(fuzz_summary(fuzz)) + "\n")
    for name in ("summary", "python", "break_kernels"):
        file = out / f"{name}.txt"
        if file.exists():
            (results / (f"gpu_check_{name}.txt" if name != "break_kernels" else file.name)).write_text(file.read_text())
    sanitizers = sorted(file for file in out.glob("sanitizer_*.txt") if not file.stem.endswith(".first"))
    if sanitizers:
        lines = []
        for file in sanitizers:
            last = [line for line in file.read_text().splitlines() if line.strip()]
            said = [line for line in last if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
            counted = [line for line in last if " passed, " in line]
            lines.append(f"{file.stem.removeprefix('sanitizer_')}: {'; '.join(s.strip('= ') for s in said + counted)}")
        copy = out / "racecheck_sources.txt"
        if copy.exists():
            lines.append(f"racecheck's sources: {copy.read_text().strip()}")
        (results / "sanitizer.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    collect(sys.argv[1], sys.argv[2])
