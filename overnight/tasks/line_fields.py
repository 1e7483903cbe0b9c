"""What a line has by name: its id, and the text, pair, words or question that are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overnight.errors import DataError
from overnight.state_files import kind_of
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example
from overnight.tasks.squad import Question


def is_id(value: Any) -> bool:
    """Return whether a value may be what a line is called: a text or a number."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def id_of(number: int, fields: Mapping[str, Any]) -> str:
    """Return what a line is called: its `id`, a text or a number, or where it has none or null the number of the line.

    Raises:
        DataError: naming the line, when its id is something else.
    """
    value = fields.get("id")
    if value is None:
        return str(number)
    if not is_id(value):
        raise DataError(f"line {number}: its id is {kind_of(value)}; it needs a text or a number")
    return str(value)


def _lacking(number: int, fields: Mapping[str, Any], named: Sequence[str], needs: str) -> DataError:
    has = f"has the keys {', '.join(fields)}" if fields else "has no keys"
    odd = [f"its `{key}` is {kind_of(fields[key])}" for key in named if not isinstance(fields.get(key, ""), str)]
    return DataError(f"line {number}: {[*odd, has][0]}; it needs {needs}")


def example_of(number: int, fields: Mapping[str, Any]) -> Example:
    """Return the text or pair of texts of a line.

    Raises:
        DataError: naming the line, when it has none.
    """
    text = fields.get("text_a", fields.get("text"))
    second = fields.get("text_b")
    if not isinstance(text, str) or not isinstance(second, str | None):
        named = ("text_a", "text") if second is None else ("text_a", "text", "text_b")
        raise _lacking(number, fields, named, "`text`, or `text_a` and `text_b`, as strings")
    return Example(id_of(number, fields), text, second, None)


def sentence_of(number: int, fields: Mapping[str, Any]) -> Sentence:
    """Return the words of a line, which has them as `tokens` or as a text of words between blanks.

    Raises:
        DataError: naming the line, when it has none.
    """
    words, text = fields.get("tokens"), fields.get("text_a", fields.get("text"))
    if words is None and isinstance(text, str):
        words = [word for part in (text, fields.get("text_b")) for word in str(part or "").split()]
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        if isinstance(words, list):
            raise DataError(f"line {number}: its `tokens` {'hold a word that is empty or no text' if words else 'hold no word'}")
        raise _lacking(number, fields, ("tokens", "text_a", "text"), "`tokens`, a list of words, or `text`")
    return Sentence(id_of(number, fields), tuple(words), None)


def question_of(number: int, fields: Mapping[str, Any]) -> Question:
    """Return the question of a line, without answers.

    Raises:
        DataError: naming the line, when it has none.
    """
    question, context = fields.get("question", fields.get("text_a")), fields.get("context", fields.get("text_b"))
    if not isinstance(question, str) or not isinstance(context, str):
        if fields.keys() == {"text_a", "text_b"} and context is None:  # a plain line
            raise DataError(f"line {number}: has no text that answers; a question and that text have a tab between them")
        raise _lacking(number, fields, ("question", "context"), "`question` and `context` as strings")
    return Question(str(number), "", question, context, ())
