"""A damaged file of a run folder gives the right answer or a message that names it, never a traceback and never another answer."""

from __future__ import annotations

import dataclasses
import io
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.corruptions import damaged, scored
from overnight import config
from overnight.checkpoint.run_identity import claim_folder
from overnight.cli.main import main
from overnight.config import Finetune, Run
from overnight.console import Line
from overnight.finetune.finetune import finetune
from overnight.finetune.samples import write_samples
from overnight.run_dir.task_results import append_result

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tuned(pretrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a fine-tuned task, and prepared data of its own."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "mine.csv").write_text("text,label\n" + "".join(f"a {'good' if i % 2 else 'bad'} object {i},{i % 2}\n" for i in range(40)))
    shutil.copytree(pretrained.run_dir, folder / "run")
    shutil.copytree(pretrained.data_dir, folder / "data" / pretrained.data_dir.name)
    task = Finetune(task="csv", path=str(folder / "mine.csv"), epochs=1, global_batch_size=16, seq_len=16, seeds=[0])
    data = dataclasses.replace(pretrained.data, dir=str(folder / "data" / pretrained.data_dir.name))
    run = dataclasses.replace(pretrained, out=str(folder / "run"), data=data, finetune={"mine": task})
    claim_folder(run)
    finetune(run, "mine", Line(io.StringIO()))
    write_samples(run)
    return run


def answer(run: Run, command: str, capsys: Captured) -> tuple[int, str, str]:
    """Exit code, what was answered, and what was said of errors."""
    folder = run.run_dir.parent
    (folder / "in.txt").write_text("a good object\n")
    (folder / "mask.txt").write_text("a good [MASK]\n")
    source = ("--from", str(run.run_dir))
    argv = {
        "predict": ("predict", "mine", *source, "--input", str(folder / "in.txt")),
        "mask": ("predict", "mask", *source, "--input", str(folder / "mask.txt")),
        "report": ("report", str(run.run_dir), "--to", str(folder / "page.html")),
        "finetune": ("finetune", "mine", *source),
    }[command]
    code = main(list(argv))
    said = capsys.readouterr()
    return code, (folder / "page.html").read_text() if command == "report" and not code else said.out, said.err


CASES = [
    *(
        (file, "predict")
        for file in (
            "run/run.yaml",
            *(f"run/finetune/mine/{name}" for name in ("task.json", "model.safetensors", "vocab.txt", "tokenizer.json")),
        )
    ),
    *(
        (file, "mask")
        for file in (
            "run/corpus/manifest.json",
            "run/corpus/tokenizer.json",
            "run/corpus/vocab.txt",
            "checkpoint/state.json",
            "checkpoint/model.safetensors",
        )
    ),
    *((file, "report") for file in ("run/metrics.jsonl", "run/tasks.jsonl", "run/env.json", "run/samples.json", "run/run.yaml")),
    ("run/tasks.jsonl", "finetune"),
]
DAMAGE = (
    "bit",
    "bit",
    "cut",
    "zeros",
    "empty",
    "folder",
    "no UTF-8",
    "other type",
    "huge number",
    "deep",
    "by hand: other type",
    "by hand: deep",
)


@pytest.mark.parametrize(("file", "command"), CASES)
def test_damage_is_told_or_does_no_harm(file: str, command: str, tuned: Run, capsys: Captured) -> None:
    right, draw = answer(tuned, command, capsys), random.Random(f"{file} {command}")
    assert right[0] == 0
    top, _, name = file.partition("/")
    places = {"run": tuned.run_dir, "data": tuned.data_dir, "checkpoint": max((tuned.run_dir / "checkpoints").glob("step-*"))}
    path = places[top] / name
    whole, told = path.read_bytes(), 0
    for kind in DAMAGE if command != "finetune" else ("bit", "folder", "deep", "by hand: other type"):  # what is lost is trained again
        try:
            if not damaged(path, kind, draw):
                continue
            code, out, err = answer(tuned, command, capsys)
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(whole)
        assert code in (0, 1, 2), kind
        if code:
            assert path.name in err or path.parent.name in err or "has no fine-tuned task" in err, (kind, err)
            told += 1
        elif name != "metrics.jsonl" and "by hand" not in kind:  # it has no checksums, and what was meant is done
            assert out == right[1] or "cut and left out" in out or "not run yet" in out or command == "finetune", kind
    assert told >= (2 if command == "finetune" else 4)


def test_a_damaged_line_of_an_older_log_is_named(tmp_path: Path) -> None:
    from overnight.errors import DataError
    from overnight.run_dir.task_results import read_results

    path = tmp_path / "tasks.jsonl"
    append_result(path, {"kind": "finetune", "name": "a", "value": 0.5})
    path.write_bytes(path.read_bytes() + b'{"kind": "finetune", "name": 3, "value": 0.5}\n')
    with pytest.raises(DataError, match=r"tasks\.jsonl:2: name: input should be a valid string; delete that line"):
        read_results(path)


def test_a_changed_number_of_heads_is_told(tuned: Run, capsys: Captured) -> None:
    path = tuned.run_dir / "run.yaml"
    whole = path.read_text()
    path.write_text(whole.replace("num_heads: 2", "num_heads: 4"))
    try:
        code, _, err = answer(tuned, "predict", capsys)
        assert code == 2 and f"{path}: was changed since it was written" in err
    finally:
        path.write_text(whole)
    assert config.load_run(str(path)).model.num_heads == 2


def test_a_task_that_is_done_again_is_right_by_its_scores(tmp_path: Path) -> None:
    found = []
    for number, (value, seconds) in enumerate(((0.5, 1.0), (0.5, 2.0), (0.6, 1.0))):
        (tmp_path / str(number)).mkdir()
        append_result(
            tmp_path / str(number) / "tasks.jsonl", {"kind": "linear_probe", "name": "a", "seed": 0, "value": value, "seconds": seconds}
        )
        found.append(scored(tmp_path / str(number))(""))
    assert found[0] == found[1] != found[2]
