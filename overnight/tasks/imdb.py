"""The IMDB reviews of Maas et al. 2011 (Large Movie Review Dataset), from the folder or straight from its archive."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from overnight.errors import DataError
from overnight.tasks.examples import Example, TaskData, split

_LABELS = ("neg", "pos")
_ARCHIVES = ("aclImdb.tar.xz", "aclImdb_v1.tar.gz", "aclImdb.tar.gz")


def load_imdb(path: Path, seed: int) -> TaskData:
    """Read the reviews; dev is a tenth of the training reviews, split off by a hash of their text.

    The `<br />` of the pages becomes a blank; nothing else is changed. The unlabeled reviews are not read.

    Args:
        path: the folder `aclImdb`, the folder around it or around its archive, or the archive (.tar.xz, .tar.gz), which is read as a
            stream and never unpacked to disk.
        seed: which tenth is dev.

    Raises:
        DataError: files missing, an archive cut short, or a review that is not UTF-8, naming it.
    """
    source = _source(path)
    # By label and stem: of a path that is twice in an archive the last one counts, as where it is unpacked.
    parts: dict[str, dict[tuple[str, str], str]] = {"train": {}, "test": {}}
    for part, label, stem, raw in _archive(source) if source.is_file() else _folder(source):
        try:
            text = " ".join(raw.decode("utf-8").replace("<br />", " ").split())
        except UnicodeDecodeError as error:
            raise DataError(f"{source}: {part}/{label}/{stem}.txt: not UTF-8 at offset {error.start}") from None
        if not text:
            raise DataError(f"{source}: {part}/{label}/{stem}.txt: holds no text")
        parts[part][label, stem] = text
    examples: dict[str, list[Example]] = {}
    for part, reviews in parts.items():
        found = {label for label, _ in reviews}
        if found != set(_LABELS):
            raise DataError(
                f"{source}: no reviews in {part}/{min(set(_LABELS) - found)}; the layout is aclImdb/{{train,test}}/{{neg,pos}}/*.txt"
            )
        # Sorted, so that a folder and an archive in any order give the same rows.
        examples[part] = [Example(f"{label}/{stem}", text, None, label) for (label, stem), text in sorted(reviews.items())]
    train, dev = split(examples["train"], seed, str(source))
    note = f"dev is {len(dev)} of the {len(examples['train'])} training reviews, split off by a hash of their texts"
    return TaskData("imdb", "classification", _LABELS, train, dev, examples["test"], "accuracy", notes=(note,), is_dev_made=True)


def _source(path: Path) -> Path:
    if path.is_file():
        return path
    for folder in (path, path / "aclImdb"):
        if (folder / "train").is_dir():
            return folder
    for name in _ARCHIVES:
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path}: holds neither aclImdb/train nor one of {', '.join(_ARCHIVES)}")


def _label_of(name: str) -> tuple[str, str, str] | None:
    """Return (split, label, stem) of a labeled review's path, None for every other file."""
    match name.split("/")[-3:]:
        case [("train" | "test") as part, ("neg" | "pos") as label, file] if file.endswith(".txt"):
            return part, label, file.removesuffix(".txt")
    return None


def _folder(root: Path) -> Iterator[tuple[str, str, str, bytes]]:
    for part in ("train", "test"):
        for label in _LABELS:
            folder = root / part / label
            for file in folder.iterdir() if folder.is_dir() else ():
                if key := _label_of(file.as_posix()):
                    yield (*key, file.read_bytes())


def _archive(file: Path) -> Iterator[tuple[str, str, str, bytes]]:
    # Not tarfile's own decompression ("r|*"): it takes a cut between two members for the end of the archive.
    openers: dict[str, Callable[[Path], io.BufferedIOBase]] = {".xz": lzma.LZMAFile, ".gz": gzip.GzipFile, ".tgz": gzip.GzipFile}
    if file.suffix not in openers:
        raise DataError(f"{file}: an archive of the reviews ends in {', '.join(openers)}")
    try:
        with openers[file.suffix](file) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if member.isfile() and (key := _label_of(member.name)):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield (*key, content.read())
            while stream.read(1 << 20):  # to the end, where the check sums are
                pass
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise DataError(f"{file}: cannot be read to its end ({error}); the archive is damaged or cut short, fetch it again") from None
