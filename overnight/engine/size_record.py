"""`size.json` of a run folder: the sizes that were chosen for a run with `model.size: auto`, what they were chosen from, and the run with them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overnight import config
from overnight.config import BertRun, ModernBertConfig, Run
from overnight.engine.size_rule import Score, with_shape
from overnight.errors import ConfigError, DataError
from overnight.run_dir.atomic import write_json
from overnight.state_files import STRICT, read_json, sealed

_REMEDY = "put it back; without it nobody knows which network the run has"


@dataclass(frozen=True)
class SizeRecord:
    """What `size.json` holds."""

    __pydantic_config__ = STRICT
    recipe: dict[str, Any]
    """The identity of the run as its recipe has it, with the sizes left open."""
    vocabulary: int
    """Chosen before the text was prepared, or that of the recipe or of the prepared text."""
    characters: float
    """Of the training text; estimated, while there is no choice."""
    law: dict[str, float]
    """Coefficients by which the candidates were scored."""
    timed: list[dict[str, float]] = field(default_factory=list)
    """Networks that were timed on this machine: `layers`, `width`, `batch`, `seconds` of a step; and the operations a second that follow."""
    candidates: list[Score] = field(default_factory=list)
    chosen: Score | None = None
    """None while only the vocabulary is."""


def is_open(run: Run) -> bool:
    """Return whether the sizes of a run are still to be chosen."""
    return isinstance(run.model, ModernBertConfig) and run.model.size == "auto"


def record_path(run: Run) -> Path:
    """Return where the record of a run lies."""
    return run.run_dir / "size.json"


def plain_identity(run: Run) -> dict[str, Any]:
    """Return the identity of a run as JSON has it."""
    return dict(json.loads(json.dumps(config.identity(run))))


def read_record(run: Run) -> SizeRecord | None:
    """Return the record of a run whose sizes its recipe leaves open, or None where there is none, or one of another recipe with which no training began.

    Raises:
        ConfigError: when it was made for another recipe, naming what differs.
        DataError: when it was changed since it was written, or is gone from a folder that has checkpoints.
    """
    path, begun = record_path(run), (run.run_dir / "run.yaml").exists()
    if not path.exists():
        if begun:
            raise DataError(
                f"{path}: is missing, and {run.run_dir} holds a run; {_REMEDY}, or name the run folder instead of the recipe, or another folder (--out=...)"
            )
        return None
    record: SizeRecord = read_json(path, SizeRecord, _REMEDY)
    # Of a run that has begun the budget is looked after where it is extended.
    ours = {**plain_identity(run), **({"budget": record.recipe.get("budget")} if begun else {})}
    different = list(config.differences(record.recipe, ours))
    if different and not begun:
        return None
    if different:
        lines = "\n  ".join(different)
        raise ConfigError(
            f"{path}: the sizes of {run.run_dir} were chosen for another recipe:\n  {lines}\nGive that one, or give this run its own folder (--out=...)"
        )
    return record


def chosen_before(run: Run) -> Run:
    """Return a run with the sizes that `size.json` has for it, as it is where there are none.

    Raises:
        ConfigError, DataError: as :func:`read_record`.
    """
    if not (isinstance(run, BertRun) and is_open(run)):
        return run
    record = read_record(run)
    return with_sizes(with_vocabulary(run, record), record.chosen) if record and record.chosen else run


def write_record(run: Run, record: SizeRecord) -> None:
    """Write the record of a run."""
    write_json(record_path(run), sealed(dataclasses.asdict(record)))


def with_vocabulary(run: BertRun, record: SizeRecord) -> BertRun:
    """Return the run with the vocabulary that was chosen, its other sizes still open."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, vocab_size=run.data.vocab_size or record.vocabulary))


def with_sizes(run: BertRun, chosen: Score) -> BertRun:
    """Return the run with the sizes that were chosen.

    Raises:
        ConfigError: when the recipe has settings that do not go with them.
    """
    sized = with_shape(run, chosen.shape, chosen.batch)
    # Through the checks of a recipe: a micro-batch must divide the batch, heads the width.
    found = config.build_run(config.to_tree(sized))
    assert isinstance(found, BertRun)
    return found
