"""The words of the package: docstrings open with a verb, spelling is American, and names that were given up do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.conftest import ROOT
from tests.syntax import comments, nodes, possible_comments

Nodes = tuple[ast.AST, ...]

PARTS = (
    "distributed",
    "checkpoint",
    "run_dir",
    "engine",
    "batches",
    "optim",
    "models",
    "tasks",
    "corpus",
    "finetune",
    "byte_lm",
    "inference",
    "bench",
    "download",
)
# No docstring of a function opens with one of these: it opens with a verb in the imperative ("Return the ...", "Check that ...").
NO_VERBS = re.compile(
    "A All Also An And Any As At Both Every Each From How If In It Its Most No None Not Nothing Of On One Only Our Some Such That The Their There "
    "These This Those To Two What Whatever When Where Whether Which Who Whose Why With Within Without".replace(" ", "|")
)
# A verb that is in the third person opens none either.
THIRD_PERSON = re.compile(r"(Return|Yield|Write|Read|Raise|Take|Check|Make|Give|Add|Compute|Measure|Keep)s\b")
BRITISH = re.compile(
    r"behaviou|colou?r(?<=our)|favour|neighbour|labell|cancell|catalogue|artefact|centre|spelt|"
    r"(?:optim|normal|token|initial|synchron|amort|final|recogn|minim|maxim|serial|quant|summar|organ|general|parametr)is(?:e|ing|ation|er)",
    re.IGNORECASE,
)
# Names of the program's youth, as parts of an identifier in snake case.
OLD_NAMES = re.compile(
    "(?<![^_])(?:agree|boards|brought|cuts|dealt|elsewhere|featurise|forget|gathered|grain|greatest|halt(?:ed)?|held|hits?|judged?|lanes?|listed|"
    "origin|owed|pace|pieces?|problem_kind|saver|say|span_reader|stood|summing|told|trials|watch(?:ed)?|ways?|wide)(?![^_])"
)
# Words that the field has others for, and names of options and commands that were given up, in texts for a reader.
OLD_WORDS = re.compile(
    r"held[-\s]+out|from\s+scratch|\bverbs?\b(?!\s+in\s+the)|\b(?:go|goes|going|went|gone)\s+on\b|\bjudg(?:e|es|ed)\b|"
    r"--(?:baseline|max_rows|stride|max_answer|misplaced|print_config)\b|finetune [^`\n]*--(?:length|batch|warmup)=|overnight (?:transfer|featurise)\b",
    re.IGNORECASE,
)


MAX_COLUMNS = 120
"""Of a line of prose in Markdown."""


def modules() -> Iterator[tuple[str, Nodes]]:
    """Yield the modules of the parts, with all nodes of their syntax trees."""
    for part in PARTS:
        for path in sorted((ROOT / "overnight" / part).rglob("*.py")):
            yield f"{part}.{path.stem}", nodes(path.read_text(encoding="utf-8"))


def no_imperatives(module: Nodes) -> list[str]:
    """Return the functions whose docstring does not open with a capitalized verb; a property's says what it is."""
    found = []
    for node in module:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
            continue
        if any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list):
            continue
        word = re.split(r"[\s,.:;]", text, maxsplit=1)[0]
        if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word) or NO_VERBS.fullmatch(word) or THIRD_PERSON.match(word):
            found.append(f"{node.name}: {text.splitlines()[0]}")
    return found


def identifiers(module: Nodes) -> set[str]:
    """Return the names that a module gives to classes, functions, parameters, variables and attributes."""
    found = set()
    for node in module:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def old_names(names: set[str]) -> list[str]:
    """Return the names that have a part that was given up, or a British one."""
    snake = {name: re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names}
    return sorted(name for name, text in snake.items() if BRITISH.search(text) or OLD_NAMES.search(text))


def texts(path: Path) -> Iterator[str]:
    """Yield what a file says to a reader: of Python the strings, docstrings among them, and comments with such a word, else all of it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    yield from (node.value for node in nodes(text) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    if any(pattern.search(possible_comments(text)) for pattern in (OLD_WORDS, BRITISH)):
        yield from comments(text)


def readable() -> Iterator[Path]:
    """Yield the files of the package, of its pages, examples and benchmarks; not those whose subject are the old names."""
    for folder in ("overnight", "docs", "examples", "benchmarks"):
        yield from (
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in (".py", ".md", ".html", ".yaml", ".c", ".h") and "results" not in path.parts
        )
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))


def wrong_words(path: Path) -> list[str]:
    """Return the old names and words, and the British spellings, that a file has in its texts."""
    return [match[0] for text in texts(path) for pattern in (OLD_WORDS, BRITISH) for match in pattern.finditer(text)]


def missing_paths(page: str) -> list[str]:
    """Return the files and modules that a page of the documentation names and that are not there."""
    files = re.findall(r"`(?:python )?((?:tests|benchmarks|overnight|docs)/[\w/.-]+\.\w+)", page)
    # One trip of a value names the modules on its way.
    trips = "\n".join(re.findall(r"^## One trip.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    files += [
        f"overnight/{module.replace('.', '/')}.py"
        for module in re.findall(r"`([a-z_]+\.[a-z_]+)`", trips)
        if not module.startswith("optim.lr")
    ]
    files += [f"benchmarks/results/{name.rstrip('.')}" for name in re.findall(r"benchmarks/results/(\d[\w.-]+)", page)]
    files += [f"benchmarks/results/{name}" for name in re.findall(r"`(\d{4}-\d\d-\d\d-cpu\d-[\w-]+)`", page)]
    return sorted({file for file in files if not (ROOT / file).exists()}, key=files.index)


def long_lines(page: str) -> list[int]:
    """Return the numbers of the lines of prose of a page in Markdown that are too long: not blocks, tables and headings, nor what cannot be broken."""
    found, fence = [], ""
    for number, line in enumerate(page.splitlines(), 1):
        mark = re.match(r"\s*(```+)", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence and len(line) > MAX_COLUMNS and not re.match(r"\s*(\||#)|.*    ", line):
            words = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "_"), line.strip()).split()
            if len(words) > 2:  # not a mark of a list with one word, or a word with a full stop
                found.append(number)
    return found


def unnamed(paths: Iterable[str], page: str) -> list[str]:
    """Return the modules, by their paths in the package, that the tree of the design page does not name in the row of their folder."""
    rows = dict(re.findall(r"^  (\w+)/ +(.*)$", page, re.MULTILINE))
    files = [path.removesuffix(".py").split("/") for path in paths]
    return [f"{folder}/{name}" for folder, name in files if not re.search(rf"\b{name}\b", rows.get(folder, ""))]


def test_docstrings_of_functions_open_with_an_imperative_verb() -> None:
    assert {name: found for name, module in modules() if (found := no_imperatives(module))} == {}


def test_no_name_is_an_old_one() -> None:
    assert {name: found for name, module in modules() if (found := old_names(identifiers(module)))} == {}


def test_no_text_has_an_old_word_or_a_british_spelling() -> None:
    # The glossary gives the words of others.
    exempt = {"docs/changelog.md", "docs/glossary.md"}
    files = [path for path in readable() if str(path.relative_to(ROOT)) not in exempt]
    assert {str(path.relative_to(ROOT)): found for path in files if (found := wrong_words(path))} == {}


def test_lines_of_prose_break_by_120_columns() -> None:
    pages = [path for folder in (".", "docs", "examples") for path in (ROOT / folder).glob("*.md")]
    assert {str(page.relative_to(ROOT)): found for page in sorted(pages) if (found := long_lines(page.read_text(encoding="utf-8")))} == {}


def test_files_and_modules_that_the_documentation_names_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert {page.name: missing for page in pages if (missing := missing_paths(page.read_text(encoding="utf-8")))} == {}


def test_the_tree_of_the_design_page_names_every_module() -> None:
    package = ROOT / "overnight"
    paths = [str(path.relative_to(package)) for path in sorted(package.glob("*/*.py")) if path.stem != "__init__"]
    assert unnamed(paths, (ROOT / "docs" / "design.md").read_text(encoding="utf-8")) == []


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    planted = '''
class Saver:
    """A class may open with a noun."""

    @property
    def size(self):
        """Bytes so far."""

    def judge(self, grain, streams):
        """The score, of normalised examples."""
        self.held_out = lanes = 1


def bytes_left():
    """bytes that are left."""


def reads():
    """Returns what it reads."""


def fine():
    """Return the number of samples."""
'''
    module = nodes(planted)
    assert {text.split(":")[0] for text in no_imperatives(module)} == {"bytes_left", "reads", "judge"}
    assert old_names(identifiers(module)) == ["Saver", "grain", "held_out", "judge", "lanes"]
    (tmp_path / "planted.py").write_text(f"{planted}# It is judged.\nverb = f'{{verb}} is fine'\n")
    assert wrong_words(tmp_path / "planted.py") == ["normalise", "judged"]
    (tmp_path / "page.md").write_text(
        "The same command goes\non with the held-out text: overnight finetune mine --length=384 --baseline=true\n"
    )
    assert wrong_words(tmp_path / "page.md") == ["goes\non", "held-out", "finetune mine --length=", "--baseline"]
    words, command = 25 * "word ", f"`overnight {25 * '--key=1 '}`"
    page = f"{words}\n- {command}\n```\n{words}\n```\n| {words} |\n# {words}\n{words}{command}\nshort\n"
    assert long_lines(page) == [1, 8]
    page = "`tests/test_prose.py`, `benchmarks/gone.py`\n## One trip of x\n`corpus.readers`, then `corpus.gone`\n## Else\n`corpus.other`"
    assert missing_paths(page) == ["benchmarks/gone.py", "overnight/corpus/gone.py"]
    assert unnamed(["a/one.py", "a/one_more.py", "b/two.py"], "  a/   one, two\n") == ["a/one_more", "b/two"]
    page = "`benchmarks/results/2026-11-23-cpu1-int8`, (`benchmarks/results/2026-11-22-cpu1-gone` and `2026-11-23-cpu2-absent`)"
    assert [path.rpartition("-")[2] for path in missing_paths(page)] == ["gone", "absent"]
    assert old_names({"tokenise_text", "normalize", "SpanReader", "widest", "placeholder"}) == ["SpanReader", "tokenise_text"]
