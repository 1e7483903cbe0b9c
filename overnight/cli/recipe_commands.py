"""The commands that take a recipe: run, prepare, pretrain, launch, plan."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overnight.display import for_stream, plural, width_of
from overnight.errors import ConfigError

if TYPE_CHECKING:
    from overnight.config import Run

Add = Callable[..., argparse.ArgumentParser]
"""What a command is added with: takes its name, its function of options and overrides, and its summary."""


@contextmanager
def said_once() -> Iterator[None]:
    """Within it, an error of the command line or the recipe, which every process of a launcher has, is said by the first of a machine."""
    try:
        yield
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise SystemExit(error.exit_code) from None


def load(options: argparse.Namespace, overrides: list[str]) -> Run:
    """Return the run that the recipe and the overrides describe; print what `--help` or `--print-config` asks for instead, and end."""
    from overnight import config
    from overnight.config.validate import refuse_int8, refuse_sharded_muon

    with said_once():
        if options.help:
            from overnight.cli.recipe_help import recipe_help

            print(recipe_help(options.command, options.recipe, options.parser))
            raise SystemExit(0)
        if not options.recipe:
            known = ", ".join(config.recipes())
            raise ConfigError(f"name a recipe: a YAML file or one of {known}; `overnight {options.command} --help` lists what it may say")
        # A run folder is the recipe of its run, which resumes wherever the folder is now.
        folder = Path(options.recipe)
        own = (folder / "run.yaml").is_file()
        elsewhere = not own or any(override.startswith("out=") for override in overrides)
        writes = not options.print_config and options.command != "plan"
        if not elsewhere and writes and (folder / "imported.json").is_file():
            # It knows no text, and its recipe would prepare the text that is the default.
            raise ConfigError(
                f"{folder}: was imported, so there is nothing to {options.command}; to continue its pretraining on your text: "
                f"overnight run adapt-domain --init={folder} --name=NAME --data.paths=FOLDER"
            )

        def completed(tree: dict[str, Any]) -> dict[str, Any]:
            from overnight.interop.initial_recipe import completed_recipe

            return completed_recipe(tree, None if elsewhere else folder, writes)

        run = config.load_run(str(folder / "run.yaml") if own else options.recipe, overrides, completed, None if elsewhere else folder)
        refuse_int8(run)
        refuse_sharded_muon(run)
    if options.print_config:
        print(config.run_yaml(run), end="")
        raise SystemExit(0)
    return run


def _recipe_command(add: Add, name: str, function: Callable[..., int | None], summary: str) -> argparse.ArgumentParser:
    command = add(name, function, summary, keys=True, add_help=False)
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="a shipped recipe's name, a YAML file, or a run folder to resume")
    command.add_argument("--print-config", action="store_true", help="print the resolved recipe and stop")
    command.add_argument("-h", "--help", action="store_true", help="show this help, with every key of a recipe")
    return command


def _add_extend(command: argparse.ArgumentParser) -> None:
    text = (
        "continue a shorter run from its checkpoints in the run folder, with more steps in its last phase or more phases after it; "
        "with --budget=TIME, for that much more time, from before its decay"
    )
    command.add_argument("--extend", action="store_true", help=text)


def _add_run(add: Add) -> None:
    summary = "do everything in order: prepare, pretrain, fine-tune, evaluate, export, report; run again to continue"
    _add_extend(_recipe_command(add, "run", _run, summary))


def _run(options: argparse.Namespace, overrides: list[str]) -> None:
    run = load(options, overrides)
    from overnight.cli.run import run_all
    from overnight.engine.budget_record import errors_noted

    with errors_noted(run):
        run_all(run, options.extend)


def _add_prepare(add: Add) -> None:
    _recipe_command(add, "prepare", _prepare, "turn raw text into token shards")


def _prepare(options: argparse.Namespace, overrides: list[str]) -> None:
    run = load(options, overrides)
    from overnight.corpus.pipeline import prepare
    from overnight.corpus.places import is_remote
    from overnight.corpus.vocabulary import initial_tokens

    if is_remote(run.data.dir):
        raise ConfigError(
            f"data.dir = {run.data.dir!r}: prepare into a folder of this machine, and copy that into storage (`aws s3 sync`, `gcloud storage rsync`)"
        )

    def log(text: str) -> None:
        print(for_stream(text, sys.stdout), flush=True)

    if _is_open(run):
        from overnight.engine.sizing import settle_vocabulary

        run = settle_vocabulary(run, log)
    said = list[str]()

    def told(text: str) -> None:
        said.append(text)
        log(text)

    manifest = prepare(run.data, run.data_dir, log=told, given=initial_tokens(run), leave_out=[run.run_dir])
    if not said:
        documents, tokens = (manifest.count("train", what) for what in ("documents", "tokens"))
        units = plural(tokens, "byte" if run.data.tokenizer == "bytes" else "token")
        log(f"prepare: {run.data_dir} is ready: {plural(documents, 'document')} and {units} to train on")
    from overnight.report.data_page import refresh_data_report

    if page := refresh_data_report(run.data_dir):
        log(page)


def _add_pretrain(add: Add) -> None:
    _add_extend(_recipe_command(add, "pretrain", _pretrain, "pretrain the phases of a recipe; run again to continue"))


def _pretrain(options: argparse.Namespace, overrides: list[str]) -> None:
    run = load(options, overrides)
    if _is_open(run):
        from overnight.engine.size_record import chosen_before
        from overnight.engine.sizing import settle_sizes

        one = os.environ.get("WORLD_SIZE", "1") in ("", "1")
        run = settle_sizes(run, lambda text: print(for_stream(text, sys.stdout), flush=True)) if one else _all_chosen(chosen_before(run))
    from overnight.engine.pretrain import pretrain

    pretrain(run, extend=options.extend)


def _is_open(run: Run) -> bool:
    """Return whether a recipe leaves the sizes of its network open; nothing heavy is imported where it does not."""
    return getattr(run.model, "size", "given") == "auto"


def _all_chosen(run: Run) -> Run:
    """Return a run for many processes, of which none can choose for all.

    Raises:
        ConfigError: when its sizes are still open.
    """
    if _is_open(run):
        raise ConfigError(
            "model.size = auto: is chosen in one process, by its speed; begin with `overnight run` or `pretrain`, or give the sizes that `overnight plan` shows"
        )
    return run


def _add_launch(add: Add) -> None:
    summary = "pretrain with one process per GPU, on one or several machines, or as a Slurm job"
    command = _recipe_command(add, "launch", _launch, summary)
    command.add_argument("--nodes", metavar="N", default="1", help="number of machines, or MIN:MAX if they come and go (default: 1)")
    command.add_argument("--processes", metavar="P", type=int, help="processes per machine (default: one per GPU, or 1)")
    command.add_argument("--rendezvous", metavar="HOST:PORT", default="", help="where several machines meet: a free port on one of them")
    command.add_argument("--restarts", metavar="R", type=int, default=0, help="how often to restart after a process is lost (default: 0)")
    command.add_argument(
        "--signal-before",
        metavar="SECONDS",
        type=int,
        default=300,
        help="time between the stop signal and the end, enough for a step and a checkpoint (default: 300)",
    )
    command.add_argument("--slurm", action="store_true", help="print a script for sbatch instead of starting")
    command.add_argument("--submit", action="store_true", help="submit the script with sbatch")
    command.add_argument("--time", metavar="LIMIT", help="time limit of the job, in Slurm's format (default: 12:00:00)")
    command.add_argument("--partition", metavar="NAME", help="Slurm partition")
    command.add_argument("--account", metavar="NAME", help="Slurm account")
    command.add_argument("--cpus", metavar="C", type=int, help="cores per machine to request from Slurm")
    _add_extend(command)


def _launch(options: argparse.Namespace, overrides: list[str]) -> int:
    run = load(options, overrides)
    import dataclasses

    if _is_open(run):
        from overnight.engine.size_record import chosen_before

        run = _all_chosen(chosen_before(run))
    from overnight.distributed.launch import Job, launch

    given: dict[str, Any] = {**vars(options), "overrides": overrides}
    return launch(run, Job(**{field.name: given[field.name] for field in dataclasses.fields(Job)}))


def _add_plan(add: Add) -> None:
    summary = "show what a recipe will do: parameters and their groups, learning rate and batch size over all phases"
    command = _recipe_command(add, "plan", _plan, summary)
    command.add_argument("--tensors", action="store_true", help="also list every tensor with its shape and group")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.add_argument(
        "--roof",
        type=Path,
        metavar="FILE",
        help="also show the minimum and the expected step time, from the JSON of `overnight bench roof`",
    )


def _plan(options: argparse.Namespace, overrides: list[str]) -> None:
    run = load(options, overrides)
    import dataclasses
    import json

    from overnight.cli.plan import make_plan, plan_text
    from overnight.cli.roof_plan import roof_for, roof_text, step_times
    from overnight.cli.source_plan import absent_paths
    from overnight.config.continued import with_steps

    measured = roof_for(run, options.roof) if options.roof else None  # refused before anything is timed
    sizes, chosen = "", not run.data.vocab_size
    if _is_open(run):
        from overnight.cli.size_plan import planned

        run, sizes, found = planned(run)
    plan = make_plan(run)
    more: dict[str, Any] = {"sizes": found} if sizes else {}
    roof = ""
    if measured:
        steps = {phase.name: phase.steps for phase in plan.phases}
        times = step_times(dataclasses.replace(run, phases=with_steps(run.phases, steps)), plan.vocabulary, measured)
        roof, more = f"\n\n{roof_text(times)}", more | {"roof": [dataclasses.asdict(time) for time in times]}
    note = "" if plan.prepared else "".join(f"note: {path} does not exist; correct data.paths\n\n" for path in absent_paths(run.data))
    if options.json:
        print(json.dumps(dataclasses.asdict(plan) | more))
    else:
        print(for_stream(f"{note}{sizes}{plan_text(plan, options.tensors, chosen, width_of(sys.stdout))}{roof}", sys.stdout))


COMMANDS = (_add_run, _add_prepare, _add_pretrain, _add_launch, _add_plan)
