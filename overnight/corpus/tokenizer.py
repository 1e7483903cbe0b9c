"""WordPiece: train a vocabulary or take a given one, and turn clean sentences into token ids."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from overnight.corpus.word_counts import WordCounts
from overnight.corpus.words import distinct_words, ragged
from overnight.errors import DataError
from overnight.run_dir.atomic import write_whole
from overnight.state_files import read_mapping

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Longer words are [UNK], whatever the vocabulary.
LONGEST_WORD = 100
# Characters that are tokens of their own: the most frequent ones, as many as the trainer's authors allow by default; of scripts with more, such as Chinese,
# as many as this share of the text needs, and half of the vocabulary at most. Rarer ones are [UNK].
_ALPHABET, _COVERAGE = 1000, 0.9995
# Words the trainer reads at most (they cost it 0.1 us each); beyond, counts are scaled down to this sum.
TRAINING_WORDS = 8_000_000
# Different ones of them, the most frequent (the trainer takes about 1 kB for each).
TRAINING_DISTINCT = 500_000
_SPLITTER = pre_tokenizers.BertPreTokenizer()


@dataclass(frozen=True)
class Vocabulary:
    """What the batches and the model need to know of a tokenizer."""

    size: int
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    continuation: np.ndarray
    """bool [size]: tokens that continue a word (`##`)."""
    is_special: np.ndarray
    """bool [size]: the five special tokens."""
    hash: str
    """XXH3-128 of the tokens in order and of the letter case, 32 hex digits."""
    lowercase: bool


def build_tokenizer(tokens: Sequence[str], lowercase: bool, compose: bool = False) -> Tokenizer:
    """Return the tokenizer of BERT over given tokens.

    Args:
        tokens: the vocabulary, id by id, with the five special tokens somewhere in it.
        lowercase: lower-case and strip accents first.
        compose: put letters and their marks together first (NFC), as preparation does. BERT's own rules, which are what the files say, read a letter whose
            accent is a character of its own as [UNK] where they keep accents.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    # Without accents letters and marks are taken apart anyway.
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.NFC(), _normalizer(False)]) if compose and not lowercase else _normalizer(lowercase)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


@cache
def _normalizer(lowercase: bool) -> normalizers.BertNormalizer:
    return normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=lowercase, lowercase=lowercase)


def count_words(texts: Iterable[str], lowercase: bool) -> Counter[str]:
    """Return how often each word and each mark of clean text occurs, as BERT's rules split it, in the order in which they first do.

    Args:
        texts: of words one space or line end apart.
        lowercase: as in :func:`build_tokenizer`.
    """
    content = bytearray()
    for text in texts:
        content += f"{text} ".encode()
    parts, places = distinct_words(content)
    counts: dict[str, int] = {}
    for part, count in zip(parts, np.bincount(places, minlength=len(parts)).tolist(), strict=True):
        if part.isascii():  # the same as below, many times as fast
            word = part.lower() if lowercase else part
            counts[word] = counts.get(word, 0) + count
        else:
            for word in _words_of(part, lowercase):
                counts[word] = counts.get(word, 0) + count
    return Counter(counts)


@lru_cache(1 << 16)
def _words_of(part: str, lowercase: bool) -> tuple[str, ...]:
    """Return the words and marks in letters that the marks of ASCII do not divide."""
    return tuple(word for word, _ in _SPLITTER.pre_tokenize_str(_normalizer(lowercase).normalize_str(part)))


def train_tokens(words: WordCounts, size: int) -> list[str]:
    """Train a WordPiece vocabulary that depends on the word counts alone, not on the run or the number of cores.

    The trainer numbers the characters of its alphabet, and those inside words, in the order of a hash table seeded anew
    each time, and settles equal counts by these numbers. Here both sets are given to it, sorted.

    Args:
        words: words and marks and how often each occurs.
        size: number of tokens, the special ones included.

    Returns:
        The tokens, id by id, the special ones first; fewer than `size` where the text has no more to give, more where its characters are more.
    """
    # Of a word that is not read there is nothing to learn, and the trainer's work grows with the square of its length.
    words = words.of_length(LONGEST_WORD)
    chars: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        inside.update(word[1:])
        for char in word:
            chars[char] += count
    alphabet = sorted(_alphabet(chars, size))
    if len(words) > TRAINING_DISTINCT:
        words = words.most_frequent(TRAINING_DISTINCT)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*SPECIALS, *(f"##{char}" for char in sorted(inside.intersection(alphabet)))],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_as_text(words), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _alphabet(chars: Counter[str], size: int) -> list[str]:
    """Return the characters that are tokens of a vocabulary of this size, the most frequent first; of equally frequent ones the first by code point."""
    by_count = sorted(chars, key=lambda char: (-chars[char], char))
    before = np.cumsum([0, *(chars[char] for char in by_count)])
    needed = int(np.searchsorted(before, _COVERAGE * before[-1]))
    return by_count[: max(_ALPHABET, min(needed, size // 2))]


def _as_text(counts: WordCounts) -> Iterator[str]:
    """Yield words written out as often as they occur, because the trainer reads text; large counts are scaled down to bound its work."""
    scale = max(1.0, counts.total() / TRAINING_WORDS)
    for word, count in counts.items():
        times = round(count / scale)
        for start in range(0, times, 10_000):
            yield f"{word} " * min(10_000, times - start)


def save_tokenizer(folder: Path, tokens: Sequence[str], lowercase: bool) -> None:
    """Write `vocab.txt` and `tokenizer.json` into a data folder."""
    tokenizer = build_tokenizer(tokens, lowercase)
    write_whole(folder / "tokenizer.json", [tokenizer.to_str(pretty=False).encode()])
    write_whole(folder / "vocab.txt", ["".join(f"{token}\n" for token in tokens).encode()])


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy `vocab.txt` and `tokenizer.json` from one folder to another, byte by byte.

    Raises:
        DataError: when one cannot be read.
    """
    for name in ("tokenizer.json", "vocab.txt"):
        try:
            content = (source / name).read_bytes()
        except OSError as error:
            raise DataError(f"{source / name}: cannot be read ({error.strerror})") from None
        write_whole(target / name, [content])


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder of prepared data, a run or a task, for text in any normal form; it adds [CLS] and [SEP] unless told not to, and
    reads `[MASK]` in a text as the mask.

    Raises:
        DataError: as :func:`load_tokens`.
    """
    return build_tokenizer(*load_tokens(folder), compose=True)


def load_vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of a prepared data folder.

    Raises:
        DataError: as :func:`load_tokens`.
    """
    return vocabulary(*load_tokens(folder))


def load_tokens(folder: Path) -> tuple[list[str], bool]:
    """Return the tokens of a folder's vocabulary, id by id, and whether text is put into lower case.

    Both are in `vocab.txt` and `tokenizer.json` together: a change of one of the two does not pass.

    Raises:
        DataError: when a file is missing, cannot be read or lacks a special token, or the two say different things.
    """
    path, again = (
        folder / "tokenizer.json",
        "put the right one back, or delete the folder and make it again (prepared data by `overnight prepare`)",
    )
    tokens = read_tokens(folder / "vocab.txt")
    tree = read_mapping(path, again) if path.exists() else None
    if tree is None:
        raise DataError(f"{path}: is missing; prepare the data first")
    normalizer = tree.get("normalizer")
    lowercase = normalizer.get("lowercase") if isinstance(normalizer, dict) else None
    try:
        found = Tokenizer.from_str(json.dumps(tree)).to_str()
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{path}: cannot be read ({error}); {again}") from None
    if not isinstance(lowercase, bool) or found != build_tokenizer(tokens, lowercase).to_str():
        raise DataError(f"{path}: does not belong to {folder / 'vocab.txt'}: one of the two was changed; {again}")
    return tokens, lowercase


def read_tokens(path: Path) -> list[str]:
    """Return a vocabulary file, one token a line.

    Raises:
        DataError: when it is missing, not UTF-8, has an empty or a double line, or lacks a special token.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; a vocabulary is a text file, one token a line") from None
    # Not splitlines(): a token may be one of Unicode's own line ends.
    tokens = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    seen: dict[str, int] = {}
    for number, token in enumerate(tokens, 1):
        if not token or token in seen:
            why = f"repeats {token!r} of line {seen[token]}" if token else "is empty"
            raise DataError(f"{path}:{number}: {why}; each line of a vocabulary is one token")
        seen[token] = number
    if missing := [special for special in SPECIALS if special not in seen]:
        raise DataError(f"{path}: has no {', '.join(missing)}; a BERT vocabulary needs {', '.join(SPECIALS)}")
    return tokens


def vocabulary(tokens: Sequence[str], lowercase: bool) -> Vocabulary:
    """Return what is to be known of given tokens (see :class:`Vocabulary`)."""
    ids = {token: i for i, token in enumerate(tokens)}
    pad, unk, cls, sep, mask = (ids[special] for special in SPECIALS)
    is_special = np.zeros(len(tokens), bool)
    is_special[[pad, unk, cls, sep, mask]] = True
    return Vocabulary(
        size=len(tokens),
        pad=pad,
        unk=unk,
        cls=cls,
        sep=sep,
        mask=mask,
        continuation=np.array([token.startswith("##") for token in tokens]),
        is_special=is_special,
        hash=xxhash.xxh3_128_hexdigest("\n".join([f"lowercase={lowercase}", *tokens]).encode()),
        lowercase=lowercase,
    )


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the type tokens are stored in: two bytes as long as they suffice."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


# Neither can occur in clean text.
_SENTENCE_END, _DOCUMENT_END = "\x01", "\x02"
# Words whose ids a process remembers: some 35 MB, 0.28 kB each.
_REMEMBERED = 1 << 17
# Words that the tokenizer is given at once: of each it returns some kB.
_AT_ONCE = 1 << 11
_ID_BYTES = 4
# Bytes of text whose words are looked up at once: of each several arrays of numbers are made, which take five times as many. Fewer bytes take longer.
_BLOCK = 2 << 20


class Encoder:
    """Token ids of clean documents; no special token is ever made, whatever the text says.

    WordPiece looks at one word or mark at a time, so each distinct one is tokenized once, remembered for the documents to come, and looked up afterwards:
    many times faster than tokenizing running text, with the same ids (a test compares them).

    Args:
        tokenizer: of :func:`build_tokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True  # "[MASK]" in a text is three words
        self._tokenizer, self._size = tokenizer, tokenizer.get_vocab_size()
        # Ids on end as 4 bytes each: a tuple of Python's numbers takes 40.
        self._ids: dict[str, bytes] = {}

    def encode(self, documents: Iterable[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode documents of one sentence a line, words one space apart, each of which is asked for once and not kept: a text may take 4 bytes a character.

        Returns:
            tokens [N], tokens of each sentence [S] (int32, none empty), sentences of each document [D] (int32).
        """
        ends = (f" {_SENTENCE_END} ", f" {_SENTENCE_END} {_DOCUMENT_END} ")
        content, count, streams = bytearray(), 0, []
        for text in documents:
            content += (text.replace("\n", ends[0]) + ends[1]).encode()
            count += 1
            while len(content) > _BLOCK and (cut := content.find(b" ", _BLOCK) + 1):
                streams.append(self._stream(content[:cut]))
                del content[:cut]
        streams.append(self._stream(content))
        del content
        return _by_sentence(np.concatenate(streams), self._size, count)

    def _stream(self, content: bytearray) -> np.ndarray:
        """Return token ids (uint32) of words and marks."""
        parts, places = distinct_words(content)
        ids = self._of_parts(parts)
        offsets = np.cumsum([0, *map(len, ids)]) // _ID_BYTES
        return ragged(np.frombuffer(b"".join(ids), np.uint32), offsets, places)

    def _of_parts(self, parts: Sequence[str]) -> list[bytes]:
        """Return token ids (uint32) of each part of a word: `house`, `house,` and `"house"` ask the tokenizer for `house` only once."""
        if len(self._ids) > _REMEMBERED:
            self._ids = {}
        known = self._ids
        known |= {_SENTENCE_END: _packed([self._size]), _DOCUMENT_END: _packed([self._size + 1])}
        new = [part for part in parts if part not in known]
        for start in range(0, len(new), _AT_ONCE):
            some = new[start : start + _AT_ONCE]
            encoded = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            known.update((part, _packed(encoding.ids)) for part, encoding in zip(some, encoded, strict=True))
        return [known[part] for part in parts]


def _packed(ids: list[int]) -> bytes:
    return struct.pack(f"={len(ids)}I", *ids)


def _by_sentence(stream: np.ndarray, size: int, documents: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what :meth:`Encoder.encode` does, from ids [N] among which `size` ends a sentence and `size + 1` a document."""
    is_end = stream >= size
    marks = stream[is_end]
    # How many tokens lie before each mark.
    before = np.flatnonzero(is_end) - np.arange(len(marks))
    is_sentence = marks == size
    lengths = np.diff(before[is_sentence], prepend=0)
    document_of = np.cumsum(~is_sentence)[is_sentence]
    filled = lengths > 0
    counts = np.bincount(document_of[filled], minlength=documents)
    return stream[~is_end].astype(token_dtype(size)), lengths[filled].astype(np.int32), counts.astype(np.int32)
