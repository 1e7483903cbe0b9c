"""The vocabulary of a preparation: given or trained, and longer by the words of the text that it would split."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from overnight.config import Data, Run, environment_path
from overnight.corpus.progress import Progress
from overnight.corpus.shards import read_table
from overnight.corpus.tasks import CountTask, count_chunk
from overnight.corpus.tokenizer import LONGEST_WORD, build_tokenizer, count_words, load_tokens, read_tokens, save_tokenizer, train_tokens
from overnight.corpus.word_counts import WordCounter, WordCounts
from overnight.corpus.workers import Workers, run_tasks
from overnight.display import plural, share
from overnight.errors import ConfigError
from overnight.machine import release_free_memory

INIT = "init"
"""In a run folder, where the weights and the vocabulary lie that it begins from."""
# Share of the characters in words that a vocabulary does not know from which on a preparation warns.
_MANY_UNKNOWN = 0.01
# Words that the tokenizer is given at once: of each it returns some kB.
_AT_ONCE = 10_000
# Distinct words held while counting, twice those that are trained on; beyond, the rarest go.
MAX_WORDS = 1_000_000
# Share of the letters with an accent from on which a text is hardly of a language that does without (English has 0.1 % at most), and how much of a text
# is looked at: chunks, documents of each, and characters of each of these; fewer for words, which take longer to look at.
_MANY_ACCENTS, _SAMPLES, _SAMPLE_ROWS, _SAMPLE, _SHORT_SAMPLE = 0.01, 8, 100, 20_000, 2000


def initial_tokens(run: Run) -> list[str] | None:
    """Return the vocabulary of the checkpoint that a run begins from, as it was copied into the run folder, or None where it begins from none."""
    return load_tokens(run.run_dir / INIT)[0] if getattr(run, "init", "") else None


def given_tokens(data: Data, given: list[str] | None) -> list[str] | None:
    """Return the vocabulary that a preparation is given, by a checkpoint or a file, or None where it trains one.

    Raises:
        ConfigError: it has not as many tokens as `data.vocab_size`.
    """
    if given is None and data.vocab_file:
        given = read_tokens(environment_path(data.vocab_file, "data.vocab_file"))
    if given is not None and len(given) != data.vocab_size:
        where = data.vocab_file or "the checkpoint"
        raise ConfigError(
            f"data.vocab_size = {data.vocab_size}: {where} has {len(given)} tokens; set data.vocab_size={len(given)} or give another file"
        )
    return given


def check_given(given: list[str] | None, folder: Path) -> None:
    """Check that a prepared folder has the vocabulary of a checkpoint.

    Raises:
        ConfigError: it has another one.
    """
    if given is None:
        return
    there, _ = load_tokens(folder)
    if there[: len(given)] != given:
        raise ConfigError(
            f"{folder}: was prepared with another vocabulary ({len(there):,} tokens) than that of the checkpoint ({len(given):,}); "
            "set data.dir to another folder, or delete this one"
        )


def make_vocabulary(
    data: Data,
    given: list[str] | None,
    folder: Path,
    chunks: list[Path],
    splits: list[np.ndarray],
    workers: Workers,
    log: Callable[[str], None],
) -> list[str]:
    """Return the given tokens, or tokens trained on the training documents; written into the folder."""
    if (folder / "vocab.txt").exists():  # written last
        return load_tokens(folder)[0]
    if given is not None and not data.new_words:
        save_tokenizer(folder, given, data.lowercase)
        return given
    progress = Progress("vocabulary", log, "M words")
    words, counted = _count_words(chunks, splits, data.lowercase, workers, progress)
    if given is None:
        if data.lowercase and (accents := share_of_accents(chunks)) > _MANY_ACCENTS:
            log(
                f"warning: data.lowercase = true also removes accents and other marks, and {share(accents)} of the letters of this text have one "
                '("schön" becomes "schon"); --data.lowercase=false keeps them, and capitals'
            )
        tokens = train_tokens(words, data.vocab_size)
        progress.end(counted, f"{plural(len(tokens), 'token')} from {plural(counted, 'word')}")
        if len(tokens) < data.vocab_size:
            log(f"vocabulary: the text gives no more than {len(tokens):,} of the {data.vocab_size:,} tokens of data.vocab_size")
        elif len(tokens) > data.vocab_size:
            log(
                f"vocabulary: the characters of the text alone are {len(tokens):,} tokens, more than the {data.vocab_size:,} of data.vocab_size"
            )
    else:
        new = new_words(words, given, data.lowercase, data.new_words)
        shown = ", ".join([*new[:5], *["..."] * (len(new) > 5)])
        progress.end(counted, f"{plural(len(new), 'new word')} ({shown}) from {plural(counted, 'word')}")
        tokens = [*given, *new]
    save_tokenizer(folder, tokens, data.lowercase)
    return tokens


def share_of_accents(chunks: Sequence[Path]) -> float:
    """Return the share of the letters of a text that lose a mark where it is lower-cased, by samples of it.

    Args:
        chunks: clean documents.
    """
    letters, marked = 0, 0
    for character, count in Counter(chain.from_iterable(_samples(chunks))).items():
        parts = unicodedata.normalize("NFD", character)
        letters += count * character.isalpha()
        marked += count * any(unicodedata.category(part) == "Mn" for part in parts)
    return marked / max(1, letters)


def warn_of_unknown(chunks: Sequence[Path], tokens: Sequence[str], lowercase: bool, log: Callable[[str], None]) -> None:
    """Say how much of a text a vocabulary does not know, by samples of it, where that is much: of [UNK] nothing is learned.

    Args:
        chunks: clean documents.
        tokens, lowercase: as in :func:`build_tokenizer`.
    """
    words = count_words((text[:_SHORT_SAMPLE] for text in _samples(chunks)), lowercase)
    tokenizer, unknown = build_tokenizer(tokens, lowercase), tokens.index("[UNK]")
    lost, rest = list[str](), iter(words)
    while some := list(islice(rest, _AT_ONCE)):
        encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        lost += [word for word, encoding in zip(some, encoded, strict=True) if unknown in encoding.ids]
    every, length = (sum(len(word) * words[word] for word in each) for each in (words, lost))
    if length <= _MANY_UNKNOWN * every:
        return
    long = sum(len(word) * words[word] for word in lost if len(word) > LONGEST_WORD)
    why = (
        f"most of them in words of more than {LONGEST_WORD} characters, which no vocabulary knows: put spaces between the words of Thai, Lao, Khmer and Burmese"
        if 2 * long > length
        else "in words with characters that the vocabulary lacks: name one of this language, or none, as data.vocab_file, or raise data.vocab_size"
    )
    log(f"warning: {share(length / every)} of the characters of this text are [UNK] to the model, which learns nothing about them, {why}")


def _samples(chunks: Sequence[Path]) -> Iterator[str]:
    """Yield beginnings of documents from all over a text."""
    for path in chunks[:: -(-len(chunks) // _SAMPLES)]:
        text = read_table(path).column("text")
        yield from (text[row].as_py()[:_SAMPLE] for row in range(min(len(text), _SAMPLE_ROWS)))


def _count_words(
    chunks: list[Path], splits: list[np.ndarray], lowercase: bool, workers: Workers, progress: Progress
) -> tuple[WordCounts, int]:
    """Return how often each word and mark of the training documents occurs, and how many there are."""
    counted = 0
    tasks = (CountTask(path, split == 1, lowercase) for path, split in zip(chunks, splits, strict=True))
    words = WordCounter(MAX_WORDS)
    for number, (counts, hashes) in enumerate(run_tasks(count_chunk, tasks, workers)):
        words.add(counts, hashes)
        counted += counts.total()
        del counts, hashes
        release_free_memory()  # of what grew, the shorter ones that were there before
        progress.update(counted, (number + 1) / len(chunks))
    return words.counts(), counted


def new_words(words: WordCounts, tokens: Sequence[str], lowercase: bool, count: int) -> list[str]:
    """Return the most frequent words that a vocabulary splits, or does not know at all; of equally frequent ones the first of the alphabet.

    Args:
        words: words and marks and how often each occurs.
        tokens: the vocabulary.
        lowercase: as in :func:`build_tokenizer`.
        count: words at most. Those that occur once, and those that are not of letters alone, are left out.
    """
    tokenizer = build_tokenizer(tokens, lowercase)
    frequent = (word for word, times in words.most_frequent().items() if times > 1 and word.isalpha() and len(word) <= LONGEST_WORD)
    found: list[str] = []
    while some := list(islice(frequent, _AT_ONCE)):
        encoded = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        known = set(tokens)
        found += [word for word, encoding in zip(some, encoded, strict=True) if len(encoding.ids) > 1 or word not in known]
        if len(found) >= count:
            break
    return found[:count]
