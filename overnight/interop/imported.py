"""A checkpoint of others as a run folder, so that every command that takes a run takes it: finetune, predict, evaluate, export."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from overnight import config
from overnight.checkpoint.initial import Initial
from overnight.checkpoint.reader import TrainingProgress
from overnight.checkpoint.writer import Parts, write_checkpoint
from overnight.config import BertConfig, BertRun
from overnight.corpus.settings import settings_of
from overnight.corpus.shards import FORMAT_VERSION, Manifest, save_manifest
from overnight.corpus.tokenizer import save_tokenizer, vocabulary
from overnight.engine.workload import new_model
from overnight.errors import ConfigError, UserError
from overnight.interop.sources import HUB, is_source, read_source, source_digest
from overnight.run_dir.atomic import write_json, write_whole
from overnight.run_dir.environment import environment
from overnight.state_files import STRICT, read_json, sealed, sealed_yaml

_LENGTH = 128


@dataclass(frozen=True)
class ImportRecord:
    """`imported.json` of such a folder."""

    __pydantic_config__ = STRICT
    version: int
    source: str
    """The path that it had then, made absolute, or the name of the hub."""
    random: list[str]
    """Heads that the checkpoint lacked, which are drawn at random."""
    files: str = ""
    """What :func:`source_digest` says of it; empty for a name of the hub, and in folders of an earlier version."""


def import_encoder(source: str, out: Path) -> tuple[BertRun, list[str]]:
    """Write a pretrained encoder of others as a run folder whose pretraining is done.

    Args:
        source: what :func:`read_source` takes.
        out: the folder to write; it must not exist.

    Returns:
        The run, and notes for the user.

    Raises:
        DataError: the checkpoint cannot be used.
        UserError: the folder exists, or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out}: exists; name another folder, or delete it")
    files, initial = source_digest(source), read_source(source)
    run, known = _run(initial, out), vocabulary(initial.tokens, initial.lowercase)
    state, random = initial.state, [head for head in initial.lacks() if head != "mlm"]
    if random:  # as transformers does: a task trains the pooler, and nothing else asks for these
        drawn = new_model(run, known, torch.device("cpu")).state_dict()
        state = {**{name: tensor for name, tensor in drawn.items() if name.split(".")[0] in random}, **state}
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_tokenizer(beside / "corpus", initial.tokens, initial.lowercase)
        manifest = Manifest(FORMAT_VERSION, known.hash, known.size, settings_of(run.data), [], 0, 0, [])
        save_manifest(beside / "corpus", manifest)
        progress = TrainingProgress(corpus=manifest.fingerprint(), phase="elsewhere", optimizer="lamb", step=1)
        parts: Parts = {"model": {name: tensor.contiguous() for name, tensor in state.items()}, "optimizer": {}}
        write_checkpoint(beside / "checkpoints", parts, dataclasses.asdict(progress))
        end = {"kind": "phase", "phase": "elsewhere", "event": "end", "step": 1, "global_step": 0, "seconds": 0.0}
        write_whole(beside / "metrics.jsonl", [f"{json.dumps(end)}\n".encode()])
        write_json(beside / "env.json", sealed(environment()))
        write_json(beside / "imported.json", sealed(dataclasses.asdict(ImportRecord(1, _absolute(source), random, files))))
        write_whole(beside / "run.yaml", [sealed_yaml(config.run_yaml(run)).encode()])
        beside.rename(out)
    except OSError as error:
        if not (out / "run.yaml").is_file():  # of another process
            raise UserError(f"{out}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return run, _notes(initial, random)


def _run(initial: Initial, out: Path) -> BertRun:
    """Return a run of that network; nothing is known of how it was trained, and a recipe must have a phase."""
    model, positions = initial.model, initial.model.max_position_embeddings
    phase = {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": min(_LENGTH, positions)}
    nsp = isinstance(model, BertConfig) and "nsp" not in initial.lacks()
    tree = {
        "name": out.resolve().name,
        "out": str(out),
        "data": {"vocab_size": len(initial.tokens), "lowercase": initial.lowercase},
        "model": dataclasses.asdict(model),
        "phases": {"elsewhere": {**phase, "nsp": nsp}},
    }
    run = config.build_run(tree)
    assert isinstance(run, BertRun)
    return run


def _notes(initial: Initial, random: list[str]) -> list[str]:
    heads = {"pooler": "pooler", "nsp": "next-sentence head"}
    notes = [f"it has no {' and no '.join(heads[head] for head in random)}: drawn at random"] if random else []
    if "mlm" in initial.lacks():
        notes.append("it has no masked-LM head: it can be fine-tuned, but cannot fill in masks")
    if initial.headed:
        notes.append(
            "its head of a task is left out: `overnight predict TASK`, `serve` and overnight.load read it from the checkpoint itself"
        )
    return notes


def _absolute(source: str) -> str:
    return source if source.startswith(HUB) else str(Path(source).resolve())


def _name(source: str) -> str:
    """Return what a checkpoint is called: the end of its name on the hub, or its folder."""
    if source.startswith(HUB):
        return source.removeprefix(HUB).partition("@")[0].rpartition("/")[2]
    path = Path(source).resolve()
    return path.name if path.is_dir() else path.parent.name


def import_folder(source: str) -> Path:
    """Return the run folder as which a command imports a checkpoint of others."""
    return Path("runs") / _name(source)


def run_folder(source: str) -> Path:
    """Return the run folder that a command is to work on: the one that is named, or `runs/NAME` for a checkpoint of others, imported where it is not yet.

    Raises:
        ConfigError: `runs/NAME` is another run, or was imported from other weights than lie there now.
        DataError, UserError: as of :func:`import_encoder`.
    """
    if not is_source(source):
        return Path(source)
    out = import_folder(source)
    if out.exists():
        record = out / "imported.json"
        found: ImportRecord | None = read_json(record, ImportRecord, f"delete {out}") if record.is_file() else None
        again = f"import it under another name: overnight import --from {source} --to runs/NAME"
        # By its files it is known again where it lies elsewhere now, as in a folder of everything that was moved.
        same = found is not None and found.files != "" and found.files == source_digest(source)
        if found is None or not (same or found.source == _absolute(source)):
            raise ConfigError(f"{out}: is another run than {source}; {again}")
        if found.files and not same:
            raise ConfigError(
                f"{out}: was imported from other weights than {source} has now; delete {out}, with what was fine-tuned in it, or {again}"
            )
        print(f"{source}: imported before, as {out}, which is used", file=sys.stderr)
        return out
    _, notes = import_encoder(source, out)
    # Standard output may be the answers of `predict`.
    print("\n".join([f"imported: {source} as {out}", *notes]), file=sys.stderr)
    return out
