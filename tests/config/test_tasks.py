"""What a recipe may not say of its tasks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from overnight import config
from tests.config.test_validate import byte_tree
from tests.recipe import message, tree

TWICE = "names a seed twice, which gives the same result again; name each once"


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("seeds", [0, 1, 0], f"seeds = [0, 1, 0]: {TWICE}"),
        ("dev_share", 0.2, "dev_share = 0.2: only csv and tokens split off a share that is yours to choose; docnames has its own"),
        ("doc_stride", 64, "doc_stride = 64: is of questions about a text (task: squad), and docnames has none; leave it out"),
        ("max_answer_length", 5, "max_answer_length = 5: is of questions about a text (task: squad), and docnames has none; leave it out"),
        *[("max_misplaced_answers", value, f"max_misplaced_answers = {value}: must be 0 to 1") for value in (-1.0, 5.0, math.nan)],
    ],
)
def test_what_a_fine_tuned_task_cannot_have_is_refused(setting: str, value: Any, expected: str) -> None:
    assert f"finetune.names.{expected}" in message(lambda: config.build_run(tree(**{f"finetune__names__{setting}": value})))


def test_a_linear_probe_refuses_a_seed_that_is_named_twice() -> None:
    assert f"linear_probe.sst.seeds = [1, 1]: {TWICE}" in message(
        lambda: config.build_run(byte_tree(linear_probe__sst={"path": "x", "seeds": [1, 1]}))
    )
