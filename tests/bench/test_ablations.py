"""The ablations change one ingredient of a recipe at a time, say what cannot be trained, and compare seed by seed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablations
from benchmarks.ablation_variants import VARIANTS, expanded
from benchmarks.ablations import BASE, Study, main, mean_and_spread, rows, slug, table
from overnight import config
from overnight.config import BertRun
from tests.bench.in_process import Calls, calls

__all__ = ["calls"]


@pytest.fixture
def recipe(tiny: Callable[..., BertRun], tmp_path: Path) -> str:
    """The smallest recipe, as a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(config.run_yaml(tiny()), encoding="utf-8")
    return str(path)


def study(recipe: str, tmp_path: Path) -> Study:
    """A study of seconds."""
    return Study(tmp_path / "out", tmp_path / "work", recipe, (), 0.01, 1, 0.1, "", 0)


def result(variant: str, seed: int, bits: float) -> dict[str, Any]:
    """A result as the study keeps it."""
    scores = {"bits_per_character": bits, "word_bits_per_character": bits + 1, "masked_accuracy": 0.25, "blimp": None, "characters": 800}
    return {"variant": variant, "seed": seed, "steps": 10, "scores": scores}


def test_an_override_is_written_for_every_phase_with_the_values_of_the_base(tiny: Callable[..., BertRun]) -> None:
    base = tiny(**{"phases.long.optim.lr": 0.004, "phases.short.optim.schedule.warmup_ratio": 0.25})
    assert expanded(base, VARIANTS["lr x0.5"]) == ["phases.short.optim.lr=0.005000", "phases.long.optim.lr=0.002000"]
    assert expanded(base, VARIANTS["vocabulary 4,096"]) == ["data.vocab_size=4096"], "once"
    grown = expanded(base, VARIANTS["batch 16 to 64"])
    assert grown[-2:] == [
        f"phases.{name}.batch_warmup={{initial_batch_size: 16, steps: {half}}}" for name, half in (("short", 3), ("long", 2))
    ]
    changed = config.build_run(config.to_tree(base))
    for override in expanded(base, VARIANTS["schedule cosine"])[:1]:
        assert override == "phases.short.optim.schedule={name: cosine, warmup_ratio: 0.25}"
    assert changed == base


def test_a_variant_changes_its_ingredient_and_keeps_the_schedule(recipe: str, tmp_path: Path) -> None:
    here = study(recipe, tmp_path)
    base, other = (config.load_run(recipe, here.variant(name, 3)) for name in (BASE, "optimizer adamw, 1e-3"))
    changed = {line.split(":")[0] for line in config.differences(config.identity(base), config.identity(other))}
    assert changed and all(key.startswith(("phases.short.optim.", "phases.long.optim.")) for key in changed)
    assert not any("schedule" in key for key in changed) and base.seed == other.seed == 3
    masks = config.load_run(recipe, here.variant("masks 30 %", 0)).phases["long"]
    assert isinstance(masks, config.BertPhase) and (masks.mlm_probability, masks.max_predictions_per_seq) == (0.3, 0), "nothing is cut"


def test_a_variant_whose_steps_take_longer_has_its_share_of_them(recipe: str, tmp_path: Path) -> None:
    here = dataclasses.replace(study(recipe, tmp_path), shares=(("lr x2", 0.5),))
    steps = {name: [p.steps for p in config.load_run(recipe, here.variant(name, 0)).phases.values()] for name in (BASE, "lr x2", "lr x0.5")}
    assert steps[BASE] == steps["lr x0.5"] == [6, 4] and steps["lr x2"] == [3, 2]
    assert "shares" not in study(recipe, tmp_path).facts() and here.facts()["shares"] == (("lr x2", 0.5),)
    for given, why in (
        (["--minutes=1", "--share=lr x2=0.5"], "is for --minutes 0"),
        (["--minutes=0", "--share=typo=1"], "names no variant"),
    ):
        with pytest.raises(SystemExit, match=why):
            main(["--recipe", recipe, "--list", *given])


def test_text_is_prepared_once_for_each_vocabulary_and_each_filter(recipe: str, tmp_path: Path) -> None:
    here = study(recipe, tmp_path)
    runs = {name: config.load_run(recipe, here.variant(name, 1)) for name in (BASE, "lr x2", "vocabulary 4,096", "filters web")}
    assert [run.data_dir.name for run in runs.values()] == ["data-600", "data-600", "data-4096", "data-filters-web"]
    assert runs["filters web"].data.filters.min_words == 50 and here.refusal("no filters") == "is the base"


def test_what_cannot_be_trained_or_changes_nothing_is_said(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "of the future", ("model.telepathy=1.0",))
    here = study(recipe, tmp_path)
    assert here.refusal("of the future").startswith("refused: model.telepathy = 1.0: unknown key")
    assert (here.refusal("nsp"), here.refusal("no nsp"), here.refusal(BASE)) == ("is the base", "", "")


@pytest.mark.heavy
def test_every_variant_can_be_trained_but_for_settings_of_the_other_network(recipe: str, tmp_path: Path) -> None:
    """A misspelled one would be refused for ever, and nobody would notice."""

    def refused(base: str) -> set[str]:
        return {name for name in VARIANTS if study(base, tmp_path).refusal(name).startswith("refused")}

    assert refused("night-cpu") == set(), "though not every one goes with its budget"
    of_modernbert = {
        "local attention 64",
        "global attention",
        "no unigram bias",
        "unigram bias",
        "init normal",
        "init megatron",
        "init zero",
        "token matching 0.25 throughout",
        "token matching 1.0, then none",
    }
    assert refused(recipe) == of_modernbert
    assert len({slug(name) for name in [BASE, *VARIANTS]}) == len(VARIANTS) + 1, "names of files"


def test_an_override_with_a_space_is_not_taken_for_a_variant(recipe: str, tmp_path: Path) -> None:
    arguments = ["--recipe", recipe, "--out", str(tmp_path / "none"), "--list"]
    with pytest.raises(
        SystemExit, match=r"--only --data.paths=\[a, b\]: matches none of lr x0.5, .*; overrides with spaces stand before --only"
    ):
        main([*arguments, "--only", "lr*", "--data.paths=[a, b]"])


def test_the_table_is_sorted_by_the_gain_against_the_same_seed() -> None:
    results = [result(BASE, 0, 3.0), result(BASE, 1, 3.2), result("good", 0, 2.9), result("good", 1, 3.0), result("bad", 0, 3.5)]
    results.append(result("of another seed", 7, 1.0))
    assert [(row.name, row.gain) for row in rows(results)] == [("good", pytest.approx(0.15)), (BASE, 0.0), ("bad", -0.5)]
    lines = list(table(results, {"later": "refused: unknown key"}))
    assert lines[4] == "| good | +0.150 ± 0.071 | 2.950 ± 0.071 | 3.950 ± 0.071 | 25.0 ± 0.0 | - | 10 | 2 |"
    assert lines[5].startswith("| **base** |  | 3.100 ± 0.141 |")
    assert lines[6].startswith("| bad | -0.500 | 3.500 | 4.500 | 25.0 | - | 10 | 1 |")
    assert lines[-1] == "- later: not trained, refused: unknown key"
    assert mean_and_spread([None, 2.0], ".1f") == "2.0"


def test_scores_of_different_texts_are_not_compared() -> None:
    other = result("prepared later", 0, 2.9)
    other["scores"]["characters"] = 1790
    with pytest.raises(SystemExit, match=r"800 characters \(base, seed 0\), 1,790 characters \(prepared later, seed 0\); train"):
        rows([result(BASE, 0, 3.0), other])


@pytest.mark.heavy
def test_the_command_trains_the_base_and_the_variants_and_does_nothing_twice(
    recipe: str, tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"no nsp": VARIANTS["no nsp"], "vocabulary 500": ("data.vocab_size=500",), "of the future": ("model.telepathy=1",)}
    monkeypatch.setattr(ablations, "VARIANTS", table)
    options = f"--recipe {recipe} --seeds 2 --minutes 0.004 --threads 1 --trial-seconds 0.02 --pairs 3 --out {tmp_path}/out --work {tmp_path}/work"
    arguments = [*options.split(), "--blimp", "", "--phases.short.seq_len=24"]
    main(arguments)
    shown = capsys.readouterr().out
    kept = {path.name for path in (tmp_path / "out").glob("variant-*.json")}
    assert kept == {f"variant-{name}-seed2.json" for name in (BASE, "no-nsp", "vocabulary-500")}
    runs = {name: config.stored_run(tmp_path / "work" / f"{name}-seed2" / "run") for name in (BASE, "no-nsp", "vocabulary-500")}
    assert [run.data.vocab_size for run in runs.values()] == [600, 600, 500] and len(calls.of("prepare")) == 2
    assert [run.phases["short"].seq_len for run in runs.values()] == [24] * 3 and not runs["no-nsp"].phases["short"].nsp
    # The stand-in scores one model after another a tenth lower, so the last has gained most.
    order = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")][1:]
    assert order == ["vocabulary 500", "no nsp", "**base**"] and "of the future: not trained, refused" in shown
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["report"][4].startswith("| vocabulary 500 | +0.200 |")
    before = len(calls)
    main(arguments)
    assert {words[0] for words in calls[before:]} == {"prepare"}
    with pytest.raises(SystemExit, match="matches none of no nsp"):
        main([*arguments, "--only", "typo*"])
    with pytest.raises(SystemExit, match="--recipe nothing: no recipe 'nothing'"):
        main(["--recipe", "nothing", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
