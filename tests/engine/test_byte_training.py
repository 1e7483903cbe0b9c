"""A byte model trains through the same engine: carried state, resumes, micro-batches, processes, labels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overnight import config
from overnight.batches.streams import ByteBatch
from overnight.checkpoint import reader
from overnight.config import Run
from overnight.corpus.pipeline import prepare
from overnight.engine import loop
from overnight.errors import ConfigError, DataError
from overnight.models.bytes import ByteModel
from tests.conftest import topics
from tests.distributed.test_parallel import Runs
from tests.engine.test_pretrain import finish
from tests.recipe import change

Make = Callable[..., Run]


def byte_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """Shards of about 8 windows, so that streams begin anew in the middle of the run."""
    optim = {"name": "adamw", "lr": 0.01, "weight_decay": 0.0, "schedule": {"name": "constant", "warmup_ratio": 0.0}}
    phase = {
        "steps": 12,
        "global_batch_size": 8,
        "seq_len": 16,
        "micro_batch_size": 4,
        "num_document_groups": 60,
        "optim": optim,
        **changes.get("phase", {}),
    }
    tree: dict[str, Any] = {
        "name": "bytes",
        "out": str(folder / "run"),
        "data": {
            "paths": [str(folder / "text.jsonl")],
            "dir": str(folder / "data"),
            "tokenizer": "bytes",
            "label": "length",
            "min_chars": 10,
            "valid_fraction": 0.1,
            "workers": 1,
        },
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": 32, **changes.get("model", {})},
        "phases": {"short": phase},
        "compute": {"threads": 1, "device": "cpu"},
        "logging": {"eval_every": 4, "eval_examples": 32, "log_every": 1},
        "checkpoint": {"save_every": 5, "keep_latest_k": 9},
    }
    if tree["model"]["kind"] != "transformer":
        tree["model"].setdefault("embedding_size", 16)
    return change(tree, changes.get("settings", {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared bytes: the first hundred letters or so of each topic, labeled with a number."""
    folder = tmp_path_factory.mktemp("bytes")
    texts = [text[at : at + 110] for text in topics().values() for at in (0, 200)]
    rows = [{"text": text, "length": len(set(text)) / 10} for text in texts]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = config.build_run(byte_tree(folder))
    prepare(run.data, run.data_dir, log=lambda text: None)
    return folder


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Make:
    def made(name: str = "run", **changes: Any) -> Run:
        return config.build_run(byte_tree(folder, **changes) | {"out": str(tmp_path / name)})

    return made


def test_a_phase_that_cannot_read_the_corpus_is_refused_before_its_run_has_a_folder(make: Make) -> None:
    run = make(phase={"num_document_groups": 5000})
    with pytest.raises(DataError, match="an epoch is split into 5,000 groups"):
        finish(run)
    assert not run.run_dir.exists()


def state(run: Run) -> dict[str, Tensor]:
    """Everything in the newest checkpoint, the carried state included."""
    from safetensors.torch import load_file

    place = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert place is not None and (place / "carry.safetensors").exists()
    return {f"{path.stem} {name}": t for path in place.glob("*.safetensors") for name, t in load_file(path).items()}


def assert_equal(a: Run, b: Run) -> None:
    ours, theirs = state(a), state(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def losses(run: Run) -> list[float]:
    return [line["byte_loss"] for line in lines(run, "train") + lines(run, "eval")]


MODELS: dict[str, dict[str, Any]] = {
    "mlstm": {"kind": "mlstm"},
    "lstm": {"kind": "lstm"},
    "transformer": {"kind": "transformer", "num_heads": 2, "max_position_embeddings": 16, "dropout": 0.1},
}


class Stop(Exception):
    """What stands for a crash."""


def crash(run: Run, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a run, which crashes in optimizer step number `at`."""
    real, count = loop.clip_and_step, 0

    def step(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == at:
            raise Stop
        return real(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(loop, "clip_and_step", step)
        finish(run)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("at", [6, 11])
def test_a_run_that_was_stopped_in_the_middle_of_a_shard_ends_with_the_same_bits(
    kind: str, at: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = make("whole", model=MODELS[kind]), make("cut", model=MODELS[kind])
    finish(whole)
    crash(cut, at, monkeypatch)
    assert "continuing at step" in finish(cut)
    assert_equal(cut, whole)
    assert losses(cut) == losses(whole)


def test_the_carried_state_matters_and_begins_anew_with_a_group(make: Make) -> None:
    run = make()
    finish(run)
    carried = state(run)["carry streams"]
    assert carried.shape == (8, 1, 2, 32) and carried.abs().min(0).values.max() > 0


@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_micro_batches_of_streams_do_not_change_the_training(micro_batch_size: int, make: Make) -> None:
    whole, cut = make("whole"), make("cut", phase={"micro_batch_size": micro_batch_size})
    finish(whole)
    finish(cut)
    for name, tensor in state(whole).items():
        torch.testing.assert_close(state(cut)[name], tensor, rtol=2e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_follow_fp32(precision: str, make: Make) -> None:
    fp32, half = make("fp32"), make(precision, settings={"precision": precision})
    finish(fp32)
    finish(half)
    taken = [line["byte_loss"] for line in lines(half, "eval")][-1]
    assert taken == pytest.approx(lines(fp32, "eval")[-1]["byte_loss"], rel=0.05 if precision == "bf16" else 1.0)


def test_bits_per_byte_are_the_validation_nats_over_log_2_and_fall_below_chance(make: Make) -> None:
    run = make(phase={"steps": 60})
    finish(run)
    found = lines(run, "eval")
    assert all(line["bits_per_byte"] == pytest.approx(line["byte_loss"] / math.log(2)) for line in found)
    assert found[-1]["bits_per_byte"] < 5.5 < found[0]["bits_per_byte"] < 8.5


def test_the_label_is_learned_beside_the_bytes_with_its_weight(make: Make) -> None:
    run = make(phase={"steps": 60, "label_weight": 0.5}, settings={"logging.eval_every": 60, "logging.eval_examples": 320})
    finish(run)
    found = lines(run, "train")
    labels = [line["label_loss"] for line in found if "label_loss" in line]  # absent where no document ended
    for line in found:
        assert line["loss"] == pytest.approx(line["byte_loss"] + 0.5 * line.get("label_loss", 0.0), rel=1e-5)
    assert len(labels) > 20 and sum(labels[-10:]) < 0.5 * sum(labels[:10])
    assert "label_loss" in lines(run, "eval")[-1]


def test_a_state_that_is_not_finite_begins_anew_and_the_others_go_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from overnight.engine import pretrain as module

    run, real = make(), module.TrainingRun

    class Broken(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            whole, calls = self.model.losses, 0

            def losses(batch: Any, dtype: torch.dtype) -> Any:
                nonlocal calls
                calls += 1
                found, hits, after = whole(batch, dtype)
                if calls == 3:  # the first micro-batch of step 2
                    after = after.clone()
                    after[1, 0, 1, 5] = math.nan
                return found, hits, after

            self.objective = losses

    monkeypatch.setattr(module, "TrainingRun", Broken)
    told = finish(run)
    assert "step 2: the carried state of streams 1 was not finite and begins anew at zero" in told
    (event,) = (line for line in lines(run, "event") if line["event"] == "carry")
    assert event["streams"] == [1] and all(math.isfinite(loss) for loss in losses(run))


def remembered(run: Run) -> list[list[int]]:
    return list(json.loads((run.run_dir / "memory.json").read_text())["short"]["since"])


@pytest.mark.parametrize("kind", MODELS)
def test_micro_batches_of_streams_are_found_by_trial_and_the_run_is_that_of_the_same_number_given(kind: str, make: Make) -> None:
    def of(micro_batch_size: int) -> Run:
        phase = {"micro_batch_size": micro_batch_size, "label_weight": 0.5}
        return make(f"of-{micro_batch_size}", model=MODELS[kind], phase=phase)

    assert "that were tried" in finish(of(0))
    ((since, count),) = remembered(of(0))
    assert since == 0 and count in (1, 2, 4, 8)
    finish(of(count))
    assert_equal(of(0), of(count))


@pytest.mark.parametrize(("kind", "checkpointing"), [("mlstm", "none"), ("mlstm", "full"), ("transformer", "none")])
def test_streams_that_find_no_memory_are_read_again_in_halves_from_the_state_before(
    kind: str, checkpointing: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "model": {**MODELS[kind], "max_position_embeddings": 32} if kind == "transformer" else MODELS[kind],
        "settings": {"memory.activation_checkpointing": checkpointing},
    }
    run, reference = (make(name, **changes, phase={"seq_len": 32}) for name in ("run", "reference"))
    real, count = ByteModel.losses, 0

    def losses(self: ByteModel, batch: ByteBatch, dtype: torch.dtype) -> Any:
        nonlocal count
        found, *rest = real(self, batch, dtype)
        count += self.training
        if self.training and count == 12:  # the second micro-batch of step 6, whose first has left its state
            found["byte"].register_hook(none_left)
        return found, *rest

    def none_left(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(ByteModel, "losses", losses)
        told = finish(run)
    assert "step 6 ran out of memory (CUDA out of memory.) with micro-batches of 4: taken again with 2" in told
    assert remembered(run) == [[0, 4], [5, 2]]
    # The checkpoint before it is that of step 5.
    crash(reference, 6, monkeypatch)
    reference = make("reference", **changes, phase={"seq_len": 32, "micro_batch_size": 2})
    finish(reference)
    assert_equal(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.heavy)])
def test_2_processes_are_one_and_go_on_with_what_one_began(kind: str, folder: Path, tmp_path: Path) -> None:
    """In fp32: the parameters and the carried state of every stream agree to rounding, with labels that only some windows have."""
    runs = Runs(tmp_path, folder)
    changes = {"phase": {"label_weight": 0.5, "micro_batch_size": 2}, "settings": {"precision": "fp32", "distributed.strategy": kind}}

    def recipe(name: str, **phase: int) -> str:
        path, tree = tmp_path / f"{name}.yaml", byte_tree(folder, **changes) | {"out": str(tmp_path / name)}
        tree["phases"]["short"] |= phase
        path.write_text(config.run_yaml(config.build_run(tree)))
        return str(path)

    one, begun = config.load_run(recipe("one")), config.load_run(recipe("begun"))
    finish(one)
    finish(begun)
    for late in ("step-0000010", "step-0000012"):
        import shutil

        shutil.rmtree(begun.run_dir / "checkpoints" / late)
    said = runs.on(2, *({"recipe": path} for path in (recipe("two"), recipe("begun"), recipe("automatic", micro_batch_size=0))))
    assert {code for job in said for code, _ in job} == {0}, said
    theirs = state(one)
    for name in ("two", "begun", "automatic"):
        ours = state(config.load_run(recipe(name)))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=2e-6, msg=f"{name} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.heavy)])
def test_2_processes_train_phases_with_and_without_labels(kind: str, folder: Path, tmp_path: Path) -> None:
    runs, paths = Runs(tmp_path, folder), []
    for name in ("one", "two"):
        tree = byte_tree(folder, phase={"steps": 4}, settings={"distributed.strategy": kind}) | {"out": str(tmp_path / name)}
        tree["phases"]["labeled"] = tree["phases"]["short"] | {"label_weight": 0.5}
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(config.run_yaml(config.build_run(tree)))
    finish(config.load_run(str(paths[0])))
    # torch warns of a search for parameters without a gradient in the phase that has none.
    (said,) = runs.on(2, {"recipe": str(paths[1])}, on_warning="ignore")
    assert {code for code, _ in said} == {0}, said
    ours, theirs = (state(config.load_run(str(path))) for path in reversed(paths))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"compute.torch_compile": True}}, "compute.torch_compile = true: mlstm is not compiled"),
        ({"settings": {"precision": "fp8"}}, "the matrix products of mlstm are not computed in 8 bits"),
        ({"settings": {"memory.activation_checkpointing": "selective"}}, "mlstm has none or full"),
        (
            {"model": {"kind": "transformer", "num_heads": 2}, "settings": {"compute.cuda_graphs": True}},
            "compute.cuda_graphs = true: transformer has no recurrence",
        ),
    ],
)
def test_what_the_network_does_nothing_with_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config.build_run(byte_tree(tmp_path, **changes))
