"""A run's results in numbers: validation scores by phase, tasks from the pretrained network and from random init."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overnight.config.schema import ENCODERS
from overnight.console import table
from overnight.display import duration, number, plural, points, scale_of, share, unit, visible
from overnight.report.evaluation_text import results_lines
from overnight.report.plateau import plateau, plateau_text
from overnight.report.run_reader import Record, RunFolder, read_folder
from overnight.report.task_errors import missing_errors
from overnight.report.verdict import compare, spread

_UNDEFINED = "no verdict: all scored rows have the same number, so no correlation is defined"
_CHOSEN = "chosen by the rows that are scored here (select_on: dev): the scores of the network are a little too good"
_VALIDATION = ("mlm_loss", "mlm_accuracy", "clm_loss", "clm_accuracy", "nsp_loss", "nsp_accuracy", "byte_accuracy")


def summarize(run_dir: Path) -> dict[str, Any]:
    """Return the results of a run folder as plain values.

    Returns:
        `name`, `device`, `of_bytes` (see :func:`of_bytes`), `seconds`, `tokens`, `sequences`, `finished`, `phases` (see :func:`phases`; none of what was imported), `plateau`
        (see :func:`overnight.report.plateau.plateau`), `evaluation` (what `evaluation.json` holds), `tasks` (see :func:`tasks`), `events` but for checkpoints, `saved` (see :func:`saved`), `samples` (what `samples.json` holds) and `notes` (what is incomplete).

    Raises:
        DataError: when the folder cannot be read.
    """
    return summarize_folder(read_folder(run_dir))


def summarize_folder(folder: RunFolder) -> dict[str, Any]:
    """Return the results of a run folder that was read before; see :func:`summarize`."""
    train, evals = folder.records["train"], folder.records["eval"]
    imported = (folder.path / "imported.json").exists()
    # Nothing is known of how others trained; the phase in its settings is none.
    rows, results = [] if imported else phases(folder), tasks(folder)
    todo = [row["name"] for row in rows if not row["finished"]]
    notes = list(folder.notes)
    if imported:
        notes.append("pretrained elsewhere: imported.json says where it comes from")
    elif todo:
        notes.append(f"pretraining is not finished; left to train: {', '.join(todo)}")
    if any(record["event"] == "metrics_lost" for record in folder.records["event"]):
        notes.append("metrics.jsonl has lost lines (its event metrics_lost says which): their curves, times and scores are missing here")
    notes += [*older("evaluated at", folder.evaluation, folder), *older("the sample predictions are from", folder.samples, folder)]
    notes += [note for task in results for note in (*task["notes"], *missing_errors(folder.path, task["name"]))]
    return {
        "name": folder.name,
        "dir": str(folder.path),
        "device": device(folder),
        "of_bytes": of_bytes(folder),
        "seconds": max((record["seconds"] for record in [*train, *evals]), default=0.0),
        "tokens": train[-1].get("tokens") if train else None,
        "sequences": train[-1].get("sequences") if train else None,
        "finished": not todo and not any(task["notes"] for task in results),
        "phases": rows,
        "plateau": plateau(folder),
        "evaluation": folder.evaluation,
        "tasks": results,
        "events": [record for record in folder.records["event"] if record["event"] != "checkpoint_saved"],
        "saved": saved(folder),
        "samples": folder.samples,
        "notes": notes,
    }


def device(folder: RunFolder) -> str:
    """Return where a run was trained, in words."""
    environment = folder.environment or {}
    wanted = (folder.settings.get("compute") or {}).get("device", "auto")
    gpus = [gpu.get("name", "GPU") for gpu in environment.get("gpus") or [] if isinstance(gpu, dict)]
    if gpus and wanted != "cpu":
        return f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else str(gpus[0])
    cpu = environment.get("cpu") or {}
    return f"{cpu.get('model', 'CPU')}, {plural(cpu['cores'], 'core')}" if cpu.get("cores") else "unknown"


def of_bytes(folder: RunFolder) -> bool:
    """Return whether the run trains a byte model, which has other scores than BERT."""
    return (folder.settings.get("model") or {}).get("kind", "bert") not in ENCODERS


def phases(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one row a phase, in the order of the recipe. How far it is, the newest checkpoint says, too: lines may be lost.

    Returns:
        `name`, `steps` done of `planned`, `finished`, the last validation `mlm_loss`, `mlm_accuracy`, `clm_loss`, `clm_accuracy`, `nsp_loss` and
        `nsp_accuracy`, of a byte model `bits_per_byte` and `byte_accuracy` (None where not measured), `seconds` and `tokens` of the phase, and the median
        `tokens_per_s`, `sequences_per_s` and `mfu`.
    """
    planned = folder.settings.get("phases")
    planned = planned if isinstance(planned, dict) else {}
    seen = [record["phase"] for kind in ("train", "eval") for record in folder.records[kind]]
    rows: list[dict[str, Any]] = []
    seconds = tokens = 0.0
    now, done = folder.reached
    passed = list(planned)[: list(planned).index(now)] if now in planned else []
    for name in dict.fromkeys([*planned, *seen]):
        train, evals = _of_phase(folder, "train", name), _of_phase(folder, "eval", name)
        wanted = folder.decided.get(name) if folder.settings.get("budget") else (planned.get(name) or {}).get("steps")
        saved_steps = done if name == now else (wanted or 0) if name in passed else 0
        steps = max(saved_steps, *(record.get("step", 0) for record in [*train, *evals]), 0)
        # A phase that was extended has an end before its new one.
        has_end = any(record["event"] == "end" for record in _of_phase(folder, "phase", name)) and steps >= (wanted or 0)
        ended = has_end or name in passed or (wanted is not None and saved_steps >= wanted)
        last = evals[-1] if evals else {}
        until = max((record["seconds"] for record in [*train, *evals]), default=seconds)
        total = train[-1].get("tokens", tokens) if train else tokens
        rows.append(
            {
                "name": name,
                "steps": steps,
                "planned": wanted,
                "finished": ended,
                **{key: last.get(key) for key in _VALIDATION},
                "bits_per_byte": _bits(last.get("byte_loss")),
                "seconds": until - seconds,
                "tokens": total - tokens,
                **{key: _median(train, key) for key in ("tokens_per_s", "sequences_per_s", "mfu")},
            }
        )
        seconds, tokens = until, total
    return rows


def _bits(nats: Any) -> float | None:
    """Return a loss in bits, from that in nats, which every run has: earlier ones call their bits a byte `bits_per_character`."""
    return nats / math.log(2) if isinstance(nats, int | float) else None


def saved(folder: RunFolder) -> dict[str, Any] | None:
    """Return the checkpoints that were written: `count`, and the `seconds` for which training stood still; None without any."""
    events = [record for record in folder.records["event"] if record["event"] == "checkpoint_saved"]
    stood = (record.get("save_seconds") for record in events)
    return {"count": len(events), "seconds": sum(value for value in stood if isinstance(value, int | float))} if events else None


def _of_phase(folder: RunFolder, kind: str, name: str) -> list[Record]:
    return [record for record in folder.records[kind] if record["phase"] == name]


def _median(records: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in records if isinstance(record.get(key), int | float)]
    return statistics.median(values) if values else None


def tasks(folder: RunFolder) -> list[dict[str, Any]]:
    """Return one row for each task of fine-tuning or linear probing, in the order of the recipe.

    Returns:
        `name`, `task`, `metric`, `scale` (100 where the values are shares, 1 where they are per cent already), `unit`, `rows` trained on, `pretrained` and
        `random`, its random initialization (see :func:`overnight.report.verdict.spread`; None where there is none), `baselines` (`method`, `value` and `others`), `verdict`,
        `wins` (None where it cannot be said), `remarks` (what a reader of the scores has to know), `best_unit` (of a linear probe: the unit that says most, of the last seed; else None) and `notes`.
    """
    return [row for kind in ("finetune", "linear_probe") for row in _tasks(folder, kind)]


def _tasks(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    planned = folder.settings.get(kind)
    planned = planned if isinstance(planned, dict) else {}
    lines = folder.records[kind]
    every_baseline = {(record["name"], record["method"]): record for record in folder.records["baseline"]}
    rows = []
    for name in dict.fromkeys([*planned, *(record["name"] for record in lines)]):
        mine = [record for record in lines if record["name"] == name]
        baselines = [record for (of, _), record in every_baseline.items() if of == name]
        settings = planned.get(name) or {}
        if kind == "linear_probe":  # random init is always compared with it
            settings = {**settings, "random_init_seeds": len(settings.get("seeds") or [])}
        # Running again repeats a line; the last one holds.
        sides = [{record["seed"]: record for record in mine if record["init"] == init} for init in ("pretrained", "random")]
        pretrained, random = map(spread, sides)
        task = mine[-1].get("task", name) if mine else settings.get("task", name)
        metric = next((record["metric"] for record in [*reversed(mine), *baselines]), None)
        seeds = [record for side in sides for record in side.values()]
        is_undefined = any(record.get("undefined") for record in seeds)
        wins, verdict = (None, _UNDEFINED) if is_undefined else compare(pretrained, random, baselines)
        missing = _missing_seeds(name, settings, pretrained, random)
        rows.append(
            {
                "name": name,
                "task": task,
                "metric": metric,
                "scale": scale_of(task),
                "unit": unit(metric),
                "rows": mine[-1].get("rows") if mine else None,
                "pretrained": pretrained,
                "random": random,
                "best_unit": next((it["unit"] for it in reversed(mine) if it["init"] == "pretrained" and it.get("unit")), None),
                "baselines": [{"method": it["method"], "value": it["value"], "others": it.get("metrics") or {}} for it in baselines],
                "wins": wins,
                "verdict": f"{verdict}, so far" if missing and wins is not None else verdict,
                "remarks": [_CHOSEN] if any(record.get("selected_on") == "dev" for record in seeds) else [],
                "notes": [*missing, *older(f"{name} was trained from", mine[-1] if mine else {}, folder)],
            }
        )
    return rows


def older(what: str, made: Record, folder: RunFolder) -> list[str]:
    """Return a note where something was made from a checkpoint that is not the newest any more, as after `overnight pretrain --extend`."""
    if folder.checkpoint in ("", of := made.get("checkpoint", "")) or not of:
        return []
    return [f"{what} {of}, and the newest checkpoint is {folder.checkpoint}: run its command again"]


def _missing_seeds(name: str, settings: Record, pretrained: dict[str, Any] | None, random: dict[str, Any] | None) -> list[str]:
    seeds = settings.get("seeds") or []
    wanted = {"pretrained": (pretrained, seeds), "random init": (random, seeds[: settings.get("random_init_seeds") or 0])}
    gone = {init: [seed for seed in of if seed not in (found or {"values": {}})["values"]] for init, (found, of) in wanted.items()}
    return [f"{name} {init}: seed {', '.join(map(str, missing))} not run yet" for init, missing in gone.items() if missing]


def summary_text(run_dir: Path, width: int = 10_000) -> str:
    """Return the results of a run folder as plain text, for the end of `overnight run`.

    Args:
        width: of the tables (characters).

    Raises:
        DataError: when the folder cannot be read.
    """
    found = summarize(run_dir)
    head = [found["name"], found["device"], duration(found["seconds"])]
    if found["tokens"]:
        head.append(f"{plural(found['tokens'], 'token')} seen")
    lines = ["  ".join(head), *facts_lines(found["samples"])]
    lines += ["", table(_phase_cells(found["phases"], found["of_bytes"]), width=width)] if found["phases"] else []
    lines += ["", plateau_text(found["plateau"])] if found["plateau"] else []
    if found["evaluation"]:
        lines += ["", f"evaluated at {found['evaluation']['checkpoint']}", *results_lines(found["evaluation"], groups=False)]
    for task in found["tasks"]:
        if task["metric"]:  # what is not run yet is a note
            lines += ["", *_task_lines(task, width)]
    lines += _sample_lines(found["samples"])
    if found["notes"]:
        lines += ["", *(f"note: {note}" for note in found["notes"])]
    return "\n".join(lines)


def tasks_text(run_dir: Path, name: str, width: int = 10_000) -> str:
    """Return the results of one task of a run folder as plain text, and what is incomplete of them.

    Args:
        name: of the task, of fine-tuning or of linear probing.
        width: of the tables (characters).

    Raises:
        DataError: when the folder cannot be read.
    """
    mine = [task for task in summarize(run_dir)["tasks"] if task["name"] == name]
    lines = [line for task in mine if task["metric"] for line in ("", *_task_lines(task, width))]
    return "\n".join([*lines, *(f"note: {note}" for task in mine for note in task["notes"])])


def facts_lines(samples: dict[str, Any]) -> list[str]:
    """Return the size of the network and of its corpus, in words; nothing where they are not known."""
    corpus = samples.get("corpus") or {}
    sizes = [
        f"{words} {plural(corpus[split]['documents'], 'document')} of {plural(corpus[split]['tokens'], 'token')}"
        for split, words in (("train", "trained on"), ("valid", "validated on"), ("test", "kept for the test"))
        if split in corpus
    ]
    parameters = [plural(samples["parameters"], "parameter")] if "parameters" in samples else []
    return [", ".join([*parameters, *sizes])] if parameters or sizes else []


def _sample_lines(samples: dict[str, Any]) -> list[str]:
    lines = []
    if samples.get("masks"):
        lines += ["", "validation sentences with a word masked, and what the model guesses"]
    for mask in samples.get("masks") or []:
        lines += [f"- {mask['text']}", f"  {guesses_text(mask)}"]
    if samples.get("texts"):
        lines += ["", "beginnings of validation documents, and how the model continues"]
    for text in samples.get("texts") or []:
        # What a model of bytes writes may hold characters that a terminal obeys.
        shown = visible(" ".join(text["text"].split()))
        lines += [f"- {text['prompt']} | {shown}"]
    return lines


def guesses_text(mask: dict[str, Any]) -> str:
    """Return the best guesses for a masked word with their probabilities, and the right word."""
    guesses = [f"{quoted(guess['token'])} {share(guess['probability'])}" for guess in mask["guesses"]]
    return f"{', '.join(guesses)} (right: {mask['word']})"


def quoted(token: str) -> str:
    """Return a token as it stands in a list: marks, which would be taken for the list's own, between quotes."""
    return token if token.isalnum() else f'"{token}"'


def _phase_cells(rows: Sequence[dict[str, Any]], of_bytes: bool) -> list[list[str]]:
    pairs, causal = (any(row[key] is not None for row in rows) for key in ("nsp_accuracy", "clm_accuracy"))
    masked = ["masked-LM loss", "masked-LM accuracy", *["next-token loss", "next-token accuracy"] * causal, *["NSP accuracy"] * pairs]
    scores = ["bits per byte", "byte accuracy"] if of_bytes else masked
    cells = [["validation after", "steps", *scores, "time", "tokens/s"]]
    for row in rows:
        steps = f"{row['steps']:,}" if row["finished"] else f"{row['steps']:,} of {number(row['planned'], 0) if row['planned'] else '?'}"
        if of_bytes:
            scores = [number(row["bits_per_byte"], 3), share(row["byte_accuracy"])]
        else:
            next_token = [number(row["clm_loss"], 3), share(row["clm_accuracy"])]
            scores = [number(row["mlm_loss"], 3), share(row["mlm_accuracy"]), *next_token * causal, *[share(row["nsp_accuracy"])] * pairs]
        cells.append([row["name"], steps, *scores, duration(row["seconds"]), number(row["tokens_per_s"], 0)])
    return cells


def _task_lines(task: dict[str, Any], width: int) -> list[str]:
    how = (task["scale"], task["unit"])
    seeds = sorted({seed for init in ("pretrained", "random") for seed in (task[init] or {"values": {}})["values"]})
    cells = [[f"{task['name']}, {task['metric']}", *(f"seed {seed}" for seed in seeds), "median", "spread"]]

    def add(label: str, values: Sequence[str], value: float, apart: str, others: dict[str, Any]) -> None:
        cells.append([label, *values, share(value, *how), apart])
        for split in ("mismatched", "test"):  # MNLI is evaluated on two dev sets, and a test that has labels is one more
            if isinstance(other := others.get(f"{task['metric']}_{split}"), int | float):
                cells.append([f"{label}, {split}", *("" for _ in seeds), share(other, *how), ""])

    for init, label in (("pretrained", "pretrained"), ("random", "random init")):
        if found := task[init]:
            values = [share(found["values"].get(seed), *how) for seed in seeds]
            add(label, values, found["median"], points(found["spread"], task["scale"]), found["others"])
    for baseline in task["baselines"]:
        add(baseline["method"], ["" for _ in seeds], baseline["value"], "", baseline["others"])
    return [table(cells, width=width), *([unit_text(task)] if task["best_unit"] else []), task["verdict"], *task["remarks"]]


def unit_text(task: dict[str, Any]) -> str:
    """Return what the unit that says most knows alone, in words (medians of the seeds)."""
    best, others = task["best_unit"], task["pretrained"]["others"]
    alone, without = (share(others.get(key)) for key in ("accuracy of the unit alone", "accuracy without it"))
    return f"{best['of']} {best['number']} is the most informative: {alone} alone ({best['above']} above {best['threshold']:.3g}), {without} without it"
