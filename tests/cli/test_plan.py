"""`overnight plan` tells what training will do, from the same functions, for every shipped recipe and at once."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight import config
from overnight.batches.batch_size import batch_size, sequences_before
from overnight.batches.lengths import expected_lengths
from overnight.batches.matching import share_of_pairs
from overnight.cli.ascii_plot import Panel, Stretch, draw
from overnight.cli.main import main
from overnight.cli.plan import make_plan, plan_text
from overnight.config import BertPhase, BertRun, Run
from overnight.models.bert import BertForPretraining
from overnight.optim.groups import build_optimizer
from overnight.optim.schedules import learning_rate, peak_lr
from tests.conftest import ROOT, modern_settings
from tests.processes import Process

Make = Callable[..., Run]
GROWING = {"phases.short.batch_warmup": {"initial_batch_size": 2, "steps": 5}}


@pytest.mark.parametrize("name", sorted(config.recipes()))
def test_the_plan_of_every_shipped_recipe_is_what_training_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where nothing is that a recipe has made
    run = config.load_run(name, ["data.dir=nowhere"])
    plan = make_plan(run)
    assert not plan.prepared and plan.vocabulary == (run.data.vocab_size if isinstance(run, BertRun) else 256)
    assert sum(part.parameters for part in plan.parts) == plan.parameters
    for told, (name, phase) in zip(plan.phases, run.phases.items(), strict=True):
        assert (told.name, told.steps, told.peak_lr, told.epochs) == (name, phase.steps, peak_lr(phase), None)
        pairs = sum(share_of_pairs(phase, at) * batch_size(phase, at) for at in range(phase.steps)) if isinstance(phase, BertPhase) else 0.0
        more = expected_lengths(phase, pairs=True).mean - expected_lengths(phase).mean
        assert told.sequences == sequences_before(phase, phase.steps)
        assert told.tokens == pytest.approx(told.sequences * expected_lengths(phase).mean + pairs * more)
        assert told.at[0] == 0 and told.at[-1] == phase.steps - 1 and len(set(told.at)) == len(told.at) == min(1000, phase.steps)
        assert told.lr == [learning_rate(phase, step) for step in told.at] and told.batch == [batch_size(phase, step) for step in told.at]
        assert sum(group.parameters for group in told.groups) == plan.parameters
    text = plan_text(plan)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["parameters"] == plan.parameters


def test_the_documented_plan_is_what_the_command_prints() -> None:
    told = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("```\n")[1].splitlines()
    printed = plan_text(make_plan(config.load_run("bert-large-lans", ["data.dir=nowhere"]))).splitlines()
    at = [printed.index(line) for line in told if line and line != "..." and printed.count(line) == 1]
    assert at == sorted(at) and len(at) > 30 and set(told) - {"..."} <= set(printed)


def test_the_parameters_are_those_of_the_published_models() -> None:
    # 30,522 pieces; the table's 6 more rows, and their biases, only fill it up to a multiple of 64.
    counts = {name: make_plan(config.load_run(name, ["data.dir=nowhere"])).parameters for name in ("bert-base", "bert-large-lamb")}
    assert counts == {"bert-base": 110_106_428 + 6 * 769, "bert-large-lamb": 336_226_108 + 6 * 1025}


@pytest.mark.parametrize("name", ["lamb", "lans", "lars", "adamw", "muon"])
def test_the_groups_are_those_of_the_optimizer(name: str, tiny: Make) -> None:
    run = tiny(**{"phases.short.optim": {"name": name}, "phases.long.optim": {"name": name}})
    plan = make_plan(run)
    network = BertForPretraining(run.model, plan.vocabulary)
    shapes = {name: list(p.shape) for name, p in network.named_parameters()}
    theirs = build_optimizer(network, run.phases["short"].optim).param_groups
    for told, group in zip(plan.phases[0].groups, theirs, strict=True):
        assert list(told.tensors) == group["param_names"] and told.weight_decay == group["weight_decay"]
        assert told.tensors == {name: shapes[name] for name in told.tensors}
        assert (told.trust_ratio, told.muon) == (group.get("trust_ratio"), group.get("muon"))
        assert told.parameters == sum(p.numel() for p in group["params"])


def test_a_prepared_corpus_gives_the_vocabulary_and_the_epochs(tiny: Make, pretrained: Run) -> None:
    plan = make_plan(tiny())
    assert plan.prepared and plan.vocabulary == 600
    # The log of a run of the same recipe tells the examples of an epoch; this corpus is one shard, so the estimate is exact.
    from overnight.console import Line
    from overnight.engine.training_run import TrainingRun

    work = TrainingRun(tiny(), Line())
    for number, phase in enumerate(plan.phases):
        size = work.workload.samples(work.run.phases[phase.name], number, "train").epoch_size()
        assert len(work.workload.shards["train"]) == 1 and phase.epochs == pytest.approx(phase.sequences / size)
    assert f"about {plan.phases[0].epochs:.2f} epochs" in plan_text(plan)


def test_a_batch_that_grows_is_planned_drawn_and_counted(tiny: Make) -> None:
    run = tiny(**GROWING)
    phase = make_plan(run).phases[0]
    assert phase.batch == [batch_size(run.phases["short"], step) for step in range(6)] == [2, 2, 4, 4, 6, 8]
    assert phase.sequences == [*accumulate(phase.batch)][-1]
    text = " ".join(plan_text(make_plan(run)).split())
    assert "2 to 8 sequences (2 micro-batches of 4) of up to 32 tokens; the batch grows over 5 steps" in text
    assert "8 sequences (micro-batch measured when the phase starts) of" in plan_text(
        make_plan(tiny(**{"phases.short.micro_batch_size": 0}))
    )
    assert "batch (sequences)" in text
    assert "batch (sequences)" not in plan_text(make_plan(tiny()))


def test_rules_restarts_and_schedules_are_told_as_they_come_out(tiny: Make) -> None:
    scaling = {"rule": "lamb_untuned", "base_batch_size": 2}
    optim = {"name": "lamb", "lr": 0.01, "scaling": scaling, "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.2}}
    text = plan_text(make_plan(tiny(**{"phases.short.optim": optim, "phases.short.steps": 100})))
    line = "peak 0.02, by the rule lamb_untuned from 0.01 at batch 2; wsd over 100 steps, warm-up 40, at the peak 20, power 1"
    assert line in " ".join(text.split())
    assert "kept from short; their step count starts over" in text and text.count("moments    reset") == 1
    # What sits below each phase: its name, steps, peak, batch and moments.
    tail = text.splitlines()[-7:-2]
    assert [line.split() for line in tail] == [
        ["short", "long"],
        ["100", "steps", "4", "steps"],
        ["peak", "0.02", "peak", "0.01"],
        ["batch", "8", "batch", "8"],
        ["moments", "reset", "moments", "kept"],
    ]


def test_the_command_prints_text_or_one_json_object_and_trains_nothing(
    tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(config.run_yaml(tiny()))
    before = set(tmp_path.rglob("*"))
    assert main(["plan", str(path), "--phases.short.optim.lr=0.5"]) == 0
    text = capsys.readouterr().out
    assert "peak 0.5" in text and "encoder.layers.0.qkv.weight" not in text and "does not exist" not in text
    assert main(["plan", str(path), "--data.paths=absent/texts", f"--data.dir={tmp_path / 'new'}"]) == 0
    assert capsys.readouterr().out.startswith("note: absent/texts does not exist; correct data.paths\n")
    assert main(["plan", str(path), "--tensors"]) == 0
    assert "encoder.layers.0.qkv.weight" in capsys.readouterr().out
    assert main(["plan", str(path), "--json"]) == 0
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [phase["name"] for phase in tree["phases"]] == ["short", "long"]
    assert main(["plan", str(path), "--tensor"]) == 2 and main(["plan", "--help"]) == 0
    assert "--tensors" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before


def test_the_parts_of_modernbert_are_counted_and_named(tiny: Make) -> None:
    plan = make_plan(tiny(**modern_settings()))
    width, inner, rows = 32, 64, 640
    assert {part.name: part.parameters for part in plan.parts} == {
        "word embedding": rows * width,
        "embedding norm": width,
        "attention": 2 * 4 * width * width,
        "feed-forward": 2 * 3 * width * inner,
        "norms": 3 * width,  # the attention of the first layer has none
        "final norm": width,
        "masked-LM head": width * width + width + rows,
    }
    assert list(plan.parts)[-2].name == "final norm"
    times = {part.name: part.times for part in plan.parts}
    assert times["attention"] == times["feed-forward"] == 2 and times["norms"] == 1  # not alike in all layers
    text = plan_text(plan)
    assert "vocabulary 600 as prepared" in text
    assert "ModernBERT, 2 layers, hidden size 32, 2 attention heads" in text and "also the decoder of the masked-LM head" in text
    assert all(group.parameters for group in plan.phases[0].groups)


def largest() -> None:
    """Plan BERT-large, which is 1.3 GB of fp32; the plan of it needs a fifth of that beside what torch takes."""

    def most() -> int:
        # Not ru_maxrss: a child begins with its parent's.
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    before = most()
    main(["plan", "bert-large-lans", "--data.dir=nowhere"])
    sys.exit(most() > before + 500_000)


def test_the_plan_of_the_largest_recipe_fills_no_network() -> None:
    with Process(largest) as process:
        assert process.end()[0] == 0


def stretch(steps: int, label: str = "x") -> Stretch:
    return Stretch(steps, (label,))


def test_a_curve_rises_where_its_values_do() -> None:
    text = draw([stretch(8)], [Panel("up", [[0, 1, 2, 3, 4, 5, 6, 8]], 8, ("8", "4"), 2)], width=8)
    assert text.splitlines() == ["up", "8 ┤     ▂▄█", "4 ┤ ▂▄▆████", "0 └┬───────", "   x"]


@pytest.mark.parametrize("room", [120, 80, 60, 45])
def test_the_curves_are_as_broad_as_the_terminal_or_left_out(room: int) -> None:
    plan = make_plan(config.load_run("bert-large-lans", ["data.dir=nowhere"]))
    axis = next(line for line in plan_text(plan, room=room).splitlines() if "└" in line)
    assert len(axis) == min(room, 82)
    assert "└" not in plan_text(plan, room=39)
    assert draw([stretch(8, "a" * 50)], [Panel("up", [[0, 1]], 1, ("1", ""), 2)], room=50) == ""


def test_a_value_above_0_is_seen() -> None:
    rows = draw([stretch(4)], [Panel("", [[0, 1e-9, 0, 1]], 1.0, ("1", ""), 2)], width=4).splitlines()
    assert rows[1:3] == ["1 ┤   █", "  ┤ ▁ █"]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 20)), min_size=1, max_size=9), st.integers(1, 80))
def test_the_stretches_share_the_width_by_their_steps_and_hold_their_labels(sizes: list[tuple[int, int]], width: int) -> None:
    stretches = [stretch(steps, "a" * length) for steps, length in sizes]
    text = draw(stretches, [Panel("", [[1.0]] * len(sizes), 1.0, ("", ""), 2)], width)
    axis = text.splitlines()[3][3:]
    shares = [len(part) + 1 for part in axis.split("┬")[1:]]
    needed = [length + 2 for _, length in sizes]
    assert all(share >= need for share, need in zip(shares, needed, strict=True))
    assert sum(shares) <= max(width, sum(needed))
    free = [(share, steps) for share, need, (steps, _) in zip(shares, needed, sizes, strict=True) if share > need]
    for share, steps in free:
        for other, more in free:
            assert abs(share * more - other * steps) <= 2 * max(steps, more)


@pytest.mark.parametrize(("name", "parameters"), [("mlstm-4096-amazon", 86_300_000), ("mlstm-8192-amazon", 340_350_000)])
def test_the_byte_models_have_the_published_number_of_parameters(name: str, parameters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puri et al. 2018: 86.3 M and 340.35 M, without the lengths of weight normalization."""
    monkeypatch.setenv("OVERNIGHT_DATA", "/absent")
    plan = make_plan(config.load_run(name))
    lengths = 10 * plan.model["hidden_size"]
    assert plan.parameters - lengths == pytest.approx(parameters, rel=1e-3)
    text = plan_text(plan)
    assert "multiplicative LSTM, 1 layer," in text and "256 bytes" in text and "masked-LM" not in text
