"""What the README and the documentation show is true: their commands and paths exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping

from tests.conftest import ROOT


def fenced(text: str) -> list[tuple[int, list[str]]]:
    """Fenced blocks of Markdown: the line their content begins in, and their lines."""
    blocks: list[tuple[int, list[str]]] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
            if inside:
                blocks.append((number + 1, []))
        elif inside:
            blocks[-1][1].append(line)
    return blocks


_COMMAND = re.compile(r"^\s*(?:\$ )?(?:\w+=\S+ )*(?:\S*/)?(?:.* -m )?(overnight|make) +([\w-]+)")


def wrong_commands(readme: str, known: Mapping[str, set[str]]) -> list[str]:
    """Commands in the fenced blocks whose command or make target does not exist."""
    found = [match.groups() for _, lines in fenced(readme) for line in lines if (match := _COMMAND.match(line))]
    return [f"{program} {command}" for program, command in found if not command.startswith("-") and command not in known[program]]


def tree_paths(readme: str) -> list[str]:
    """Paths that the folder tree names; it is the fenced block with a line that begins with `overnight/`."""
    found: list[str] = []
    trees = [lines for _, lines in fenced(readme) if any(re.match(r"overnight/(\s|$)", line) for line in lines)]
    for line in (line for lines in trees for line in lines):
        plain = re.sub("[│├└─]", " ", line)
        if not plain.strip():
            continue
        first, *rest = plain.split()
        depth = len(plain) - len(plain.lstrip())
        if not depth:
            parents: list[tuple[int, str]] = []
        while parents and parents[-1][0] >= depth:
            parents.pop()
        here = parents[-1][1] if parents else ""
        found.append(here + first)
        if first.endswith("/"):
            parents.append((depth, here + first))
        beside = here + first if first.endswith("/") else here
        found += [beside + word for word in rest if re.fullmatch(r"[\w.-]+\.(md|py|toml|txt|yaml)|LICENSE|Makefile", word)]
    return found


def commands() -> set[str]:
    """The commands of `overnight --help`."""
    text = subprocess.run([sys.executable, "-m", "overnight", "--help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return set(re.findall(r"^ {4}([a-z-]+)(?: {2}|$)", text, re.M))


def test_every_command_in_the_readme_and_the_documentation_exists() -> None:
    known = {"overnight": commands(), "make": set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))}
    assert {"run", "doctor"} <= known["overnight"]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert {page.name: wrong for page in pages if (wrong := wrong_commands(page.read_text(encoding="utf-8"), known))} == {}


def test_every_path_in_the_readme_tree_exists_and_every_package_stands_there() -> None:
    paths = tree_paths((ROOT / "README.md").read_text(encoding="utf-8"))
    assert paths, "the README has no folder tree"
    assert [path for path in paths if not list(ROOT.glob(path.rstrip("/")))] == []
    packages = {f"overnight/{path.parent.name}/" for path in (ROOT / "overnight").glob("*/__init__.py")}
    assert packages - set(paths) == set()


def test_the_readme_shows_its_first_command_within_25_lines() -> None:
    blocks = fenced((ROOT / "README.md").read_text(encoding="utf-8"))
    assert blocks and blocks[0][0] <= 25


def test_the_readme_checks_find_what_they_look_for() -> None:
    readme = "# x\n```\n$ overnight fly demo\nmake demo\nA=1 torchrun -m overnight sink x\n```\n```\nREADME.md  gone.md\novernight/\n  corpus/  raw text\n    files.py\ndocs/   a.md · b.md\n```\n"
    assert wrong_commands(readme, {"overnight": {"run"}, "make": {"demo"}}) == ["overnight fly", "overnight sink"]
    named = "README.md gone.md overnight/ overnight/corpus/ overnight/corpus/files.py docs/ docs/a.md docs/b.md"
    assert tree_paths(readme) == named.split()
    assert fenced(readme)[0][0] == 3
