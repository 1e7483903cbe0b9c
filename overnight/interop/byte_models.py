"""Byte models in and out: our own folder, the arrays of OpenAI's sentiment neuron, the checkpoints of NVIDIA's sentiment-discovery.

Nothing is unpickled: .npy without objects, torch.load of tensors alone. Gates are i, f, g, o here and with NVIDIA, i, f, o, u (g last) with OpenAI.
Shapes: E embedding, H width.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from overnight import config
from overnight.checkpoint import reader
from overnight.config import ByteRun, RecurrentLMConfig, Run
from overnight.config.schema import ByteLMConfig
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.errors import ConfigError, DataError, UserError
from overnight.interop.byte_readme import byte_readme
from overnight.interop.export_marks import check_names, check_target, export_marks, marked
from overnight.models.bytes import BYTES, ByteModel, Layer, byte_model
from overnight.run_dir.atomic import write_json, write_whole
from overnight.state_files import digest, file_digest

_FILES = ("config.json", "model.safetensors", "README.md", "tasks.jsonl", "lock", "linear_probe")
# Nothing is known of how an imported model was trained; a recipe must have a phase.
_ELSEWHERE = {"elsewhere": {"steps": 1, "global_batch_size": 1}}
_MATRICES = ("w_x", "w_h", "w_mx", "w_mh")


def load_byte_model(folder: Path) -> tuple[ByteModel, ByteLMConfig]:
    """A byte model, from the newest checkpoint of its run folder or from an exported one.

    Returns:
        the model, on the CPU, and its settings.

    Raises:
        ConfigError, DataError: when there is none, it is damaged, or its tensors do not fit its settings.
    """
    run = config.stored_run(folder)
    if not isinstance(run, ByteRun):
        raise ConfigError(f"{folder}: model.kind = {run.model.kind!r}: is not a byte model (mlstm, lstm, transformer)")
    where, state = _state(folder)
    model = byte_model(run.model, label=any(name.startswith("label.") for name in state))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(f"{where} does not fit model of {folder}: {str(error).splitlines()[-1].strip()}") from None
    return model.eval(), run.model


def ready_model(run: Run) -> tuple[ByteModel, torch.dtype]:
    """Return the byte model of a run on the device of its settings, and the type of its matrix products."""
    device = set_up_machine(run)
    model, settings = load_byte_model(run.run_dir)
    return without_weight_norm(model, settings).to(device), DTYPES[run.precision]


def without_weight_norm(model: ByteModel, settings: ByteLMConfig) -> ByteModel:
    """The same function with the norms worked into the matrices, so that they are not computed again for every window."""
    if not isinstance(settings, RecurrentLMConfig) or not settings.weight_norm:
        return model
    plain = byte_model(dataclasses.replace(settings, weight_norm=False), label=model.label is not None)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in plain.state_dict()}
    for name, layer in model.named_modules():
        if isinstance(layer, Layer):
            state |= {f"{name}.{v}": torch._weight_norm(layer.get_parameter(v), g[:, None], 0).detach() for v, g in layer.g.items()}
    plain.load_state_dict(state)
    return plain.eval()


def weights_name(folder: Path) -> str:
    """What the weights of a folder are called: its newest checkpoint, or the file of an exported model."""
    newest = reader.newest_checkpoint(folder / "checkpoints")
    return newest.name if newest else "model.safetensors"


def weights_digest(folder: Path) -> str:
    """Return the checksum of the weights of a folder, or nothing where there are none.

    Raises:
        DataError: when they cannot be read.
    """
    newest, exported = reader.newest_checkpoint(folder / "checkpoints"), folder / "model.safetensors"
    if newest is not None:
        return reader.model_digest(newest)
    try:
        return file_digest(exported) if exported.exists() else ""
    except OSError as error:
        raise DataError(f"{exported} cannot be read: {error}") from None


def _state(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    if (folder / "run.yaml").is_file():
        newest = reader.newest_checkpoint(folder / "checkpoints")
        if newest is None:
            raise DataError(f"{folder} has no checkpoint; run `overnight pretrain` first")
        return newest, reader.read_checkpoint(newest)[1]
    path = folder / "model.safetensors"
    try:
        return path, load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}; export or import the model again") from None


def export_byte_model(run: ByteRun, out: Path) -> None:
    """Write the newest checkpoint of a run as a folder of safetensors, settings and a README of the layout.

    Raises:
        ConfigError: when the folder holds another model.
        DataError: when there is no checkpoint.
        UserError: when the folder holds something else, or cannot be written.
    """
    check_target(out, run.run_dir)
    tree = config.to_tree(run)
    kept = {
        "name": run.name,
        "data": {key: tree["data"][key] for key in ("tokenizer", "label")},
        "model": tree["model"],
        "phases": tree["phases"],
    }
    _write(out, _state(run.run_dir)[1], kept, export_marks(run.run_dir))


def import_byte_model(source: Path, out: Path) -> ByteLMConfig:
    """Write another program's model as a folder of ours.

    Args:
        source: the folder with OpenAI's `0.npy` to `14.npy`, or a checkpoint file of NVIDIA's sentiment-discovery.
        out: the folder to write.

    Returns:
        its sizes.

    Raises:
        DataError: naming the array or tensor that is missing, of the wrong shape, or not readable without unpickling.
    """
    state, model = _openai(source) if source.is_dir() else _nvidia(source)
    _write(out, state, {"name": out.resolve().name, "data": {"tokenizer": "bytes"}, "model": _model_tree(model), "phases": _ELSEWHERE})
    return model


def _model_tree(model: ByteLMConfig) -> dict[str, Any]:
    return {key: getattr(model, key) for key in ("kind", "num_layers", "hidden_size", "embedding_size", "weight_norm")}


def _write(out: Path, state: Mapping[str, Tensor], tree: Mapping[str, Any], marks: Mapping[str, str] | None = None) -> None:
    config.build_run(tree)  # what cannot be read back is not written
    check_names(out, _FILES)  # weights alone are what a killed export left
    whole = {name: tensor.to(torch.float32).contiguous() for name, tensor in state.items()}
    weights, file = b"".join(marked(save(whole, metadata={"format": "pt"}), marks or {})), out / "model.safetensors"
    try:
        if not file.is_file() or file_digest(file) != digest(weights):
            for old in ("tasks.jsonl", "linear_probe"):  # of the model that was here before
                shutil.rmtree(out / old) if (out / old).is_dir() else (out / old).unlink(missing_ok=True)
            write_whole(file, [weights])
        write_json(out / "config.json", dict(tree))
        write_whole(out / "README.md", [byte_readme(str(tree["model"]["kind"]), whole).encode()])
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from None


def _openai(folder: Path) -> tuple[dict[str, Tensor], ByteLMConfig]:
    """The arrays of github.com/openai/generating-reviews-discovering-sentiment: (inputs, outputs), W_h split into 4 parts along the outputs."""
    arrays = [_array(folder / f"{number}.npy") for number in range(15)]
    table, w_x, *parts, w_mx, w_mh, b, g_x, g_h, g_mx, g_mh, decoder, bias = arrays
    width, inner = w_mh.shape[0] if w_mh.ndim == 2 else 0, table.shape[-1]
    wanted: list[tuple[int, ...]] = [(BYTES, inner), (inner, 4 * width), *[(width, width)] * 4, (inner, width), (width, width)]
    wanted += [(4 * width,)] * 3 + [(width,)] * 2 + [(width, BYTES), (BYTES,)]
    for number, (array, shape) in enumerate(zip(arrays, wanted, strict=True)):
        if array.shape != shape:
            raise DataError(f"{folder / f'{number}.npy'}: has the shape {array.shape} where {shape} belongs (width {width} by 7.npy)")
    rows = {"w_x": w_x.T, "w_h": np.concatenate(parts, axis=1).T, "w_mx": w_mx.T, "w_mh": w_mh.T, "b": b}
    norms = {"w_x": g_x, "w_h": g_h, "w_mx": g_mx, "w_mh": g_mh}
    for name in ("w_x", "w_h", "b"):
        rows[name] = _gates_in_our_order(rows[name])
    for name in ("w_x", "w_h"):
        norms[name] = _gates_in_our_order(norms[name])
    found = {f"layers.0.{name}": array for name, array in rows.items()} | {f"layers.0.g.{name}": array for name, array in norms.items()}
    found |= {"embedding.weight": table, "decoder.weight": decoder.T, "decoder.bias": bias}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}, _sizes(1, width, inner, True)


def _gates_in_our_order(rows: np.ndarray) -> np.ndarray:
    i, f, o, g = np.split(rows, 4)
    return np.concatenate([i, f, g, o])


def _array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: is missing; the folder must hold 0.npy to 14.npy as published") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: is no .npy array of numbers: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise DataError(f"{path}: holds {getattr(array, 'dtype', 'an archive')}, not floating-point numbers")
    return array.astype(np.float32)


def _nvidia(path: Path) -> tuple[dict[str, Tensor], ByteLMConfig]:
    """A checkpoint of github.com/NVIDIA/sentiment-discovery: the language model, in fp32 or fp16, with weight norm or after its removal.

    A table of 257 rows has the padding in row 0 and byte b in row b + 1 (its `CharacterLevelTokenizer`); that row goes, and so does its logit.
    """
    left = dict(_tensors(path))
    table = _take(left, "encoder.weight", path)
    decoder, bias = _take(left, "decoder.weight", path), _take(left, "decoder.bias", path)
    layers = len({name.split(".")[2] for name in left if name.startswith("rnn.rnns.")})
    normed = "rnn.rnns.0.w_ih_g" in left
    width = decoder.shape[-1]
    state: dict[str, Tensor] = {}
    for layer in range(layers):
        for ours, theirs in zip(_MATRICES, ("w_ih", "w_hh", "w_mih", "w_mhh"), strict=True):
            inputs = width if layer or ours in ("w_h", "w_mh") else table.shape[-1]
            outputs = 4 * width if ours in ("w_x", "w_h") else width
            name = f"rnn.rnns.{layer}.{theirs}"
            state[f"layers.{layer}.{ours}"] = _take(left, f"{name}_v" if normed else name, path, (outputs, inputs))
            if normed:
                state[f"layers.{layer}.g.{ours}"] = _take(left, f"{name}_g", path, (outputs, 1)).flatten()
        biases = [left.pop(f"rnn.rnns.{layer}.{name}", None) for name in ("b_ih", "b_hh")]
        given = [bias.float() for bias in biases if bias is not None]
        if any(len(bias) != 4 * width for bias in given):
            raise DataError(f"{path}: rnn.rnns.{layer}.b_ih and b_hh must have {4 * width} numbers, four times the width of decoder.weight")
        state[f"layers.{layer}.b"] = sum(given, torch.zeros(4 * width))
    if not layers or left:
        odd = f"{min(left)} is not of an mLSTM" if left else "has no layers rnn.rnns.0..."
        raise DataError(f"{path}: {odd}; only the language models of sentiment-discovery (mLSTM) can be read")
    for name, tensor in (("encoder.weight", table), ("decoder.weight", decoder), ("decoder.bias", bias)):
        if len(tensor) not in (BYTES, BYTES + 1) or len(tensor) != len(table):
            raise DataError(f"{path}: {name} has {len(tensor)} rows; a byte model has 256, or 257 with the padding, in all of its tables")
    state |= {"embedding.weight": table[-BYTES:], "decoder.weight": decoder[-BYTES:], "decoder.bias": bias[-BYTES:]}
    return state, _sizes(layers, width, table.shape[-1], normed)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the language model in a checkpoint, by dotted names without what is wrapped around them."""
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(
            f"{path}: does not exist; name a checkpoint file of sentiment-discovery, or the folder with OpenAI's arrays"
        ) from None
    except Exception as error:  # above all UnpicklingError, which cannot be named without its module
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{path}: is not a checkpoint of tensors alone: {why}") from None
    for wrapper in ("sd", "lm_encoder"):
        if isinstance(tree, dict) and isinstance(tree.get(wrapper), dict):
            tree = tree[wrapper]
    if not isinstance(tree, dict):
        raise DataError(f"{path}: holds a {type(tree).__name__}, not the tensors of a model by name")
    for name, tensor in _flat(tree):
        name = name.removeprefix("module.")
        # The language model puts table and recurrence under `encoder`, the classifier of features does not; a fitted classifier is not wanted.
        if not name.startswith("classifier."):
            yield (name.removeprefix("encoder.") if name.startswith(("encoder.encoder.", "encoder.rnn.")) else name), tensor


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def _take(left: dict[str, Tensor], name: str, path: Path, shape: tuple[int, ...] | None = None) -> Tensor:
    if name not in left:
        hint = ": a classifier's file lacks it, name that of the language model" if name.startswith("decoder") else ""
        raise DataError(f"{path}: tensor {name} is missing{hint}")
    if shape and tuple(left[name].shape) != shape:
        raise DataError(f"{path}: {name} has the shape {tuple(left[name].shape)} where {shape} belongs")
    return left.pop(name).to(torch.float32)


def _sizes(layers: int, width: int, embedding: int, weight_norm: bool) -> ByteLMConfig:
    return RecurrentLMConfig(kind="mlstm", num_layers=layers, hidden_size=width, embedding_size=embedding, weight_norm=weight_norm)
