"""Embeddings of texts: hidden states of an encoder, one vector a text.

Shapes: n texts, N tokens of a flat batch, S sequences of it, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from overnight.batches.packing import moved
from overnight.engine.finite import finite_outputs
from overnight.errors import ConfigError, DataError
from overnight.finetune.encode import encode_examples
from overnight.finetune.predict import Trained
from overnight.models.bert import first_tokens
from overnight.state_files import is_text, kind_of
from overnight.tasks.examples import Example

Pooling = Literal["mean", "first"]
"""The mean of all tokens of a text, [CLS] and [SEP] among them, or its first token, [CLS]."""
Vectors = npt.NDArray[np.float32]


def check_embedding(model: Trained, pooling: str, layer: int) -> int:
    """Check how texts are to be embedded; returns the layer, counted from 0, the embedding table.

    Raises:
        ConfigError: naming what is allowed.
    """
    if pooling not in get_args(Pooling):
        raise ConfigError(f"pooling = {pooling!r}: must be one of {', '.join(get_args(Pooling))}")
    layers = len(model.network.encoder.layers)
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):  # of numpy, too
        raise ConfigError(f"layer = {layer!r}: must be a whole number")
    if not -layers - 1 <= layer <= layers:
        raise ConfigError(
            f"layer = {layer}: must be from 0, the embedding table, to {layers}, the last; -1 is the last, {-layers - 1} the table"
        )
    return layer % (layers + 1)


@torch.inference_mode()
def embed_texts(model: Trained, texts: Sequence[str], pooling: str, layer: int, normalize: bool, first: int = 1) -> Vectors:
    """Return the embeddings of texts, in order.

    Args:
        model: any trained encoder; it is in evaluation mode.
        texts: what is longer than the encoder reads is cut; an empty one is [CLS] and [SEP].
        pooling: a :data:`Pooling`.
        layer: hidden states behind which layer, as of :func:`check_embedding`.
        normalize: whether each vector is divided by its length.
        first: the number of the first of them, for the message.

    Returns:
        float32 (n, D).

    Raises:
        ConfigError: as of :func:`check_embedding`.
        DataError: naming a text that is none.
        NonFiniteError: when a number of a vector is none.
    """
    number = check_embedding(model, pooling, layer)
    for place, text in enumerate(texts, first):
        if not isinstance(text, str) or not is_text(text):
            raise DataError(f"text {place}: is {'not valid text' if isinstance(text, str) else kind_of(text)}; give strings")
    encoded = encode_examples(model.tokenizer, model.vocabulary, [Example("", text, None, None) for text in texts], model.longest)
    out = np.empty((len(texts), model.network.encoder.word.weight.shape[1]), np.float32)
    for index, batch in model.batches(encoded):
        depth = number if number < len(model.network.encoder.layers) else None  # behind the last one also the last norm
        hidden_ND = model.network.encoder(batch, model.dtype, depth=depth).float()
        if pooling == "first":
            vectors_SD = first_tokens(hidden_ND, batch)
        else:
            lengths = moved(torch.tensor(batch.lengths, device="cpu"), model.device)
            vectors_SD = torch.segment_reduce(hidden_ND, "mean", lengths=lengths, unsafe=True)
        if normalize:
            vectors_SD = torch.nn.functional.normalize(vectors_SD, dim=-1)
        out[index] = finite_outputs(vectors_SD.cpu().numpy()[: len(index)])
    return out
