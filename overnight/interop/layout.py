"""What the Hugging Face layouts of all encoders share: what a model is, and how their tensors and `config.json` are taken apart and refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from overnight.errors import DataError
from overnight.models.bert import padded_vocabulary
from overnight.state_files import parse_json

Kind = Literal["pretraining", "masked_lm", "classification", "regression", "multi_label", "token_classification", "spans"]
"""Of a model: with its pretraining heads, with the masked-LM head alone, with a class, a number or several labels for a text, with a class for each
token, or with start and end of an answer."""


@dataclass(frozen=True)
class Head:
    """What transformers calls a kind of model."""

    suffix: str
    """Of the class, behind `Bert` or `ModernBert`."""
    pipeline: str
    """Its pipeline, which is also the tag of a model card."""
    classifier: str = ""
    """Name of the last layer; empty where it is none of a task's."""
    problem: str = ""
    """`problem_type` of a sequence classification."""


HEADS: dict[Kind, Head] = {
    "pretraining": Head("ForPreTraining", "fill-mask"),
    "masked_lm": Head("ForMaskedLM", "fill-mask"),
    "classification": Head("ForSequenceClassification", "text-classification", "classifier", "single_label_classification"),
    "regression": Head("ForSequenceClassification", "text-classification", "classifier", "regression"),
    "multi_label": Head("ForSequenceClassification", "text-classification", "classifier", "multi_label_classification"),
    "token_classification": Head("ForTokenClassification", "token-classification", "classifier"),
    "spans": Head("ForQuestionAnswering", "question-answering", "qa_outputs"),
}
"""Every kind of model that is exported; a new head is one more row."""


class Layout(Protocol):
    """What a module says of one architecture."""

    MODEL_INPUTS: tuple[str, ...]
    """What its tokenizer gives."""
    TIED: Mapping[str, str]
    """Tensors that are the same as another one, which transformers leaves out of its files."""

    def export_tensors(self, state: Mapping[str, Tensor], kind: Kind, vocab_size: int) -> dict[str, Tensor]:
        """Return our parameters by the names of transformers, fp32 on the CPU."""
        ...

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of transformers by our names, fp32, a row for each token of their vocabulary."""
        ...

    def export_config(self, kind: Kind, model: Any, pieces: list[str]) -> dict[str, Any]:
        """Return `config.json`, without the classes."""
        ...

    def import_config(self, config: Mapping[str, Any], path: Path) -> Any:
        """Return the settings that a `config.json` describes."""
        ...


def as_fp32(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as fp32 on the CPU, without gradients."""
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in state.items()}


def read_mapping_of_others(path: Path) -> dict[str, Any]:
    """Read a JSON object of others, which may have larger numbers than ours: `model_max_length` is often 10^30.

    Raises:
        DataError: it cannot be read, or is none.
    """
    try:
        value = parse_json(path.read_bytes().decode())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: is a JSON {type(value).__name__}, not an object")
    return value


def layers_of(names: Iterable[str], prefix: str) -> int:
    """Return the number of layers named `{prefix}{i}.`; they count from 0 without a gap, or the look-ups that follow fail by name."""
    return len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


def take(left: dict[str, Tensor], name: str) -> Tensor:
    """Return a tensor, and remove it from those that are left.

    Raises:
        DataError: it is missing.
    """
    if name not in left:
        raise DataError(f"tensor {name} is missing; the checkpoint is not a whole encoder")
    return left.pop(name)


def drop_tied(left: dict[str, Tensor], tied: Mapping[str, str]) -> None:
    """Remove the tensors that are the same as another one.

    Raises:
        DataError: one differs.
    """
    for name, source in tied.items():
        if name in left and source in left and not torch.equal(left.pop(name), left[source]):
            raise DataError(f"{name}: differs from {source}; only checkpoints whose decoder is tied to the embedding can be read")


def with_padded_vocabulary(state: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return parameters by our names with zeros for the padding of the vocabulary.

    Raises:
        DataError: there are not as many rows as tokens.
    """
    padded = dict(state)
    for name in ("encoder.word.weight", "mlm.bias"):
        if name in state:
            tensor = state[name]
            if len(tensor) != vocab_size:
                raise DataError(f"{name} has {len(tensor):,} rows where the vocabulary has {vocab_size:,} tokens")
            padded[name] = torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, padded_vocabulary(vocab_size) - vocab_size))
    return padded


def assert_none_left(left: Mapping[str, Tensor], architecture: str) -> None:
    """Check that every tensor has been taken.

    Raises:
        DataError: one is not known.
    """
    if left:
        raise DataError(
            f"{len(left)} tensors are not of a {architecture} encoder, such as {', '.join(sorted(left)[:3])}; this is another architecture"
        )


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any], path: Path) -> None:
    """Check that keys of a `config.json` have the only values that can be read; those are also what transformers takes where one is absent.

    Raises:
        DataError: one has another.
    """
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise DataError(f"{path}: {key} = {config.get(key)!r}; only {value!r} can be read")


def read_sizes(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the sizes of an encoder from its `config.json`, by our names, and `vocab_size`.

    Raises:
        DataError: one is missing or is no size.
    """
    sizes: dict[str, Any] = {}
    for key, ours in {
        "vocab_size": "vocab_size",
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
    }.items():
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"{path}: {key} = {value!r}: must be a whole number of 1 or more")
        sizes[ours] = value
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise DataError(f"{path}: num_attention_heads = {sizes['num_heads']}: must divide hidden_size = {sizes['hidden_size']}")
    return sizes


def read_share(config: Mapping[str, Any], key: str, default: float, path: Path) -> float:
    """Return a probability of dropout from a `config.json`.

    Raises:
        DataError: it is none.
    """
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise DataError(f"{path}: {key} = {value!r}: must be a number from 0 to below 1")
    return float(value)
