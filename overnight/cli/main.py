"""The command line: commands to functions. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from overnight import __version__
from overnight.cli.byte_lm import TAKE_OVERRIDES, add_byte_commands
from overnight.cli.launch_options import BENCHMARKS, EXTEND, LAUNCH
from overnight.cli.task_keys import KeysHelp, machine_overrides, next_commands, task_overrides
from overnight.config.schema import BertRun, ByteRun, Finetune
from overnight.display import for_stream
from overnight.errors import ConfigError, UserError

if TYPE_CHECKING:
    from overnight.config import Run


class Terminated(BaseException):
    """SIGTERM or SIGUSR1, as an exception, so that what is half done is cleared away as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 usage, 130 interrupted, 143 terminated, 138 SIGUSR1."""
    try:
        with _signals_raise():
            with _said_once():
                options, overrides = _parse(list(sys.argv[1:] if argv is None else argv))
                _refuse_processes(options.verb)
            verb: Callable[[argparse.Namespace, list[str]], int | None] = options.function
            return verb(options, overrides) or 0
    except SystemExit as stop:  # argparse's way to end after --help or a usage error
        return stop.code if isinstance(stop.code, int) else 0
    except UserError as error:
        if str(error):  # else another process says it
            print(for_stream(f"overnight: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\novernight: interrupted; the same command continues", file=sys.stderr)
        return 130
    except Terminated as signal_received:
        print("\novernight: terminated; the same command continues", file=sys.stderr)
        return signal_received.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); nothing is wrong, and the interpreter must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that may not be written: the message names the file
        print(for_stream(f"overnight: {error}", sys.stderr), file=sys.stderr)
        return 1


def command() -> NoReturn:
    """Run the command line, and end this process with its exit code.

    A process that shares its training with others ends without the interpreter's own end. All files are closed by then, and all collectives
    done or lost. But a thread of gloo drops the tensors of a collective a moment after it is done, and needs the interpreter for it: one
    that asks while the interpreter is ending is ended by it, which aborts the process ("terminate called without an active exception"),
    and the launcher takes an error that was printed for a crash. The thread cannot be waited for after an error (distributed.world.process_group).
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        sys.exit(main())
    try:
        code = main()
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    # What the interpreter would do first: libraries write what they hold.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(code)


@contextmanager
def _said_once() -> Iterator[None]:
    """Within it, an error of the command line or the recipe, which every process of a launcher has, is said by the first of a machine."""
    try:
        yield
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise SystemExit(error.exit_code) from None


def _refuse_processes(verb: str) -> None:
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE = {text!r}: must be the number of processes, as torchrun sets it; unset it to start one")
    processes = int(text)
    if processes > 1 and verb not in ("pretrain", "finetune"):
        raise ConfigError(
            f"WORLD_SIZE = {processes}: `overnight {verb}` works in one process, only `pretrain` and `finetune` in many; start it without torchrun"
        )


@contextmanager
def _signals_raise() -> Iterator[None]:
    received: list[Terminated] = []

    def terminated(number: int, frame: FrameType | None) -> None:
        received.append(Terminated(number))
        raise received[-1]

    before = {number: signal.signal(number, terminated) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    except Exception:
        # What is raised in the middle of a library's import may be caught there, and leave it half made.
        if received:
            raise received[-1] from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="overnight", description=f"{sys.modules['overnight'].__doc__}")
    parser.add_argument("--version", action="version", version=f"overnight {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str, function: Callable[..., int | None], summary: str, recipe: bool = False, keys: Any = None
    ) -> argparse.ArgumentParser:
        verb = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            add_help=not recipe and keys is None,
            allow_abbrev=False,  # else `--p=1` would be taken for an option instead of a wrong key
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.set_defaults(function=function, recipe_verb=recipe, verb=name)
        if recipe:
            verb.add_argument("recipe", nargs="?", metavar="RECIPE", help="a shipped recipe's name, a YAML file, or a run folder to resume")
            verb.add_argument("--print-config", action="store_true", help="print the resolved recipe and stop")
            verb.add_argument("-h", "--help", action="store_true", help="show this help, with every key of a recipe")
        if keys is not None:
            verb.usage = f"overnight {name} TASK --from RUN [--KEY=VALUE ...]"
            verb.add_argument("-h", "--help", action=KeysHelp, const=keys)
        return verb

    verb = add("run", _run, "everything in order: prepare, pretrain, fine-tune, export, report; run again to continue", recipe=True)
    verb.add_argument("--extend", action="store_true")
    add("prepare", _prepare, "raw text to token shards", recipe=True)
    verb = add("pretrain", _pretrain, "pretrain the phases of a recipe; run again to continue", recipe=True)
    verb.add_argument("--extend", action="store_true")
    verb = add("launch", _launch, "pretrain with a process for each GPU, on one machine or many, or as a job of Slurm", recipe=True)
    for name, (metavar, kind, text) in LAUNCH.items():
        if metavar is None:
            verb.add_argument(f"--{name}", action="store_true", help=text)
        else:
            verb.add_argument(f"--{name}", metavar=metavar, type=kind, help=text)
    verb = add("plan", _plan, "what a recipe will do: parameters and their groups, learning rate and batch over all phases", recipe=True)
    verb.add_argument("--tensors", action="store_true")
    verb.add_argument("--json", action="store_true")
    verb = add("finetune", _finetune, "fine-tune a pretrained run on a task of its recipe, or on a new one given by --path", keys=Finetune)
    verb.add_argument(
        "task",
        metavar="TASK",
        help="a task of the recipe; squad, cola, mrpc, rte, stsb, sst2, qnli, wnli, mnli, qqp, sst, imdb, csv; or a name of your own for what --path names",
    )
    verb.add_argument("--from", dest="source", required=True, metavar="RUN", help="run folder")
    verb = add("predict", _predict, "predictions of a fine-tuned task or a linear probe for a table, JSON lines or text, or fill in [MASK]")
    verb.add_argument("task", metavar="TASK", help="a fine-tuned task of the run, or `mask`; of a byte model a task of `linear-probe`")
    verb.add_argument("--from", dest="source", required=True, metavar="RUN", help="run folder; --precision=bf16 and the like may follow")
    verb.add_argument(
        "--input",
        default="-",
        metavar="FILE",
        help="a table (.csv, .tsv, .jsonl) with the columns of the task, questions in SQuAD's format (.json), or lines of text (a pair separated by a tab) or JSON; default standard input",
    )
    verb.add_argument(
        "--to", metavar="FILE", help="write there; answers to questions in a .json are {id: text}, as SQuAD's scripts read them"
    )
    verb = add("export", _export, "write a model in the Hugging Face layout; a byte model as safetensors with its settings")
    verb.add_argument("--from", dest="source", required=True, metavar="RUN", help="run folder; --precision=bf16 and the like may follow")
    verb.add_argument("--to", required=True, metavar="DIR", help="folder to write")
    verb.add_argument("--task", metavar="TASK", help="a fine-tuned task instead of the pretrained model")
    add_byte_commands(add)
    verb = add("report", _report, "one HTML page from the metrics of one or more runs")
    verb.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    verb.add_argument("--to", metavar="FILE", help="page to write; default report.html in the first run folder")
    verb = add("bench", _bench, "benchmark against reference implementations; the last line is one JSON object")
    verb.add_argument("what", choices=BENCHMARKS, help="what to measure")
    verb.add_argument("--peer", choices=("transformers", "none"), default="transformers", help="with whom to compare")
    verb.add_argument("--tiny", action="store_true", help="smallest sizes, to see that it runs")
    add("doctor", _doctor, "check hardware and dependencies")
    add("recipes", _recipes, "the shipped recipes")

    options, rest = parser.parse_known_args(argv)
    if options.recipe_verb and options.help:
        _recipe_help(options.verb, options.recipe)
        parser.exit()
    if options.recipe_verb and not options.recipe:
        from overnight.config import recipes

        known = ", ".join(recipes())
        raise ConfigError(f"name a recipe: a YAML file or one of {known}; `overnight {options.verb} --help` lists what it may say")
    takes_overrides = options.recipe_verb or options.verb in ("finetune", "predict", "export", *TAKE_OVERRIDES)
    if rest and not takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options, _overrides(rest)


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


def _recipe_help(verb: str, recipe: str | None) -> None:
    from overnight.cli.recipe_help import recipe_help

    shown = {f"--{name}" if metavar is None else f"--{name}={metavar}": text for name, (metavar, _, text) in LAUNCH.items()}
    own = {
        "plan": [("--tensors", "also list every tensor with its shape and group"), ("--json", "one JSON object instead of text")],
        "run": [("--extend", EXTEND)],
        "pretrain": [("--extend", EXTEND)],
        "launch": list(shown.items()),
    }
    print(recipe_help(verb, recipe, own.get(verb, [])))


def _load(options: argparse.Namespace, overrides: list[str]) -> Run:
    import dataclasses

    from overnight import config

    with _said_once():
        # A run folder is the recipe of its run, which resumes wherever the folder is now.
        folder = Path(options.recipe)
        own = (folder / "run.yaml").is_file()
        run = config.load_run(str(folder / "run.yaml") if own else options.recipe, overrides)
    if own and not any(override.startswith("out=") for override in overrides):
        run = dataclasses.replace(run, out=str(folder))
    if options.print_config:
        print(config.run_yaml(run), end="")
        raise SystemExit(0)
    return run


def _stored(folder: str, overrides: Sequence[str] = ()) -> Run:
    """The run that a run folder holds, found at the place it is now."""
    import dataclasses

    from overnight import config

    path = Path(folder) / "run.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no run.yaml")
    # The vocabulary lies with the prepared data; the file that it was taken from may be gone, or be named by a variable.
    run = config.load_run(str(path), ["data.vocab_file=", *overrides])
    return dataclasses.replace(run, out=folder)


def _stored_bert(folder: str, overrides: Sequence[str] = ()) -> BertRun:
    run = _stored(folder, overrides)
    if not isinstance(run, BertRun):
        raise ConfigError(f"{folder} is a run of a byte model ({run.model.kind}), which is not fine-tuned; use `overnight linear-probe`")
    return run


def _prepare(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.corpus.pipeline import prepare

    run = _load(options, overrides)
    prepare(run.data, run.data_dir, log=lambda text: print(for_stream(text, sys.stdout), flush=True))


def _pretrain(options: argparse.Namespace, overrides: list[str]) -> None:
    run = _load(options, overrides)
    from overnight.engine.pretrain import pretrain

    pretrain(run, extend=options.extend)


def _launch(options: argparse.Namespace, overrides: list[str]) -> int:
    run = _load(options, overrides)
    from overnight.distributed.launch import Job, launch

    said = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in LAUNCH}
    return launch(run, Job(options.recipe, overrides, **{name: value for name, value in said.items() if value is not None}))


def _plan(options: argparse.Namespace, overrides: list[str]) -> None:
    import dataclasses
    import json

    run = _load(options, overrides)
    from overnight.cli.plan import make_plan, plan_text

    plan = make_plan(run)
    print(json.dumps(dataclasses.asdict(plan)) if options.json else for_stream(plan_text(plan, options.tensors), sys.stdout))


def _run(options: argparse.Namespace, overrides: list[str]) -> None:
    run = _load(options, overrides)
    from overnight.cli.run import run_all

    run_all(run, options.extend)


def _finetune(options: argparse.Namespace, overrides: list[str]) -> None:
    name = options.task
    known = name in _stored_bert(options.source).finetune
    run = _stored_bert(options.source, task_overrides(Finetune, name, overrides, known))
    from overnight.finetune.finetune import finetune
    from overnight.report.page import refresh_report
    from overnight.report.summary import summary_text

    finetune(run, name)
    print(for_stream(f"{summary_text(run.run_dir)}\n{refresh_report(run.run_dir)}\n{next_commands(run.run_dir, name)}", sys.stdout))


def _predict(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.finetune.predict import predict_file, write_answers

    folder, machine = Path(options.source), machine_overrides("predict", overrides)
    # Of an exported model, which has no run.yaml, only a byte model answers.
    exported = not (folder / "run.yaml").is_file() and (folder / "config.json").is_file()
    if exported or not isinstance(_stored(options.source), BertRun):
        from overnight.byte_lm.classify import classify_file
        from overnight.interop.byte_models import stored_run

        answers = classify_file(stored_run(folder, machine), options.task, options.input)
    else:
        answers = predict_file(_stored_bert(options.source, machine), options.task, options.input)
    write_answers(answers, Path(options.to) if options.to else None)


def _export(options: argparse.Namespace, overrides: list[str]) -> None:
    run = _stored(options.source, machine_overrides("export", overrides))
    if isinstance(run, BertRun):
        from overnight.interop.export import export_run

        export_run(run, Path(options.to), options.task)
    elif options.task:
        raise ConfigError(f"--task = {options.task!r}: a byte model has no fine-tuned tasks")
    else:
        from overnight.interop.byte_models import export_byte_model

        assert isinstance(run, ByteRun)
        export_byte_model(run, Path(options.to))
    print(f"written: {options.to}")


def _report(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.report.page import write_report

    runs = [Path(run) for run in options.runs]
    print(f"written: {write_report(runs, Path(options.to) if options.to else runs[0] / 'report.html')}")


def _bench(options: argparse.Namespace, overrides: list[str]) -> None:
    from importlib import import_module

    import_module(f"overnight.bench.{options.what}").run(peer=options.peer, tiny=options.tiny)


def _doctor(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.cli.doctor import doctor

    print(doctor())


def _recipes(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.config import recipes
    from overnight.console import table

    rows = [(name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for name, path in recipes().items()]
    print(for_stream(table(rows, left=2), sys.stdout))
