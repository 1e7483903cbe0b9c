"""Bits per character, masked accuracy and BLiMP in words, as `evaluation.json` has them."""

from __future__ import annotations

from typing import Any

from overnight.console import table
from overnight.display import number, plural, share


def results_lines(found: dict[str, Any], groups: bool = True) -> list[str]:
    """Return what was measured as lines for people.

    Args:
        found: as `evaluation.json` has it.
        groups: also BLiMP by field and phenomenon.
    """
    lines = [masked_line(name, score) for name, score in found["texts"].items()]
    if blimp := found.get("blimp"):
        lines += [blimp_line(blimp), *([table(_group_cells(blimp))] if groups else [])]
    return lines


def masked_line(name: str, score: dict[str, Any]) -> str:
    """Return bits per character and masked accuracy of a text, in words."""
    words = score.get("word_bits_per_character")
    error = score.get("word_standard_error")
    whole = (
        "" if words is None else f", of whole words {number(words, 2)}" + ("" if error is None else f" (standard error {number(error, 2)})")
    )
    unknown = f"; {share(score['unknown'])} of its characters are unknown to the model, and cheap to guess" if score["unknown"] else ""
    return (
        f"{name}: bits per character {number(score['bits_per_character'], 3)}{whole}  masked accuracy {share(score['masked_accuracy'])} "
        f"of {plural(score['masked_tokens'], 'token')} at 15 %, in {plural(score['characters'], 'character')}{unknown}"
    )


def blimp_line(blimp: dict[str, Any]) -> str:
    """Return the mean over the paradigms, with its standard error, in words."""
    error = "" if blimp["standard_error"] is None else f" (standard error {100 * blimp['standard_error']:.1f})"
    ties = f"{plural(blimp['ties'], 'tie')} counted half" if blimp["ties"] else "no ties"
    same = f", of which {blimp['indistinguishable']:,} are the same tokens to this model" if blimp["indistinguishable"] else ""
    return (
        f"BLiMP: {share(blimp['accuracy'])}{error}, mean of {plural(len(blimp['paradigms']), 'paradigm')}, {plural(blimp['total'], 'pair')}; "
        f"{ties}{same}"
    )


def _group_cells(blimp: dict[str, Any]) -> list[list[str]]:
    rows = [["field or term", "accuracy", "standard error"]]
    for by in ("fields", "terms"):
        for name, m in blimp[by].items():
            rows.append([name, share(m["accuracy"]), "-" if m["standard_error"] is None else f"{100 * m['standard_error']:.1f}"])
    return rows
