"""Compares the rooms that docs/rooms.md draws with those that CMake builds.

check_drawing.py ROOMS_MD ROOMS_TXT    ROOMS_TXT: one "room --> used room" a line, from CMake
check_drawing.py --self-test
"""

import re
import sys

EDGE = re.compile(r"^\s*(\w+)\s*-->\s*(\w+)\s*$")


def edges_of(lines):
    return [match.groups() for match in map(EDGE.match, lines) if match]


def drawn_edges(text):
    graphs = re.findall(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return edges_of("\n".join(graphs).splitlines())


def complaints(drawn, built):
    found = []
    if not built:
        found.append("CMake names no rooms")
    found += [f"{a} --> {b} is built but not drawn" for a, b in sorted(set(built) - set(drawn))]
    found += [f"{a} --> {b} is drawn but not built" for a, b in sorted(set(drawn) - set(built))]
    found += [f"{a} --> {b} is drawn twice" for a, b in sorted({edge for edge in drawn if drawn.count(edge) > 1})]
    # A cycle would build (static libraries may depend on each other), but then nothing points one way.
    below = {}
    for a, b in built:
        below.setdefault(a, set()).add(b)
    left = set(below)
    while free := {room for room in left if not below[room] & left}:
        left -= free
    if left:
        found.append("these use each other: " + ", ".join(sorted(left)))
    return found


def self_test():
    page = "x --> y\n\n```mermaid\ngraph BT\n    jit --> base\n    cuda --> jit\n```\n\na --> b\n"
    drawn = drawn_edges(page)
    assert drawn == [("jit", "base"), ("cuda", "jit")], drawn
    assert complaints(drawn, drawn) == []
    assert complaints(drawn, drawn[:1]) == ["cuda --> jit is drawn but not built"]
    assert complaints(drawn[:1], drawn) == ["cuda --> jit is built but not drawn"]
    assert complaints(drawn + drawn[:1], drawn) == ["jit --> base is drawn twice"]
    assert complaints([], []) == ["CMake names no rooms"]
    cycle = drawn + [("base", "cuda")]
    assert complaints(cycle, cycle) == ["these use each other: base, cuda, jit"]


def main(arguments):
    if arguments == ["--self-test"]:
        self_test()
        return 0
    page, rooms = arguments
    with open(page, encoding="utf-8") as file:
        drawn = drawn_edges(file.read())
    with open(rooms, encoding="utf-8") as file:
        built = edges_of(file.read().splitlines())
    found = complaints(drawn, built)
    for complaint in found:
        print(f"{page}: {complaint}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
