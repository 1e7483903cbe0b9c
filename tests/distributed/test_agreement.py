"""What processes must agree on before they begin: all settings but those by which their machines may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from overnight import config
from overnight.config.fields import MACHINE, hints
from overnight.config.schema import RUNS
from overnight.distributed.collectives import _OWN, shared_facts
from overnight.distributed.world import World

# Settings of the machine that all processes wait for or compute alike by; a new one belongs here or to `_OWN`.
MUST_AGREE = {
    *(f"compute.{name}" for name in ("device", "torch_compile", "cuda_graphs", "deterministic")),
    *(f"memory.{name}" for name in ("activation_checkpointing", "optimizer_cpu_offload")),
    *(f"stability.{name}" for name in ("on_nonfinite", "on_spike", "spike_threshold", "replica_check_every", "on_replica_mismatch")),
    *(f"checkpoint.{name}" for name in ("save_every", "keep_latest_k", "keep_every_n_steps", "async_save")),
    *(f"logging.{name}" for name in ("log_every", "eval_every", "eval_examples", "tensor_norms_every", "grad_noise_every")),
    "distributed.strategy",
    "phases.micro_batch_size",
}


def settings_of_the_machine(kind: Any, prefix: str = "", marked: bool = False) -> Iterator[str]:
    """Keys of a class of settings, and of those in it, that are marked; names of phases and tasks are left out."""
    for name, (hint, notes) in hints(kind).items():
        kinds = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
        here = marked or MACHINE in notes
        for each in kinds:
            yield from settings_of_the_machine(each, f"{prefix}{name}.", here)
        if here and not kinds:
            yield prefix + name


@pytest.mark.parametrize("kind", dict.fromkeys(RUNS.values()), ids=lambda kind: kind.__name__)
def test_every_setting_of_the_machine_is_its_own_or_must_agree(kind: Any) -> None:
    own = tuple(".".join(key) for key in _OWN)
    for key in settings_of_the_machine(kind):
        assert key.startswith(tuple(f"{each}." for each in own)) or key in own or key in MUST_AGREE, key
        assert not (key in own and key in MUST_AGREE), key


def test_machines_may_differ_in_where_things_lie_and_in_what_is_measured_afterwards() -> None:
    def facts(*overrides: str) -> dict[str, Any]:
        return shared_facts(config.load_run("demo", list(overrides)), "corpus", World(0, 2))

    own = ("out=/a", "data.dir=/b", "data.cache=/c", "data.cache_gb=5", "data.workers=1", "compute.threads=1", "evaluation.blimp_pairs=7")
    assert facts(*own) == facts()
    assert list(config.differences(facts("checkpoint.save_every=7"), facts())) != []
