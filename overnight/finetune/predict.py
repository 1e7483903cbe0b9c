"""Answers of a trained model for new text: JSON lines or plain lines in, JSON lines out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary, task_vocabulary
from overnight.checkpoint.task_folder import read_facts, read_weights
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import load_tokenizer
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import new_model
from overnight.errors import DataError
from overnight.finetune import question_answering
from overnight.finetune.answers import answer_of, probabilities
from overnight.finetune.encode import encode_examples, join
from overnight.finetune.encoded_task import EncodedExamples
from overnight.finetune.entities import are_entities, entities
from overnight.finetune.finetune import outputs
from overnight.finetune.tagging import encode_sentences, tags_of
from overnight.finetune.workload import task_model
from overnight.models.bert import padded_vocabulary
from overnight.run_dir.atomic import write_json, write_whole
from overnight.tasks.inputs import example_of, parts, question_of, read_input, sentence_of
from overnight.tasks.squad import question_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from overnight.corpus.tokenizer import Vocabulary

_MICRO = 32
TOP = 5


def predict(run: BertRun, name: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Answer lines one by one, in order.

    Args:
        run: a finished run.
        name: a fine-tuned task of it; or `mask`, which fills in every [MASK] with the pretrained model.
        lines: JSON objects (`text`, or `text_a` and `text_b`; `question` and `context` for SQuAD, `tokens` for tags), or plain text,
            a pair separated by a tab, words that are tagged by blanks. Empty lines are skipped.

    Raises:
        DataError: when the task was not fine-tuned, or a line (named by its number) cannot be used.
    """
    if name == "mask":
        yield from _fill(run, lines)
        return
    facts = _facts(run, name)
    if facts["kind"] == "spans":
        yield from (answer for answer, _ in predict_questions(run, name, lines))
        return
    if facts["kind"] == "token_classification":
        yield from _tag(run, name, facts, lines)
        return
    tokenizer, vocabulary, answered = _loaded(run, name, facts)
    length = facts["spec"]["seq_len"]
    for part in parts(lines):
        examples = [example_of(number, fields) for number, fields in part]
        sequences = encode_examples(tokenizer, vocabulary, examples, length)
        given = answered(EncodedExamples([e.ids for e in sequences], [e.segments for e in sequences], {}))
        for example, output in zip(examples, given, strict=True):
            answer = answer_of(facts["kind"], facts["labels"], output)
            if isinstance(answer, float):
                yield {"id": example.id, "score": _round(answer)}
                continue
            shares = dict(zip(facts["labels"], map(_round, probabilities(facts["kind"], output).tolist()), strict=True))
            yield {"id": example.id, "labels" if facts["kind"] == "multi_label" else "label": answer, "probabilities": shares}


def predict_questions(run: BertRun, name: str, lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], list[dict[str, str | float]]]]:
    """Answer questions one by one, in order; see :func:`predict`.

    Returns:
        of each the answer (`id`, `answer`, `probability`, and `null_odds` where the task has questions without an answer, whose answer is
        then empty), and the best of them as `nbest_predictions.json` lists them.
    """
    facts = _facts(run, name)
    tokenizer, vocabulary, answered = _loaded(run, name, facts)
    threshold = facts["result"]["metrics"].get("null_threshold")
    for part in parts(lines):
        questions = [question_of(number, fields) for number, fields in part]
        windows = question_answering.windows(tokenizer, vocabulary, questions, facts["spec"]["seq_len"], facts["spec"]["doc_stride"])
        given = answered(EncodedExamples([w.ids for w in windows], [w.segments for w in windows], {}))
        starts, ends = [o[:, 0] for o in given], [o[:, 1] for o in given]
        answers, nbest = question_answering.best_answers(windows, starts, ends, max_answer=facts["spec"]["max_answer_length"])
        odds: dict[str, float] = {}
        if threshold is not None:
            odds, nbest = question_answering.against_null(windows, starts, ends, nbest)
        for question, (_, fields) in zip(questions, part, strict=True):
            number, text = question.id, answers[question.id]
            answer = {"id": fields.get("id", number), "answer": "" if threshold is not None and odds[number] > threshold else text}
            answer["probability"] = _round(next(float(e["probability"]) for e in nbest[number] if e["text"] == answer["answer"]))
            yield answer | ({"null_odds": odds[number]} if odds else {}), nbest[number]


def _tag(run: BertRun, name: str, facts: dict[str, Any], lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Tag the words of lines; see :func:`predict`."""
    tokenizer, vocabulary, answered = _loaded(run, name, facts)
    marks_entities = are_entities(facts["labels"])
    for part in parts(lines):
        sentences = [sentence_of(number, fields) for number, fields in part]
        encoded = encode_sentences(tokenizer, vocabulary, sentences, facts["labels"], facts["spec"]["seq_len"])
        given = answered(EncodedExamples([e.ids for e in encoded], [np.zeros(len(e.ids), np.int8) for e in encoded], {}))
        for sentence, (tags, shares) in zip(sentences, tags_of(encoded, given, facts["labels"], len(sentences)), strict=True):
            answer = {"id": sentence.id, "tokens": list(sentence.words), "tags": tags, "probabilities": [_round(p) for p in shares]}
            found = [
                {"type": e.type, "text": " ".join(sentence.words[e.first : e.last + 1]), "first": e.first, "last": e.last}
                for e in entities(tags)
            ]
            yield answer | ({"entities": found} if marks_entities else {})


def _loaded(run: BertRun, name: str, facts: dict[str, Any]) -> tuple[Tokenizer, Vocabulary, Callable[[EncodedExamples], list[np.ndarray]]]:
    """Return the tokenizer and the vocabulary of a fine-tuned task, and its model as a function of sequences."""
    folder, device = run.run_dir / "finetune" / name, set_up_machine(run)
    vocabulary = task_vocabulary(folder, facts["tokenizer"])
    model = task_model(facts["kind"], len(facts["labels"]), run, facts["vocab_size"])
    reader.fill(model, read_weights(folder, facts), folder)
    model.to(device)
    return load_tokenizer(folder), vocabulary, lambda examples: outputs(model, examples, _MICRO, DTYPES[run.precision], device)


def predict_file(run: BertRun, name: str, path: str) -> Iterator[dict[str, Any]]:
    """Answer the rows of a file one by one, in order: a table with the columns of the task, or lines as :func:`predict` takes them.

    Args:
        run: a finished run.
        name: as of :func:`predict`.
        path: .csv, .tsv and .jsonl are tables, a .json may be questions in SQuAD's format; any other file, and standard input (`-`), is lines.
    """
    spec = {"task": "mask"} if name == "mask" else _facts(run, name)["spec"]
    yield from predict(run, name, question_lines(path) or read_input(path, spec))


def write_question_files(run: BertRun, name: str, path: str, folder: Path) -> None:
    """Answer the questions of a file into a folder: `predictions.json`, `nbest_predictions.json` and, of SQuAD 2.0, `null_odds.json`.

    Raises:
        DataError: for a task that is not of questions.
    """
    facts = _facts(run, name)
    if facts["kind"] != "spans":
        raise DataError(f"--to={folder}: is a folder; only answers to questions are several files, name a file for those of {name!r}")
    found = list(predict_questions(run, name, question_lines(path) or read_input(path, facts["spec"])))
    write_json(folder / "predictions.json", {answer["id"]: answer["answer"] for answer, _ in found})
    write_json(folder / "nbest_predictions.json", {answer["id"]: nbest for answer, nbest in found})
    if any("null_odds" in answer for answer, _ in found):
        write_json(folder / "null_odds.json", {answer["id"]: answer["null_odds"] for answer, _ in found})
    print(f"written: {folder} ({len(found):,} answers)")


def _facts(run: BertRun, name: str) -> dict[str, Any]:
    """Return what `task.json` says of a fine-tuned task."""
    path = run.run_dir / "finetune" / name / "task.json"
    if not path.exists():
        have = ", ".join(sorted(p.parent.name for p in run.run_dir.glob("finetune/*/task.json"))) or "none"
        raise DataError(
            f"{run.run_dir} has no fine-tuned task {name!r} (it has: {have}); run `overnight finetune {name}` first, or ask for `mask`"
        )
    return read_facts(path.parent)


@torch.no_grad()
def _fill(run: BertRun, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    source = reader.newest_checkpoint(run.run_dir / "checkpoints")
    if source is None:
        raise DataError(f"{run.run_dir} has no checkpoint; run `overnight pretrain` first")
    device = set_up_machine(run)
    corpus, vocabulary = kept_vocabulary(run)
    tokenizer = load_tokenizer(corpus)
    model = new_model(run, vocabulary, device)
    progress, state, _ = reader.read_checkpoint(source)
    reader.fill(model, state, source)
    assert_same_corpus(progress, load_manifest(corpus), corpus, run)
    model.eval()
    assert padded_vocabulary(vocabulary.size) == len(model.encoder.word.weight)
    for number, fields in (item for part in parts(lines) for item in part):
        example = example_of(number, fields)
        if example.text_b is not None:
            raise DataError(f"line {number}: is a pair; to fill in [MASK], give one text a line")
        # The text around each [MASK] is tokenized by itself: a tokenizer may not know the mark.
        between = tokenizer.encode_batch_fast(example.text_a.split("[MASK]"), add_special_tokens=False)
        ids = [token for i, encoding in enumerate(between) for token in ([vocabulary.mask] if i else []) + encoding.ids]
        sequence = join(ids, None, vocabulary.cls, vocabulary.sep, run.model.max_position_embeddings)
        batch = EncodedExamples([sequence.ids], [sequence.segments], {}).batch(np.array([0])).to(device)
        at = (batch.ids_N == vocabulary.mask).nonzero().squeeze(1)
        if not len(at):
            raise DataError(
                f"line {number}: no [MASK] within the first {run.model.max_position_embeddings} tokens; write the word to guess as [MASK]"
            )
        logits = model.mlm_logits(model.encoder(batch, DTYPES[run.precision])[at]).float()
        top = torch.softmax(logits, -1).topk(TOP, -1)
        guesses = [
            [{"token": tokenizer.id_to_token(i), "probability": _round(p)} for i, p in zip(row_ids, row_p, strict=True)]
            for row_ids, row_p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        yield {"id": example.id, "text": example.text_a, "masks": guesses}


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def write_answers(answers: Iterable[dict[str, Any]], path: Path | None) -> None:
    """Print answers as JSON lines, or write them to a file: whole or not at all, and as `{id: text}` where they are texts and it is a .json."""
    if path is None:
        for answer in answers:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        return
    given = list(answers)
    if path.suffix == ".json" and all("answer" in answer for answer in given):
        write_json(path, {answer["id"]: answer["answer"] for answer in given})
    else:
        write_whole(path, [(json.dumps(answer, ensure_ascii=False) + "\n").encode() for answer in given])
    print(f"written: {path} ({len(given):,} answers)")
