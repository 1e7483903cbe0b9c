"""`RUN/init/`: the weights and the vocabulary that a run begins from, copied once from where its `init` says.

`model.safetensors` has them by our names, `vocab.txt` and `tokenizer.json` are the vocabulary, and `init.json` says the rest.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from overnight.checkpoint.reader import CorruptCheckpoint, read_tensors
from overnight.config import BertRun, EncoderConfig
from overnight.corpus.tokenizer import Vocabulary, build_tokenizer, load_tokens, save_tokenizer, vocabulary
from overnight.corpus.vocabulary import INIT
from overnight.errors import DataError, UserError
from overnight.run_dir.atomic import write_json, write_whole
from overnight.state_files import STRICT, file_digest, read_json, sealed

_VOCABULARY = ("encoder.word.weight", "mlm.bias")
"""Tensors with a row for each token."""


@dataclass(frozen=True)
class Initial:
    """A pretrained encoder with its vocabulary, wherever it is from."""

    source: str
    """What it was called when it was read."""
    model: EncoderConfig
    tokens: list[str]
    """The vocabulary, id by id."""
    lowercase: bool
    state: dict[str, Tensor]
    """By our names: the encoder always; `pooler`, `mlm`, `nsp` and `match` where it has them."""
    headed: bool = False
    """Whether it also has the head of a task, which is left out."""

    def lacks(self) -> list[str]:
        """Return the heads that it does not have."""
        wanted = ["mlm"] if self.model.kind == "modernbert" else ["pooler", "mlm", "nsp"]
        return [head for head in wanted if not any(name.startswith(f"{head}.") for name in self.state)]


@dataclass(frozen=True)
class InitialFacts:
    """`init.json`."""

    __pydantic_config__ = STRICT
    version: int
    source: str
    model: dict[str, Any]
    """The settings of the network, as a recipe has them."""
    vocab_size: int
    lowercase: bool
    weights: str
    """XXH3-64 of `model.safetensors`."""
    files: str = ""
    """Checksum of the files that it was copied from; empty for a name of the hub, and in folders of an earlier version."""


def initial_folder(run_dir: Path) -> Path:
    """Return where a run keeps what it begins from."""
    return run_dir / INIT


def _remedy(folder: Path) -> str:
    return f"delete {folder}, unless the run has begun, and it is copied again"


def write_initial(folder: Path, initial: Initial, files: str) -> None:
    """Write what a run begins from; the folder appears whole, also where several processes write it at once.

    Args:
        folder: of :func:`initial_folder`.
        initial: what it begins from.
        files: checksum of the files that it was read from.

    Raises:
        UserError: it cannot be written.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write_whole(beside / "model.safetensors", [save({name: tensor.contiguous() for name, tensor in initial.state.items()})])
        save_tokenizer(beside, initial.tokens, initial.lowercase)
        facts = InitialFacts(
            1,
            initial.source,
            dataclasses.asdict(initial.model),
            len(initial.tokens),
            initial.lowercase,
            file_digest(beside / "model.safetensors"),
            files,
        )
        write_json(beside / "init.json", sealed(dataclasses.asdict(facts)))
        there = read_initial_facts(folder)
        if there == facts:
            return  # another process of this run was first, and may be reading it
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except OSError as error:
        if not (folder / "init.json").is_file():  # of another process
            raise UserError(f"{folder}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_initial_facts(folder: Path) -> InitialFacts | None:
    """Return what `init.json` says, or None where there is none.

    Raises:
        DataError: when it is damaged.
    """
    path = folder / "init.json"
    found: InitialFacts | None = read_json(path, InitialFacts, _remedy(folder)) if path.exists() else None
    return found


def begin_from(model: nn.Module, run: BertRun, prepared: Vocabulary) -> None:
    """Fill an untrained network with what its run begins from; heads that it lacks stay as they are.

    The prepared vocabulary may have more tokens behind those of the checkpoint (`data.new_words`): their vectors, and their biases in the decoder,
    are the means of those of the pieces that they were split into.

    Args:
        model: the network of the run.
        run: with an `init`.
        prepared: the vocabulary of the prepared data.

    Raises:
        DataError: the copy is missing or damaged, the data was prepared with another vocabulary, or a tensor does not fit.
    """
    folder = initial_folder(run.run_dir)
    facts = read_initial_facts(folder)
    if facts is None:
        raise DataError(f"{folder}: is missing; `overnight prepare`, `pretrain` and `run` make it from init = {run.init!r}")
    try:
        state = read_tensors(folder / "model.safetensors", facts.weights)
    except (FileNotFoundError, CorruptCheckpoint) as error:
        raise DataError(f"{error}; {_remedy(folder)}") from None
    tokens, lowercase = load_tokens(folder)
    ours, _ = load_tokens(run.data_dir)
    if vocabulary(ours, prepared.lowercase).hash != prepared.hash or ours[: len(tokens)] != tokens or lowercase != prepared.lowercase:
        raise DataError(
            f"{run.data_dir}: was prepared with another vocabulary ({_described(ours, prepared.lowercase)}) than that of {run.init} "
            f"({_described(tokens, lowercase)}); prepare the text anew with this recipe, in another folder (--data.dir=FOLDER)"
        )
    old_ids = _old_ids(tokens, lowercase, ours[len(tokens) :])
    own = model.state_dict()
    for name in _VOCABULARY:
        if name in state:
            state[name] = with_new_rows(state[name], len(tokens), old_ids, len(own[name]))
    wrong = next((name for name in state if name in own and state[name].shape != own[name].shape), None)
    if wrong or not any(name in own for name in state):
        there = f"{wrong} {tuple(state[wrong].shape)} there, {tuple(own[wrong].shape)} here" if wrong else "no tensor is the same"
        raise DataError(f"{run.init} is another network than the recipe's: {there}")
    model.load_state_dict({**own, **{name: tensor for name, tensor in state.items() if name in own}})


def _described(tokens: list[str], lowercase: bool) -> str:
    return f"{len(tokens):,} tokens, {'lower case' if lowercase else 'with capitals'}"


def _old_ids(tokens: list[str], lowercase: bool, new: list[str]) -> list[list[int]]:
    """Return the ids of the pieces into which the old vocabulary splits each new word."""
    if not new:
        return []
    tokenizer = build_tokenizer(tokens, lowercase)
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(new, add_special_tokens=False)]


def with_new_rows(table: Tensor, rows: int, old_ids: list[list[int]], padded: int) -> Tensor:
    """Return a tensor with a row for each token, with rows for new tokens behind them: the means of those of their pieces.

    Args:
        table: one row for each token, and padding.
        rows: tokens that it has.
        old_ids: for each new token its ids among them.
        padded: rows of the result; those that belong to no token are 0.
    """
    new = [table[ids].mean(0) for ids in old_ids]
    out = table.new_zeros((padded, *table.shape[1:]))
    out[:rows] = table[:rows]
    if new:
        out[rows : rows + len(new)] = torch.stack(new)
    return out


def with_tokens(state: Mapping[str, Tensor], rows: int, padded: int) -> dict[str, Tensor]:
    """Return parameters without the rows behind those of the tokens, which a checkpoint may have for padding."""
    return {name: with_new_rows(tensor, rows, [], padded) if name in _VOCABULARY else tensor for name, tensor in state.items()}
