"""What `overnight plan` says of a run with `model.size: auto`: the candidates and the choice, of which nothing is written."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from overnight.cli.run import seconds_after
from overnight.config import BertRun, Run
from overnight.engine.size_record import chosen_before, is_open, with_sizes
from overnight.engine.sizing import choice_text, first_choice, is_prepared, timed_choice


def planned(run: Run) -> tuple[Run, str, dict[str, Any]]:
    """Return a run with the sizes that it would get if it began now, what is said of them, and the same as values.

    A run that has begun has its sizes already.

    Raises:
        ConfigError: when nothing fits this machine, or an earlier choice was for another recipe.
        DataError: when a source is missing.
    """
    if not is_open(known := chosen_before(run)):
        return known, "model.size auto: chosen before, as size.json of the run folder says\n\n", {}
    assert isinstance(run, BertRun)
    choice = timed_choice(run, lambda text: print(text, file=sys.stderr), seconds_after) if is_prepared(run) else first_choice(run)
    return with_sizes(run, choice.chosen), f"{choice_text(choice)}\n\n", dataclasses.asdict(choice)
