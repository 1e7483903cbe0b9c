"""What the commands that take a run understand besides their options: the run-level keys, and for `finetune` and `linear-probe` those of a task."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from overnight.config.load import meant, refuse_untrained, stored_run
from overnight.config.published import NAMES, published_settings
from overnight.config.schema import BertRun, ByteRun, Columns, Finetune, LinearProbe, Run
from overnight.config.validate import environment_path, name_problems
from overnight.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from overnight.inference.model import Model

# Sections of the help, with their keys; a key that is in none comes last.
_SECTIONS = {
    "the data": ("task", "path", "dev", "dev_share", "dev_seed", "columns", "max_train_examples", "max_misplaced_answers"),
    "the training": (
        "published",
        "class_weights",
        "epochs",
        "global_batch_size",
        "optimizer",
        "lr",
        "layer_lr_decay",
        "warmup_ratio",
        "weight_decay",
        "reinit_layers",
        "seq_len",
    ),
    "the selection": ("keep_best", "patience", "eval_every", "search", "select_on", "select_share"),
    "questions": ("doc_stride", "max_answer_length"),
    "the features": ("features",),
    "repetitions": ("seeds", "random_init_seeds"),
    "this machine": ("micro_batch_size", "precision", "compute.device", "compute.threads"),
    "more": (),
}
_EXAMPLES = {
    Finetune: """\
  overnight finetune sst2 --from runs/mine --path=glue/SST-2
  overnight finetune reviews --from runs/mine --path=reviews.csv --columns.text=body --columns.label=stars
  overnight finetune faq --from runs/mine --path=train.json --dev=dev.json --seq_len=384
  overnight finetune sst2 --from runs/mine --path=glue/SST-2 --seeds=[0,1,2] --random_init_seeds=3 --precision=bf16
  overnight finetune rte --from runs/mine --path=glue/RTE --search='{lr: [1e-4, 3e-4], epochs: [2, 4], budget: 30m}' --seeds=[0,1,2]""",
    LinearProbe: """\
  overnight linear-probe sst --from runs/mine --path=sst
  overnight linear-probe reviews --from runs/mine --path=reviews.csv --columns.text=body --columns.label=stars --max_train_examples=2000""",
}
_TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
_TAGGED = (".conll", ".conllu", ".iob", ".iob2", ".bio")
_WIDEST = 100
_PUBLISHED = "Use the settings of Devlin et al. 2018, Liu et al. 2019 or Clark et al. 2020 for this kind of task, which are printed before it begins; keys that you give take precedence."
_SHOWN = ("precision", "compute.device", "compute.threads")
# Run-level keys say how a run is computed, not what it is.
_RUN_LEVEL = ("precision", "compute", "memory", "distributed", "stability", "checkpoint", "logging")
# `evaluate` measures on other data too, prepared or raw, and on tables.
_ALSO = {
    "evaluate": (
        *("data.dir", "data.format", "data.field", "data.documents", "data.encoding_errors"),
        *(f"columns.{field.name}" for field in dataclasses.fields(Columns)),
    )
}
_PART = {Finetune: "finetune", LinearProbe: "linear_probe"}
_FOR = {BertRun: "encoders (BERT and ModernBERT)", ByteRun: "byte models (mlstm, lstm, transformer)"}
_CHECKPOINT = "a checkpoint of others, such as a Hugging Face folder (docs/checkpoints.md)"
SOURCES: dict[type[Run], str] = {
    Run: f"run folder, {_CHECKPOINT}, or an exported byte model",
    BertRun: f"run folder, or {_CHECKPOINT}",
    ByteRun: "run folder of a byte model, or an exported byte model",
}
"""What --from takes, for each kind of run that a command is for."""
AnyRun = TypeVar("AnyRun", bound=Run)


def add_source(command: argparse.ArgumentParser, kind: type[Run] = Run, what: str = "") -> None:
    """Add the option that names a run; :func:`open_run` opens it.

    Args:
        command: that gets the option.
        kind: of runs that the command is for.
        what: the command takes, where that is not all that :func:`open_run` opens.
    """
    text = f"{what or SOURCES[kind]}; run-level keys such as --precision=bf16 or --compute.device=cpu may follow"
    command.add_argument("--from", dest="source", required=True, metavar="RUN", help=text)


def open_run(options: argparse.Namespace, overrides: Sequence[str], kind: type[AnyRun]) -> AnyRun:
    """Return the run that --from names, computed as run-level overrides say.

    Args:
        options: of the command.
        overrides: `KEY=VALUE`.
        kind: of run that the command is for.

    Raises:
        ConfigError: when it is no run, one of another kind, or a key is not run-level.
    """
    check_keys(options.command, overrides)
    if issubclass(BertRun, kind):
        options.source = _run_folder(options.source, kind)
    run = stored_run(Path(options.source), overrides)
    if not isinstance(run, kind):
        raise ConfigError(f"{options.source}: model.kind = {run.model.kind!r}: `overnight {options.command}` is for {_FOR[kind]}")
    return run


def open_to_answer(options: argparse.Namespace, overrides: Sequence[str], kind: type[AnyRun]) -> AnyRun:
    """Return the run of :func:`open_run` in the precision in which it answers, as `overnight.load` has it."""
    run = open_run(options, overrides, kind)
    from overnight.distributed.world import device_of
    from overnight.engine.precision import to_answer

    run = to_answer(run, overrides)
    warn_if_slow(run.precision, device_of(run))
    return run


def open_encoder(options: argparse.Namespace, overrides: Sequence[str], task: str = "", reads: str = "") -> Model:
    """Return the model that --from names, as `overnight.load` does.

    Args:
        task, reads: as of :func:`overnight.inference.model.open_model`.
    """
    from overnight.engine.precision import asked_precision
    from overnight.inference.model import open_model

    model = open_model(options.source, task, overrides, reads)
    warn_if_slow(asked_precision(overrides) or "fp32", model.trained.device)  # what is not asked for is not slow
    return model


def warn_if_slow(precision: str, device: torch.device) -> None:
    """Say so where a device lacks a precision."""
    from overnight.engine.precision import slow_precision

    if text := slow_precision(precision, device):
        print(f"warning: {text}", file=sys.stderr)


def _run_folder(source: str, kind: type[Run]) -> str:
    """Return the run folder that a text names; a checkpoint of others is imported as one."""
    path = Path(source)
    index = path.parent / f"{path.name}.index"
    if (path / "run.yaml").is_file():
        return source
    if not (source.startswith("hf:") or path.exists() or index.is_file()):
        raise ConfigError(f"{source}: does not exist{meant(source) or f'; name a {SOURCES[kind]}'}")
    from overnight.interop.imported import run_folder

    folder = run_folder(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in ("run.yaml", "config.json")):
        refuse_untrained(folder)
        raise ConfigError(f"{source}: holds no model; name a {SOURCES[kind]}")
    return str(folder)


def check_keys(command: str, overrides: Sequence[str]) -> None:
    """Check that a command takes some overrides.

    Raises:
        ConfigError: naming one that is neither run-level nor of the command.
    """
    for override in overrides:
        if not is_run_level(override, command):
            more = "".join(f", --{name}" for name in _ALSO.get(command, ()))
            key = override.partition("=")[0]
            raise ConfigError(
                f"--{key}: `overnight {command}` takes only run-level keys, such as --precision=bf16{' and' * bool(more)}{more[1:]}"
            )


def open_task(
    options: argparse.Namespace, overrides: Sequence[str], kind: type[AnyRun], task: type[Finetune] | type[LinearProbe]
) -> AnyRun:
    """Return the run that --from names, with the task that the command names; other overrides than run-level ones are of the task.

    Raises:
        ConfigError: as of :func:`open_run`, or for a new name that says nothing of its task.
    """
    run = open_run(options, (), kind)
    known = options.task in getattr(run, _PART[task])
    if isinstance(run, BertRun):
        overrides = with_published(run, options.task, overrides)
    run = stored_run(Path(options.source), task_overrides(task, options.task, overrides, known))
    assert isinstance(run, kind)
    return run


def with_published(run: BertRun, name: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a task of fine-tuning with the published settings that `published=` names in front, and say what these are.

    A learning rate, and other settings that were searched for in the paper, are not searched for where they are given.

    Raises:
        ConfigError: there are none of that name.
    """
    given = next((text.partition("=")[2] for text in overrides if text.startswith("published=")), None)
    rest = [text for text in overrides if not text.startswith("published=")]
    if given is None:
        return rest
    keys = {text.partition("=")[0] for text in rest}
    task = next((text.partition("=")[2] for text in rest if text.startswith("task=")), "")
    task = task or (run.finetune[name].task if name in run.finetune else _task_of(Finetune, name, rest))
    found = published_settings(given, task, run.model.hidden_size)
    found = {key: value for key, value in found.items() if not keys & {key, key.partition(".")[0], key.removeprefix("search.")}}
    chosen = {key.partition(".")[0] for key in (*keys, *found)} & {"search", "keep_best", "patience"}
    if not chosen and not (name in run.finetune and run.finetune[name].selects):
        found.pop("select_on", None)  # nothing is chosen any more
    settings = [f"{key}={value}" for key, value in found.items()]
    print(f"{name}: published settings ({given}): {' '.join(settings)}")
    return [*settings, *rest]


def is_run_level(override: str, command: str = "") -> bool:
    """Return whether an override says how a run is computed, as any command may, or is one that this command takes as well."""
    key = override.partition("=")[0]
    return key.partition(".")[0] in _RUN_LEVEL or key in _ALSO.get(command, ())


class KeysHelp(argparse.Action):
    """`--help` that also lists the keys of the dataclass given as `const`; the list is made only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, const, argparse.SUPPRESS, help="show this help, with every key of a task")

    def __call__(self, parser: argparse.ArgumentParser, *values: Any) -> None:
        print(f"{parser.format_help()}\n{keys_text(self.const)}")
        parser.exit()


def keys_text(kind: type[Finetune] | type[LinearProbe]) -> str:
    """Return every key of a task, in sections, with type, meaning and default, and examples."""
    from overnight.config import BertRun
    from overnight.config.describe import Setting, describe, in_training

    width = min(shutil.get_terminal_size().columns, _WIDEST)
    shown = (in_training(row, of_bytes=kind is LinearProbe) for row in describe({"": BertRun}) if row.key in _SHOWN)
    rows = [*describe({"": kind}), *shown]
    if kind is Finetune:
        rows.append(Setting("published", "|".join(NAMES), "", _PUBLISHED))
    placed: dict[str, list[Setting]] = {section: [] for section in _SECTIONS}
    for row in rows:
        placed[next((s for s, keys in _SECTIONS.items() if row[0] in keys or row[0].partition(".")[0] in keys), "more")].append(row)
    lines = []
    for section, keys in placed.items():
        lines += [f"{section}:"] if keys else []
        for key, kind_name, default, text in keys:
            default = "what TASK or the path says" if key == "task" else default
            shown = text if default in ("", "required") else f"{text} (default: {default})"
            lines += [f"  --{key}={kind_name}", *textwrap.wrap(shown, width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)]
        lines += [""] if keys else []
    return "\n".join([*lines, "examples:", _EXAMPLES[kind]])


def task_overrides(kind: type[Finetune] | type[LinearProbe], name: str, overrides: Sequence[str], known: bool) -> list[str]:
    """Return dotted overrides of a run from those of one of its tasks; run-level ones stay as they are.

    Args:
        kind: of task.
        name: key of the task.
        overrides: `KEY=VALUE`.
        known: whether the run's recipe has the task; of another, `task=` is found by its name, or by what its path names.

    Raises:
        ConfigError: for a name that no task can have, or a new one that says nothing of its task.
    """
    part = _PART[kind]
    if problem := next(name_problems(part, name), ""):
        raise ConfigError(problem)
    if not known and not any(override.startswith("task=") for override in overrides):
        overrides = [f"task={_task_of(kind, name, overrides)}", *overrides]
    return [override if is_run_level(override) else f"{part}.{name}.{override}" for override in overrides]


def _task_of(kind: type[Finetune] | type[LinearProbe], name: str, overrides: Sequence[str]) -> str:
    tasks: tuple[str, ...] = get_args(get_type_hints(kind)["task"])
    if name in tasks:
        return name
    part = _PART[kind]
    given = next((text.partition("=")[2] for text in overrides if text.startswith("path=")), "")
    path = environment_path(given, f"{part}.{name}.path") if given else Path()
    inside = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    endings = {file.suffix.lower() for file in (path, *inside) if file == path or file.stem.lower() == "train"}
    if endings.intersection(_TABLES):
        return "csv"
    # CoNLL-2003 comes as eng.train, SQuAD as train-v1.1.json.
    if "tokens" in tasks and (endings.intersection(_TAGGED) or any(file.suffix == ".train" for file in inside)):
        return "tokens"
    questions = [file for file in (path, *inside) if file.suffix.lower() == ".json" and (file == path or "train" in file.name.lower())]
    if "squad" in tasks and questions:
        return "squad"
    near = difflib.get_close_matches(name, tasks, 1)
    others = ", --task=squad for questions in SQuAD's format, --task=tokens for words with tags" if "squad" in tasks else ""
    raise ConfigError(
        f"{name!r} is neither a task of this run nor one of {', '.join(tasks)}{f' (did you mean {near[0]!r}?)' if near else ''}; "
        f"say what it is: --task=csv for a table of your own ({', '.join(_TABLES)}){others}, and give its location with --path="
    )


def next_commands(folder: Path, name: str) -> str:
    """Return what can be done with a task that was fine-tuned, as commands to copy.

    Args:
        folder: the run folder.
        name: the task.
    """
    from overnight.checkpoint.task_folder import read_facts

    facts = read_facts(folder / "finetune" / name)
    task, run, out = shlex.quote(name), shlex.quote(str(folder)), shlex.quote(f"{folder.name}-{name}")
    if facts["kind"] == "spans":
        ask = f"overnight predict {task} --from {run} --input QUESTIONS.json"
    elif facts["kind"] == "token_classification":
        ask = f"echo 'words between blanks' | overnight predict {task} --from {run}"
    else:
        text = r"printf 'one text\tanother text\n'" if facts["pairs"] else "echo 'a text'"
        ask = f"{text} | overnight predict {task} --from {run}"
    return f"next:\n  {ask}\n  overnight export --from {run} --task {task} --to {out}"
