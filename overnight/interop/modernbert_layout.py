"""ModernBERT as transformers has it: names of the tensors, and `config.json`.

Shapes: D width, V vocabulary (padded to a multiple of 64 on our side). The projections of attention are one matrix there too, and the first half
of `Wi` is what goes through the activation, as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from overnight.config import ModernBertConfig
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
from overnight.models.modernbert import EPS, inner_size, is_local

MODEL_INPUTS: tuple[str, ...] = ("input_ids", "attention_mask")
# What transformers puts before the names of the encoder, where a head stands beside it.
_PREFIX = "model."
_WORD = f"{_PREFIX}embeddings.tok_embeddings.weight"
_ENCODER = {
    "encoder.word": f"{_PREFIX}embeddings.tok_embeddings",
    "encoder.norm": f"{_PREFIX}embeddings.norm",
    "encoder.final_norm": f"{_PREFIX}final_norm",
}
_LAYER = {
    "norm1": "attn_norm",
    "qkv": "attn.Wqkv",
    "out": "attn.Wo",
    "norm2": "mlp_norm",
    "up": "mlp.Wi",
    "down": "mlp.Wo",
}
TIED: Mapping[str, str] = {"decoder.weight": _WORD}
# What transformers takes where `config.json` does not say it.
_THETA = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
_OLD_THETA = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_EVERY = 3
# What stands for the window of a network that has no local layers: theirs has to be a number.
_NO_WINDOW = 128


def _matrices(layers: int) -> dict[str, str]:
    """Every tensor of the encoder, all of which are weights: our module -> theirs. The first layer has no norm before attention."""
    names = dict(_ENCODER)
    for i in range(layers):
        names |= {f"encoder.layers.{i}.{ours}": f"{_PREFIX}layers.{i}.{theirs}" for ours, theirs in _LAYER.items() if i or ours != "norm1"}
    return names


def export_tensors(state: Mapping[str, Tensor], kind: Kind, vocab_size: int) -> dict[str, Tensor]:
    """Return the whole state of the `ModernBertFor...` of a kind, the tied decoder included; what is pretrained is a masked language model."""
    pretrained = not HEADS[kind].classifier
    left = {name: tensor for name, tensor in as_fp32(state).items() if not pretrained or not name.startswith(("pooler.", "nsp.", "match."))}
    out = {f"{theirs}.weight": left.pop(f"{ours}.weight") for ours, theirs in _matrices(layers_of(left, "encoder.layers.")).items()}
    out[_WORD] = out[_WORD][:vocab_size].clone()
    head = "mlm" if pretrained else "pooler"
    out |= {f"head.{part}.weight": left.pop(f"{head}.{part}.weight") for part in ("dense", "norm")}
    if pretrained:
        out["decoder.bias"] = left.pop("mlm.bias")[:vocab_size].clone()
        out |= {tied: out[source] for tied, source in TIED.items()}
    else:
        out |= {f"classifier.{part}": left.pop(f"head.{part}") for part in ("weight", "bias")}
    assert not left, f"not a state of kind {kind}: {', '.join(left)}"
    return out


def import_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of any `ModernBert...` by our names.

    Raises:
        DataError: a tensor that is missing, is not known, or is not tied as it must be.
    """
    bare = _WORD.removeprefix(_PREFIX) in tensors  # a ModernBertModel, without a head
    left = {f"{_PREFIX}{name}" if bare else name: tensor for name, tensor in as_fp32(tensors).items()}
    drop_tied(left, TIED)
    layers = layers_of(left, f"{_PREFIX}layers.")
    state = {f"{ours}.weight": take(left, f"{theirs}.weight") for ours, theirs in _matrices(layers).items()}
    if "head.dense.weight" in left:
        head = "pooler" if "classifier.weight" in left else "mlm"
        state |= {f"{head}.{part}.weight": take(left, f"head.{part}.weight") for part in ("dense", "norm")}
        if head == "pooler":
            state |= {f"head.{part}": take(left, f"classifier.{part}") for part in ("weight", "bias")}
        else:
            state["mlm.bias"] = take(left, "decoder.bias")
    assert_none_left(left, "ModernBERT")
    return state


def export_config(kind: Kind, model: ModernBertConfig, pieces: list[str]) -> dict[str, Any]:
    """Return `config.json`, without the classes.

    Which layers are local and the bases of the rotary positions stand there twice: as transformers 5 reads them, and as 4 did.
    """
    pad, cls, sep = (pieces.index(token) for token in ("[PAD]", "[CLS]", "[SEP]"))
    local = [is_local(model, number) for number in range(model.num_layers)]
    theta = {"full_attention": model.rope_theta, "sliding_attention": model.local_rope_theta}
    return {
        "architectures": [f"ModernBert{HEADS['masked_lm' if kind == 'pretraining' else kind].suffix}"],
        "model_type": "modernbert",
        "vocab_size": len(pieces),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": inner_size(model),
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "classifier_pooling": model.pooling,
        "max_position_embeddings": model.max_position_embeddings,
        "norm_eps": EPS,
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False),
        "decoder_bias": True,
        # Of attention they drop the probabilities too.
        **dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"), model.dropout),
        "layer_types": ["sliding_attention" if near else "full_attention" for near in local],
        "global_attn_every_n_layers": model.global_attention_every if model.local_attention else 1,
        "local_attention": model.local_attention or _NO_WINDOW,
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": base} for name, base in theta.items()},
        **{_OLD_THETA[name]: base for name, base in theta.items()},
        "initializer_range": 0.02,
        # Its own stand near 50,283, beyond a small vocabulary.
        "pad_token_id": pad,
        "cls_token_id": cls,
        "bos_token_id": cls,
        "sep_token_id": sep,
        "eos_token_id": sep,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def import_config(config: Mapping[str, Any], path: Path) -> ModernBertConfig:
    """Return the settings of a `config.json`.

    Raises:
        DataError: it describes what we do not have, such as biases.
    """
    fixed = {
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "norm_eps": EPS,
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False),
        "decoder_bias": True,
        "tie_word_embeddings": True,
    }
    check_fixed(config, fixed, path)
    sizes = read_sizes(config, path)
    del sizes["vocab_size"]
    if sizes["hidden_size"] // sizes["num_heads"] % 2:
        raise DataError(f"{path}: num_attention_heads = {sizes['num_heads']}: leaves heads of odd size; rotary positions turn pairs")
    if sizes["intermediate_size"] == inner_size(ModernBertConfig(hidden_size=sizes["hidden_size"])):
        sizes["intermediate_size"] = 0
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("mean", "cls"):
        raise DataError(f"{path}: classifier_pooling = {pooling!r}; only 'mean' and 'cls' can be read")
    dropout = read_share(config, "mlp_dropout", 0.0, path)
    for key in ("embedding_dropout", "attention_dropout", "classifier_dropout"):
        if read_share(config, key, 0.0, path) != dropout:
            raise DataError(
                f"{path}: {key} = {config.get(key, 0.0)!r}; only the value of mlp_dropout, {dropout!r}, can be read: here they are one setting"
            )
    window, every = _read_window(config, sizes["num_layers"], path)
    return ModernBertConfig(
        **sizes,
        dropout=dropout,
        local_attention=window,
        global_attention_every=every,
        rope_theta=_read_theta(config, "full_attention", path),
        local_rope_theta=_read_theta(config, "sliding_attention", path),
        pooling=pooling,
    )


def _read_window(config: Mapping[str, Any], layers: int, path: Path) -> tuple[int, int]:
    """Return the window of the local layers (0: there are none), and of how many layers the first is global."""
    window, given = config.get("local_attention", 128), config.get("global_attn_every_n_layers", _EVERY)
    for key, value in {"local_attention": window, "global_attn_every_n_layers": given}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"{path}: {key} = {value!r}: must be a whole number of 1 or more")

    def types(every: int) -> list[str]:
        return ["sliding_attention" if i % every else "full_attention" for i in range(layers)]

    found = config.get("layer_types") or types(given)
    every = next((every for every in (given, *range(1, layers + 1)) if types(every) == found), None)
    if every is None:
        raise DataError(
            f"{path}: layer_types = {found!r}; only a full_attention after every so many layers, from the first on, can be read"
        )
    if "sliding_attention" not in found:
        return 0, _EVERY
    if window % 2:
        raise DataError(f"{path}: local_attention = {window}: must be even, half of it on either side")
    return window, every


def _read_theta(config: Mapping[str, Any], name: str, path: Path) -> float:
    """Return the base of the rotary positions of one type of layer, in the form of transformers 5, or else of 4."""
    if config.get("rope_scaling"):
        raise DataError(f"{path}: rope_scaling = {config['rope_scaling']!r}; only rotary positions that are not scaled can be read")
    every = config.get("rope_parameters") or {}
    stated = (every.get(name) or {"rope_type": "default"}) if isinstance(every, dict) and set(every) <= set(_THETA) else None
    if not isinstance(stated, dict) or set(stated) - {"rope_theta"} != {"rope_type"} or stated["rope_type"] != "default":
        raise DataError(
            f"{path}: rope_parameters = {every!r}; only the rope_type 'default' with a rope_theta for each type of layer can be read"
        )
    theta = stated.get("rope_theta", config.get(_OLD_THETA[name], _THETA[name]))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise DataError(f"{path}: {_OLD_THETA[name]} (rope_theta of {name}) = {theta!r}: must be a number above 0")
    return float(theta)
