"""Pretraining: prepared shards and a recipe to a trained network, phase by phase; run again to resume."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import find_data
from overnight.checkpoint.run_identity import check_folder, claim_folder
from overnight.config import Run
from overnight.config.validate import refuse_sharded_muon
from overnight.console import Line
from overnight.corpus.settings import check_settings, settings_of
from overnight.corpus.shards import load_manifest
from overnight.distributed.collectives import assert_same_on_all_ranks, raise_on_all_ranks, shared_facts
from overnight.distributed.world import process_group
from overnight.engine.budget_extension import extend_budget
from overnight.engine.budget_record import check_budget
from overnight.engine.training_run import TrainingRun
from overnight.run_dir.atomic import check_writable
from overnight.run_dir.lock import run_lock


def pretrain(run: Run, line: Line | None = None, extend: bool = False) -> Path:
    """Pretrain the phases of a run whose data is prepared, in this process or with all that torchrun started; returns the newest checkpoint.

    Args:
        extend: the run folder may hold a shorter run, which this one resumes from; of a run with a budget, the budget is so much more time.

    Raises:
        ConfigError: the recipe is wrong, or its data was prepared with other settings.
        DataError, Interrupted, TrainingError.
        UserError: when another process is writing the run folder.
    """
    with process_group(run) as world, ExitStack() as locks:
        with raise_on_all_ranks(world):
            # First what can fail: a folder is claimed by a run that can begin.
            refuse_sharded_muon(run)
            training = TrainingRun(found := find_data(run), line or Line(), world)
            check_settings(settings_of(run.data), load_manifest(found.data_dir).settings, found.data_dir)
            check_folder(run, extend)
        assert_same_on_all_ranks(shared_facts(run, training.workload.fingerprint, world), world)
        with raise_on_all_ranks(world):
            if world.main:
                check_writable(run.run_dir, "out")
                run.run_dir.mkdir(parents=True, exist_ok=True)
                locks.enter_context(run_lock(run.run_dir))
                if extend and run.budget:
                    extend_budget(run, training.line.print)
                check_budget(run)
                claim_folder(run, extend)
        training.go()
    newest = reader.newest_checkpoint(training.checkpoints)
    assert newest is not None or not world.main, "every phase ends with a checkpoint"
    return newest or training.checkpoints
