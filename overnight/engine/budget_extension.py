"""More time for a run with a budget: it goes back to before its decay, and continues at its full rate until the new time is nearly over.

What was trained since then is undone, so it is put aside first: the newest checkpoint and what was measured of it, in `before-1`, `before-2` and so on of
the run folder. The record of the budget is written last: a run that is killed before that is still the one from before, and trains its decay again.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from overnight.checkpoint.reader import list_checkpoints, read_checkpoint, step_of
from overnight.config import Run
from overnight.config.budget import deadline_of
from overnight.display import duration
from overnight.engine import run_clock
from overnight.engine.budget_record import BudgetRecord, read_record, record_path, write_record
from overnight.engine.run_clock import moment_text, time_of_day
from overnight.errors import DataError
from overnight.run_dir.atomic import write_whole
from overnight.state_files import read_json, read_lines

# What belongs to the newest checkpoint, or to the steps that are undone.
_KEPT = ("budget.json", "metrics.jsonl", "evaluation.json", "tasks.jsonl", "report.html")


def extend_budget(run: Run, log: Callable[[str], None]) -> None:
    """Give a run that has trained with a budget another one, from now on; one that is not done and has time left of the same budget only continues.

    Args:
        run: with the new budget; its folder holds the same run with a budget, or none.
        log: is told what is done.

    Raises:
        DataError: no checkpoint from before its decay is left, or it is damaged.
    """
    record, first, now = read_record(run), next(iter(run.phases)), run_clock.CLOCK.wall()
    if record is None or not record.decisions:
        return
    # What was interrupted on its way cannot be told from what was never extended.
    if record.done is None and record.budget == run.budget and record.now() < record.deadline:
        until = time_of_day(record.deadline)
        log(
            f"budget {run.budget}: {run.run_dir} has this budget and is not done: it only continues, until {until}; another budget gives it more time"
        )
        return
    decay, newest_first = record.first_decay(first), [c for c in list_checkpoints(run.run_dir / "checkpoints") if c.is_dir()]
    if not newest_first:
        raise DataError(f"--extend: {run.run_dir} has no checkpoint; delete {record_path(run)} to begin the run and its time anew")
    before = [c for c in newest_first if decay is None or (step_of(c) or 0) <= decay]
    decisions = [d for d in record.of(first) if d.decay_begins is None and before and d.at <= (step_of(before[0]) or 0)]
    if not decisions:
        raise DataError(
            f"--extend: {run.run_dir} has no checkpoint from before its decay, which began at step {decay or 0:,}; "
            f"begin a run of its own from its network: --init={run.run_dir} --out=..."
        )
    read_checkpoint(before[0])  # or what is wrong with it, before anything is put aside
    undone = newest_first[: newest_first.index(before[0])]
    if undone:
        _put_aside(run.run_dir, undone, run.run_dir / f"before-{record.extended + 1}")
        write_whole(run.run_dir / "checkpoints" / "latest", [before[0].name.encode()])
    deadline = deadline_of(run.budget, now)
    changed = {"budget": run.budget, "started": now, "deadline": deadline, "ends": moment_text(deadline), "extended": record.extended + 1}
    write_record(run, dataclasses.replace(record, **changed, decisions=decisions, after=None, trained=None, done=None, seen=now))
    back = (
        f"goes back from step {step_of(undone[0]):,} to step {step_of(before[0]):,}, before its decay, and continues"
        if undone
        else "continues"
    )
    kept = f"; its earlier state is in {run.run_dir / f'before-{record.extended + 1}'}" if undone else ""
    log(f"budget {run.budget}: the run {back} until {time_of_day(deadline)}, in {duration(deadline - now)}{kept}")


def unrecorded_budgets(run: Run) -> Iterator[dict[str, str]]:
    """Yield the event of each further budget of a run that its metrics do not hold, or no more after they were truncated to a checkpoint."""
    record, path = read_record(run), run.run_dir / "metrics.jsonl"
    if record is None or not record.extended:
        return
    lines = read_lines(path, "put back the one that belongs there") if path.exists() else ()
    recorded = {line.get("was") for _, line in lines if line and line.get("event") == "extended"}
    for number in range(1, record.extended + 1):
        later = (
            read_json(file, BudgetRecord, "put it back")
            if (file := run.run_dir / f"before-{number + 1}" / "budget.json").exists()
            else record
        )
        if (was := f"before-{number}") not in recorded:
            yield {"event": "extended", "message": f"extended: budget {later.budget} from here on, in place of the decay", "was": was}


def _put_aside(run_dir: Path, undone: list[Path], aside: Path) -> None:
    """Copy the files of a run into a folder, move the newest of some checkpoints there, and remove the others."""
    aside.mkdir(exist_ok=True)
    newest, *others = undone
    for name in _KEPT:
        if (run_dir / name).is_file() and not (aside / name).exists():
            write_whole(aside / name, [(run_dir / name).read_bytes()])
    if list_checkpoints(aside):  # before a kill
        shutil.rmtree(newest)
    else:
        newest.rename(aside / newest.name)
    for checkpoint in others:
        shutil.rmtree(checkpoint)
