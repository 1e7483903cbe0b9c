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
    """`web` sets the filters of Gopher and C4 to the values of their papers, for English text of the web whose lines are paragraphs; what is set beside it has its own value."""
    max_chars: NonNegativeInt = 0
    """Longer documents are dropped (characters, after cleaning; 0: none is too long)."""
    min_words: NonNegativeInt = 0
    """Documents of fewer words are dropped (Gopher: 50)."""
    max_words: NonNegativeInt = 0
    """Documents of more words are dropped (Gopher: 100,000; 0: none is too long)."""
    min_sentences: NonNegativeInt = 0
    """Documents of fewer sentences are dropped (C4: 3)."""
    min_mean_word_length: NonNegativeFloat = 0.0
    """Least mean length of the words (characters; Gopher: 3)."""
    max_mean_word_length: NonNegativeFloat = 0.0
    """Greatest mean length of the words (characters; Gopher: 10; 0: any)."""
    min_letters: Fraction = 0.0
    """Least share of letters in the characters that are no white space (0 to 1)."""
    max_symbols: Fraction = 1.0
    """Greatest share of punctuation and symbols in the characters that are no white space (0 to 1)."""
    min_words_with_letters: Fraction = 0.0
    """Least share of the words that have a letter in them (0 to 1; Gopher: 0.8)."""
    max_hashes_per_word: NonNegativeFloat = 0.0
    """Most number signs, and most ellipses, for each word (Gopher: 0.1; 0: any)."""
    min_stop_words: NonNegativeInt = 0
    """Documents with fewer different stop words are dropped (Gopher: 2)."""
    stop_words: list[str] = field(default_factory=lambda: list(STOP_WORDS))
    """The stop words, in small letters; those of Gopher are English."""
    max_bullet_lines: Fraction = 1.0
    """Greatest share of lines that begin with a bullet, of five lines or more (0 to 1; Gopher: 0.9)."""
    max_ellipsis_lines: Fraction = 1.0
    """Greatest share of lines that end with an ellipsis, of five lines or more (0 to 1; Gopher: 0.3)."""
    max_repeated_lines: Fraction = 1.0
    """Greatest share of lines that repeat an earlier one (0 to 1; Gopher: 0.3)."""
    max_repeated_line_chars: Fraction = 1.0
    """Greatest share of characters in lines that repeat an earlier one (0 to 1; Gopher: 0.2)."""
    max_top_ngrams: tuple[Fraction, Fraction, Fraction] = (1.0, 1.0, 1.0)
    """Greatest share of characters in the most frequent sequence of 2, 3 and 4 words (0 to 1; Gopher: 0.20, 0.18, 0.16)."""
    max_repeated_ngrams: tuple[Fraction, Fraction, Fraction, Fraction, Fraction, Fraction] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    """Greatest share of characters in sequences of 5 to 10 words that repeat an earlier one (0 to 1; Gopher: 0.15, 0.14, 0.13, 0.12, 0.11, 0.10)."""
    lines_end_sentences: bool = False
    """Leave out lines that end like no sentence, without a mark or with an ellipsis, and hold none that has ended (C4 leaves out those too). Not for text whose lines are wrapped."""
    min_words_per_line: NonNegativeInt = 0
    """Leave out lines of fewer words (C4: 5). Not for text whose lines are wrapped."""
    max_tokens_per_char: NonNegativeFloat = 0.0
    """Documents with more tokens for each character are dropped, once the vocabulary is known (Cramming: 0.25 of a vocabulary of 32,768; 0: any)."""


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
