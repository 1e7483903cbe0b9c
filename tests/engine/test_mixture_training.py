"""A run on named sources: prepared once, read by shares, resumed bit by bit, each source evaluated by itself."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overnight import config
from overnight.cli.plan import make_plan, plan_text
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.named_sources import named_paths
from overnight.corpus.pipeline import prepare
from overnight.corpus.settings import settings_of
from overnight.corpus.shards import load_manifest, open_shards
from overnight.distributed.world import World
from overnight.engine import loop
from overnight.engine.evaluate import evaluate
from overnight.engine.pretrain import pretrain
from overnight.engine.workload import BertWorkload
from overnight.errors import ConfigError, DataError
from tests.conftest import tiny_tree, topics
from tests.distributed.test_parallel import Runs, assert_same_curve
from tests.engine.test_byte_training import byte_tree
from tests.engine.test_pretrain import Stop, assert_same_run, finish, metrics
from tests.recipe import change, message

Make = Callable[..., Run]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Topics in JSON lines, and others in a file of text, a document a paragraph."""
    folder, found = tmp_path_factory.mktemp("texts"), list(topics().values())
    (folder / "rows.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in found[::2]), encoding="utf-8")
    (folder / "plain.txt").write_text("\n\n".join(re.sub(r"\n\s*\n", "\n", text) for text in found[1::2]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def mixed(texts: Path) -> Make:
    """Makes a small run on both, in a prepared folder of their own, with dotted overrides."""

    def make(folder: Path, **overrides: Any) -> Run:
        tree = tiny_tree(folder, texts)
        del tree["data"]["paths"]
        tree["data"] |= {"dir": str(texts / "data")}
        tree["data"]["sources"] = {
            "rows": {"paths": [str(texts / "rows.jsonl")], "field": "body", "weight": 3},
            "plain": {"paths": [str(texts / "plain.txt")], "documents": "paragraph", "weight": 1},
        }
        return config.build_run(change(tree, overrides))

    run = make(texts)
    prepare(run.data, run.data_dir, log=lambda text: None)
    return make


def test_every_shard_is_of_one_source_and_the_manifest_says_which(mixed: Make, tmp_path: Path) -> None:
    run = mixed(tmp_path)
    manifest = load_manifest(run.data_dir)
    assert [(source.name, Path(source.path).name) for source in manifest.sources] == [("rows", "rows.jsonl"), ("plain", "plain.txt")]
    assert [(shard.name, shard.source) for shard in manifest.shards] == [
        (f"{split}-{name}-00000.arrow", name) for split in ("train", "valid") for name in ("rows", "plain")
    ]
    documents = {source.name: source.documents for source in manifest.sources}
    for name in ("rows", "plain"):
        kept = sum(
            len(s.document_sentences) - 1 for split in ("train", "valid") for s in open_shards(run.data_dir, split) if s.source == name
        )
        assert 0.5 * documents[name] < kept <= documents[name]


def test_the_shards_do_not_depend_on_the_number_of_workers(mixed: Make, tmp_path: Path) -> None:
    run = mixed(tmp_path, **{"data.dir": str(tmp_path / "two"), "data.workers": 2})
    assert prepare(run.data, run.data_dir, log=lambda text: None).shards == load_manifest(mixed(tmp_path).data_dir).shards


def test_another_weight_reads_the_same_shards_and_another_path_is_refused(mixed: Make, tmp_path: Path) -> None:
    run = mixed(tmp_path, **{"data.sources.plain.weight": 9})
    before = (run.data_dir / "manifest.json").read_bytes()
    prepare(run.data, run.data_dir, log=lambda text: None)
    assert (run.data_dir / "manifest.json").read_bytes() == before
    other = mixed(tmp_path, **{"data.sources.plain.documents": "line"})
    with pytest.raises(ConfigError, match=r"prepared with other settings.*data\.sources"):
        prepare(other.data, other.data_dir, log=lambda text: None)


def test_the_loss_of_each_source_is_measured_and_their_mean_is_the_loss(mixed: Make, tmp_path: Path) -> None:
    run, out = mixed(tmp_path), io.StringIO()
    pretrain(run, Line(out))
    lines = [line for line in metrics(run) if line["kind"] == "eval"]
    assert lines
    for line in lines:
        low, high = sorted(line[f"mlm_loss/{name}"] for name in ("rows", "plain"))
        assert low < line["mlm_loss"] < high and "nsp_loss/rows" in line
    assert re.search(r"mixture: rows 75.0 % = [\d.]+ epochs, plain 25.0 %", out.getvalue())
    score = evaluate(run, "train")  # type: ignore[arg-type]
    assert score.examples > 100 and {"mlm_loss/rows", "mlm_loss/plain"} < score.metrics.keys()


@pytest.mark.parametrize("at", [3, 8])
def test_a_crash_does_not_change_the_result(at: int, mixed: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (mixed(tmp_path, **{"out": str(tmp_path / name)}) for name in ("whole", "cut"))
    finish(whole)
    real, count = loop.clip_and_step, 0

    def crash(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise Stop
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", crash)
        with pytest.raises(Stop):
            finish(cut)
    finish(cut)
    assert_same_run(whole, cut)


def test_another_mixture_is_another_run(mixed: Make, tmp_path: Path) -> None:
    finish(mixed(tmp_path))
    for changes in ({"data.sources.plain.weight": 2}, {"phases.long.mixture": {"plain": {"weight": 1}}}):
        with pytest.raises(ConfigError, match=next(iter(changes)).replace(".", r"\.")):
            finish(mixed(tmp_path, **changes))


def test_sources_in_another_order_are_other_data(mixed: Make, tmp_path: Path) -> None:
    run = mixed(tmp_path)
    swapped = dataclasses.replace(run, data=dataclasses.replace(run.data, sources=dict(reversed(run.data.sources.items()))))
    with pytest.raises(ConfigError, match=r"prepared with other settings \(data\.sources"):
        finish(swapped)


def test_a_phase_may_have_a_mixture_of_its_own_and_the_plan_shows_it(mixed: Make, tmp_path: Path) -> None:
    run = mixed(tmp_path, **{"phases.long.mixture": {"plain": {"epochs": 2}, "rows": {}}})
    plan = make_plan(run)
    short, long = plan.phases
    assert [(each.name, each.share) for each in short.sources] == [("rows", 0.75), ("plain", 0.25)]
    rows, plain = long.sources
    assert plain.epochs == pytest.approx(2 * (rows.epochs or 0))
    assert re.search(r"mixture +rows 75.0 % = [\d.]+ epochs, plain 25.0 %", plan_text(plan))
    finish(run)
    begun = make_plan(mixed(tmp_path, **{"data.dir": str(tmp_path / "none")})).phases[0].sources
    assert [(each.name, each.share, each.epochs) for each in begun] == [("rows", 0.75, None), ("plain", 0.25, None)]


def test_a_byte_model_reads_a_mixture_too(texts: Path, tmp_path: Path) -> None:
    tree = byte_tree(tmp_path)
    tree["data"] |= {"label": "", "documents": "paragraph"}
    del tree["data"]["paths"]
    sources = {
        "rows": {"paths": [str(texts / "rows.jsonl")], "field": "body", "weight": 3},
        "plain": {"paths": [str(texts / "plain.txt")], "weight": 1},
    }
    run = config.build_run(change(tree, {"data.sources": sources, "phases.short.num_document_groups": 8}))
    prepare(run.data, run.data_dir, log=lambda text: None)
    finish(run)
    assert [line["step"] for line in metrics(run) if line["kind"] == "train"] == list(range(1, 13))
    assert "mixture" in plan_text(make_plan(run))


def test_the_counts_of_tokens_are_those_of_the_sources_in_their_shares(mixed: Make, tmp_path: Path) -> None:
    run = mixed(tmp_path)
    work = BertWorkload(run, World(device=torch.device("cpu")))  # type: ignore[arg-type]
    counts = work.training_counts()
    whole = {name: [shard.tokens for shard in work.shards["train"] if shard.source == name] for name in ("rows", "plain")}
    each = {name: np.bincount(np.concatenate(tokens), minlength=len(counts)) for name, tokens in whole.items()}
    expected = 0.75 * each["rows"] / each["rows"].sum() + 0.25 * each["plain"] / each["plain"].sum()
    assert np.allclose(counts / counts.sum(), expected, atol=1e-4)
    assert counts.sum() == pytest.approx(sum(found.sum() for found in each.values()), rel=1e-2)


def test_two_processes_train_and_evaluate_a_mixture_as_one_does(mixed: Make, tmp_path: Path) -> None:
    settings = {"model.dropout": 0.0, "model.attention_dropout": 0.0}
    one, two = (mixed(tmp_path, **{**settings, "out": str(tmp_path / name)}) for name in ("one", "two"))
    (tmp_path / "two.yaml").write_text(config.run_yaml(two), encoding="utf-8")
    finish(one)
    assert {code for job in Runs(tmp_path, two.data_dir).on(2, {"recipe": str(tmp_path / "two.yaml")}) for code, _ in job} == {0}
    assert_same_curve(tmp_path / "two", tmp_path / "one")


def test_a_source_whose_text_is_that_of_another_is_refused_when_it_is_read(texts: Path, tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path, texts)
    del tree["data"]["paths"]
    same = {name: {"paths": [str(texts / "rows.jsonl")], "field": "body"} for name in ("one", "two")}
    run = config.build_run(change(tree, {"data.sources": same}))
    prepare(run.data, run.data_dir, log=lambda text: None)
    with pytest.raises(DataError, match=r"data\.sources\.two: no document is left"):
        finish(run)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data.paths": ["x"]}, "data.paths = ['x']: data.sources replaces it"),
        ({"data.sources.a b": {"paths": ["x"]}}, "data.sources.a b: a name must be of letters"),
        ({"data.sources.a.paths": []}, "data.sources.a.paths = []: name at least one"),
        ({"data.sources.c": {"weight": 1}}, "data.sources.c.paths: is missing"),
        ({"data.sources.a.weight": -1}, "data.sources.a.weight = -1"),
        ({"data.sources.a.format": "word"}, "data.sources.a.format"),
        ({"data.sources.a.weight": 1, "data.sources.b.epochs": 2}, "data.sources.b.epochs = 2: does nothing where a source has a weight"),
        ({"phases.short.mixture": {"c": {"weight": 1}}}, "phases.short.mixture.c: data.sources has no source 'c'; it has a, b"),
        ({"phases.short.mixture": {"a": {"weight": 1, "epochs": 2}}}, "phases.short.mixture.a.epochs = 2: does nothing"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], expected: str) -> None:
    tree = {"name": "x", "phases": {"short": {"steps": 100, "global_batch_size": 64}}}
    tree["data"] = {"sources": {name: {"paths": [name]} for name in ("a", "b")}}
    assert expected in message(lambda: config.build_run(change(tree, changes)))


def test_paths_of_a_recipe_may_be_emptied_for_sources(tmp_path: Path) -> None:
    tree = {"name": "x", "phases": {"short": {"steps": 100, "global_batch_size": 64}}}
    tree["data"] = {"sources": {"a": {"paths": ["a"]}}}
    left_out, emptied = (config.build_run(change(tree, changes)) for changes in ({}, {"data.paths": []}))
    assert settings_of(left_out.data) == settings_of(emptied.data)
    assert named_paths(emptied.data) == [("a", "a")]
