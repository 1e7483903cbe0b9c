"""What a fine-tuned task's folder says of its model (`task.json`), and the weights beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from overnight.checkpoint.reader import CorruptCheckpoint, read_tensors
from overnight.errors import DataError
from overnight.run_dir.atomic import write_json
from overnight.state_files import file_digest, fitted, read_mapping, sealed


@dataclass(frozen=True)
class _Spec:
    task: str
    seq_len: int
    doc_stride: int
    max_answer_length: int
    columns: dict[str, str | None] | None = None


@dataclass(frozen=True)
class _Facts:
    """What must be in `task.json`; there may be more."""

    kind: Literal["classification", "multi_label", "regression", "token_classification", "spans"]
    labels: list[str]
    vocab_size: int
    spec: _Spec
    result: dict[str, Any]
    pairs: bool
    tokenizer: str
    """Hash of the vocabulary beside it."""
    weights: str
    """XXH3-64 of `model.safetensors`."""
    columns: list[str] | None = None
    """Those that the texts of one's own table were read from; folders of before do not say."""


def folders_of_tasks(run_dir: Path) -> list[Path]:
    """Return the folders of the fine-tuned tasks of a run, by name, without what a kill left of one (`.TASK.tmp`)."""
    return sorted(path.parent for path in run_dir.glob("finetune/[!.]*/task.json"))


def _remedy(folder: Path) -> str:
    return f"delete {folder} and run `overnight finetune {folder.name} --from {folder.parent.parent}` again"


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write `task.json` with the checksum of the weights, which lie in the folder already, and one of its own."""
    write_json(folder / "task.json", sealed({**facts, "weights": file_digest(folder / "model.safetensors")}))


def read_facts(folder: Path) -> dict[str, Any]:
    """Read `task.json`.

    Raises:
        DataError: when it is missing, damaged, changed since it was written, or lacks what a model needs.
    """
    path, again = folder / "task.json", _remedy(folder)
    tree = read_mapping(path, again)
    fitted(tree, _Facts, str(path), again)
    return tree


def read_weights(folder: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a task's model.

    Args:
        folder: the task's.
        facts: of :func:`read_facts`.

    Raises:
        DataError: when the file is missing, damaged, or not the one that was written with `task.json`.
    """
    try:
        return read_tensors(folder / "model.safetensors", facts["weights"])
    except CorruptCheckpoint as error:
        raise DataError(f"{error}; {_remedy(folder)}") from None
