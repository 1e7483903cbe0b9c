"""What `overnight bench infer` reads: sentences of real text, texts of so many tokens, and a classifier of random weights that knows their words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from overnight.bench.corpus_text import texts
from overnight.bench.sizes import VOCABULARY
from overnight.config import EncoderConfig
from overnight.corpus.clean import clean
from overnight.corpus.sentences import sentences
from overnight.corpus.tokenizer import SPECIALS, save_tokenizer
from overnight.errors import ConfigError
from overnight.interop.huggingface import export
from overnight.models.heads import Classifier

_SOURCE, _BYTES = "builtin:python-docs", 200_000
_LABELS = ("one", "two", "three")


def natural_texts() -> list[str]:
    """Return sentences of the documentation of Python, in an order without the documents'."""
    found = [sentence for text in texts(_SOURCE, _BYTES) for sentence in sentences(clean(text))]
    return [found[place] for place in torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()]


def _words(natural: Sequence[str]) -> list[str]:
    return [word for text in natural for word in text.lower().split() if word.isascii() and word.isalpha()]


def texts_of_length(natural: Sequence[str], length: int, count: int) -> list[str]:
    """Return texts of exactly so many tokens each, [CLS] and [SEP] among them, one word a token."""
    words, each = _words(natural), length - 2
    return [" ".join(words[(at * each + i) % len(words)] for i in range(each)) for at in range(count)]


def write_classifier(folder: Path, model: EncoderConfig, natural: Sequence[str], onnx: bool) -> None:
    """Write a classifier of random weights as a folder of Hugging Face; its vocabulary is the words of the texts, and all letters.

    Args:
        onnx: also `model.onnx`, where the extra is installed.
    """
    letters = sorted({letter for text in natural for letter in text.lower()} - {" "})
    known = [word for word, _ in Counter(_words(natural)).most_common()]
    tokens = list(dict.fromkeys([*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *known]))
    tokens += [f"[unused{i}]" for i in range(VOCABULARY - len(tokens))]
    torch.manual_seed(0)
    network = Classifier(model, len(tokens), len(_LABELS))
    with torch.no_grad():
        network.head.weight.mul_(10.0)  # so that logits differ from text to text, and a difference shows
    save_tokenizer(folder.with_name(f"{folder.name}-tokenizer"), tokens, True)
    export(
        network.state_dict(),
        "classification",
        model,
        folder.with_name(f"{folder.name}-tokenizer"),
        folder,
        _LABELS,
        more=_onnx() if onnx else None,
    )


def _onnx() -> Callable[[Path], None] | None:
    from overnight.interop.onnx import check_onnx, write_onnx

    try:
        check_onnx()
    except ConfigError:
        return None
    return write_onnx
