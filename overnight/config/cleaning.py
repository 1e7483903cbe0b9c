"""What a recipe may say of the filters of a corpus: which lines and documents are left out. All are off, but in a preset.

Gopher is Rae et al. 2021 (arXiv 2112.11446, table A1 and section A.1.1), C4 Raffel et al. 2020 (arXiv 1910.10683, section 2.2), Cramming Geiping and
Goldstein 2022 (arXiv 2212.14034, section 4.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from overnight.config.fields import Fraction, NonNegativeFloat, NonNegativeInt, Tagged

STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]
"""Those of Gopher."""


@dataclass(frozen=True)
class Filters:
    """What a text must be like to be kept; words are what stands between white space, lines are those of the source."""

    preset: str = "none"
    """`web` sets the filters of Gopher and C4 to their papers' values, for English web text whose lines are paragraphs; filters set explicitly take precedence."""
    max_chars: NonNegativeInt = 0
    """Drop longer documents (characters, after cleaning; 0: no limit)."""
    min_words: NonNegativeInt = 0
    """Drop documents with fewer words (Gopher: 50)."""
    max_words: NonNegativeInt = 0
    """Drop documents with more words (Gopher: 100,000; 0: no limit)."""
    min_sentences: NonNegativeInt = 0
    """Drop documents with fewer sentences (C4: 3)."""
    min_mean_word_length: NonNegativeFloat = 0.0
    """Minimum mean length of the words (characters; Gopher: 3)."""
    max_mean_word_length: NonNegativeFloat = 0.0
    """Maximum mean length of the words (characters; Gopher: 10; 0: no limit)."""
    min_letters: Fraction = 0.0
    """Minimum share of letters among the characters that are not white space (0 to 1)."""
    max_symbols: Fraction = 1.0
    """Maximum share of punctuation and symbols among the characters that are not white space (0 to 1)."""
    min_words_with_letters: Fraction = 0.0
    """Minimum share of words that contain a letter (0 to 1; Gopher: 0.8)."""
    max_hashes_per_word: NonNegativeFloat = 0.0
    """Maximum number signs per word, and likewise ellipses per word (Gopher: 0.1; 0: no limit)."""
    min_stop_words: NonNegativeInt = 0
    """Drop documents with fewer distinct stop words (Gopher: 2)."""
    stop_words: list[str] = field(default_factory=lambda: list(STOP_WORDS))
    """Stop words, in lowercase; Gopher's are English."""
    max_bullet_lines: Fraction = 1.0
    """Maximum share of lines that begin with a bullet, in documents of five lines or more (0 to 1; Gopher: 0.9)."""
    max_ellipsis_lines: Fraction = 1.0
    """Maximum share of lines that end with an ellipsis, in documents of five lines or more (0 to 1; Gopher: 0.3)."""
    max_repeated_lines: Fraction = 1.0
    """Maximum share of lines that repeat an earlier one (0 to 1; Gopher: 0.3)."""
    max_repeated_line_chars: Fraction = 1.0
    """Maximum share of characters in lines that repeat an earlier one (0 to 1; Gopher: 0.2)."""
    max_top_ngrams: tuple[Fraction, Fraction, Fraction] = (1.0, 1.0, 1.0)
    """Maximum share of characters in the most frequent sequence of 2, 3 and 4 words (0 to 1; Gopher: 0.20, 0.18, 0.16)."""
    max_repeated_ngrams: tuple[Fraction, Fraction, Fraction, Fraction, Fraction, Fraction] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    """Maximum share of characters in sequences of 5 to 10 words that repeat an earlier one (0 to 1; Gopher: 0.15, 0.14, 0.13, 0.12, 0.11, 0.10)."""
    lines_end_sentences: bool = False
    """Drop lines that contain no complete sentence and end without a sentence mark or with an ellipsis; C4 drops even those with a complete sentence. Not for hard-wrapped text."""
    min_words_per_line: NonNegativeInt = 0
    """Drop lines with fewer words (C4: 5). Not for hard-wrapped text."""
    max_tokens_per_char: NonNegativeFloat = 0.0
    """Drop documents with more tokens per character, once the vocabulary is known (Cramming: 0.25 for a vocabulary of 32,768; 0: no limit)."""


@dataclass(frozen=True)
class NoFilters(Filters):
    """Nothing is left out but what is set."""

    preset: Literal["none"] = "none"


@dataclass(frozen=True)
class WebFilters(Filters):
    """Filters of Gopher and C4, for English text of the web."""

    preset: Literal["web"] = "web"
    min_words: NonNegativeInt = 50
    max_words: NonNegativeInt = 100_000
    min_sentences: NonNegativeInt = 3
    min_mean_word_length: NonNegativeFloat = 3.0
    max_mean_word_length: NonNegativeFloat = 10.0
    min_words_with_letters: Fraction = 0.8
    max_hashes_per_word: NonNegativeFloat = 0.1
    min_stop_words: NonNegativeInt = 2
    max_bullet_lines: Fraction = 0.9
    max_ellipsis_lines: Fraction = 0.3
    max_repeated_lines: Fraction = 0.3
    max_repeated_line_chars: Fraction = 0.2
    max_top_ngrams: tuple[Fraction, Fraction, Fraction] = (0.20, 0.18, 0.16)
    max_repeated_ngrams: tuple[Fraction, Fraction, Fraction, Fraction, Fraction, Fraction] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    lines_end_sentences: bool = True
    min_words_per_line: NonNegativeInt = 5


AnyFilters = Annotated[NoFilters | WebFilters, Tagged("preset", "none")]
