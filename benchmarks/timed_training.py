"""Train `overnight` for a given time, and evaluate any masked language model: what the campaigns of quality for time share.

Every training, preparation and evaluation is a process of its own, as a user would start it; what it prints goes to a log beside its results.

**The time** is that of `overnight pretrain` from its start to its end, importing and building included. A recipe whose schedules can be cut
is given it as `--budget`; every other is run for as many steps as fit: a short run measures the speed of each phase and
what the start takes, and the step counts of the recipe are scaled by one factor. No validation and no checkpoints on the way, but one at the end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from overnight import config
from overnight.batches.batch_size import sequences_before
from overnight.config import BertRun, Run
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.shards import load_manifest
from overnight.errors import ConfigError
from overnight.run_dir.atomic import write_json, write_whole
from overnight.state_files import read_mapping

_CLOSE, _TRIES = 0.1, 3
"""How far from the time asked for a training by a number of steps may end, as a share, and how often it is trained for that."""
QUIET = ("logging.eval_every=0", "checkpoint.save_every=1000000000", "checkpoint.keep_latest_k=1")
"""Overrides of every timed training."""
NO_BUDGET = "budget="
"""Takes a recipe's own budget away."""
STEPS = ("steps", "batch_warmup.steps", "optim.schedule.total_steps", "optim.schedule.step_offset")
"""Settings of a phase that count steps."""


def run_module(module: str, arguments: Sequence[object], log: Path, threads: int) -> float:
    """Run `python -m MODULE` to its end and return its seconds; what it prints is appended to a log.

    Raises:
        SystemExit: when it fails, with the end of the log.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=variables, check=False).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}; the end of {log}:\n{log.read_text(encoding='utf-8')[-2000:]}")
    return time.perf_counter() - start


def data_override(run: Run, folder: Path, **changes: Any) -> str:
    """Return the override by which a run reads the text of another one: all its data settings, with some changed, from a folder."""
    return f"data={json.dumps({**config.to_tree(run)['data'], **changes, 'dir': str(folder)})}"


def prepare(recipe: str, overrides: Sequence[str], log: Path, threads: int) -> Path:
    """Prepare the text of a recipe, which takes a second where it is, and return its folder."""
    folder = config.load_run(recipe, overrides).data_dir
    print(f"prepare {folder}", flush=True)
    run_module("overnight", ["prepare", recipe, *(f"--{o}" for o in overrides)], log, threads)
    return folder


def validation_text(run: Run, to: Path) -> Path:
    """Write the validation documents of a prepared run as one text file, unless it is there: raw, for any vocabulary.

    Raises:
        SystemExit: when the sources no longer hold the documents that the manifest names.
    """
    if not to.exists():
        wanted = set(load_manifest(run.data_dir).first_documents.get("valid", []))
        texts = {document.name: document.text for document in documents(run.data, start_reading(run.data)) if document.name in wanted}
        if not wanted or len(texts) < len(wanted):
            raise SystemExit(f"{run.data_dir / 'manifest.json'} names {len(wanted)} validation documents, {len(texts)} are in data.paths")
        write_whole(to, ["\n\n".join(texts[name] for name in sorted(texts)).encode()])
    return to


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a timed training took."""

    seconds: float
    """From the start of the process to its end."""
    steps: int
    tokens: int
    by_budget: bool
    """Whether `--budget` ended it, else a number of steps."""
    schedule: dict[str, int]
    """Steps of each phase that were asked for; empty with a budget."""


def pretrain_for(recipe: str, overrides: Sequence[str], out: Path, minutes: float, threads: int, trial_seconds: float) -> Trained:
    """Pretrain a recipe for a time, from its beginning, and return what it took; the run folder is `out/run`.

    Args:
        recipe: of a run whose data is prepared.
        overrides: `key=value`.
        out: emptied first: a training that was interrupted begins anew, since its time counts.
        minutes: from the start of the process to its end; 0: as long as the steps of the recipe take, which other work on the machine does not change.
        trial_seconds: how long the speed of each phase is measured, if it has to be.
    """
    shutil.rmtree(out, ignore_errors=True)
    overrides = [*overrides, *QUIET, f"compute.threads={threads}"]
    run = config.load_run(recipe, [*overrides, NO_BUDGET])
    assert isinstance(run, BertRun), recipe
    log, schedule, start = out / "log.txt", dict[str, int](), 0.0
    by_budget, extra = minutes > 0 and takes_budget(recipe, overrides, minutes), list[str]()
    if by_budget:
        extra = [f"budget={minutes:g}m"]
    else:
        overrides += [NO_BUDGET]
    if minutes and not by_budget:
        start, sequence_seconds = measure_speed(run, recipe, overrides, out / "trial", log, threads, trial_seconds)
        schedule = scaled_steps(run, sequence_seconds, 60 * minutes - start)
        extra = scaled_settings(run, schedule)
    for left in reversed(range(_TRIES)):
        words = ["pretrain", recipe, *(f"--{o}" for o in [*overrides, *extra, f"out={out / 'run'}"])]
        seconds = run_module("overnight", words, log, threads)
        if by_budget or not minutes or not left or abs(seconds / (60 * minutes) - 1) < _CLOSE:
            break
        # Other work on the machine slowed the trial down, or the training.
        factor = max(60 * minutes - start, 0.0) / max(seconds - start, 0.1 * seconds)
        schedule = {name: max(1, round(factor * steps)) for name, steps in schedule.items()}
        extra = scaled_settings(run, schedule)
        shutil.rmtree(out / "run")
    last = train_lines(out / "run")[-1]
    return Trained(round(seconds, 2), last["global_step"], last["tokens"], by_budget, schedule)


def takes_budget(recipe: str, overrides: Sequence[str], minutes: float) -> bool:
    """Return whether a run can be given a time: every schedule of it can be cut anywhere."""
    try:
        config.load_run(recipe, [*overrides, f"budget={minutes:g}m"])
    except ConfigError:
        return False
    return True


def measure_speed(
    run: BertRun, recipe: str, overrides: Sequence[str], out: Path, log: Path, threads: int, trial_seconds: float
) -> tuple[float, dict[str, float]]:
    """Train a few steps of every phase at its full batch; return the seconds of a run outside its steps, and those of a sequence by phase."""
    steps = dict.fromkeys(run.phases, 8)
    while True:
        shutil.rmtree(out, ignore_errors=True)
        extra = [f"out={out}", "logging.log_every=1"]
        for name, count in steps.items():
            kept = {"steps": count, "batch_warmup": {}, "optim.schedule.total_steps": 0, "optim.schedule.step_offset": 0}
            extra += [f"phases.{name}.{key}={json.dumps(value)}" for key, value in kept.items()]
        wall = run_module("overnight", ["pretrain", recipe, *(f"--{o}" for o in [*overrides, *extra])], log, threads)
        lines = train_lines(out)
        inside, by_phase = 0.0, dict[str, float]()
        for name, count in steps.items():
            ends = [line["seconds"] for line in lines if line["phase"] == name]
            by_phase[name] = statistics.median(b - a for a, b in pairwise(ends[2:]))
            inside += count * by_phase[name]
        # The first steps are slow and a few of them say little: once more with as many as fill the time.
        longer = {name: min(1000, int(trial_seconds / by_phase[name])) for name in steps}
        if max(steps.values()) > 8 or all(longer[name] <= 2 * steps[name] for name in steps):
            shutil.rmtree(out, ignore_errors=True)
            return wall - inside, {name: by_phase[name] / run.phases[name].global_batch_size for name in steps}
        steps = {name: max(8, longer[name]) for name in steps}


def scaled_steps(run: BertRun, sequence_seconds: Mapping[str, float], seconds: float) -> dict[str, int]:
    """Return steps of each phase that take some seconds in all, with the shares of the recipe."""
    whole = sum(sequences_before(phase, phase.steps) * sequence_seconds[name] for name, phase in run.phases.items())
    factor = max(seconds, 0.0) / whole
    return {name: max(1, round(factor * phase.steps)) for name, phase in run.phases.items()}


def scaled_settings(run: BertRun, steps: Mapping[str, int]) -> list[str]:
    """Return overrides that give each phase its steps, and scale what else counts steps with them."""
    made = []
    for name, phase in run.phases.items():
        for key in STEPS:
            value: Any = phase
            for part in key.split("."):
                value = getattr(value, part)
            if value:
                made.append(f"phases.{name}.{key}={max(1, round(value * steps[name] / phase.steps))}")
    return made


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of training in a run's metrics."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "train"]


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """What every model is measured on."""

    text: Path
    """Raw validation text."""
    blimp: str
    """The archive or folder, as `$NAME/...` where it is; empty leaves BLiMP out."""
    pairs: int
    """Of a paradigm."""

    def __call__(self, folder: Path, to: Path, threads: int) -> dict[str, Any]:
        """Evaluate a run folder or one in Hugging Face's layout by `overnight evaluate` in fp32, unless it is done; returns the numbers, and BLiMP's groups as `terms`."""
        if not to.exists():
            given = ["--blimp", os.path.expandvars(self.blimp), "--pairs", self.pairs] if self.blimp else []
            same = ["--precision=fp32", f"--compute.threads={threads}"]
            words = ["evaluate", "--from", folder, "--text", self.text, *given, "--json", to, *same]
            run_module("overnight", words, to.with_suffix(".log"), threads)
        found = read_mapping(to, "delete it and run again")
        terms = ((found.get("details") or {}).get("blimp") or {}).get("terms", {})
        numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
        return numbers | ({"terms": {name: term["accuracy"] for name, term in terms.items()}} if terms else {})


def keep_study(out: Path, study: Mapping[str, Any]) -> None:
    """Write what a campaign measures into its folder, or check that the results there are of the same.

    Raises:
        SystemExit: when they are of another.
    """
    path = out / "study.json"
    plain = json.loads(json.dumps(study, default=str))
    if path.exists() and (differ := list(config.differences(json.loads(path.read_text(encoding="utf-8")), plain))):
        raise SystemExit(f"{path}: the results there are of another study ({'; '.join(differ)}); name another folder with --out")
    write_json(path, plain)  # which makes the folder


def read_results(out: Path, names: str) -> list[dict[str, Any]]:
    """Return the results of a campaign so far, in the order of their names, which match a pattern."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(names))]


def assert_same_text(scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to compare scores of different validation texts, such as those that two versions prepared.

    Args:
        scores: of an evaluation, by what was trained; those without `characters` are passed over.

    Raises:
        SystemExit: when there are two texts.
    """
    texts = {found["characters"]: name for name, found in scores.items() if found.get("characters")}
    if len(texts) > 1:
        said = ", ".join(f"{characters:,} characters ({name})" for characters, name in texts.items())
        raise SystemExit(f"the results were scored on different texts: {said}; train all again with another --out and --work")
