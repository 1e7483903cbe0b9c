"""The large-batch study tunes every optimizer alike, resumes where it stopped, and says only what its trials say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import large_batch
from benchmarks.large_batch import GRID, GROWTH, NAMES, Cell, Trial, at_edge, cells, keeps_to, lr_power, optimizer_of, report, train, tune
from benchmarks.large_batch_problems import Digits, MaskedLM, Problem, frequencies
from benchmarks.plots import Spread, study_figure

TINY = Digits(epochs=1, batches=(64, 512), tuning=(0,), seeds=(1, 2))


def masked(folder: Path) -> MaskedLM:
    return MaskedLM(folder, examples=64, batches=(16, 32), seeds=(1, 2), validation=(16, 32))


@given(st.integers(-30, 30))
def test_the_grid_grows_until_the_best_has_worse_ones_on_both_sides(optimum: int) -> None:
    best, tried = tune(lambda e: abs(e - optimum), 0)
    assert len(tried) <= GRID + GROWTH and tried == list(range(tried[0], tried[-1] + 1))
    if -GROWTH < optimum < GRID + GROWTH - 1:
        assert best == optimum and not at_edge(best, tried)
    if 0 < optimum < GRID - 1:
        assert len(tried) == GRID
    assert tune(lambda e: math.inf, 0)[1] == list(range(-GROWTH, GRID))


def test_the_digits_are_split_into_disjoint_parts_with_every_digit_in_each() -> None:
    parts = TINY._data
    assert {name: len(y) for name, (_, y) in parts.items()} == {"train": 1200, "valid": 237, "test": 360}
    assert all(torch.bincount(y).min() >= 0.08 * len(y) for _, y in parts.values())
    assert sum(len(y) for _, y in parts.values()) == 1797
    images = {name: {image.numpy().tobytes() for image in x} for name, (x, _) in parts.items()}
    assert not images["train"] & images["test"] and not images["valid"] & images["test"]


def test_the_validation_sequences_to_tune_on_are_not_those_to_report_on(tiny_data: Path) -> None:
    found = masked(tiny_data)._validation
    assert [sum(len(batch.lengths) for batch in found[name]) for name in ("valid", "test")] == [16, 32]
    # 48 examples of one epoch: the first 16 of the stream, and the 32 after them.
    whole = MaskedLM(tiny_data, validation=(48, 1))._validation["valid"][0]
    both = torch.cat([found["valid"][0].targets["mlm"], found["test"][0].targets["mlm"]])
    assert torch.equal(whole.targets["mlm"], both)


@pytest.mark.parametrize("kind", ["digits", "mlm"])
def test_every_batch_takes_the_same_number_of_examples(kind: str, tiny_data: Path) -> None:
    problem: Problem = TINY if kind == "digits" else masked(tiny_data)
    for batch in problem.batches:
        network = problem.network()
        losses = list(problem.steps(network, batch, seed=1))
        assert len(losses) == problem.examples // batch
        assert problem.examples - len(losses) * batch < batch


def test_the_gradient_of_a_step_is_that_of_its_mean_loss(tiny_data: Path) -> None:
    problem = MaskedLM(tiny_data, examples=128, batches=(128,))
    network = problem.network()
    loss = next(problem.steps(network, 128, seed=1))
    found = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    work = problem._samples("train", 128, 1)
    whole = replace(work, phase=replace(work.phase, micro_batch_size=128)).step(0)
    (batch,) = whole.micro
    expected = network.losses(batch, torch.float32)[0]["mlm"] / whole.divisors()["mlm"]  # type: ignore[operator]
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for ours, p in zip(found, (p for p in network.parameters() if p.grad is not None), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(ours, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_decays_all_but_vectors_and_covers_every_parameter_once(name: str) -> None:
    network = TINY.network()
    optimizer = optimizer_of(name, network, 0.1, 0.0)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, stepped)) == sorted(map(id, network.parameters()))
    for group in optimizer.param_groups:
        assert {p.ndim > 1 for p in group["params"]} == {group["weight_decay"] > 0}
        assert group.get("trust_ratio", False) == (name in ("lars", "lamb", "lans") and group["weight_decay"] > 0)


def test_a_training_is_the_same_twice_and_ends_where_its_loss_is_not_finite() -> None:
    first, again = (train(TINY, "digits", "lamb", 64, 2.0**-5, seed=1) for _ in range(2))
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)
    lost = train(TINY, "digits", "sgd", 64, 2.0**60, seed=1)
    assert (lost.valid_loss, lost.loss, lost.train_loss) == (None, None, None)


@pytest.mark.heavy
def test_the_tiny_study_writes_its_files_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(large_batch, "NAMES", {"lamb": "LAMB", "adamw": "AdamW"})
    monkeypatch.setattr(large_batch, "GRID", 2)
    monkeypatch.setattr(large_batch, "GROWTH", 1)
    run = ["--tiny", "--only", "digits", "--workers", "1", "--out", str(tmp_path)]
    large_batch.main(run)
    out = tmp_path / "tiny"
    trials = (out / "trials.jsonl").read_text(encoding="utf-8")
    table = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["problems"]["digits"]["cells"]) == {"lamb", "adamw"} and summary["environment"]["python"]
    assert all(line in table for line in summary["problems"]["digits"]["report"])
    ElementTree.parse(out / "digits.svg")
    # Half of it lost: the other half is taken as it is, and the same comes out.
    lines = trials.splitlines(keepends=True)
    (out / "trials.jsonl").write_text("".join(lines[::2]), encoding="utf-8")
    large_batch.main(run)

    def results(text: str) -> set[str]:
        return {json.dumps({**json.loads(line), "seconds": 0}) for line in text.splitlines()}

    assert results((out / "trials.jsonl").read_text(encoding="utf-8")) == results(trials)
    monkeypatch.setattr(large_batch, "train", None)
    large_batch.main(run)


def test_knowing_only_frequencies_costs_the_entropy_of_the_answers() -> None:
    even = frequencies(torch.arange(4).repeat(1000), torch.arange(4), 4)
    assert even == {"loss": pytest.approx(math.log(4)), "accuracy": 0.25}
    assert TINY.blind()["loss"] == pytest.approx(math.log(10), abs=0.01)


def trial(optimizer: str, batch: int, exponent: int, seed: int, loss: float | None, accuracy: float) -> Trial:
    return Trial("digits", optimizer, batch, 1200 // batch, 2.0**exponent, seed, loss, loss, accuracy, loss, 1.0)


def test_only_the_reported_seeds_at_the_tuned_rate_are_reported() -> None:
    tuning = [trial("lamb", 64, e, 0, loss, 0.99) for e, loss in ((-3, 0.5), (-2, 0.2), (-1, None))]
    reported = [trial("lamb", 64, -2, seed, 0.3, accuracy) for seed, accuracy in ((1, 0.90), (2, 0.92))]
    stale = [trial("lamb", 64, -3, 1, 0.1, 1.0), replace(trial("lamb", 64, -2, 1, 0.1, 1.0), steps=99)]
    found = cells(TINY, "digits", [*tuning, *reported, *stale])
    cell = found["lamb"][64]
    assert (cell.lr, cell.tried, cell.bracketed) == (0.25, 3, True)
    assert cell.accuracy == Spread.of([0.90, 0.92])
    assert cells(TINY, "digits", [*tuning, reported[0]]) == {}


def test_the_mean_over_the_tuning_seeds_decides_and_a_rate_without_all_of_them_does_not_count() -> None:
    losses = {(-3, 0): 0.5, (-3, 6): 0.5, (-2, 0): 0.1, (-2, 6): 0.8, (-1, 0): 0.0}
    tuning = [trial("lamb", 64, e, seed, loss, 0.9) for (e, seed), loss in losses.items()]
    reported = [trial("lamb", 64, -2, seed, 0.3, 0.9) for seed in (1, 2)]
    cell = cells(replace(TINY, tuning=(0, 6)), "digits", [*tuning, *reported])["lamb"][64]
    assert (cell.lr, cell.tried, cell.bracketed) == (0.25, 2, False)


def flat(accuracy: tuple[float, ...], lr: float = 1.0) -> Cell:
    return Cell(lr, 8, True, Spread.of(accuracy), Spread.of([1.0]), Spread.of([1.0]), 1.0)


def test_a_result_is_kept_as_long_as_it_is_within_the_spread_of_the_smallest_batch() -> None:
    row = {32: flat((0.98, 0.99, 1.0)), 128: flat((0.9, 0.975, 1.0)), 512: flat((0.5,)), 1024: flat((1.0,))}
    assert keeps_to(Digits(), row) == 128
    assert keeps_to(Digits(), {32: flat((0.9,)), 128: flat((0.95,)), 512: flat((0.9,))}) == 512


def test_the_power_of_the_learning_rate_is_1_for_the_linear_rule_and_a_half_for_the_square_root() -> None:
    for power in (0.0, 0.5, 1.0):
        row = {batch: flat((1.0,), batch**power) for batch in (32, 128, 512, 1024)}
        assert lr_power(row) == pytest.approx(power)


def test_the_report_says_which_is_best_and_which_are_level_with_it() -> None:
    ranges = {"lars": (0.5, 0.6), "lamb": (0.90, 0.92), "lans": (0.8, 0.82), "adamw": (0.93, 0.95), "sgd": (0.7, 0.94), "muon": (0.4, 0.4)}
    lines = report(TINY, {name: {64: flat(accuracy), 512: flat(accuracy)} for name, accuracy in ranges.items()})
    best = next(line for line in lines if line.startswith("at 512"))
    assert best == ("at 512: AdamW is best, its range meets SGD; best layer-wise LAMB 91.0 (90.0–92.0), best other AdamW 94.0 (93.0–95.0)")
    assert lines[-1] == "learning rates tried in a cell: 8; best not bracketed: none"


def test_the_picture_is_xml_with_a_label_for_every_line_and_leaves_out_what_diverged() -> None:
    rows = {
        name: {32: Spread(1.0, 0.9, 1.2), 128: Spread(2.0, 2.0, math.inf), 512: Spread(math.inf, 1.0, math.inf)} for name in NAMES.values()
    }
    text = study_figure("digits", "images", (32, 128, 512), rows, rows, rows)
    words = [node.text for node in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert {"digits", "linear rule", "sqrt rule", *NAMES.values()} <= set(words) and "nan" not in text and "inf" not in text
    assert words.count("32") == 3
    assert study_figure("digits", "images", (32, 128, 512), rows, rows, rows) == text, "the same values give the same file"


def test_the_pictures_are_drawn_again_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(TINY, batches=(64,))
    monkeypatch.setattr(large_batch, "problems", lambda data, tiny: {"digits": study})
    monkeypatch.setattr(large_batch, "train", None)
    trials = [trial("lamb", 64, e, 0, loss, 0.99) for e, loss in ((-3, 0.5), (-2, 0.2))]
    trials += [trial("lamb", 64, -2, seed, 0.3, 0.9) for seed in study.seeds]
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(asdict(t)) + "\n" for t in trials), encoding="utf-8")
    large_batch.main(["--draw", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.svg", "trials.jsonl"]
    assert "LAMB" in (tmp_path / "digits.svg").read_text(encoding="utf-8")
