"""The small tokenizer and the folder of real data, which the readers of tasks are tested with too."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overnight import config
from overnight.config import Run
from tests.tasks.conftest import data, tokenizer, vocabulary

__all__ = ["data", "tokenizer", "vocabulary"]


Task = Callable[..., Run]
SPEC = {"epochs": 2, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 24}


@pytest.fixture
def with_task(pretrained: Run, tmp_path: Path) -> Task:
    """Makes a copy of the pretrained run with one task named `mine`."""
    folder = tmp_path / "run"
    shutil.copytree(pretrained.run_dir, folder)

    def make(task: str, path: Path, **settings: Any) -> Run:
        tree = config.to_tree(pretrained)
        of_questions = {"doc_stride": 8} if task == "squad" else {}
        where = "" if task == "docnames" else str(path)
        tree["finetune"] = {"mine": {**SPEC, **of_questions, "task": task, "path": where, **settings}}
        for key in [key for key in tree["finetune"]["mine"] if "." in key]:
            part, _, name = key.partition(".")
            tree[part][name] = tree["finetune"]["mine"].pop(key)
        return dataclasses.replace(config.build_run(tree), out=str(folder))

    return make


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    folder = tmp_path / "classes"
    folder.mkdir()
    words = {
        "number": ["integer division", "float value", "complex number"],
        "text": ["string literal", "the text method", "format string"],
    }
    rows = [(f"{word} {i % 7}", label) for i in range(12) for label, texts in words.items() for word in texts]
    for split, part in (("train", rows[:40]), ("dev", rows[40:60]), ("test", rows[60:])):
        table = "".join(f"{i},{text},{label if split != 'test' else ''}\n" for i, (text, label) in enumerate(part))
        (folder / f"{split}.csv").write_text("id,text,label\n" + table)
    return folder
