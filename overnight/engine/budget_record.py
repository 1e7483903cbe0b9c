"""`budget.json` of a run folder: when the budget of a run is over, what was decided on the way, and how it came out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from overnight.config import Run, to_tree
from overnight.config.budget import deadline_of, is_length
from overnight.display import duration
from overnight.engine import run_clock
from overnight.engine.budget import least_budget
from overnight.engine.run_clock import RunClock, moment_text, time_of_day
from overnight.errors import ConfigError, DataError
from overnight.optim.decisions import Decision
from overnight.run_dir.atomic import write_json
from overnight.state_files import STRICT, read_json, sealed

_REMEDY = "put it back; without it nobody knows how long the phases are"


@dataclass(frozen=True)
class BudgetRecord:
    """What `budget.json` holds. Moments are seconds since 1970."""

    __pydantic_config__ = STRICT
    budget: str
    """As the recipe has it."""
    started: float
    deadline: float
    ends: str
    """The deadline for people (ISO 8601)."""
    after: dict[str, float] | None = None
    """Estimates of what follows pretraining, by its name (s); None while there are none."""
    decisions: list[Decision] = field(default_factory=list)
    trained: float | None = None
    """When pretraining was done."""
    done: float | None = None
    """When everything was done."""
    recipe: str = ""
    """XXH3-64 of the recipe with which `overnight run` began; empty where another command did."""
    extended: int = 0
    """How often the run was given more time, and continued from before its decay."""
    failed: bool = False
    """Whether the last `overnight run` ended in an error before training began."""
    seen: float = 0.0
    """When the run last looked at the clock; 0 before its first look."""

    def now(self) -> float:
        """Return the present moment; where the clock is behind what the run has seen, because it was set back or is another machine's, the last one seen."""
        return max(run_clock.CLOCK.wall(), self.started, self.seen)

    @property
    def seconds(self) -> float:
        """All of the time."""
        return self.deadline - self.started

    @property
    def after_seconds(self) -> float:
        """Estimate of all that follows pretraining."""
        return sum((self.after or {}).values())

    def of(self, phase: str) -> list[Decision]:
        """Return the decisions on a phase."""
        return [decision for decision in self.decisions if decision.phase == phase]

    def first_decay(self, phase: str) -> int | None:
        """Return the step at which the decay of a phase was first decided to begin, None while it is not decided."""
        return next((decision.decay_begins for decision in self.of(phase) if decision.decay_begins is not None), None)


def record_path(run: Run) -> Path:
    """Return where the record of a run lies."""
    return run.run_dir / "budget.json"


def begin_command(run: Run, log: Callable[[str], None]) -> RunClock:
    """Begin the time of a run, or resume it; returns its clock.

    It begins anew where no training did, and the recipe was mended since or an error ended the last attempt; but a time of day stays the same one.

    Args:
        run: as its recipe has it, with all that is open.

    Raises:
        ConfigError, DataError: as :func:`begin_record`.
    """
    known, recipe = read_record(run), xxhash.xxh3_64_hexdigest(json.dumps(to_tree(run), sort_keys=True).encode())
    if known is not None and _is_untrained(run, known):
        mended, failed = known.recipe not in ("", recipe), known.failed and is_length(known.budget) and known.budget == run.budget
        if mended or failed:
            record_path(run).unlink()
            what = "an earlier attempt with other settings stopped" if mended else "an error ended an earlier attempt"
            log(f"budget {run.budget} begins now ({what} before training)")
        elif known.budget == run.budget:
            log(
                f"budget {run.budget}: its time began at {time_of_day(known.started)}, and ends at {time_of_day(known.deadline)}; no training has "
                f"begun: delete {record_path(run)} to begin it anew"
            )
    record = begin_record(run)
    if not record.recipe and not record.decisions:
        write_record(run, dataclasses.replace(record, recipe=recipe))
    return RunClock(record.deadline, record.now())


@contextmanager
def errors_noted(run: Run) -> Iterator[None]:
    """Note in the record of a run where an error ends what is done here before training begins; a signal or a kill leaves no note."""
    try:
        yield
    except Exception:
        if run.budget and (record := read_record(run)) is not None and _is_untrained(run, record):
            write_record(run, dataclasses.replace(record, failed=True))
        raise


def _is_untrained(run: Run, record: BudgetRecord) -> bool:
    return not record.decisions and not (run.run_dir / "run.yaml").exists()


def begin_record(run: Run) -> BudgetRecord:
    """Return the record of a run with a budget; where there is none its time begins now. Nothing is written where there was one.

    Raises:
        ConfigError: when the run was begun with another budget, or is trained already and has no record.
        DataError: when the record is damaged.
    """
    path, now = record_path(run), run_clock.CLOCK.wall()
    known = read_record(run)
    if known is not None and (known.budget == run.budget or known.decisions):
        if known.budget != run.budget:
            raise ConfigError(
                f"budget = {run.budget!r}: {run.run_dir} was begun with {known.budget!r}, and ends at {known.ends}; "
                "give that one, or give this run its own folder (--out=...)"
            )
        return known
    if any((run.run_dir / "checkpoints").glob("step-*")):
        raise DataError(f"{path}: is missing, and {run.run_dir} has checkpoints; {_REMEDY}, or give this run its own folder (--out=...)")
    deadline = deadline_of(run.budget, now)
    record = BudgetRecord(run.budget, now, deadline, moment_text(deadline))
    write_record(run, record)
    return record


def read_record(run: Run) -> BudgetRecord | None:
    """Return the record of a run, or None where there is none.

    Raises:
        DataError: when it was changed since it was written.
    """
    path = record_path(run)
    return read_json(path, BudgetRecord, _REMEDY) if path.exists() else None


def write_record(run: Run, record: BudgetRecord) -> None:
    """Write the record of a run."""
    write_json(record_path(run), sealed(dataclasses.asdict(record)))


def set_by_clock(run: Run, record: BudgetRecord, clock: RunClock, log: Callable[[str], None]) -> BudgetRecord:
    """Return the record of a budget as of this look at the clock: with the same end by a time of day that was set anew, which is said and written.

    Once pretraining is done it stays.

    Args:
        run: its budget.
        record: as it was.
        clock: has run since before.
        log: is told what happened.
    """
    if record.trained is not None:
        return record
    record = dataclasses.replace(record, seen=run_clock.CLOCK.wall())
    if not (jump := clock.jumped()):
        return record
    deadline = record.deadline + jump
    ends = moment_text(deadline)
    record = dataclasses.replace(record, started=record.started + jump, deadline=deadline, ends=ends)
    write_record(run, record)
    log(
        f"this machine's clock was set {duration(abs(jump))} {'forward' if jump > 0 else 'back'}: the run counts the time that it has seen pass, "
        f"so the budget ends at {time_of_day(record.deadline)} by the new time"
    )
    return record


def close_record(run: Run) -> str:
    """Write down that everything is done; return a sentence on how it came out."""
    record = read_record(run)
    assert record is not None and record.trained is not None, "pretraining has an end"
    if record.done is None:
        record = dataclasses.replace(record, done=record.now())
        write_record(run, record)
    assert record.done is not None and record.trained is not None
    after = f"; what followed pretraining took {duration(record.done - record.trained)} (estimated: {duration(record.after_seconds)})"
    early = record.deadline - record.done
    return (
        f"budget {record.budget}: done at {time_of_day(record.done)}, {duration(abs(early))} {'before' if early >= 0 else 'after'} "
        f"the deadline{after if record.after else ''}"
    )


def check_budget(run: Run) -> BudgetRecord | None:
    """Begin the time of a run that has a budget, or resume it; returns its record.

    Raises:
        ConfigError: when the time that is left is too short for any training, saying how much is not.
    """
    if not run.budget:
        return None
    record = begin_record(run)
    spent = record.now() - record.started
    over = spent > record.seconds
    # One that is too short from its beginning would be so again.
    if not record.decisions and over and least_budget(0.0, record.after_seconds) <= record.seconds:
        raise ConfigError(
            f"budget = {run.budget!r}: was over at {record.ends}, before any training began; delete {record_path(run)} to begin its time anew"
        )
    least = least_budget(0.0 if over else spent, record.after_seconds)
    if not record.decisions and least > record.seconds:
        raise ConfigError(
            f"budget = {run.budget!r}: is too short. {duration(spent)} have passed, and what follows pretraining is estimated at "
            f"{duration(record.after_seconds)}; the least that leaves a tenth for pretraining is {duration(math.ceil(least / 60) * 60)}"
        )
    return record
