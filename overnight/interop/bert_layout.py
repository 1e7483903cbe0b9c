"""BERT as transformers has it: names of the tensors, and `config.json`.

Shapes: D width, V vocabulary (padded to a multiple of 64 on our side).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overnight.config import BertConfig
from overnight.errors import DataError
from overnight.interop.layout import (
    HEADS,
    Kind,
    as_fp32,
    assert_none_left,
    check_fixed,
    drop_tied,
    layers_of,
    read_share,
    read_sizes,
    take,
)

MODEL_INPUTS: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask")
_WORD = "bert.embeddings.word_embeddings.weight"
_EMBEDDINGS = {
    "encoder.word.weight": _WORD,
    "encoder.position.weight": "bert.embeddings.position_embeddings.weight",
    "encoder.segment.weight": "bert.embeddings.token_type_embeddings.weight",
}
# Modules, each with a weight and a bias.
_LAYER = {
    "out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}
_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
_HEADS = {
    "pooler": "bert.pooler.dense",
    "mlm.dense": "cls.predictions.transform.dense",
    "mlm.norm": "cls.predictions.transform.LayerNorm",
    "nsp": "cls.seq_relationship",
}
TIED: Mapping[str, str] = {"cls.predictions.decoder.weight": _WORD, "cls.predictions.decoder.bias": "cls.predictions.bias"}


def _modules(layers: int) -> dict[str, str]:
    """Every module with a weight and a bias except the fused projections and the task's head: our name -> theirs."""
    names = {"encoder.norm": "bert.embeddings.LayerNorm", **_HEADS}
    for i in range(layers):
        names |= {f"encoder.layers.{i}.{ours}": f"bert.encoder.layer.{i}.{theirs}" for ours, theirs in _LAYER.items()}
    return names


def export_tensors(state: Mapping[str, Tensor], kind: Kind, vocab_size: int) -> dict[str, Tensor]:
    """Return the whole state of the `BertFor...` of a kind, tied tensors included.

    The next-sentence head keeps its order: 0 is next, 1 is random. A masked language model has no pooler.
    """
    left = {name: tensor for name, tensor in as_fp32(state).items() if kind != "masked_lm" or not name.startswith(("pooler.", "nsp."))}
    layers = layers_of(left, "encoder.layers.")
    out = {theirs: left.pop(ours) for ours, theirs in _EMBEDDINGS.items()}
    for i in range(layers):
        for part in ("weight", "bias"):
            thirds = left.pop(f"encoder.layers.{i}.qkv.{part}").chunk(3)
            out |= {f"bert.encoder.layer.{i}.{name}.{part}": third.clone() for name, third in zip(_QKV, thirds, strict=True)}
    for ours, theirs in _modules(layers).items():
        if f"{ours}.weight" in left:
            out |= {f"{theirs}.{part}": left.pop(f"{ours}.{part}") for part in ("weight", "bias")}
    out[_WORD] = out[_WORD][:vocab_size].clone()
    if classifier := HEADS[kind].classifier:
        out |= {f"{classifier}.{part}": left.pop(f"head.{part}") for part in ("weight", "bias")}
    else:
        out["cls.predictions.bias"] = left.pop("mlm.bias")[:vocab_size].clone()
        out |= {tied: out[source] for tied, source in TIED.items()}
    assert not left, f"not a state of kind {kind}: {', '.join(left)}"
    return out


def import_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of any `Bert...` by our names; names of older files (`gamma`, `beta`, no `bert.` in front) are understood.

    Raises:
        DataError: a tensor that is missing, is not known, or is not tied as it must be.
    """
    left: dict[str, Tensor] = {}
    for name, tensor in as_fp32(tensors).items():
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = f"bert.{new}"
        left[new] = tensor
    left.pop("bert.embeddings.position_ids", None)  # a buffer that counts 0, 1, 2, ...
    drop_tied(left, TIED)
    layers = layers_of(left, "bert.encoder.layer.")
    state = {ours: take(left, theirs) for ours, theirs in _EMBEDDINGS.items()}
    for i in range(layers):
        for part in ("weight", "bias"):
            thirds = [take(left, f"bert.encoder.layer.{i}.{name}.{part}") for name in _QKV]
            if len({third.shape for third in thirds}) > 1:
                raise DataError(f"{', '.join(_QKV)} of layer {i} differ in shape: {', '.join(str(tuple(third.shape)) for third in thirds)}")
            state[f"encoder.layers.{i}.qkv.{part}"] = torch.cat(thirds)
    for ours, theirs in _modules(layers).items():
        if ours.startswith("encoder.") or f"{theirs}.weight" in left:
            state |= {f"{ours}.{part}": take(left, f"{theirs}.{part}") for part in ("weight", "bias")}
    for head in ("classifier", "qa_outputs"):
        if f"{head}.weight" in left:
            state |= {f"head.{part}": take(left, f"{head}.{part}") for part in ("weight", "bias")}
    if "mlm.dense.weight" in state:
        state["mlm.bias"] = take(left, "cls.predictions.bias")
    assert_none_left(left, "BERT")
    return state


def export_config(kind: Kind, model: BertConfig, pieces: list[str]) -> dict[str, Any]:
    """Return `config.json`, without the classes."""
    return {
        "architectures": [f"Bert{HEADS[kind].suffix}"],
        "model_type": "bert",
        "vocab_size": len(pieces),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.intermediate_size or 4 * model.hidden_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_position_embeddings,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "pad_token_id": pieces.index("[PAD]"),
        "position_embedding_type": "absolute",
        "torch_dtype": "float32",
    }


def import_config(config: Mapping[str, Any], path: Path) -> BertConfig:
    """Return the settings of a `config.json`.

    Raises:
        DataError: it describes what we do not have.
    """
    fixed = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    }
    check_fixed(config, fixed, path)
    sizes = read_sizes(config, path)
    del sizes["vocab_size"]
    if sizes["intermediate_size"] == 4 * sizes["hidden_size"]:
        sizes["intermediate_size"] = 0
    return BertConfig(
        **sizes,
        dropout=read_share(config, "hidden_dropout_prob", 0.1, path),
        attention_dropout=read_share(config, "attention_probs_dropout_prob", 0.1, path),
    )
