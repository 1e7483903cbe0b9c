"""The small tokenizer and the folder of real data, which the readers of tasks are tested with too."""

from tests.tasks.conftest import data, tokenizer, vocabulary

__all__ = ["data", "tokenizer", "vocabulary"]
