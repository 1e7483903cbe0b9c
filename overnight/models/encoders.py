"""The encoder and the pretraining network that a recipe names."""

from __future__ import annotations

from overnight.config import BertConfig, EncoderConfig
from overnight.models.bert import BertForPretraining, Encoder
from overnight.models.modernbert import ModernBertForMaskedLM, ModernEncoder

MaskedLM = BertForPretraining | ModernBertForMaskedLM


def encoder(model: EncoderConfig, vocab_size: int) -> Encoder | ModernEncoder:
    """Return an untrained encoder."""
    return Encoder(model, vocab_size) if isinstance(model, BertConfig) else ModernEncoder(model, vocab_size)


def masked_lm(model: EncoderConfig, vocab_size: int, nsp: bool = False, matching: bool = False) -> MaskedLM:
    """Return an untrained encoder with its pretraining heads.

    Args:
        nsp: whether ModernBERT has the head for next-sentence prediction, which BERT always has.
        matching: whether ModernBERT has the head for token matching.
    """
    return (
        BertForPretraining(model, vocab_size) if isinstance(model, BertConfig) else ModernBertForMaskedLM(model, vocab_size, nsp, matching)
    )
