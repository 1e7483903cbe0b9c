"""The embedded documentation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from overnight.corpus import pydocs
from tests.corpus.folders import unreadable


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("Add :func:`~a.b.add` to ``x``.\n\n    >>> add(1)\n    2\n\nThe end is near.", "Add a.b.add to x.\n\nThe end is near."),
        (
            "Do it.\n\nParameters\n----------\nx : array_like, optional\n    The values to use.\n\nExamples\n--------\nNot this one.",
            "Do it.\n\nThe values to use.",
        ),
        (
            "Do it.\n\nArgs:\n    x (int): how many of them.\n    y (Tensor, optional): what to add.\nExample::\n\n    code here",
            "Do it.\n\nhow many of them.\n\nwhat to add.",
        ),
        (
            "Do it.\n\n:param x: the number of rows.\n:type x: int\n:raises ValueError: if it is zero.",
            "Do it.\n\nthe number of rows.\n\nif it is zero.",
        ),
        (
            "Take a look.\n\n.. math::\n\n    a = b\n\n.. note:: This is important.\n   And so on.",
            "Take a look.\n\nThis is important. And so on.",
        ),
        ("A title\n=======\n\n=====  =====\na      b\n=====  =====\n\nSome words follow.", "A title\n\nSome words follow."),
    ],
)
def test_docstrings_become_prose(raw: str, expected: str) -> None:
    assert pydocs.prose(raw) == expected


def test_names_and_docstrings_are_read_from_source_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        '"""The module does one thing and does it well."""\nraise SystemExit\nclass A:\n    """A class that holds many things together."""\n'
        '    async def f(self):\n        """A method that waits until it has been called."""\n    def g(self):\n        """Short."""\n'
        'add_docstr(torch.abs, r"""\nComputes the absolute value of each {x} element.\n""" + """Elements stay where they are.""".format(**args))\n'
        "add_newdoc('numpy', 'array', ('size', \"\"\"Number of elements that are in the array.\"\"\"))\n"
    )
    found = pydocs._docstrings_of_files(("p", [(str(path), "p.m")]))
    assert [doc.name for doc in found] == ["p.m", "p.m.A", "p.m.A.f", "torch.abs", "numpy.array.size"]
    assert found[3].text == "Computes the absolute value of each element. Elements stay where they are."


def test_a_folder_of_sources_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    unreadable(monkeypatch, "closed")
    with pytest.raises(PermissionError, match="closed"):
        list(pydocs._sources(tmp_path))
    assert not list(pydocs._sources(tmp_path / "python.zip"))


def test_the_language_reference_comes_first_and_modules_follow() -> None:
    names = [name for name, text in islice(pydocs.python_docs(workers=1), 90) if text]
    assert names[0] == "topic:assert"
    assert any(not name.startswith("topic:") for name in names)
    assert names == [name for name, text in islice(pydocs.python_docs(workers=1), 90) if text]


def test_a_process_reads_the_sources_once(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = [pydocs.Docstring("p", "p.m", f"p.m.f{n}", f"text {n % 2}") for n in range(4)]
    reads = []

    def run(function: object, tasks: list[object], workers: int) -> Iterator[list[pydocs.Docstring]]:
        reads.append(len(tasks))
        yield from ([doc] for doc in docs)

    monkeypatch.setattr(pydocs, "run_tasks", run)
    monkeypatch.setattr(pydocs, "_read", [])
    assert next(pydocs.docstrings()) == docs[0] and pydocs._read == [], "what was read in part is not taken for all"
    assert list(pydocs.docstrings()) == list(pydocs.docstrings()) == docs[:2]
    assert len(reads) == 2
