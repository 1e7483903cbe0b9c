"""An override of the command line changes the key that it names, and no other; what is wrong is said as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from overnight import config
from overnight.config import Optim
from tests.recipe import message


def test_an_override_changes_one_of_several_phases_that_an_alias_of_yaml_makes_alike(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {short: &same {steps: 100, global_batch_size: 64, optim: {name: lamb}}, long: *same}\n")
    run = config.load_run(str(path), ["phases.short.steps=7", "phases.long.optim.lr=0.5"])
    assert [phase.steps for phase in run.phases.values()] == [7, 100]
    assert [phase.optim.lr for phase in run.phases.values()] == [Optim.lr, 0.5]


@pytest.mark.parametrize("override", ["phases.1.steps=7", "phases.long.steps=7"])
def test_a_name_that_yaml_takes_for_a_number_is_refused_as_such_beside_an_override(tmp_path: Path, override: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {1: {steps: 3, global_batch_size: 4}}\n")
    assert "phases.1: YAML does not read 1 as a name" in message(lambda: config.load_run(str(path), [override]))


def test_a_task_of_another_network_may_be_added_with_that_network(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\ndata: {tokenizer: bytes}\nmodel: {kind: mlstm}\nphases: {a: {steps: 3, global_batch_size: 4}}\n")
    run = config.load_run(str(path), ["model.kind=bert", "data.tokenizer=wordpiece", "finetune.names.task=docnames"])
    assert isinstance(run, config.BertRun) and list(run.finetune) == ["names"]


def test_null_takes_a_phase_or_task_out_and_a_name_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {a: &same {steps: 3, global_batch_size: 4}, b: *same}\nfinetune: {names: {task: docnames}}\n")
    run = config.load_run(str(path), ["phases.a=null", "finetune.names=null", "phases.b.steps=5"])
    assert isinstance(run, config.BertRun) and list(run.phases) == ["b"] and not run.finetune and run.phases["b"].steps == 5
    said = message(lambda: config.load_run(str(path), ["phases.c=null"]))
    assert "phases.c: the recipe has no phase 'c'" in said and "It has: a, b" in said
    assert "phases = {}" in message(lambda: config.load_run(str(path), ["phases.a=null", "phases.b=null"]))


@pytest.mark.parametrize("tasks", ["", "finetune:", "finetune: {names: {task: docnames}}"])
def test_null_takes_all_tasks_out_and_new_ones_may_be_added(tasks: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\nphases: {{a: {{steps: 3, global_batch_size: 4}}}}\n{tasks}\n")
    for added in ([], ["finetune.mine.task=docnames"]):
        run = config.load_run(str(path), ["finetune=null", *added])
        assert isinstance(run, config.BertRun) and list(run.finetune) == ["mine"] * len(added)
    assert "phases = {}: name at least one phase" in message(lambda: config.load_run(str(path), ["phases=null"]))


def test_null_takes_a_budget_out_and_what_is_none_is_refused_with_that(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    schedule = "optim: {name: lamb, schedule: {name: wsd, warmup_ratio: 0.1, stable_ratio: 0.5}}"
    task = "finetune: {names: {task: docnames, search: {lr: [1e-4], budget: 30m}}}"
    path.write_text(f"name: x\nbudget: 8h\nphases: {{a: {{steps: 3, global_batch_size: 4, {schedule}}}}}\n{task}\n")
    run = config.load_run(str(path), ["budget=null", "finetune.names.search.budget=null"])
    assert isinstance(run, config.BertRun) and (run.budget, run.finetune["names"].search.budget) == ("", "")
    assert "`--budget=null` trains the steps of the recipe" in message(lambda: config.load_run(str(path), ["budget=none"]))


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("optim.lr", "phases.NAME.optim"),
        ("lr", "phases.NAME.optim.lr"),
        ("steps", "phases.NAME.steps"),
        ("hidden_size", "model.hidden_size"),
        ("vocab_size", "data.vocab_size"),
        ("epochs", "finetune.NAME.epochs"),
    ],
)
def test_a_key_without_its_section_is_refused_with_its_place(tmp_path: Path, key: str, place: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {a: {steps: 3, global_batch_size: 4}}\n")
    assert f"unknown key, did you mean {place!r}? Allowed: name, out" in message(lambda: config.load_run(str(path), [f"{key}=5"]))


def test_null_empties_a_text_that_may_be_empty_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: x\ninit: runs/a\nlogging: {wandb_project: mine}\nevaluation: {blimp: null}\nphases: {a: {steps: 3, global_batch_size: 4}}\n"
    )
    run = config.load_run(str(path), ["init=null", "logging.wandb_project=null"])
    assert isinstance(run, config.BertRun) and (run.init, run.logging.wandb_project, run.evaluation.blimp) == ("", "", "")
    assert config.load_run(str(path), ["name='null'"]).name == "null"
    for key in ("name", "out", "data.dir"):
        said = message(lambda key=key: config.load_run(str(path), [f"{key}=null"]))
        assert f"{key} = null: cannot be empty; leave it out, or put the word in quotes" in said
    assert "data.paths = null: cannot be empty; leave it out" in message(lambda: config.load_run(str(path), ["data.paths=null"]))


@pytest.mark.parametrize(
    ("value", "said"),
    [("010", "010: is a number to base 8 in YAML"), ("1:30", "1:30: is a number to base 60 in YAML"), ("1e-3", "valid integer")],
)
def test_a_number_that_yaml_reads_as_another_one_is_refused(tmp_path: Path, value: str, said: str) -> None:
    path = tmp_path / "recipe.yaml"
    text = "name: x\nphases:\n  a: {steps: 3000, global_batch_size: 4}\n"
    path.write_text(text)
    assert said in message(lambda: config.load_run(str(path), [f"phases.a.steps={value}"]))
    path.write_text(text.replace("3000", value))
    assert said in message(lambda: config.load_run(str(path)))


def test_a_whole_number_may_be_written_as_a_power_of_ten(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {a: {steps: 2e3, global_batch_size: 4}}\n")
    assert config.load_run(str(path)).phases["a"].steps == 2000
    assert config.load_run(str(path), ["phases.a.steps=1e3"]).phases["a"].steps == 1000


@pytest.mark.parametrize(("key", "value"), [("phases.a.optim.betas", "0.9,0.98"), ("finetune.names.seeds", "0,1,2")])
def test_a_list_without_brackets_is_refused_with_how_it_is_written(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {a: {steps: 3, global_batch_size: 4}}\nfinetune: {names: {task: docnames}}\n")
    assert f"a list is written in brackets: {key}=[{value}]" in message(lambda: config.load_run(str(path), [f"{key}={value}"]))
