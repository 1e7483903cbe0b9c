"""Errors that are the user's to mend: the command line prints their message without a traceback."""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where and what to do."""

    exit_code = 1


class ConfigError(UserError):
    """The command or the recipe is wrong; nothing was started."""

    exit_code = 2


class DataError(UserError):
    """A source file, shard or checkpoint cannot be used as it is."""


class TrainingError(UserError):
    """Training cannot continue as it is, and the run stops with its newest checkpoint whole.

    Args:
        step: of the phase, from 0, where it is known.
        worst: number of the micro-batch with the largest loss among those of all processes, where the data may have to do with it.
    """

    event: ClassVar[str]

    def __init__(self, text: str, step: int | None = None, worst: int | None = None) -> None:
        super().__init__(text)
        self.step, self.worst = step, worst


def first_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
