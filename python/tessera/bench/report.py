"""The tables at the end of a run, from its record alone. Nothing here needs torch.

A record's "rows" are one object per cell and op: op, cell (its name), fields and tags (cells.py), flops, bytes,
unfused_bytes, entrants.
"""

import json
import math
import pathlib

from . import cells

OPS = ("forward", "backward", "decode")
AGREEMENT = 1.03  # the largest ratio, in geometric mean, of two runs on the same GPU that agree


def read(path):
    """The record that --json wrote; rows as older versions wrote them get fields and tags."""
    record = json.loads(pathlib.Path(path).read_text())
    record["rows"] = [row if "fields" in row else upgraded(row) for row in record["rows"]]
    return record


def upgraded(row):
    """A row with columns batch, seq, heads, dim, ..., small in place of fields and tags."""
    row = dict(row)
    seq, dim = row.pop("seq", 0), row.pop("dim", 0)
    decode = row["op"] == "decode"
    fields = {"dtype": row.pop("dtype", ""), "batch": row.pop("batch", 0), "seq_q": 1 if decode else seq, "seq_k": seq,
              "heads_q": row.pop("heads", 0), "heads_kv": row.pop("heads_kv", 0), "dim_qk": dim, "dim_v": dim,
              "causal": row.pop("causal", False)}
    small = row.pop("small", False)
    return row | {"fields": fields, "tags": ["decode" if decode else "small" if small else "table"]}


def is_small(row):
    return cells.is_small(row["tags"])


def geometric_mean(values):
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else float("nan")


def speedups(record, op, entrant, peer, small=None):
    """[(cell, time of the peer / time of the entrant)] for the rows in which both are correct."""
    pairs = []
    for row in record["rows"]:
        if row["op"] != op or (small is not None and is_small(row) != small):
            continue
        ours, theirs = row["entrants"].get(entrant, {}), row["entrants"].get(peer, {})
        if ours.get("status") == "ok" and theirs.get("status") == "ok":
            pairs.append((row["cell"], theirs["median_s"] / ours["median_s"]))
    return pairs


def against_best(record, op, entrant, peers, small=None):
    pairs = []
    for row in record["rows"]:
        if row["op"] != op or (small is not None and is_small(row) != small):
            continue
        ours = row["entrants"].get(entrant, {})
        theirs = [row["entrants"][p]["median_s"] for p in peers if row["entrants"].get(p, {}).get("status") == "ok"]
        if ours.get("status") == "ok" and theirs:
            pairs.append((row["cell"], min(theirs) / ours["median_s"]))
    return pairs


def line_about(title, pairs):
    if not pairs:
        return f"  {title:<28} nothing to compare"
    ratios = [ratio for _, ratio in pairs]
    worst_cell, worst = min(pairs, key=lambda pair: pair[1])
    losses = sum(ratio < 1 for ratio in ratios)
    return (f"  {title:<28} geometric mean {geometric_mean(ratios):.3f}   minimum {worst:.3f} ({worst_cell})   "
            f"behind in {losses} of {len(ratios)}")


def figure(row, entrant):
    result = row["entrants"].get(entrant)
    if result is None:
        return "-"
    if result["status"] != "ok":
        return {"wrong": "WRONG", "refused": "refused"}.get(result["status"], "failed")
    if is_small(row):
        return f"{result['median_s'] * 1e6:.1f}"
    return f"{row['flops'] / result['median_s'] / 1e12:.0f}"


def table(rows, entrants, ours):
    peers = [name for name in entrants if name not in ours]
    lines = [["cell"] + entrants + [f"/{p}" for p in peers]]
    for row in rows:
        line = [row["cell"]] + [figure(row, name) for name in entrants]
        mine = row["entrants"].get("tessera", {})
        for peer in peers:
            theirs = row["entrants"].get(peer, {})
            both = mine.get("status") == "ok" and theirs.get("status") == "ok"
            line.append(f"{theirs['median_s'] / mine['median_s']:.2f}" if both else "-")
        lines.append(line)
    return in_columns(lines)


def in_columns(lines):
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(w) if n == 0 else text.rjust(w) for n, (text, w) in
                               enumerate(zip(line, widths))) for line in lines)


def served_through(rows):
    """Which op ran Tessera's decode and, if it was not decode, why not."""
    ours = [r["entrants"]["tessera"] for r in rows if "tessera" in r["entrants"]]
    refusals = {e["through"]: e.get("decode_refused") for e in ours if e.get("through")}
    return [f"  tessera ran the {op}{f': {reason}' if reason else ''}" for op, reason in sorted(refusals.items())]


def bandwidth_table(rows, entrants):
    lines = [["TB/s, K and V once"] + entrants]
    for row in rows:
        times = [row["entrants"].get(name, {}).get("median_s") for name in entrants]
        lines.append([row["cell"]] + [f"{row['bytes'] / t / 1e12:.2f}" if t else "-" for t in times])
    return in_columns(lines)


def text_of(record):
    entrants = record["entrants"]
    ours = [name for name in entrants if name.startswith("tessera")]
    peers = [name for name in entrants if name not in ours]
    parts = []
    for op in OPS:
        for small in (False, True):
            rows = [r for r in record["rows"] if r["op"] == op and is_small(r) == small]
            if not rows:
                continue
            unit = "microseconds around the call" if small else "TFLOP/s"
            used = [e for e in entrants if any(e in r["entrants"] for r in rows)]
            parts.append(f"\n{op}, {unit}; /peer: Tessera's speed over the peer's\n" + table(rows, used, ours))
            if small:
                parts.append(small_table(rows, used))
            if op == "decode":
                parts.append(bandwidth_table(rows, used))
                parts += served_through(rows)
    errors = error_table(record)
    if errors:
        parts.append(errors)
    notes = sorted({f"  {name}: {result['detail']}" for row in record["rows"] for name, result in
                    row["entrants"].items() if result.get("detail") and result["status"] != "wrong"})
    notes += wrong_results(record)
    if notes:
        parts.append("\nnot timed:\n" + "\n".join(notes))
    parts.append("\nTessera's speed over each peer's, cell by cell:")
    for op in OPS:
        for small in (False, True):
            if not any(r["op"] == op and is_small(r) == small for r in record["rows"]):
                continue
            kind = f"{op}{', small' if small and op != 'decode' else ''}"
            for peer in peers:
                pairs = speedups(record, op, "tessera", peer, small)
                if pairs:
                    parts.append(line_about(f"{kind}, {peer}", pairs))
            if len(peers) > 1:
                parts.append(line_about(f"{kind}, the best of them", against_best(record, op, "tessera", peers, small)))
    deterministic = [peer for peer in peers if peer.endswith("-det")]
    for peer in ["tessera"] + deterministic:
        pairs = speedups(record, "backward", "tessera-det", peer, small=False)
        if pairs:
            parts.append(line_about(f"deterministic, {peer}", pairs))
    if len(deterministic) > 1:
        pairs = against_best(record, "backward", "tessera-det", deterministic, small=False)
        parts.append(line_about("deterministic, the best", pairs))
    return "\n".join(parts)


def wrong_results(record):
    """A line for each entrant with wrong results: in how many rows it is not timed and not among the best."""
    wrong = {}
    for row in record["rows"]:
        for name, result in row["entrants"].items():
            if result["status"] == "wrong":
                wrong.setdefault(name, []).append(f"{row['op']} {row['cell']}: {result['detail']}")
    return [f"  {name}: wrong in {len(lines)} rows, and left out of the best of them there; {lines[0]}"
            for name, lines in sorted(wrong.items())]


def error_table(record):
    """The relative error of each result against fp64, in geometric mean over the rows in which all entrants that serve
    the op are correct."""
    lines = []
    for op in OPS:
        rows = [r for r in record["rows"] if r["op"] == op]
        timed = [e for e in record["entrants"] if any(r["entrants"].get(e, {}).get("status") == "ok" for r in rows)]
        rows = [r for r in rows if all(r["entrants"].get(e, {}).get("relative_errors") and
                                       r["entrants"][e]["status"] == "ok" for e in timed)]
        for name in rows[0]["entrants"][timed[0]]["relative_errors"] if rows and timed else ():
            means = [geometric_mean([max(r["entrants"][e]["relative_errors"][name], 1e-12) for r in rows]) for e in timed]
            by_entrant = dict(zip(timed, means))
            lines.append([f"{op} {name}, {len(rows)} rows"] +
                         [f"{by_entrant[e]:.2e}" if e in by_entrant else "-" for e in record["entrants"]])
    if not lines:
        return ""
    return "\nrelative error against fp64 (Frobenius)\n" + in_columns([[""] + list(record["entrants"])] + lines)


def small_table(rows, entrants):
    lines = [["graph replay / host, us"] + entrants]
    for row in rows:
        line = [row["cell"]]
        for name in entrants:
            result = row["entrants"].get(name, {})
            graph, host = result.get("graph_s"), result.get("host_s")
            line.append(f"{graph * 1e6:.1f} / {host * 1e6:.0f}" if graph and host else
                        f"- / {host * 1e6:.0f}" if host else "-")
        lines.append(line)
    return in_columns(lines)


def compare(first, second):
    """(how two runs of the same cells differ, a message if they differ too much). For each entrant, the ratio
    second / first: geometric mean, minimum and maximum; over all ops it must be within AGREEMENT. For small cells, the
    time around a call includes host time, which depends on the machine: there the graph's replay must agree, and the
    time around the call is only shown."""
    by_key = {(r["op"], r["cell"], is_small(r)): r for r in second["rows"]}
    ratios, around, changed = {}, {}, []
    for row in first["rows"]:
        other = by_key.get((row["op"], row["cell"], is_small(row)))
        for name, a in row["entrants"].items() if other else ():
            b = other["entrants"].get(name, {})
            if a["status"] == b.get("status") == "ok":
                time = "graph_s" if is_small(row) and "graph_s" in a and "graph_s" in b else "median_s"
                ratios.setdefault(name, {}).setdefault(row["op"], []).append((b[time] / a[time], row["cell"]))
                if time == "graph_s":
                    around.setdefault(name, []).append((b["median_s"] / a["median_s"], row["cell"]))
            elif a["status"] != b.get("status"):
                changed.append(f"{row['op']} {row['cell']} {name}: {a['status']}, then {b.get('status', 'not run')}")
    lines, apart = [], [f"{len(changed)} results have a different status"] if changed else []
    for name, by_op in ratios.items():
        everything = [pair for pairs in by_op.values() for pair in pairs]
        mean = geometric_mean([ratio for ratio, _ in everything])
        if max(mean, 1 / mean) > AGREEMENT:
            apart.append(f"{name} takes {mean:.4f} of its first time")
        shown = [("all", everything)] if len(by_op) > 1 else []
        shown += [("around", around[name])] if name in around else []
        for op, pairs in [*by_op.items(), *shown]:
            (least, where_least), (most, where_most) = min(pairs), max(pairs)
            lines.append(f"  {name:<12} {op:<9} geometric mean {geometric_mean([r for r, _ in pairs]):.4f} over "
                         f"{len(pairs)} cells   min {least:.3f} ({where_least})   max {most:.3f} ({where_most})")
    if not ratios:
        apart.append("no cell was timed in both files")
    return "\n".join(lines + [f"  {line}" for line in changed]), "; ".join(apart)
