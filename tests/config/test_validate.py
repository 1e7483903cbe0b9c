"""What a recipe may not say is named by key, value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from overnight import config
from overnight.config import OPTIMIZERS, BatchWarmup, Data, ModernBertConfig, Schedule
from overnight.config.optimizers import SCHEDULE_SETTINGS
from overnight.config.validate import DATA_SETTINGS
from tests.recipe import change, message, tree

NAN, INF = math.nan, math.inf
IMPOSSIBLE = [
    ("name", "", "name = '': must be a word"),
    ("name", "a/b", "name = 'a/b': must be a word"),
    ("name", "..", "name = '..': must be a word"),
    ("seed", -1, "seed = -1: must be 0 to 4294967295"),
    ("seed", 2**32, "seed = 4294967296: must be 0 to 4294967295"),
    ("budget", "45", "budget = '45': must be a time such as 8h, 45m or 1h30m, or 'until 07:00'"),
    ("budget", "0h", "budget = '0h': must be a time"),
    ("budget", "until 25:00", "budget = 'until 25:00': 'until 25:00' is not a time of day"),
    ("budget", "8h", "phases.short.optim.schedule.name = poly: a budget needs a schedule that can end at any time; use wsd"),
    ("phases", {}, "phases = {}: name at least one phase"),
    ("phases__a/b", {"steps": 1, "global_batch_size": 32}, "phases.a/b: a name must be of letters"),
    ("finetune", {"a.b": {}}, "finetune.a.b: a name must be of letters"),
    ("finetune", {"all": {}}, "finetune.all: is a reserved name"),
    ("evaluation__blimp_pairs", 1, "evaluation.blimp_pairs = 1: must be 2 or more, for a standard error, or 0 for all"),
    ("data__paths", ["x", "caf\udce9"], "data.paths = 'caf\\udce9': holds bytes that are not UTF-8; rename"),
    ("out", "caf\udcc3\udca9", "out = 'caf\\udcc3\\udca9': is UTF-8, which the locale is not; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"),
    ("data__paths", [], "data.paths = []: name at least one file"),
    ("data__valid_fraction", 0.51, "data.valid_fraction = 0.51: must be 0 to 0.5"),
    ("data__test_fraction", 0.51, "data.test_fraction = 0.51: must be 0 to 0.5"),
    ("data__valid_fraction", NAN, "data.valid_fraction = nan: must be 0 to 0.5"),
    ("data__vocab_size", 0, "data.vocab_size = 0: must be above 0"),
    *[(f"data__{key}", -1, f"data.{key} = -1: must be 0 or more") for key in ("min_chars", "max_invalid_lines", "workers")],
    *[
        (f"model__{key}", 0, f"model.{key} = 0: must be above 0")
        for key in ("num_layers", "hidden_size", "num_heads", "max_position_embeddings")
    ],
    ("model__num_heads", 5, "model.num_heads = 5: must divide model.hidden_size = 768"),
    ("stability__spike_threshold", 0.0, "stability.spike_threshold = 0.0: must be above 0"),
    ("model__intermediate_size", -1, "model.intermediate_size = -1: must be 0 or more"),
    ("model__dropout", 1.0, "model.dropout = 1.0: must be 0 or more and below 1"),
    ("model__attention_dropout", -0.1, "model.attention_dropout = -0.1: must be 0 or more and below 1"),
    ("model__dropout", NAN, "model.dropout = nan: must be 0 or more and below 1"),
    *[
        (key.replace(".", "__"), 0, f"{key} = 0: must be above 0")
        for key in ("logging.log_every", "checkpoint.save_every", "checkpoint.keep_latest_k", "logging.eval_examples")
    ],
    *[
        (key.replace(".", "__"), -1, f"{key} = -1: must be 0 or more")
        for key in (
            "logging.eval_every",
            "checkpoint.keep_every_n_steps",
            "logging.tensor_norms_every",
            "logging.grad_noise_every",
            "stability.replica_check_every",
        )
    ],
    *[("compute__threads", v, f"compute.threads = {v}: must be 0 to 1024") for v in (-1, 1025)],
    *[(f"phases__short__{key}", 0, f"phases.short.{key} = 0: must be above 0") for key in ("steps", "global_batch_size")],
    ("phases__short__max_predictions_per_seq", -1, "phases.short.max_predictions_per_seq = -1: must be 0 or more"),
    (
        "phases__short__mlm_probability",
        0.3,
        "phases.short.mlm_probability = 0.3: asks for 38 of 128 tokens, but max_predictions_per_seq = 20 allows fewer",
    ),
    (
        "phases__short__final_mlm_probability",
        0.2,
        "phases.short.final_mlm_probability = 0.2: must be at most phases.short.mlm_probability = 0.15: it falls",
    ),
    ("phases__short__micro_batch_size", -1, "phases.short.micro_batch_size = -1: must be 0 or more"),
    (
        "phases__short__global_batch_size",
        65,
        "phases.short.global_batch_size = 65: cannot be split into micro-batches of phases.short.micro_batch_size = 32",
    ),
    ("phases__short__seq_len", 7, "phases.short.seq_len = 7: must be 8 to model.max_position_embeddings = 512"),
    ("phases__short__seq_len", 513, "phases.short.seq_len = 513: must be 8 to model.max_position_embeddings = 512"),
    ("phases__short__mlm_probability", 0, "phases.short.mlm_probability = 0: must be above 0"),
    ("phases__short__whole_sentences", True, "phases.short.whole_sentences = true: needs phases.short.nsp=false"),
    ("phases__short__mlm_probability", 1.5, "phases.short.mlm_probability = 1.5: must be 0 to 1"),
    ("phases__short__mlm_probability", NAN, "phases.short.mlm_probability = nan: must be 0 to 1"),
    ("phases__short__short_seq_prob", -0.1, "phases.short.short_seq_prob = -0.1: must be 0 to 1"),
    *[
        (f"phases__short__optim__{key}", v, f"phases.short.optim.{key} = {v}: must be above 0")
        for key in ("lr", "eps")
        for v in (0.0, -1.0, NAN, INF)
    ],
    *[
        ("phases__short__optim", {"name": "lars", key: v}, f"phases.short.optim.{key} = {v}: must be ")
        for key, values in (("momentum", (-0.1, 1.0, NAN)), ("trust_coefficient", (0.0, INF)))
        for v in values
    ],
    *[
        (f"phases__short__optim__{key}", v, f"phases.short.optim.{key} = {v}: must be 0 or more")
        for key in ("weight_decay", "max_grad_norm", "max_trust_ratio")
        for v in (-1.0, NAN, INF)
    ],
    *[
        ("phases__short__optim__betas", v, f"phases.short.optim.betas = {v}: each must be 0 or more and below 1")
        for v in ([0.9, 1.0], [-0.1, 0.9], [0.9, NAN])
    ],
    *[
        ("phases__short__optim__schedule__warmup_ratio", v, f"phases.short.optim.schedule.warmup_ratio = {v}: longer than the phase")
        for v in (1.1, -0.1, NAN)
    ],
    *[("phases__short__optim__schedule__power", v, f"phases.short.optim.schedule.power = {v}: must be above 0") for v in (0.0, NAN, INF)],
    (
        "phases__short__optim__schedule__total_steps",
        99,
        "phases.short.optim.schedule.total_steps = 99: must cover step_offset 0 + 100 steps",
    ),
    (
        "phases__short__optim__schedule__step_offset",
        1,
        "phases.short.optim.schedule.total_steps = 100: must cover step_offset 1 + 100 steps",
    ),
    ("phases__short__optim__schedule__step_offset", -1, "phases.short.optim.schedule.total_steps = 100: must cover step_offset -1"),
    *[
        (f"finetune__names__{key}", 0, f"finetune.names.{key} = 0: must be above 0")
        for key in ("global_batch_size", "micro_batch_size", "doc_stride", "max_answer_length")
    ],
    *[("finetune__names__epochs", v, f"finetune.names.epochs = {v}: must be above 0") for v in (0.0, NAN, INF)],
    *[("finetune__names__lr", v, f"finetune.names.lr = {v}: must be 0 or more") for v in (-1e-4, NAN, INF)],
    *[(f"finetune__names__{key}", -1, f"finetune.names.{key} = -1") for key in ("max_train_examples", "weight_decay", "warmup_ratio")],
    ("finetune__names__seq_len", 600, "finetune.names.seq_len = 600: must be 8 to model.max_position_embeddings = 512"),
    (
        "finetune__names__global_batch_size",
        33,
        "finetune.names.global_batch_size = 33: cannot be split into micro-batches of finetune.names.micro_batch_size = 32; it must divide, as 11 does",
    ),
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
    ("lamb", "trust_coefficient", 0.01, "lars"),
    ("lamb", "momentum", 0.0, "lars, muon"),
    ("lans", "bias_correction", False, "lamb"),
    ("lans", "max_grad_norm", 2.0, "lamb, lars, adamw, muon"),
    ("lans", "max_trust_ratio", 1.0, "lamb"),
    ("lars", "betas", [0.8, 0.9], "lamb, lans, adamw, muon"),
    ("lars", "eps", 1e-3, "lamb, lans, adamw, muon"),
    ("adamw", "trust_ratio_on", "none", "lamb, lans, lars"),
    ("adamw", "skip_zero_grad", False, "lamb, lans, lars"),
    ("muon", "nesterov", True, "lars"),
    ("muon", "lr_in_momentum", False, "lars"),
]


@pytest.mark.parametrize(("name", "key", "value", "owners"), FOREIGN)
def test_a_setting_of_another_optimizer_is_refused_with_its_owners(name: str, key: str, value: Any, owners: str) -> None:
    text = message(lambda: config.build_run(optim_of(name=name, **{key: value})))
    assert text == f"phases.short.optim.{key} = {value!r}: {name} has no {key}; it belongs to {owners}"


@pytest.mark.parametrize(("name", "key", "value"), [("linear", "power", 2.0), ("poly", "stable_ratio", 0.1), ("cosine", "power", 0.5)])
def test_a_setting_that_the_schedule_does_not_have_is_refused(name: str, key: str, value: float) -> None:
    text = message(lambda: config.build_run(optim_of(schedule={"name": name, key: value})))
    assert text == f"phases.short.optim.schedule.{key} = {value}: {name} has no {key}"


def test_every_setting_of_a_schedule_is_known_to_all_or_to_some() -> None:
    some = {key for keys in SCHEDULE_SETTINGS.values() for key in keys}
    assert some | {"name", "total_steps", "step_offset"} == {f.name for f in dataclasses.fields(Schedule)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_its_own_default(name: str) -> None:
    assert config.build_run(optim_of(name=name)).phases["short"].optim == OPTIMIZERS[name]()


TOGETHER = [
    (
        {"schedule": {"name": "wsd", "warmup_ratio": 0.7, "stable_ratio": 0.4}},
        "schedule.stable_ratio = 0.4: must be 0 to 0.3, what the warm-up leaves",
    ),
    ({"schedule": {"name": "wsd", "stable_ratio": -0.1}}, "schedule.stable_ratio = -0.1: must be 0 to 0.9"),
    ({"schedule": {"name": "wsd", "stable_ratio": NAN}}, "schedule.stable_ratio = nan: must be 0 to 0.9"),
    ({"scaling": {"base_batch_size": 64}}, "scaling.base_batch_size = 64: does nothing without"),
    ({"scaling": {"rule": "sqrt", "base_batch_size": -1}}, "scaling.base_batch_size = -1: must be 0 or more"),
    ({"scaling": {"rule": "sqrt"}}, "scaling.base_batch_size = 0: name the batch size for which phases.short.optim.lr was tuned"),
    ({"scaling": {"rule": "lamb_untuned"}, "lr": 0.1}, "lr = 0.1: lamb_untuned sets it; leave it out, or name"),
    ({"scaling": {"rule": "lamb_untuned"}, "schedule": {"warmup_ratio": 0.2}}, "schedule.warmup_ratio = 0.2: lamb_untuned sets it"),
    ({"schedule": {"name": "linear", "total_steps": 300}}, "schedule.total_steps = 300: must cover step_offset 0 + 320 steps"),
    (
        {"scaling": {"rule": "lamb_untuned", "base_batch_size": 4}},
        "schedule.warmup_ratio = 1.6 at batch size 64 by lamb_untuned: longer than the phase",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), TOGETHER, ids=[expected[:40] for _, expected in TOGETHER])
def test_settings_of_rate_and_schedule_that_cannot_work_together_are_refused(changes: dict[str, Any], expected: str) -> None:
    text = message(lambda: config.build_run(optim_of(**changes)))
    assert any(line.startswith(f"phases.short.optim.{expected}") for line in text.splitlines()), text


@pytest.mark.parametrize("schedule", [{"name": "constant"}, {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.9}])
def test_a_share_of_masks_that_falls_with_a_rate_that_does_not_is_refused(schedule: dict[str, Any]) -> None:
    found = optim_of(schedule=schedule)
    found["phases"]["short"]["final_mlm_probability"] = 0.1
    said = f"final_mlm_probability = 0.1: is never reached, since the learning rate of the schedule `{schedule['name']}` does not decay"
    assert said in message(lambda: config.build_run(found))


@pytest.mark.parametrize(("before", "after"), [("lars", "lamb"), ("lamb", "lans"), ("muon", "adamw")])
def test_moments_are_not_kept_for_an_optimizer_that_cannot_use_them(before: str, after: str) -> None:
    def recipe(reset: bool, *names: str) -> dict[str, Any]:
        optims = [{"name": name, "reset_moments": reset} for name in names]
        return tree(phases={f"p{i}": {"steps": 9, "global_batch_size": 32, "optim": optim} for i, optim in enumerate(optims)})

    text = message(lambda: config.build_run(recipe(False, before, after)))
    assert text == f"phases.p1.optim.reset_moments = false: {after} cannot use what {before} leaves in phase p0; set it to true"
    for works in (recipe(True, before, after), recipe(False, before, before), recipe(False, "adamw", "lamb", "adamw")):
        config.build_run(works)


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ({"initial_batch_size": 48, "steps": 9}, "initial_batch_size = 48: must divide phases.short.global_batch_size = 64 and be smaller"),
        ({"initial_batch_size": 64, "steps": 9}, "initial_batch_size = 64: must divide"),
        ({"initial_batch_size": -8, "steps": 9}, "initial_batch_size = -8: must divide"),
        ({"initial_batch_size": 8}, "steps = 0: must be above 0 and below phases.short.steps = 100"),
        ({"initial_batch_size": 8, "steps": 100}, "steps = 100: must be above 0 and below"),
        ({"steps": 9}, "steps = 9: needs phases.short.batch_warmup.initial_batch_size"),
    ],
)
def test_a_batch_warm_up_that_cannot_work_is_refused(warmup: dict[str, int], expected: str) -> None:
    assert message(lambda: config.build_run(tree(phases__short__batch_warmup=warmup))).startswith(f"phases.short.batch_warmup.{expected}")
    assert config.build_run(tree(phases__short__batch_warmup={"initial_batch_size": 8, "steps": 99})).phases[
        "short"
    ].batch_warmup == BatchWarmup(8, 99)


def byte_tree(kind: str = "mlstm", **changes: Any) -> dict[str, Any]:
    """A small valid recipe of a byte model with dotted changes, written with __ for a dot."""
    found: dict[str, Any] = {
        "name": "x",
        "data": {"tokenizer": "bytes"},
        "model": {"kind": kind},
        "phases": {"main": {"steps": 100, "global_batch_size": 64}},
    }
    return change(found, {key.replace("__", "."): value for key, value in changes.items()})


FOREIGN_TO_BYTES = [
    ("data__vocab_file", "v.txt", "data.vocab_file = v.txt: bytes has no vocab_file"),
    ("data__vocab_size", 256, "data.vocab_size = 256: bytes has no vocab_size"),
    ("data__lowercase", False, "data.lowercase = False: bytes has no lowercase"),
    ("model__attention_dropout", 0.2, "model.attention_dropout = 0.2: mlstm has no attention_dropout; it belongs to bert"),
    ("model__embedding_size", 0, "model.embedding_size = 0: must be above 0"),
    *[
        (f"model__{key}", value, f"model.{key} = {value}: mlstm has no {key}; it belongs to bert, modernbert, transformer")
        for key, value in (("num_heads", 8), ("intermediate_size", 64), ("dropout", 0.3))
    ],
    (
        "model__max_position_embeddings",
        256,
        "model.max_position_embeddings = 256: mlstm has no max_position_embeddings; it belongs to bert, modernbert, transformer",
    ),
    *[
        (f"phases__main__{key}", value, f"phases.main.{key} = {value}: a byte model has no {key}; it belongs to BERT")
        for key, value in (("short_seq_prob", 0.2), ("mlm_probability", 0.2), ("max_predictions_per_seq", 80), ("whole_word", True))
    ],
    (
        "phases__main__batch_warmup",
        {"initial_batch_size": 8, "steps": 9},
        "phases.main.batch_warmup = {'initial_batch_size': 8, 'steps': 9}: a byte model has no batch_warmup; it belongs to BERT",
    ),
    ("phases__main__num_document_groups", 63, "phases.main.num_document_groups = 63: must be phases.main.global_batch_size = 64 or more"),
    ("phases__main__num_document_groups", -1, "phases.main.num_document_groups = -1: must be 0 or more"),
    ("phases__main__label_weight", NAN, "phases.main.label_weight = nan: must be 0 or more"),
    ("phases__main__label_weight", 0.1, "phases.main.label_weight = 0.1: needs data.label"),
    ("phases__main__optim", {"name": "muon", "base_width": 64}, "phases.main.optim.base_width = 64: mlstm has no rule for the rate"),
    ("phases__main__seq_len", 7, "phases.main.seq_len = 7: must be 8 to 8192"),
    ("phases__main__seq_len", 8193, "phases.main.seq_len = 8193: must be 8 to 8192"),
    ("data__tokenizer", "wordpiece", "data.tokenizer = wordpiece: model.kind = mlstm reads bytes"),
    ("finetune__names", {}, "finetune = {'names': {}}: a byte model has no finetune; it belongs to BERT"),
    ("linear_probe__sst", {}, "linear_probe.sst.path = '': name the folder that holds the data of 'sst'"),
    ("linear_probe", {"a.b": {"path": "x"}}, "linear_probe.a.b: a name must be of letters"),
    ("linear_probe__sst", {"path": "x", "seeds": []}, "linear_probe.sst.seeds = []: name at least one seed"),
    ("linear_probe__sst", {"path": "x", "seeds": [0, -1]}, "linear_probe.sst.seeds = [0, -1]: each must be 0 to 4294967295"),
    ("linear_probe__sst", {"path": "x", "max_train_examples": -1}, "linear_probe.sst.max_train_examples = -1: must be 0 or more"),
]


@pytest.mark.parametrize(("key", "value", "expected"), FOREIGN_TO_BYTES, ids=[expected[:40] for *_, expected in FOREIGN_TO_BYTES])
def test_what_a_byte_model_does_not_have_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(byte_tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


FOREIGN_TO_BERT = [
    ("data__tokenizer", "bytes", "data.tokenizer = bytes: model.kind = bert reads wordpiece"),
    ("data__test_fraction", 0.1, "data.test_fraction = 0.1: wordpiece has no test_fraction"),
    ("data__label", "stars", "data.label = stars: wordpiece has no label"),
    ("model__embedding_size", 32, "model.embedding_size = 32: bert has no embedding_size; it belongs to mlstm, lstm"),
    ("model__weight_norm", False, "model.weight_norm = False: bert has no weight_norm; it belongs to mlstm, lstm"),
    (
        "phases__short__num_document_groups",
        64,
        "phases.short.num_document_groups = 64: BERT has no num_document_groups; it belongs to a byte model",
    ),
    ("compute__cuda_graphs", True, "compute.cuda_graphs = true: bert has no recurrence to capture; use compute.torch_compile"),
    ("phases__short__reshuffle", False, "phases.short.reshuffle = False: BERT has no reshuffle; it belongs to a byte model"),
    ("phases__short__label_weight", 0.1, "phases.short.label_weight = 0.1: BERT has no label_weight; it belongs to a byte model"),
    ("linear_probe__sst", {"path": "x"}, "linear_probe = {'sst': {'path': 'x'}}: BERT has no linear_probe; it belongs to a byte model"),
]


@pytest.mark.parametrize(("key", "value", "expected"), FOREIGN_TO_BERT, ids=[expected[:40] for *_, expected in FOREIGN_TO_BERT])
def test_what_bert_does_not_have_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


def modern_tree(**changes: Any) -> dict[str, Any]:
    """A small valid recipe of ModernBERT with dotted changes, written with __ for a dot."""
    return tree(**{"model__kind": "modernbert", "phases__short__nsp": False, **changes})


def test_a_recipe_of_modernbert_is_read_back_as_it_is() -> None:
    settings: dict[str, Any] = {"local_attention": 128, "global_attention_every": 2, "rope_theta": 1e5, "local_rope_theta": 5e3}
    settings |= {"init": "zero", "unigram_bias": False, "pooling": "cls", "dropout": 0.1}
    run = config.build_run(modern_tree(**{f"model__{key}": value for key, value in settings.items()}))
    assert isinstance(run.model, ModernBertConfig) and settings.items() <= dataclasses.asdict(run.model).items()
    assert config.build_run(config.to_tree(run)) == run


FOREIGN_TO_MODERNBERT = [
    ("phases__short__token_matching", 1.5, "phases.short.token_matching = 1.5: must be 0 to 1"),
    ("model__attention_dropout", 0.1, "model.attention_dropout = 0.1: modernbert has no attention_dropout; it belongs to bert"),
    ("model__embedding_size", 32, "model.embedding_size = 32: modernbert has no embedding_size; it belongs to mlstm, lstm"),
    ("model__num_heads", 5, "model.num_heads = 5: must divide model.hidden_size = 768"),
    (
        "model__num_heads",
        256,
        "model.num_heads = 256: leaves 3 dimensions a head, and rotary positions turn them in pairs; the number must be even",
    ),
    ("model__local_attention", 7, "model.local_attention = 7: must be even, half of it on either side"),
    ("model__local_attention", -2, "model.local_attention = -2: must be 0 or more"),
    ("model__global_attention_every", 0, "model.global_attention_every = 0: must be above 0"),
    ("model__rope_theta", 0, "model.rope_theta = 0.0: must be above 0"),
    ("model__local_rope_theta", NAN, "model.local_rope_theta = nan: must be above 0"),
    ("model__init", "xavier", "model.init = 'xavier': input should be 'megatron', 'zero' or 'normal'"),
    ("model__pooling", "max", "model.pooling = 'max': input should be 'mean' or 'cls'"),
    ("model__rotary", True, "model.rotary = True: unknown key, did you mean 'rope_theta'? Allowed: kind, num_layers, hidden_size"),
    ("phases__short__seq_len", 513, "phases.short.seq_len = 513: must be 8 to model.max_position_embeddings = 512"),
    ("data__tokenizer", "bytes", "data.tokenizer = bytes: model.kind = modernbert reads wordpiece"),
    ("compute__cuda_graphs", True, "compute.cuda_graphs = true: modernbert has no recurrence to capture; use compute.torch_compile"),
    ("linear_probe__sst", {"path": "x"}, "linear_probe = {'sst': {'path': 'x'}}: BERT has no linear_probe; it belongs to a byte model"),
]


@pytest.mark.parametrize(("key", "value", "expected"), FOREIGN_TO_MODERNBERT, ids=[expected[:40] for *_, expected in FOREIGN_TO_MODERNBERT])
def test_what_modernbert_does_not_have_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(modern_tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


def test_what_only_modernbert_has_is_refused_elsewhere() -> None:
    for key, value in (("local_attention", 128), ("rope_theta", 1e4), ("pooling", "mean"), ("unigram_bias", False)):
        expected = f"model.{key} = {value!r}: bert has no {key}; it belongs to modernbert"
        assert message(lambda key=key, value=value: config.build_run(tree(**{f"model__{key}": value}))) == expected


def test_a_window_is_bound_by_positions_only_where_there_are_some() -> None:
    probe: dict[str, Any] = {"linear_probe__sst": {"path": "x"}}
    long: dict[str, Any] = {"model__hidden_size": 500, "phases__main__seq_len": 4096}
    for kind in ("mlstm", "lstm"):
        run = config.build_run(byte_tree(kind, phases__main__label_weight=0.5, data__label="stars", **probe, **long))
        assert config.build_run(config.to_tree(run)) == run
    text = message(lambda: config.build_run(byte_tree("transformer", model__num_heads=12, **probe, **long)))
    assert [line.split(":")[0] for line in text.splitlines()] == ["model.num_heads = 12", "phases.main.seq_len = 4096", "linear_probe.sst"]
    long["model__max_position_embeddings"] = 4096
    config.build_run(byte_tree("transformer", **{**long, "model__num_heads": 10, "model__dropout": 0.3}))


def test_every_setting_that_only_some_tokenizers_have_exists() -> None:
    assert {key for names in DATA_SETTINGS.values() for key in names} < {f.name for f in dataclasses.fields(Data)}
