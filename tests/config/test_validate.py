"""What a recipe may not say is named by key, value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from overnight import config
from overnight.config import BatchWarmup, Data, Model, Optim, Phase, Schedule, validate
from overnight.config.validate import settings
from tests.recipe import message, tree

NAN, INF = math.nan, math.inf
IMPOSSIBLE = [
    ("name", "", "name = '': must be a word"),
    ("name", "a/b", "name = 'a/b': must be a word"),
    ("name", "..", "name = '..': must be a word"),
    ("seed", -1, "seed = -1: must be 0 to 2^32-1"),
    ("seed", 2**32, "seed = 4294967296: must be 0 to 2^32-1"),
    ("phases", {}, "phases = {}: name at least one phase"),
    ("phases__a/b", {"steps": 1, "global_batch": 32}, "phases.a/b: a name must be of letters"),
    ("finetune__a.b", {}, "finetune.a.b: a name must be of letters"),
    ("data__paths", [], "data.paths = []: name at least one file"),
    ("data__valid_fraction", 0.51, "data.valid_fraction = 0.51: must be 0 to 0.5"),
    ("data__test_fraction", 0.51, "data.test_fraction = 0.51: must be 0 to 0.5"),
    ("model__embedding", 0, "model.embedding = 0: must be above 0"),
    ("data__valid_fraction", NAN, "data.valid_fraction = nan: must be 0 to 0.5"),
    ("data__vocab_size", 0, "data.vocab_size = 0: must be above 0"),
    *[(f"data__{key}", -1, f"data.{key} = -1: must be 0 or more") for key in ("min_chars", "max_bad_lines", "workers")],
    *[(f"model__{key}", 0, f"model.{key} = 0: must be above 0") for key in ("layers", "width", "heads", "max_length")],
    ("model__heads", 5, "model.heads = 5: must divide model.width = 768"),
    ("train__spike", 0.0, "train.spike = 0.0: must be above 0"),
    ("model__ffn", -1, "model.ffn = -1: must be positive, or 0"),
    ("model__dropout", 1.0, "model.dropout = 1.0: must be 0 or more and below 1"),
    ("model__attention_dropout", -0.1, "model.attention_dropout = -0.1: must be 0 or more and below 1"),
    ("model__dropout", NAN, "model.dropout = nan: must be 0 or more and below 1"),
    *[(f"train__{key}", 0, f"train.{key} = 0: must be above 0") for key in ("log_every", "checkpoint_every", "keep", "eval_sequences")],
    *[
        (f"train__{key}", -1, f"train.{key} = -1: must be 0 or more")
        for key in ("threads", "eval_every", "keep_every", "telemetry_every", "noise_every", "checksum_every")
    ],
    *[(f"phases__short__{key}", 0, f"phases.short.{key} = 0: must be above 0") for key in ("steps", "global_batch", "max_predictions")],
    ("phases__short__micro_batch", -1, "phases.short.micro_batch = -1: must be 0 or more"),
    (
        "phases__short__global_batch",
        65,
        "phases.short.global_batch = 65: cannot be cut into micro-batches of phases.short.micro_batch = 32",
    ),
    ("phases__short__length", 7, "phases.short.length = 7: must be 8 to model.max_length = 512"),
    ("phases__short__length", 513, "phases.short.length = 513: must be 8 to model.max_length = 512"),
    ("phases__short__mask_rate", 0, "phases.short.mask_rate = 0: must be above 0"),
    ("phases__short__mask_rate", 1.5, "phases.short.mask_rate = 1.5: must be 0 to 1"),
    ("phases__short__mask_rate", NAN, "phases.short.mask_rate = nan: must be 0 to 1"),
    ("phases__short__short_fraction", -0.1, "phases.short.short_fraction = -0.1: must be 0 to 1"),
    *[
        (f"phases__short__optim__{key}", v, f"phases.short.optim.{key} = {v}: must be above 0")
        for key in ("lr", "eps", "trust_coefficient")
        for v in (0.0, -1.0, NAN, INF)
    ],
    *[("phases__short__optim__momentum", v, f"phases.short.optim.momentum = {v}: must be 0 or more and below 1") for v in (-0.1, 1.0, NAN)],
    *[
        (f"phases__short__optim__{key}", v, f"phases.short.optim.{key} = {v}: must be 0 or more")
        for key in ("weight_decay", "max_grad_norm", "trust_clip")
        for v in (-1.0, NAN, INF)
    ],
    *[
        ("phases__short__optim__betas", v, f"phases.short.optim.betas = {v}: each must be 0 or more and below 1")
        for v in ([0.9, 1.0], [-0.1, 0.9], [0.9, NAN])
    ],
    *[
        ("phases__short__optim__schedule__warmup", v, f"phases.short.optim.schedule.warmup = {v}: longer than the phase")
        for v in (1.1, -0.1, NAN)
    ],
    *[("phases__short__optim__schedule__power", v, f"phases.short.optim.schedule.power = {v}: must be above 0") for v in (0.0, NAN, INF)],
    ("phases__short__optim__schedule__total", 99, "phases.short.optim.schedule.total = 99: must cover offset 0 + 100 steps"),
    ("phases__short__optim__schedule__offset", 1, "phases.short.optim.schedule.total = 100: must cover offset 1 + 100 steps"),
    ("phases__short__optim__schedule__offset", -1, "phases.short.optim.schedule.total = 100: must cover offset -1"),
    *[
        (f"finetune__names__{key}", 0, f"finetune.names.{key} = 0: must be above 0")
        for key in ("batch", "micro_batch", "stride", "max_answer")
    ],
    *[(f"finetune__names__{key}", v, f"finetune.names.{key} = {v}: must be above 0") for key in ("epochs", "lr") for v in (0.0, NAN, INF)],
    *[(f"finetune__names__{key}", -1, f"finetune.names.{key} = -1") for key in ("max_rows", "weight_decay", "warmup")],
    ("finetune__names__length", 600, "finetune.names.length = 600: must be 8 to model.max_length = 512"),
    ("finetune__names__batch", 33, "finetune.names.batch = 33: cannot be cut into micro-batches of finetune.names.micro_batch = 32"),
    ("finetune__names__seeds", [], "finetune.names.seeds = []: name at least one seed"),
    ("finetune__names__task", "mrpc", "finetune.names.path = '': name the folder that holds the data of 'mrpc'"),
]


@pytest.mark.parametrize(("key", "value", "expected"), IMPOSSIBLE, ids=[f"{key}={value}" for key, value, _ in IMPOSSIBLE])
def test_a_value_that_cannot_work_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


def optim_of(**changes: Any) -> dict[str, Any]:
    return tree(phases__short__steps=320, **{f"phases__short__optim__{key}": value for key, value in changes.items()})


FOREIGN = [
    ("lamb", "trust_coefficient", 0.01),
    ("lamb", "momentum", 0.0),
    ("lans", "bias_correction", False),
    ("lans", "max_grad_norm", 2.0),
    ("lans", "trust_clip", 1.0),
    ("lars", "betas", [0.8, 0.9]),
    ("lars", "eps", 1e-3),
    ("adamw", "adapt", "none"),
    ("adamw", "skip_zero_grad", False),
    ("muon", "nesterov", True),
    ("muon", "lr_in_momentum", False),
]


@pytest.mark.parametrize(("name", "key", "value"), FOREIGN)
def test_a_setting_that_the_optimizer_does_not_have_is_refused(name: str, key: str, value: Any) -> None:
    text = message(lambda: config.build_run(optim_of(name=name, **{key: value})))
    assert text == f"phases.short.optim.{key} = {value}: {name} has no {key}"


@pytest.mark.parametrize(
    ("name", "key", "value"), [("linear", "power", 2.0), ("poly", "hold", 0.1), ("cosine", "power", 0.5), ("puri", "warmup", 0.2)]
)
def test_a_setting_that_the_schedule_does_not_have_is_refused(name: str, key: str, value: float) -> None:
    text = message(lambda: config.build_run(optim_of(schedule={"name": name, key: value})))
    assert text == f"phases.short.optim.schedule.{key} = {value}: {name} has no {key}"


def test_what_an_optimizer_or_a_schedule_lacks_may_be_said_to_be_none() -> None:
    run = config.build_run(optim_of(name="lans", max_grad_norm=0, schedule={"name": "puri", "warmup": 0}))
    assert settings(run.phases["short"].optim.schedule) == {}
    assert "max_grad_norm" not in settings(run.phases["short"].optim)


@pytest.mark.parametrize("kind", [Optim, Schedule])
def test_every_setting_of_an_optimizer_or_a_schedule_is_known_to_all_or_to_some(kind: type[Optim] | type[Schedule]) -> None:
    names = {
        Optim: ("lamb", "lans", "lars", "adamw", "muon"),
        Schedule: ("linear", "poly", "poly_nvidia", "hold", "cosine", "constant", "puri"),
    }
    some = {key for name in names[kind] for key in settings(kind(name=name))}  # type: ignore[arg-type]
    common = {Optim: {"name", "lr", "weight_decay", "scaling", "schedule", "start"}, Schedule: {"name", "total", "offset"}}[kind]
    assert some | common == {f.name for f in dataclasses.fields(kind)} and not some & common


TOGETHER = [
    ({"schedule": {"name": "hold", "warmup": 0.7, "hold": 0.4}}, "schedule.hold = 0.4: must be 0 to 0.3, what the warm-up leaves"),
    ({"schedule": {"name": "hold", "hold": -0.1}}, "schedule.hold = -0.1: must be 0 to 0.9"),
    ({"schedule": {"name": "hold", "hold": NAN}}, "schedule.hold = nan: must be 0 to 0.9"),
    ({"schedule": {"name": "puri", "total": 300}}, "schedule.total = 300: must cover offset 0 + 320 steps"),
    ({"schedule": {"name": "puri", "offset": 100_000}}, "schedule.total = 100000: must cover offset 100000 + 320 steps"),
    ({"scaling": {"batch": 64}}, "scaling.batch = 64: does nothing without"),
    ({"scaling": {"rule": "sqrt", "batch": -1}}, "scaling.batch = -1: must be 0 or more"),
    ({"scaling": {"rule": "sqrt"}}, "scaling.batch = 0: name the batch for which phases.short.optim.lr was tuned"),
    ({"scaling": {"rule": "lamb_untuned"}, "lr": 0.1}, "lr = 0.1: lamb_untuned sets it; leave it out, or name"),
    ({"scaling": {"rule": "lamb_untuned"}, "schedule": {"warmup": 0.2}}, "schedule.warmup = 0.2: lamb_untuned sets it"),
    ({"scaling": {"rule": "lamb_untuned"}, "schedule": {"name": "puri"}}, "scaling.rule = lamb_untuned: sets a warm-up, and puri has no"),
    (
        {"scaling": {"rule": "lamb_untuned", "batch": 4}},
        "schedule.warmup = 1.6 at batch 64 by lamb_untuned: longer than the phase",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), TOGETHER, ids=[expected[:40] for _, expected in TOGETHER])
def test_settings_of_rate_and_schedule_that_cannot_work_together_are_refused(changes: dict[str, Any], expected: str) -> None:
    text = message(lambda: config.build_run(optim_of(**changes)))
    assert any(line.startswith(f"phases.short.optim.{expected}") for line in text.splitlines()), text


@pytest.mark.parametrize(("before", "after"), [("lars", "lamb"), ("lamb", "lans"), ("muon", "adamw")])
def test_moments_are_not_kept_for_an_optimizer_that_cannot_use_them(before: str, after: str) -> None:
    def recipe(start: str, *names: str) -> dict[str, Any]:
        phases = {f"p{i}": {"steps": 9, "global_batch": 32, "optim": {"name": name, "start": start}} for i, name in enumerate(names)}
        return tree(phases=phases)

    text = message(lambda: config.build_run(recipe("keep", before, after)))
    assert text == f"phases.p1.optim.start = keep: {after} cannot use what {before} leaves in phase p0; set it to reset"
    for works in (recipe("reset", before, after), recipe("keep", before, before), recipe("keep", "adamw", "lamb", "adamw")):
        config.build_run(works)


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ({"start": 48, "steps": 9}, "start = 48: must divide phases.short.global_batch = 64 and be smaller"),
        ({"start": 64, "steps": 9}, "start = 64: must divide"),
        ({"start": -8, "steps": 9}, "start = -8: must divide"),
        ({"start": 8}, "steps = 0: must be above 0 and below phases.short.steps = 100"),
        ({"start": 8, "steps": 100}, "steps = 100: must be above 0 and below"),
        ({"steps": 9}, "steps = 9: needs phases.short.batch_warmup.start"),
    ],
)
def test_a_batch_warm_up_that_cannot_work_is_refused(warmup: dict[str, int], expected: str) -> None:
    assert message(lambda: config.build_run(tree(phases__short__batch_warmup=warmup))).startswith(f"phases.short.batch_warmup.{expected}")
    assert config.build_run(tree(phases__short__batch_warmup={"start": 8, "steps": 99})).phases["short"].batch_warmup == BatchWarmup(8, 99)


def byte_tree(kind: str = "mlstm", **changes: Any) -> dict[str, Any]:
    """A small valid recipe of a byte model with dotted changes, written with __ for a dot."""
    found = {"name": "x", "data": {"units": "bytes"}, "model": {"kind": kind}, "phases": {"main": {"steps": 100, "global_batch": 64}}}
    return tree(**{**found, "finetune": {}, **changes})


FOREIGN_TO_BYTES = [
    ("data__vocab_file", "v.txt", "data.vocab_file = v.txt: bytes has no vocab_file"),
    ("data__vocab_size", 256, "data.vocab_size = 256: bytes has no vocab_size"),
    ("data__lowercase", False, "data.lowercase = False: bytes has no lowercase"),
    ("model__attention_dropout", 0.2, "model.attention_dropout = 0.2: mlstm has no attention_dropout"),
    *[
        (f"model__{key}", value, f"model.{key} = {value}: mlstm has no {key}")
        for key, value in (("heads", 8), ("ffn", 64), ("dropout", 0.3))
    ],
    ("model__max_length", 256, "model.max_length = 256: mlstm has no max_length"),
    *[
        (f"phases__main__{key}", value, f"phases.main.{key} = {value}: mlstm has no {key}")
        for key, value in (("short_fraction", 0.2), ("mask_rate", 0.2), ("max_predictions", 80), ("whole_word", True))
    ],
    (
        "phases__main__batch_warmup",
        {"start": 8, "steps": 9},
        "phases.main.batch_warmup.start = 8: each sequence of a mlstm's batch is a lane",
    ),
    ("phases__main__shards", 63, "phases.main.shards = 63: must be phases.main.global_batch = 64 or more"),
    ("phases__main__shards", -1, "phases.main.shards = -1: must be 0 or more"),
    ("phases__main__label_weight", NAN, "phases.main.label_weight = nan: must be 0 or more"),
    ("phases__main__label_weight", 0.1, "phases.main.label_weight = 0.1: needs data.label"),
    ("phases__main__length", 7, "phases.main.length = 7: must be 8 to 8192"),
    ("phases__main__length", 8193, "phases.main.length = 8193: must be 8 to 8192"),
    ("data__units", "wordpiece", "data.units = wordpiece: model.kind = mlstm reads bytes"),
    ("finetune__names", {}, "finetune.names: mlstm cannot be fine-tuned; put it under transfer"),
    ("transfer__sst", {}, "transfer.sst.path = '': name the folder that holds the data of 'sst'"),
    ("transfer__a.b", {"path": "x"}, "transfer.a.b: a name must be of letters"),
    ("transfer__sst", {"path": "x", "seeds": []}, "transfer.sst.seeds = []: name at least one seed"),
    ("transfer__sst", {"path": "x", "max_rows": -1}, "transfer.sst.max_rows = -1: must be 0 or more"),
]


@pytest.mark.parametrize(("key", "value", "expected"), FOREIGN_TO_BYTES, ids=[expected[:40] for *_, expected in FOREIGN_TO_BYTES])
def test_what_a_byte_model_does_not_have_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(byte_tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


FOREIGN_TO_BERT = [
    ("data__units", "bytes", "data.units = bytes: model.kind = bert reads wordpiece"),
    ("data__test_fraction", 0.1, "data.test_fraction = 0.1: wordpiece has no test_fraction"),
    ("data__label", "stars", "data.label = stars: wordpiece has no label"),
    ("model__embedding", 32, "model.embedding = 32: bert has no embedding"),
    ("model__weight_norm", False, "model.weight_norm = False: bert has no weight_norm"),
    ("phases__short__shards", 64, "phases.short.shards = 64: bert has no shards"),
    ("train__graphs", True, "train.graphs = True: bert has no recurrence to capture; use train.compile"),
    ("phases__short__reshuffle", False, "phases.short.reshuffle = False: bert has no reshuffle"),
    ("phases__short__label_weight", 0.1, "phases.short.label_weight = 0.1: bert has no label_weight"),
    ("transfer__sst", {"path": "x"}, "transfer.sst: bert has no state that could be its features"),
]


@pytest.mark.parametrize(("key", "value", "expected"), FOREIGN_TO_BERT, ids=[expected[:40] for *_, expected in FOREIGN_TO_BERT])
def test_what_bert_does_not_have_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


@pytest.mark.parametrize("kind", ["mlstm", "lstm", "transformer"])
def test_a_byte_model_may_say_that_what_it_lacks_is_none_and_is_not_bound_by_what_it_lacks(kind: str) -> None:
    said = {"model__attention_dropout": 0.0, "phases__main__nsp": False, "phases__main__label_weight": 0.5, "data__label": "stars"}
    run = config.build_run(byte_tree(kind, **said))
    assert config.build_run(config.to_tree(run)) == run
    recurrent = kind != "transformer"
    odd = {"model__width": 500, "model__heads": 12, "phases__main__length": 4096}
    # The Transformer has heads and learned positions, the others have not.
    if recurrent:
        config.build_run(byte_tree(kind, model__dropout=0, transfer__sst={"path": "x"}, **odd))
        return
    text = message(lambda: config.build_run(byte_tree(kind, transfer__sst={"path": "x"}, **odd)))
    assert [line.split(":")[0] for line in text.splitlines()] == ["transfer.sst", "model.heads = 12", "phases.main.length = 4096"]
    config.build_run(byte_tree(kind, model__heads=8, model__max_length=4096, model__dropout=0.3, phases__main__length=4096))


@pytest.mark.parametrize(
    ("part", "table"), [(Model, validate._MODEL_SETTINGS), (Phase, validate._PHASE_SETTINGS), (Data, validate._DATA_SETTINGS)]
)
def test_every_setting_that_only_some_networks_have_exists(part: Any, table: dict[str, tuple[str, ...]]) -> None:
    assert {key for names in table.values() for key in names} < {f.name for f in dataclasses.fields(part)}
