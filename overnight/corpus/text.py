"""One document from raw text to what is kept of it: repaired, cleaned, filtered, masked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from overnight.config import Data, Filters, NoFilters
from overnight.corpus.bytes import without_markup as plain_bytes
from overnight.corpus.clean import paragraphs, without_markup
from overnight.corpus.drops import Drops
from overnight.corpus.filters import kept_lines, rejection
from overnight.corpus.languages import check_languages, language
from overnight.corpus.personal import PLACEHOLDERS, mask
from overnight.display import plural, share
from overnight.errors import ConfigError

# Share of the characters in documents that are too short from which on `prepare` warns.
_MANY_SHORT = 0.1


@dataclass
class Outcome:
    """What became of the documents so far."""

    drops: Drops = field(default_factory=Drops)
    short: int = 0
    characters: int = 0
    """Of the clean text of all documents, before any is dropped."""
    short_characters: int = 0
    masked: Counter[str] = field(default_factory=Counter)


def kept_text(text: str, name: str, data: Data, outcome: Outcome) -> str:
    """Return the clean text of a document, or an empty string where it is dropped.

    Args:
        text: raw.
        name: of the document.
        data: the settings.
        outcome: is told what was dropped and masked.
    """
    text = _without_markup(text, data)
    filtered = data.filters != _OFF
    lines = [" ".join(line.split()) for line in text.split("\n")] if filtered else []
    if filtered and len(kept := kept_lines(lines, data.filters, name, outcome.drops)) < len(lines):
        text, lines = "\n".join(kept), kept
    text = _joined_and_masked(text, data, outcome)
    outcome.characters += len(text)
    if not text or len(text) < data.min_chars:
        outcome.short += 1
        outcome.short_characters += len(text)
        outcome.drops.add("min_chars", name, text)
        return ""
    if filtered and (reason := rejection(text, [line for line in lines if line], data.filters)):
        outcome.drops.add(f"filters.{reason}", name, text)
        return ""
    if data.languages and (found := language(text)) not in data.languages:
        outcome.drops.add("languages", name, f"{found}: {text}")
        return ""
    return text


def clean_text(text: str, data: Data) -> str:
    """Return a text as a document is cleaned of which nothing is filtered."""
    return _joined_and_masked(_without_markup(text, data), data, Outcome())


def _without_markup(text: str, data: Data) -> str:
    if data.fix_text and not text.isascii():
        text = _fixed(text)
    return plain_bytes(text) if data.tokenizer == "bytes" else without_markup(text)


def _joined_and_masked(text: str, data: Data, outcome: Outcome) -> str:
    text = " ".join(text.split()) if data.tokenizer == "bytes" else paragraphs(text)
    return mask(text, data.mask_personal, outcome.masked) if data.mask_personal else text


def counted(counts: Mapping[str, int]) -> str:
    """Return counts by reason on one line, the most frequent first."""
    return ", ".join(
        plural(count, "duplicate") if reason == "duplicates" else f"{count:,} by data.{reason}"
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def outcome_lines(outcome: Outcome, min_chars: int) -> Iterator[str]:
    """Yield what `prepare` says of what was dropped and masked, where something was, and a warning where short documents held much of the text."""
    if outcome.drops.counts:
        yield f"dropped: {counted(outcome.drops.counts)} (drops.json has samples)"
    if outcome.short_characters > _MANY_SHORT * outcome.characters:
        yield (
            f"warning: {plural(outcome.short, 'document')} with {share(outcome.short_characters / outcome.characters)} of all characters "
            f"are shorter than data.min_chars = {min_chars:,} and left out; lower it to keep them"
        )
    if found := sorted((+outcome.masked).items()):
        yield f"masked: {', '.join(f'{count:,} {PLACEHOLDERS[kind]}' for kind, count in found)}"


_OFF: Filters = NoFilters()


def check_extras(data: Data) -> None:
    """Check that what these settings need is installed, and has the languages that are asked for.

    Raises:
        ConfigError: naming the extra, or the language.
    """
    if data.fix_text:
        _ftfy()
    if data.languages:
        check_languages(data.languages)


def _fixed(text: str) -> str:
    ftfy, config = _ftfy()
    return str(ftfy.fix_text(text, config))


@cache
def _ftfy() -> tuple[Any, Any]:
    try:
        import ftfy
    except ImportError:
        raise ConfigError("data.fix_text = true: needs the extra `cleaning`: pip install 'overnight[cleaning]', or leave it out") from None
    # Quotation marks and wide characters are as their authors wrote them; references and NFC are those of the cleaning.
    config = ftfy.TextFixerConfig(explain=False, unescape_html=False, uncurl_quotes=False, fix_character_width=False, normalization=None)
    return ftfy, config
