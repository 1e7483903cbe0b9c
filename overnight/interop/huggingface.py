"""Hugging Face folders of BERT and ModernBERT, in and out: `config.json`, `model.safetensors` and the tokenizer's files.

Exporting needs safetensors only; transformers is not imported. What is particular to a network is in `bert_layout` and `modernbert_layout`.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from overnight.config import EncoderConfig, Finetune
from overnight.config.schema import Columns
from overnight.errors import DataError, UserError
from overnight.interop import bert_layout, modernbert_layout
from overnight.interop.export_marks import check_names, marked
from overnight.interop.layout import HEADS, Kind, Layout, layers_of, read_mapping_of_others, with_padded_vocabulary
from overnight.interop.pytorch import read_torch
from overnight.interop.tokenizer_files import pieces_of, tokenizer_config, with_template
from overnight.models.encoders import masked_lm
from overnight.run_dir.atomic import write_json, write_whole

_LAYOUTS: dict[str, Layout] = {"bert": bert_layout, "modernbert": modernbert_layout}
TASK = "overnight_task"
"""Key of `config.json` under which an export says how its task is asked and answered, which transformers leaves alone."""
_FILES = ("config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json", "README.md", "model.onnx")


def to_huggingface(state: Mapping[str, Tensor], kind: Kind, vocab_size: int) -> dict[str, Tensor]:
    """Our parameters under the names and shapes of transformers' `BertFor...` or `ModernBertFor...`, as fp32 on the CPU.

    Args:
        state: the `state_dict` of the model of that kind.
        kind: what the model is.
        vocab_size: tokens of the vocabulary; the padded rows are dropped.

    Returns:
        The whole state of its class, tied tensors included.
    """
    layout = _LAYOUTS["modernbert" if "encoder.final_norm.weight" in state else "bert"]
    return {name: tensor.contiguous() for name, tensor in layout.export_tensors(state, kind, vocab_size).items()}


def export(
    state: Mapping[str, Tensor],
    kind: Kind,
    model: EncoderConfig,
    tokenizer_folder: Path,
    out: Path,
    labels: Sequence[str] = (),
    card: str = "",
    more: Callable[[Path], None] | None = None,
    longest: int = 0,
    settings: Mapping[str, Any] | None = None,
    marks: Mapping[str, str] | None = None,
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
        card: what `README.md` says; empty writes none.
        more: writes further files into the folder before it appears.
        longest: tokens at which texts are cut, where that is less than the network has positions for.
        settings: of a task, what :func:`task_settings` reads back.
        marks: what the header of the weights says besides, such as :func:`overnight.interop.export_marks.export_marks`.

    Raises:
        DataError: the tokenizer is missing or is not WordPiece.
        UserError: the folder holds something else, or cannot be written.
    """
    from safetensors.torch import save

    layout = _LAYOUTS[model.kind]
    tokenizer = read_mapping_of_others(tokenizer_folder / "tokenizer.json")
    pieces = pieces_of(tokenizer, tokenizer_folder / "tokenizer.json")
    check_names(out, _FILES, needed="config.json")
    tensors = to_huggingface(state, kind, len(pieces))
    classes = _classes(labels, len(state["head.bias"]), HEADS[kind].problem) if HEADS[kind].classifier and kind != "spans" else {}
    config = layout.export_config(kind, model, pieces) | classes | ({TASK: dict(settings)} if settings else {})

    def fill(folder: Path) -> None:
        write_json(folder / "config.json", config)
        # Not save_file: what it writes nobody else may read.
        weights = save({n: t for n, t in tensors.items() if n not in layout.TIED}, metadata={"format": "pt"})
        write_whole(folder / "model.safetensors", marked(weights, marks or {}))
        write_whole(folder / "vocab.txt", ["".join(f"{piece}\n" for piece in pieces).encode()])
        write_json(folder / "tokenizer.json", with_template(tokenizer, pieces))
        most = min(longest or model.max_position_embeddings, model.max_position_embeddings)
        write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer, most, layout.MODEL_INPUTS))
        if card:
            write_whole(folder / "README.md", [card.encode()])
        if more:
            more(folder)

    _write_whole_folder(out, fill)


def _write_whole_folder(out: Path, fill: Callable[[Path], None]) -> None:
    """Let a function fill a folder that appears by rename, in place of an earlier one.

    Raises:
        UserError: it cannot be written.
    """
    from safetensors import SafetensorError

    out = out.resolve()  # `.` has no name of its own
    beside, old = (out.with_name(f".{out.name}.{word}") for word in ("partial", "old"))
    try:
        shutil.rmtree(beside, ignore_errors=True)  # what a killed export left
        beside.mkdir(parents=True)
        fill(beside)
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            os.rename(out, old)
        os.rename(beside, out)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _classes(labels: Sequence[str], outputs: int, problem: str) -> dict[str, Any]:
    assert not labels or len(labels) == outputs, (labels, outputs)
    names = list(labels) or [f"LABEL_{i}" for i in range(outputs)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        **({"problem_type": "regression" if outputs == 1 and problem != HEADS["multi_label"].problem else problem} if problem else {}),
    }


Loaded = tuple[dict[str, Tensor], EncoderConfig, int]
"""Parameters by our names, sizes, and the number of tokens of the vocabulary."""


def load_pretrained(folder: Path) -> Loaded:
    """Read a Hugging Face folder of BERT or ModernBERT.

    Args:
        folder: holds `config.json` and `model.safetensors`, or a `pytorch_model.bin` of tensors alone.

    Returns:
        The parameters by our names, fp32 (the encoder always; `pooler`, `mlm`, `nsp` and `head` where given), the sizes, and the number of tokens of the vocabulary.

    Raises:
        DataError: a file that is missing or damaged, a pickled checkpoint, an architecture that we do not have, or shapes that differ from the config.
    """
    path = folder / "config.json"
    config = read_mapping_of_others(path)
    layout = _LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        raise DataError(f"{path}: model_type = {config.get('model_type')!r}; only 'bert' and 'modernbert' can be read")
    return converted(_read_weights(folder), config, layout, path)


def converted(found: tuple[Path, Mapping[str, Tensor]], config: Mapping[str, Any], layout: Layout, path: Path) -> Loaded:
    """Return tensors by the names of transformers as ours, checked against the sizes that belong to them.

    Args:
        found: where the tensors are from, and the tensors.
        config: as in a `config.json`.
        layout: of the architecture.
        path: of the config.

    Raises:
        DataError: as of :func:`load_pretrained`.
    """
    weights, tensors = found
    model = layout.import_config(config, path)
    whole = (name for name, tensor in tensors.items() if not (tensor.is_floating_point() or name.endswith("position_ids")))
    if (name := next(whole, "")) or config.get("quantization_config"):
        what = f"{weights}: tensor {name} is of {tensors[name].dtype}" if name else f"{path}: has a quantization_config"
        raise DataError(f"{what}: quantized weights cannot be read; save them in floating point")
    vocab_size = config["vocab_size"]
    try:
        state = layout.import_tensors(tensors)
    except DataError as error:
        raise DataError(f"{weights}: {error}") from None
    try:
        if (layers := layers_of(state, "encoder.layers.")) != model.num_layers:
            raise DataError(f"{layers} layers where {model.num_layers} belong")
        state = with_padded_vocabulary(state, vocab_size)
        expected = _shapes(state, model, vocab_size)
        for name, tensor in state.items():
            if tuple(tensor.shape) != expected[name]:
                raise DataError(f"{name} {tuple(tensor.shape)} where {expected[name]} belongs")
    except DataError as error:
        raise DataError(f"{weights}: does not fit {path}: {error}") from None
    return state, model, vocab_size


def _shapes(state: Mapping[str, Tensor], model: EncoderConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that parameters must have beside these sizes; how many outputs the head of a task has, its own weight says."""
    with torch.device("meta"):
        network = masked_lm(model, vocab_size, nsp=True)
    outputs = len(state["head.weight"]) if "head.weight" in state else 0
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return {**shapes, "head.weight": (outputs, model.hidden_size), "head.bias": (outputs,)}


def head_of(folder: Path, headed: bool = False) -> tuple[Kind | None, list[str]]:
    """Return the kind of task that a folder of Hugging Face has a head of, and its classes; none of a pretrained model.

    Args:
        folder: with a `config.json`, or there is none.
        headed: whether the weights are known to have such a head.

    Raises:
        DataError: its `config.json` cannot be read, or does not say what the head answers.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None, []
    config = read_mapping_of_others(path)
    named = config.get("architectures")
    if headed and not named:
        raise DataError(
            f'{path}: architectures is missing, and the weights have the head of a task: name it, as ["BertForSequenceClassification"]'
        )
    architecture, problem = str(named[0]) if isinstance(named, list) and named else "", config.get("problem_type")
    fitting = [kind for kind, head in HEADS.items() if head.classifier and architecture.endswith(head.suffix)]
    kind = next((kind for kind in fitting if HEADS[kind].problem == problem), fitting[0] if fitting else None)
    if kind is None or kind == "spans":
        return kind, []
    labels = _labels(config, path)
    said = "id2label" if config.get("id2label") else "num_labels" if "num_labels" in config else ""
    if kind == "regression" and said and len(labels) > 1:
        raise DataError(f"{path}: problem_type = 'regression' with {len(labels)} outputs ({said}); only one number can be answered")
    if kind == "regression" or (kind == "classification" and len(labels) == 1):
        return "regression", []
    return kind, labels


def task_settings(folder: Path) -> dict[str, Any]:
    """Return what the `config.json` of an export says of its task; of a folder of others nothing.

    Returns:
        of texts which `task` (as of `config.Finetune`) says how rows are read and scored, whether it is of `pairs`, and what the `columns` of one's own table are
        called, where that is not as of `config.Columns`; of questions `doc_stride`, `max_answer_length`, and `null_threshold` where some have no answer.

    Raises:
        DataError: it cannot be read, or a value is none of that kind.
    """
    path = folder / "config.json"
    found = read_mapping_of_others(path).get(TASK, {})
    for key, value in found.items() if isinstance(found, dict) else [("", found)]:
        if not _fits(key, value):
            raise DataError(f"{path}: {TASK}{f'.{key}' if key else ''} = {value!r}: no export wrote this; export the task again")
    return dict(found)


def _fits(key: str, value: Any) -> bool:
    """Return whether a value is one that an export writes of its task."""
    if key == "task":
        return value in get_args(get_type_hints(Finetune)["task"])
    if key == "columns":
        return isinstance(value, dict) and value.keys() <= vars(Columns()).keys() and all(isinstance(name, str) for name in value.values())
    if key == "pairs" or isinstance(value, bool):
        return key == "pairs" and isinstance(value, bool)
    if key == "null_threshold":
        return isinstance(value, int | float)
    return key in ("doc_stride", "max_answer_length") and isinstance(value, int) and value > 0


def _labels(config: Mapping[str, Any], path: Path) -> list[str]:
    """Return the names of the classes of a `config.json`, in the order of the outputs.

    Raises:
        DataError: an output has no name, two have one, or `num_labels` is no number of them.
    """
    # As transformers does where it names none.
    names = config.get("id2label") or {str(number): f"LABEL_{number}" for number in range(_outputs(config, path))}
    if not isinstance(names, dict) or names.keys() != {str(number) for number in range(len(names))}:
        raise DataError(f"{path}: id2label: must name the outputs from 0 on, each once")
    labels = [str(names[str(number)]) for number in range(len(names))]
    name, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise DataError(f"{path}: id2label: {times} classes are called {name!r}; give each a name of its own")
    return labels


def _outputs(config: Mapping[str, Any], path: Path) -> int:
    outputs = config.get("num_labels", 2)
    if not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 1:
        raise DataError(f"{path}: num_labels = {outputs!r}: must be a whole number of 1 or more")
    return outputs


def _read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file of weights of a folder and its tensors: safetensors, or else a `pytorch_model.bin` of tensors alone."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if not weights.is_file():
        if pickled.is_file():
            return pickled, read_torch(pickled)
        raise DataError(f"{folder}: has no model.safetensors{_instead(folder)}")
    try:
        return weights, load_file(weights)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{weights}: cannot be read: {error}; the file is damaged or cut short") from None


def _instead(folder: Path) -> str:
    """What to do, by what the folder holds in place of the file."""
    if any((folder / f"{name}.index.json").is_file() for name in ("model.safetensors", "pytorch_model.bin")):
        return "; it is split into several files: load it with transformers and call save_pretrained(folder, max_shard_size='100GB')"
    return "; name a folder that transformers' save_pretrained wrote"
