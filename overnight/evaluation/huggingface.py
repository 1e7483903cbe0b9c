"""Masked language models in the Hugging Face layout, of any architecture that transformers knows, as :class:`overnight.evaluation.masked_lm.MaskedLM`.

Shapes: S sequences, T longest sequence, P most predictions of a sequence, M predicted positions, D width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from overnight.batches.packing import Batch
from overnight.config import Run
from overnight.corpus.tokenizer import Vocabulary
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.errors import ConfigError, DataError
from overnight.evaluation.masked_lm import batch_tokens, joined, logit_rows, of_logits, plain_tokenizer
from overnight.interop.layout import read_mapping_of_others
from overnight.interop.sources import has_capitals
from overnight.state_files import digest, file_digest

_SPECIAL = {"cls": ("cls_token", "bos_token"), "sep": ("sep_token", "eos_token"), "mask": ("mask_token",)}
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
_HOW = "name a folder that transformers' save_pretrained wrote, with the tokenizer's files"


class HuggingFaceMaskedLM:
    """A folder with `config.json`, `model.safetensors` and the tokenizer's files; nothing is downloaded, unpickled, or run out of the folder.

    Args:
        folder: the model.
        machine: says precision, device and threads. 16 bits are those of autocast, with fp32 weights.

    Raises:
        ConfigError: transformers is not installed, or the precision is for our networks only.
        DataError: a file is missing or damaged, or the model is no masked language model.
    """

    def __init__(self, folder: Path, machine: Run) -> None:
        if machine.precision == "fp8":
            raise ConfigError("precision = fp8: a model of transformers is not computed in 8 bits; use bf16")
        self.name = folder.name
        self.precision: str = machine.precision
        self.digest = _digest(folder)
        self.model, tokenizer = _load(folder)
        self.device = set_up_machine(machine)
        self.model.to(self.device).eval()
        self.tokenizer = plain_tokenizer(_fast(tokenizer, folder))
        self.vocabulary = _vocabulary(tokenizer, self.tokenizer, self.model, folder)
        self.longest = _longest(self.model, tokenizer)
        self.batch_tokens = batch_tokens(self.device, self.vocabulary.size)

    @torch.inference_mode()
    def log_probabilities(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return ln p of the true token at each predicted position (M), and whether it is the likeliest (M).

        Sequences of one length are computed together, without padding: where a network convolves or averages over places, the mask of its attention does
        not keep that out.
        """
        assert batch.predicted_M is not None
        lengths_S, starts, at_M = np.array(batch.lengths), batch.starts.numpy(), batch.predicted_M.numpy()
        sequence_M = np.searchsorted(starts, at_M, side="right") - 1
        log_p_M, right_M = np.empty(len(at_M), np.float32), np.empty(len(at_M), bool)
        for length in np.unique(lengths_S[sequence_M]):
            rows, mine = np.flatnonzero(lengths_S == length), np.flatnonzero(lengths_S[sequence_M] == length)
            ids_ST = batch.ids_N[torch.from_numpy(starts[rows, None] + np.arange(length))]
            row_M, place_M = np.searchsorted(rows, sequence_M[mine]), at_M[mine] - starts[sequence_M[mine]]
            log_p_M[mine], right_M[mine] = self._of_one_length(ids_ST, row_M, place_M, batch.targets["mlm"][torch.from_numpy(mine)])
        return log_p_M, right_M

    def _of_one_length(self, ids_ST: Tensor, row_M: np.ndarray, place_M: np.ndarray, labels_M: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return :meth:`log_probabilities` of some places of sequences, by row and column."""
        places_SP, slot_M = _slots(row_M, place_M, len(ids_ST))
        logits_SPV = self._logits(ids_ST, torch.from_numpy(places_SP))
        logits_MV = logits_SPV.flatten(0, 1)[torch.from_numpy(row_M * places_SP.shape[1] + slot_M).to(self.device)]
        labels_M, rows = labels_M.to(self.device), logit_rows(self.device, logits_MV.shape[1])
        return joined([of_logits(logits, labels) for logits, labels in zip(logits_MV.split(rows), labels_M.split(rows), strict=True)])

    def _logits(self, ids_ST: Tensor, places_SP: Tensor) -> Tensor:
        """Return the logits at some places of each sequence: (S, P, V)."""
        ids_ST, places_SP = ids_ST.to(self.device), places_SP.to(self.device)
        dtype = DTYPES[self.precision]
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)
        with mixed, _only_at(self.model.base_model, places_SP):
            logits: Tensor = self.model(input_ids=ids_ST, attention_mask=torch.ones_like(ids_ST)).logits
        if logits.shape[1] == places_SP.shape[1]:  # fewer than tokens, since the special ones are never predicted
            return logits
        # The head of this architecture reads something else than what its base model returns.
        return logits.gather(1, places_SP[..., None].expand(-1, -1, logits.shape[2]))


@contextmanager
def _only_at(base: Any, places_SP: Tensor) -> Iterator[None]:
    """Let a base model return its hidden states at some places only, so that the head above it is computed for no others."""

    def choose(module: Any, args: Any, output: Any) -> Any:
        hidden_STD = getattr(output, "last_hidden_state", None)
        if hidden_STD is not None:
            output.last_hidden_state = hidden_STD.gather(1, places_SP[..., None].expand(-1, -1, hidden_STD.shape[2]))
        return output

    handle = base.register_forward_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def _slots(sequence_M: np.ndarray, place_M: np.ndarray, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the predicted places of each sequence (S, P), 0 where it has fewer, and the column of each prediction (M)."""
    counts = np.bincount(sequence_M, minlength=sequences)
    slot_M = np.arange(len(sequence_M)) - np.repeat(np.cumsum(counts) - counts, counts)
    places_SP = np.zeros((sequences, max(1, counts.max())), np.int64)
    places_SP[sequence_M, slot_M] = place_M
    return places_SP, slot_M


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder holds a model in the Hugging Face layout, and no run."""
    config = folder / "config.json"
    return not (folder / "run.yaml").is_file() and config.is_file() and b'"model_type"' in config.read_bytes()


def _digest(folder: Path) -> str:
    """Return a hash of the weights and of all that decides what they mean.

    Raises:
        DataError: when there are no weights, or no tokenizer.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        what = (
            "only pytorch_model.bin, a pickle, which can run code when it is read" if (folder / "pytorch_model.bin").is_file() else "none"
        )
        raise DataError(f"{folder}: a model.safetensors is needed, and there is {what}; {_HOW}")
    beside = sorted(file for pattern in (*_TOKENIZERS, "config.json", "tokenizer_config.json") for file in folder.glob(pattern))
    # Without one, transformers makes a tokenizer of no words.
    if not any(file.match(pattern) for file in beside for pattern in _TOKENIZERS):
        raise DataError(f"{folder}: has no tokenizer ({', '.join(_TOKENIZERS)}); {_HOW}")
    return digest(" ".join(file_digest(file) for file in (*files, *beside)).encode())


def _load(folder: Path) -> tuple[Any, Any]:
    """Return the network, in fp32, and the tokenizer as transformers has it."""
    # Where it is installed, transformers imports it, and it warns of its kernels for GPUs that are not there.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{folder}: a model in the Hugging Face layout needs the extra `transformers`: pip install 'overnight[transformers]'"
        ) from None
    local = {"local_files_only": True, "trust_remote_code": False}
    said = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        lower = {"do_lower_case": False} if _is_cased(folder) else {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **lower, **local)
        model, loading = transformers.AutoModelForMaskedLM.from_pretrained(
            folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **local
        )
    except Exception as error:  # of many kinds: transformers' own, safetensors', OSError, KeyError of a config
        raise DataError(f"{folder}: transformers cannot load it as a masked language model ({_first_line(error)}); {_HOW}") from None
    finally:
        transformers.logging.set_verbosity(said)
        transformers.logging.enable_progress_bar()
    if missing := sorted(loading["missing_keys"]):
        raise DataError(
            f"{folder}: its weights lack {missing[0]}{' and more' * (len(missing) > 1)}, which transformers would draw at random: "
            "it is not a masked language model, since it lacks that head"
        )
    return model, tokenizer


def _is_cased(folder: Path) -> bool:
    """Return whether `vocab.txt` is all that a folder says of case, and has capitals, as `overnight import` decides; transformers puts text into lower case there."""
    said, pieces = folder / "tokenizer_config.json", folder / "vocab.txt"
    if (folder / "tokenizer.json").is_file() or not pieces.is_file():
        return False
    if said.is_file() and isinstance(read_mapping_of_others(said).get("do_lower_case"), bool):
        return False
    return has_capitals(pieces.read_bytes().decode(errors="replace").split("\n"))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _fast(tokenizer: Any, folder: Path) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise DataError(
            f"{folder}: has no tokenizer.json, and the {type(tokenizer).__name__} that transformers uses instead does not say where in the "
            'text a token is; put its tokenizer.json there or, if it splits words as BERT does, name {"tokenizer_class": "BertTokenizer"} in tokenizer_config.json'
        )
    return backend


def _vocabulary(tokenizer: Any, backend: Tokenizer, model: Any, folder: Path) -> Vocabulary:
    """Return what masking and batching need to know of a tokenizer."""
    ids: dict[str, int] = {}
    for what, names in _SPECIAL.items():
        found = next((number for name in names if (number := getattr(tokenizer, f"{name}_id", None)) is not None), None)
        if found is None:
            raise DataError(f"{folder}: its tokenizer has no {names[0]}, which a masked language model needs; {_HOW}")
        ids[what] = found
    # Random tokens are drawn from those that the tokenizer knows and the model has a row for.
    largest = max(backend.get_vocab(with_added_tokens=True).values())
    rows = _rows(model, folder)
    if largest >= rows:
        raise DataError(f"{folder}: its tokenizer has a token {largest}, and its embedding {rows} rows; put the right tokenizer there")
    pad, unk = (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "unk"))
    nothing = np.zeros(largest + 1, bool)
    pad, unk = (0 if pad is None else pad), (-1 if unk is None else unk)
    return Vocabulary(largest + 1, pad, unk, ids["cls"], ids["sep"], ids["mask"], nothing, nothing, hash="", lowercase=False)


def _rows(model: Any, folder: Path) -> int:
    """Return for how many tokens a model has an embedding."""
    try:
        return len(model.get_input_embeddings().weight)
    except (AttributeError, NotImplementedError):  # of Perceiver transformers gives what is compared with the tokens
        raise DataError(
            f"{folder}: model_type = {model.config.model_type!r}: does not compute a hidden state of each token from its embedding, "
            "as masked language models that can be measured do; name another"
        ) from None


def _longest(model: Any, tokenizer: Any) -> int:
    """Return the longest sequence that the positions of a model reach."""
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 512)
    table = next((module for name, module in model.named_modules() if name.endswith("position_embeddings")), None)
    if (padding := getattr(table, "padding_idx", None)) is not None:  # RoBERTa counts from behind the row of padding
        positions -= padding + 1
    return min(positions, int(tokenizer.model_max_length))
