"""Where a fine-tuned task is wrong, as `errors.json` in its folder has it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overnight.console import table
from overnight.display import plural, quantity, share, visible
from overnight.errors import DataError
from overnight.state_files import fitted, read_mapping

# Classes of a confusion that still fit a terminal, worst rows that are shown, and characters of their texts.
_CLASSES, _ROWS, _CHARS = 12, 3, 160


@dataclass(frozen=True)
class _Row:
    """What is shown of a row that was answered wrongly; one of the last four says how wrong."""

    id: str
    label: str | float | list[str]
    answer: str | float | list[str]
    text: str = ""
    text_a: str = ""
    text_b: str = ""
    probability: float | None = None
    error: float | None = None
    wrong_tags: int | None = None
    f1: float | None = None


@dataclass(frozen=True)
class _Errors:
    worst: list[_Row]
    labels: list[str] = field(default_factory=list)
    confusion: list[list[int]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)


def read_errors(folder: Path) -> dict[str, Any]:
    """Return what `errors.json` of a task's folder holds; nothing where there is none.

    Raises:
        DataError: when it is damaged.
    """
    path, remedy = folder / "errors.json", "delete it; it is written again when the task is fine-tuned again"
    if not path.is_file():
        return {}
    found = read_mapping(path, remedy)
    fitted(found, _Errors, str(path), remedy)
    classes = len(found.get("labels", ()))
    rows = (*found.get("confusion", ()), *found.get("counts", {}).values())
    if any(len(row) != classes for row in rows) or len(found.get("confusion", ())) not in (0, classes):
        raise DataError(f"{path}: its counts are not of its {plural(classes, 'label')}; {remedy}")
    if any(len(row.keys() & {"probability", "error", "wrong_tags", "f1"}) != 1 for row in found["worst"]):
        raise DataError(f"{path}: worst: a row does not say how wrong its answer is; {remedy}")
    return found


def missing_errors(run_dir: Path, task: str) -> list[str]:
    """Return a line that says so where a fine-tuned task has no errors.json; empty where it has one."""
    folder = run_dir / "finetune" / task
    if not (folder / "task.json").is_file() or (folder / "errors.json").is_file():
        return []
    return [f"{folder / 'errors.json'} is missing, so the errors of {task} are not known; predictions.json beside it has the answers"]


def errors_lines(folder: Path) -> list[str]:
    """Return :func:`found_errors` of what a task's folder holds; none of a task without errors.json."""
    return found_errors(read_errors(folder), f"in {folder / 'errors.json'}")


def found_errors(found: Mapping[str, Any], where: str) -> list[str]:
    """Return the confusion, or the counts of several classes, and the worst rows, as lines.

    Args:
        found: as `errors.json` holds it.
        where: all of the worst rows are, or are to be had.
    """
    lines = []
    labels = [visible(label) for label in found.get("labels", [])]
    if found.get("confusion") and len(labels) <= _CLASSES:
        cells = [[label, *(f"{count:,}" for count in row)] for label, row in zip(labels, found["confusion"], strict=True)]
        lines += ["", table([["right, answered as", *labels], *cells])]
    if found.get("counts") and len(labels) <= _CLASSES:
        counts = found["counts"]
        cells = [[label, *(f"{counts[name][i]:,}" for name in counts)] for i, label in enumerate(labels)]
        lines += ["", table([["class", *(name.replace("_", " ") for name in counts)], *cells])]
    if worst := found.get("worst"):
        lines += ["", f"the worst errors; {plural(len(worst), 'row')} {where}"]
        lines += [f"- {row_text(row, _CHARS)}" for row in worst[:_ROWS]]
    return lines


def row_text(row: dict[str, Any], chars: int = 0) -> str:
    """Return a row that was answered wrongly, in words: what it says, what is right, and what was answered.

    Args:
        row: of `worst`.
        chars: most characters of its text, of what is right, and of what was answered; 0 is all.
    """
    # A control character in a text is none for the terminal.
    return visible(_row_text(row, chars))


def _row_text(row: dict[str, Any], chars: int) -> str:
    text = " | ".join(" ".join(str(row[key]).split()) for key in ("text", "text_a", "text_b") if key in row)
    text, right, given = (_cut(part, chars) for part in (text, _words(row["label"]), _words(row["answer"])))
    if "wrong_tags" in row:
        return f"{row['id']}: {text} (right: {right}; answered: {given}; {plural(row['wrong_tags'], 'wrong tag')})"
    if "f1" in row:
        return f"{row['id']}: {text} (right: {right}; answered: {given}; F1 {share(row['f1'])})"
    how = f"off by {quantity(row['error'])}" if "error" in row else f"what is right has probability {share(row['probability'])}"
    return f"{row['id']}: {text} (right: {right}, answered: {given}; {how})"


def _cut(text: str, chars: int) -> str:
    return f"{text[:chars]}…" if 0 < chars < len(text) else text


def _words(answer: Any) -> str:
    if isinstance(answer, list):
        return ", ".join(map(str, answer)) or "none"
    return quantity(answer) if isinstance(answer, float) else str(answer)
