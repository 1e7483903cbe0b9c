"""Hugging Face BERT folders, in and out: `config.json`, `model.safetensors` and the tokenizer's files.

Exporting needs safetensors only; transformers is not imported. Shapes: D width, V vocabulary (padded to a multiple of 64 on our side).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from overnight.config import BertConfig
from overnight.errors import DataError, UserError
from overnight.run_dir.atomic import write_json, write_whole
from overnight.state_files import parse_json

Kind = Literal["pretraining", "classification", "spans"]

_ARCHITECTURE = {
    "pretraining": "BertForPreTraining",
    "classification": "BertForSequenceClassification",
    "spans": "BertForQuestionAnswering",
}
_FILES = ("config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
_SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_EMBEDDINGS = {
    "encoder.word.weight": "bert.embeddings.word_embeddings.weight",
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
# transformers ties these to the word embedding and to cls.predictions.bias, and leaves them out of its own files.
_TIED = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.bias": "cls.predictions.bias"}


def _modules(layers: int) -> dict[str, str]:
    """Every module with a weight and a bias except the fused projections and the task's head: our name -> theirs."""
    names = {"encoder.norm": "bert.embeddings.LayerNorm", **_HEADS}
    for i in range(layers):
        names |= {f"encoder.layers.{i}.{ours}": f"bert.encoder.layer.{i}.{theirs}" for ours, theirs in _LAYER.items()}
    return names


def _layers(names: Sequence[str] | Mapping[str, Any], prefix: str) -> int:
    """Number of layers named `{prefix}{i}.`; they count from 0 without a gap, or the look-ups that follow fail by name."""
    return len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)})


def to_huggingface(state: Mapping[str, Tensor], kind: Kind, vocab_size: int) -> dict[str, Tensor]:
    """Our parameters under the names and shapes of transformers' `BertFor...`, as fp32 on the CPU.

    Args:
        state: the `state_dict` of the model of that kind.
        kind: what the model is.
        vocab_size: tokens of the vocabulary; the padded rows are dropped.

    Returns:
        The whole state of `BertForPreTraining`, `BertForSequenceClassification` or `BertForQuestionAnswering`, tied tensors included.
        The next-sentence head keeps its order: 0 is next, 1 is random.
    """
    left = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in state.items()}
    layers = _layers(left, "encoder.layers.")
    out = {theirs: left.pop(ours) for ours, theirs in _EMBEDDINGS.items()}
    for i in range(layers):
        for part in ("weight", "bias"):
            thirds = left.pop(f"encoder.layers.{i}.qkv.{part}").chunk(3)
            out |= {f"bert.encoder.layer.{i}.{name}.{part}": third.clone() for name, third in zip(_QKV, thirds, strict=True)}
    for ours, theirs in _modules(layers).items():
        if f"{ours}.weight" in left:
            out |= {f"{theirs}.{part}": left.pop(f"{ours}.{part}") for part in ("weight", "bias")}
    word = "bert.embeddings.word_embeddings.weight"
    out[word] = out[word][:vocab_size].clone()
    if kind == "pretraining":
        out["cls.predictions.bias"] = left.pop("mlm.bias")[:vocab_size].clone()
        out |= {tied: out[source] for tied, source in _TIED.items()}
    else:
        head = "classifier" if kind == "classification" else "qa_outputs"
        out |= {f"{head}.{part}": left.pop(f"head.{part}") for part in ("weight", "bias")}
    assert not left, f"not a state of kind {kind}: {', '.join(left)}"
    return {name: tensor.contiguous() for name, tensor in out.items()}


def from_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`to_huggingface`, for any `Bert...` of transformers: what is not in the tensors is not in the result.

    Names of older files (`gamma`, `beta`, no `bert.` in front) are understood. The vocabulary is padded to a multiple of 64 with zeros.

    Args:
        tensors: by the names of transformers.

    Returns:
        Our parameters, fp32: the encoder always; `pooler`, `mlm`, `nsp` and `head` where given.

    Raises:
        DataError: a tensor that is missing, is not known, or is not tied as it must be.
    """
    left: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if new.startswith(("embeddings.", "encoder.", "pooler.")):
            new = f"bert.{new}"
        left[new] = tensor.to(torch.float32)
    left.pop("bert.embeddings.position_ids", None)  # a buffer that counts 0, 1, 2, ...
    for tied, source in _TIED.items():
        if tied in left and source in left and not torch.equal(left.pop(tied), left[source]):
            raise DataError(f"{tied}: differs from {source}; only checkpoints whose decoder is tied to the embedding can be read")
    layers = _layers(left, "bert.encoder.layer.")
    state = {ours: _take(left, theirs) for ours, theirs in _EMBEDDINGS.items()}
    for i in range(layers):
        for part in ("weight", "bias"):
            state[f"encoder.layers.{i}.qkv.{part}"] = torch.cat([_take(left, f"bert.encoder.layer.{i}.{name}.{part}") for name in _QKV])
    for ours, theirs in _modules(layers).items():
        if ours.startswith("encoder.") or f"{theirs}.weight" in left:
            state |= {f"{ours}.{part}": _take(left, f"{theirs}.{part}") for part in ("weight", "bias")}
    for head in ("classifier", "qa_outputs"):
        if f"{head}.weight" in left:
            state |= {f"head.{part}": _take(left, f"{head}.{part}") for part in ("weight", "bias")}
    rows = len(state["encoder.word.weight"])
    padding = -rows % 64
    state["encoder.word.weight"] = torch.nn.functional.pad(state["encoder.word.weight"], (0, 0, 0, padding))
    if "mlm.dense.weight" in state:
        state["mlm.bias"] = torch.nn.functional.pad(_take(left, "cls.predictions.bias"), (0, padding))
    if left:
        raise DataError(
            f"{len(left)} tensors are not of a BERT encoder, such as {', '.join(sorted(left)[:3])}; this is another architecture"
        )
    return state


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    if name not in left:
        raise DataError(f"tensor {name} is missing; the checkpoint is not a whole BERT")
    return left.pop(name)


def export(
    state: Mapping[str, Tensor], kind: Kind, model: BertConfig, tokenizer_folder: Path, out: Path, labels: Sequence[str] = ()
) -> None:
    """Write a model and its tokenizer as a folder that `transformers.AutoModelFor...` and `AutoTokenizer.from_pretrained` load.

    The folder appears whole, by rename; an earlier export of that name is replaced.

    Args:
        state: the `state_dict` of the model of that kind.
        kind: what the model is.
        model: its sizes.
        tokenizer_folder: holds the `tokenizer.json` of a WordPiece vocabulary.
        out: the folder to write.
        labels: the classes in the order of the classifier's outputs; none for regression.

    Raises:
        DataError: the tokenizer is missing or is not WordPiece.
        UserError: the folder holds something else, or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save

    tokenizer = _read_json(tokenizer_folder / "tokenizer.json")
    pieces = _pieces(tokenizer, tokenizer_folder / "tokenizer.json")
    if out.exists():
        strange = [f.name for f in out.iterdir() if f.name not in _FILES] if out.is_dir() else [out.name]
        if strange:
            raise UserError(f"{out}: exists and holds {strange[0]!r}, which no export wrote; name another folder")
    tensors = to_huggingface(state, kind, len(pieces))
    assert not labels or len(labels) == len(state["head.bias"]), (labels, state["head.bias"].shape)
    beside, old = (out.with_name(f".{out.name}.{word}") for word in ("partial", "old"))
    try:
        shutil.rmtree(beside, ignore_errors=True)  # what a killed export left
        beside.mkdir(parents=True)
        write_json(beside / "config.json", _config(kind, model, pieces, labels, len(state["head.bias"]) if "head.bias" in state else 0))
        # Not save_file: what it writes nobody else may read.
        weights = save({n: t for n, t in tensors.items() if n not in _TIED}, metadata={"format": "pt"})
        write_whole(beside / "model.safetensors", [weights])
        write_whole(beside / "vocab.txt", ["".join(f"{piece}\n" for piece in pieces).encode()])
        write_json(beside / "tokenizer.json", _with_template(tokenizer, pieces))
        write_json(beside / "tokenizer_config.json", _tokenizer_config(tokenizer, model))
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            os.rename(out, old)
        os.rename(beside, out)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"{out}: cannot be written: {error}") from None


def _config(kind: Kind, model: BertConfig, pieces: list[str], labels: Sequence[str], outputs: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[kind]],
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
    if kind == "classification":
        names = list(labels) or [f"LABEL_{i}" for i in range(outputs)]
        config |= {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": "regression" if outputs == 1 else "single_label_classification",
        }
    return config


def _pieces(tokenizer: dict[str, Any], path: Path) -> list[str]:
    """The vocabulary in the order of its ids."""
    model = tokenizer.get("model", {})
    if model.get("type") != "WordPiece":
        raise DataError(f"{path}: is a {model.get('type')} tokenizer; only WordPiece can be exported as BERT's")
    by_id = {i: piece for piece, i in model["vocab"].items()}
    if sorted(by_id) != list(range(len(model["vocab"]))):
        raise DataError(f"{path}: the ids of its vocabulary are not 0 to {len(model['vocab']) - 1}, each once")
    missing = [token for token in _SPECIAL.values() if token not in model["vocab"]]
    if missing:
        raise DataError(f"{path}: lacks the special token {missing[0]}")
    return [by_id[i] for i in range(len(by_id))]


def _with_template(tokenizer: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """The tokenizer, always with [CLS] A [SEP] B [SEP] around its texts and without the truncation and padding of one use."""

    def special(name: str, segment: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": segment}}

    def text(name: str, segment: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": segment}}

    single = [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special("[SEP]", 1)],
        "special_tokens": {t: {"id": t, "ids": [pieces.index(t)], "tokens": [t]} for t in ("[CLS]", "[SEP]")},
    }
    return {**tokenizer, "post_processor": template, "truncation": None, "padding": None}


def _tokenizer_config(tokenizer: dict[str, Any], model: BertConfig) -> dict[str, Any]:
    """BERT's own class where it does exactly this; it rebuilds the tokenizer from the vocabulary. Else the class that takes the file as it is."""
    normalizer = tokenizer.get("normalizer") or {}
    wordpiece = tokenizer["model"]
    plain = (
        normalizer.get("type") == "BertNormalizer"
        and normalizer.get("clean_text")
        and (tokenizer.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and wordpiece.get("continuing_subword_prefix") == "##"
        and wordpiece.get("max_input_chars_per_word") == 100
        and wordpiece.get("unk_token") == "[UNK]"
    )
    config: dict[str, Any] = {**_SPECIAL, "model_max_length": model.max_position_embeddings}
    if not plain:
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **config,
        }
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        **config,
    }


def load_pretrained(folder: Path) -> tuple[dict[str, Tensor], BertConfig, int]:
    """Read a Hugging Face BERT folder.

    Args:
        folder: holds `config.json` and `model.safetensors`.

    Returns:
        The parameters as :func:`from_huggingface` gives them, the sizes, and the number of tokens of the vocabulary.

    Raises:
        DataError: a file that is missing or damaged, a pickled checkpoint, an architecture other than BERT's, or shapes that differ from the config.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = _read_json(folder / "config.json")
    model = _model(config, folder / "config.json")
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise DataError(f"{folder}: has no model.safetensors{_instead(folder)}")
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{weights}: cannot be read: {error}; the file is damaged or cut short") from None
    try:
        state = from_huggingface(tensors)
    except DataError as error:
        raise DataError(f"{weights}: {error}") from None
    vocab_size = config["vocab_size"]
    inner = model.intermediate_size or 4 * model.hidden_size
    expected = {
        "encoder.word.weight": (-(-vocab_size // 64) * 64, model.hidden_size),
        "encoder.position.weight": (model.max_position_embeddings, model.hidden_size),
        "encoder.segment.weight": (2, model.hidden_size),
        f"encoder.layers.{model.num_layers - 1}.up.weight": (inner, model.hidden_size),
    }
    layers = _layers(state, "encoder.layers.")
    wrong = next((n for n, shape in expected.items() if n not in state or tuple(state[n].shape) != shape), None)
    if wrong or layers != model.num_layers:
        found = (
            f"{wrong} {tuple(state[wrong].shape)} where {expected[wrong]} belongs"
            if wrong in state
            else f"{layers} layers where {model.num_layers} belong"
        )
        raise DataError(f"{weights}: does not fit {folder / 'config.json'}: {found}")
    return state, model, vocab_size


def _model(config: dict[str, Any], path: Path) -> BertConfig:
    fixed = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    }
    for key, value in fixed.items():
        # Absent keys have these values by default in transformers, except the model's type.
        if config.get(key, None if key == "model_type" else value) != value:
            raise DataError(f"{path}: {key} = {config.get(key)!r}; only {value!r} can be read")
    sizes: dict[str, int] = {}
    for key in ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"):
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise DataError(f"{path}: {key} = {value!r}: must be a whole number of 1 or more")
        sizes[key] = value
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    if width % sizes["num_attention_heads"]:
        raise DataError(f"{path}: num_attention_heads = {sizes['num_attention_heads']}: must divide hidden_size = {width}")
    return BertConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=width,
        num_heads=sizes["num_attention_heads"],
        intermediate_size=0 if inner == 4 * width else inner,
        max_position_embeddings=sizes["max_position_embeddings"],
        dropout=float(config.get("hidden_dropout_prob", 0.1)),
        attention_dropout=float(config.get("attention_probs_dropout_prob", 0.1)),
    )


def _instead(folder: Path) -> str:
    """What to do, by what the folder holds in place of the file."""
    if (folder / "model.safetensors.index.json").is_file():
        return "; it is split into several files: load it with transformers and call save_pretrained(folder, max_shard_size='100GB')"
    if (folder / "pytorch_model.bin").is_file():
        return " but pytorch_model.bin, a pickle, which can run code when it is read: convert it where you trust it (transformers: from_pretrained, then save_pretrained)"
    return "; name a folder that transformers' save_pretrained wrote"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes().decode())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: is a JSON {type(value).__name__}, not an object")
    return value
