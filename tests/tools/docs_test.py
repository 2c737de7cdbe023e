"""Checks what the pages (*.md) name: links, headings, files, commands and their flags, variables, functions, results.

docs_test.py TESSERA      TESSERA: the program, whose --help knows the flags
docs_test.py --self-test
"""

import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_OURS = re.compile(r"build|\.")  # what begins so at the root
HISTORY = "CHANGELOG.md"  # names what is gone, too
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n)\n((?: {4}.*(?:\n|\Z))+)")
SPAN = re.compile(r"`([^`\n]+)`")


def blank(match):
    return "\n" * match.group().count("\n")


def prose(text):
    return INDENTED.sub(blank, FENCED.sub(blank, text))


def anchors(text):
    """Those that GitHub gives headings."""
    found = []
    for heading in re.findall(r"^#+ +(.*)$", FENCED.sub(blank, text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()).replace("`", "").lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


def links(text):
    return re.findall(r"\]\(([^()\s]+)\)", SPAN.sub("", prose(text)))


def wrong_links(root, pages):
    """Links to files and headings that do not exist, and pages that README does not lead to."""
    found, leads_to = [], {}
    for name, text in pages.items():
        leads_to[name] = set()
        for link in links(text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            file = ((root / name).parent / path).resolve() if path else (root / name).resolve()
            other = str(file.relative_to(root.resolve())) if file.is_relative_to(root.resolve()) else None
            leads_to[name].add(other)
            if other is None or not file.exists():
                found.append(f"{name}: there is no {link}")
            elif anchor and anchor not in anchors(pages.get(other, "")):
                found.append(f"{name}: {other} has no heading for #{anchor}")
    reached, new = set(), {"README.md"}
    while new:
        reached |= new
        new = set().union(*(leads_to.get(name, set()) for name in new)) & set(pages) - reached
    return found + [f"{name}: no link leads here from README.md" for name in sorted(set(pages) - reached)]


def wrong_paths(root, pages):
    """Files in code spans, from the root of the repository on, that do not exist."""
    folders = "|".join(sorted(re.escape(f.name) for f in root.iterdir() if f.is_dir() and not NOT_OURS.match(f.name)))
    path = re.compile(rf"((?:{folders})/[\w./-]*)(?:\{{([\w,]+)\}})?(?=$|[ :#)])")
    found = []
    for name, text in pages.items():
        for span in SPAN.findall(FENCED.sub(blank, text)) if name != HISTORY else []:
            match = path.match(span)
            for ending in (match[2] or "").split(",") if match else []:
                if not (root / (match[1] + ending)).exists():
                    found.append(f"{name}: there is no {match[1]}{ending}")
    return found


def commands(text):
    """Lines of code blocks and code spans that begin with a command of this repository, as words."""
    blocks = [block for fenced in FENCED.findall(text) for block in fenced.splitlines()[1:-1]]
    blocks += [line for block in INDENTED.findall("\n\n" + FENCED.sub(blank, text)) for line in block.splitlines()]
    for line in blocks + SPAN.findall(FENCED.sub(blank, text)):
        words = line.split("#")[0].split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and re.fullmatch(r"(build/bin/)?tessera|make|python3?|scripts/\w+\.(py|sh)", words[0]):
            yield words


def wrong_commands(root, pages, help_of):
    """Targets, scripts and flags that do not exist. help_of(words): what `tessera WORDS --help` prints, or None."""
    makefile = (root / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    found = []
    for name, text in pages.items():
        for words in commands(text):
            flags = {word.split("=")[0] for word in words if re.match(r"--\w", word)}
            line = " ".join(words)
            if words[0] == "make":
                missing = {w for w in words[1:2] if re.fullmatch(r"[a-z-]+", w)} - targets
            elif words[0].endswith("tessera"):
                command = []
                for word in words[1:3]:  # `tune attention`, but not a file after `cache list`
                    if not re.fullmatch(r"[a-z]+", word) or help_of(command + [word]) is None:
                        break
                    command.append(word)
                if len(words) > 1 and not command and re.match(r"[a-z]", words[1]):
                    missing = {words[1]}
                else:
                    missing = flags - set(re.findall(r"--[\w-]+", help_of(command)))
            else:
                python = words[0].startswith("python")
                script = words[1] if python and len(words) > 1 else words[0]
                if script == "-m" and len(words) > 2 and words[2].startswith("tessera"):
                    script = "python/" + words[2].replace(".", "/")
                    script += "" if (root / script).is_dir() else ".py"
                elif python and not script.endswith(".py"):
                    continue
                if not (root / script).exists():
                    missing = {script}
                else:
                    files = [root / script] if (root / script).is_file() else (root / script).rglob("*.py")
                    source = "".join(file.read_text() for file in files)
                    missing = {flag for flag in flags if not re.search(re.escape(flag) + r"(?![\w-])", source)}
            found += [f"{name}: `{line}` has {word}, which does not exist" for word in sorted(missing)]
    return found


def wrong_names(pages, sources):
    """Variables, macros and C functions that no source has."""
    found = []
    for name, text in pages.items():
        for word in sorted(set(re.findall(r"\b(?:TESSERA|tessera)_\w+", text))) if name != HISTORY else []:
            if not re.search(rf"\b{word}" + ("" if word.endswith("_") else r"\b"), sources):
                found.append(f"{name}: no source has {word}")
    return found


def wrong_results(root):
    """Files of results/<gpu>/ that its README does not name, and the reverse."""
    found = []
    for folder in sorted(f for f in (root / "results").iterdir() if f.is_dir()):
        readme = folder / "README.md"
        named = set(re.findall(r"^\| `(\w+\.\w+)`", readme.read_text(), re.MULTILINE)) if readme.exists() else set()
        there = {f.name for f in folder.iterdir() if f.is_file()} - {"README.md"}
        where = readme.relative_to(root)
        found += [f"{where}: {name} is there and not named" for name in sorted(there - named)]
        found += [f"{where}: {name} is named and not there" for name in sorted(named - there)]
    return found


def self_test():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        files = {"README.md": "", "docs/b.md": "", "Makefile": "test: build\n", "src/a.cc": "", "scripts/run.py": '"--list"',
                 "python/tessera/bench/__main__.py": '"--suite"', "results/gpu/README.md": "| `a.json` | |",
                 "results/gpu/b.json": ""}
        for file, text in files.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        pages = {"README.md": "# A `b`, c\n## Two\n## Two\n[x](docs/b.md#d) [y](#a-b-c) [t](#two-1) `[j](x)`\n\n    f[j](x)\n",
                 "docs/b.md": "# D\n[up](../README.md#gone) [web](https://a.b) [no](../src/c.cc)", "docs/c.md": ""}
        assert wrong_links(root, pages) == [
            "docs/b.md: README.md has no heading for #gone", "docs/b.md: there is no ../src/c.cc",
            "docs/c.md: no link leads here from README.md"], wrong_links(root, pages)
        paths = {"README.md": "`src/a.cc`, `src/a.{cc,h}`, `src/<family>/x`, `src/z/`, `bf16/d64`"}
        assert wrong_paths(root, paths) == ["README.md: there is no src/a.h", "README.md: there is no src/z/"]
        page = ("\n    make test    # all\n    TESSERA_X=1 build/bin/tessera tune attention --d 8 --dd\n    scripts/run.py --list\n\n"
                "`make tost` `tessera tine` `tessera cache list x` `tessera --version`\n\n"
                "```\nscripts/run.py --lis\npython -m tessera.bench --suite x --sweet\npython scripts/gone.py\n```\n")
        helps = {(): "--version", ("tune",): "--list", ("tune", "attention"): "--d N", ("cache",): "", ("cache", "list"): ""}
        found = wrong_commands(root, {"p": page}, lambda words: helps.get(tuple(words)))
        wrong = sorted(re.search(r"has (\S+),", f)[1] for f in found)
        assert wrong == sorted(["--dd", "tost", "tine", "--lis", "--sweet", "scripts/gone.py"]), found
        assert wrong_names({"p": "`TESSERA_A`, TESSERA_B tessera_c_d"}, "TESSERA_A tessera_c") == [
            "p: no source has TESSERA_B", "p: no source has tessera_c_d"]
        assert wrong_results(root) == ["results/gpu/README.md: b.json is there and not named",
                                       "results/gpu/README.md: a.json is named and not there"]


def main(arguments):
    if arguments == ["--self-test"]:
        self_test()
        return 0
    (program,) = arguments

    @functools.cache
    def asked(words):
        answer = subprocess.run([program, *words, "--help"], capture_output=True, text=True)
        shown = re.search(r"^Usage: tessera *(.*?) *\[OPTIONS\]", answer.stdout, re.MULTILINE)
        return answer.stdout if answer.returncode == 0 and shown and shown[1].split() == list(words) else None

    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.splitlines()

    def files(*endings):
        return [ROOT / name for name in listed if name.endswith(endings) and (ROOT / name).is_file()]

    pages = {str(f.relative_to(ROOT)): f.read_text() for f in files(".md")}
    sources = "\n".join(f.read_text() for f in files(".h", ".hpp", ".cc", ".cuh", ".c", ".py", ".sh", ".cmake", ".txt"))
    found = wrong_links(ROOT, pages) + wrong_paths(ROOT, pages) + wrong_names(pages, sources) + wrong_results(ROOT)
    found += wrong_commands(ROOT, pages, lambda words: asked(tuple(words)))
    print("\n".join(found) or f"{len(pages)} pages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
