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
        ("doc_stride", 64, "doc_stride = 64: applies only to questions about a text (task: squad), and docnames has none; leave it out"),
        (
            "max_answer_length",
            5,
            "max_answer_length = 5: applies only to questions about a text (task: squad), and docnames has none; leave it out",
        ),
        *[("max_misplaced_answers", value, f"max_misplaced_answers = {value}: must be 0 to 1") for value in (-1.0, 5.0, math.nan)],
    ],
)
def test_what_a_fine_tuned_task_cannot_have_is_refused(setting: str, value: Any, expected: str) -> None:
    assert f"finetune.names.{expected}" in message(lambda: config.build_run(tree(**{f"finetune__names__{setting}": value})))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"task": "docnames", "path": "x.csv"}, "path = 'x.csv': docnames is made from the documentation inside Python and reads no file"),
        ({"dev": "dev.csv", "dev_share": 0.2}, "dev_share = 0.2: nothing is split off where finetune.names.dev names a file to score on"),
        ({"eval_every": 0.5}, "eval_every = 0.5: only the last epoch is scored without keep_best or patience; set one of them"),
        ({"eval_every": 0.5, "search": {"lr": [1e-4, 3e-4]}}, "eval_every = 0.5: only the last epoch is scored"),
        ({"select_on": "dev"}, "select_on = dev: there is nothing to choose; set keep_best, patience or search, or leave it out"),
        ({"select_share": 0.2}, "select_share = 0.2: there is nothing to choose"),
    ],
)
def test_a_setting_of_a_task_that_does_nothing_beside_the_others_is_refused(settings: dict[str, Any], expected: str) -> None:
    task = {"task": "csv", "path": "x.csv", **settings}
    assert f"finetune.names.{expected}" in message(lambda: config.build_run(tree(finetune__names=task)))


@pytest.mark.parametrize("chooses", [{"keep_best": True}, {"patience": 1}, {"search": {"lr": [1e-4, 3e-4]}}])
def test_rows_to_choose_by_are_set_wherever_something_is_chosen(chooses: dict[str, Any]) -> None:
    task = {"task": "csv", "path": "x.csv", "select_on": "dev", **chooses, **({} if "search" in chooses else {"eval_every": 0.5})}
    assert config.build_run(tree(finetune__names=task)).finetune["names"].select_on == "dev"  # type: ignore[union-attr]


def test_a_linear_probe_refuses_a_seed_that_is_named_twice() -> None:
    assert f"linear_probe.sst.seeds = [1, 1]: {TWICE}" in message(
        lambda: config.build_run(byte_tree(linear_probe__sst={"path": "x", "seeds": [1, 1]}))
    )
