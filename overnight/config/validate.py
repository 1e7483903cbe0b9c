"""What a recipe may not say: values that cannot work, alone or together, each with its key and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from overnight.config.schema import PURI_STEPS, UNTUNED, BatchWarmup, Columns, Data, Finetune, Model, Optim, Phase, Run, Schedule, Transfer
from overnight.errors import ConfigError


def environment_path(text: str, key: str) -> Path:
    """A path with `$NAME` and `~` filled in.

    Raises:
        ConfigError: when a variable is not set.
    """
    filled = os.path.expanduser(os.path.expandvars(text))
    if unset := re.search(r"\$\{?(\w+)", filled):
        raise ConfigError(f"{key} = {text!r}: the environment variable {unset[1]} is not set; set it or give the path")
    return Path(filled)


def _between(value: float, low: float, high: float) -> bool:
    return low <= value <= high


def validate_run(run: Run) -> Iterator[str]:
    """Everything in a typed run that cannot work, one line each: key, value, what is allowed."""
    d, m, t = run.data, run.model, run.train
    yield from _positive("data", d, "vocab_size")
    yield from _positive("model", m, "layers", "width", "heads", "max_length", "embedding")
    yield from _positive("train", t, "log_every", "checkpoint_every", "keep", "eval_sequences", "spike")
    yield from _natural("data", d, "min_chars", "max_bad_lines", "workers")
    yield from _natural("train", t, "threads", "eval_every", "keep_every", "telemetry_every", "noise_every", "checksum_every")
    for name in ("dropout", "attention_dropout"):
        if not 0 <= getattr(m, name) < 1:
            yield f"model.{name} = {getattr(m, name)}: must be 0 or more and below 1"
    if not run.name or "/" in run.name or run.name in (".", ".."):
        yield f"name = {run.name!r}: must be a word without '/'; it names the run folder"
    for kind, names in (("phases", run.phases), ("finetune", run.finetune), ("transfer", run.transfer)):
        for name in names:
            if not re.fullmatch(r"[\w-]+", name):
                yield f"{kind}.{name}: a name must be of letters, digits, '_' and '-', so that overrides and files can have it"
    if not _between(run.seed, 0, 2**32 - 1):
        yield f"seed = {run.seed}: must be 0 to 2^32-1"
    if not d.paths:
        yield "data.paths = []: name at least one file or folder"
    for name in ("valid_fraction", "test_fraction"):
        if not _between(getattr(d, name), 0.0, 0.5):
            yield f"data.{name} = {getattr(d, name)}: must be 0 to 0.5"
    yield from _family_problems(run)
    if d.vocab_file:
        yield from _vocab_problems(d)
    if m.heads > 0 and m.width % m.heads and m.kind in ("bert", "transformer"):
        yield f"model.heads = {m.heads}: must divide model.width = {m.width}"
    if m.ffn < 0:
        yield f"model.ffn = {m.ffn}: must be positive, or 0 for four times the width"
    if not run.phases:
        yield "phases = {}: name at least one phase"
    for name, phase in run.phases.items():
        yield from _phase_problems(f"phases.{name}", phase, m)
        if phase.label_weight > 0 and not d.label:
            yield f"phases.{name}.label_weight = {phase.label_weight}: needs data.label, the key of the number to predict"
        if t.parallel == "fsdp" and phase.optim.name == "muon":
            yield f"train.parallel = fsdp: Muon needs whole matrices (phases.{name}.optim.name = muon); set it to ddp"
    if t.reduce == "fp16" and t.precision != "fp16":
        yield f"train.reduce = fp16: small gradients are lost in it without the loss scale of train.precision = fp16, not {t.precision}; use bf16"
    if t.parallel == "fsdp" and t.offload:
        yield "train.offload = true: works with train.parallel = ddp only; fsdp already cuts the optimizer's state among the processes"
    for (before, a), (name, b) in pairwise(run.phases.items()):
        # The moments of AdamW and LAMB are the same; LANS' are of normalised gradients.
        if b.optim.start == "keep" and a.optim.name != b.optim.name and {a.optim.name, b.optim.name} != {"adamw", "lamb"}:
            yield f"phases.{name}.optim.start = keep: {b.optim.name} cannot use what {a.optim.name} leaves in phase {before}; set it to reset"
    for name, task in run.finetune.items():
        yield from _finetune_problems(f"finetune.{name}", task, m)
    for name, feature_task in run.transfer.items():
        yield from _transfer_problems(f"transfer.{name}", feature_task)


def _positive(prefix: str, part: Any, *names: str) -> Iterator[str]:
    return (f"{prefix}.{n} = {getattr(part, n)}: must be above 0 and finite" for n in names if not 0 < getattr(part, n) < math.inf)


def _natural(prefix: str, part: Any, *names: str) -> Iterator[str]:
    return (f"{prefix}.{n} = {getattr(part, n)}: must be 0 or more, and finite" for n in names if not 0 <= getattr(part, n) < math.inf)


def _share(prefix: str, part: Any, *names: str) -> Iterator[str]:
    return (f"{prefix}.{n} = {getattr(part, n)}: must be 0 to 1" for n in names if not _between(getattr(part, n), 0.0, 1.0))


def _vocab_problems(data: Data) -> Iterator[str]:
    try:
        path = environment_path(data.vocab_file, "data.vocab_file")
        # Not splitlines(): a piece may be one of Unicode's own line ends.
        lines = path.read_bytes().decode().removesuffix("\n").count("\n") + 1
    except ConfigError as error:
        yield str(error)
    except (OSError, UnicodeDecodeError) as error:
        yield f"data.vocab_file = {data.vocab_file!r}: cannot be read ({error})"
    else:
        if lines != data.vocab_size:
            yield f"data.vocab_size = {data.vocab_size}: {data.vocab_file} has {lines} pieces; set data.vocab_size={lines} or give another file"


# What only some networks, and the data for them, have. As of optimizers, it may not be set elsewhere.
_MODEL_SETTINGS: dict[str, tuple[str, ...]] = {
    "bert": ("heads", "ffn", "max_length", "dropout", "attention_dropout"),
    "mlstm": ("embedding", "weight_norm"),
    "lstm": ("embedding", "weight_norm"),
    "transformer": ("heads", "ffn", "max_length", "dropout"),
}
_BYTE_PHASE = ("shards", "reshuffle", "label_weight")
_PHASE_SETTINGS: dict[str, tuple[str, ...]] = {
    "bert": ("batch_warmup", "nsp", "short_fraction", "mask_rate", "max_predictions", "whole_word"),
    "mlstm": _BYTE_PHASE,
    "lstm": _BYTE_PHASE,
    "transformer": _BYTE_PHASE,
}
_DATA_SETTINGS: dict[str, tuple[str, ...]] = {
    "wordpiece": ("vocab_file", "vocab_size", "lowercase"),
    "bytes": ("test_fraction", "label"),
}
# Those without these may say so.
_MAY_BE_NONE = ("max_grad_norm", "warmup", "dropout", "attention_dropout", "nsp")
_LONGEST_WINDOW = 8192


def _family_problems(run: Run) -> Iterator[str]:
    """What does not belong to the kind of network."""
    d, kind = run.data, run.model.kind
    units = "wordpiece" if kind == "bert" else "bytes"
    if d.units != units:
        yield f"data.units = {d.units}: model.kind = {kind} reads {units}"
    else:
        yield from _foreign("data", d, d.units, _DATA_SETTINGS)
    yield from _foreign("model", run.model, kind, _MODEL_SETTINGS)
    for name, phase in run.phases.items():
        if kind != "bert" and phase.batch_warmup != BatchWarmup():
            yield (
                f"phases.{name}.batch_warmup.start = {phase.batch_warmup.start}: each sequence of a {kind}'s batch is a lane that is read "
                "on from step to step, so their number cannot grow; leave it out"
            )
        yield from _foreign(f"phases.{name}", phase, kind, _PHASE_SETTINGS)
    yield from _train_problems(run)
    if run.finetune and kind != "bert":
        yield f"finetune.{next(iter(run.finetune))}: {kind} cannot be fine-tuned; put it under transfer, which judges its features"
    if run.transfer and kind not in ("mlstm", "lstm"):
        yield f"transfer.{next(iter(run.transfer))}: {kind} has no state that could be its features; only mlstm and lstm have"


def _phase_problems(key: str, phase: Phase, model: Model) -> Iterator[str]:
    yield from _positive(key, phase, "steps", "global_batch", "max_predictions")
    yield from _natural(key, phase, "micro_batch", "shards", "label_weight")
    yield from _share(key, phase, "short_fraction", "mask_rate")
    if model.kind in ("bert", "transformer") and not 8 <= phase.length <= model.max_length:
        yield f"{key}.length = {phase.length}: must be 8 to model.max_length = {model.max_length}"
    if not 8 <= phase.length <= _LONGEST_WINDOW and model.kind in ("mlstm", "lstm"):
        yield f"{key}.length = {phase.length}: must be 8 to {_LONGEST_WINDOW}"
    if 0 < phase.shards < phase.global_batch:
        yield f"{key}.shards = {phase.shards}: must be {key}.global_batch = {phase.global_batch} or more, one for each lane, or 0"
    if phase.mask_rate == 0 and model.kind == "bert":
        yield f"{key}.mask_rate = 0: must be above 0, else there is nothing to predict"
    if min(phase.micro_batch, phase.global_batch) > 0 and phase.global_batch % min(phase.micro_batch, phase.global_batch):
        yield f"{key}.global_batch = {phase.global_batch}: cannot be cut into micro-batches of {key}.micro_batch = {phase.micro_batch}; it must divide"
    if model.kind == "bert":
        yield from _batch_warmup_problems(key, phase)
    yield from _optim_problems(f"{key}.optim", phase.optim)
    yield from _schedule_problems(f"{key}.optim", phase)


def _batch_warmup_problems(key: str, phase: Phase) -> Iterator[str]:
    start, steps = phase.batch_warmup.start, phase.batch_warmup.steps
    if start and (not 0 < start < phase.global_batch or phase.global_batch % start):
        yield f"{key}.batch_warmup.start = {start}: must divide {key}.global_batch = {phase.global_batch} and be smaller"
    if start and not 0 < steps < phase.steps:
        yield f"{key}.batch_warmup.steps = {steps}: must be above 0 and below {key}.steps = {phase.steps}"
    if steps and not start:
        yield f"{key}.batch_warmup.steps = {steps}: needs {key}.batch_warmup.start, the sequences of the first step"


# What only some optimizers and schedules have. The others do nothing with it, so it may not be set there.
_OPTIM_SETTINGS: dict[str, tuple[str, ...]] = {
    "lamb": ("betas", "eps", "max_grad_norm", "bias_correction", "trust_clip", "adapt", "skip_zero_grad"),
    "lans": ("betas", "eps", "adapt", "skip_zero_grad"),
    "lars": ("momentum", "nesterov", "trust_coefficient", "lr_in_momentum", "max_grad_norm", "adapt", "skip_zero_grad"),
    "adamw": ("betas", "eps", "max_grad_norm"),
    "muon": ("momentum", "betas", "eps", "max_grad_norm"),
}
_SCHEDULE_SETTINGS: dict[str, tuple[str, ...]] = {
    "linear": ("warmup",),
    "poly": ("warmup", "power"),
    "poly_nvidia": ("warmup", "power"),
    "hold": ("warmup", "hold", "power"),
    "cosine": ("warmup",),
    "constant": ("warmup",),
    "puri": (),
}


def settings(part: Optim | Schedule) -> dict[str, Any]:
    """What the optimizer or the schedule of this name has, beside what all have, with the values."""
    table = _OPTIM_SETTINGS if isinstance(part, Optim) else _SCHEDULE_SETTINGS
    return {name: getattr(part, name) for name in table[part.name]}


def _train_problems(run: Run) -> Iterator[str]:
    """What makes some networks faster or smaller and does nothing for others."""
    t, kind = run.train, run.model.kind
    if t.graphs and kind not in ("mlstm", "lstm"):
        yield f"train.graphs = True: {kind} has no recurrence to capture" + ("; use train.compile" if kind == "bert" else "")
    if kind == "bert":
        return
    if t.compile:
        yield f"train.compile = True: {kind} is not compiled; its recurrence is written by hand"
    if t.precision == "fp8":
        yield f"train.precision = fp8: the products of {kind} are not made in 8 bits; use bf16"
    if t.recompute == "selective":
        yield f"train.recompute = selective: {kind} has none or full, which recomputes its window in segments"


def belongs(key: str, kind: str) -> bool:
    """Say whether a key of a recipe, such as `phases.NAME.nsp`, does anything for a kind of network."""
    part, name = key.split(".")[0], key.split(".")[-1 if key.count(".") < 2 else 2]
    if part in ("finetune", "transfer"):
        return kind in (("bert",) if part == "finetune" else ("mlstm", "lstm"))
    if part == "train":
        return kind in {"graphs": ("mlstm", "lstm"), "compile": ("bert",)}.get(name, (kind,))
    tables = {"data": _DATA_SETTINGS, "model": _MODEL_SETTINGS, "phases": _PHASE_SETTINGS}
    table = tables.get(part, {})
    known = any(name in names for names in table.values())
    return not known or name in table[("wordpiece" if kind == "bert" else "bytes") if part == "data" else kind]


def _foreign(key: str, part: Any, kind: str, table: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """What is set and does nothing: what the table has for other kinds and not for this one."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if value == default or not any(f.name in names for names in table.values()) or f.name in table[kind]:
            continue
        if isinstance(value, BatchWarmup) or (value == 0 and f.name in _MAY_BE_NONE):
            continue  # said elsewhere, with its reason
        yield f"{key}.{f.name} = {list(value) if isinstance(value, tuple) else value}: {kind} has no {f.name}"


def _optim_problems(key: str, optim: Optim) -> Iterator[str]:
    yield from _foreign(key, optim, optim.name, _OPTIM_SETTINGS)
    yield from _positive(key, optim, "lr", "eps", "trust_coefficient")
    yield from _natural(key, optim, "weight_decay", "max_grad_norm", "trust_clip")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield f"{key}.betas = {list(optim.betas)}: each must be 0 or more and below 1"
    if not 0 <= optim.momentum < 1:
        yield f"{key}.momentum = {optim.momentum}: must be 0 or more and below 1"
    yield from _scaling_problems(key, optim)


def _scaling_problems(key: str, optim: Optim) -> Iterator[str]:
    rule, batch = optim.scaling.rule, optim.scaling.batch
    yield from _natural(f"{key}.scaling", optim.scaling, "batch")
    if rule == "none" and batch:
        yield f"{key}.scaling.batch = {batch}: does nothing without {key}.scaling.rule"
    if rule in ("linear", "sqrt") and batch == 0:
        yield f"{key}.scaling.batch = 0: name the batch for which {key}.lr was tuned"
    if rule == "lamb_untuned" and optim.schedule.name == "puri":
        yield f"{key}.scaling.rule = lamb_untuned: sets a warm-up, and puri has no warmup"
    if rule == "lamb_untuned" and batch == 0:
        given = {"lr": (optim.lr, Optim.lr), "schedule.warmup": (optim.schedule.warmup, Schedule.warmup)}
        for name, (value, default) in given.items():
            if value != default:
                yield f"{key}.{name} = {value}: lamb_untuned sets it; leave it out, or name the batch it was tuned for in {key}.scaling.batch"


def _schedule_problems(key: str, phase: Phase) -> Iterator[str]:
    schedule, scaling = phase.optim.schedule, phase.optim.scaling
    yield from _foreign(f"{key}.schedule", schedule, schedule.name, _SCHEDULE_SETTINGS)
    yield from _positive(f"{key}.schedule", schedule, "power")
    warmup, how = schedule.warmup, ""
    if scaling.rule == "lamb_untuned" and scaling.batch >= 0:
        warmup = (warmup if scaling.batch else UNTUNED.warmup) * phase.global_batch / (scaling.batch or UNTUNED.batch)
        how = f" at batch {phase.global_batch} by lamb_untuned"
    if not _between(warmup, 0, 1):
        yield f"{key}.schedule.warmup = {warmup}{how}: longer than the phase; it is a share of the steps, 0 to 1"
    elif not (schedule.hold >= 0 and warmup + schedule.hold <= 1):
        yield f"{key}.schedule.hold = {schedule.hold}: must be 0 to {1 - warmup:g}, what the warm-up leaves"
    total = schedule.total or (PURI_STEPS if schedule.name == "puri" else phase.steps)
    if schedule.offset < 0 or schedule.offset + phase.steps > total:
        yield f"{key}.schedule.total = {total}: must cover offset {schedule.offset} + {phase.steps} steps"


def _finetune_problems(key: str, task: Finetune, model: Model) -> Iterator[str]:
    yield from _positive(key, task, "batch", "micro_batch", "epochs", "lr", "stride", "max_answer")
    yield from _natural(key, task, "max_rows", "weight_decay")
    yield from _share(key, task, "warmup", "misplaced")
    if not 8 <= task.length <= model.max_length:
        yield f"{key}.length = {task.length}: must be 8 to model.max_length = {model.max_length}"
    if min(task.micro_batch, task.batch) > 0 and task.batch % min(task.micro_batch, task.batch):
        yield f"{key}.batch = {task.batch}: cannot be cut into micro-batches of {key}.micro_batch = {task.micro_batch}; it must divide"
    if not task.seeds:
        yield f"{key}.seeds = []: name at least one seed"
    yield from _columns_problems(key, task)
    if task.dev and task.task not in ("csv", "squad"):
        yield f"{key}.dev = {task.dev!r}: only csv and squad take a file of their own to score on; {task.task} has its own"
    if not task.path and task.task != "docnames":
        yield f"{key}.path = '': name the folder that holds the data of {task.task!r}"


def _columns_problems(key: str, task: Finetune | Transfer) -> Iterator[str]:
    columns = task.columns
    if columns != Columns() and task.task != "csv":
        yield f"{key}.columns: only a table of your own (csv) has columns to name; {task.task} has its own"
    if columns.label and columns.score:
        yield f"{key}.columns.score = {columns.score!r}: give either columns.label (classes) or columns.score (numbers)"


def _transfer_problems(key: str, task: Transfer) -> Iterator[str]:
    yield from _columns_problems(key, task)
    yield from _natural(key, task, "max_rows")
    if not task.seeds:
        yield f"{key}.seeds = []: name at least one seed"
    if not task.path:
        yield f"{key}.path = '': name the folder that holds the data of {task.task!r}"
