"""Fine-tuning: a pretrained encoder and a labeled task to a model, its predictions and its score, seed by seed."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save as serialize
from torch import nn

from overnight.checkpoint import reader
from overnight.checkpoint.task_folder import read_facts, write_facts
from overnight.config import BertRun, Finetune, environment_path
from overnight.console import Line
from overnight.corpus.tokenizer import copy_tokenizer
from overnight.display import measures, scale_of
from overnight.distributed.collectives import assert_same_on_all_ranks, raise_on_all_ranks
from overnight.distributed.world import process_group
from overnight.errors import DataError
from overnight.finetune.answer_files import write_files
from overnight.finetune.answers import answer_of, in_words
from overnight.finetune.beginning import Beginning, open_beginning
from overnight.finetune.encode import encode_examples
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.encoded_task import encode_task
from overnight.finetune.predict import load_trained
from overnight.finetune.search import search_settings
from overnight.finetune.seed import seconds_before, shown_outputs
from overnight.finetune.workload import with_rate
from overnight.run_dir.atomic import write_whole
from overnight.run_dir.lock import run_lock
from overnight.run_dir.task_results import append_result, read_results, results_of
from overnight.tasks.classification import read_diagnostic
from overnight.tasks.examples import digest_of_texts


def finetune(run: BertRun, name: str, line: Line | None = None) -> list[dict[str, Any]]:
    """Fine-tune one task of a run with every seed, and, if asked, the same network from random init; after a search, with the best settings.

    What is done already, with the same settings from the same checkpoint on the same rows, is not done again. The best model by dev score goes
    to `finetune/NAME/` in the run folder, with its predictions.

    Args:
        run: a run whose pretraining has a checkpoint.
        name: key in `run.finetune`.

    Returns:
        the lines of `tasks.jsonl` of this task.

    Raises:
        UserError: when another process is writing the run folder.
    """
    source = reader.newest_checkpoint(run.run_dir / "checkpoints")
    if source is None:
        raise DataError(f"{run.run_dir} has no checkpoint to fine-tune; run `overnight pretrain` first")
    with process_group(run) as world, ExitStack() as stack:
        with raise_on_all_ranks(world):
            if world.main:
                stack.enter_context(run_lock(run.run_dir, movable=False))
            line = stack.enter_context((line or Line()) if world.main else Line(Path(os.devnull).open("w")))  # noqa: SIM115
            begin = open_beginning(run, name, source, line, world)
        spec = run.finetune[name]
        searched = bool(spec.search.combinations)
        return _Tuning(begin, search_settings(begin, spec) if searched else spec, searched).go()


class _Tuning:
    """One task of a run, seed by seed, in one process or in each of many.

    Args:
        begin: what it is trained from.
        spec: the settings of the task.
        searched: whether a search chose them.
    """

    def __init__(self, begin: Beginning, spec: Finetune, searched: bool = False) -> None:
        self.searched = searched
        self.begin, self.spec, self.name = begin, with_rate(spec, begin.run.model.hidden_size), begin.name
        self.run, self.line, self.world = begin.run, begin.line, begin.world
        self.folder, self.log = begin.run.run_dir / "finetune" / begin.name, begin.run.run_dir / "tasks.jsonl"
        self.config_hash = begin.config_hash(spec)
        # The folder holds one model: what was done with other settings since is not what it holds, so all is done again.
        self.kept = read_facts(self.folder)["result"] if (self.folder / "task.json").exists() else {}
        self.mine = results_of(self.log, self.name, self.config_hash) if self.kept.get("config_hash") == self.config_hash else []

    def go(self) -> list[dict[str, Any]]:
        """Do what is missing; returns the lines of `tasks.jsonl`."""
        inits = {"pretrained": self.spec.seeds, "random": self.spec.seeds[: self.spec.random_init_seeds]}
        done = {(entry["init"], entry["seed"]) for entry in self.mine if entry["kind"] == "finetune"}
        missing = [(init, seed) for init, seeds in inits.items() for seed in seeds if (init, seed) not in done]
        # All have read what is done before one writes more.
        assert_same_on_all_ranks({"settings": self.config_hash, "missing": missing}, self.world)
        if self.world.main:  # of a seed that was killed once it was recorded
            for init, seed in done:
                shutil.rmtree(self._folder(init, seed) / "checkpoints", ignore_errors=True)
        if not missing:
            if self.spec.task == "mnli" and self.world.main:
                _answer_diagnostic(self.run, self.name, self.line)
            self.line.print(f"{self.name}: done already")
            return self.mine
        with raise_on_all_ranks(self.world):
            self.task = encode_task(self.spec, self.begin.corpus, self.begin.vocabulary)
        if self.kept.get("data_hash", self.begin.data) != self.begin.data:
            self.line.print(f"{self.name}: the rows differ from those that its model was trained on; every seed is trained anew")
        for note in self.task.notes:
            self.line.print(f"{self.name}: {note}")
        if self.world.main and not done:
            self._baselines()
        if self.world.main:
            for folder in self._work.glob("*"):
                if not folder.name.startswith(self.config_hash):  # of other settings
                    shutil.rmtree(folder)
        for at, (init, seed) in enumerate(missing):
            self._seed(init, seed, announces=at == 0)
        return self.mine

    def _baselines(self) -> None:
        """Score the rules without a network to compare with."""
        of = ("baseline", self.name, self.config_hash)
        # Recorded before a kill, or before the folder held a model of other settings.
        self.mine = [entry for entry in read_results(self.log) if (entry["kind"], entry["name"], entry.get("config_hash")) == of]
        metric, recorded = self.task.metric, {entry["method"] for entry in self.mine}
        for method, scores in self.task.baselines().items():
            if method in recorded:
                continue
            entry = {"kind": "baseline", "name": self.name, "config_hash": self.config_hash, "method": method}
            self._append(entry | {"metric": metric, "value": scores[metric], "metrics": scores})
            self.line.print(f"{self.name}: {method}  {measures(scores, scale_of(self.spec.task))}")

    @property
    def _work(self) -> Path:
        """Where the metrics of the seeds lie, and while they are trained their checkpoints."""
        return self.folder.with_name(f"{self.name}.training")

    def _folder(self, init: Any, seed: Any) -> Path:
        """Return the folder of the training of a seed."""
        return self._work / f"{self.config_hash}-{init}-{seed}"

    def _append(self, entry: dict[str, Any]) -> None:
        self.mine.append(append_result(self.log, entry) if self.world.main else entry)

    def _seed(self, init: str, seed: int, announces: bool) -> None:
        """Fine-tune, score and record one seed."""
        task, what, folder = self.task, f"{self.name} seed {seed} {init}", self._folder(init, seed)
        start = time.perf_counter() - seconds_before(folder)
        trained = self.begin.train(self.spec, task, seed, init, what, folder, announces)
        model = trained.model

        def scored(examples: EncodedExamples, split: str) -> list[np.ndarray]:
            return shown_outputs(model, examples, self.run, self.spec, self.line, f"{what}, {split}")

        results, files = task.evaluate(scored(task.dev, "dev"))
        outputs = {split: scored(task.test[split][0], split) for split in task.extra_metrics}
        for split, evaluate_split in task.extra_metrics.items():
            results |= evaluate_split(outputs[split])
        entry = {
            "kind": "finetune",
            "name": self.name,
            "task": self.spec.task,
            "seed": seed,
            "init": init,
            "metric": task.metric,
            "value": results[task.metric],
            "metrics": results,
            "epoch": trained.epoch,
            "epochs_trained": trained.epochs,
            "rows": task.train.rows,
            "seconds": round(time.perf_counter() - start, 2),
            "checkpoint": self.begin.checkpoint.name,
            "config_hash": self.config_hash,
            "data_hash": self.begin.data,
        }
        if task.undefined:
            entry["undefined"] = True
        if self.searched:
            entry["selected_on"] = self.spec.select_on
        if trained.value is not None:
            chosen_by = task.selection[0] if task.selection else task.dev
            entry |= {"selected_on": self.spec.select_on, "selection_rows": chosen_by.rows, "selection_value": trained.value}
        best = max((e["value"] for e in self.mine if e.get("init") == "pretrained"), default=None)
        if init == "pretrained" and (best is None or entry["value"] > best):
            self._keep(model, files, entry, outputs)
        self._append(entry)
        if self.world.main:
            shutil.rmtree(folder / "checkpoints")
        self.line.print(f"{self.name}: seed {seed} {init}  " + measures(results, scale_of(self.spec.task)))

    def _keep(self, model: nn.Module, files: dict[str, Any], entry: dict[str, Any], outputs: dict[str, list[np.ndarray]]) -> None:
        """Write the model, what it predicts, and what is needed to load it, as one folder that is there whole or not at all.

        Args:
            outputs: of the splits that are computed already, since their rows have labels.
        """
        task, splits = self.task, {}
        for split, (encoded, rows_of) in task.test.items():
            what = f"{self.name} seed {entry['seed']} {entry['init']}, {split}"
            given = outputs[split] if split in outputs else shown_outputs(model, encoded, self.run, self.spec, self.line, what)
            splits[split] = "".join(f"{_cell(row_id)}\t{_cell(answer)}\n" for row_id, answer in rows_of(given))
        if not self.world.main:
            return
        beside, old = (self.folder.with_name(f".{self.name}.{word}") for word in ("tmp", "old"))
        for left in (beside, old):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        beside.mkdir(parents=True)
        weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
        write_whole(beside / "model.safetensors", [serialize(weights)])
        copy_tokenizer(self.begin.corpus, beside)
        facts = {
            "kind": task.kind,
            "labels": task.labels,
            "pairs": task.pairs,
            "columns": task.columns,
            "vocab_size": self.begin.vocabulary.size,
            "tokenizer": self.begin.vocabulary.hash,
            "spec": {**asdict(self.spec), **self.begin.paths},  # those that its hash has
            "result": entry,
        }
        if task.diagnostic:
            facts["diagnostic"] = task.diagnostic
        write_files(beside, files)
        write_facts(beside, facts)
        for split, rows in splits.items():
            write_whole(beside / f"{split}.tsv", [f"index\tprediction\n{rows}".encode()])
        if self.folder.exists():  # to delete it takes time, in which a kill would leave none
            self.folder.rename(old)
        beside.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)


def _answer_diagnostic(run: BertRun, name: str, line: Line) -> None:
    """Answer the diagnostic set of GLUE where it came, or was changed, after the model of MNLI was trained, which has seen and scored none of it."""
    folder = run.run_dir / "finetune" / name
    path, examples = folder / "diagnostic.tsv", read_diagnostic(environment_path(run.finetune[name].path, f"finetune.{name}.path"))
    facts, digest = read_facts(folder), digest_of_texts(examples)
    # The facts of an earlier version do not say which rows were answered.
    if not examples or (path.exists() and facts.get("diagnostic") == digest):
        return
    model = load_trained(run, name)
    outputs = model.outputs(encode_examples(model.tokenizer, model.vocabulary, examples, model.longest))
    answers = (in_words(answer_of(model.facts["kind"], model.facts["labels"], output)) for output in outputs)
    rows = "".join(f"{_cell(example.id)}\t{_cell(answer)}\n" for example, answer in zip(examples, answers, strict=True))
    write_whole(path, [f"index\tprediction\n{rows}".encode()])
    write_facts(folder, {**facts, "diagnostic": digest})
    line.print(f"{name}: the diagnostic set is answered by the existing model")


def _cell(text: str) -> str:
    """Return a text as a cell of a file of tabs: a tab or the end of a line in it would begin another."""
    return text.translate({9: "\\t", 10: "\\n", 13: "\\r"})
