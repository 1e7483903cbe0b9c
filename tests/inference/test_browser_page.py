"""The page of `overnight serve` asks what was written and shows all that a task answers; its script runs in node, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes import HANG

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="the script of the page runs in node")
PAGE = files("overnight.inference").joinpath("page.html").read_text(encoding="utf-8")
PAIRS = {"task": "mine", "kind": "classification", "pairs": True, "fills": False, "width": 8}
MASK = {"task": "mask", "kind": "mask", "pairs": None, "fills": True, "width": 8}


def pressed(health: dict[str, Any], found: Any, press: str = "predict", **fields: str) -> dict[str, Any]:
    """What the page asks the server, shows and hides when its fields are filled in and a button is pressed."""
    (script,) = re.findall(r"<script>\n(.*?)</script>", PAGE, re.DOTALL)
    sent = {"script": script, "health": health, "fields": fields, "press": press, "found": found}
    way = Path(__file__).with_name("page_in_node.js")
    done = subprocess.run([str(NODE), str(way)], input=json.dumps(sent), capture_output=True, encoding="utf-8", timeout=HANG, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("kind", "answer", "shown"),
    [
        ("classification", {"label": "b", "probabilities": {"a": 0.25, "b": 0.75}}, ["b", "75.0 %", "a", "25.0 %"]),
        ("multi_label", {"labels": ["a"], "probabilities": {"a": 0.75, "b": 0.5}}, ["a", "75.0 %", "b", "50.0 %"]),
        ("regression", {"score": 2.5}, ["2.5"]),
        ("token_classification", {"tokens": ["Ann", "is"], "tags": ["B-PER", "O"], "probabilities": [0.5, 1], "entities": []}, ["Ann [B-PER] is"]),
        ("spans", {"answer": "nine", "start": 3, "end": 7, "probability": 0.5}, ["nine", "50.0 %"]),
        ("spans", {"answer": "", "probability": 1, "null_odds": 3.0}, ["(no answer)", "100.0 %"]),
        ("mask", [[{"token": "cat", "probability": 0.5}], [{"token": "dog", "probability": 0.25}]], ["[MASK] 1", "cat", "50.0 %", "[MASK] 2", "dog", "25.0 %"]),
        ("classification", {"error": "has no token"}, ["has no token"]),
    ],
)  # fmt: skip
def test_what_a_task_of_each_kind_answers_is_shown(kind: str, answer: Any, shown: list[str]) -> None:
    health = MASK if kind == "mask" else {**PAIRS, "kind": kind, "pairs": False}
    page = pressed(health, {"answers": [answer]}, "fill" if kind == "mask" else "predict", texts="asked", context="nine")
    assert page["shown"] == ["asked", *shown]
    assert ("context-part" in page["hidden"]) is (kind != "spans") and ("predict" in page["hidden"]) is (kind == "mask")


LINE = st.sampled_from(["", " ", "a", "b c"])


@settings(max_examples=30, deadline=None)  # a process each
@given(st.lists(LINE, min_size=1, max_size=4), st.lists(LINE, min_size=1, max_size=4))
def test_texts_of_a_pair_are_those_of_one_line(first: list[str], second: list[str]) -> None:
    page = pressed(PAIRS, {"error": "as told"}, texts="\n".join(first), others="\n".join(second))
    lines = [(a, b) for a, b in zip(first + [""] * 4, second + [""] * 4, strict=False)]
    wrong = [(number, "second" if a.strip() else "first") for number, (a, b) in enumerate(lines, 1) if bool(a.strip()) != bool(b.strip())]
    if not any(b.strip() for _, b in lines):  # the server says that the task is of pairs, where it is
        alone = [a for a in first if a.strip()]
        assert page["asked"] == ([["predict", {"texts": alone}]] if alone else [])
    elif wrong:
        number, which = wrong[0]
        assert (page["asked"], page["shown"]) == ([], [f"Line {number} has no {which} text; each needs its other."])
    else:
        assert page["asked"] == [["predict", {"texts": [[a, b] for a, b in lines if a.strip()]}]]


def test_a_question_is_asked_with_its_context_and_vectors_of_the_first_texts_alone() -> None:
    page = pressed({**PAIRS, "kind": "spans"}, {"error": "as told"}, texts="who?\n\nwhere?\n", context=" here \n")
    assert page["asked"] == [["predict", {"texts": [{"question": who, "context": " here \n"} for who in ("who?", "where?")]}]]
    page = pressed(PAIRS, {"embeddings": [[0.5, 1]] * 2}, "embed", texts="a\n\nb", others="c")
    assert page["asked"] == [["embed", {"texts": ["a", "b"]}]] and page["shown"] == ["a", "0.500  1.000  …", "b", "0.500  1.000  …"]
