"""Settings of papers: those that they give, whole recipes, and behind what the user says."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from overnight.cli.task_keys import task_overrides, with_published
from overnight.config import BertRun, build_run, load
from overnight.config.published import NAMES, published_settings
from overnight.config.schema import Finetune
from overnight.errors import ConfigError

TASKS = get_args(get_type_hints(Finetune)["task"])
TREE: dict[str, Any] = {"name": "x", "phases": {"a": {"steps": 10, "global_batch_size": 32}}}


def _task(*words: str, name: str = "mnli", hidden_size: int = 768) -> Finetune:
    tree = {**TREE, "model": {"hidden_size": hidden_size, "num_heads": 2, "num_layers": 2}}
    run = build_run(tree)
    assert isinstance(run, BertRun)
    words = words if name == "docnames" else ("path=data", *words)
    for override in task_overrides(Finetune, name, with_published(run, name, words), known=False):
        load._override(tree, override)
    built = build_run(tree)
    assert isinstance(built, BertRun)
    return built.finetune[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", TASKS)
def test_every_published_setting_is_one_of_a_recipe(name: str, task: str) -> None:
    assert set(published_settings(name, task, 768)) and _task(f"published={name}", name=task).task == task


def test_bert_is_fine_tuned_as_devlin_et_al_write() -> None:
    glue, squad = _task("published=bert"), _task("published=bert", name="squad")
    assert (glue.epochs, glue.global_batch_size, glue.seq_len, glue.select_on, glue.search.lr) == (
        3,
        32,
        128,
        "dev",
        [5e-5, 4e-5, 3e-5, 2e-5],
    )
    assert (squad.epochs, squad.global_batch_size, squad.lr, squad.seq_len, squad.doc_stride) == (3, 32, 5e-5, 384, 128)
    assert len(_task("published=bert", "task=tokens", name="own").search.combinations) == 18
    assert _task("published=bert", "task=csv", name="own").select_on == "train"


@pytest.mark.parametrize(("width", "rate", "decay"), [(256, 3e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)])
def test_electra_has_a_rate_for_each_width_and_more_epochs_for_small_tasks(width: int, rate: float, decay: float) -> None:
    rte, sst2 = (_task("published=electra", name=name, hidden_size=width) for name in ("rte", "sst2"))
    assert (rte.lr, rte.layer_lr_decay, rte.weight_decay, rte.epochs, sst2.epochs) == (rate, decay, 0, 10, 3)


def test_what_is_given_goes_before_what_is_published(capsys: pytest.CaptureFixture[str]) -> None:
    task = _task("lr=1e-4", "epochs=1", "published=bert")
    assert (task.lr, task.epochs, task.search.combinations, task.global_batch_size) == (1e-4, 1, [], 32)
    assert capsys.readouterr().out == "mnli: published settings (bert): global_batch_size=32\n"
    assert task.select_on == "train", "there is nothing to choose"
    assert _task("lr=1e-4", "patience=2", "published=bert").select_on == "dev"
    assert _task("search={lr: [1e-3], draw: 1}", "published=bert").search.lr == [1e-3]
    assert _task("search.budget=1h", "published=bert").search.lr == [5e-5, 4e-5, 3e-5, 2e-5]
    with pytest.raises(ConfigError, match="published = 'gpt': is not one of bert, roberta, electra"):
        _task("published=gpt")
