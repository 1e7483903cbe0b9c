"""Sizes are chosen on this machine, written down before they are trained, obeyed at resume, and refused where something contradicts them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from overnight import config
from overnight.cli import time_plan
from overnight.cli.main import main
from overnight.config import BertRun, ModernBertConfig
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import load_manifest
from overnight.distributed.world import World
from overnight.engine import sizing
from overnight.engine.memory import OutOfMemory
from overnight.engine.scaling_law import characters_per_token
from overnight.engine.size_record import read_record, with_sizes
from overnight.engine.size_rule import LADDER, batch_of, step_flops
from overnight.engine.sizing import first_choice, settle_sizes, settle_vocabulary, timed_choice
from overnight.errors import ConfigError, DataError
from overnight.models.flops import Peak
from tests.conftest import tiny_tree
from tests.engine.test_planner import FakeClock, clock
from tests.engine.test_pretrain import Stop

__all__ = ["clock"]
Captured = pytest.CaptureFixture[str]
OPTIM = {
    "name": "muon",
    "lr": 4e-3,
    "base_width": 256,
    "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5},
}


@dataclasses.dataclass
class Machine:
    """A machine whose rate the test says (operations a second)."""

    rate: float = 1e9
    timed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Layers and width of what was timed."""
    fails_above: int = 1 << 60
    """Width from which on memory runs out."""
    launch: float = 0.0
    """Least time of a step for each layer (s)."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    fake = Machine()

    def seconds(run: BertRun, workload: Any, number: int, device: torch.device) -> float:
        fake.timed.append((run.model.num_layers, run.model.hidden_size))
        if run.model.hidden_size > fake.fails_above:
            raise OutOfMemory("no memory")
        return max(step_flops(run) / fake.rate, fake.launch * run.model.num_layers)

    monkeypatch.setattr(sizing, "seconds_per_step", seconds)
    monkeypatch.setattr(sizing, "build_workload", lambda run, world: None)
    monkeypatch.setattr(sizing, "device_peak", lambda device, precision, dtype: Peak(fake.rate / 0.35, measured=True))
    monkeypatch.setattr(sizing, "_memory", lambda device: 1e15)
    return fake


def quiet(text: str) -> None:
    """No log."""


@pytest.fixture
def recipe(tmp_path: Path, tiny_data: Path) -> Path:
    """A recipe that leaves its sizes open, on text that is prepared."""
    tree = tiny_tree(tmp_path, tiny_data.parent / "topics.jsonl")
    tree["data"] |= {"dir": str(tiny_data), "vocab_size": 600}
    tree["model"] = {"kind": "modernbert", "size": "auto", "max_position_embeddings": 48}
    phase = {"steps": 10, "global_batch_size": 0, "seq_len": 32, "nsp": False, "max_predictions_per_seq": 5, "optim": OPTIM}
    tree |= {"phases": {"short": phase}, "budget": "3m"}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def load(recipe: Path, *overrides: str) -> BertRun:
    run = config.load_run(str(recipe), overrides)
    assert isinstance(run, BertRun)
    return run


def size_of(run: BertRun) -> tuple[int, int, int, int]:
    assert isinstance(run.model, ModernBertConfig) and run.model.size == "given"
    return run.model.num_layers, run.model.hidden_size, run.data.vocab_size, run.phases["short"].global_batch_size


def test_what_is_chosen_is_timed_written_and_taken_again(recipe: Path, machine: Machine) -> None:
    machine.rate = 1e12
    said: list[str] = []
    chosen = settle_sizes(load(recipe), said.append)
    record = read_record(load(recipe))
    assert record is not None and record.chosen is not None
    assert size_of(chosen) == (record.chosen.layers, record.chosen.width, 600, record.chosen.sequences)
    assert (record.chosen.layers, record.chosen.width) in machine.timed and 2 <= len(machine.timed) <= 4
    assert len(record.candidates) == len(LADDER) and [fact["flops_per_second"] for fact in record.timed] == [1e12] * len(machine.timed)
    assert said[-1].startswith(f"model.size auto: {record.chosen.shape}, for ") and "bits per character, by a law from" in said[-1]
    # Another speed decides nothing any more.
    machine.rate, machine.timed = 1e6, []
    assert settle_sizes(load(recipe), quiet) == chosen and not machine.timed


def test_a_slower_machine_gets_a_smaller_network(recipe: Path, machine: Machine, tmp_path: Path) -> None:
    sizes = []
    for rate in (1e14, 1e9):
        machine.rate = rate
        sizes.append(size_of(settle_sizes(load(recipe, f"out={tmp_path / f'{rate:g}'}", "budget=1h"), quiet)))
    assert sizes[0][1] > sizes[1][1] == 128


@pytest.mark.parametrize("busy", ["", "other programs kept a thread from its core"])
def test_a_choice_beside_other_programs_is_a_warning(busy: str, recipe: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing.CoreWaits, "while_timed", lambda self: busy)
    said = list[str]()
    settle_sizes(load(recipe), said.append)
    warnings = [text for text in said if text.startswith("warning")]
    assert [busy in text and "--out=" in text for text in warnings] == [True] * bool(busy)


def test_a_gpu_that_waits_for_its_host_is_timed_with_a_larger_batch(
    recipe: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sizing, "set_up_machine", lambda run: torch.device("cuda"))
    machine.rate, machine.launch = 1e14, 3e-3
    choice = timed_choice(load(recipe, "budget=10m"), quiet, lambda run: 0.0)
    first = choice.timed[0]
    assert first["larger"] == 4 * first["batch"] and first["seconds_of_larger"] < 0.8 * 4 * first["seconds"]
    assert first["flops_per_second"] <= machine.rate * (1 + 1e-9)
    assert choice.chosen.seconds_per_step >= machine.launch * choice.chosen.layers
    # One whose steps take longer with more sequences keeps the usual batch, and so does a batch that the recipe gives.
    machine.rate, machine.launch = 1e12, 0.0
    usual = timed_choice(load(recipe, "budget=10m"), quiet, lambda run: 0.0)
    assert usual.chosen.batch == batch_of(usual.chosen.tokens) and usual.timed[0]["flops_per_second"] == pytest.approx(1e12)
    machine.rate, machine.launch = 1e14, 3e-3
    given = timed_choice(load(recipe, "budget=10m", "phases.short.global_batch_size=64"), quiet, lambda run: 0.0)
    assert "larger" not in given.timed[0] and given.chosen.sequences == 64


def test_the_rate_of_a_gpu_is_that_of_the_larger_batch_also_where_it_hardly_waits(
    recipe: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an H200 had it: four times as many sequences took 2.4 times as long, and a step of them was predicted to take four times as long."""
    monkeypatch.setattr(sizing, "set_up_machine", lambda run: torch.device("cuda"))
    machine.rate, machine.launch = 1e13, 0.0
    alone = sizing.seconds_per_step
    usual = timed_choice(load(recipe, "budget=10m"), quiet, lambda run: 0.0).timed[0]["batch"]

    def waits(run: BertRun, *rest: Any) -> float:
        return alone(run, *rest) * (4 / 2.4 if run.phases["short"].global_batch_size <= usual else 1)

    monkeypatch.setattr(sizing, "seconds_per_step", waits)
    first = timed_choice(load(recipe, "budget=10m"), quiet, lambda run: 0.0).timed[0]
    assert first["batch"] == usual and first["seconds_of_larger"] == pytest.approx(2.4 * first["seconds"], rel=0.05)
    assert first["flops_per_second"] == pytest.approx(1e13)


@pytest.mark.parametrize(("times", "waits"), [(1.0, True), (3.0, True), (3.4, False), (5.0, False)])
def test_a_gpu_has_the_better_rate_of_two_batches_and_waits_where_four_times_as_many_sequences_take_less_than_as_many_times_as_long(
    times: float, waits: bool, recipe: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load(recipe, "budget=10m")
    score = timed_choice(run, quiet, lambda run: 0.0).chosen
    seconds = {score.sequences: 1.0, 4 * score.sequences: times}
    monkeypatch.setattr(sizing, "_step", lambda run, score, *rest: (with_sizes(run, score), seconds[score.sequences]))
    _, timed = sizing._time(run, score, torch.device("cuda"), quiet)
    larger = dataclasses.replace(score, batch=4 * score.batch, sequences=4 * score.sequences)
    assert timed.rate == max(step_flops(with_sizes(run, score)), step_flops(with_sizes(run, larger)) / times)
    assert timed.launch == (1.0 / score.layers if waits else 0.0)


@pytest.mark.parametrize(("budget", "timed"), [("1m", 1), ("5m", 2), ("10m", 3)])
def test_of_a_short_budget_a_gpu_is_timed_less_and_what_it_compiles_is_taken_off(
    budget: str, timed: int, recipe: Path, machine: Machine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "set_up_machine", lambda run: torch.device("cuda"))
    machine.rate, seconds = 1e13, sizing.seconds_per_step

    def compiled(run: BertRun, *rest: Any) -> float:
        clock.now += 20.0
        # Slower than its peak says, so that after two another one is the best.
        return 1000 * seconds(run, *rest)

    monkeypatch.setattr(sizing, "seconds_per_step", compiled)
    run = load(recipe, f"budget={budget}", "phases.short.global_batch_size=64")
    begun = clock.now
    choice = timed_choice(run, quiet, lambda run: 0.0)
    assert len(choice.timed) == timed
    spent = clock.now - begun
    assert spent == 20 * timed and choice.seconds == pytest.approx(sizing._seconds(run, 20.0))


def test_what_follows_pretraining_takes_from_the_time(recipe: Path, machine: Machine) -> None:
    machine.rate = 1e11
    asked: list[BertRun] = []

    def after(run: BertRun) -> float:
        asked.append(run)
        return 100.0

    choice = timed_choice(load(recipe, "budget=1h"), quiet, after)
    assert len(asked) == 1 and choice.seconds == pytest.approx(3600 - 110 - 18, abs=2)


def test_a_size_that_runs_out_of_memory_is_not_chosen(recipe: Path, machine: Machine) -> None:
    machine.rate = 1e14
    free = size_of(settle_sizes(load(recipe, f"out={recipe.parent / 'free'}", "budget=10h"), quiet))
    machine.fails_above = 128
    bound = size_of(settle_sizes(load(recipe, "budget=10h"), quiet))
    assert bound[1] == 128 < free[1]


def test_nothing_that_fits_is_an_error(recipe: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_memory", lambda device: 1.0)
    with pytest.raises(
        ConfigError,
        match=r"model.size = auto: no size fits this machine: 2 layers of width 128.* needs about 0\.\d GB of memory; .* memory.activation_checkpointing=full",
    ):
        settle_sizes(load(recipe), quiet)


@pytest.mark.parametrize("override", ["phases.short.optim.lr=1.0e-3", "seed=5", "phases.short.global_batch_size=32", "budget=5m"])
def test_a_choice_for_another_recipe_is_made_anew_before_training_and_refused_after(recipe: Path, machine: Machine, override: str) -> None:
    first = settle_sizes(load(recipe), quiet)
    assert settle_sizes(load(recipe, override), quiet) != first
    assert settle_sizes(load(recipe), quiet) == first
    (first.run_dir / "run.yaml").write_text("")
    if override.startswith("budget"):  # which is checked where the run is begun, and may be extended
        assert settle_sizes(load(recipe, override), quiet).model == first.model
        return
    with pytest.raises(ConfigError, match=f"were chosen for another recipe:\n  {override.partition('=')[0]}"):
        settle_sizes(load(recipe, override), quiet)


def test_a_changed_or_lost_choice_is_refused(recipe: Path, machine: Machine) -> None:
    settle_sizes(load(recipe), quiet)
    path = load(recipe).run_dir / "size.json"
    whole = path.read_text()
    path.write_text(whole.replace('"width": 128', '"width": 192'))
    with pytest.raises(DataError, match=r"size\.json"):
        settle_sizes(load(recipe), quiet)
    path.unlink()
    (path.parent / "run.yaml").write_text("")
    with pytest.raises(DataError, match=r"size\.json: is missing, and .* holds a run; put it back"):
        settle_vocabulary(load(recipe), quiet)


def test_the_vocabulary_is_chosen_before_the_text_is_prepared_and_stays(recipe: Path, machine: Machine, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("a line of text. " * 750_000)
    there = [f"data.paths=[{source}]", f"data.dir={tmp_path / 'data'}", "data.vocab_size=0", "budget=10h"]
    first = settle_vocabulary(load(recipe, *there), quiet)
    # 12 MB: about 3 M tokens, enough for 8,192 entries, not for 16,384.
    assert first.data.vocab_size in (4096, 8192) and first.model.size == "auto"  # type: ignore[union-attr]
    machine.rate = 1e15
    assert settle_vocabulary(load(recipe, *there), quiet) == first
    choice = first_choice(load(recipe, *there))
    assert {s.vocabulary for s in choice.scores if not s.refused} == {4096, 8192} and not machine.timed


def test_text_in_storage_is_measured_where_it_is_and_a_data_set_of_unknown_size_is_refused(
    recipe: Path, machine: Machine, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    content = b"a line of text. " * 750_000
    (tmp_path / "text.txt").write_bytes(content)
    fsspec.filesystem("memory").pipe("/sizing/text.txt", content)
    elsewhere = [f"data.dir={tmp_path / 'data'}", "data.vocab_size=0", "budget=10h"]
    here, there = (first_choice(load(recipe, f"data.paths=[{path}]", *elsewhere)) for path in (tmp_path / "text.txt", "memory://sizing"))
    assert here.text == there.text
    with pytest.raises(ConfigError, match=r"model.size = auto: how much text hf:some/data has is not known .*; prepare it first"):
        first_choice(load(recipe, "data.paths=['hf:some/data']", *elsewhere))


def test_prepared_text_decides_the_vocabulary(recipe: Path, machine: Machine) -> None:
    assert settle_vocabulary(load(recipe, "data.vocab_size=0"), quiet).data.vocab_size == 600


def test_the_characters_of_a_text_are_those_of_the_documents_that_are_kept(tmp_path: Path, tiny_data: Path) -> None:
    once, twice = (tmp_path / name for name in ("once", "twice"))
    for folder, copies in ((once, 1), (twice, 2)):
        folder.mkdir()
        for copy in range(copies):
            shutil.copy(tiny_data.parent / "topics.jsonl", folder / f"{copy}.jsonl")
    per_token = []
    for folder in (once, twice):
        run = config.build_run(tiny_tree(tmp_path, folder) | {"name": folder.name})
        target = tmp_path / f"{folder.name}-data"
        prepare(run.data, target, log=lambda text: None)
        per_token.append(characters_per_token(load_manifest(target), target))
    assert per_token[0] == pytest.approx(per_token[1], rel=1e-3)


def test_text_of_another_vocabulary_is_refused(recipe: Path, machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"data.vocab_size = 700: .* was prepared with 600; give that"):
        settle_sizes(load(recipe, "data.vocab_size=700"), quiet)


def test_a_run_that_names_its_sizes_is_left_alone(tiny: Callable[..., BertRun]) -> None:
    run = tiny()
    assert settle_sizes(run, quiet) is run and settle_vocabulary(run, quiet) is run and not run.run_dir.exists()


def test_real_steps_are_timed(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "LADDER", LADDER[:1])
    monkeypatch.setattr(sizing.size_rule, "LADDER", LADDER[:1])
    choice = timed_choice(load(recipe), quiet, lambda run: 0.0)
    assert [(fact["layers"], fact["width"]) for fact in choice.timed] == [(2, 128)] and 0 < choice.timed[0]["seconds"] < 60
    assert not load(recipe).run_dir.exists(), "nothing is written"


def test_killed_and_begun_again_it_trains_what_it_chose(recipe: Path, machine: Machine, clock: FakeClock, capsys: Captured) -> None:
    clock.step_seconds, clock.stop_at = 10.0, 5
    with pytest.raises(Stop):
        main(["pretrain", str(recipe)])
    machine.rate, clock.stop_at = 1e15, -1
    assert main(["pretrain", str(recipe)]) == 0
    assert "as chosen before" in capsys.readouterr().out
    run = load(recipe)
    record = read_record(run)
    assert record is not None and record.chosen is not None
    stored = config.stored_run(run.run_dir)
    # The run folder says what it is: later commands need no choice.
    assert config.identity(stored) == config.identity(with_sizes(run, record.chosen))
    assert main(["pretrain", str(run.run_dir)]) == 0


def test_a_recipe_with_other_sizes_is_refused_in_the_folder_of_a_choice(
    recipe: Path, machine: Machine, clock: FakeClock, capsys: Captured
) -> None:
    clock.step_seconds = 20.0
    assert main(["pretrain", str(recipe)]) == 0
    capsys.readouterr()
    sizes = "{kind: modernbert, num_layers: 2, hidden_size: 64, num_heads: 1, max_position_embeddings: 48}"
    assert main(["pretrain", str(recipe), f"--model={sizes}", "--phases.short.global_batch_size=16"]) == 2
    assert "model.hidden_size: 128 there, 64 here" in capsys.readouterr().err


def test_many_processes_choose_nothing(recipe: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert main(["launch", str(recipe)]) == 2
    assert "model.size = auto: is chosen in one process" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["pretrain", str(recipe)]) == 2
    assert "model.size = auto: is chosen in one process" in capsys.readouterr().err
    assert not World().size > 1 and not machine.timed


def test_plan_shows_the_candidates_and_writes_nothing(
    recipe: Path, machine: Machine, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_plan, "evaluation_seconds", lambda run: 5.0)
    monkeypatch.setattr(time_plan, "seconds_per_step", lambda *args: 0.1)
    assert main(["plan", str(recipe), "--budget=1h"]) == 0
    out = capsys.readouterr().out
    assert "bits per character, by a law from" in out and "sizes timed" in out and "ModernBERT, 2 layers" in out
    assert all(f"{layers} x {width}" in out for layers, width in LADDER)
    assert main(["plan", str(recipe), "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert sizes["chosen"] in sizes["scores"]
    assert main(["plan", str(recipe), f"--data.dir={tmp_path / 'none'}", "--data.vocab_size=0"]) == 0
    assert "from the peak of the device; no step was timed" in capsys.readouterr().out
    assert not load(recipe).run_dir.exists()
