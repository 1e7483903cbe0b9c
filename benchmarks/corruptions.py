"""Damage every state file of a small run in every way, and see that each command gives the right result or says what is wrong.

    python -m benchmarks.corruptions              45 for each file, about an hour on two cores
    python -m benchmarks.corruptions --each 15    each kind once, a flipped bit three times, for each file

Damage is drawn from a seed: a flipped bit, a cut, a stretch of zeros, an empty or missing file, a folder in its place, bytes that are no UTF-8, and in
JSON and YAML a value of another type, a number of 400 digits, nesting 100,000 deep; the last three also with the file's own checksum taken out, as by hand.
A command then ends with the right result, with a message and exit code 1 or 2, with a traceback, or with another result and not a word.
metrics.jsonl is not covered by checksums, nor is what was changed by hand: such results are counted apart; tracebacks never. Into benchmarks/results/<date>-<machine>-corruptions/ goes result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml

from overnight import config
from overnight.checkpoint import reader
from overnight.cli.main import main as overnight
from overnight.corpus.shards import load_manifest
from overnight.errors import UserError
from overnight.finetune.samples import write_samples
from overnight.run_dir.atomic import write_json
from overnight.run_dir.environment import environment
from overnight.run_dir.task_results import read_results
from overnight.state_files import SEAL, file_digest

KINDS = ("bit", "bit", "bit", "cut", "zeros", "empty", "missing", "folder", "no UTF-8", "other type", "huge number", "deep")
KINDS += tuple(f"by hand: {kind}" for kind in KINDS[-3:])
"""Ways to damage a file; a flipped bit is the commonest."""
_DEEP = "[" * 100_000
_OTHERS = (None, True, -1, 0.5, "x", [], {}, [[1]], {"a": {}})
_NOT_COVERED = ("metrics.jsonl",)
_OPTIONAL = ("samples.json", "missing")
"""The report of a run that shows no samples."""
_SAID = ("cut and left out", "not run yet", "env.json is absent", "errors.json is missing", "No score is kept of")
"""What a report or a model card says of lines and files that are not there."""


@dataclass(frozen=True)
class Command:
    """Something that is done with a run, and what it gives."""

    argv: tuple[str, ...]
    result: Callable[[str], Any]
    """Of its output (and of files it knows): equal when it is right."""


@dataclass(frozen=True)
class Scene:
    """A folder as it lies on the disk, which of its files are damaged, and what is done then."""

    name: str
    source: Path
    files: tuple[str, ...]
    commands: tuple[Command, ...]


@dataclass
class Tally:
    """Outcomes, and those that must not be."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """File → outcome → how often."""
    bad: list[dict[str, str]] = field(default_factory=list)


def damaged(path: Path, kind: str, draw: random.Random) -> bool:
    """Damage a file; False where that kind cannot be done to it, or changes nothing."""
    content = path.read_bytes()
    by_hand, kind = kind.startswith("by hand: "), kind.removeprefix("by hand: ")
    if kind in ("missing", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return True
    if kind in ("other type", "huge number", "deep"):
        text = _edited(path, kind, by_hand, draw)
        if text is None:
            return False
        path.write_text(text, encoding="utf-8")
        return True
    at = draw.randrange(len(content))
    size = draw.randrange(1, 64)
    new = {
        "bit": content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
        "cut": content[:at],
        "zeros": content[:at] + bytes(size) + content[at + size :],
        "empty": b"",
        "no UTF-8": content[:at] + b"\xff" + content[at:],
    }[kind]
    path.write_bytes(new)
    return new != content


def _edited(path: Path, kind: str, by_hand: bool, draw: random.Random) -> str | None:
    """A JSON, JSON lines or YAML file with one value replaced; by hand without its checksum. None where it has none, or is another file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        lines = text.splitlines(keepends=True)
        number = draw.randrange(len(lines))
        line = _replaced(json.loads(lines[number]), kind, by_hand, draw)
        return None if line is None else "".join([*lines[:number], line + "\n", *lines[number + 1 :]])
    if path.suffix == ".yaml":
        new = _replaced(yaml.safe_load(text), kind, False, draw)
        return None if new is None else ("" if by_hand else text.splitlines()[0] + "\n") + new
    return _replaced(json.loads(text), kind, by_hand, draw) if path.suffix == ".json" else None


def _replaced(tree: Any, kind: str, by_hand: bool, draw: random.Random) -> str | None:
    places: list[tuple[Any, Any]] = []
    todo = [tree]
    if by_hand and not (isinstance(tree, dict) and tree.pop(SEAL, None)):
        return None
    while todo:
        node = todo.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            places.append((node, key))
            todo.append(value)
    if not places:
        return _DEEP if kind == "deep" else json.dumps([1])
    node, key = draw.choice(places)
    others = [value for value in _OTHERS if type(value) is not type(node[key])]
    node[key] = "@" if kind == "deep" else int("9" * 400) if kind == "huge number" else draw.choice(others)
    return json.dumps(tree).replace('"@"', _DEEP + "]" * 100_000)


def outcome(command: Command, right: Any) -> tuple[str, str]:
    """Do a command; how it ended (`right`, `error`, `traceback`, `unnoticed`), and what it said."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = overnight(list(command.argv))
    except Exception:
        return "traceback", traceback.format_exc(limit=-3)
    if code:
        return ("error" if code in (1, 2) and err.getvalue().strip() else "traceback"), err.getvalue()
    try:
        found = command.result(out.getvalue())
    except (UserError, OSError, ValueError) as error:
        return "unnoticed", f"the result cannot be read: {error}"
    if found == right or any(word in str(found) for word in _SAID):
        return "right", ""
    return "unnoticed", f"{found!r:.300} instead of {right!r:.300}"


def run_scene(scene: Scene, live: Path, each: int, seed: int, tally: Tally) -> None:
    """Damage each file of a scene so many times, and do its commands with each."""

    def restore() -> None:
        shutil.rmtree(live, ignore_errors=True)
        shutil.copytree(scene.source, live)

    restore()
    files = sorted(
        {path.relative_to(live) for pattern in scene.files for path in live.glob(pattern) if path.is_file() and path.stat().st_size}
    )
    assert files, scene.name
    rights = []
    for command in scene.commands:
        with contextlib.redirect_stdout(out := io.StringIO()):
            assert overnight(list(command.argv)) == 0, command.argv
        rights.append(command.result(out.getvalue()))
    for file in files:
        draw = random.Random(f"{seed} {scene.name} {file}")
        counts = tally.counts.setdefault(f"{scene.name}: {file}", Counter())
        for number in range(each):
            restore()
            kind = KINDS[number % len(KINDS)]
            if not damaged(live / file, kind, draw):
                continue
            counts["corruptions"] += 1
            for command, right in zip(scene.commands, rights, strict=True):
                ended, said = outcome(command, right)
                if ended == "unnoticed" and (file.name in _NOT_COVERED or "by hand" in kind or (file.name, kind) == _OPTIONAL):
                    ended = "not covered"
                counts[ended] += 1
                if ended in ("traceback", "unnoticed"):
                    tally.bad.append(
                        {"file": f"{scene.name}: {file}", "kind": kind, "command": command.argv[0], "how": ended, "said": said[-1500:]}
                    )
        print(f"{f'{scene.name}: {file}':58} " + "  ".join(f"{name} {count}" for name, count in sorted(counts.items())), flush=True)


class Stop(BaseException):
    """What stands for a kill."""


def stopped(argv: list[str], where: str) -> None:
    """Do a command until it calls a function."""
    with mock.patch(where, side_effect=Stop), contextlib.suppress(Stop), contextlib.redirect_stdout(io.StringIO()):
        overnight(argv)


def whole(*argv: str) -> None:
    """Do a command to its end."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert overnight(list(argv)) == 0, argv


def topics(folder: Path) -> Path:
    """The language reference that ships with Python, with a made-up label, as JSON lines; and a table of a task."""
    import pydoc_data.topics

    texts = [re.sub(r"\*+", "", text) for _, text in sorted(pydoc_data.topics.topics.items())]
    path = folder / "topics.jsonl"
    path.write_text("".join(json.dumps({"text": text[:6000], "label": i % 2}) + "\n" for i, text in enumerate(texts)), encoding="utf-8")
    rows = "".join(f"{'a good' if i % 2 else 'so bad a'} object {i},{i % 2}\n" for i in range(120))
    (folder / "mine.csv").write_text("text,label\n" + rows, encoding="utf-8")
    return path


_PHASE = {"steps": 4, "seq_len": 32, "optim": {"name": "adamw", "lr": 0.01}}


def bert_tree(folder: Path, source: Path) -> dict[str, Any]:
    """The smallest recipe of a BERT with a task."""
    phase = {**_PHASE, "global_batch_size": 8, "micro_batch_size": 0, "max_predictions_per_seq": 5}
    task = {"task": "csv", "path": str(folder / "mine.csv"), "global_batch_size": 16, "epochs": 1, "seq_len": 16, "seeds": [0, 1]}
    data = {"paths": [str(source)], "dir": str(folder / "live" / "data"), "vocab_size": 400, "valid_fraction": 0.2, "workers": 1}
    return {
        "name": "bert",
        "out": str(folder / "live" / "run"),
        "data": data,
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "max_position_embeddings": 48},
        "phases": {"only": phase},
        "logging": {"eval_every": 2, "eval_examples": 16, "log_every": 1},
        "checkpoint": {"save_every": 2, "keep_latest_k": 2},
        "compute": {"threads": 1, "device": "cpu"},
        "finetune": {"mine": task},
    }


def byte_tree(folder: Path, source: Path) -> dict[str, Any]:
    """The smallest recipe of a byte model with a linear probe."""
    tree = bert_tree(folder, source)
    del tree["finetune"]
    data = {**tree["data"], "tokenizer": "bytes", "label": "label", "test_fraction": 0.2}
    data.pop("vocab_size")
    phase = {**_PHASE, "global_batch_size": 4, "micro_batch_size": 4, "num_document_groups": 16}
    task = {"task": "csv", "path": str(folder / "mine.csv"), "seeds": [0]}
    model = {"kind": "mlstm", "num_layers": 1, "hidden_size": 24, "embedding_size": 8}
    parts = {"data": data, "model": model, "phases": {"only": phase}, "linear_probe": {"mine": task}}
    return {**tree, "name": "bytes", **parts}


def prepared(live: Path) -> Callable[[str], Any]:
    """The corpus that a preparation gives."""
    return lambda out: (load_manifest(live / "data").fingerprint(), digests(live / "data", "*.arrow", "vocab.txt", "tokenizer.json"))


def trained(live: Path) -> Callable[[str], Any]:
    """The network and the optimizer of the newest checkpoint."""

    def result(out: str) -> Any:
        place = reader.newest_checkpoint(live / "run" / "checkpoints")
        return place and (place.name, digests(place, "*.safetensors"))

    return result


def scored(run: Path) -> Callable[[str], Any]:
    """The scores of a task by seed: not the model, which is looked at where it is used, nor the time that it took."""
    return lambda out: {(line["kind"], line.get("init"), line.get("seed")): line["value"] for line in read_results(run / "tasks.jsonl")}


def digests(folder: Path, *patterns: str) -> dict[str, str]:
    """Checksums of files by name."""
    return {path.name: file_digest(path) for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()}


def said(out: str) -> str:
    """What a command printed, without times."""
    return re.sub(r" in \d+ s\b", "", out)


def scenes(folder: Path) -> list[Scene]:
    """Make the runs, and keep their folders at the moments of interest."""
    live, source = folder / "live", topics(folder)
    kept: dict[str, Path] = {}

    def keep(name: str) -> Path:
        kept[name] = folder / name
        shutil.copytree(live, kept[name])
        return kept[name]

    found: list[Scene] = []
    recipes = {"bert": folder / "bert.yaml", "bytes": folder / "bytes.yaml"}
    for name, tree in (("bert", bert_tree(folder, source)), ("bytes", byte_tree(folder, source))):
        recipes[name].write_text(yaml.safe_dump(tree), encoding="utf-8")
        recipe, prepare = str(recipes[name]), Command(("prepare", str(recipes[name])), prepared(live))
        for at in ("_tokenize", "_shard", "save_manifest"):
            stopped(["prepare", recipe], f"overnight.corpus.pipeline.{at}")
            files = ("data/work/*", "data/*.txt", "data/*.json") if name == "bert" or at == "_shard" else ("data/work/*",)
            found.append(Scene(f"{name} prepare until {at}", keep(f"{name}{at}"), files, (prepare,)))
        whole("prepare", recipe)
        found += trained_scenes(name, recipe, live, keep)
        shutil.rmtree(live)
    return found


def trained_scenes(name: str, recipe: str, live: Path, keep: Callable[[str], Path]) -> list[Scene]:
    """The scenes after pretraining has begun."""
    run, text, out = live / "run", live.parent / "in.txt", live / "out"
    text.write_text("a good object\nso bad a [MASK]\n", encoding="utf-8")
    whole("pretrain", recipe)
    write_samples(config.load_run(recipe))
    state = ("run/run.yaml", "run/*.json*", "run/corpus/*", "run/checkpoints/*/*", "run/plans/*", "data/*.*")
    resumed = keep(f"{name}-trained")
    for place in sorted((resumed / "run" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(place)
    found = [Scene(f"{name} resume", resumed, state, (Command(("pretrain", recipe), trained(live)),))]
    source = ("--from", str(run))
    page = Command(("report", str(run), "--to", str(out / "page.html")), lambda _: (out / "page.html").read_text(encoding="utf-8"))
    export = Command(("export", *source, "--to", str(out / "export")), lambda _: digests(out / "export", "*"))
    if name == "bert":
        whole("finetune", "mine", *source)
        commands: tuple[Command, ...] = (
            Command(("predict", "mine", *source, "--input", str(text)), said),
            Command(("predict", "mask", *source, "--input", str(live.parent / "mask.txt")), said),
            export,
            Command(
                ("export", *source, "--to", str(out / "task"), "--task", "mine"),
                lambda _: (digests(out / "task", "*"), (out / "task" / "README.md").read_text(encoding="utf-8")),
            ),
            page,
            Command(("finetune", "mine", *source), scored(run)),
        )
        (live.parent / "mask.txt").write_text("so bad a [MASK]\n", encoding="utf-8")
        state = ("run/run.yaml", "run/*.json*", "run/corpus/*", "run/checkpoints/*/*", "run/finetune/mine/*.*")
    else:
        whole("linear-probe", "mine", *source)
        commands = (
            Command(("evaluate", *source), said),
            Command(("predict", "mine", *source, "--input", str(text)), said),
            Command(("generate", *source, "--length", "20", "--unit", "best", "--value", "1"), said),
            export,
            page,
            Command(("linear-probe", "mine", *source), scored(run)),
        )
        state = ("run/run.yaml", "run/*.json*", "run/corpus/*", "run/checkpoints/*/*", "run/linear_probe/mine/*", "data/*.*")
    found.append(Scene(f"{name} use", keep(f"{name}-used"), state, commands))
    return found


def main() -> None:
    """Run the campaign, print a line for each file and keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=45, help="corruptions of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="scenes whose name has this")
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    parser.add_argument("--to", default="", help="folder of the result, instead of the one under benchmarks/results")
    options = parser.parse_args()
    out = Path(options.to or Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-corruptions")
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        for scene in scenes(Path(name)):
            if options.only in scene.name:
                run_scene(scene, Path(name) / "live", options.each, options.seed, tally)
    total = sum(tally.counts.values(), Counter())
    result = {
        "command": ["python", "-m", "benchmarks.corruptions", *sys.argv[1:]],
        "environment": environment(),
        "total": dict(total),
        "files": {file: dict(counts) for file, counts in tally.counts.items()},
        "bad": tally.bad,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", result)
    print("  ".join(f"{name} {count}" for name, count in total.items()))
    sys.exit(total["traceback"] + total["unnoticed"] > 0)


if __name__ == "__main__":
    main()
