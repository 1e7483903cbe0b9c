"""A recipe with an `init`: what it leaves out of the network and the vocabulary is the checkpoint's, and what it says must be so there, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overnight.checkpoint.initial import Initial, InitialFacts, initial_folder, read_initial_facts, write_initial
from overnight.config import BertConfig, ModernBertConfig, Run, build_run
from overnight.config.folders import folder_of
from overnight.errors import ConfigError
from overnight.interop.sources import read_source, source_digest
from overnight.models.modernbert import inner_size

# How a network is trained, not what it is: these may be another's.
_FREE = ("dropout", "attention_dropout", "pooling")
# How it begins, which here the checkpoint decides.
_BEGINNING = ("init", "unigram_bias", "size")


def completed_recipe(tree: dict[str, Any], run_dir: Path | None, writes: bool) -> dict[str, Any]:
    """Return a recipe with the sizes, vocabulary and casing of the checkpoint that it begins from.

    Args:
        tree: an unchecked recipe with an `init`.
        run_dir: where it is not what the recipe says.
        writes: whether the weights are copied into the run folder, where they are not yet and the recipe can be run.

    Raises:
        ConfigError: the recipe is wrong, says something else than the checkpoint, or the run folder was begun from another one.
        DataError: the checkpoint cannot be used.
    """
    source = str(tree["init"])
    if run_dir is None:
        run_dir = folder_of(str(tree.get("out", Run.out)), str(tree.get("name", "")))
    facts, initial = _facts(source, run_dir, tree.get("data"))
    model, data = tree.get("model") or {}, tree.get("data") or {}
    if not (isinstance(model, Mapping) and isinstance(data, Mapping)):
        return tree  # whoever reads it says what is wrong
    if problems := [*_model_problems(model, facts), *_data_problems(data, facts)]:
        raise ConfigError("\n".join(problems))
    sizes = {key: value for key, value in facts.model.items() if key not in _BEGINNING}
    whole = {
        **tree,
        "model": {**sizes, **model},
        "data": {**data, "vocab_size": facts.vocab_size, "lowercase": facts.lowercase},
    }
    if initial is not None and writes:
        build_run(whole)
        write_initial(initial_folder(run_dir), initial, facts.files)
    return whole


def _facts(source: str, run_dir: Path, data: Any) -> tuple[InitialFacts, Initial | None]:
    """Return what is known of a checkpoint: from the run folder where it was copied there, else from itself, with its weights.

    Until the run begins its copy is made anew where the files are others now; they may also be gone.
    """
    facts, begun = read_initial_facts(initial_folder(run_dir)), (run_dir / "run.yaml").exists()
    if facts is not None and facts.source == source and (begun or source_digest(source) in ("", facts.files)):
        return facts, None
    if facts is not None and begun:
        raise ConfigError(
            f"init = {source!r}: {run_dir} was begun from {facts.source!r}; leave it so, or give this run its own folder (--out=...)"
        )
    lowercase = data.get("lowercase") if isinstance(data, Mapping) else None
    files, initial = source_digest(source), read_source(source, lowercase if isinstance(lowercase, bool) else None)
    return InitialFacts(1, source, dataclasses.asdict(initial.model), len(initial.tokens), initial.lowercase, "", files), initial


def _model_problems(model: Mapping[str, Any], facts: InitialFacts) -> Iterator[str]:
    theirs, ours = _with_inner(facts.model), _with_inner({**facts.model, **model})
    for key in model:
        if key in _BEGINNING:
            if key == "size" and model[key] != "given":
                yield f"model.size = {model[key]}: the sizes are those of init = {facts.source}; leave it out"
        elif key not in _FREE and key in theirs and ours[key] != theirs[key]:
            yield f"model.{key} = {model[key]!r}: init = {facts.source} has {theirs[key]!r}; leave it out, or name another checkpoint"


def _with_inner(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a network with the width inside the feed-forward part spelled out."""
    width, inner = model["hidden_size"], model["intermediate_size"]
    if not inner and isinstance(width, int):
        inner = inner_size(ModernBertConfig(hidden_size=width)) if model["kind"] == ModernBertConfig.kind else 4 * width
    return {**model, "kind": model.get("kind", BertConfig.kind), "intermediate_size": inner}


def _data_problems(data: Mapping[str, Any], facts: InitialFacts) -> Iterator[str]:
    has = f"init = {facts.source} has its own vocabulary, of {facts.vocab_size:,} tokens"
    if data.get("vocab_file"):
        yield f"data.vocab_file = {data['vocab_file']}: {has}; leave it out"
    if data.get("vocab_size", facts.vocab_size) != facts.vocab_size:
        yield f"data.vocab_size = {data['vocab_size']}: {has}; leave it out, or name another checkpoint"
    if data.get("lowercase", facts.lowercase) != facts.lowercase:
        kind = "lower case" if facts.lowercase else "text with capitals"
        yield f"data.lowercase = {str(data['lowercase']).lower()}: init = {facts.source} was trained on {kind}; leave it out"
