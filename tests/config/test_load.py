"""A recipe is loaded, overridden, checked and saved; what is wrong is named by key, value and what is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight import config
from overnight.config import (
    OPTIMIZERS,
    AdamWConfig,
    BertConfig,
    BertPhase,
    BertRun,
    Finetune,
    LambConfig,
    LansConfig,
    Phase,
    RecurrentLMConfig,
    Run,
    Scaling,
    Schedule,
)
from overnight.config.describe import describe
from tests.recipe import message, tree


def write(folder: Path, value: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value), encoding="utf-8")
    return str(path)


def test_the_smallest_recipe_is_valid_and_frozen() -> None:
    run = config.build_run(tree())
    assert run == BertRun(name="x", phases={"short": BertPhase(100, 64)}, finetune={"names": Finetune()})
    assert (run.run_dir, run.data_dir) == (Path("runs/x"), Path("data/x"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 1  # type: ignore[misc]


WRONG_TYPE = [
    ("steps", "phases__short__steps", True, "phases.short.steps = True: must be a whole number"),
    ("lr", "phases__short__optim__lr", False, "phases.short.optim.lr = False: must be a number"),
    ("seeds", "finetune__names__seeds", [0, True], "finetune.names.seeds.1 = True: must be a whole number"),
    ("betas", "phases__short__optim__betas", [True, 0.9], "phases.short.optim.betas.0 = True: must be a number"),
    ("nsp", "phases__short__nsp", 1, "phases.short.nsp = 1: must be true or false"),
    ("compile", "compute__torch_compile", "yes", "compute.torch_compile = 'yes': must be true, false or auto"),
    ("fraction", "phases__short__steps", 1.5, "phases.short.steps = 1.5: input should be a valid integer"),
    ("word", "phases__short__steps", "many", "phases.short.steps = 'many': input should be a valid integer"),
    ("null", "phases__short__steps", None, "phases.short.steps = null: cannot be empty; leave it out"),
    ("str for list", "data__paths", "a.txt", "data.paths = 'a.txt': input should be a valid list"),
    ("list for str", "data__dir", ["a"], "data.dir = ['a']: input should be a valid string"),
    ("number for str", "name", 5, "name = 5: input should be a valid string"),
    ("number in paths", "data__paths", ["a", 5], "data.paths.1 = 5: input should be a valid string"),
    ("GPU's number", "compute__device", "cuda:1", "compute.device = 'cuda:1': input should be 'auto', 'cpu' or 'cuda'; take 'cuda', and"),
    ("one beta", "phases__short__optim__betas", [0.9], "phases.short.optim.betas.1: is missing"),
    ("three betas", "phases__short__optim__betas", [0.9] * 3, "phases.short.optim.betas = [0.9, 0.9, 0.9]: tuple should have at most 2"),
    (
        "literal",
        "phases__short__optim__name",
        "sgd",
        "phases.short.optim.name = 'sgd': must be one of lamb, lans, lars, adamw, muon",
    ),
    ("phase", "phases__short", 5, "phases.short = 5: is a section, not a value; set one of its keys: steps, global_batch_size"),
    ("section", "data", None, "data = None: is a section, not a value; set one of its keys: paths, sources, tokenizer"),
    ("missing", "phases__other", {"steps": 5}, "phases.other.global_batch_size: is missing and has no default"),
    ("unknown", "phases__short__stesp", 5, "phases.short.stesp = 5: unknown key, did you mean 'steps'? Allowed: steps, global_batch_size"),
    ("far off", "data__zzz", 5, "data.zzz = 5: unknown key; Allowed: paths, sources, tokenizer, dir"),
    ("top", "phase", {}, "phase = {}: unknown key, did you mean 'phases'? Allowed: name, out"),
    (
        "deep",
        "phases__short__optim__schedule__warmpu",
        0,
        "phases.short.optim.schedule.warmpu = 0: unknown key, did you mean 'warmup_ratio'?",
    ),
]


@pytest.mark.parametrize(("key", "value", "expected"), [case[1:] for case in WRONG_TYPE], ids=[case[0] for case in WRONG_TYPE])
def test_a_wrong_type_or_key_is_refused(key: str, value: Any, expected: str) -> None:
    text = message(lambda: config.build_run(tree(**{key: value})))
    assert any(line.startswith(expected) for line in text.splitlines()), text


def test_every_mistake_is_named_at_once() -> None:
    text = message(lambda: config.build_run(tree(seed="a", data__zzz=1, compute__torch_compile=1, phases__short__steps=True)))
    assert sorted(line.split(" = ")[0] for line in text.splitlines()) == ["compute.torch_compile", "data.zzz", "phases.short.steps", "seed"]
    text = message(lambda: config.build_run(tree(seed=-1, model__num_heads=5, phases__short__seq_len=1)))
    assert len(text.splitlines()) == 3


def test_numbers_may_be_written_as_yaml_reads_them() -> None:
    # YAML 1.1 takes 4e-3 for a word.
    run = config.build_run(tree(phases__short__optim__lr="4e-3", phases__short__steps=200.0))
    assert run.phases["short"].optim.lr == 0.004 and run.phases["short"].steps == 200


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("--phases.short.optim.lr=4e-3", lambda run: run.phases["short"].optim.lr, 0.004),
        ("phases.short.optim.betas=[0.8, 0.9]", lambda run: run.phases["short"].optim.betas, (0.8, 0.9)),
        ("--phases.short.optim.schedule.name=poly_nvidia", lambda run: run.phases["short"].optim.schedule.name, "poly_nvidia"),
        ("--data.paths=my/folder", lambda run: run.data.paths, ["my/folder"]),
        ("--data.paths=[a, b]", lambda run: run.data.paths, ["a", "b"]),
        ("--data.paths=builtin:python-docs", lambda run: run.data.paths, ["builtin:python-docs"]),
        ("--finetune.names.seeds=7", lambda run: run.finetune["names"].seeds, [7]),
        ("--compute.torch_compile=true", lambda run: run.compute.torch_compile, True),
        ("--name=2026", lambda run: run.name, "2026"),
        ("--name=on", lambda run: run.name, "on"),
        ("--name='quoted'", lambda run: run.name, "quoted"),
        ("--name=run #2", lambda run: run.name, "run #2"),
        ("--name='run #2'", lambda run: run.name, "run #2"),
        ("--out=*.md", lambda run: run.out, "*.md"),
        ("--out=[draft] & more", lambda run: run.out, "[draft] & more"),
        ("--data.paths=logs #1", lambda run: run.data.paths, ["logs #1"]),
        ("--data.paths=*.md", lambda run: run.data.paths, ["*.md"]),
        ("--data.paths=2024-11-03", lambda run: run.data.paths, ["2024-11-03"]),
        ("--data.paths=Notes: 2024", lambda run: run.data.paths, ["Notes: 2024"]),
        ("--data.paths=['logs #1', b]", lambda run: run.data.paths, ["logs #1", "b"]),
        ("--data.vocab_file=", lambda run: run.data.vocab_file, ""),
        ("--out=a=b", lambda run: run.out, "a=b"),
        ("--phases.long={steps: 5, global_batch_size: 32}", lambda run: run.phases["long"], BertPhase(5, 32)),
        ("--finetune={}", lambda run: run.finetune, {}),
    ],
)
def test_an_override_reaches_any_key(tmp_path: Path, override: str, read: Callable[[Run], object], expected: object) -> None:
    assert read(config.load_run(write(tmp_path, tree()), [override])) == expected


def test_a_new_phase_may_be_made_of_overrides_and_the_last_one_wins(tmp_path: Path) -> None:
    overrides = ["phases.long.steps=3", "phases.long.global_batch_size=64", "phases.long.steps=4"]
    assert config.load_run(write(tmp_path, tree()), overrides).phases["long"] == BertPhase(4, 64)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("phases.short.steps", "'phases.short.steps': an override is written key=value"),
        ("seed.deep=5", "seed.deep: 'seed' is a value"),
        ("name.deep.er=5", "name.deep.er: 'deep' holds no keys"),
        ("data.pahts=a", "data.pahts = 'a': unknown key, did you mean 'paths'?"),
        ("nothing=5", "nothing = 5: unknown key"),
        ("phases.short.steps=[1", "phases.short.steps = '[1' is not a YAML value"),
        ("=5", " = 5: unknown key"),
        ("seed=", "seed = null: cannot be empty; leave it out"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    recipe = tree(seed=1)
    assert message(lambda: config.load_run(write(tmp_path, recipe), [override])).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", "is not YAML"),
        ("- a\n- b\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    found = message(lambda: config.load_run(path))
    assert path in found and expected in found


def test_a_key_that_stands_twice_in_a_recipe_is_refused_with_its_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: a\nlogging: {log_every: 2}\nphases:\n  short: {steps: 4}\n  long: {steps: 4, steps: 5}\n  short: {steps: 6}\nlogging: {log_every: 3}\n",
    )
    lines = message(lambda: config.load_run(path)).splitlines()
    assert [line.removeprefix(path).split(" is given twice")[0] for line in lines] == [":5: 'steps'", ":6: 'short'", ":7: 'logging'"]


def test_a_file_that_is_not_utf8_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\n")
    assert "is not UTF-8 (byte 6)" in message(lambda: config.load_run(str(path)))
    # A file whose first byte gives an input/output error.
    assert message(lambda: config.load_run("/proc/self/mem")).startswith("/proc/self/mem: cannot be read: ")


def test_an_unknown_recipe_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    assert "did you mean 'demo'?" in message(lambda: config.load_run("demmo"))
    assert str(tmp_path) in message(lambda: config.load_run(str(tmp_path)))


@pytest.mark.parametrize("name", sorted(config.recipes()))
def test_every_shipped_recipe_loads_and_survives_saving(name: str) -> None:
    run = config.load_run(name)
    assert run.name == name
    assert config.build_run(yaml.safe_load(config.run_yaml(run))) == run


def test_the_published_recipes_have_the_published_numbers() -> None:
    assert {"demo", "bert-mini-books", "bert-base", "bert-large-lamb", "bert-large-lans", "bert-base-original"} <= set(config.recipes())
    large = config.load_run("bert-large-lamb")
    assert large.model == BertConfig(num_layers=24, hidden_size=1024, num_heads=16)
    for name, batch, length, predictions, lr, warmup, steps in (
        ("short", 65_536, 128, 20, 6e-3, 0.2843, 7_038),
        ("long", 32_768, 512, 80, 4e-3, 0.128, 1_563),
    ):
        phase = large.phases[name]
        assert (phase.global_batch_size, phase.seq_len, phase.max_predictions_per_seq, phase.steps) == (batch, length, predictions, steps)
        assert phase.optim == LambConfig(lr=lr, schedule=Schedule("poly_nvidia", warmup, 0.5), reset_moments=phase.optim.reset_moments)
    assert [phase.optim.reset_moments for phase in large.phases.values()] == [True, False]
    lans = config.load_run("bert-large-lans")
    assert lans.model == large.model
    for name, batch, lr, warmup, stable, steps in (
        ("short", 98_304, 6.75e-3, 0.4265, 0.2735, 3_519),
        ("long", 33_792, 5e-3, 0.192, 0.108, 782),
    ):
        phase, like = lans.phases[name], large.phases[name]
        assert (phase.global_batch_size, phase.steps) == (batch, steps)
        assert (phase.seq_len, phase.max_predictions_per_seq) == (like.seq_len, like.max_predictions_per_seq)
        assert phase.optim == LansConfig(lr=lr, schedule=Schedule("wsd", warmup, stable_ratio=stable))
    original = config.load_run("bert-base-original")
    assert original.model == BertConfig() and [(p.steps, p.seq_len, p.global_batch_size) for p in original.phases.values()] == [
        (900_000, 128, 256),
        (100_000, 512, 256),
    ]
    for phase in original.phases.values():
        assert (phase.optim.name, phase.optim.lr, phase.optim.schedule.warmup_ratio * phase.optim.schedule.total_steps) == (
            "adamw",
            1e-4,
            10_000,
        )


def test_the_published_byte_recipes_have_the_published_numbers() -> None:
    for width, batch, steps, per_device in ((4096, 32_768, 14_000, 256), (8192, 12_288, 12_400, 96)):
        run = config.load_run(f"mlstm-{width}-amazon")
        assert run.model == RecurrentLMConfig(kind="mlstm", num_layers=1, hidden_size=width) and run.precision == "fp16"
        (phase,) = run.phases.values()
        assert (phase.global_batch_size, phase.steps, phase.seq_len, phase.micro_batch_size) == (batch, steps, 256, per_device)
        assert phase.optim == AdamWConfig(
            lr=3e-3, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0, schedule=Schedule("linear", warmup_ratio=0.0, total_steps=100_000)
        )
        # 1000 : 1 : 1
        assert run.data.valid_fraction == run.data.test_fraction == pytest.approx(1 / 1002, rel=1e-3)
    small = config.load_run("mlstm-small")
    assert small.phases["main"].optim.weight_decay == 0 and {task.task for task in small.linear_probe.values()} == {"sst", "imdb"}


OPTIMS = st.one_of(
    *(
        st.builds(
            OPTIMIZERS[name],
            lr=st.floats(1e-12, 1e3),
            eps=st.floats(1e-300, 1),
            betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.9999)),
            scaling=st.builds(Scaling, st.sampled_from(["linear", "sqrt"]), st.integers(1, 10**6)),
            schedule=st.builds(Schedule, name=st.sampled_from(["poly", "wsd"]), warmup_ratio=st.floats(0, 1), power=st.floats(0.01, 9)),
        )
        for name in ("lamb", "lans", "adamw", "muon")
    )
)
PHASES = st.builds(
    BertPhase,
    steps=st.integers(1, 10**7),
    global_batch_size=st.sampled_from([32, 64, 65_536]),
    seq_len=st.integers(8, 512),
    nsp=st.booleans(),
    mlm_probability=st.floats(1e-3, 0.15),
    short_seq_prob=st.floats(0, 1),
    optim=OPTIMS,
)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(max_examples=25)
@given(
    WORDS.filter(lambda name: "/" not in name and name not in (".", "..")),
    st.dictionaries(st.from_regex(r"[a-z_0-9-]{1,8}", fullmatch=True), PHASES, min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.lists(WORDS, min_size=1, max_size=3),
)
def test_a_saved_run_is_read_back_equal(name: str, phases: dict[str, Phase], seed: int, paths: list[str]) -> None:
    run = dataclasses.replace(config.build_run(tree()), name=name, phases=phases, seed=seed)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, paths=paths))
    again = config.build_run(yaml.safe_load(config.run_yaml(run)))
    assert again == run and list(again.phases) == list(run.phases)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compute__device", "cuda"),
        ("compute__torch_compile", True),
        ("compute__threads", 3),
        ("logging__tensor_norms_every", 5),
        ("logging__grad_noise_every", 5),
        ("checkpoint__keep_latest_k", 9),
        ("out", "elsewhere"),
        ("data__dir", "elsewhere"),
        ("data__workers", 4),
        ("phases__short__micro_batch_size", 128),
        ("finetune__names__micro_batch_size", 8),
    ],
)
def test_identity_ignores_how_the_machine_carries_it_out(key: str, value: Any) -> None:
    assert config.identity(config.build_run(tree(**{key: value}))) == config.identity(config.build_run(tree()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("precision", "bf16"),
        ("distributed__grad_reduce_dtype", "bf16"),
        ("seed", 1),
        ("data__lowercase", False),
        ("phases__short__global_batch_size", 32),
        ("phases__short__optim__lr", 5e-4),
        ("phases__short__optim__trust_ratio_on", "all"),
        ("phases__short__optim__skip_zero_grad", False),
        ("phases__short__optim__schedule__power", 2.0),
        ("model__dropout", 0.0),
    ],
)
def test_identity_holds_what_decides_the_training_and_differences_name_it(key: str, value: Any) -> None:
    a, b = (config.identity(config.build_run(tree(**changes))) for changes in ({}, {key: value}))
    (line,) = config.differences(a, b)
    assert line.startswith(key.replace("__", ".") + ": ") and line.endswith(f"{value} here")


def test_differences_name_keys_that_only_one_has() -> None:
    assert list(config.differences({"a": {"b": 1}}, {"a": {"c": 2}})) == ["a.b: 1 there, (absent) here", "a.c: (absent) there, 2 here"]
    assert list(config.differences({"a": [1]}, {"a": [1]})) == []


def test_a_path_is_filled_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_TEST", "/there")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("OVERNIGHT_UNSET", raising=False)
    assert config.environment_path("$OVERNIGHT_TEST/a", "data.paths") == Path("/there/a")
    assert config.environment_path("${OVERNIGHT_TEST}-b", "data.paths") == Path("/there-b")
    assert config.environment_path("~/c", "data.paths") == Path("/home/me/c")
    for text in ("$OVERNIGHT_UNSET/a", "${OVERNIGHT_UNSET}/a", "/x/$OVERNIGHT_UNSET-a"):
        found = message(lambda text=text: config.environment_path(text, "data.paths"))  # type: ignore[misc]
        assert found == f"data.paths = {text!r}: the environment variable OVERNIGHT_UNSET is not set; set it or give the path"


@pytest.mark.parametrize("ending", ["\n", "", "\r\n"])
def test_a_vocabulary_file_of_another_size_is_refused(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # U+2028 ends a line for Python, but is a piece of a real vocabulary.
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "\u2028", "##b"]
    newline = ending or "\n"
    path = tmp_path / "vocab.txt"
    path.write_bytes((newline.join(pieces) + ending).encode())
    monkeypatch.setenv("OVERNIGHT_TEST", str(tmp_path))
    assert config.build_run(tree(data__vocab_file="$OVERNIGHT_TEST/vocab.txt", data__vocab_size=8)).data.vocab_size == 8
    text = message(lambda: config.build_run(tree(data__vocab_file=str(path), data__vocab_size=9)))
    assert text == f"data.vocab_size = 9: {path} has 8 tokens; set data.vocab_size=8 or give another file"


def test_a_vocabulary_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.txt")
    assert message(lambda: config.build_run(tree(data__vocab_file=gone))).startswith(f"data.vocab_file = {gone!r}: cannot be read")
    assert "OVERNIGHT_UNSET is not set" in message(lambda: config.build_run(tree(data__vocab_file="$OVERNIGHT_UNSET/v")))
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"\xff\n")
    assert "cannot be read" in message(lambda: config.build_run(tree(data__vocab_file=str(path))))


def test_every_key_is_described() -> None:
    rows = {key: (kind, default, text) for key, kind, default, text in describe()}
    assert all(text for _, _, text in rows.values())
    assert rows["phases.NAME.optim.lr"][:2] == ("float", "0.001")
    assert rows["phases.NAME.steps"][1] == "required" and rows["precision"][0] == "auto|fp32|tf32|bf16|fp16|fp8|int8"
    assert set(config.recipes()) and rows["finetune.NAME.seeds"][1] == "[0]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "--phases.lnog.steps=5",
            "phases.lnog: the recipe has no phase 'lnog' (did you mean 'long'?). It has: long, short. To add it, give --phases.lnog.",
        ),
        ("--phases.lnog.optim.lr=5", "give --phases.lnog.steps=..., --phases.lnog.global_batch_size=... too"),
        ("--phases.x=5", "the recipe has no phase 'x'. It has: long, short"),
        ("--finetune.nmes.epochs=2", "finetune.nmes: the recipe has no finetune task 'nmes' (did you mean 'names'?). It has: names"),
    ],
)
def test_a_misspelled_phase_or_task_on_the_command_line_is_named(tmp_path: Path, override: str, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree(phases__long={"steps": 10, "global_batch_size": 64})))
    found = message(lambda: config.load_run(str(recipe), [override]))
    assert said in found and "is missing" not in found
