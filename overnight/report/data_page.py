"""One self-contained HTML page about a prepared folder: what it holds, from where, what was dropped, and what its documents look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overnight.corpus import places
from overnight.corpus.prepared import Prepared
from overnight.corpus.settings import different_settings
from overnight.corpus.shards import Manifest
from overnight.corpus.statistics import SplitStatistics, Statistics, sample_documents, statistics
from overnight.corpus.tokenizer import LONGEST_WORD
from overnight.corpus.validation_split import LEAST_DOCUMENTS, LEAST_TOKENS
from overnight.display import plural, share, yaml_text
from overnight.download import manifest as downloads
from overnight.errors import ConfigError, DataError, UserError
from overnight.report.page import rendered, write_page
from overnight.state_files import STRICT, read_json

# Frequent tokens, sampled documents and characters of each that the page shows.
_FREQUENT, _SAMPLES, _CHARACTERS = 60, 6, 600
# Files of a source whose licenses are looked up.
_FILES = 10_000
_MANY_UNKNOWN, _MANY_UNUSED = 0.01, 0.1


def write_data_report(folder: Path, out: Path) -> Path:
    """Write the page of a prepared folder; returns `out`.

    Raises:
        ConfigError: when `out` is a folder.
        DataError: when the folder is not prepared, or a shard is missing or damaged.
        UserError: when jinja2 or plotly is not installed, or the page cannot be written.
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name the HTML file to write, such as {out / 'report.html'}")
    return write_page(_page(Prepared(folder)), out)


def refresh_data_report(folder: Path) -> str:
    """Write `report.html` into a prepared folder unless that of its shards is there; return what to say of it, nothing where there is nothing new."""
    page, manifest = folder / "report.html", folder / "manifest.json"
    if page.exists() and page.stat().st_mtime_ns >= manifest.stat().st_mtime_ns:
        return ""
    try:
        return f"data report: {write_data_report(folder, page)}"
    except UserError as error:  # the shards are good without it, as in a folder that may only be read
        return f"no data report: {error}"


def _page(prepared: Prepared) -> str:
    try:
        from overnight.report import data_figures
    except ImportError as error:
        raise UserError(f"the report needs {error.name}: pip install 'overnight[report]'") from None
    manifest, found = prepared.manifest, statistics(prepared)
    name = prepared.folder.resolve().name
    dropped, (samples, lost) = _dropped(prepared.manifest), _drop_samples(prepared.folder)
    settings = [(key, [yaml_text(value)], False) for key, value, _ in different_settings(manifest.settings, {})]
    return rendered(
        "data.html",
        title=f"{name}, data",
        name=name,
        folder=str(prepared.folder),
        manifest=manifest,
        is_bytes=prepared.decoder.is_bytes,
        splits=[_split_row(prepared, split, each) for split, each in found.splits.items()],
        sources=_source_rows(manifest, found),
        knows_sources=prepared.table is not None,
        charts=list(data_figures.charts(found, prepared.decoder.is_bytes, _source_names(manifest))),
        frequent=_frequent(prepared, found),
        vocabulary=_vocabulary(prepared, found),
        dropped=dropped,
        drops_chart=data_figures.drops(dropped) if len(dropped) > 1 else None,
        drop_samples=samples,
        languages=found.languages,
        longest=found.longest,
        documents=sample_documents(prepared, _SAMPLES, _CHARACTERS),
        warnings=[*lost, *_warnings(prepared, found)],
        own_settings=settings,
        settings=[(f"data.{key}", [yaml_text(value)], False) for key, value in _flat(manifest.settings)],
    )


def _flat(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def _unknown_share(prepared: Prepared, each: SplitStatistics) -> float | None:
    """Return the share of [UNK] among the tokens; None of bytes."""
    if prepared.decoder.is_bytes:
        return None
    return float(each.token_counts[prepared.decoder.tokens.index("[UNK]")]) / max(each.documents.sum, 1)


def _split_row(prepared: Prepared, split: str, each: SplitStatistics) -> dict[str, Any]:
    manifest, tokens = prepared.manifest, each.documents.sum
    return {
        "split": split,
        "documents": each.documents.number,
        "sentences": each.sentences.number,
        "tokens": tokens,
        "characters": each.characters,
        "compression": each.characters / max(tokens, 1),
        "unknown": _unknown_share(prepared, each),
        "bytes": manifest.count(split, "bytes"),
        "bytes_per_token": manifest.count(split, "bytes") / max(tokens, 1),
        "shards": len(prepared.entries(split)),
        "labels": each.labels,
        "lengths": [
            (what, lengths.mean(), *(lengths.quantile(part) for part in (0.05, 0.5, 0.95)), lengths.longest)
            for what, lengths in (("documents", each.documents), ("sentences", each.sentences))
            if what == "documents" or not prepared.decoder.is_bytes
        ],
    }


def _source_names(manifest: Manifest) -> list[str]:
    """Return what each source is called where there is little room: its name, where only one has it."""
    count = Counter(source.name for source in manifest.sources)
    return [source.name if source.name and count[source.name] == 1 else source.title for source in manifest.sources]


def _source_rows(manifest: Manifest, found: Statistics) -> list[dict[str, Any]]:
    rows = []
    for number, source in enumerate(manifest.sources):
        kept = [count for (of, _), count in found.sources.items() if of == number]
        sums = {what: sum(getattr(count, what) for count in kept) for what in ("documents", "tokens", "characters")}
        notes = [
            f"{plural(count, noun)}{more}"
            for count, noun, more in (
                (source.skipped_lines, "line", " skipped"),
                (len(source.truncated), "truncated file", ""),
                (source.licenses, "license", " removed"),
                (source.redirects, "redirect", ""),
                (source.other_pages, "page", " of other namespaces"),
                (source.replaced, "place", " with U+FFFD instead of bytes that are not UTF-8"),
                *((count, "document", f" without {key!r}") for key, count in sorted(source.without.items())),
            )
            if count
        ]
        rows.append({"source": source, "kept": sums, "notes": notes, "licenses": _licenses(source.path)})
    return rows


def _licenses(path: str) -> list[str]:
    """Return the licenses that `overnight download` recorded beside the files of a source, the most frequent first; nothing of other files."""
    if "://" in path or path.startswith(("hf:", "builtin:")):
        return []
    known: dict[Path, dict[str, downloads.Entry]] = {}
    counts: Counter[str] = Counter()
    try:
        files = [Path(file.name) for file in places.files(path)][:_FILES]
        for file in files:
            for folder in list(file.resolve().parents)[:4]:
                if folder not in known:
                    known[folder] = downloads.Manifest(folder).files
                if entry := known[folder].get(str(file.resolve().relative_to(folder))):
                    counts[f"{entry.license or 'not stated'} ({entry.dataset})"] += 1
                    break
    except UserError:  # the source has gone since, or its record is damaged: the shards are what they are
        return []
    return [f"{text}: {plural(count, 'file')}" for text, count in counts.most_common()]


def _frequent(prepared: Prepared, found: Statistics) -> list[tuple[str, int, float]]:
    """Return the most frequent tokens of the training part with their number and share."""
    if "train" not in found.splits:
        return []
    counts = found.splits["train"].token_counts
    order = np.argsort(-counts, kind="stable")[:_FREQUENT].tolist()
    return [(prepared.decoder.tokens[token], int(counts[token]), float(counts[token] / counts.sum())) for token in order if counts[token]]


def _vocabulary(prepared: Prepared, found: Statistics) -> dict[str, Any]:
    """Return how much of the vocabulary the training part uses."""
    counts = found.splits["train"].token_counts if "train" in found.splits else np.zeros(prepared.manifest.vocab_size, np.int64)
    tokens, total = prepared.decoder.tokens, max(int(counts.sum()), 1)
    special = np.array([token.startswith("[") and token.endswith("]") and len(token) > 2 for token in tokens])
    unused = np.flatnonzero((counts == 0) & ~special)
    ordered = np.cumsum(np.sort(counts)[::-1]) / total
    return {
        "size": len(tokens),
        "used": int((counts > 0).sum()),
        "unused": len(unused),
        "unused_tokens": [tokens[token] for token in unused[:40].tolist()],
        "rare": int(((counts > 0) & (counts < 100)).sum()),
        "half": int(np.searchsorted(ordered, 0.5)) + 1,
        "most": int(np.searchsorted(ordered, 0.95)) + 1,
        "continuing": None if prepared.decoder.is_bytes else float(counts[[token.startswith("##") for token in tokens]].sum()) / total,
    }


@dataclass(frozen=True)
class _Sample:
    __pydantic_config__ = STRICT
    document: str
    text: str


@dataclass(frozen=True)
class _Reason:
    __pydantic_config__ = STRICT
    count: int
    samples: list[_Sample]


def _dropped(manifest: Manifest) -> dict[str, int]:
    """Return what was dropped by reason, the most frequent first."""
    counts = {"duplicates": manifest.duplicates, "min_chars": manifest.short} | manifest.dropped
    return {reason: count for reason, count in sorted(counts.items(), key=lambda row: -row[1]) if count}


def _drop_samples(folder: Path) -> tuple[dict[str, _Reason], list[str]]:
    """Return the samples of what was dropped, where `drops.json` is there, and what to say where it cannot be read."""
    path, remedy = (
        folder / "drops.json",
        "so this page has no samples of what was dropped: prepare into another folder (data.dir) to see them",
    )
    try:
        samples: dict[str, _Reason] = read_json(path, dict[str, _Reason], remedy) if path.exists() else {}
    except DataError as error:  # nothing else is read from it, and the shards are whole
        return {}, [str(error)]
    return samples, []


def _warnings(prepared: Prepared, found: Statistics) -> Iterator[str]:
    """Yield what is worth a look before training."""
    documents, tokens = (prepared.manifest.count("valid", what) for what in ("documents", "tokens"))
    if not documents:
        yield "No document is in the validation split, and pretraining needs some to measure on (data.valid_fraction)."
    elif documents < LEAST_DOCUMENTS or tokens < LEAST_TOKENS:
        yield (
            f"Scores on {plural(documents, 'validation document')} of {tokens:,} tokens say little about other documents: raise data.valid_fraction "
            f"(at least {LEAST_DOCUMENTS} documents and {LEAST_TOKENS:,} tokens would be better)."
        )
    for split, each in found.splits.items():
        if (unknown := _unknown_share(prepared, each)) and unknown > _MANY_UNKNOWN:
            yield f"{share(unknown)} of the tokens of {split} are [UNK]: the vocabulary does not fit the text (data.vocab_file), or there are words of more than {LONGEST_WORD} characters, as in scripts without spaces."
    vocabulary = _vocabulary(prepared, found)
    if not prepared.decoder.is_bytes and vocabulary["unused"] > _MANY_UNUSED * vocabulary["size"]:
        yield f"{share(vocabulary['unused'] / vocabulary['size'])} of the vocabulary never occurs in the training part: a smaller one would do (data.vocab_size)."
    for source in prepared.manifest.sources:
        if source.truncated:
            yield f"{source.title}: {plural(len(source.truncated), 'file')} ended early and gave only what was readable."
