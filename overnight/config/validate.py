"""What a recipe may not say: values that cannot work, alone or together, each with its key and what is allowed."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from overnight.config.budget import deadline_of, length_of
from overnight.config.continued import chain_problems, chains
from overnight.config.data import Data, Mix
from overnight.config.fields import out_of_range
from overnight.config.open_sizes import size_problems
from overnight.config.schema import (
    ENCODERS,
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
    Run,
    TransformerConfig,
)
from overnight.config.search import Search
from overnight.config.validate_phases import foreign_settings, phase_problems
from overnight.errors import ConfigError


def environment_path(text: str, key: str) -> Path:
    """Return a path with `$NAME` and `~` filled in; errors as :func:`environment_text`."""
    return Path(environment_text(text, key))


def environment_text(text: str, key: str) -> str:
    """Return a path or address with `$NAME` and `~` filled in.

    Raises:
        ConfigError: when a variable is not set, or nothing is left.
    """
    filled = os.path.expanduser(os.path.expandvars(text))
    if text and not filled:  # which would be the working directory
        raise ConfigError(f"{key} = {text!r}: is empty, as the environment variable is; set it or give the path")
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
        yield from phase_problems(f"phases.{name}", phase, run)
    for (before, a), (name, b) in pairwise(run.phases.items()):
        # The moments of AdamW and LAMB are the same; LANS' are of normalized gradients.
        if not b.optim.reset_moments and a.optim.name != b.optim.name and {a.optim.name, b.optim.name} != {"adamw", "lamb"}:
            yield f"phases.{name}.optim.reset_moments = false: {b.optim.name} cannot use what {a.optim.name} leaves in phase {before}; set it to true"
    yield from _machine_problems(run)
    yield from _budget_problems(run)
    yield from chain_problems(run)
    yield from size_problems(run)
    if isinstance(run, BertRun):
        if run.evaluation.blimp_pairs == 1:
            yield "evaluation.blimp_pairs = 1: must be 2 or more, for a standard error, or 0 for all"
        for name, task in run.finetune.items():
            yield from _finetune_problems(f"finetune.{name}", task, run.model)
            yield from _idle_settings(f"finetune.{name}", task)
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
        yield f"{kind}.{name}: is a reserved name: `mask` fills in [MASK] with the pretrained model, and `all` stands for every task; choose another name"


# What only one tokenizer has. The other does nothing with it, so it may not be set there.
DATA_SETTINGS: dict[str, tuple[str, ...]] = {
    "wordpiece": ("vocab_file", "new_words", "vocab_size", "lowercase", "repeated_paragraphs"),
    "bytes": ("test_fraction", "label"),
}
COMPUTE_SETTINGS = {"torch_compile": ENCODERS, "cuda_graphs": ("mlstm", "lstm")}
"""The networks for which a part of `compute` does anything, where it does not for all."""
PHASE_SETTINGS = dict.fromkeys(("token_matching", "token_matching_steps", "final_token_matching"), ("modernbert",))
"""The same of a phase."""


def _data_problems(run: Run) -> Iterator[str]:
    data = run.data
    yield from _source_problems(run)
    reads = "wordpiece" if isinstance(run, BertRun) else "bytes"
    if data.tokenizer != reads:
        yield f"data.tokenizer = {data.tokenizer}: model.kind = {run.model.kind} reads {reads}"
    else:
        yield from foreign_settings("data", data, data.tokenizer, DATA_SETTINGS)
    for code in data.languages:
        if not re.fullmatch("[a-z]{2,3}", code):
            yield f"data.languages = {code}: is not a language code, such as en or de (ISO 639)"
    if data.tokenizer == "bytes" and data.filters.max_tokens_per_char:
        yield f"data.filters.max_tokens_per_char = {data.filters.max_tokens_per_char}: bytes have no vocabulary; leave it out"
    if data.vocab_file:
        yield from _vocab_problems(data)
    if data.new_words and not (data.vocab_file or getattr(run, "init", "")):
        yield f"data.new_words = {data.new_words}: new words are added to an existing vocabulary; name init or data.vocab_file, or raise data.vocab_size"


def _source_problems(run: Run) -> Iterator[str]:
    data, sources = run.data, run.data.sources
    if not data.paths and not sources:
        yield "data.paths = []: name at least one file or folder"
    if sources and data.paths and data.paths != Data().paths:
        yield f"data.paths = {data.paths}: data.sources replaces it; leave one of them out, or set data.paths=[]"
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
            yield f"phases.{name}.reshuffle = false: with data.sources, each pass reads different documents; set it to true"


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


def refuse_int8(run: Run) -> None:
    """Refuse what only prediction has, before anything else is done.

    Raises:
        ConfigError: where the precision is int8.
    """
    if run.precision == "int8":
        raise ConfigError("precision = int8: works only for predict, embed and serve; use bf16 to train, fine-tune or evaluate")


def refuse_sharded_muon(run: Run, optimizers: Mapping[str, str] | None = None) -> None:
    """Refuse Muon where its matrices would be sharded, before anything else is done; what only fine-tunes a run asks nothing of its phases.

    Args:
        optimizers: names of those that train now, by their keys; None are those of pretraining.

    Raises:
        ConfigError: where one of them is Muon.
    """
    if optimizers is None:
        optimizers = {f"phases.{name}.optim.name": phase.optim.name for name, phase in run.phases.items()}
    key = next((key for key, name in optimizers.items() if name == "muon"), "")
    if key and run.distributed.strategy == "fsdp":
        raise ConfigError(f"distributed.strategy = fsdp: Muon needs whole matrices ({key} = muon); set it to ddp")


def _machine_problems(run: Run) -> Iterator[str]:
    """Yield what makes some networks faster or smaller and does nothing for others, and what does not go together."""
    kind, fsdp = run.model.kind, run.distributed.strategy == "fsdp"
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
        yield f"precision = {run.precision}: the matrix products of {kind} are not computed in 8 bits; use bf16"
    if run.memory.activation_checkpointing == "selective":
        yield f"memory.activation_checkpointing = selective: {kind} has none or full, which recomputes its window in segments"


def _budget_problems(run: Run) -> Iterator[str]:
    """Yield what keeps a run from a budget: phases whose schedule cannot be cut anywhere, or whose steps count for more than a share."""
    if not run.budget:
        return
    try:
        deadline_of(run.budget, 0.0)
    except ValueError as error:
        yield f"budget = {run.budget!r}: {error}; `--budget=null` trains the steps of the recipe"
    together = [name for names in chains(run.phases) if len(names) > 1 for name in names]
    for name, phase in run.phases.items():
        key, schedule = f"phases.{name}.optim.schedule", phase.optim.schedule
        if schedule.name != "wsd":
            yield f"{key}.name = {schedule.name}: a budget needs a schedule that can end at any time; use wsd (warm-up, stable, decay), with stable_ratio=0.6 or so"
        elif schedule.warmup_ratio + schedule.stable_ratio >= 1 and name == list(run.phases)[-1]:
            yield f"{key}.stable_ratio = {schedule.stable_ratio}: leaves no steps for the decay with which a budget ends; lower it"
        if (schedule.total_steps or schedule.step_offset) and name not in together:
            yield f"{key}.total_steps = {schedule.total_steps}: with a budget the number of steps is not known beforehand; leave total_steps and step_offset out, or let a phase continue the one before (continues: true)"


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
        fits = next(size for size in range(micro, 0, -1) if batch % size == 0)
        yield f"{key}.global_batch_size = {batch}: cannot be split into micro-batches of {key}.micro_batch_size = {micro}; it must divide, as {fits} does"
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
    for name in ("doc_stride", "max_answer_length", "max_misplaced_answers") if task.task != "squad" else ():
        if (value := getattr(task, name)) != getattr(Finetune, name):
            yield f"{key}.{name} = {value:g}: applies only to questions about a text (task: squad), and {task.task} has none; leave it out"


def _idle_settings(key: str, task: Finetune) -> Iterator[str]:
    """Yield the settings of a task that do nothing beside its others; apart from its other problems, which each trial of a search has, too."""
    if task.task == "docnames" and task.path:
        yield f"{key}.path = {task.path!r}: docnames is made from the documentation inside Python and reads no file; leave it out, or name another task, such as csv"
    if task.dev and task.dev_share != Finetune.dev_share:
        yield f"{key}.dev_share = {task.dev_share:g}: nothing is split off where {key}.dev names a file to score on; leave one of them out"
    if task.eval_every != Finetune.eval_every and not task.selects_epoch:
        yield f"{key}.eval_every = {task.eval_every:g}: only the last epoch is scored without keep_best or patience; set one of them, or leave it out"
    for name in ("select_on", "select_share") if not task.selects else ():
        if (value := getattr(task, name)) != getattr(Finetune, name):
            yield f"{key}.{name} = {value}: there is nothing to choose; set keep_best, patience or search, or leave it out"


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
