"""The small tokenizer and the folder of real data, which the readers of tasks are tested with too."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from overnight import config
from overnight.config import Run
from tests.tasks.conftest import data, tokenizer, vocabulary

__all__ = ["data", "tokenizer", "vocabulary"]


Task = Callable[..., Run]
SPEC = {"epochs": 2, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 24}


def task_run(pretrained: Run, folder: Path, task: str, path: Path, **settings: Any) -> Run:
    """A pretrained run of which a copy lies in a folder, with one task named `mine`."""
    tree = config.to_tree(pretrained)
    of_questions = {"doc_stride": 8} if task == "squad" else {}
    where = "" if task == "docnames" else str(path)
    tree["finetune"] = {"mine": {**SPEC, **of_questions, "task": task, "path": where, **settings}}
    for key in [key for key in tree["finetune"]["mine"] if "." in key]:
        part, _, name = key.partition(".")
        tree[part][name] = tree["finetune"]["mine"].pop(key)
    return dataclasses.replace(config.build_run(tree), out=str(folder))


@pytest.fixture
def with_task(pretrained: Run, tmp_path: Path) -> Task:
    """Makes a copy of the pretrained run with one task named `mine`."""
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    return partial(task_run, pretrained, tmp_path / "run")


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "classes")


def write_classes(folder: Path) -> Path:
    """A task of two classes in three tables."""
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


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """SQuAD's layout; one paragraph is longer than a window, and one answer does not stand where it should."""
    folder = tmp_path / "squad"
    folder.mkdir()

    def article(title: str, count: int) -> dict[str, Any]:
        paragraphs = []
        for i in range(count):
            context = f"The object {title} {i} has an attribute. " + "Every class defines a method. " * 6 + f"The value is number {i}."
            asked = [("What is the value?", f"number {i}"), ("What has it?", "an attribute")]
            qas = [
                {"id": f"{title}-{i}-{k}", "question": q, "answers": [{"text": a, "answer_start": context.index(a)}]}
                for k, (q, a) in enumerate(asked)
            ]
            paragraphs.append({"context": context, "qas": qas})
        return {"title": title, "paragraphs": paragraphs}

    for name, articles in (("train", [article("a", 6)]), ("dev", [article("b", 3)])):
        (folder / f"{name}-v1.1.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    return folder
