#!/usr/bin/env python3
"""skipped.py BUILD: what the last run of the unit tests and of the Python tests skipped, and why. Fails nothing."""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree


def of_ctest(log):
    """{(test, reason): tests}"""
    found = collections.Counter()
    for part in re.split(r"^\d+/\d+ Testing: ", log, flags=re.M)[1:]:
        name, output = part.split("\n", 1)
        reason = None
        for line in output.splitlines():
            # googletest prints the reason before the test's own line, and a list of names at the end.
            if re.match(r"\[  SKIPPED \] \S+ \(\d+ ms\)$", line):
                found[name, reason or "no reason given"] += 1
            elif line.startswith("skipped: "):
                found[name, line[len("skipped: "):]] += 1
            elif line.startswith("[ RUN "):
                reason = None
            elif line.strip() and not line.startswith("[") and not re.match(r".*: Skipped$", line):
                reason = line.strip()
    return found


def of_pytest(text):
    found = collections.Counter()
    for case in xml.etree.ElementTree.fromstring(text).iter("testcase"):
        for skipped in case.iter("skipped"):
            found[case.get("classname", "").rpartition(".")[2] + ".py", skipped.get("message", "")] += 1
    return found


def main(build):
    build, found = pathlib.Path(build), collections.Counter()
    for file, read in (("Testing/Temporary/LastTest.log", of_ctest), ("python-test.xml", of_pytest)):
        if (build / file).exists():
            found += read((build / file).read_text(errors="replace"))
    by_reason = collections.defaultdict(collections.Counter)
    for (name, reason), count in found.items():
        by_reason[reason.splitlines()[0][:150]][name] += count
    print("skipped:" if found else "nothing was skipped")
    for reason, names in sorted(by_reason.items()):
        some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        print(f"  {names.total()} because of: {reason} ({some})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "build")
