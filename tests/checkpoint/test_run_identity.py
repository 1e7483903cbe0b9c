"""A finished run is made longer on purpose: it resumes from its last checkpoint, and only then."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from overnight import config
from overnight.checkpoint import reader
from overnight.checkpoint.run_identity import check_folder, claim_folder
from overnight.config import Run
from overnight.console import Line
from overnight.engine.pretrain import pretrain
from overnight.errors import ConfigError
from overnight.optim.schedules import learning_rate
from overnight.report.summary import summarize
from tests.conftest import CLOCK, modern_settings

Make = Callable[..., Run]
LONGER: dict[str, Any] = {"phases.long.steps": 9}
PLAIN = {"steps": 3, "global_batch_size": 8, "seq_len": 32}


def finish(run: Run, extend: bool = False) -> str:
    out = io.StringIO()
    pretrain(run, Line(out), extend)
    return out.getvalue()


def lines(run: Run, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in found if line["kind"] in kinds]


def newest(run: Run) -> Path:
    place = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert place is not None
    return place


def test_a_finished_run_goes_on_and_keeps_its_history(tiny: Make) -> None:
    short, longer = tiny(), tiny(**LONGER)
    finish(short)
    before, old = lines(short, "train", "eval"), (short.run_dir / "run.yaml").read_bytes()
    told = finish(longer, extend=True)
    assert newest(longer).name == "step-0000015" and lines(longer, "train", "eval")[: len(before)] == before
    assert (short.run_dir / "run.1.yaml").read_bytes() == old and config.load_run(str(short.run_dir / "run.yaml")) == longer
    (event,) = (line for line in lines(longer, "event") if line["event"] == "extended")
    assert event["global_step"] == 10 and event["was"] == "run.1.yaml" and event["message"] in told
    assert event["message"].startswith("extended: phase long has 9 steps instead of 4; the learning rate continues at ")
    # The schedule is that of a run of the new length, from the step at which it stands.
    rates = [line["lr"] for line in lines(longer, "train") if line["phase"] == "long"]
    phases = [run.phases["long"] for run in (short, longer)]
    assert rates == [learning_rate(phases[0], step) for step in range(4)] + [learning_rate(phases[1], step) for step in range(4, 9)]
    assert summarize(longer.run_dir)["phases"][1]["finished"] and "all phases are done" in finish(longer)


@pytest.mark.slow
def test_with_a_constant_rate_it_is_the_run_that_was_long_from_the_beginning(tiny: Make, tmp_path: Path) -> None:
    constant = {f"phases.{name}.optim.schedule": {"name": "constant", "warmup_ratio": 0.0} for name in ("short", "long")}
    short, longer, whole = tiny(**constant), tiny(**constant, **LONGER), tiny(**constant, **LONGER, out=str(tmp_path / "whole"))
    finish(short)
    finish(longer, extend=True)
    finish(whole)
    ours, theirs = (load_file(newest(run) / "model.safetensors") for run in (longer, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    assert lines(longer, "train") == lines(whole, "train")


@pytest.mark.slow
def test_a_phase_is_added_behind_the_others(tiny: Make) -> None:
    short = tiny()
    more = config.to_tree(short)["phases"]["long"] | {"steps": 3}
    longer = tiny(**{"phases.more": more, "phases.long.steps": 5})
    finish(short)
    finish(longer, extend=True)
    assert newest(longer).name == "step-0000014"
    (event,) = (line for line in lines(longer, "event") if line["event"] == "extended")
    assert "phase long has 5 steps instead of 4, phase more is added" in event["message"]


@pytest.mark.slow
def test_it_may_be_stopped_and_extended_again(tiny: Make) -> None:
    finish(tiny())
    again, third = tiny(**LONGER), tiny(**{"phases.long.steps": 12})
    claim_folder(again, extend=True)  # and killed there
    assert not summarize(again.run_dir)["finished"] and "continuing at step 4 of phase long" in finish(again)
    finish(third, extend=True)
    assert [line["was"] for line in lines(third, "event") if line["event"] == "extended"] == ["run.1.yaml", "run.2.yaml"]
    finish(third, extend=True)  # the same command again is no extension
    assert not (third.run_dir / "run.3.yaml").exists() and newest(third).name == "step-0000018"


def test_a_kill_between_the_two_files_keeps_the_old_settings_once(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from overnight.checkpoint import run_identity as folder

    short, longer, real = tiny(), tiny(**LONGER), folder.write_whole
    claim_folder(short)

    def killed(path: Path, parts: Any) -> None:
        if path.name == "run.yaml":
            raise KeyboardInterrupt
        real(path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            claim_folder(longer, extend=True)
    claim_folder(longer, extend=True)
    assert sorted(path.name for path in short.run_dir.glob("*.yaml")) == ["run.1.yaml", "run.yaml"]


def test_without_the_option_the_refusal_names_it(tiny: Make) -> None:
    claim_folder(tiny())
    with pytest.raises(
        ConfigError, match=r"phases\.long\.steps: 4 there, 9 here\nTo resume .* add --extend\. Or give this one its own folder"
    ):
        check_folder(tiny(**LONGER))
    with pytest.raises(ConfigError, match=r"seed: 0 there, 1 here\nGive this one its own folder") as other:
        check_folder(tiny(seed=1))
    assert "--extend" not in str(other.value)


@pytest.mark.parametrize("extend", [False, True])
def test_a_path_with_a_slash_more_is_of_the_same_run(tiny: Make, extend: bool) -> None:
    claim_folder(tiny(**{"data.paths": ["/txt"]}))
    claim_folder(tiny(**{"data.paths": ["//txt/"]}), extend)
    assert [path.name for path in tiny().run_dir.glob("*.yaml")] == ["run.yaml"]


def test_a_refusal_says_where_nothing_is_lost_with_the_other_run(tiny: Make) -> None:
    claim_folder(tiny())
    with pytest.raises(ConfigError, match=r"or delete that one, which has no checkpoint yet$"):
        check_folder(tiny(seed=1))
    (tiny().run_dir / "checkpoints" / "step-0000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"or delete that one$"):
        check_folder(tiny(seed=1))


@pytest.mark.parametrize(
    ("theirs", "ours", "said"), [(1, 2, "phases.long: (absent) there, given here"), (2, 1, "phases.long: given there, (absent) here")]
)
def test_a_phase_that_only_one_run_has_is_named_in_a_few_words(theirs: int, ours: int, said: str, tiny: Make) -> None:
    phases = config.to_tree(tiny())["phases"]
    there, here = (tiny(phases=dict(list(phases.items())[:count])) for count in (theirs, ours))
    claim_folder(there)
    with pytest.raises(ConfigError) as error:
        check_folder(here)
    assert f"holds another run:\n  {said}\n" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phases.long.steps": 3}, "phases.long.steps: 4 there, 3 here"),
        ({"phases.short.steps": 7}, "phases.short.steps: 6 there, 7 here"),
        ({**LONGER, "phases.long.optim.lr": 0.02}, "phases.long.optim.lr: 0.01 there, 0.02 here"),
        ({**LONGER, "model.hidden_size": 64}, "model.hidden_size: 32 there, 64 here"),
        ({**LONGER, "seed": 1}, "seed: 0 there, 1 here"),
        ({**LONGER, "precision": "bf16"}, "precision: fp32 there, bf16 here"),
    ],
)
def test_anything_but_more_training_is_refused(tiny: Make, changes: dict[str, Any], said: str) -> None:
    claim_folder(tiny())
    with pytest.raises(ConfigError, match="cannot be extended to this run; only its last phase may get more steps") as error:
        claim_folder(tiny(**changes), extend=True)
    assert str(error.value).endswith(f"\n  {said}")
    assert not list(tiny().run_dir.glob("run.*.yaml"))


@pytest.mark.parametrize(("continuing", "steps", "added"), [("long", 9, {}), ("third", 4, {"continues": True})])
def test_more_steps_of_a_schedule_by_which_a_phase_was_trained_are_refused_in_one_line(
    tiny: Make, continuing: str, steps: int, added: dict[str, Any]
) -> None:
    def run(steps: int = 4, **more: Any) -> Run:
        tree = config.to_tree(tiny(**{"phases.long.steps": steps}))
        if continuing == "long":
            tree["phases"]["long"] = {k: v for k, v in tree["phases"]["long"].items() if k != "optim"} | {"continues": True}
        return config.build_run({**tree, "phases": {**tree["phases"], **more}})

    claim_folder(run())
    before = "short" if continuing == "long" else "long"
    said = f"\n  phases.{continuing} continues {before}: they share one schedule over the steps of both, by which {before} was trained; add a phase"
    with pytest.raises(ConfigError, match=f"{re.escape(said)} with an `optim` of its own$"):
        claim_folder(run(steps, **({"third": PLAIN | added} if added else {})), extend=True)
    claim_folder(run(third=PLAIN), extend=True)


BYTES = {"model": {"kind": "mlstm", "hidden_size": 16}, "data": {"paths": ["x"], "tokenizer": "bytes", "label": "stars"}}


@pytest.mark.parametrize(
    ("settings", "plain", "head", "without"),
    [
        (modern_settings(), PLAIN | {"nsp": False}, {"nsp": True}, "false"),
        (modern_settings(), PLAIN | {"nsp": False}, {"token_matching": 0.5}, "0"),
        (BYTES, PLAIN, {"label_weight": 0.5}, "0"),
    ],
)
def test_an_added_phase_that_needs_another_head_is_refused_before_the_folder_is_claimed(
    tmp_path: Path, settings: dict[str, Any], plain: dict[str, Any], head: dict[str, Any], without: str
) -> None:
    def run(**more: dict[str, Any]) -> Run:
        model, data = settings["model"], settings.get("data", {"paths": ["x"]})
        return config.build_run({"name": "x", "out": str(tmp_path), "model": model, "data": data, "phases": {"first": plain, **more}})

    claim_folder(run())
    before, (key,) = (tmp_path / "run.yaml").read_bytes(), head
    with pytest.raises(
        ConfigError, match=rf"\n  phases\.third\.{key}: the network in the checkpoint has no head for it, .*; set it to {without}$"
    ):
        claim_folder(run(second=plain, third=plain | head), extend=True)
    assert (tmp_path / "run.yaml").read_bytes() == before and not (tmp_path / "run.1.yaml").exists()
    claim_folder(run(second=plain), extend=True)


@pytest.mark.parametrize("settings", [{}, modern_settings() | {"phases.long.nsp": True}])
def test_an_added_phase_may_need_a_head_that_is_there(tiny: Make, settings: dict[str, Any]) -> None:
    changes = {"phases.short.nsp": False, "phases.long.nsp": False, **settings}
    claim_folder(tiny(**changes))
    claim_folder(tiny(**changes, **{"phases.more": PLAIN | {"nsp": True}}), extend=True)


def test_a_phase_between_or_a_missing_one_is_refused(tiny: Make) -> None:
    run = tiny()
    claim_folder(run)
    tree = config.to_tree(run)
    for phases in (["long", "short"], ["short"]):
        other = config.build_run({**tree, "phases": {name: tree["phases"][name] for name in phases}})
        with pytest.raises(ConfigError, match=f"phases: short, long there, {', '.join(phases)} here"):
            check_folder(other, extend=True)
        with pytest.raises(ConfigError, match="holds another run") as without:
            check_folder(other)
        assert "--extend" not in str(without.value)


def test_a_new_folder_takes_the_option_too(tiny: Make) -> None:
    claim_folder(tiny(), extend=True)
    assert (tiny().run_dir / "run.yaml").exists()
