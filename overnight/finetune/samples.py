"""What a finished run shows of itself: words filled in, or text continued, on validation documents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from overnight.checkpoint import reader
from overnight.config import BertRun, Run
from overnight.corpus.shards import Manifest, Shard, load_manifest, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_tokenizer, load_vocabulary
from overnight.errors import DataError
from overnight.finetune.predict import predict
from overnight.run_dir.atomic import write_json
from overnight.state_files import read_mapping, sealed

SENTENCES, GUESSES = 5, 3
# Tokens of a sentence that is shown: enough to guess from, and still one line or two.
_SHORTEST, _LONGEST = 8, 26
# Letters of a word that is masked: shorter ones are mostly given by grammar.
_LETTERS = 4
# Sentences drawn at most before fewer are shown.
_DRAWS = 2000
PROMPTS, _PROMPT_BYTES, _WRITTEN_BYTES, _TEMPERATURE = 2, 60, 120, 0.7


def write_samples(run: Run) -> None:
    """Write `samples.json` into the folder of a run whose pretraining is done, unless it is there for the newest checkpoint.

    It holds `checkpoint` (name), `parameters`, `corpus` (see :func:`corpus_facts`), for BERT `masks` and for a byte model `texts`. What is shown is
    drawn by the seed of the run, never chosen by how good it is.

    Raises:
        DataError: when there is no checkpoint, or the prepared data cannot be read.
    """
    place, path = reader.newest_checkpoint(run.run_dir / "checkpoints"), run.run_dir / "samples.json"
    if place is None or _checkpoint_of(path) == place.name:
        return
    found: dict[str, Any] = {
        "checkpoint": place.name,
        "parameters": _parameters(place),
        "corpus": corpus_facts(load_manifest(run.data_dir)),
    }
    found |= {"masks": filled_masks(run)} if isinstance(run, BertRun) else {"texts": continued_texts(run)}
    write_json(path, sealed(found))


def _checkpoint_of(path: Path) -> str | None:
    try:
        return str(read_mapping(path, "delete it, and it is made again").get("checkpoint"))
    except DataError:  # not there, or damaged: all of it can be made again
        return None


def _parameters(place: Path) -> int:
    with safe_open(place / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def corpus_facts(manifest: Manifest) -> dict[str, Any]:
    """Return what a prepared corpus holds: `vocabulary` (tokens), and `documents` and `tokens` of each split that is not empty."""
    splits = dict.fromkeys(shard.split for shard in manifest.shards)
    counts = {split: {what: manifest.count(split, what) for what in ("documents", "tokens")} for split in splits}
    return {"vocabulary": manifest.vocab_size, **{split: found for split, found in counts.items() if found["documents"]}}


def filled_masks(run: BertRun) -> list[dict[str, Any]]:
    """Mask a word in each of a few validation sentences and let the pretrained model guess it.

    Returns:
        For each: `text` with `[MASK]`, the right `word`, and the best `guesses`, each a `token` and its `probability`. Fewer, or none, where the
        validation documents have no plain sentences.
    """
    tokenizer, vocabulary = load_tokenizer(run.data_dir), load_vocabulary(run.data_dir)
    tokens = [tokenizer.id_to_token(i) or "" for i in range(vocabulary.size)]
    letters = np.array([len(token) if token.isalpha() else 0 for token in tokens])
    questions = []
    for token_ids, at in islice(_maskable(open_shards(run.data_dir, "valid", verify=False), vocabulary, letters, run.seed), SENTENCES):
        before, after = (tokenizer.decode(part.tolist()) for part in (token_ids[:at], token_ids[at + 1 :]))
        text = re.sub(r"(?<=\[MASK\]) (?=[.,;:?!])", "", f"{before} [MASK] {after}".strip())
        questions.append({"text": text, "word": tokens[token_ids[at]]})
    answers = predict(run, "mask", [json.dumps({"text": question["text"]}) for question in questions])
    return [{**question, "guesses": answer["masks"][0][:GUESSES]} for question, answer in zip(questions, answers, strict=True)]


def _maskable(shards: list[Shard], vocabulary: Vocabulary, letters: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield different sentences of different documents in an order drawn by the seed, each with the place of a word that is one token.

    Args:
        letters: int [V], letters of each token, 0 where it is no word or the beginning of one.
    """
    chance, seen, said = np.random.default_rng(seed), set(), set()
    starts = np.cumsum([0, *(len(shard.sentence_starts) - 1 for shard in shards)])
    for _ in range(_DRAWS if starts[-1] else 0):
        number = int(chance.integers(starts[-1]))
        which = int(np.searchsorted(starts, number, "right")) - 1
        shard, sentence = shards[which], number - int(starts[which])
        tokens = np.asarray(shard.tokens[shard.sentence_starts[sentence] : shard.sentence_starts[sentence + 1]]).astype(np.int64)
        document = (which, int(np.searchsorted(shard.document_sentences, sentence, "right")))
        if document in seen or not _SHORTEST <= len(tokens) <= _LONGEST or vocabulary.is_special[tokens].any():
            continue
        inside = np.append(vocabulary.continuation[tokens], False)
        whole = (letters[tokens] >= _LETTERS) & ~inside[1:]
        if whole.any() and (letters[tokens] > 0).mean() > 0.7 and tokens.tobytes() not in said:  # prose, not a table or a formula
            seen.add(document)
            said.add(tokens.tobytes())
            yield tokens, int(chance.choice(np.flatnonzero(whole)))


def continued_texts(run: Run) -> list[dict[str, str]]:
    """Let a byte model continue the beginnings of a few validation documents; return each `prompt` and the `text` that follows."""
    from overnight.byte_lm.generate import generate
    from overnight.interop.byte_models import ready_model

    chance = np.random.default_rng(run.seed)
    beginnings = [
        (shard, int(at)) for shard in open_shards(run.data_dir, "valid", verify=False) for at in shard.sentence_starts[:-1]
    ]  # bytes: a document is one sentence
    chosen = sorted(chance.permutation(len(beginnings))[:PROMPTS].tolist())
    if not chosen:
        return []
    model, dtype = ready_model(run)
    found = []
    for number, (shard, at) in enumerate(beginnings[i] for i in chosen):
        end = shard.sentence_starts[np.searchsorted(shard.sentence_starts, at, "right")]
        head = bytes(np.asarray(shard.tokens[at : min(at + _PROMPT_BYTES, int(end))])).decode("utf-8", "ignore").strip()
        prompt = head.rsplit(" ", 1)[0]
        # Draws of its own, else all would go much the same way.
        parts = generate(model, prompt, _WRITTEN_BYTES, _TEMPERATURE, run.seed + number, None, dtype)
        found.append({"prompt": prompt, "text": "".join(parts)})
    return found
