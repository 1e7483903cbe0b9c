"""A run belongs to one corpus, and its folder carries what is needed of the prepared data after pretraining.

`RUN/corpus/` holds the vocabulary (`vocab.txt`, `tokenizer.json`), the manifest of the shards, and in `place.json` where they were.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from overnight.checkpoint import reader
from overnight.checkpoint.reader import TrainingProgress
from overnight.config import BertRun, Run
from overnight.corpus.document import printable
from overnight.corpus.places import is_remote
from overnight.corpus.shard_cache import local_copy
from overnight.corpus.shards import Manifest, load_manifest, save_manifest
from overnight.corpus.tokenizer import Vocabulary, copy_tokenizer, load_vocabulary
from overnight.errors import DataError
from overnight.run_dir.atomic import write_json
from overnight.state_files import read_json, sealed

AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True)
class _DataLocation:
    """What `place.json` holds."""

    version: Literal[1]
    dir: str


def keep_corpus(run: Run, manifest: Manifest) -> None:
    """Copy the vocabulary and the manifest of the prepared data into the run folder, and note where the data lies."""
    folder = run.run_dir / "corpus"
    if isinstance(run, BertRun):
        copy_tokenizer(run.data_dir, folder)
    # The working folder may have a name that is no UTF-8, which no setting can have; so written, the data is not found from elsewhere.
    write_json(folder / "place.json", sealed(dataclasses.asdict(_DataLocation(1, printable(str(run.data_dir.resolve()))))))
    save_manifest(folder, manifest)  # last: its presence says that the rest is there


def kept_vocabulary(run: Run) -> tuple[Path, Vocabulary]:
    """Return the folder with the vocabulary that a BERT run was pretrained with, and the vocabulary.

    Raises:
        DataError: when it is missing, or is not the one of the manifest beside it.
    """
    folder = run.run_dir / "corpus"
    if not (folder / "manifest.json").is_file():
        raise DataError(
            f"{folder}: is missing, and with it the vocabulary. Run `overnight pretrain {run.run_dir}` once in "
            f"the directory from which {run.data_dir} can be read (or with --data.dir=FOLDER): it adds what is missing"
        )
    return folder, same_vocabulary(folder, load_manifest(folder).tokenizer, run.run_dir / "checkpoints")


def task_vocabulary(folder: Path, expected: str) -> Vocabulary:
    """Load the vocabulary of a fine-tuned task from its folder.

    Args:
        folder: `RUN/finetune/TASK`.
        expected: its hash in `task.json`.

    Raises:
        DataError: when it is missing, cannot be read, or is another one.
    """
    if not (folder / "vocab.txt").exists():
        raise DataError(
            f"{folder}: has no vocab.txt; delete the folder, and run `overnight finetune {folder.name} --from {folder.parent.parent}` again"
        )
    return same_vocabulary(folder, expected, folder / "model.safetensors")


def same_vocabulary(folder: Path, expected: str, weights: Path) -> Vocabulary:
    """Load the vocabulary of a folder, and check that it is the one that some weights were trained with.

    Args:
        folder: holds `vocab.txt` and `tokenizer.json`.
        expected: the hash of that vocabulary.
        weights: where they lie, for the message.

    Raises:
        DataError: when it cannot be read, or is another one.
    """
    vocabulary = load_vocabulary(folder)
    if vocabulary.hash != expected:
        raise DataError(
            f"{folder}: vocab.txt and tokenizer.json are another vocabulary ({vocabulary.hash}) than {weights} was trained with ({expected}); "
            "put the right files back"
        )
    return vocabulary


def assert_same_corpus(progress: TrainingProgress, manifest: Manifest, folder: Path, run: Run) -> None:
    """Check that a checkpoint was trained on the corpus that a folder holds now.

    Args:
        progress: of the checkpoint.
        manifest: of the folder.
        folder: the prepared data, or the copy of its vocabulary in the run folder.
        run: whose checkpoint it is.

    Raises:
        DataError: when it is another corpus.
    """
    if progress.corpus not in ("", manifest.fingerprint()):
        raise DataError(_another_corpus(run, folder))


def fetched(run: AnyRun) -> AnyRun:
    """Return the run with a copy of its prepared data on this machine, where that is in storage.

    Raises:
        DataError: when it cannot be had (see :mod:`overnight.corpus.shard_cache`).
    """
    if not is_remote(run.data.dir):
        return run
    return dataclasses.replace(run, data=dataclasses.replace(run.data, dir=str(local_copy(run.data, run.name))))


def with_data(run: AnyRun) -> AnyRun:
    """Return the run with the folder of its prepared data as it can be reached from here; of data in storage with a copy.

    A relative `data.dir` is looked up in the working directory; where nothing is prepared there, it is the folder that the run was
    trained on before. Whether that is the right corpus is for :func:`assert_same_corpus` to say.
    """
    run = fetched(run)
    if run.data_dir.is_absolute() or (run.data_dir / "manifest.json").exists():
        return run
    place = _place(run)
    if place is None or not (place / "manifest.json").exists():
        return run
    return dataclasses.replace(run, data=dataclasses.replace(run.data, dir=str(place)))


def find_data(run: AnyRun) -> AnyRun:
    """Return the run with the prepared data on which it was trained, as :func:`with_data` finds it.

    Raises:
        DataError: when it was trained before, and its data is neither here nor where it was then, or another corpus lies there.
    """
    found, kept = with_data(run), run.run_dir / "corpus"
    if not (found.data_dir / "manifest.json").exists():
        if place := _place(run):
            also = "" if place == run.data_dir.resolve() else f" nor does {place},"
            raise DataError(
                f"{run.data_dir}: holds no prepared data,{also} where it was when {run.run_dir} was trained; "
                "name its folder with --data.dir=FOLDER"
            )
    elif (kept / "manifest.json").is_file() and reader.newest_checkpoint(run.run_dir / "checkpoints"):
        # Before any network is made for it: of another vocabulary, the checkpoint would be called that of another model.
        here, trained = load_manifest(found.data_dir), load_manifest(kept)
        if here.fingerprint() != trained.fingerprint():
            raise DataError(_another_corpus(run, found.data_dir))
    return found


def _another_corpus(run: Run, folder: Path) -> str:
    place = _place(run)
    earlier = f" The right data was in {place}." if place and place != folder.resolve() else ""
    return (
        f"{folder} holds other data than the checkpoints in {run.run_dir} were trained on: it was prepared anew since, or is another run's.{earlier} "
        "Name the right data with --data.dir=FOLDER; a run on other data needs a folder of its own (--out=...)"
    )


def _place(run: Run) -> Path | None:
    """Return where the prepared data was when the run was trained last; None where that is not known."""
    path = run.run_dir / "corpus" / "place.json"
    if not path.exists():
        return None
    found: _DataLocation = read_json(path, _DataLocation, "delete it and name the prepared data with --data.dir=FOLDER")
    return Path(found.dir)
