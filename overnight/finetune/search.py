"""Search of the settings of a task: each is tried with the first seed, and compared by rows that are not reported."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from dataclasses import replace
from typing import Any

from overnight.config import Finetune, Search
from overnight.config.budget import length_of
from overnight.console import table
from overnight.display import duration, measure, plural, scale_of
from overnight.distributed.replicas import ReplicaMismatch
from overnight.errors import ConfigError, TrainingError
from overnight.finetune.beginning import Beginning
from overnight.finetune.encoded_task import EncodedTask, encode_task
from overnight.finetune.rehearsal import Rehearsal, combinations
from overnight.finetune.seed import seconds_before
from overnight.run_dir.task_results import append_result, read_results

# What a search is longer than expected by, at most: its first steps are slower, and checkpoints take time.
_MARGIN = 1.1


def search_settings(begin: Beginning, spec: Finetune) -> Finetune:
    """Try the settings of a search, what is missing of it, and return the task with the best of them.

    A trial that is done is not done again, one that was cut off resumes, and one that diverges has lost. The best is the one with the
    highest score on the rows of `select_on`, the first of equals.

    Raises:
        ConfigError: when the budget is too short for any of them, or there are many processes.
        TrainingError: when all diverged.
    """
    if begin.world.size > 1:
        raise ConfigError(f"finetune.{begin.name}.search: works in one process; search without torchrun, then train with what it found")
    return _Searching(begin, spec).go()


class _Searching:
    """The trials of one search."""

    def __init__(self, begin: Beginning, spec: Finetune) -> None:
        self.begin, self.spec, self.line, self.seed = begin, spec, begin.line, spec.seeds[0]
        self.log = begin.run.run_dir / "tasks.jsonl"
        self.folder = begin.run.run_dir / "finetune" / f"{begin.name}.search"
        self.settings = combinations(spec.search)
        self.hashes = [begin.config_hash(replace(spec, **settings)) for settings in self.settings]
        facts = json.dumps([self.hashes, self.seed, spec.search.budget])
        self.hash = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def go(self) -> Finetune:
        """Do what is missing; returns the task with the best settings."""
        mine = [entry for entry in read_results(self.log) if entry["name"] == self.begin.name]
        finished = [entry for entry in mine if entry["kind"] == "search" and entry["config_hash"] == self.hash]
        if finished:
            best = finished[-1]["settings"]
            self.line.print(f"{self.begin.name}: searched already; best {_words(best)}")
            return replace(self.spec, **best, search=Search())
        done = {e["config_hash"]: e for e in mine if e["kind"] == "trial" and e["seed"] == self.seed}
        self.done: dict[str, dict[str, Any]] = {h: done[h] for h in self.hashes if h in done}
        task = encode_task(self.spec, self.begin.corpus, self.begin.vocabulary)
        for note in task.notes:
            self.line.print(f"{self.begin.name}: {note}")
        self._plan(task)
        for folder in self.folder.glob("*"):
            if folder.name.partition("-")[0] not in self.hashes:  # of another search
                shutil.rmtree(folder)
        for its in self.done:  # of a trial that was killed once it was recorded
            shutil.rmtree(self.folder / f"{its}-{self.seed}" / "checkpoints", ignore_errors=True)
        for number, settings in enumerate(self.settings, 1):
            if self.hashes[number - 1] not in self.done and self._fits(number):
                self._trial(number, settings, task)
        return self._finish(task)

    def _plan(self, task: EncodedTask) -> None:
        """Say what will be done and how long it takes, by a rehearsal.

        Raises:
            ConfigError: when the budget is too short for one trial.
        """
        begin, search = self.begin, self.spec.search
        rehearsal = Rehearsal(begin.run, task, begin.vocabulary, begin.device)
        self.costs = [rehearsal.seed_seconds(replace(self.spec, **settings)) for settings in self.settings]
        self.budget = length_of(search.budget) if search.budget else math.inf
        least = min(range(len(self.costs)), key=self.costs.__getitem__)
        if not self.done and self.costs[least] > self.budget:
            raise ConfigError(
                f"finetune.{begin.name}.search.budget = {search.budget}: is too short for one trial; the shortest, {_words(self.settings[least])}, takes "
                f"about {duration(self.costs[least])}: give at least {math.ceil(self.costs[least] * _MARGIN)}s"
            )
        missing = [cost for cost, its in zip(self.costs, self.hashes, strict=True) if its not in self.done]
        left = min(sum(missing), self.budget - self._spent)
        already = f", {len(self.done)} of them done" * bool(self.done)
        by = (
            "dev rows, whose score is also reported"
            if task.selection is None
            else f"{len(task.selection[0]):,} training sequences set aside"
        )
        seeds = len(self.spec.seeds) + len(self.spec.seeds[: self.spec.random_init_seeds])
        after = sorted(seeds * cost for cost in self.costs)
        self.line.print(
            f"{begin.name}: search of {plural(len(self.settings), 'trial')}{already}, about {duration(left)}; chosen by {task.metric} on {by}; "
            f"then {plural(seeds, 'seed')} with the best, about {' to '.join(dict.fromkeys(map(duration, (after[0], after[-1]))))}"
        )

    @property
    def _spent(self) -> float:
        return sum(entry["seconds"] for entry in self.done.values())

    def _fits(self, number: int) -> bool:
        """Return whether a trial is expected to fit into the budget, by how long those before took."""
        expected = sum(cost for cost, its in zip(self.costs, self.hashes, strict=True) if its in self.done)
        slower = max(1.0, self._spent / expected) if expected else 1.0
        fits = self._spent + self.costs[number - 1] * slower <= self.budget
        if not fits:
            self.line.print(f"{self.begin.name}: trial {number} left out, it does not fit into {self.spec.search.budget}")
        return fits

    def _trial(self, number: int, settings: dict[str, Any], task: EncodedTask) -> None:
        """Train and record one trial."""
        spec, its = replace(self.spec, **settings), self.hashes[number - 1]
        what, folder = f"{self.begin.name} trial {number}", self.folder / f"{its}-{self.seed}"
        start = time.perf_counter() - seconds_before(folder)
        entry = {"kind": "trial", "name": self.begin.name, "task": spec.task, "seed": self.seed, "config_hash": its, "metric": task.metric}
        entry |= {"value": 0.0, "settings": settings}
        try:
            trained = self.begin.train(spec, task, self.seed, "pretrained", what, folder, announces=False)
        except ReplicaMismatch:
            raise
        except TrainingError as error:
            entry["diverged"] = str(error).partition("\n")[0]
            said = f"diverged: {entry['diverged']}"
        else:
            assert trained.value is not None
            entry |= {"value": trained.value, "epoch": trained.epoch, "epochs_trained": trained.epochs}
            said = f"{task.metric} {measure(task.metric, trained.value, scale_of(spec.task))}"
        entry["seconds"] = round(time.perf_counter() - start, 2)
        self.done[its] = append_result(self.log, entry)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self.line.print(f"{what} of {len(self.settings)}: {_words(settings)}  {said}")

    def _finish(self, task: EncodedTask) -> Finetune:
        """Record and show the outcome; returns the task with the best settings."""
        finite = [entry for its in self.hashes if (entry := self.done.get(its)) and "diverged" not in entry]
        self.line.print(self._table(task))
        if not finite:
            raise TrainingError(f"finetune.{self.begin.name}.search: every trial diverged; try lower rates")
        best = max(finite, key=lambda entry: entry["value"])
        entry = {"kind": "search", "name": self.begin.name, "config_hash": self.hash, "metric": task.metric, "value": best["value"]}
        append_result(self.log, {**entry, "settings": best["settings"], "seconds": round(self._spent, 2)})
        self.line.print(f"{self.begin.name}: best {_words(best['settings'])}")
        return replace(self.spec, **best["settings"], search=Search())

    def _table(self, task: EncodedTask) -> str:
        rows = [["trial", *self.settings[0], "epochs trained", task.metric.replace("_", " "), "time"]]
        for number, (settings, its) in enumerate(zip(self.settings, self.hashes, strict=True), 1):
            entry = self.done.get(its, {})
            score = measure(task.metric, entry["value"], scale_of(self.spec.task)) if entry else "left out"
            trained = f"{entry['epochs_trained']:g}" if "epochs_trained" in entry else "-"
            took = duration(entry["seconds"]) if entry else "-"
            rows.append(
                [str(number), *(f"{value:g}" for value in settings.values()), trained, "diverged" if "diverged" in entry else score, took]
            )
        return table(rows)


def _words(settings: dict[str, Any]) -> str:
    """Return settings as they are given on the command line."""
    return " ".join(f"{name}={value:g}" for name, value in settings.items())
