"""What a preparation says of its vocabulary: accents that it would take away, and another size than was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overnight.config import Data
from overnight.corpus.pipeline import prepare
from overnight.corpus.tokenizer import SPECIALS

GERMAN = "Der schöne Bär läuft über die Straße und hört die Vögel."
ENGLISH = (
    "The beautiful bear walks over the road, past a café, and hears all of the birds that sing in the trees on its way home to the others."
)


@pytest.mark.parametrize(("text", "lowercase", "warns"), [(GERMAN, True, True), (GERMAN, False, False), (ENGLISH, True, False)])
def test_a_text_whose_accents_would_go_is_warned_of(tmp_path: Path, text: str, lowercase: bool, warns: bool) -> None:
    lines = prepared(tmp_path, text, lowercase=lowercase)
    assert any("data.lowercase = true also removes accents" in line and "--data.lowercase=false keeps" in line for line in lines) is warns


@pytest.mark.parametrize(("size", "said"), [(40, "characters of the text alone are"), (3000, "the text gives no more than"), (80, None)])
def test_a_vocabulary_of_another_size_than_asked_for_is_told(tmp_path: Path, size: int, said: str | None) -> None:
    lines = prepared(tmp_path, ENGLISH, vocab_size=size)
    size_there = len((tmp_path / "out" / "vocab.txt").read_text(encoding="utf-8").splitlines())
    assert [f"{size_there:,} " in line and f" {size:,} " in line for line in lines if said and said in line] == [True] * (said is not None)
    assert any("of data.vocab_size" in line for line in lines) is (said is not None) is (size_there != size)


THAI = "".join(f"{number}แมวสีดำนั่งอยู่บนเสื่อและมองนกในสวน" for number in ("หนึ่ง", "สอง", "สาม"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (THAI, "words of more than 100 characters, which no vocabulary knows: put spaces between"),
        (THAI.replace("น", "น "), None),
        ("the cat sat on the мат", "words with characters that the vocabulary lacks"),
        ("the cat sat on the mat", None),
    ],
)
def test_a_text_of_which_the_model_would_not_see_much_is_warned_of(tmp_path: Path, text: str, said: str | None) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join([*SPECIALS, *(sign + c for c in sorted({*ENGLISH, *THAI, *"0123456789"} - {" "}) for sign in ("", "##"))])
    )
    lines = prepared(
        tmp_path,
        text,
        vocab_file=str(tmp_path / "vocab.txt"),
        lowercase=False,
        vocab_size=len((tmp_path / "vocab.txt").read_text().split("\n")),
    )
    warnings = [line for line in lines if "are [UNK] to the model" in line]
    assert [said in line for line in warnings if said] == [True] * (said is not None) and len(warnings) == (said is not None)
    if said and text is not THAI:
        # 3 of 17 characters, and the number of each document.
        assert 13 < float(warnings[0].split(" %")[0].split()[-1]) < 17


def prepared(folder: Path, text: str, **settings: Any) -> list[str]:
    """Prepare forty documents of a text; what was said."""
    source, lines = folder / "text.txt", list[str]()
    source.write_text("".join(f"{text} {number}\n" for number in range(40)), encoding="utf-8")
    data = Data(paths=[str(source)], documents="line", min_chars=0, valid_fraction=0.2, workers=1, **{"vocab_size": 80, **settings})
    prepare(data, folder / "out", lines.append)
    return lines
