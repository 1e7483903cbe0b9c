"""The candidates of `overnight bench infer`, each from the same folder: texts to logits, and texts to answers as its users call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overnight.errors import UserError
from overnight.finetune.encode import encode_examples
from overnight.inference.model import load
from overnight.tasks.examples import Example


@dataclass(frozen=True)
class Candidate:
    """A classifier, ready to answer."""

    name: str
    answer: Callable[[list[str]], object]
    """Texts to labels with probabilities, from the text on."""
    logits: Callable[[list[str]], np.ndarray]
    """Texts to (n, C)."""


def ours(folder: Path, precision: str) -> Candidate:
    """Return `overnight.load(folder).predict`."""
    model = load(folder, precision=precision, device="cpu", threads=torch.get_num_threads())
    trained = model.trained

    def logits(texts: list[str]) -> np.ndarray:
        examples = [Example("", text, None, None) for text in texts]
        return np.stack(trained.outputs(encode_examples(trained.tokenizer, trained.vocabulary, examples, trained.longest)))

    return Candidate(f"overnight {precision}", model.predict, logits)


def pipeline(folder: Path) -> Candidate:
    """Return transformers' pipeline, given all texts of a call as one batch, of several hundred in batches of 32.

    Raises:
        UserError: where transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            "--peer transformers needs the extra `transformers`: pip install 'overnight[transformers]', or --peer none"
        ) from None
    transformers.logging.disable_progress_bar()
    pipe = transformers.pipeline("text-classification", str(folder), device="cpu", top_k=None)

    def answer(texts: list[str]) -> object:
        return pipe(texts, batch_size=min(len(texts), 32), truncation=True)

    @torch.no_grad()
    def logits(texts: list[str]) -> np.ndarray:
        return pipe.model(**_padded(pipe.tokenizer, texts, "pt")).logits.float().numpy()

    return Candidate("transformers", answer, logits)


def onnxruntime(folder: Path) -> Candidate | None:
    """Return a session of onnxruntime over `model.onnx`, in batches as of :func:`pipeline`; None where there is no such file."""
    path = folder / "model.onnx"
    if not path.is_file():
        return None
    import onnxruntime as runtime
    import transformers

    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def logits(texts: list[str]) -> np.ndarray:
        parts = [texts[at : at + 32] for at in range(0, len(texts), 32)]
        return np.concatenate([session.run(None, dict(_padded(tokenizer, part, "np")))[0] for part in parts])

    def answer(texts: list[str]) -> list[Any]:
        found = np.exp(logits(texts))
        return (found / found.sum(-1, keepdims=True)).tolist()

    return Candidate("onnxruntime", answer, logits)


def _padded(tokenizer: Any, texts: list[str], kind: str) -> Any:
    return tokenizer(texts, padding=True, truncation=True, return_tensors=kind)
