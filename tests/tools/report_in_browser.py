#!/usr/bin/env python3
"""report_in_browser.py TESSERA [SCREENSHOTS]: opens the report in a real browser, from disk.

The report is made from invented results that contain every kind of row. The page must load without a message on the
console and without a request, show its sections and its losses, and fit a phone, in light and in dark. Exit code 77 if
there is no Chromium.
"""

import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

SKIPPED = 77
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def attention_row(op, tag, batch, seq, heads, dim, causal, entrants, heads_kv=None):
    """A row of peers.json, with the work of one call."""
    queries = 1 if op == "decode" else seq
    heads_kv = heads_kv or heads
    flops = 4 * batch * heads * queries * seq * dim * (2.5 if op == "backward" else 1) / (2 if causal else 1)
    size = 2 * batch * (queries * heads + seq * heads_kv) * dim * 2
    kv = "" if heads_kv == heads else f":{heads_kv}"
    return {"family": "attention", "op": op, "tags": [tag],
            "cell": f"bf16/b{batch}_s{seq}_h{heads}{kv}_d{dim}{'/causal' if causal else ''}",
            "fields": {"dtype": "bf16", "batch": batch, "seq_q": queries, "seq_k": seq, "heads_q": heads,
                       "heads_kv": heads_kv, "dim_qk": dim, "dim_v": dim, "causal": causal},
            "flops": flops, "bytes": size, "unfused_bytes": size + 8 * batch * heads * queries * seq,
            "entrants": entrants}


def table_rows():
    """Every head dim, length and mask, with a result that is wrong and a loss to every peer."""
    random.seed(1)
    rows = []
    for op in ("forward", "backward"):
        for dim in (64, 80, 128, 256):
            for seq in (512, 2048, 8192, 16384):
                for causal in (False, True):
                    row = attention_row(op, "table", 16384 // seq, seq, 2048 // dim, dim, causal, {})
                    for name, rate in (("tessera", 330), ("tessera-det", 260), ("fa2", 300), ("cudnn", 450)):
                        if name == "tessera-det" and op == "forward":
                            continue
                        median = row["flops"] / (rate * 1e12 * random.uniform(0.8, 1.1) * (0.7 if seq == 512 else 1))
                        row["entrants"][name] = {"status": "ok", "error_over_allowed": random.uniform(0.1, 0.4),
                                                 "median_s": median, "p05_s": median, "p95_s": median}
                    rows.append(row)
    rows[0]["entrants"]["cudnn"] = {"status": "wrong", "detail": "out has NaN or infinity", "error_over_allowed": 9.0}
    rows[1]["entrants"]["tessera"]["median_s"] *= 3
    return rows


def other_rows():
    """A small shape, decode steps, and an op of a family that the report knows nothing about."""
    rows = [attention_row("forward", "small", 1, 512, 8, 64, True, {
        "tessera": {"status": "ok", "median_s": 9e-6, "graph_s": 5e-6, "host_s": 3e-6, "error_over_allowed": 0.2},
        "fa2": {"status": "failed", "detail": "no such shape"}})]
    for batch, seq in ((1, 1024), (64, 4096)):
        row = attention_row("decode", "decode", batch, seq, 32, 128, False, {}, heads_kv=8)
        for name, rate in (("tessera", 2e12), ("fa2", 3e12)):
            row["entrants"][name] = {"status": "ok", "median_s": 5e-6 + row["bytes"] / rate,
                                     "graph_s": row["bytes"] / rate, "error_over_allowed": 0.2}
        row["entrants"]["tessera"]["through"] = "forward"
        rows.append(row)
    for m in (4096, 16384):
        rows.append({"family": "gemm", "op": "gemm", "cell": f"bf16/m{m}_n14336_k4096", "tags": ["table"],
                     "fields": {"dtype": "bf16", "m": m, "n": 14336, "k": 4096, "activation": "silu"},
                     "flops": 2 * m * 14336 * 4096, "bytes": 2 * (m * 14336 + m * 4096 + 14336 * 4096),
                     "entrants": {"tessera": {"status": "ok", "median_s": m / 6e6, "error_over_allowed": 0.3},
                                  "cublas": {"status": "ok", "median_s": m / 7e6, "error_over_allowed": 0.3}}})
    return rows


def invented_results(folder):
    """Speeds that nobody measured: the test looks at the page's form alone."""
    peers = {"environment": {"date": "2026-01-02 03:04 UTC", "gpu": "An invented GPU", "torch": "0", "tessera": "0.2.0"},
             "gpu_before": {"clocks.sm": 1980.0}, "gpu_after": {"clocks.sm": 1970.0}, "rows": table_rows() + other_rows()}
    bench = {"date": "2026-01-02", "version": "0.2.0", "ceilings": {"mma.sync bf16": 6e14, "mma.sync fp16": 5.99e14, "wgmma bf16": 8e14, "copy_bytes_per_s": 4.2e12},
             "cases": [{"name": "dec/bf16/b1", "family": "attention", "op": "attention_decode",
                        "fields": {"dtype": "bf16", "batch": 1}, "median_s": 2e-5, "bytes": 6e7, "part_of_ceiling": 0.7}]}
    suite = {"date": "2026-01-02", "version": "0.2.0", "passed": 2, "failed": 1, "refused": 3,
             "worst_error_over_allowed": 1.6, "worst_case": "lse of x",
             "cases": {"fwd/fp16/b1/logits_120": 0.3, "bwd/fp16/b1/one_hot": 0.4,
                       "fwd/fp16/b2/logits_1e4": {"failed": "lse: off", "error": 1.6}}}
    products = {"environment": peers["environment"], "cases": [
        {"name": "product/up/36096x512x1365", "unit": "TFLOP/s", "work": 5e10,
         "entrants": {name: {"median_s": 1e-4} for name in ("tessera", "tessera padded", "pytorch", "pytorch 1376")}}]}
    broken = {"date": "2026-01-02", "rows": [{"mutation": "x", "race": "", "caught": True}]}
    target = folder / "results" / "invented"
    target.mkdir(parents=True)
    for name, content in (("peers", peers), ("bench", bench), ("evidence", bench), ("products", products),
                          ("break_kernels", broken),
                          ("verify", {"full_native": suite, "hostile": suite})):
        (target / f"{name}.json").write_text(json.dumps(content))


def pixel_rows(file):
    """Width, height and rows of RGB(A) bytes of a PNG with 8 bits per channel."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8 and kind in (2, 6)
    packed, at = b"", 8
    while at < len(data):
        size, = struct.unpack(">I", data[at:at + 4])
        if data[at + 4:at + 8] == b"IDAT":
            packed += data[at + 8:at + 8 + size]
        at += 12 + size
    channels = 3 if kind == 2 else 4
    raw, stride = zlib.decompress(packed), width * channels
    rows, before = [], bytes(stride)
    for y in range(height):
        method, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for x in range(stride):
            left = line[x - channels] if x >= channels else 0
            up, corner = before[x], before[x - channels] if x >= channels else 0
            if method == 1:
                line[x] = (line[x] + left) & 255
            elif method == 2:
                line[x] = (line[x] + up) & 255
            elif method == 3:
                line[x] = (line[x] + (left + up) // 2) & 255
            elif method == 4:
                guess = left + up - corner
                nearest = min((abs(guess - v), n, v) for n, v in enumerate((left, up, corner)))[2]
                line[x] = (line[x] + nearest) & 255
        rows.append(bytes(line))
        before = rows[-1]
    return width, height, channels, rows


def brightness_of_corner(file):
    _, _, channels, rows = pixel_rows(file)
    return sum(rows[2][2 * channels:2 * channels + 3]) / 3


class Browser:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, page, *arguments):
        command = [self.program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
                   "--disable-default-apps", "--disable-extensions", f"--user-data-dir={self.folder / 'profile'}",
                   "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000",
                   *arguments, page.as_uri()]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        return answer


def main():
    tessera = pathlib.Path(sys.argv[1]).resolve()
    keep = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        print(f"skipped: none of {', '.join(NAMES)} is installed; `make browser` installs one")
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["HOME"] = name
        results = os.environ.get("TESSERA_RESULTS")
        if results is None:
            invented_results(folder)
            results = folder / "results"
        page = folder / "report.html"
        subprocess.run([tessera, "report", "--results", results, "--output", page], check=True)
        browser = Browser(program, folder)

        answer = browser.run(page, "--dump-dom")
        messages = [line for line in answer.stderr.splitlines() if "CONSOLE" in line]
        assert not messages, messages
        if "TESSERA_RESULTS" not in os.environ:
            for part in ("Speed by sequence length", "Ratios", "Roofline", "Hostile inputs", "What determinism costs",
                         "Environment", "Decode bandwidth", "Small shapes", "How to read this", "Products, MLPs", "broken on purpose", "mma.sync bf16, mma.sync fp16:",
                         "32 sequences of 512 tokens, 32 heads of 64", "ran through the forward", "<h2>gemm</h2>", "silu",
                         'class="loss"', ">wrong<", "never"):
                assert part in answer.stdout, part

        # A script that only the test adds reports what the page requested, and whether it is wider than a phone's screen.
        probe = folder / "probe.html"
        probe.write_text(page.read_text().replace("</body>", (
            "<script>addEventListener('load', () => { document.title = 'requests ' + performance.getEntriesByType('resource')"
            ".map(r => r.name).join(' ') + '; over ' + (document.documentElement.scrollWidth - innerWidth) + '; cut ' + "
            "[...document.querySelectorAll('.wide')].filter(t => t.scrollWidth > t.clientWidth).length + '; outside ' + "
            "[...document.querySelectorAll('svg.chart text')].filter(t => { const a = t.getBoundingClientRect(), "
            "b = t.closest('svg').getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1 }).length + "
            "'; overlapping ' + [...document.querySelectorAll('svg.chart')].filter(s => { const boxes = "
            "[...s.querySelectorAll('text')].map(t => t.getBoundingClientRect()); return boxes.some((a, i) => "
            "boxes.some((b, j) => i < j && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && "
            "b.top < a.bottom - 2)) }).length })</script>"
            "</body>")))
        phone = browser.run(probe, "--dump-dom", "--window-size=500,900")
        assert "<title>requests ; over 0; " in phone.stdout, phone.stdout[:600]
        # On a screen, no table is cut off, and no text of a chart is outside of it or on top of another.
        screen = browser.run(probe, "--dump-dom", "--window-size=1200,900")
        title = screen.stdout.partition("<title>")[2].partition("</title>")[0]
        assert title == "requests ; over 0; cut 0; outside 0; overlapping 0", title

        shades = {}
        for theme, setting in (("light", "1"), ("dark", "0")):
            picture = folder / f"report_{theme}.png"
            browser.run(page, f"--blink-settings=preferredColorScheme={setting}", f"--screenshot={picture}",
                        "--window-size=1120,1500")
            shades[theme] = brightness_of_corner(picture)
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(picture, keep / picture.name)
        assert shades["light"] > 230 and shades["dark"] < 60, shades
    print(f"the report opens in {pathlib.Path(program).name}, light and dark, with no message and no request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
