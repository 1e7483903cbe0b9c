"""The embedded default text: documentation that ships inside every Python environment.

The language reference of `pydoc_data.topics`, and the docstrings of the standard library and of well-documented
packages where they are installed. Source files are parsed, never imported, so nothing of them runs.
"""

from __future__ import annotations

import ast
import inspect
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from overnight.corpus.data_paths import stop
from overnight.corpus.workers import run_tasks
from overnight.machine import usable_cores

# What torch, numpy and the demo bring along; one that is absent is passed over.
PACKAGES = (
    "numpy",
    "torch",
    "scipy",
    "sklearn",
    "sympy",
    "networkx",
    "pyarrow",
    "huggingface_hub",
    "fsspec",
    "joblib",
    "jinja2",
    "pydantic",
    "rich",
)
_SKIPPED_FOLDERS = frozenset(
    "test tests testing conftest site-packages dist-packages idlelib lib2to3 turtledemo ensurepip _vendor externals".split()  # noqa: SIM905
)
_FILES_PER_TASK = 100
_STANDARD_LIBRARY = "python"
# What this process has read: a run of the demo needs it for its text and again for its task.
_read: list[Docstring] = []


@dataclass(frozen=True)
class Docstring:
    """The documentation of one module, class or function."""

    package: str
    """Import name; `python` for the standard library."""
    module: str
    name: str
    """Qualified: `json.decoder.JSONDecoder.raw_decode`."""
    text: str
    """Prose: paragraphs of one line, blank lines between them."""


def python_docs(workers: int) -> Iterator[tuple[str, str]]:
    """Yield documents: every topic of the language reference, then every module with all of its docstrings.

    Args:
        workers: processes; 0 takes every core. The order does not depend on it.

    Yields:
        The name of the document (`topic:NAME` or a module) and its text.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic:{name}", prose(topics[name])
    for module, group in groupby(docstrings(workers), key=lambda doc: doc.module):
        yield module, "\n\n".join(doc.text for doc in group)


def docstrings(workers: int = 0) -> Iterator[Docstring]:
    """Yield every docstring that has prose in it, in a fixed order; of equal texts only the first.

    Args:
        workers: processes; 0 takes every core.
    """
    if _read:
        yield from _read
        return
    seen: dict[str, Docstring] = {}
    for found in run_tasks(_docstrings_of_files, list(_tasks()), workers or usable_cores()):
        for doc in found:
            if doc.text not in seen:
                seen[doc.text] = doc
                yield doc
    _read.extend(seen.values())


def environment() -> list[tuple[str, str]]:
    """Return the packages that are read, with their versions: the text depends on them."""
    from importlib.metadata import PackageNotFoundError, version

    found = [(_STANDARD_LIBRARY, platform.python_version())]
    for package in PACKAGES:
        try:
            found.append((package, version({"sklearn": "scikit-learn"}.get(package, package))))
        except PackageNotFoundError:
            continue
    return found


_Task = tuple[str, list[tuple[str, str]]]


def _tasks() -> Iterator[_Task]:
    """Yield lists of source files with their modules."""
    for package in (_STANDARD_LIBRARY, *PACKAGES):
        if package == _STANDARD_LIBRARY:
            root = Path(sysconfig.get_paths()["stdlib"])
        else:
            spec = find_spec(package)  # of a top-level name, this imports nothing
            if spec is None or not spec.submodule_search_locations:
                continue
            root = Path(spec.submodule_search_locations[0])
        files = sorted(_sources(root), key=lambda file: file.parts)
        prefix = "" if package == _STANDARD_LIBRARY else f"{package}."
        named = [
            (str(root / file), f"{prefix}{'.'.join(file.with_suffix('').parts)}".removesuffix("__init__").removesuffix("."))
            for file in files
        ]
        for start in range(0, len(named), _FILES_PER_TASK):
            yield package, named[start : start + _FILES_PER_TASK]


def _sources(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root, onerror=stop) if root.is_dir() else ():  # it may be an archive
        names[:] = [name for name in names if name not in _SKIPPED_FOLDERS and not name.startswith(".") and name.isidentifier()]
        yield from (Path(folder, file).relative_to(root) for file in files if file.endswith(".py") and not file.startswith("test_"))


def _docstrings_of_files(task: _Task) -> list[Docstring]:
    package, files = task
    found = []
    for path, module in files:
        source = Path(path).read_bytes()
        if b'"""' not in source and b"'''" not in source:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in other people's strings
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError):
                continue  # templates and deliberately broken files
        for name, raw in _walk(tree, module):
            if len(text := prose(raw)) >= 40:
                found.append(Docstring(package, module, name, text))
    return found


def _walk(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[tuple[str, str]]:
    """Yield qualified names and raw docstrings, in the order of the source."""
    if text := ast.get_docstring(node, clean=False):
        yield name, text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield from _added(child.value)


def _added(call: ast.Call) -> Iterator[tuple[str, str]]:
    """Yield docstrings of compiled functions: torch's `add_docstr(torch.abs, "...")` and numpy's `add_newdoc(module, name, "...")`."""
    kind = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if kind == "add_docstr" and len(call.args) == 2:
        yield ast.unparse(call.args[0]), _string(call.args[1])
    elif kind == "add_newdoc" and len(call.args) == 3:
        *owner, doc = call.args
        names = [str(part.value) for part in owner if isinstance(part, ast.Constant)]
        if isinstance(doc, ast.Tuple) and len(doc.elts) == 2:
            names.append(_string(doc.elts[0]))
            doc = doc.elts[1]
        yield ".".join(names), _string(doc)


def _string(node: ast.expr) -> str:
    """Return the text of a constant, a sum of constants, or a constant that is formatted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp):
        return _string(node.left) + _string(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _string(node.func.value)
    return ""


_DIRECTIVE = re.compile(r"^(\s*)\.\. ?([\w:-]*?)::\s*(.*)$")
_DROPPED_DIRECTIVES = frozenset(
    [
        "math",
        "code",
        "code-block",
        "sourcecode",
        "testcode",
        "testoutput",
        "testsetup",
        "plot",
        "ipython",
        "autosummary",
        "toctree",
        "image",
        "figure",
        "table",
        "list-table",
        "csv-table",
        "currentmodule",
        "module",
        "autofunction",
        "autoclass",
        "index",
        "only",
        "doctest",
        "parsed-literal",
        "productionlist",
        "highlight",
    ]
)
_UNDERLINE = re.compile(r"^\s*[=\-~^\"'*+#]{3,}\s*$")
_DROPPED_SECTIONS = re.compile(r"^(?:examples?|references|see also|usage|shape|signature|parameters set|methods table)s?:{0,2}$", re.I)
_OTHER_SECTIONS = re.compile(
    r"^(?:parameters?|other parameters|returns?|yields?|raises?|warns?|warnings?|notes?|attributes?|methods?|args?|arguments?|keyword arguments|kwargs|keyword args|inputs?|outputs?):{0,2}$",
    re.I,
)
_FIELD = re.compile(r"^\s*:(?P<kind>\w+)(?:\s+[^:\n]*)?:(?:\s+(?P<text>.*))?$")
_GOOGLE_ARGUMENT = re.compile(r"^\s*[-*]?\s*`{0,2}\*{0,2}[\w.,* /]+`{0,2}\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*:\s*")
_NUMPY_PARAMETER = re.compile(r"^\s*\*{0,2}`{0,2}[\w.\[\]]+`{0,2}(?:,\s*\*{0,2}[\w.]+)*\s+: +\S.*$|^\s*\*{1,2}\w+$")
_TABLE_RULE = re.compile(r"^\s*=+(?:\s+=+)+\s*$")
_GRID_ROW = re.compile(r"^\s*(?:[|+].*[|+]|-+(?:\s+-+)+)\s*$")
_ROLE = re.compile(r":[\w.:+-]+:`~?([^`<]*?)\s*(?:<[^`>]*>)?`")
_LITERAL = re.compile(r"`{1,2}~?([^`]{1,200}?)`{1,2}_{0,2}")
_CITATION = re.compile(r"\s*\[[^\]\s]{1,20}\]_|\|[a-z_]+\||^\.\. (?:\[[^\]]+\]|_[^:]+:).*$", re.M)
_PLACEHOLDER = re.compile(r"\{\w+\}|%\(\w+\)s")


def prose(raw: str) -> str:
    """Return the sentences of a docstring: no examples, code, formulas, tables, type lines or field marks.

    Args:
        raw: a docstring as written, in reST, numpy or Google style.
    """
    text = "\n".join(_kept_lines(inspect.cleandoc(raw).split("\n")))
    text = _CITATION.sub("", text)
    text = _ROLE.sub(r"\1", text)
    text = _LITERAL.sub(r"\1", text)
    text = _PLACEHOLDER.sub("", text).replace("::\n", ":\n")
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if " " in part and sum(map(str.isalpha, part)) >= 0.6 * len(part.replace(" ", "")))


def _kept_lines(lines: list[str]) -> Iterator[str]:
    deeper = -1  # inside a block that goes: every line indented more than this
    section = doctest = table = False  # inside one that goes
    for number, line in enumerate(lines):
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if not bare:
            doctest = False
            table = table and not _TABLE_RULE.match(lines[number - 1])
            yield ""
            continue
        if deeper >= 0 and indent > deeper:
            continue
        deeper = -1
        doctest = doctest or bare.startswith((">>>", "In ["))
        table = table or bool(_TABLE_RULE.match(line))
        if doctest or table:
            continue
        if bare.endswith(":") and _DROPPED_SECTIONS.match(bare):
            deeper = indent
        elif _UNDERLINE.match(following):
            section = bool(_DROPPED_SECTIONS.match(bare))
            if not section and not _OTHER_SECTIONS.match(bare):
                yield from ("", bare, "")
        elif section or _UNDERLINE.match(line) or _GRID_ROW.match(line) or _OTHER_SECTIONS.match(bare):
            continue
        elif directive := _DIRECTIVE.match(line):
            name, text = directive[2], directive[3]
            if name in _DROPPED_DIRECTIVES:
                deeper = indent
            elif not name.startswith("version") and name not in ("deprecated", "seealso", "rubric"):
                yield from ("", text)
        else:
            yield from _sentence_of(line)
            if bare.endswith("::"):
                deeper = indent


def _sentence_of(line: str) -> list[str]:
    """Return a line without the name and type of the argument it tells of; a new argument begins a paragraph."""
    if field := _FIELD.match(line):
        return ["", field["text"] or ""] if field["kind"] not in ("type", "rtype", "class", "nosignatures") else [""]
    if argument := _GOOGLE_ARGUMENT.match(line):
        return ["", line[argument.end() :]]
    if _NUMPY_PARAMETER.match(line):
        return [""]
    return [line]
