"""Prepare: documents -> clean chunks -> decisions -> vocabulary -> token chunks -> shards, as pure tasks from files to files.

With `data.tokenizer = bytes` there is no vocabulary, and tokens are the bytes of the clean text.

The output of a task appears by rename, so a run that was killed resumes where it was. What is between lies in `work/`
below the data folder and is removed at the end. Nothing that is written depends on the number of workers.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from overnight.config import Data
from overnight.config.load import filled
from overnight.corpus import bytes as byte_text
from overnight.corpus import document_table, file_parts, hub, pydocs, wikipedia_dump
from overnight.corpus.cluster import check_scheduler, settle, workers_of
from overnight.corpus.document import DOCUMENT_BYTES
from overnight.corpus.drops import Drops
from overnight.corpus.exact_duplicates import first_occurrences
from overnight.corpus.file_parts import Part
from overnight.corpus.named_sources import runs_of
from overnight.corpus.paragraphs import without_repeated_paragraphs
from overnight.corpus.progress import Progress
from overnight.corpus.readers import BUILTIN, Document, Reading, Source, check_found, check_joined, documents_and_parts, start_reading
from overnight.corpus.settings import check_settings, settings_of
from overnight.corpus.shard_plan import shard_tasks
from overnight.corpus.shards import FORMAT_VERSION, SPLITS, Manifest, ShardEntry, checked_chunk, load_manifest, read_table, save_manifest
from overnight.corpus.sift import evaluation_files, evaluation_ngrams, sift
from overnight.corpus.source_files import change, files_read
from overnight.corpus.tasks import (
    CLEANING,
    CleanTask,
    TokenTask,
    clean_chunk,
    clean_task,
    free_encoder,
    make_shard,
    outcome_of,
    token_chunk,
    token_path,
    without_dropped,
)
from overnight.corpus.text import check_extras, counted, outcome_lines
from overnight.corpus.tokenizer import vocabulary
from overnight.corpus.validation_split import check_share, names_by_split, share_for, sides, validation_lines, whole_files
from overnight.corpus.vocabulary import check_given, given_tokens, make_vocabulary, warn_of_unknown
from overnight.corpus.work_folder import begin, clear, tidy
from overnight.corpus.workers import Workers, run_tasks
from overnight.display import plural
from overnight.errors import DataError
from overnight.machine import return_large_blocks
from overnight.run_dir.atomic import FULL, check_writable, how_to_make_room, remove_unfinished, write_json
from overnight.run_dir.lock import preparation_lock
from overnight.state_files import STRICT, read_json, sealed

# A task: large enough to hide a process's and a file's costs, small enough that its memory (about 30 times this) does not count.
CHUNK_BYTES = 5 << 20
# A shard holds many documents, because a random second segment is drawn from the shard of the first.
SHARD_TOKENS = 16_000_000
# What finding near-duplicates takes on the disk for a document.
_SIGNED_BYTES = 900
# Of the files below `work/`: 2 has checksums beside the chunks, 3 parts of large files and the sources of documents, 4 evaluation text in several forms,
# 5 shingles without case and punctuation of any alphabet.
_WORK_VERSION = 5


def prepare(
    data: Data,
    folder: Path,
    log: Callable[[str], None] = print,
    shard_tokens: int = SHARD_TOKENS,
    given: list[str] | None = None,
    leave_out: Sequence[Path] = (),
) -> Manifest:
    """Turn the text of `data.paths` into token shards; run again after an interruption, it resumes.

    Args:
        data: what to read and how.
        folder: where the shards, the vocabulary and the manifest go.
        log: called with plain lines that say what is done and how long is left.
        shard_tokens: tokens of a shard, about.
        given: the vocabulary of a checkpoint, in place of `data.vocab_file`.
        leave_out: folders that are not read as text where a source has them in it, beside `folder`: that of the run.

    Returns:
        The manifest; at once when the folder is prepared already.

    Raises:
        ConfigError: the folder was prepared with other settings, or cannot be written.
        DataError: a source cannot be used as it is (see `readers`), the disk is full, or the folder is in use, or lacks a file and its sources have changed.
    """
    settings, own = settings_of(data), [folder, *leave_out]
    manifest, missing = _found(settings, folder)
    if manifest is not None and not missing:
        tidy(folder)
        check_given(given, folder)
        _warn_of_old_rules(manifest, folder, log)
        if said := change(manifest.source_files, data, own):
            log(
                f"warning: the source files have other names or sizes than when {folder} was prepared ({said}); the folder is used as it is. To read them anew, "
                "prepare into another folder (data.dir), or delete this one and give runs that began with it a new folder"
            )
        return manifest
    if manifest is not None:
        _check_unchanged(manifest, missing, data, folder, own)
        log(f"prepare: {folder} lacks {', '.join(missing)}; preparing it again")
    given = given_tokens(data, given)
    check_extras(data)
    check_scheduler(data)
    check_writable(folder, "data.dir")
    return_large_blocks()
    reading = start_reading(data, own)
    folder = folder.absolute() if data.scheduler else folder  # its workers are elsewhere
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with preparation_lock(folder):
            manifest, missing = _found(settings, folder)
            if manifest is not None and not missing:  # another process has prepared it since it was looked at
                check_given(given, folder)
                return manifest
            with workers_of(data, folder, log) as workers:
                return _run(data, folder, log, reading, shard_tokens, workers, given)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise DataError(_full_disk(data, folder, reading, error)) from None


def _found(settings: dict[str, Any], folder: Path) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, when the folder is prepared with these settings, and the names of its files that are missing."""
    if not (folder / "manifest.json").exists():
        return None, []
    manifest = load_manifest(folder)
    check_settings(settings, manifest.settings, folder)
    return manifest, [name for name in manifest.files() if not (folder / name).exists()]


def _check_unchanged(manifest: Manifest, missing: list[str], data: Data, folder: Path, own: Sequence[Path]) -> None:
    """Check that what is missing would be made anew from the same files: else a corpus that runs were trained on would be replaced by another one."""
    if said := change(manifest.source_files, data, own):
        raise DataError(
            f"{folder}: lacks {', '.join(missing)}, and the source files have other names or sizes than when it was prepared ({said}); "
            "put back what is missing, prepare into another folder (data.dir), or delete this one to make it anew from the files as they are now"
        )


def _warn_of_old_rules(manifest: Manifest, folder: Path, log: Callable[[str], None]) -> None:
    if manifest.cleaning != CLEANING:
        log(
            f"prepare: {folder} was cleaned by version {manifest.cleaning} of the rules, which now are version {CLEANING}; it is used as it is. "
            "To clean it anew, delete it, and give runs that began with it a new folder"
        )


def _full_disk(data: Data, folder: Path, reading: Reading, error: OSError) -> str:
    # Clean text and tokens of everything lie side by side for a while: measured 1.9 bytes a byte of text.
    text, documents = (sum(getattr(source, what) for source in reading.sources) for what in ("bytes", "documents"))
    known = (
        f"the {text / 1e6:,.1f} MB of text read so far need"
        if reading.done_bytes < reading.total_bytes or not text
        else f"{text / 1e6:,.1f} MB of text need"
    )
    needed = max(2 * text + (_SIGNED_BYTES * documents if data.near_duplicates else 0), 10_000_000)
    more = ", and more for data.repeated_paragraphs," if data.repeated_paragraphs else ""
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return (
        f"{folder}: cannot write ({error.strerror}); {known} about {needed / 1e6:,.0f} MB{more} while preparing, {used / 1e6:,.1f} MB are used there, "
        f"{shutil.disk_usage(folder).free / 1e6:,.0f} MB are free; {how_to_make_room(error.errno)}, and run the same command again, which continues"
    )


def _run(
    data: Data,
    folder: Path,
    log: Callable[[str], None],
    reading: Reading,
    shard_tokens: int,
    workers: Workers,
    given: list[str] | None,
) -> Manifest:
    settings = settings_of(data)
    begin(folder, _state(data, settings, reading, shard_tokens, given), log, workers)
    work = folder / "work"
    evaluation_ngrams(data, work, log)
    chunks, sources, names = _read_and_clean(data, work, workers, log, reading)
    chunks = without_repeated_paragraphs(chunks, data, workers, log)
    outcome = outcome_of(chunks)
    splits, drops, short = _decide(chunks, data, workers, log)
    outcome.drops.merge(drops)
    tokenizer, vocab_size = byte_text.VOCABULARY_HASH, byte_text.VOCABULARY_SIZE
    if data.tokenizer == "wordpiece":
        tokens = make_vocabulary(data, given, folder, chunks, splits, workers, log)
        warn_of_unknown(chunks, tokens, data.lowercase, log)
        tokenizer, vocab_size = vocabulary(tokens, data.lowercase).hash, len(tokens)
    _tokenize(data, folder, chunks, splits, workers, log)
    entries = _shard(folder, chunks, names, shard_tokens, workers, log)
    outcome.drops.merge(outcome_of([token_path(path, split) for split in SPLITS for path in chunks]).drops)
    splits = [without_dropped(path, split) for path, split in zip(chunks, splits, strict=True)]
    short += sum(int((split > 0).sum()) for split in splits) - sum(entry.documents for entry in entries)
    first, duplicates = names_by_split(chunks, splits), drops.counts["duplicates"]
    dropped, masked = (dict(sorted((+counts).items())) for counts in (outcome.drops.counts, outcome.masked))
    table = document_table.write_document_table(folder, chunks, splits, entries)
    read = files_read(reading)
    manifest = Manifest(
        FORMAT_VERSION, tokenizer, vocab_size, settings, sources, duplicates, short, entries, CLEANING, first, dropped, masked, table, read
    )
    write_json(folder / "drops.json", sealed(outcome.drops.as_json()))
    for line in outcome_lines(outcome, data.min_chars):
        log(line)
    if not manifest.count("train", "documents"):
        raise DataError(f"no document is left to train on; dropped: {counted(dropped)}; allow more of them")
    for line in validation_lines(manifest, partial(share_for, chunks, splits), partial(whole_files, chunks)):
        log(line)
    save_manifest(folder, manifest)
    settle(workers)
    clear(work)
    remove_unfinished(folder)
    return manifest


def _state(data: Data, settings: dict[str, Any], reading: Reading, shard_tokens: int, given: list[str] | None) -> str:
    """Return a hash of everything the intermediate files depend on."""
    sources: list[Any] = []
    for source, files in zip(reading.sources, reading.files, strict=True):
        if source.path == BUILTIN:
            sources.append(pydocs.environment())
        elif source.path.startswith(hub.PREFIX):
            sources.append(hub.version(source.path))
        else:
            sources.append([(file.name, file.size, file.version) for file in files])
    sources += evaluation_files(data)
    sizes = [CHUNK_BYTES, wikipedia_dump.PART_BYTES, file_parts.PART_BYTES, shard_tokens]
    everything = [FORMAT_VERSION, _WORK_VERSION, CLEANING, *sizes, filled(settings), sources, given]
    return xxhash.xxh3_128_hexdigest(json.dumps(everything).encode())


@dataclasses.dataclass(frozen=True)
class _Read:
    """What reading has given: chunks, and what each source holds."""

    __pydantic_config__ = STRICT
    chunks: int
    sources: list[Source]
    names: list[str]
    """Of the source of each chunk."""


def _read_and_clean(
    data: Data, work: Path, workers: Workers, log: Callable[[str], None], reading: Reading
) -> tuple[list[Path], list[Source], list[str]]:
    """Clean chunks of all documents in order, what each source gave, and the name of each chunk's source."""
    done = work / "read.json"
    if done.exists():
        read = read_json(done, _Read, f"delete the folder {work.parent} and prepare again")
        count, sources, names = read.chunks, read.sources, read.names
        reading.sources, reading.done_bytes = sources, reading.total_bytes
        _check_skipped(sources, data.max_invalid_lines)
    else:
        progress, names = Progress("read and clean", log), []

        def tasks() -> Iterator[CleanTask]:
            for number, group in enumerate(_chunks(documents_and_parts(data, reading))):
                progress.update(sum(source.bytes for source in reading.sources), reading.done_bytes / max(reading.total_bytes, 1))
                names.append(group[0].source if isinstance(group, list) else reading.sources[group.source].name)
                task = clean_task(group, work / f"clean-{number:05d}.arrow", data)
                del group  # while the next is read
                yield task

        count, sources = 0, reading.sources
        for counts in run_tasks(clean_chunk, tasks(), workers):
            count += 1
            if counts:
                sources[counts.source].add(counts)
        check_found(sources)
        check_joined(sources)
        write_json(done, sealed(dataclasses.asdict(_Read(count, sources, names))))
        progress.end(sum(source.bytes for source in sources), plural(sum(source.documents for source in sources), "document"))
    for source in sources:
        for line in source.lines():
            log(f"read and clean: {source.path}: {line}")
    return [work / f"clean-{number:05d}.arrow" for number in range(count)], sources, names


def _check_skipped(sources: list[Source], allowed: int) -> None:
    if (skipped := sum(source.skipped_lines for source in sources)) > allowed:
        raise DataError(f"{skipped} lines were skipped, data.max_invalid_lines = {allowed}; correct them or allow more")


def _chunks(found: Iterator[Document | Part]) -> Iterator[list[Document] | Part]:
    """Yield documents in groups of about CHUNK_BYTES characters, or of so many documents that they take as much memory, each of one named source; a part of a file is a group of its own."""
    group: list[Document] = []
    size = 0
    for document in found:
        if not isinstance(document, Document):
            if group:
                yield group
            yield document
            group, size = [], 0
            continue
        if group and group[0].source != document.source:
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document.text) + DOCUMENT_BYTES
        if size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _decide(chunks: list[Path], data: Data, workers: Workers, log: Callable[[str], None]) -> tuple[list[np.ndarray], Drops, int]:
    """Return for each document of each chunk: 0 dropped, 1 train, 2 valid, 3 test. And what was dropped, and how many were too short."""
    schemas = [read_table(checked_chunk(path)).schema for path in chunks]
    short = sum(int(schema.metadata[b"short"]) for schema in schemas)
    first = first_occurrences(chunks, workers)
    if not len(first):
        dropped = outcome_of(chunks).drops.counts
        if set(dropped) != {"min_chars"}:
            raise DataError(f"no document is left: {counted(dropped)}; allow more of them, or name other sources")
        raise DataError(
            f"{plural(short, 'document')} found, and none of data.min_chars = {data.min_chars} characters; lower it or name other sources"
        )
    if data.label and all(_unlabeled(path) for path in chunks):
        raise DataError(f"no document has a number under data.label = {data.label!r}; correct it, or leave it out")
    if data.group_field and not any(_has_group(path) for path in chunks):
        raise DataError(f"no document has a group under data.group_field = {data.group_field!r}; correct it, or leave it out")
    stay, drops = sift(chunks, first, data, workers, log)
    if not stay.any():
        dropped = outcome_of(chunks).drops.counts + drops.counts
        raise DataError(f"no document is left: {counted(dropped)}; allow more of them, or name other sources")
    splits, (lowest, highest) = sides(chunks, stay, data.valid_fraction, data.test_fraction)
    _, trained, num_validation, tested = np.sum([np.bincount(split, minlength=4) for split in splits], axis=0).tolist()
    apart = f"{num_validation:,} for validation, {tested:,} for the test" if data.test_fraction else f"{num_validation:,} for validation"
    log(
        f"deduplicate: {plural(trained, 'document')} to train on, {apart}; dropped {plural(drops.counts['duplicates'], 'duplicate')}, {short:,} short"
    )
    files = partial(whole_files, chunks)
    check_share("data.valid_fraction", data.valid_fraction, num_validation, trained, lowest, files)
    check_share("data.test_fraction", data.test_fraction, tested, trained, 1 - highest, files)
    return splits, drops, short


def _unlabeled(chunk: Path) -> bool:
    column = read_table(chunk).column("label")
    return bool(column.null_count == len(column))


def _has_group(chunk: Path) -> bool:
    return any(read_table(chunk).column("group").to_pylist())


def _tokenize(data: Data, folder: Path, chunks: list[Path], splits: list[np.ndarray], workers: Workers, log: Callable[[str], None]) -> None:
    progress = Progress("tokenize", log, "M tokens")
    tasks = (
        TokenTask(path, split, folder, data.tokenizer, data.filters.max_tokens_per_char) for path, split in zip(chunks, splits, strict=True)
    )
    done = 0
    for number, tokens in enumerate(run_tasks(token_chunk, tasks, workers, lambda task: task.clean.stat().st_size)):
        done += tokens
        progress.update(done, (number + 1) / len(chunks))
    free_encoder()
    progress.end(done, plural(done, "token"))


def _shard(
    folder: Path, chunks: list[Path], names: list[str], shard_tokens: int, workers: Workers, log: Callable[[str], None]
) -> list[ShardEntry]:
    progress = Progress("shards", log, "M tokens")
    tasks = [
        task
        for split in SPLITS
        for name, mine in runs_of(names)
        for task in shard_tasks(folder, split, name, [token_path(path, split) for path in chunks[mine]], shard_tokens)
    ]
    entries = list(run_tasks(make_shard, tasks, workers, lambda task: sum(last - first for _, first, last in task.parts)))
    progress.end(
        sum(entry.tokens for entry in entries), f"{plural(len(entries), 'shard')}, {sum(entry.bytes for entry in entries) / 1e6:,.1f} MB"
    )
    return entries
