"""A checkpoint of another network or vocabulary is refused: what it lacks would begin at random without a word."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from overnight.errors import DataError
from tests.finetune.conftest import Task
from tests.finetune.test_finetune import lines, tune


@pytest.mark.parametrize(
    ("change", "named"), [({"num_layers": 2}, "encoder.layers.1.*absent there"), ({"hidden_size": 48}, "encoder.word")]
)
def test_a_checkpoint_of_another_network_is_refused_and_never_filled_up_at_random(
    change: dict[str, Any], named: str, with_task: Task, classes: Path
) -> None:
    run = with_task("csv", classes)
    other = dataclasses.replace(run, model=dataclasses.replace(run.model, **change))  # type: ignore[type-var]
    with pytest.raises(DataError, match=rf"step-0000010: is of another network or vocabulary than .*run.yaml.*{named}"):
        tune(other)
    assert lines(run) == []


def test_a_checkpoint_of_another_vocabulary_is_refused(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes)
    tokens = (run.run_dir / "corpus" / "vocab.txt").read_text().splitlines()
    for path in (run.run_dir / "corpus" / "vocab.txt", run.run_dir / "corpus" / "tokenizer.json"):
        path.write_text(path.read_text().replace(tokens[-1], "zzzz"))
    with pytest.raises(DataError, match=r"are another vocabulary .* than .*checkpoints was trained with"):
        tune(run)
    assert lines(run) == []
