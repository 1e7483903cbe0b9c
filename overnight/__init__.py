"""Pretrain a language model on your own text, overnight, on the GPUs you have."""

__version__ = "0.1.0"
