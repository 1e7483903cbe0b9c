"""A run folder belongs to one run, which may be made longer on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from overnight import config
from overnight.checkpoint.reader import TrainingProgress, newest_checkpoint
from overnight.config import ModernBertConfig, Run
from overnight.errors import ConfigError
from overnight.optim.schedules import learning_rate
from overnight.run_dir.atomic import write_whole
from overnight.state_files import read_lines, read_yaml, sealed_yaml

_REMEDY = "put back the one that belongs there, or give this run its own folder (--out=...)"


def check_folder(run: Run, extend: bool = False) -> None:
    """Check that the run folder is new or holds this run.

    Args:
        extend: it may also hold a shorter one, of which this run is a continuation (:func:`not_longer`); of a run with a budget the same, with another budget.

    Raises:
        ConfigError: when it belongs to another recipe, naming the fields that differ.
    """
    path = run.run_dir / "run.yaml"
    if not path.exists():
        return
    theirs = _read(path)
    # Of a run that failed before its first checkpoint nothing is lost.
    delete = "delete that one" + ", which has no checkpoint yet" * (newest_checkpoint(run.run_dir / "checkpoints") is None)
    budgets = bool(theirs.budget and run.budget)
    if theirs.budget != run.budget and not (extend and budgets):
        began = f"with budget = {theirs.budget!r}, which fixed when it ends" if theirs.budget else "without a budget"
        raise ConfigError(
            f"budget = {repr(run.budget) if run.budget else 'null'}: {run.run_dir} was begun {began}; leave it so, {'add --extend to give it so much more time, ' * budgets}"
            f"give this run its own folder (--out=...), or {delete}"
        )
    theirs = dataclasses.replace(theirs, budget=run.budget)
    different = list(config.differences(config.identity(theirs), config.identity(run)))
    if theirs.phases.keys() == run.phases.keys() and list(theirs.phases) != list(run.phases):
        different.append(_order(theirs, run))
    problems = list(not_longer(theirs, run))
    if not different or (extend and not budgets and not problems):
        return
    if extend and not budgets:
        lines = "\n  ".join(problems)
        raise ConfigError(
            f"{run.run_dir} cannot be extended to this run; only its last phase may get more steps, and phases may be added after it:\n  {lines}"
        )
    lines = "\n  ".join(different)
    hint = "" if problems or budgets else "To resume from its checkpoints to the end of this longer run, add --extend. Or g"
    raise ConfigError(f"{run.run_dir} holds another run:\n  {lines}\n{hint or 'G'}ive this one its own folder (--out=...) or {delete}")


def not_longer(shorter: Run, run: Run) -> Iterator[str]:
    """Yield what keeps a run from being a continuation of a shorter one: anything but more steps in its last phase, and phases behind that."""
    before, now = config.identity(shorter), config.identity(run)
    names, last = list(before["phases"]), list(before["phases"])[-1]
    if list(now["phases"])[: len(names)] != names:
        yield _order(shorter, run)
        return
    if continued := _continued(shorter, run):
        yield continued
        return
    yield from _absent_heads(shorter, run)
    now["phases"] = {name: now["phases"][name] for name in names}
    was, steps = (tree["phases"][last].pop("steps") for tree in (before, now))
    if steps < was:
        yield f"phases.{last}.steps: {was} there, {steps} here"
    yield from config.differences(before, now)


def _continued(shorter: Run, run: Run) -> str:
    """Return why a run cannot be made longer by steps of a schedule that one of its trained phases has too; empty where that is not asked."""
    last = list(shorter.phases)[-1]
    for before, name in pairwise(run.phases):
        grows = name == last and shorter.phases[name].continues and run.phases[name].steps > shorter.phases[name].steps
        if run.phases[name].continues and (grows or before == last):
            return (
                f"phases.{name} continues {before}: they share one schedule over the steps of both, by which {before} was trained; "
                "add a phase with an `optim` of its own"
            )
    return ""


def _absent_heads(shorter: Run, run: Run) -> Iterator[str]:
    """Yield what added phases train that the network of a shorter run has no head for, since none of its phases did: its checkpoints could not be loaded."""
    heads = {"token_matching": "0", "label_weight": "0"} | ({"nsp": "false"} if isinstance(run.model, ModernBertConfig) else {})
    for key, without in heads.items():
        if any(getattr(phase, key, False) for phase in shorter.phases.values()):
            continue
        for name, phase in run.phases.items():
            if name not in shorter.phases and getattr(phase, key, False):
                yield f"phases.{name}.{key}: the network in the checkpoint has no head for it, since none of its phases needed one; set it to {without}"


def _order(theirs: Run, ours: Run) -> str:
    return f"phases: {', '.join(theirs.phases)} there, {', '.join(ours.phases)} here"


def claim_folder(run: Run, extend: bool = False) -> None:
    """Make the run folder, unless it holds another run, and write `run.yaml` with the settings as they are now.

    Of a run that is extended the settings from before are kept, as `run.1.yaml`, `run.2.yaml` and so on.
    """
    check_folder(run, extend)
    path = run.run_dir / "run.yaml"
    if path.exists() and any(config.differences(config.identity(theirs := _read(path)), config.identity(run))):
        kept = _kept(run)
        # After a kill between the two writes it is kept already.
        if not kept or _read(kept[-1]) != theirs:
            write_whole(run.run_dir / f"run.{len(kept) + 1}.yaml", [path.read_bytes()])
    write_whole(path, [sealed_yaml(config.run_yaml(run)).encode()])


def unrecorded_extensions(run: Run, progress: TrainingProgress) -> Iterator[dict[str, Any]]:
    """Yield the event of each extension by steps that the metrics of the run do not hold, or no more after they were truncated to a checkpoint."""
    path, kept = run.run_dir / "metrics.jsonl", _kept(run)
    lines = read_lines(path, _REMEDY) if kept and path.exists() else ()
    recorded = {line.get("was") for _, line in lines if line and line.get("event") == "extended"}
    runs = [*map(_read, kept), run]
    for file, before, after in zip(kept, runs, runs[1:], strict=False):
        last = list(before.phases)[-1]
        old, new, added = before.phases[last], after.phases[last], [name for name in after.phases if name not in before.phases]
        changes = [f"phase {last} has {new.steps} steps instead of {old.steps}"] if new.steps > old.steps else []
        changes += [f"phase {name} is added" for name in added]
        if file.name in recorded or not changes:
            continue
        rate = ""
        if new.steps > old.steps and progress.phase == last and 0 < progress.step < new.steps:
            then, now = learning_rate(old, progress.step - 1), learning_rate(new, progress.step)
            rate = f"; the learning rate continues at {now:.4g}, as in a run of that length (the last step had {then:.4g})"
        longer = {"phase": last} if new.steps > old.steps else {}
        yield {"event": "extended", "message": f"extended: {', '.join(changes)}{rate}", "was": file.name, **longer}


def _kept(run: Run) -> list[Path]:
    """Return the settings of before each extension, the oldest first."""
    found = {int(number): path for path in run.run_dir.glob("run.*.yaml") if (number := path.name.split(".")[1]).isdigit()}
    return [found[number] for number in sorted(found)]


def _read(path: Path) -> Run:
    return config.build_run(read_yaml(path, _REMEDY, ConfigError)[0])
