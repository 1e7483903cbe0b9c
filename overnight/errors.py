"""Errors that are the user's to mend: the command line prints their message without a traceback."""


class UserError(Exception):
    """Something outside the program is wrong; the message says what, where and what to do."""

    exit_code = 1


class ConfigError(UserError):
    """The command or the recipe is wrong; nothing was started."""

    exit_code = 2


class DataError(UserError):
    """A source file, shard or checkpoint cannot be used as it is."""
