"""A vocabulary that would take the accents of a language away is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest

from overnight.config import Data
from overnight.corpus.pipeline import prepare

GERMAN = "Der schöne Bär läuft über die Straße und hört die Vögel."
ENGLISH = (
    "The beautiful bear walks over the road, past a café, and hears all of the birds that sing in the trees on its way home to the others."
)


@pytest.mark.parametrize(("text", "lowercase", "warns"), [(GERMAN, True, True), (GERMAN, False, False), (ENGLISH, True, False)])
def test_a_text_whose_accents_would_go_is_warned_of(tmp_path: Path, text: str, lowercase: bool, warns: bool) -> None:
    source, lines = tmp_path / "text.txt", list[str]()
    source.write_text("".join(f"{text} {number}\n" for number in range(40)), encoding="utf-8")
    data = Data(paths=[str(source)], documents="line", min_chars=0, vocab_size=80, valid_fraction=0.2, lowercase=lowercase, workers=1)
    prepare(data, tmp_path / "out", lines.append)
    assert any("data.lowercase = true takes away accents" in line and "--data.lowercase=false keeps" in line for line in lines) is warns
