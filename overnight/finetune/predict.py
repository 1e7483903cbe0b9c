"""Answers of a trained model for new text: JSON lines or plain lines in, JSON lines out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from overnight.batches.few_shapes import by_tokens, filled_up, give_memory_back, keep_few_kernels, rounded_up
from overnight.batches.packing import Batch
from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary, task_vocabulary
from overnight.checkpoint.task_folder import folders_of_tasks, read_facts, read_weights
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import load_tokenizer
from overnight.display import plural
from overnight.engine.finite import finite_outputs
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import blank_model
from overnight.errors import DataError
from overnight.finetune import question_answering
from overnight.finetune.answer_files import by_id
from overnight.finetune.answers import answer_of, in_words, probabilities
from overnight.finetune.encode import Encoded, encode_examples, join, read_as_text, without_tokens
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.entities import are_entities, entities
from overnight.finetune.tagging import encode_sentences, tags_of
from overnight.finetune.workload import task_model
from overnight.models.bert import Linear, padded_vocabulary
from overnight.models.building import to_be_filled
from overnight.models.heads import Classifier
from overnight.run_dir.atomic import write_json
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example
from overnight.tasks.inputs import Given, answered, read_input
from overnight.tasks.line_fields import example_of, id_of, question_of, sentence_of
from overnight.tasks.squad import Question, question_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from overnight.corpus.tokenizer import Vocabulary

# Tokens of a batch: on a CPU they stay in the cache, on a GPU they keep its kernels busy.
_CPU_TOKENS, _GPU_TOKENS = 1 << 12, 1 << 16
TOP = 5
# Of questions that are asked of a model of others, as its own scripts have them.
DOC_STRIDE, MAX_ANSWER = 128, 30


@dataclass(frozen=True)
class Trained:
    """A trained network with its vocabulary, ready to answer."""

    network: Any
    """A :data:`overnight.models.encoders.MaskedLM`, or of a task."""
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    device: torch.device
    dtype: torch.dtype
    longest: int
    """Most tokens of a sequence."""
    facts: dict[str, Any]
    """As in `task.json`: `kind`, `labels`, `spec`, `result`; of the pretrained model the kind `mask` alone."""
    run_dir: Path | None = None
    """The run folder in which the task was fine-tuned; None of an export, of a model of others, and of a pretrained model."""
    between: Callable[[], object] = bool
    """Called before each batch: a server answers others there. `bool` does nothing."""

    def __post_init__(self) -> None:
        """Let the tokenizer take "[SEP]" in a text as text."""
        read_as_text(self.tokenizer)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy, whose tokenizer has forgotten that."""
        self.__dict__.update(state)
        self.__post_init__()

    def outputs(self, sequences: Sequence[Any]) -> list[np.ndarray]:
        """Return what the network says of sequences that have `ids`, and `segments` where there are two.

        Raises:
            NonFiniteError: when it says NaN or Infinity.
        """
        out: list[np.ndarray] = [np.empty(0)] * len(sequences)
        with torch.inference_mode():
            for index, batch in self.batches(sequences):
                for i, output in zip(index, self.network(batch, self.dtype).cpu().numpy()[: len(index)], strict=True):
                    finite_outputs(output if output.ndim == 1 else output[: len(sequences[i].ids)])  # behind its tokens is what fills it up
                    out[i] = output
        return out

    def batches(self, sequences: Sequence[Any]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield all sequences once, longest first, on the device: the places of some, and their batch, behind which others may fill it up."""
        keep_few_kernels()
        segments = [getattr(s, "segments", np.zeros(len(s.ids), np.int8)) for s in sequences]
        examples, on_cpu = EncodedExamples([s.ids for s in sequences], segments, {}), self.device.type == "cpu"
        for index in by_tokens([len(s.ids) for s in sequences], _CPU_TOKENS if on_cpu else _GPU_TOKENS):
            self.between()
            batch = examples.batch(index)
            fills = on_cpu and self.network.encoder.native is None  # forward.c has one kernel for all shapes
            yield index, filled_up(batch, self.vocabulary.pad) if fills else batch.to(self.device)
            if on_cpu:
                give_memory_back(len(batch.ids_N))


def at_work(network: nn.Module, precision: str, device: torch.device) -> Any:
    """Return a network that is trained no more: the weights of its products in the type and layout they are multiplied in, once instead of at each call.

    Raises:
        ConfigError: for int8, where this processor has none.
    """
    network.requires_grad_(False).to(device).eval()
    for name, module in network.named_modules():
        if not isinstance(module, Linear):
            continue
        if precision == "int8" and ".layers." in name:
            module.to_8_bits()
        else:
            # Classifier.forward multiplies in fp32 what is one number.
            number = isinstance(network, Classifier) and module is network.head and module.out_features == 1
            module.to(torch.float32 if number else DTYPES[precision]).pack()
    encoder: Any = network.encoder
    encoder.call_natively()
    return network


def predict(run: BertRun, name: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Answer lines one by one, in order; a text without a token by `id` and `error`, where it has classes or a number.

    Args:
        run: a finished run.
        name: a fine-tuned task of it; or `mask`, which fills in every [MASK] with the pretrained model.
        lines: JSON objects (`text`, or `text_a` and `text_b`; `question` and `context` for SQuAD, `tokens` for tags), or plain text,
            a pair separated by a tab (which in a task of single texts is of the text), words that are tagged by blanks. Empty lines are skipped.

    Raises:
        DataError: when the task was not fine-tuned, or a line (named by its number) cannot be used.
    """
    yield from _answers(load_trained(run, name), enumerate(lines, 1), keep_going=False)


def _answers(model: Trained, given: Iterable[Given | None], keep_going: bool) -> Iterator[dict[str, Any]]:
    pairs = model.facts.get("pairs") is not False or model.facts["kind"] == "spans"
    return answered(given, partial(read_row, model), partial(answer_rows, model), keep_going, pairs=pairs)


def load_trained(run: BertRun, name: str) -> Trained:
    """Return a fine-tuned task of a run, or by the name `mask` its pretrained model.

    Raises:
        DataError: when there is none, or a file of it is damaged.
    """
    return _load_masked_lm(run) if name == "mask" else _load_task(run, name, _facts(run, name))


def read_row(model: Trained, number: int, fields: Mapping[str, Any]) -> Any:
    """Return what :func:`answer_rows` takes of a line.

    Args:
        number: of the line; no two that are answered together have the same.
        fields: as :func:`predict` takes them.

    Raises:
        DataError: naming the line, when it cannot be used.
    """
    kind = model.facts["kind"]
    if kind == "spans":
        return _question(model, number, fields), id_of(number, fields)
    if kind == "token_classification":
        return sentence_of(number, fields)
    return _masked(model, number, fields) if kind == "mask" else _example(model, number, fields)


def _question(model: Trained, number: int, fields: Mapping[str, Any]) -> Question:
    question = question_of(number, fields)
    if not question.context.strip():
        raise DataError(f"line {number}: its context is empty: there is nothing to find an answer in")
    if tokens := question_answering.too_long(model.tokenizer, [question], model.longest).get(question.id):
        most = question_answering.longest_question(model.longest)
        raise DataError(f"line {number}: its question of {tokens} tokens leaves no room for the paragraph; the task takes up to {most}")
    return question


def _example(model: Trained, number: int, fields: Mapping[str, Any]) -> Example:
    example = example_of(number, fields)
    # Of a folder of others it is not known.
    if model.facts.get("pairs") is False and example.text_b is not None:
        raise DataError(f"line {number}: is a pair; the task is of single texts: give it as one, `text`")
    if model.facts.get("pairs"):
        # Published tasks have rows with an empty text; in one's own table that is an error of training too.
        refused = ("", None) if model.facts["spec"]["task"] == "csv" else (None,)
        for text, which in ((example.text_a, "first"), (example.text_b, "second")):
            if text in refused:
                raise DataError(
                    f"line {number}: has no {which} text, and the task is of pairs: `text_a` and `text_b`, or a tab between the two"
                )
    return example


def answer_rows(model: Trained, rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Answer what :func:`read_row` made of lines, in order."""
    kind = model.facts["kind"]
    if kind == "spans":
        return (answer for answer, _ in answer_questions(model, rows))
    if kind == "token_classification":
        return _tag(model, rows)
    return _fill(model, rows) if kind == "mask" else _classify(model, rows)


def _classify(model: Trained, examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    kind, labels = model.facts["kind"], model.facts["labels"]
    given = model.outputs(encode_examples(model.tokenizer, model.vocabulary, examples, model.longest))
    nothing = set(without_tokens(model.tokenizer, examples))
    for place, (example, output) in enumerate(zip(examples, given, strict=True)):
        if place in nothing:
            yield {"id": example.id, "error": "has no token: it is empty, or of characters that the tokenizer drops"}
            continue
        answer = answer_of(kind, labels, output)
        if isinstance(answer, float):
            yield {"id": example.id, "score": float(in_words(answer))}
            continue
        shares = dict(zip(labels, map(_round, probabilities(kind, output).tolist()), strict=True))
        yield {"id": example.id, "labels" if kind == "multi_label" else "label": answer, "probabilities": shares}


def answer_questions(model: Trained, rows: Sequence[tuple[Question, str]]) -> Iterator[tuple[dict[str, Any], list[dict[str, str | float]]]]:
    """Answer questions, in order.

    Returns:
        of each the answer (`id`, `answer`, where it is not empty the characters of the context from `start` to before `end`, `probability`, and
        `null_odds` where the task has questions without an answer, whose answer is then empty), and the best of them as `nbest_predictions.json` lists them.
    """
    spec, threshold = model.facts["spec"], model.facts["result"]["metrics"].get("null_threshold")
    windows = question_answering.windows(model.tokenizer, model.vocabulary, [q for q, _ in rows], model.longest, spec["doc_stride"])
    given = model.outputs(windows)
    starts, ends = [o[:, 0] for o in given], [o[:, 1] for o in given]
    answers, nbest = question_answering.best_answers(windows, starts, ends, max_answer=spec["max_answer_length"])
    odds: dict[str, float] = {}
    if threshold is not None:
        odds, nbest = question_answering.against_null(windows, starts, ends, nbest)
    for question, row_id in rows:
        number, text = question.id, answers[question.id]
        answer: dict[str, Any] = {"id": row_id, "answer": "" if threshold is not None and odds[number] > threshold else text}
        best = next(entry for entry in nbest[number] if entry["text"] == answer["answer"])
        if answer["answer"]:
            answer |= {"start": int(best["start"]), "end": int(best["start"]) + len(answer["answer"])}
        answer["probability"] = _round(float(best["probability"]))
        yield answer | ({"null_odds": odds[number]} if odds else {}), nbest[number]


def _tag(model: Trained, sentences: Sequence[Sentence]) -> Iterator[dict[str, Any]]:
    """Tag the words of sentences; see :func:`predict`."""
    labels = model.facts["labels"]
    encoded = encode_sentences(model.tokenizer, model.vocabulary, list(sentences), labels, model.longest)
    for sentence, (tags, shares) in zip(sentences, tags_of(encoded, model.outputs(encoded), labels, len(sentences)), strict=True):
        answer = {"id": sentence.id, "tokens": list(sentence.words), "tags": tags, "probabilities": [_round(p) for p in shares]}
        found = [
            {"type": e.type, "text": " ".join(sentence.words[e.first : e.last + 1]), "first": e.first, "last": e.last}
            for e in entities(tags)
        ]
        yield answer | ({"entities": found} if are_entities(labels) else {})


def _load_task(run: BertRun, name: str, facts: dict[str, Any]) -> Trained:
    folder, device = run.run_dir / "finetune" / name, set_up_machine(run, predicts=True)
    vocabulary = task_vocabulary(folder, facts["tokenizer"])
    with to_be_filled():
        model = task_model(facts["kind"], len(facts["labels"]), run, facts["vocab_size"])
    reader.fill(model, read_weights(folder, facts), folder)
    model = at_work(model, run.precision, device)
    return Trained(model, load_tokenizer(folder), vocabulary, device, DTYPES[run.precision], facts["spec"]["seq_len"], facts, run.run_dir)


def answer_file(model: Trained, path: str, form: str = "") -> Iterator[dict[str, Any]]:
    """Answer the rows of a file one by one, in order: a table with the columns of the task, or lines as :func:`predict` takes them.

    One that cannot be used is answered by `id` and `error`.

    Args:
        model: of the task.
        path: .csv, .tsv, .jsonl and .parquet are tables, a .json may be questions in SQuAD's format; any other file, and standard input (`-`), is lines.
        form: of the file, as of :func:`overnight.tasks.inputs.read_input`.
    """
    yield from _answers(model, _given(path, {"spec": {"task": "mask"}, **model.facts}, form), keep_going=True)


def _given(path: str, facts: Mapping[str, Any], form: str) -> Iterator[Given | None]:
    questions = None if form else question_lines(path)
    if questions is not None:
        return enumerate(questions, 1)
    return read_input(
        path, {**facts["spec"], "pairs": facts.get("pairs"), "texts": facts.get("columns"), "labels": facts.get("labels")}, form
    )


def write_question_files(model: Trained, path: str, folder: Path, form: str = "") -> None:
    """Answer the questions of a file into a folder: `predictions.json`, `nbest_predictions.json` and, of SQuAD 2.0, `null_odds.json`.

    Raises:
        DataError: for a task that is not of questions, or where two of them have one id.
    """
    if model.facts["kind"] != "spans":
        raise DataError(f"--to={folder}: is a folder; only answers to questions are several files, name a file for those of another task")
    found = list(answered(_given(path, model.facts, form), partial(read_row, model), partial(answer_questions, model)))
    write_json(folder / "predictions.json", by_id([answer for answer, _ in found], folder / "predictions.json"))
    write_json(folder / "nbest_predictions.json", {answer["id"]: nbest for answer, nbest in found})
    if any("null_odds" in answer for answer, _ in found):
        write_json(folder / "null_odds.json", {answer["id"]: answer["null_odds"] for answer, _ in found})
    print(f"written: {folder} ({plural(len(found), 'answer')})")


def _facts(run: BertRun, name: str) -> dict[str, Any]:
    """Return what `task.json` says of a fine-tuned task."""
    path = run.run_dir / "finetune" / name / "task.json"
    if not path.exists():
        have = ", ".join(folder.name for folder in folders_of_tasks(run.run_dir)) or "none"
        raise DataError(
            f"{run.run_dir} has no fine-tuned task {name!r} (it has: {have}); run `overnight finetune {name}` first, or ask for `mask`"
        )
    return read_facts(path.parent)


def _load_masked_lm(run: BertRun) -> Trained:
    source = reader.newest_checkpoint(run.run_dir / "checkpoints")
    if source is None:
        raise DataError(f"{run.run_dir} has no checkpoint; run `overnight pretrain` first")
    progress, state, _ = reader.read_checkpoint(source)
    reader.assert_masked_lm(state, run.run_dir)
    device = set_up_machine(run, predicts=True)
    corpus, vocabulary = kept_vocabulary(run)
    model = blank_model(run, vocabulary, device)
    reader.fill(model, state, source)
    assert_same_corpus(progress, load_manifest(corpus), corpus, run)
    model = at_work(model, run.precision, device)
    assert padded_vocabulary(vocabulary.size) == len(model.encoder.word.weight)
    longest = run.model.max_position_embeddings
    return Trained(model, load_tokenizer(corpus), vocabulary, device, DTYPES[run.precision], longest, {"kind": "mask"})


def _masked(model: Trained, number: int, fields: Mapping[str, Any]) -> tuple[Example, Encoded]:
    """Return a text with its tokens, some of them [MASK]."""
    example, mask = example_of(number, fields), model.vocabulary.mask
    if example.text_b is not None:
        raise DataError(f"line {number}: is a pair; to fill in [MASK], give one text a line")
    # The text around each [MASK] is tokenized by itself: a tokenizer may not know the mark.
    between = model.tokenizer.encode_batch_fast(example.text_a.split("[MASK]"), add_special_tokens=False)
    ids = [token for i, encoding in enumerate(between) for token in ([mask] if i else []) + encoding.ids]
    sequence = join(ids, None, model.vocabulary.cls, model.vocabulary.sep, model.longest)
    if mask not in sequence.ids:
        raise DataError(f"line {number}: no [MASK] within the first {model.longest} tokens; write the word to guess as [MASK]")
    if lost := len(between) - 1 - int((sequence.ids == mask).sum()):
        raise DataError(
            f"line {number}: {lost} of its {len(between) - 1} [MASK] come after the first {model.longest} tokens; give a shorter text"
        )
    return example, sequence


@torch.inference_mode()
def _fill(model: Trained, rows: Sequence[tuple[Example, Encoded]]) -> Iterator[dict[str, Any]]:
    guesses: list[list[list[dict[str, Any]]]] = [[]] * len(rows)
    for index, batch in model.batches([sequence for _, sequence in rows]):
        at = (batch.ids_N == model.vocabulary.mask).nonzero().squeeze(1)
        few = torch.cat([at, at[:1].expand(rounded_up(len(at)) - len(at))])
        logits = model.network.mlm_logits(model.network.encoder(batch, model.dtype)[few])[: len(at)].float()
        top = torch.softmax(logits, -1).topk(TOP, -1)
        found = iter(zip(top.indices.tolist(), finite_outputs(top.values.cpu().numpy()).tolist(), strict=True))
        for place in index:
            masks = int((rows[place][1].ids == model.vocabulary.mask).sum())
            guesses[place] = [_guesses(model, *next(found)) for _ in range(masks)]
    for (example, _), masks_of in zip(rows, guesses, strict=True):
        yield {"id": example.id, "text": example.text_a, "masks": masks_of}


def _guesses(model: Trained, ids: list[int], shares: list[float]) -> list[dict[str, Any]]:
    return [{"token": model.tokenizer.id_to_token(i), "probability": _round(p)} for i, p in zip(ids, shares, strict=True)]


def _round(value: float) -> float:
    return float(f"{value:.5g}")
