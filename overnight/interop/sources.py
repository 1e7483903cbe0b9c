"""Pretrained encoders of others, with their vocabulary: what `init`, `overnight import` and `--from` may name.

A folder of Hugging Face or a name of its hub, a checkpoint of TensorFlow by Google, or one of PyTorch by NVIDIA. Nothing in them is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from overnight.checkpoint.initial import Initial, with_tokens
from overnight.checkpoint.reader import newest_checkpoint, read_checkpoint
from overnight.checkpoint.run_corpus import kept_vocabulary
from overnight.config import BertRun, environment_text, is_huggingface, refuse_untrained, stored_run, task_folder
from overnight.config.schema import ENCODERS
from overnight.corpus.tokenizer import build_tokenizer, load_tokens, read_tokens
from overnight.errors import DataError
from overnight.interop import bert_layout
from overnight.interop.huggingface import Loaded, converted, load_pretrained
from overnight.interop.layout import read_mapping_of_others, read_sizes
from overnight.interop.pytorch import read_torch
from overnight.interop.tensorflow import read_bundle
from overnight.interop.tokenizer_files import pieces_of
from overnight.models.bert import padded_vocabulary
from overnight.state_files import digest, file_digest, read_mapping

OF_OTHERS = (
    "a folder of Hugging Face (config.json, model.safetensors, tokenizer), a name of its hub (hf:bert-base-uncased), a folder of TensorFlow "
    "(bert_config.json, vocab.txt, bert_model.ckpt.index and .data-*), or a checkpoint of NVIDIA (*.pt beside bert_config.json and vocab.txt)"
)
UNDERSTOOD = f"a run folder, {OF_OTHERS}"
_CONFIGS = ("bert_config.json", "config.json")
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
HUB = "hf:"
"""In front of a name of Hugging Face's hub, as of its data sets in `data.paths`."""
# All that a hub may put on this disk for a name: no code, no weights of other frameworks.
_HUB_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "model.safetensors"]
# What lies beside the weights, in a folder of any kind, and is read with them.
_BESIDE = (*_CONFIGS, "tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Rows that fill a vocabulary up to a multiple of 8, 64, 128 or 256 at most; where more are left, tokens are missing.
_MOST_PADDING = 256
_BRACKETED = re.compile(r"\[.*\]")


def read_source(source: str, lowercase: bool | None = None) -> Initial:
    """Read a pretrained encoder and its vocabulary.

    Args:
        source: a path, in which `$NAME` is read from the environment, or `hf:NAME` of the hub, with `@REVISION` where not the newest is meant.
        lowercase: whether text is put into lower case, for a checkpoint that does not say so itself; None asks its vocabulary for capitals.

    Raises:
        ConfigError: it is a run whose training has not begun.
        DataError: it is nothing of this kind, damaged, or has what we do not have.
    """
    path = Path(environment_text(source, "init"))
    index = _index(path)
    if (path / "run.yaml").is_file():
        return _own(source, path)
    if source.startswith(HUB):
        folder = hub_folder(source)
        loaded = load_pretrained(folder)
    elif index is not None:
        loaded, folder = _tensorflow(index), index.parent
    elif path.is_file() and path.suffix in _TORCH:
        loaded, folder = _nvidia(path), path.parent
    elif path.is_dir() and (path / "config.json").is_file():
        loaded, folder = load_pretrained(path), path
    elif path.is_dir() and len(found := sorted(file for file in path.iterdir() if file.suffix in _TORCH)) == 1:
        loaded, folder = _nvidia(found[0]), path
    elif is_huggingface(path):
        raise DataError(f"{path}: has no config.json, which says the sizes of the network; copy it from where the checkpoint is from")
    elif (path / "task.json").is_file():
        raise DataError(f"{path}: is a fine-tuned task; name its run folder, {task_folder(path).parent.parent}")
    else:
        refuse_untrained(path)
        what = "is not a checkpoint that can be read" if path.exists() else "does not exist"
        raise DataError(f"{path}: {what}; name {UNDERSTOOD}")
    state, model, vocab_size = loaded
    tokens, lowered = _tokenizer(folder, lowercase)
    if not 0 <= vocab_size - len(tokens) < _MOST_PADDING:
        raise DataError(
            f"{folder}: its vocabulary has {len(tokens):,} tokens, and its network rows for {vocab_size:,}; put the right one there"
        )
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    whole = with_tokens(encoder, len(tokens), padded_vocabulary(len(tokens)))
    return Initial(source, model, tokens, lowered, whole, headed=len(encoder) < len(state))


def source_digest(source: str) -> str:
    """Return a checksum of the files that :func:`read_source` reads: it tells a checkpoint from another that was put in its place.

    Empty where there are no such files, and for a name of the hub, which would have to be asked for what it has now.

    Raises:
        DataError: a file cannot be read.
    """
    if source.startswith(HUB):
        return ""
    try:
        found = [f"{file.name} {file_digest(file)}" for file in _files(Path(environment_text(source, "init")))]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return digest("\n".join(found).encode()) if found else ""


def _files(path: Path) -> list[Path]:
    """Return the files of the weights, sizes and vocabulary that a path of this machine names."""
    if (path / "run.yaml").is_file():
        newest = newest_checkpoint(path / "checkpoints")
        return [newest / "state.json"] if newest else []  # has the checksums of the others
    index = _index(path)
    if index is not None:
        folder = index.parent
        weights = [index, *(file for file in folder.iterdir() if file.name.startswith(f"{index.stem}.data-"))]
    elif path.is_file():
        folder, weights = path.parent, [path]
    elif path.is_dir():
        folder, whole = path, path / "model.safetensors"
        weights = [whole] if whole.is_file() else [file for file in path.iterdir() if file.suffix in _TORCH]
    else:
        return []
    return sorted([*weights, *(file for name in _BESIDE if (file := folder / name).is_file())])


def _own(source: str, folder: Path) -> Initial:
    """Return the newest checkpoint of a run folder."""
    run = stored_run(folder)
    if not isinstance(run, BertRun):
        raise DataError(f"{folder}: model.kind = {run.model.kind!r}: is of bytes; name a run of {' or '.join(ENCODERS)}")
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise DataError(f"{folder} has no checkpoint; run `overnight pretrain` first")
    _, state, _ = read_checkpoint(newest)
    tokens, lowercase = load_tokens(kept_vocabulary(run)[0])
    return Initial(source, run.model, tokens, lowercase, state)


def _index(path: Path) -> Path | None:
    """Return the `.index` file of a TensorFlow checkpoint that a path names: the file, its prefix, or the newest in a folder."""
    if path.suffix == ".index":
        return path
    if (beside := path.parent / f"{path.name}.index").is_file():
        return beside
    found = list(path.glob("*.ckpt*.index")) if path.is_dir() else []

    def step(file: Path) -> int:
        number = re.search(r"-(\d+)\.index$", file.name)
        return int(number[1]) if number else 0

    return max(found, key=lambda file: (step(file), file.name), default=None)


def _config(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = next((folder / name for name in _CONFIGS if (folder / name).is_file()), folder / _CONFIGS[0])
    return path, read_mapping(path, "it says the sizes of the network; copy it from where the checkpoint is from")


def _tensorflow(index: Path) -> Loaded:
    path, config = _config(index.parent)
    prefix = index.with_suffix("")
    found = read_bundle(prefix, lambda name: name.startswith(("bert/", "cls/")) and not name.endswith(("/adam_m", "/adam_v")))
    if not found:
        raise DataError(f"{index}: has no tensors named bert/...; name the checkpoint of a BERT")
    return converted((prefix, dict(map(_from_tensorflow, found.items()))), config, bert_layout, path)


def _from_tensorflow(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Return a tensor by the name and in the shape of transformers: there a matrix is (outputs, inputs)."""
    name, tensor = named
    name = re.sub(r"\blayer_(\d+)\b", r"layer.\1", name).replace("/", ".")
    if name.endswith(".kernel"):
        return f"{name.removesuffix('.kernel')}.weight", tensor.T.contiguous()
    for theirs, ours in ((".gamma", ".weight"), (".beta", ".bias"), ("predictions.output_bias", "predictions.bias")):
        if name.endswith(theirs):
            return f"{name.removesuffix(theirs)}{ours}", tensor
    if name.endswith("_embeddings"):
        return f"{name}.weight", tensor
    return name.replace(".output_weights", ".weight").replace(".output_bias", ".bias"), tensor


def _nvidia(file: Path) -> Loaded:
    path, config = _config(file.parent)
    size = read_sizes(config, path)["vocab_size"]
    tensors = read_torch(file)
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "cls.predictions.bias"):
        # They fill the vocabulary up to a multiple of 8.
        if name in tensors and size < len(tensors[name]) < size + 64:
            tensors[name] = tensors[name][:size]
    return converted((file, tensors), config, bert_layout, path)


def _tokenizer(folder: Path, lowercase: bool | None) -> tuple[list[str], bool]:
    """Return the vocabulary of a folder, and whether text is put into lower case: as the folder says, or else as given, or else by its capitals.

    Raises:
        DataError: there is none, or it splits text in another way than BERT's.
    """
    path, said = folder / "tokenizer.json", folder / "tokenizer_config.json"
    settings = read_mapping_of_others(said) if said.is_file() else {}
    if path.is_file():
        tree = read_mapping(path, "copy it again")
        tokens = pieces_of(tree, path)
        normalizer = tree.get("normalizer") or {}
        stated = normalizer.get("lowercase")
        if not isinstance(stated, bool) or not _splits_like_ours(tree, tokens, stated):
            raise DataError(f"{path}: splits text in another way than BERT's WordPiece; only that can be used here")
    else:
        path = folder / "vocab.txt"
        if not path.is_file():
            raise DataError(f"{folder}: has no tokenizer (vocab.txt or tokenizer.json); copy it from where the checkpoint is from")
        tokens, stated = read_tokens(path), settings.get("do_lower_case")
        if not isinstance(stated, bool):
            stated = not has_capitals(tokens) if lowercase is None else lowercase
    # transformers takes these before what tokenizer.json says.
    for key, wanted in (("do_lower_case", stated), ("strip_accents", stated), ("tokenize_chinese_chars", True)):
        if settings.get(key) not in (None, wanted):
            raise DataError(
                f"{said}: {key} = {json.dumps(settings[key])} splits text in another way than BERT's WordPiece "
                f"{'in lower case' if stated else 'with capitals'} (as of {path.name}); only that can be used here"
            )
    return tokens, stated


def _splits_like_ours(tree: Mapping[str, Any], tokens: list[str], lowercase: bool) -> bool:
    ours = json.loads(build_tokenizer(tokens, lowercase).to_str())
    model, normalizer = tree["model"], tree.get("normalizer") or {}
    same = all(model.get(key) == ours["model"][key] for key in ("unk_token", "continuing_subword_prefix", "max_input_chars_per_word"))
    added = {token.get("content") for token in tree.get("added_tokens") or []}
    return (
        same
        and added <= set(tokens)
        and (tree.get("pre_tokenizer") or {}).get("type") == ours["pre_tokenizer"]["type"]
        and all(normalizer.get(key) == ours["normalizer"][key] for key in ("type", "clean_text", "handle_chinese_chars"))
        # Accents that are not mentioned go with the capitals.
        and normalizer.get("strip_accents") in (None, lowercase)
    )


def has_capitals(tokens: list[str]) -> bool:
    """Return whether a vocabulary has capital letters, but for those of its special tokens: text is put into lower case where it has none."""
    return any(token != token.lower() for token in tokens if not _BRACKETED.fullmatch(token))


def hub_folder(source: str) -> Path:
    """Return the folder in which a model of Hugging Face's hub lies, in the cache that transformers has too; downloaded where it is not there.

    Args:
        source: `hf:NAME`, or `hf:NAME@REVISION`.

    Raises:
        DataError: it cannot be had.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = source.removeprefix(HUB).partition("@")
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES))
        if not (folder / "model.safetensors").is_file():
            folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=[*_HUB_FILES, "pytorch_model.bin"]))
    except Exception as error:  # the hub's own, those of its client for HTTP, OSError, ValueError
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"{source}: cannot be downloaded from Hugging Face's hub, and is not in the cache of this machine ({why}). Correct the name, connect to a "
            "network, or copy the model's folder here and name that"
        ) from None
    return folder


def is_source(source: str) -> bool:
    """Return whether a text names a checkpoint of others, and no run folder or byte model."""
    path = Path(source)
    if source.startswith(HUB) or (path / "run.yaml").is_file():
        return source.startswith(HUB)
    if is_huggingface(path):
        return True
    beside = path if path.is_dir() else path.parent
    return _index(path) is not None or ((path.is_dir() or path.suffix in _TORCH) and (beside / _CONFIGS[0]).is_file())
