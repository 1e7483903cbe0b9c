"""The command line: parse it, run one command, end with its exit code. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import argparse
import atexit
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from overnight import __version__
from overnight.cli import byte_commands, data_commands, machine_commands, recipe_commands, run_commands, use_commands
from overnight.cli.recipe_commands import said_once
from overnight.cli.standard_streams import OUTPUT, discard, prepare_streams, work_on_without_reader
from overnight.display import for_stream
from overnight.errors import ConfigError, UserError
from overnight.run_dir.atomic import FULL, how_to_make_room
from overnight.signals import Interrupted, stop_signals, terminate_at_end_of

_CONTINUED = ("run", "prepare", "pretrain", "launch", "finetune", "linear-probe", "evaluate", "download")
"""Commands that keep what they have done; the others begin anew."""
_ONLY_PRINT = ("help", "print_config", "list", "slurm")
"""Options with which these only print."""


class Terminated(BaseException):
    """SIGTERM, SIGHUP or SIGUSR1, as an exception, so that what is half done is cleared away as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + (signal.SIGTERM if number == signal.SIGHUP else number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 usage, 130 interrupted, 143 terminated, 138 SIGUSR1."""
    with _handlers_put_back():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(words: list[str]) -> int:
    prepare_streams()
    try:
        with _signals_raise():
            _refuse_deleted_folder()
            code = _run(words)
            sys.stdout.flush()  # else the interpreter would find at its end that nobody reads it, or that a disk is full
            return code
    except UserError as error:
        if str(error):  # else another process says it
            print(for_stream(f"overnight: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        _say_stopped("interrupted", words)
        return 130
    except Terminated as signal_received:
        _say_stopped("terminated", words)
        return signal_received.exit_code
    except OSError as error:  # a full disk, a folder that may not be written: the message names the file
        if error.filename == OUTPUT:
            discard(sys.stdout.fileno())  # the interpreter must not complain when it flushes
            if isinstance(error, BrokenPipeError):  # `| head`: nothing is wrong
                return 0
        remedy = f"; {how_to_make_room(error.errno)}, and the same command {_next_time(words)}" if error.errno in FULL else ""
        print(for_stream(f"overnight: {error}{remedy}", sys.stderr), file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        other = "another program may use it (of a GPU nvidia-smi shows which, and CUDA_VISIBLE_DEVICES chooses another GPU)"
        print(
            for_stream(f"overnight: there is too little memory: {said}; {other}, and the same command {_next_time(words)}", sys.stderr),
            file=sys.stderr,
        )
        return 1


def _run(words: Sequence[str]) -> int:
    """Return the exit code of a command."""
    try:
        with said_once():
            options, overrides = _parse(list(words))
            _refuse_processes(options.command)
        if options.command in _CONTINUED and not any(getattr(options, name, False) for name in _ONLY_PRINT):
            work_on_without_reader()
        function: Callable[[argparse.Namespace, list[str]], int | None] = options.function
        return function(options, overrides) or 0
    except SystemExit as stop:  # argparse's way to end after --help or a usage error
        return stop.code if isinstance(stop.code, int) else 0


def command() -> NoReturn:
    """Run the command line, and end this process with its exit code.

    A process that shares its training with others ends without the interpreter's own end. All files are closed by then, and all collectives
    done or lost. But a thread of gloo drops the tensors of a collective a moment after it is done, and needs the interpreter for it: one
    that asks while the interpreter is ending is ended by it, which aborts the process ("terminate called without an active exception"),
    and the launcher takes an error that was printed for a crash. The thread cannot be waited for after an error (distributed.world.process_group).
    """
    if launcher := os.environ.pop("OVERNIGHT_LAUNCHER_FD", ""):
        terminate_at_end_of(int(launcher))
    if _is_alone():
        sys.exit(_main(sys.argv[1:]))
    try:
        code = _main(sys.argv[1:])
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    # What the interpreter would do first: libraries write what they hold.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(code)


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") in ("", "0", "1")


def _say_stopped(how: str, words: Sequence[str]) -> None:
    if _is_alone() or os.environ.get("RANK", "0") == "0":  # the first of many says it
        print(f"\novernight: {how}; the same command {_next_time(words)}", file=sys.stderr)


def _next_time(words: Sequence[str]) -> str:
    """Return what a command does that was interrupted, when it is given again."""
    return "continues" if words[:1] and words[0] in _CONTINUED else "begins anew"


def _lacks_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from overnight.engine.memory import is_out_of_memory

    return is_out_of_memory(error)


def _refuse_deleted_folder() -> None:
    """Raise a ConfigError in a working directory that is no more, where torch cannot be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted; change to one that is there (cd)") from None


def _refuse_processes(command: str) -> None:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE = {text!r}: must be the number of processes, as torchrun sets it; unset it to start one")
    processes = int(text)
    if processes > 1 and command not in ("pretrain", "finetune"):
        raise ConfigError(
            f"WORLD_SIZE = {processes}: `overnight {command}` works in one process, only `pretrain` and `finetune` in many; start it without torchrun"
        )


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Within it the first signal raises, and of those after it Ctrl-C alone. Behind it, if one came, Ctrl-C ends the process at once and others change nothing."""
    received: list[BaseException] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if received and number != signal.SIGINT:
            return
        received.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))
        raise received[-1]

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    except Exception as error:
        # What is raised in the middle of a library's import may be caught there, and leave it half made.
        if received:
            raise received[-1] from None
        if isinstance(error, Interrupted):
            received.append(error)
        raise
    finally:
        for number, handler in before.items():
            after = _end_at_once if number == signal.SIGINT else signal.SIG_IGN
            signal.signal(number, after if received else handler)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


@contextmanager
def _handlers_put_back() -> Iterator[None]:
    """Leave the handlers of signals as they were, for a caller whose process lives on."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command, and the keys that it was given besides."""
    parser, commands = _parser()
    if not argv and "_ARGCOMPLETE" not in os.environ:
        parser.print_help(sys.stderr)
        raise SystemExit(ConfigError.exit_code)
    if argv and argv[0] not in commands and not argv[0].startswith("-") and "_ARGCOMPLETE" not in os.environ:
        near = difflib.get_close_matches(argv[0], commands, 1)
        known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(commands)}"
        raise ConfigError(f"no command {argv[0]!r}: {known}")
    if "_ARGCOMPLETE" in os.environ:
        from overnight.cli.completion import complete

        complete(parser, commands)
    # A zero, which no word of a command line has, keeps the place of the space.
    spaced = _spaced_overrides(argv, commands.get(argv[0])) if argv else []
    options, rest = parser.parse_known_args([word.replace(" ", "\0") if word in spaced else word for word in argv])
    rest = [word.replace("\0", " ") for word in rest]
    for word in rest:
        name = word.partition("=")[0]
        if (written := name.replace("_", "-")) in options.parser._option_string_actions:
            raise ConfigError(f"{name}: is written {written}")
    if rest and not options.takes_keys:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    for name, what in (("to", "write"), ("input", "read")):
        if getattr(options, name, None) == "":  # an empty variable of a shell; as a path it is the working folder
            raise ConfigError(f"--{name} = '': name what to {what}")
    if options.command != "data" and getattr(options, "source", None) in ("", "hf:"):  # the `source` of `data look` is another
        raise ConfigError(f"--from = {options.source!r}: name a run folder, or what else `overnight {options.command} --help` says")
    _keep_input(options)
    return options, _overrides(rest)


def _keep_input(options: argparse.Namespace) -> None:
    """Refuse to write over a file that is read, by whatever name: its texts would be gone."""
    named: list[str] = [*(getattr(options, "files", None) or ()), *(getattr(options, "text", None) or ())]
    named += filter(None, (getattr(options, name, None) for name in ("input", "rows", "blimp")))
    given = ["/dev/stdin" if name == "-" else name for name in named]
    for name in ("to", "json"):
        to = getattr(options, name, None)
        if isinstance(to, str) and os.path.isfile(to) and any(os.path.isfile(file) and os.path.samefile(file, to) for file in given):
            raise ConfigError(f"--{name} = {to}: is an input file, which would be overwritten; name another")


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and those of its commands by name."""
    parser = argparse.ArgumentParser(prog="overnight", description=sys.modules["overnight"].__doc__ or "")
    parser.add_argument("--version", action="version", version=f"overnight {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, function: Callable[..., int | None], summary: str, keys: bool = False, **more: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            allow_abbrev=False,  # else `--p=1` would be taken for an option instead of a wrong key
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **more,
        )
        command.set_defaults(function=function, command=name, takes_keys=keys, parser=command)
        return command

    for group in (recipe_commands, run_commands, use_commands, data_commands, byte_commands, machine_commands):
        for add_command in group.COMMANDS:
            add_command(add)
    return parser, commands.choices


def _spaced_overrides(argv: Sequence[str], command: argparse.ArgumentParser | None) -> list[str]:
    """Return the `--key=value` with a space in them, such as a list, which argparse takes for the recipe or for one more file of an option."""
    if command is None or not command.get_default("takes_keys"):
        return []
    options = command._option_string_actions
    return [word for word in argv if word.startswith("--") and " " in word and "=" in word and word.partition("=")[0] not in options]


def _overrides(rest: list[str]) -> list[str]:
    """`--key=value` and `--key value`, as `key=value`."""
    result, words = [], iter(rest)
    for word in words:
        if not word.startswith("--"):
            raise ConfigError(f"{word!r}: an override is written --key=value, such as --phases.long.optim.lr=4e-3")
        if "=" not in word:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{word!r}: has no value; write {word}=value")
            word = f"{word}={value}"
        result.append(word.removeprefix("--"))
    return result
