"""What a recipe may not say: values that cannot work, alone or together, each with its key and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from overnight.config.budget import deadline_of, length_of
from overnight.config.data import Data, Mix
from overnight.config.fields import out_of_range
from overnight.config.open_sizes import size_problems
from overnight.config.optimizers import SCHEDULE_SETTINGS, UNTUNED, MuonConfig, Optim, Schedule
from overnight.config.schema import (
    ENCODERS,
    BertPhase,
    BertRun,
    BytePhase,
    ByteRun,
    CausalLMConfig,
    Columns,
    EncoderConfig,
    Finetune,
    LinearProbe,
    Model,
    ModernBertConfig,
    Phase,
    Run,
    TransformerConfig,
)
from overnight.config.search import Search
from overnight.errors import ConfigError


def environment_path(text: str, key: str) -> Path:
    """Return a path with `$NAME` and `~` filled in; errors as :func:`environment_text`."""
    return Path(environment_text(text, key))


def environment_text(text: str, key: str) -> str:
    """Return a path or address with `$NAME` and `~` filled in.

    Raises:
        ConfigError: when a variable is not set.
    """
    filled = os.path.expanduser(os.path.expandvars(text))
    if unset := re.search(r"\$\{?(\w+)", filled):
        raise ConfigError(f"{key} = {text!r}: the environment variable {unset[1]} is not set; set it or give the path")
    return filled


def validate_run(run: Run) -> Iterator[str]:
    """Yield everything in a typed run that cannot work, one line each: key, value, what is allowed."""
    yield from out_of_range(run)
    if not run.name or "/" in run.name or run.name in (".", ".."):
        yield f"name = {run.name!r}: must be a word without '/'; it names the run folder"
    for key, folder in (("out", run.out), ("data.dir", run.data.dir)):
        if not folder:  # as of `--out=$NOT_SET`; else it would be the working directory, which is called .
            yield f"{key} = '': name a folder"
    for kind in ("phases", "finetune", "linear_probe"):
        for name in getattr(run, kind, {}):
            yield from name_problems(kind, name)
    yield from _data_problems(run)
    yield from _model_problems(run.model)
    if not run.phases:
        yield "phases = {}: name at least one phase"
    for name, phase in run.phases.items():
        yield from _phase_problems(f"phases.{name}", phase, run)
    for (before, a), (name, b) in pairwise(run.phases.items()):
        # The moments of AdamW and LAMB are the same; LANS' are of normalized gradients.
        if not b.optim.reset_moments and a.optim.name != b.optim.name and {a.optim.name, b.optim.name} != {"adamw", "lamb"}:
            yield f"phases.{name}.optim.reset_moments = false: {b.optim.name} cannot use what {a.optim.name} leaves in phase {before}; set it to true"
    yield from _machine_problems(run)
    yield from _budget_problems(run)
    yield from size_problems(run)
    if isinstance(run, BertRun):
        if run.evaluation.blimp_pairs == 1:
            yield "evaluation.blimp_pairs = 1: must be 2 or more, for a standard error, or 0 for all"
        for name, task in run.finetune.items():
            yield from _finetune_problems(f"finetune.{name}", task, run.model)
    if isinstance(run, ByteRun):
        if run.linear_probe and isinstance(run.model, CausalLMConfig):
            yield f"linear_probe.{next(iter(run.linear_probe))}: transformer has no state that could be its features; only mlstm and lstm have"
        for name, probe in run.linear_probe.items():
            yield from _probe_problems(f"linear_probe.{name}", probe)


def name_problems(kind: str, name: str) -> Iterator[str]:
    """Yield why a phase or task cannot be called so.

    Args:
        kind: phases, finetune or linear_probe.
        name: its key in the recipe.
    """
    if not re.fullmatch(r"[\w-]+", name):
        yield f"{kind}.{name}: a name must be of letters, digits, '_' and '-', so that overrides and files can have it"
    elif kind != "phases" and name in ("mask", "all"):
        yield f"{kind}.{name}: is no name for a task: `mask` fills in [MASK] with the pretrained model, and `all` is every task; take another"


# What only one tokenizer has. The other does nothing with it, so it may not be set there.
DATA_SETTINGS: dict[str, tuple[str, ...]] = {
    "wordpiece": ("vocab_file", "new_words", "vocab_size", "lowercase", "repeated_paragraphs"),
    "bytes": ("test_fraction", "label"),
}
COMPUTE_SETTINGS = {"torch_compile": ENCODERS, "cuda_graphs": ("mlstm", "lstm")}
"""The networks for which a part of `compute` does anything, where it does not for all."""
PHASE_SETTINGS = dict.fromkeys(("token_matching", "token_matching_steps", "final_token_matching"), ("modernbert",))
"""The same of a phase."""
_LONGEST_WINDOW = 8192
# Up to this share of masks fewer predictions than it asks for are a choice, as in published recipes; above, a bound left over from them.
_PUBLISHED_RATE = 0.15


def _data_problems(run: Run) -> Iterator[str]:
    data = run.data
    yield from _source_problems(run)
    reads = "wordpiece" if isinstance(run, BertRun) else "bytes"
    if data.tokenizer != reads:
        yield f"data.tokenizer = {data.tokenizer}: model.kind = {run.model.kind} reads {reads}"
    else:
        yield from _foreign("data", data, data.tokenizer, DATA_SETTINGS)
    for code in data.languages:
        if not re.fullmatch("[a-z]{2,3}", code):
            yield f"data.languages = {code}: is no code of a language, such as en or de (ISO 639)"
    if data.tokenizer == "bytes" and data.filters.max_tokens_per_char:
        yield f"data.filters.max_tokens_per_char = {data.filters.max_tokens_per_char}: bytes have no vocabulary; leave it out"
    if data.vocab_file:
        yield from _vocab_problems(data)
    if data.new_words and not (data.vocab_file or getattr(run, "init", "")):
        yield f"data.new_words = {data.new_words}: are added to a given vocabulary; name init or data.vocab_file, or raise data.vocab_size"


def _source_problems(run: Run) -> Iterator[str]:
    data, sources = run.data, run.data.sources
    if not data.paths and not sources:
        yield "data.paths = []: name at least one file or folder"
    if sources and data.paths and data.paths != Data().paths:
        yield f"data.paths = {data.paths}: data.sources stands in its place; leave one of them out, or set data.paths=[]"
    for name, source in sources.items():
        if not re.fullmatch(r"[\w-]+", name):
            yield f"data.sources.{name}: a name must be of letters, digits, '_' and '-', so that overrides and files can have it"
        if not source.paths:
            yield f"data.sources.{name}.paths = []: name at least one file or folder"
    yield from _mixture_problems("data.sources", sources)
    for name, phase in run.phases.items():
        key = f"phases.{name}.mixture"
        for unknown in phase.mixture.keys() - sources.keys():
            known = f"it has {', '.join(sources)}" if sources else "there are none"
            yield f"{key}.{unknown}: data.sources has no source {unknown!r}; {known}"
        yield from _mixture_problems(key, phase.mixture)
        if isinstance(phase, BytePhase) and sources and not phase.reshuffle:
            yield f"phases.{name}.reshuffle = false: of data.sources each pass reads other documents; set it to true"


def _mixture_problems(key: str, mixture: Mapping[str, Mix]) -> Iterator[str]:
    """Yield what makes the share of a source unclear: epochs beside weights, which decide alone."""
    if any(mix.weight > 0 for mix in mixture.values()):
        for name, mix in mixture.items():
            if mix.epochs != Mix.epochs:
                yield f"{key}.{name}.epochs = {mix.epochs:g}: does nothing where a source has a weight; give all of them weights, or all of them epochs"


def _vocab_problems(data: Data) -> Iterator[str]:
    try:
        path = environment_path(data.vocab_file, "data.vocab_file")
        # Not splitlines(): a token may be one of Unicode's own line ends.
        lines = path.read_bytes().decode().removesuffix("\n").count("\n") + 1
    except ConfigError as error:
        yield str(error)
    except (OSError, UnicodeDecodeError) as error:
        yield f"data.vocab_file = {data.vocab_file!r}: cannot be read ({error})"
    else:
        if lines != data.vocab_size:
            yield f"data.vocab_size = {data.vocab_size}: {data.vocab_file} has {lines} tokens; set data.vocab_size={lines} or give another file"


def _model_problems(model: Model) -> Iterator[str]:
    if isinstance(model, TransformerConfig) and model.num_heads > 0 and model.hidden_size % model.num_heads:
        yield f"model.num_heads = {model.num_heads}: must divide model.hidden_size = {model.hidden_size}"
    if isinstance(model, ModernBertConfig):
        if model.num_heads > 0 and model.hidden_size // model.num_heads % 2:
            yield f"model.num_heads = {model.num_heads}: leaves {model.hidden_size // model.num_heads} dimensions a head, and rotary positions turn them in pairs; the number must be even"
        if model.local_attention % 2:
            yield f"model.local_attention = {model.local_attention}: must be even, half of it on either side"


def _phase_problems(key: str, phase: Phase, run: Run) -> Iterator[str]:
    model = run.model
    if isinstance(model, TransformerConfig):
        if not 8 <= phase.seq_len <= model.max_position_embeddings:
            yield f"{key}.seq_len = {phase.seq_len}: must be 8 to model.max_position_embeddings = {model.max_position_embeddings}"
    elif not 8 <= phase.seq_len <= _LONGEST_WINDOW:
        yield f"{key}.seq_len = {phase.seq_len}: must be 8 to {_LONGEST_WINDOW}"
    batch, micro = phase.global_batch_size, phase.micro_batch_size
    if min(micro, batch) > 0 and batch % min(micro, batch):
        yield f"{key}.global_batch_size = {batch}: cannot be split into micro-batches of {key}.micro_batch_size = {micro}; it must divide"
    if isinstance(phase, BertPhase):
        if phase.mlm_probability == 0:
            yield f"{key}.mlm_probability = 0: must be above 0, else there is nothing to predict"
        if phase.final_mlm_probability > phase.mlm_probability:
            yield f"{key}.final_mlm_probability = {phase.final_mlm_probability:g}: must be at most {key}.mlm_probability = {phase.mlm_probability:g}: it falls"
        schedule = phase.optim.schedule
        holds = schedule.name == "constant" or (schedule.name == "wsd" and schedule.warmup_ratio + schedule.stable_ratio >= 1)
        if phase.final_mlm_probability and holds:
            yield f"{key}.final_mlm_probability = {phase.final_mlm_probability:g}: is never reached, since the learning rate of the schedule `{schedule.name}` does not decay"
        if phase.token_matching and not isinstance(run.model, ModernBertConfig):
            yield f"{key}.token_matching = {phase.token_matching:g}: needs model.kind = modernbert; BERT learns to compare texts by {key}.nsp, so set it to 0"
        elif phase.token_matching and phase.nsp:
            yield f"{key}.token_matching = {phase.token_matching:g}: needs {key}.nsp=false, since it makes pairs of its own; or set it to 0"
        if phase.token_matching and phase.final_token_matching > phase.token_matching:
            yield f"{key}.final_token_matching = {phase.final_token_matching:g}: must be at most {key}.token_matching = {phase.token_matching:g}: it falls"
        elif phase.token_matching and phase.final_token_matching and not phase.token_matching_steps:
            yield f"{key}.final_token_matching = {phase.final_token_matching:g}: is never reached; set {key}.token_matching_steps, after which the share falls"
        most, wanted = phase.max_predictions_per_seq, phase.mlm_probability * phase.seq_len
        if _PUBLISHED_RATE < phase.mlm_probability <= 1 and 0 < most < round(wanted):
            yield f"{key}.mlm_probability = {phase.mlm_probability:g}: asks for {round(wanted)} of {phase.seq_len} tokens, of which max_predictions_per_seq = {most} cuts some off; set it to 0"
        yield from _batch_warmup_problems(key, phase, bool(run.budget))
    if isinstance(phase, BytePhase):
        if 0 < phase.num_document_groups < batch:
            yield f"{key}.num_document_groups = {phase.num_document_groups}: must be {key}.global_batch_size = {batch} or more, one for each stream, or 0"
        if phase.label_weight > 0 and not run.data.label:
            yield f"{key}.label_weight = {phase.label_weight}: needs data.label, the key of the number to predict"
    if isinstance(phase.optim, MuonConfig) and phase.optim.base_width and not isinstance(run, BertRun):
        yield f"{key}.optim.base_width = {phase.optim.base_width}: {model.kind} has no rule for the rate at another width; only {' and '.join(ENCODERS)} have"
    if phase.optim.layer_lr_decay != 1 and not isinstance(run, BertRun):
        yield f"{key}.optim.layer_lr_decay = {phase.optim.layer_lr_decay:g}: is for the layers of an encoder; only {' and '.join(ENCODERS)} have it"
    yield from _scaling_problems(f"{key}.optim", phase.optim)
    yield from _schedule_problems(f"{key}.optim", phase)


def _batch_warmup_problems(key: str, phase: BertPhase, budget: bool) -> Iterator[str]:
    """Yield what is wrong with a batch that grows; a budget decides the steps of the phase later."""
    start, steps = phase.batch_warmup.initial_batch_size, phase.batch_warmup.steps
    if start and (not 0 < start < phase.global_batch_size or phase.global_batch_size % start):
        yield f"{key}.batch_warmup.initial_batch_size = {start}: must divide {key}.global_batch_size = {phase.global_batch_size} and be smaller"
    if start and not 0 < steps < (math.inf if budget else phase.steps):
        most = "" if budget else f" and below {key}.steps = {phase.steps}"
        yield f"{key}.batch_warmup.steps = {steps}: must be above 0{most}"
    if steps and not start:
        yield f"{key}.batch_warmup.steps = {steps}: needs {key}.batch_warmup.initial_batch_size, the sequences of the first step"


def refuse_int8(run: Run) -> None:
    """Refuse what only prediction has, before anything else is done.

    Raises:
        ConfigError: where the precision is int8.
    """
    if run.precision == "int8":
        raise ConfigError("precision = int8: works only for predict, embed and serve; use bf16 to train, fine-tune or evaluate")


def _machine_problems(run: Run) -> Iterator[str]:
    """Yield what makes some networks faster or smaller and does nothing for others, and what does not go together."""
    kind, fsdp = run.model.kind, run.distributed.strategy == "fsdp"
    if fsdp and (name := next((name for name, phase in run.phases.items() if phase.optim.name == "muon"), "")):
        yield f"distributed.strategy = fsdp: Muon needs whole matrices (phases.{name}.optim.name = muon); set it to ddp"
    if run.distributed.grad_reduce_dtype == "fp16" and run.precision != "fp16":
        yield (
            "distributed.grad_reduce_dtype = fp16: small gradients are lost in it without the loss scale of precision = fp16, "
            f"not {run.precision}; use bf16"
        )
    if fsdp and run.memory.optimizer_cpu_offload:
        yield "memory.optimizer_cpu_offload = true: works with distributed.strategy = ddp only; fsdp already shards the optimizer's state"
    if run.compute.cuda_graphs and kind not in COMPUTE_SETTINGS["cuda_graphs"]:
        yield f"compute.cuda_graphs = true: {kind} has no recurrence to capture" + (
            "; use compute.torch_compile" if isinstance(run, BertRun) else ""
        )
    if isinstance(run, BertRun):
        return
    if run.compute.torch_compile is True:
        yield f"compute.torch_compile = true: {kind} is not compiled; its recurrence is written by hand"
    if run.precision in ("fp8", "int8"):
        yield f"precision = {run.precision}: the matrix products of {kind} are not made in 8 bits; use bf16"
    if run.memory.activation_checkpointing == "selective":
        yield f"memory.activation_checkpointing = selective: {kind} has none or full, which recomputes its window in segments"


def _budget_problems(run: Run) -> Iterator[str]:
    """Yield what keeps a run from a budget: phases whose schedule cannot be cut anywhere, or whose steps count for more than a share."""
    if not run.budget:
        return
    try:
        deadline_of(run.budget, 0.0)
    except ValueError as error:
        yield f"budget = {run.budget!r}: {error}"
    for name, phase in run.phases.items():
        key, schedule = f"phases.{name}.optim.schedule", phase.optim.schedule
        if schedule.name != "wsd":
            yield f"{key}.name = {schedule.name}: a budget needs one that can end at any time; use wsd (warm-up, stable, decay), with stable_ratio=0.6 or so"
        elif schedule.warmup_ratio + schedule.stable_ratio >= 1:
            yield f"{key}.stable_ratio = {schedule.stable_ratio}: leaves no decay, with which a budget ends; lower it"
        if schedule.total_steps or schedule.step_offset:
            yield f"{key}.total_steps = {schedule.total_steps}: with a budget nobody knows the steps before; leave total_steps and step_offset out"


def _foreign(key: str, part: Any, kind: str, table: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield what is set and does nothing: what the table has for other kinds and not for this one."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if value == f.default or not any(f.name in names for names in table.values()) or f.name in table[kind]:
            continue
        yield f"{key}.{f.name} = {value}: {kind} has no {f.name}"


def _scaling_problems(key: str, optim: Optim) -> Iterator[str]:
    rule, batch = optim.scaling.rule, optim.scaling.base_batch_size
    if rule == "none" and batch:
        yield f"{key}.scaling.base_batch_size = {batch}: does nothing without {key}.scaling.rule"
    if rule in ("linear", "sqrt") and batch == 0:
        yield f"{key}.scaling.base_batch_size = 0: name the batch size for which {key}.lr was tuned"
    if rule == "lamb_untuned" and batch == 0:
        given = {"lr": (optim.lr, Optim.lr), "schedule.warmup_ratio": (optim.schedule.warmup_ratio, Schedule.warmup_ratio)}
        for name, (value, default) in given.items():
            if value != default:
                yield (
                    f"{key}.{name} = {value}: lamb_untuned sets it; leave it out, or name the batch size it was tuned for in "
                    f"{key}.scaling.base_batch_size"
                )


def _schedule_problems(key: str, phase: Phase) -> Iterator[str]:
    schedule, scaling = phase.optim.schedule, phase.optim.scaling
    yield from _foreign(f"{key}.schedule", schedule, schedule.name, SCHEDULE_SETTINGS)
    if schedule.decay == "sqrt" and schedule.power != Schedule.power:
        yield f"{key}.schedule.power = {schedule.power}: decay = sqrt has none; leave it out, or set decay=power"
    warmup, how = schedule.warmup_ratio, ""
    if scaling.rule == "lamb_untuned" and scaling.base_batch_size >= 0:
        tuned, base = (warmup, scaling.base_batch_size) if scaling.base_batch_size else (UNTUNED.warmup_ratio, UNTUNED.batch_size)
        warmup, how = tuned * phase.global_batch_size / base, f" at batch size {phase.global_batch_size} by lamb_untuned"
    if not 0 <= warmup <= 1:
        yield f"{key}.schedule.warmup_ratio = {warmup}{how}: longer than the phase; it is a share of the steps, 0 to 1"
    elif not (schedule.stable_ratio >= 0 and warmup + schedule.stable_ratio <= 1):
        yield f"{key}.schedule.stable_ratio = {schedule.stable_ratio}: must be 0 to {1 - warmup:g}, what the warm-up leaves"
    total = schedule.total_steps or phase.steps
    if schedule.step_offset < 0 or schedule.step_offset + phase.steps > total:
        yield f"{key}.schedule.total_steps = {total}: must cover step_offset {schedule.step_offset} + {phase.steps} steps"


def _search_problems(key: str, task: Finetune, model: EncoderConfig) -> Iterator[str]:
    search, given = task.search, task.search.combinations
    if search.budget:
        try:
            length_of(search.budget)
        except ValueError as error:
            yield f"{key}.search.budget = {search.budget!r}: {error}"
    if search != Search() and not given:
        yield f"{key}.search: has nothing to try; give a list, such as {key}.search.lr=[1e-4,3e-4]"
    for number in range(len(given)):
        tried = dataclasses.replace(task, **given[number], search=Search())
        if problems := list(_finetune_problems(f"{key}.search", tried, model)):
            yield problems[0]
            return


def _finetune_problems(key: str, task: Finetune, model: EncoderConfig) -> Iterator[str]:
    yield from _search_problems(key, task, model)
    batch, micro = task.global_batch_size, task.micro_batch_size
    if not 8 <= task.seq_len <= model.max_position_embeddings:
        yield f"{key}.seq_len = {task.seq_len}: must be 8 to model.max_position_embeddings = {model.max_position_embeddings}"
    if min(micro, batch) > 0 and batch % min(micro, batch):
        yield f"{key}.global_batch_size = {batch}: cannot be split into micro-batches of {key}.micro_batch_size = {micro}; it must divide"
    if task.reinit_layers > model.num_layers:
        yield f"{key}.reinit_layers = {task.reinit_layers}: must be 0 to model.num_layers = {model.num_layers}"
    yield from _seeds_problems(key, task.seeds)
    if not task.path and task.task != "docnames":
        yield f"{key}.path = '': name the folder that holds the data of {task.task!r}"
    yield from _columns_problems(key, task)
    if task.dev and task.task not in ("csv", "squad", "tokens"):
        yield f"{key}.dev = {task.dev!r}: only csv, squad and tokens take a file of their own to score on; {task.task} has its own"
    if task.dev_share != Finetune.dev_share and task.task not in ("csv", "tokens"):
        yield f"{key}.dev_share = {task.dev_share:g}: only csv and tokens split off a share that is yours to choose; {task.task} has its own"


def _seeds_problems(key: str, seeds: list[int]) -> Iterator[str]:
    if not seeds:
        yield f"{key}.seeds = []: name at least one seed"
    if len(set(seeds)) < len(seeds):
        yield f"{key}.seeds = {seeds}: names a seed twice, which gives the same result again; name each once"


def _columns_problems(key: str, task: Finetune | LinearProbe) -> Iterator[str]:
    columns = task.columns
    if columns != Columns() and task.task != "csv":
        yield f"{key}.columns: only a table of your own (csv) has columns to name; {task.task} has its own"
    if sum(map(bool, (columns.label, columns.labels, columns.score))) > 1:
        yield f"{key}.columns.score = {columns.score!r}: give one of columns.label (a class), columns.labels (several) and columns.score (a number)"


def _probe_problems(key: str, task: LinearProbe) -> Iterator[str]:
    yield from _seeds_problems(key, task.seeds)
    if not task.path:
        yield f"{key}.path = '': name the folder that holds the data of {task.task!r}"
    yield from _columns_problems(key, task)
