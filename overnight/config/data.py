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
    """Share of the examples (byte models: of the text), relative to the other sources' weights. If any source has a weight, a source without one is not read."""
    epochs: PositiveFloat = 1.0
    """How often the source is read while a source with `epochs: 1` is read once; applies only if no source has a weight."""


@dataclass(frozen=True, kw_only=True)
class TextSource(Mix):
    """A source of text, and how often it is read. What is left empty is as `data` has it."""

    paths: list[str]
    """Paths of this source, as in `data.paths`."""
    format: Literal["", Format] = ""
    """Format of this source, as in `data.format`; empty uses `data.format`."""
    field: str = ""
    """Field of this source, as in `data.field`; empty uses `data.field`."""
    documents: Literal["", "file", "paragraph", "line"] = ""
    """Documents of this source, as in `data.documents`; empty uses `data.documents`."""


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes token shards."""

    paths: list[str] = dataclasses.field(default_factory=lambda: ["builtin:python-docs"])
    """Sources to read, in order: files, folders, globs, tar or zip archives, local or in storage (`s3://bucket/folder`), and Hugging Face data sets (`hf:NAME[:CONFIG[:SPLIT]]`). `builtin:python-docs` is the documentation inside this Python environment. `$NAME` is read from the environment. `ARCHIVE::PATTERN` takes only the archive members whose names match (`reviews.tar.xz::*/train/*`; `*` also matches `/`)."""
    sources: Mapping[str, TextSource] = dataclasses.field(default_factory=dict)
    """Named sources instead of `paths`, each with its share of what is read (docs/mixtures.md). Shares may change without preparing again."""
    tokenizer: Literal["wordpiece", "bytes"] = "wordpiece"
    """What a token is: a WordPiece for encoders, or a byte of UTF-8 for byte models."""
    dir: Annotated[str, MACHINE] = "data/{name}"
    """Folder of the prepared shards; `{name}` is the name of the run, `~` your home folder. For training it may be in storage (`s3://bucket/folder`); `cache` then holds a copy."""
    cache: Annotated[str, MACHINE] = "~/.cache/overnight"
    """Local folder for copies of prepared shards that are in storage; all processes of this machine share it."""
    cache_gb: Annotated[float, Positive, MACHINE] = 100.0
    """Maximum size of `cache` (GB); copies that no process is reading are removed to make room."""
    format: Format = "auto"
    """File format; `auto` decides by the file's extension and first bytes. `wiki` is the extracted `<doc>` format, `mediawiki` a Wikipedia dump in XML; `warc` includes WET."""
    namespaces: list[int] = dataclasses.field(default_factory=lambda: [0])
    """Namespaces to read from a Wikipedia dump, by the numbers in `<ns>`: 0 is articles, 1 their talk pages."""
    field: str = "text"
    """Key or column of the text in JSON lines, CSV, TSV and Parquet; `title+text` joins several. In Amazon reviews, `text`, `title` and `rating` match every name that those fields have."""
    documents: Literal["file", "paragraph", "line"] = "file"
    """What counts as one document in a text, HTML or EPUB file: the whole file, a block between blank lines, or a line."""
    html: Literal["main", "all"] = "main"
    """Text to extract from an HTML page: its main content, or everything, including navigation and footers."""
    gutenberg_license: Literal["remove", "keep"] = "remove"
    """Remove or keep the license before and after a Project Gutenberg text."""
    min_chars: NonNegativeInt = 100
    """Drop shorter documents (characters, after cleaning)."""
    fix_text: bool = False
    """Repair ligatures and text decoded with the wrong encoding ("Â£" to "£"). Needs the extra `cleaning`."""
    languages: list[str] = dataclasses.field(default_factory=list)
    """Languages to keep, by ISO 639-1 code, such as `[en, de]`; empty keeps all. Needs the extra `cleaning`."""
    mask_personal: list[Literal["email", "phone", "ip"]] = dataclasses.field(default_factory=list)
    """Personal data to replace with placeholders: e-mail addresses with `[email]`, telephone numbers with `[phone]`, public IP addresses with `[ip]`."""
    filters: AnyFilters = dataclasses.field(default_factory=NoFilters)
    """Rules that drop lines and documents."""
    group_field: str = ""
    """Key or column that groups rows, such as the product of a review (`asin`); all rows of a group are in the same split: training, validation or test."""
    valid_fraction: Annotated[float, Range(0, 0.5)] = 0.01
    """Share of documents kept for validation, chosen by a hash of the document (0 to 0.5)."""
    test_fraction: Annotated[float, Range(0, 0.5)] = 0.0
    """`bytes`: share of documents kept for `overnight evaluate`, chosen like those for validation (0 to 0.5)."""
    label: str = ""
    """`bytes`: key or column of a number to store with each document, for the auxiliary objective (`phases.*.label_weight`)."""
    vocab_file: str = ""
    """Existing WordPiece vocabulary to use (`vocab.txt`, one token per line); empty trains one."""
    new_words: NonNegativeInt = 0
    """Number of words to append to an existing vocabulary (`vocab_file`, `init`): the most frequent words that it splits. With `init`, the vector of a new word starts as the mean of its pieces' vectors."""
    vocab_size: NonNegativeInt = 30522
    """Vocabulary size (tokens): of the vocabulary to train, or exactly that of `vocab_file`. 0: chosen with the sizes of the network (`model.size: auto`)."""
    lowercase: bool = True
    """Lowercase and strip accents, as in the uncased models."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do at a byte that is not valid UTF-8: stop and report its offset, or replace it with U+FFFD."""
    on_truncated_file: Literal["error", "keep"] = "error"
    """What to do with a file or archive that ends early: stop, or keep and count what was readable."""
    max_invalid_lines: NonNegativeInt = 0
    """Maximum number of lines, rows or records to skip because they do not parse or lack the field (over all files). A broken CSV row counts as all the lines it spans."""
    workers: Annotated[int, Range(), MACHINE] = 0
    """Processes that prepare the data; 0 uses every core. The shards do not depend on it."""
    scheduler: Annotated[str, MACHINE] = ""
    """Address of a Dask scheduler (`tcp://HOST:8786`) whose workers prepare the data instead; they must see the sources and `dir` at the same paths. Empty prepares on this machine. The shards do not depend on it. Needs the extra `dask`."""
    near_duplicates: Annotated[float, Range(0, 1)] = 0.0
    """Minimum Jaccard similarity of 5-word shingles at which two documents count as near-duplicates (0.8 is usual); only the first is kept. 0 keeps all."""
    repeated_paragraphs: NonNegativeInt = 0
    """`wordpiece`: drop a paragraph everywhere if more than this many documents contain it, and drop repetitions within a document. 0 keeps them."""
    decontaminate: list[str] = dataclasses.field(default_factory=list)
    """Evaluation text: files, folders, globs or archives (tar, zip) of `.json`, `.jsonl`, `.tsv`, `.csv` or plain text. Documents that share a word n-gram with it are dropped."""
    decontaminate_words: PositiveInt = 13
    """Length of the n-grams for `decontaminate` (words); shorter evaluation texts are not searched for."""
