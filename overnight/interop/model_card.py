"""The model card of an export, `README.md`: from what text, by which recipe, how long, how well, and under which license."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from overnight import __version__
from overnight.checkpoint.reader import TrainingProgress, newest_checkpoint
from overnight.config import BertRun
from overnight.config.fields import MACHINE, hints
from overnight.corpus.named_sources import named_paths
from overnight.corpus.shards import Manifest
from overnight.display import measures, number, plural, scale_of, share
from overnight.interop.layout import HEADS, Kind
from overnight.run_dir.task_results import scored_seeds
from overnight.state_files import file_digest, read_mapping

_PIPELINE = """from transformers import pipeline

pipeline("{task}", model="FOLDER")({text})"""
# The pipeline of questions is gone since transformers 5.
_QUESTIONS = """from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("FOLDER"), AutoModelForQuestionAnswering.from_pretrained("FOLDER")
inputs = tokenizer("QUESTION", "CONTEXT", return_tensors="pt")
found = model(**inputs)
print(tokenizer.decode(inputs["input_ids"][0, found.start_logits.argmax() : found.end_logits.argmax() + 1]))"""


def model_card(
    run: BertRun,
    kind: Kind,
    progress: TrainingProgress | None,
    manifest: Manifest | None,
    license: str = "",
    task: Mapping[str, Any] | None = None,
) -> str:
    """Return a model card in Markdown, with the header that Hugging Face's hub reads. No path of this machine and no key of an address is in it.

    Args:
        run: whose model it is.
        kind: what is exported.
        progress: of the checkpoint; None of a task.
        manifest: of the prepared text; None where nobody knows it.
        license: its identifier, such as `apache-2.0`; empty says that none is stated.
        task: what `task.json` says, of a fine-tuned task.

    Raises:
        DataError: `evaluation.json` or `imported.json` is damaged.
    """
    elsewhere = (run.run_dir / "imported.json").is_file()
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": HEADS[kind].pipeline, "tags": [run.model.kind, "overnight"]}
    origin, on_hub = _origin(run)
    head |= ({"license": license} if license else {}) | ({"base_model": origin.partition("@")[0]} if on_hub else {})
    what = f"fine-tuned on {_name(task)}" if task else "pretrained"
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {run.name}{f', {what}' if task else ''}",
        f"A {'ModernBERT' if run.model.kind == 'modernbert' else 'BERT'} of {plural(run.model.num_layers, 'layer')} of width {run.model.hidden_size}, "
        f"{'imported by' if elsewhere and not task else f'{what} with'} overnight {__version__}.",
        f"```python\n{_use(HEADS[kind].pipeline, bool(task and task['pairs']))}\n```",
        "## Data",
        *_data(run, manifest),
        *([] if elsewhere else ["## Training"]),
        *([_steps(run, progress)] if progress and not elsewhere else []),
        *([] if elsewhere else [f"```yaml\n{yaml.safe_dump(_recipe(run), sort_keys=False, width=120)}```"]),
        "## Scores",
        *(_task(task, scored_seeds(run.run_dir, task["result"]), "" if elsewhere else _from(task["result"])) if task else _scores(run)),
        "## License",
        f"{license}."
        if license
        else "Not stated. What the licenses of the text allow decides; `overnight export --license=ID` writes one.",
    ]
    return "\n\n".join(lines) + "\n"


def _name(task: Mapping[str, Any]) -> str:
    """Return what a task is called, and where the name alone does not say it also the file or folder of its rows."""
    name, rows = task["result"].get("name") or task["spec"]["task"], Path(task["spec"].get("path") or "").name
    return str(name) if rows.lower() in ("", name.lower()) else f"{name} (`{rows}`)"


def _use(task: str, pairs: bool = False) -> str:
    """Return Python that asks the model."""
    if task == "question-answering":
        return _QUESTIONS
    text = '"The capital of France is [MASK]."' if task == "fill-mask" else '"a text"'
    return _PIPELINE.format(task=task, text='{"text": "a text", "text_pair": "another text"}' if pairs else text)


def _steps(run: BertRun, progress: TrainingProgress) -> str:
    done = (plural(progress.global_step, "step"), plural(progress.sequences, "sequence"), plural(progress.tokens, "token"))
    return f"{', '.join(done)}; seed {run.seed}."


def _origin(run: BertRun) -> tuple[str, bool]:
    """Return what the checkpoint is called that a run began from or was imported from, and whether that is its name on Hugging Face's hub."""
    record = run.run_dir / "imported.json"
    source = run.init or (str(read_mapping(record, "import the model again")["source"]) if record.is_file() else "")
    return _place(source).removeprefix("hf:"), source.startswith("hf:")


def _data(run: BertRun, manifest: Manifest | None) -> Iterator[str]:
    origin, _ = _origin(run)
    if run.init:
        yield f"It began from `{origin}`."
    if manifest is None or (run.run_dir / "imported.json").is_file():
        yield f"It was pretrained elsewhere{'' if run.init or not origin else f', as `{origin}`'}, on other text than is known here."
        return
    documents, tokens = (manifest.count("train", what) for what in ("documents", "tokens"))
    casing = "lower case" if run.data.lowercase else "with capitals"
    yield f"{plural(documents, 'document')}, {plural(tokens, 'token')}, of a vocabulary of {manifest.vocab_size:,} WordPieces in {casing}:"
    yield "\n".join(f"- {f'{name}: ' if name else ''}`{_place(path)}`" for name, path in named_paths(run.data))


def _place(path: str) -> str:
    """Return the name of a source, without the folders of this machine, and without what follows `?` in an address, which may be a key."""
    here = ":" not in path.partition("/")[0] or "file://" in path or "local://" in path
    return Path(path).name if here else path.partition("?")[0]


def _recipe(run: BertRun) -> dict[str, Any]:
    """Return what the recipe says that decides what was learned, which is the same on any machine, without what is as ever."""
    tree: dict[str, Any] = {key: value for key, value in _said(run).items() if key not in ("name", "seed")}
    data = tree.setdefault("data", {})
    for part, key in ((data, "paths"), (data, "decontaminate"), *((source, "paths") for source in data.get("sources", {}).values())):
        if key in part:
            part[key] = [_place(path) for path in part[key]]
    for part, key in ((data, "vocab_file"), (tree, "init")):
        if key in part:
            part[key] = _place(part[key])
    return tree


def _said(value: Any) -> Any:
    """Return settings as a tree, without those of the machine and those that are the default; names of kinds stay."""
    if isinstance(value, Mapping):
        return {name: _said(inner) for name, inner in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return list(value) if isinstance(value, tuple) else value
    found = {}
    for f in dataclasses.fields(value):
        inner = getattr(value, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if MACHINE not in hints(type(value))[f.name][1] and (inner != default or f.name in ("kind", "name")):
            found[f.name] = _said(inner)
    return found


def _scores(run: BertRun) -> Iterator[str]:
    """Yield a table of what was measured of the newest checkpoint; what was of an older one is not of these weights."""
    path, newest = run.run_dir / "evaluation.json", newest_checkpoint(run.run_dir / "checkpoints")
    found = read_mapping(path, "delete it; `overnight evaluate` measures again") if path.is_file() else {}
    if newest is None or found.get("model") != file_digest(newest / "model.safetensors"):
        found = {}
    rows = []
    for name, score in found.get("texts", {}).items():
        rows.append(f"| bits per character of {', '.join(map(_place, name.split(', ')))} | {number(score['bits_per_character'], 3)} |")
        if "word_bits_per_character" in score:
            rows.append(f"| bits per character of whole words | {number(score['word_bits_per_character'], 2)} |")
        rows.append(f"| masked accuracy at 15 % | {share(score['masked_accuracy'])} |")
    if isinstance(blimp := found.get("blimp"), dict):
        rows.append(f"| BLiMP | {share(blimp['accuracy'])} |")
    yield "\n".join(["| | |", "|---|---|", *rows]) if rows else "None were measured; `overnight evaluate` measures them."


def _from(result: Mapping[str, Any]) -> str:
    """Return from which step of pretraining a task began; nothing of a result of an earlier version."""
    step = str(result.get("checkpoint") or "").rpartition("-")[2]
    return f", from step {int(step):,} of pretraining" if step.isdecimal() else ""


def _task(task: Mapping[str, Any], seeds: Sequence[int], began: str = "") -> Iterator[str]:
    result, spec = task["result"], task["spec"]
    found, scale = result.get("metrics") or {result["metric"]: result["value"]}, scale_of(spec["task"])
    of_test = {name.removesuffix("_test"): value for name, value in found.items() if name.endswith("_test")}
    measured = measures({name: value for name, value in found.items() if not name.endswith("_test")}, scale)
    unknown = sorted(set(spec["seeds"]) - set(seeds))
    yield (
        f"{measured} on the development rows, the best of seeds {', '.join(map(str, seeds))}: seed {result['seed']}, "
        f"trained on {plural(result['rows'], 'row')}{began}."
        + (f" On the test rows: {measures(of_test, scale)}." if of_test else "")
        + (f" No score is kept of seeds {', '.join(map(str, unknown))}." if unknown else "")
        + (
            " It was chosen by the same development rows, so their score is a little too good."
            if result.get("selected_on") == "dev"
            else ""
        )
    )
    if task["labels"]:
        yield f"Labels: {', '.join(f'`{label}`' for label in task['labels'])}."
    settings = {
        key: spec[key]
        for key in ("epochs", "global_batch_size", "optimizer", "lr", "warmup_ratio", "weight_decay", "seq_len")
        if key in spec
    }
    yield f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```"
