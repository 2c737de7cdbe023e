"""scripts/break_kernels.py without a GPU: break_kernels_test.py TESSERA

Every mutation must match the current sources, and the result must compile. How the script judges is tested with a fake
program, which reports what a run on a GPU would.
"""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import break_kernels  # noqa: E402
import mutations  # noqa: E402
import delayed_sources  # noqa: E402
import racecheck_sources  # noqa: E402

PROGRAM = "build/bin/tessera"

# Checks whether its sources are the repository's; MOOD says how it responds if they are not.
FAKE_PROGRAM = """#!/usr/bin/env python3
import json, os, pathlib, sys, time
mood, kernels = os.environ["MOOD"], pathlib.Path(os.environ["KERNELS"])
record = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
if sys.argv[1] == "doctor":
    record.write_text(json.dumps({"cuda": {"devices": [{"arch": "sm_90a", "name": "Fake GPU" if mood == "emulated" else "a GPU"}]}}))
    sys.exit(0)
folder = pathlib.Path(os.environ["TESSERA_KERNEL_SOURCES"])
changed = any(f.read_text() != (kernels / f.relative_to(folder)).read_text() for f in folder.rglob("*.cuh"))
bad = changed and mood != "blind" or mood == "always"
if mood == "together" and changed and sys.argv[1] == "verify":  # fails only while another one runs
    record.with_suffix(".here").touch()
    for _ in range(100):
        bad = len(list(record.parent.glob("*.here"))) > 1
        if bad:
            break
        time.sleep(0.05)
if sys.argv[1] == "verify":
    kernel = {"another": "another", "uncompiled": ""}.get(mood, "attention_forward")
    case = {"name": "a", "outcome": "failed" if bad else "passed", "kernel": kernel, "detail": "why"}
else:
    case = {"wrong": "why"} if bad and mood != "times" else {"median_s": 1}
record.write_text(json.dumps({"cases": [case]}))
sys.exit(int(bad))
"""


def run(*arguments):
    """(exit code, what it printed)"""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = break_kernels.main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


class BreakKernels(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def judged_by(self, mood):
        code, rows, said = self.all_judged_by(mood, "--only", "forward_skips_a_key_tile")
        return code, rows[0], said

    def all_judged_by(self, mood, *arguments):
        program = self.folder / "tessera"
        program.write_text(FAKE_PROGRAM)
        program.chmod(0o755)
        with mock.patch.dict(os.environ, MOOD=mood, KERNELS=str(ROOT / "kernels")):
            code, said = run(self.folder / "out", "--tessera", program, *arguments)
        return code, json.loads((self.folder / "out/break_kernels.json").read_text())["rows"], said

    def test_every_mutation_matches_its_source_and_compiles(self):
        code, said = run(self.folder / "out", "--compile", "--tessera", PROGRAM)
        self.assertEqual(code, 0, said)
        self.assertEqual(said.count("ok "), len(break_kernels.MUTATIONS), said)

    def test_the_checks_of_every_mutation_have_cases(self):
        checks = {check for m in break_kernels.MUTATIONS for check in (m.verify, m.bench) if check}
        suites = {suite: subprocess.run([PROGRAM, "cases", "--suite", suite], capture_output=True, text=True,
                                        check=True).stdout for suite in {suite for suite, _ in checks}}
        self.assertEqual([check for check in checks if check[1] not in suites[check[0]]], [])

    def test_mutations_that_are_compiled_together_are_told_apart_if_that_fails(self):
        harmless, broken = (break_kernels.Mutation(name, "attention/backward_convert.cuh", ((old, new),),
                                                   ("sm_80", "backward_convert_bf16_v8"))
                            for name, old, new in (("harmless", "if (row >= length ||", "if (row + 1 >= length ||"),
                                                   ("broken", "#pragma once", "#pragma once\nint no_semicolon")))
        with mock.patch.object(break_kernels, "MUTATIONS", (harmless, broken)):
            self.assertEqual(len(break_kernels.batches_of((harmless, broken), ROOT / "kernels")), 1)
            code, said = run(self.folder / "out", "--compile", "--tessera", PROGRAM)
        self.assertEqual(code, 1, said)
        self.assertRegex(said, r"ok +harmless")
        self.assertRegex(said, r"FAILED +broken: 0 compiled; does not compile")

    def test_what_was_caught_is_not_run_again_until_its_kernel_changes(self):
        self.assertEqual(self.judged_by("sees")[0], 0)
        self.assertEqual(self.judged_by("blind")[0], 0)
        copy = self.folder / "kernels"
        shutil.copytree(ROOT / "kernels", copy)
        for changed, code in ((copy / "norm/row.cuh", 0), (copy / "tile/mask.h", 1)):
            changed.write_text(changed.read_text() + "\n")
            self.assertEqual(self.all_judged_by("blind", "--only", "forward_skips_a_key_tile", "--kernels", copy)[0], code)

    def test_what_the_time_did_not_suffice_for_is_left_and_said_so(self):
        code, rows, said = self.all_judged_by("sees", "--only", "forward_skips_a_key_tile", "--seconds", "1e-9")
        self.assertEqual((code, rows[0]["left"]), (1, "not run"))
        self.assertIn("1 not run", said)

    def test_what_was_caught_is_not_compiled_ahead_and_nothing_is_run(self):
        caught, other = [m for m in mutations.MUTATIONS if m.verify][:2]
        row = {"key": break_kernels.key_of(caught, ROOT / "kernels"), "caught": True}
        (self.folder / "break_kernels.json").write_text(json.dumps({"rows": [row]}))

        class Checks:
            out, kernels, seconds, ran = self.folder, ROOT / "kernels", None, []

            def copy(self, changes, delayed):
                return changes

            def verify(self, label, changes, m):
                self.ran.append((label, changes, self.seconds))

        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(break_kernels.compile_ahead(Checks(), [caught, other], 1), 0)
        self.assertEqual(Checks.ran, [(f"{other.name}_1", (other,), 0.001), (f"{other.name}_0", (), 0.001)])
        self.assertIn("1 mutations compiled", said.getvalue())

    def test_a_mutation_that_does_not_match_its_source_is_an_error(self):
        for old in ("no such text", "__syncthreads();"):  # missing, and more than once
            class Options:
                tessera, python, out, kernels, cache = PROGRAM, sys.executable, self.folder, ROOT / "kernels", None

            broken = break_kernels.Mutation("broken", "attention/forward.cuh", ((old, ""),), mutations.FORWARD)
            with self.assertRaisesRegex(break_kernels.Misfit, "broken: .*not once"):
                break_kernels.Checks(Options, self.folder).copy((broken,))

    def test_the_copy_for_racecheck_has_one_line_changed_by_each_edit_and_compiles(self):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            racecheck_sources.main(self.folder / "kernels")
        self.assertIn("attention/backward.cuh", said.getvalue())
        changed = []
        for file in (self.folder / "kernels").rglob("*.*"):
            was = (ROOT / "kernels" / file.relative_to(self.folder / "kernels")).read_text().splitlines()
            changed += [pair for pair in zip(was, file.read_text().splitlines(), strict=True) if pair[0] != pair[1]]
        self.assertEqual(len(changed), sum(len(change.edits) for change in racecheck_sources.CHANGES), changed)
        self.assertIn(("named_barrier_arrive(1 + strip, kThreads);", "named_barrier_sync(1 + strip, kThreads);"),
                      [(a.strip(), b.strip()) for a, b in changed])

        class Options:
            tessera, python, out, kernels, cache = PROGRAM, sys.executable, self.folder, ROOT / "kernels", None

        for change in racecheck_sources.CHANGES:
            checks = break_kernels.Checks(Options, self.folder)
            bad, of, note = checks.gate("racecheck", self.folder / "kernels", change)
            self.assertEqual((bad, of > 0), (0, True), note)

    def test_in_the_delayed_copy_every_barrier_is_followed_by_a_delay_and_the_control_is_delayed_too(self):
        class Options:
            tessera, python, out, kernels, cache = PROGRAM, sys.executable, self.folder, ROOT / "kernels", None

        checks = break_kernels.Checks(Options, self.folder)
        folder = checks.copy((), delayed=True)
        plain = "".join(f.read_text() for f in sorted((ROOT / "kernels").rglob("*.cuh")))
        delayed = "".join(f.read_text() for f in sorted(folder.rglob("*.cuh")))
        barriers = plain.count("__syncthreads();")
        self.assertGreater(barriers, 20)
        self.assertEqual(delayed.count("(__syncthreads(), delay_warp());"), barriers)
        functions = sum(len(names) for names in delayed_sources.FUNCTIONS.values())
        self.assertEqual(delayed.count("  delay_warp();\n}"), functions)

        seen = []
        m = next(m for m in break_kernels.MUTATIONS if m.delayed)
        checks.control(lambda label, folder, m: seen.append(folder) or (0, 1, ""), m, ())
        self.assertTrue((seen[0] / "ptx/delay.cuh").exists())

        (folder / "ptx/barrier.cuh").write_text("#pragma once\n")
        with self.assertRaisesRegex(delayed_sources.Misfit, "named_barrier_arrive is there 0 times"):
            delayed_sources.delay(folder)

    def test_a_mutation_that_verify_and_bench_report_is_caught(self):
        code, row, said = self.judged_by("sees")
        self.assertEqual((code, row["caught"], row["verify"], row["bench"]), (0, True, [1, 1], [1, 1]), said)
        self.assertIn("1 of 1 caught on sm_90a", said)

    def test_a_mutation_that_nothing_reports_is_not_caught(self):
        code, row, said = self.judged_by("blind")
        self.assertEqual((code, row["caught"], row["verify"]), (1, False, [0, 1]), said)
        self.assertRegex(said, r"forward_skips_a_key_tile .* NO")

    def test_a_check_that_also_fails_on_unchanged_kernels_catches_nothing(self):
        code, row, said = self.judged_by("always")
        self.assertEqual((code, row["caught"]), (1, False), said)
        self.assertIn("fail on unchanged kernels", said)

    def test_a_bench_that_times_a_wrong_result_catches_nothing(self):
        code, row, said = self.judged_by("times")
        self.assertEqual((code, row["caught"], row["verify"], row["bench"]), (1, False, [1, 1], [0, 1]), said)

    def test_an_emulated_gpu_times_nothing(self):
        code, row, said = self.judged_by("emulated")
        self.assertEqual((code, row["caught"], row["verify"], "bench" in row), (0, True, [1, 1], False), said)

    def test_a_failure_of_another_kernel_or_of_the_compiler_catches_nothing(self):
        for mood in ("another", "uncompiled"):
            code, row, said = self.judged_by(mood)
            self.assertEqual((code, row["caught"], row["verify"]), (1, False, [0, 0]), said)

    def test_mutations_run_in_parallel_and_are_listed_in_order_and_share_one_control_run(self):
        names = ["forward_skips_a_key_tile", "forward_masks_one_key_too_many"]
        arguments = ["--only", names[1], "--only", names[0], "--jobs"]
        code, rows, said = self.all_judged_by("together", *arguments, 2)
        self.assertEqual((code, [(r["mutation"], r["caught"]) for r in rows]), (0, [(n, True) for n in names]), said)
        self.assertEqual(len(list((self.folder / "out").glob("control_*_verify.json"))), 1)
        for file in (self.folder / "out").glob("*.here"):
            file.unlink()
        (self.folder / "out/break_kernels.json").unlink()  # what was caught would be kept
        code, rows, said = self.all_judged_by("together", *arguments, 1)
        self.assertEqual((code, rows[0]["caught"]), (1, False), said)

    def test_bad_usage_and_a_missing_gpu_have_their_exit_codes(self):
        self.assertEqual(run("--only", "no_such", self.folder)[0], 2)
        self.assertEqual(run()[0], 2)
        self.assertEqual(run(self.folder, "--jobs", "0")[0], 2)
        code, said = run("--list")
        self.assertEqual((code, said.count("\n")), (0, len(break_kernels.MUTATIONS)))
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
            code, said = run(self.folder / "out", "--tessera", PROGRAM)
        self.assertEqual(code, 3, said)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        PROGRAM = sys.argv.pop(1)
    unittest.main()
