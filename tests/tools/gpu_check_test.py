"""scripts/gpu_check.sh without a GPU: how stages are run, resumed and told, with a program that only answers."""

import os
import pathlib
import shutil
import stat
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Says that all is well, unless its FAILING is among the arguments, or, the first time, ONCE, for want of memory. Every call is
# noted beside it.
PROGRAM = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
run='"date": "", "version": "", "device": "", "arch_code": "", "suite": "full", "seed": 1, "repeat": 1, "passed": 1,
"failed": 0, "refused": 0, "worst_error_over_allowed": 0, "worst_case": "", "seconds": 1, "cases": [], "problems": 2,
"passed_over": 0, "instances": 1, "first_seed": 1, "last_seed": 2, "kernels": {"k": {"problems": 2, "worst_ratio": 0.5}}'
[ "$1" != doctor ] || run='"cuda": {"devices": [{"name": "NVIDIA Test", "memory_bytes": 141000000000}]}'
code=0
for argument in "$@"; do
  [ "$before" != --json ] || echo "{$run}" > "$argument"
  [ "$argument" != "${FAILING:-nothing}" ] || code=1
  if [ "$argument" = "${ONCE:-nothing}" ] && mkdir "$(dirname "$0")/once" 2> /dev/null; then
    echo "error: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
    exit 1
  fi
  before=$argument
done
echo "1 passed"
exit $code
"""


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "scripts", self.folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        program = self.folder / "build/bin/tessera"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run_stages(self, *stages, **environment):
        """(exit code, summary, calls of the program)"""
        calls = self.folder / "build/bin/calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run([self.folder / "scripts/gpu_check.sh", self.folder / "out", *stages], cwd=self.folder,
                              env=os.environ | environment, capture_output=True, text=True)
        self.assertTrue(calls.exists(), done.stdout + done.stderr)
        return done.returncode, (self.folder / "out/summary.txt").read_text(), calls.read_text().splitlines()

    def test_a_stage_that_passed_is_not_run_again_and_results_are_collected(self):
        code, summary, calls = self.run_stages("verify", "fuzz")
        self.assertEqual(code, 0, summary)
        self.assertIn("passed: stage verify", summary)
        self.assertIn("not run: stage peers", summary)
        self.assertTrue(any("--arch-code native,sm_80,sm_75 --filter bwd/" in call for call in calls), calls)
        self.assertIn('"problems": 4', (self.folder / "results/test/fuzz.json").read_text())
        code, summary, calls = self.run_stages("verify", "fuzz")
        self.assertEqual(code, 0, summary)
        self.assertEqual([call for call in calls if call.split()[0] in ("verify", "fuzz")], [])

    def test_a_stage_that_failed_is_named_and_run_again(self):
        code, summary, _ = self.run_stages("verify", FAILING="hostile")
        self.assertEqual(code, 1)
        self.assertIn("FAILED  verify_hostile, exit code 1", summary)
        code, summary, calls = self.run_stages("verify")
        self.assertEqual(code, 0, summary)
        self.assertTrue(any("hostile" in call for call in calls))

    def test_what_found_no_memory_beside_others_runs_again_after_them(self):
        code, summary, calls = self.run_stages("verify", ONCE="long")
        self.assertEqual(code, 0, summary)
        self.assertIn("again   verify_long", summary)
        self.assertIn("ok      verify_long", summary)
        self.assertEqual(len([call for call in calls if "--suite long" in call]), 2, calls)
        self.assertIn("OUT_OF_MEMORY", (self.folder / "out/verify_long.first.txt").read_text())

    def test_of_stages_that_run_side_by_side_each_is_told(self):
        sanitizer = self.folder / "path/compute-sanitizer"
        sanitizer.parent.mkdir()
        sanitizer.write_text("#!/bin/sh\nshift 4\nexec \"$@\"\n")  # --error-exitcode 9 --tool NAME COMMAND...
        sanitizer.chmod(0o755)
        shutil.copytree(ROOT / "kernels", self.folder / "kernels")
        code, summary, _ = self.run_stages("sanitizer", "verify", FAILING="hostile",
                                           PATH=f"{sanitizer.parent}:{os.environ['PATH']}")
        self.assertEqual(code, 1, summary)
        self.assertIn("FAILED: stage verify", summary)
        self.assertIn("passed: stage sanitizer", summary)
        self.assertIn("ok      sanitizer_memcheck", summary)

    def test_what_is_skipped_is_named_and_not_taken_as_passed(self):
        code, summary, _ = self.run_stages("tests", PYTHON="python3")
        self.assertEqual(code, 0, summary)
        self.assertIn("skipped cuda_test: not built", summary)
        self.assertFalse((self.folder / "out/tests.passed").exists())


if __name__ == "__main__":
    unittest.main()
