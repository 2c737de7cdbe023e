#!/usr/bin/env python3
"""finetune_results.py FOLDER: collects what `examples/finetune_phi.py --json FOLDER/NAME.json` wrote.

Writes results/h200/finetune.json, one record per line, and docs/finetune_phi.svg: peak memory by tokens, of the records
named memory_*, and losses by step, of those named curve_*. Prints the table.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLOURS = {"tessera": "#07c", "sdpa": "#c50"}


def panel(left, title, series, below):
    """Lines in a frame of 300 x 240 with both axes from zero, or from the lowest value of a loss. series: name -> points."""
    top, width, height = 50, 290, 230
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    right_end, high = max(x for x, _ in points), max(y for _, y in points) * 1.05
    low = 0.0 if "GiB" in title else min(y for _, y in points) * 0.95
    across = lambda x: left + width * x / right_end  # noqa: E731
    down = lambda y: top + height * (1 - (y - low) / (high - low))  # noqa: E731
    out = [f'<text x="{left}" y="24">{title}</text>']
    for i in range(5):
        y, x = low + (high - low) * i / 4, right_end * i / 4
        out += [f'<line x1="{left}" y1="{down(y):.1f}" x2="{left + width}" y2="{down(y):.1f}" stroke="#8884"/>',
                f'<text x="{left - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:.1f}</text>',
                f'<text x="{across(x):.1f}" y="{top + height + 18}" text-anchor="middle">{x:,.0f}</text>']
    out.append(f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">{below}</text>')
    for i, (name, line) in enumerate(series.items()):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        dash = ' stroke-dasharray="5 4"' if i else ""
        out += [f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash}/>',
                f'<text x="{left + 200}" y="{top + 16 + 16 * i}" fill="{COLOURS[name]}">{name}</text>']
    return "".join(out)


def picture(records):
    memory, losses = {}, {}
    for name, r in records.items():
        if name.startswith("memory_"):
            memory.setdefault(r["attention"], []).append((r["seq"], r["peak_GiB"]))
        elif name.startswith("curve_"):
            losses[r["attention"]] = [(i + 1, loss) for i, loss in enumerate(r["losses"])]
    memory = {name: sorted(points) for name, points in memory.items()}
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" font-family="sans-serif" font-size="12" '
            f'fill="#777">{panel(50, "peak memory, GiB", memory, "tokens")}'
            f'{panel(430, "loss", losses, "step")}</svg>\n')


def table(records):
    lines = ["| layers | tokens | attention | weights | | tokens/s | peak GiB | loss |", "|---" * 8 + "|"]
    for r in records.values():
        how = ", ".join(name for name in ("checkpointing", "keep_attention", "offload") if r.get(name))
        weights = "4-bit" if r["four_bit"] else r["dtype"]
        lines.append(f"| {r['layers']} | {r['batch'] * r['seq']:,} | {r['attention']} | {weights} | {how} | "
                     f"{r['tokens_per_s']:,.0f} | {r['peak_GiB']:.1f} | {r['losses'][0]:.3f} to {r['losses'][-1]:.3f} |")
    return "\n".join(lines)


def main():
    folder = pathlib.Path(sys.argv[1])
    records = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    records = dict(sorted(records.items(), key=lambda item: (-item[1]["layers"], item[1]["seq"], item[0])))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(r)}" for name, r in records.items())
    (ROOT / "results/h200/finetune.json").write_text("{\n" + lines + "\n}\n")
    (ROOT / "docs/finetune_phi.svg").write_text(picture(records))
    print(table(records))


if __name__ == "__main__":
    main()
