"""A run folder belongs to one run, on one corpus."""

from __future__ import annotations

from overnight import config
from overnight.config import Run
from overnight.corpus.files import write_whole
from overnight.corpus.shards import Manifest
from overnight.errors import ConfigError, DataError
from overnight.train.checkpoint import Progress


def check_folder(run: Run) -> None:
    """See that the run folder is new or holds this run.

    Raises:
        ConfigError: when it belongs to another recipe, naming the fields that differ.
    """
    import yaml

    path = run.run_dir / "run.yaml"
    if path.exists():
        theirs = config.build(yaml.safe_load(path.read_text(encoding="utf-8")))
        different = list(config.differences(config.identity(theirs), config.identity(run)))
        if different:
            listed = "\n  ".join(different)
            raise ConfigError(f"{run.run_dir} holds another run:\n  {listed}\nGive this one its own folder (--out=...) or delete that one")


def claim_folder(run: Run) -> None:
    """Make the run folder, unless it holds another run, and write `run.yaml` with the settings as they are now."""
    check_folder(run)
    write_whole(run.run_dir / "run.yaml", [config.save(run).encode()])


def same_corpus(progress: Progress, manifest: Manifest, run: Run) -> None:
    """See that a checkpoint was trained on the data that lies in the run's data folder now.

    Raises:
        DataError: when the data was prepared anew since.
    """
    if progress.corpus not in ("", manifest.fingerprint()):
        raise DataError(
            f"{run.data_dir} was prepared anew since the checkpoints in {run.run_dir} were written: this run cannot go on with other data; "
            "give it a new folder (--out=...)"
        )
