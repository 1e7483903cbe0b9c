"""Answers of a trained model for new text: JSON lines or plain lines in, JSON lines out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from overnight.config import Run
from overnight.corpus.files import write_json, write_whole
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import DataError
from overnight.models.bert import padded_vocabulary
from overnight.tasks import spans
from overnight.tasks.encode import encode_rows, join
from overnight.tasks.finetune import new_head, outputs
from overnight.tasks.problem import Examples
from overnight.tasks.rows import Row
from overnight.tasks.squad import Question
from overnight.train import checkpoint
from overnight.train.family import new_model
from overnight.train.folder import kept_vocabulary, same_corpus, task_vocabulary
from overnight.train.precision import DTYPES
from overnight.train.pretrain import set_up_machine

# Lines answered at once: sorted by length among themselves, answered in the order they came.
_AT_ONCE = 512
_MICRO = 32
TOP = 5


def predict(run: Run, name: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Answer lines one by one, in order.

    Args:
        run: a finished run.
        name: a fine-tuned task of it; or `mask`, which fills in every [MASK] with the pretrained model.
        lines: JSON objects (`text`, or `text_a` and `text_b`; `question` and `context` for SQuAD), or plain text, a pair
            separated by a tab. Empty lines are skipped.

    Raises:
        DataError: when the task was not fine-tuned, or a line (named by its number) cannot be used.
    """
    if name == "mask":
        yield from _fill(run, lines)
        return
    folder = run.run_dir / "finetune" / name
    if not (folder / "task.json").exists():
        have = ", ".join(sorted(p.parent.name for p in run.run_dir.glob("finetune/*/task.json"))) or "none"
        raise DataError(
            f"{run.run_dir} has no fine-tuned task {name!r} (it has: {have}); run `overnight finetune {name}` first, or ask for `mask`"
        )
    facts = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    device = set_up_machine(run)
    vocabulary = task_vocabulary(folder, facts.get("tokenizer", ""))
    tokenizer = load_tokenizer(folder)
    model = new_head(facts["kind"], len(facts["labels"]), run, facts["vocab_size"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.to(device)
    dtype, length = DTYPES[run.train.precision], facts["spec"]["length"]
    for part in _parts(lines):
        if facts["kind"] == "spans":
            questions = [_question(number, fields) for number, fields in part]
            windows = spans.windows(tokenizer, vocabulary, questions, length, facts["spec"]["stride"])
            given = outputs(model, Examples([w.ids for w in windows], [w.segments for w in windows], {}), _MICRO, dtype, device)
            answers, nbest = spans.best_answers(
                windows, [o[:, 0] for o in given], [o[:, 1] for o in given], max_answer=facts["spec"]["max_answer"]
            )
            for question, (_, fields) in zip(questions, part, strict=True):
                best = nbest[question.id][0]
                yield {
                    "id": fields.get("id", question.id),
                    "answer": answers[question.id],
                    "probability": _round(float(best["probability"])),
                }
            continue
        rows = [_row(number, fields) for number, fields in part]
        sequences = encode_rows(tokenizer, vocabulary, rows, length)
        given = outputs(model, Examples([e.ids for e in sequences], [e.segments for e in sequences], {}), _MICRO, dtype, device)
        for row, output in zip(rows, given, strict=True):
            if facts["kind"] == "regression":
                yield {"id": row.id, "score": _round(float(output[0]))}
                continue
            p = np.exp(output - output.max())
            shares = dict(zip(facts["labels"], map(_round, (p / p.sum()).tolist()), strict=True))
            yield {"id": row.id, "label": facts["labels"][int(output.argmax())], "probabilities": shares}


@torch.no_grad()
def _fill(run: Run, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    if checkpoint.newest(run.run_dir / "checkpoints") is None:
        raise DataError(f"{run.run_dir} has no checkpoint; run `overnight pretrain` first")
    device = set_up_machine(run)
    corpus, vocabulary = kept_vocabulary(run)
    tokenizer = load_tokenizer(corpus)
    model = new_model(run, vocabulary, device)
    found = checkpoint.load(run.run_dir / "checkpoints", model)
    assert found is not None
    same_corpus(found[0], load_manifest(corpus), corpus, run)
    model.eval()
    assert padded_vocabulary(vocabulary.size) == len(model.encoder.word.weight)
    for number, fields in (item for part in _parts(lines) for item in part):
        row = _row(number, fields)
        if row.text_b is not None:
            raise DataError(f"line {number}: is a pair; to fill in [MASK], give one text a line")
        # The text around each [MASK] is tokenized by itself: a tokenizer may not know the mark.
        pieces = tokenizer.encode_batch_fast(row.text_a.split("[MASK]"), add_special_tokens=False)
        ids = [token for i, piece in enumerate(pieces) for token in ([vocabulary.mask] if i else []) + piece.ids]
        sequence = join(ids, None, vocabulary.cls, vocabulary.sep, run.model.max_length)
        batch = Examples([sequence.ids], [sequence.segments], {}).batch(np.array([0])).to(device)
        at = (batch.ids_N == vocabulary.mask).nonzero().squeeze(1)
        if not len(at):
            raise DataError(f"line {number}: no [MASK] within the first {run.model.max_length} tokens; write the word to guess as [MASK]")
        logits = model.mlm_logits(model.encoder(batch, DTYPES[run.train.precision])[at]).float()
        top = torch.softmax(logits, -1).topk(TOP, -1)
        guesses = [
            [{"token": tokenizer.id_to_token(i), "probability": _round(p)} for i, p in zip(row_ids, row_p, strict=True)]
            for row_ids, row_p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        yield {"id": row.id, "text": row.text_a, "masks": guesses}


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _parts(lines: Iterable[str]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Non-empty lines with their numbers (from 1), parsed, some at a time."""
    numbered = ((number, _parse(number, text)) for number, text in enumerate(lines, 1) if text.strip())
    while part := list(islice(numbered, _AT_ONCE)):
        yield part


def _parse(number: int, text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        first, tab, second = text.strip("\r\n").partition("\t")
        return {"text_a": first, "text_b": second if tab else None}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise DataError(f"line {number}: is not JSON ({error})") from None
    assert isinstance(fields, dict)
    return fields


def _row(number: int, fields: dict[str, Any]) -> Row:
    text = fields.get("text_a", fields.get("text"))
    second = fields.get("text_b")
    if not isinstance(text, str) or not isinstance(second, str | None):
        raise DataError(f"line {number}: has the keys {', '.join(fields)}; it needs `text`, or `text_a` and `text_b`, as strings")
    return Row(str(fields.get("id", number)), text, second, None)


def _question(number: int, fields: dict[str, Any]) -> Question:
    question, context = fields.get("question", fields.get("text_a")), fields.get("context", fields.get("text_b"))
    if not isinstance(question, str) or not isinstance(context, str):
        raise DataError(f"line {number}: has the keys {', '.join(fields)}; it needs `question` and `context` as strings")
    return Question(str(number), "", question, context, ())


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


def read_lines(path: str) -> Iterator[str]:
    """Lines of a file, or of standard input for `-`.

    Raises:
        DataError: when there is no such file or it is not UTF-8.
    """
    import sys

    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; give a file or `-` for standard input") from None
    except UnicodeDecodeError as error:
        where = "standard input" if path == "-" else path
        raise DataError(f"{where}: line {number}: is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
