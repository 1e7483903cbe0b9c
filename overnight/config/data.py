"""What a recipe may say of its text: where it is from, what is kept of it, and how it becomes token shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from overnight.config.cleaning import AnyFilters, NoFilters
from overnight.config.fields import MACHINE, NonNegativeFloat, NonNegativeInt, Positive, PositiveFloat, PositiveInt, Range

Format = Literal["auto", "text", "markdown", "wiki", "mediawiki", "jsonl", "amazon", "csv", "tsv", "parquet", "html", "epub", "warc"]


@dataclass(frozen=True)
class Mix:
    """How often a source of text is read."""

    weight: NonNegativeFloat = 0.0
    """Its share of the examples (of bytes: of the text), relative to the weights of the others. Where any source has a weight, one without is not read."""
    epochs: PositiveFloat = 1.0
    """Where no source has a weight: how often it is read while a source of 1 is read once."""


@dataclass(frozen=True, kw_only=True)
class TextSource(Mix):
    """A source of text, and how often it is read. What is left empty is as `data` has it."""

    paths: list[str]
    """As `data.paths`."""
    format: Literal["", Format] = ""
    """As `data.format`."""
    field: str = ""
    """As `data.field`."""
    documents: Literal["", "file", "paragraph", "line"] = ""
    """As `data.documents`."""


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes token shards."""

    paths: list[str] = dataclasses.field(default_factory=lambda: ["builtin:python-docs"])
    """Files, folders, globs, tar or zip archives, here or in storage (`s3://bucket/folder`), and data sets of Hugging Face (`hf:NAME[:CONFIG[:SPLIT]]`), in order; `builtin:python-docs` is the documentation inside this Python environment. `$NAME` is read from the environment; `ARCHIVE::PATTERN` takes only the members of an archive whose names match (`reviews.tar.xz::*/train/*`; `*` matches `/` too)."""
    sources: Mapping[str, TextSource] = dataclasses.field(default_factory=dict)
    """Instead of `paths`: sources by name, each with its share of what is read (docs/mixtures.md). Shares may change without preparing again."""
    tokenizer: Literal["wordpiece", "bytes"] = "wordpiece"
    """What a token is: a WordPiece, for BERT, or a byte of UTF-8, for the byte models."""
    dir: Annotated[str, MACHINE] = "data/{name}"
    """Folder for the prepared shards; `{name}` is the name of the run, `~` your home folder. To train, it may be in storage (`s3://bucket/folder`), of which `cache` then has a copy."""
    cache: Annotated[str, MACHINE] = "~/.cache/overnight"
    """Folder of this machine for copies of prepared shards that are in storage; its processes share it."""
    cache_gb: Annotated[float, Positive, MACHINE] = 100.0
    """What that folder may hold (GB): copies that no process reads make room for others."""
    format: Format = "auto"
    """How a file is read; `auto` decides by its ending and its first bytes (`wiki` is the extracted `<doc>` format, `mediawiki` a dump of Wikipedia in XML, `warc` also WET)."""
    namespaces: list[int] = dataclasses.field(default_factory=lambda: [0])
    """Of a dump of Wikipedia, the pages that are read, by the numbers in `<ns>`: 0 are articles, 1 their talk pages."""
    field: str = "text"
    """Key or column that holds the text in JSON lines, CSV, TSV and Parquet; `title+text` joins several. Of Amazon reviews `text`, `title` and `rating` are known by all their names."""
    documents: Literal["file", "paragraph", "line"] = "file"
    """What one document of a file of text, HTML or EPUB is: the whole file, a block between blank lines, or a line."""
    html: Literal["main", "all"] = "main"
    """What is text of an HTML page: its main content, or also navigation, footers and the like."""
    gutenberg_license: Literal["remove", "keep"] = "remove"
    """What to do with the license before and behind a text of Project Gutenberg."""
    min_chars: NonNegativeInt = 100
    """Shorter documents are dropped (characters, after cleaning)."""
    fix_text: bool = False
    """Repair text that was decoded with the wrong encoding ("Â£" to "£"), and ligatures (the extra `cleaning`)."""
    languages: list[str] = dataclasses.field(default_factory=list)
    """Codes of the languages that are kept, such as `[en, de]` (ISO 639-1); empty keeps all (the extra `cleaning`)."""
    mask_personal: list[Literal["email", "phone", "ip"]] = dataclasses.field(default_factory=list)
    """What becomes a placeholder: e-mail addresses `[email]`, telephone numbers `[phone]`, public IP addresses `[ip]`."""
    filters: AnyFilters = dataclasses.field(default_factory=NoFilters)
    """Which lines and documents are left out."""
    group_field: str = ""
    """Key or column of what rows have in common, such as the product of a review (`asin`): all of one group are on one side, training, validation or test."""
    valid_fraction: Annotated[float, Range(0, 0.5)] = 0.01
    """Share of documents kept for validation, chosen by a hash of the document (0 to 0.5)."""
    test_fraction: Annotated[float, Range(0, 0.5)] = 0.0
    """`bytes`: share of documents kept apart for `overnight evaluate`, chosen like those for validation (0 to 0.5)."""
    label: str = ""
    """`bytes`: key or column of a number, kept with each document for the auxiliary objective (`phases.*.label_weight`)."""
    vocab_file: str = ""
    """A given WordPiece vocabulary (`vocab.txt`, one token a line); empty trains one."""
    new_words: NonNegativeInt = 0
    """Words that are added behind a given vocabulary (`vocab_file`, `init`): the most frequent ones that it splits. With `init` a word begins at the mean of the vectors of its pieces."""
    vocab_size: NonNegativeInt = 30522
    """Number of tokens: of the vocabulary to train, or exactly of the given file. 0: chosen with the sizes of the network (`model.size: auto`)."""
    lowercase: bool = True
    """Lower-case and strip accents, as in the uncased models."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do at a byte that is not UTF-8: stop and name its offset, or put U+FFFD there."""
    on_truncated_file: Literal["error", "keep"] = "error"
    """What to do with a file or archive that ends early: stop, or keep and count what was readable."""
    max_invalid_lines: NonNegativeInt = 0
    """Lines, rows or records that may be skipped because they do not parse or lack the field (count over all files); a broken row of CSV counts as all the lines it spans."""
    workers: Annotated[int, Range(), MACHINE] = 0
    """Processes that prepare; 0 takes every core. The shards do not depend on it."""
    scheduler: Annotated[str, MACHINE] = ""
    """Address of a Dask scheduler (`tcp://HOST:8786`), whose workers prepare instead, where they see the sources and `dir` at the same paths; empty prepares on this machine. The shards do not depend on it (the extra `dask`)."""
    near_duplicates: Annotated[float, Range(0, 1)] = 0.0
    """Jaccard similarity of 5-word shingles from which on two documents are near-duplicates, of which the first stays (0.8 is usual); 0 keeps them."""
    repeated_paragraphs: NonNegativeInt = 0
    """`wordpiece`: paragraphs that more than so many documents have are left out of all of them, and what a document repeats; 0 keeps them."""
    decontaminate: list[str] = dataclasses.field(default_factory=list)
    """Files, folders, globs or archives (tar, zip) with text of evaluations (`.json`, `.jsonl`, `.tsv`, `.csv`, plain text): documents that share an n-gram of words with it are dropped."""
    decontaminate_words: PositiveInt = 13
    """Words of the n-grams of `decontaminate`; shorter texts are not looked for."""
