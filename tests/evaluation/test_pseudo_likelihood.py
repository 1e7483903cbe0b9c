"""A sentence's pseudo-log-likelihood is the sum over its masked tokens, ties count half, and an interrupted evaluation loses no paradigm."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from overnight.console import Line
from overnight.errors import DataError
from overnight.evaluation.blimp import Paradigm, ParadigmScore, read_blimp
from overnight.evaluation.pseudo_likelihood import pseudo_log_likelihoods, score_blimp, score_paradigm
from overnight.models.bert import BertForPretraining
from tests.evaluation.sample import TOKENS, TableLM, row, write_paradigms


def unigram(ids: Sequence[int], at: int) -> float:
    return -1.0 - 0.37 * ids[at]


def agreement(ids: Sequence[int], at: int) -> float:
    """Return a higher value for `sleeps` after `cat` than for any other pair of neighbors."""
    words = [TOKENS[i] for i in ids]
    return -0.5 if (words[at - 1], words[at]) == ("cat", "sleeps") else -3.0


def paradigms(folder: Path, rows: dict[str, list[dict[str, str]]]) -> list[Paradigm]:
    return read_blimp(write_paradigms(folder, rows))


def test_each_token_is_masked_once_and_the_terms_are_summed() -> None:
    model = TableLM(lambda ids, at: -(10.0 ** (at - 1)) * ids[at])
    ids = [[model.tokenizer.token_to_id(w) for w in text.split()] for text in ("the cat", "dogs bark the cat", "cat", "cat the")]
    found = pseudo_log_likelihoods(model, [np.array(i) for i in ids])
    assert found.tolist() == [-sum(10.0**n * token for n, token in enumerate(i)) for i in ids]
    cls, sep, mask = (model.vocabulary.cls, model.vocabulary.sep, model.vocabulary.mask)
    assert sorted(model.sequences) == sorted((cls, *i[:n], mask, *i[n + 1 :], sep) for i in ids for n in range(len(i)))


def test_pairs_with_known_answers_are_scored_right(tmp_path: Path) -> None:
    found = paradigms(
        tmp_path,
        {
            "a": [
                row("the cat sleeps", "the cat sleep"),  # won
                row("the cat sleep", "the cat sleeps"),  # lost
                row("the dog bark", "dog the bark"),  # as likely
                row("the zebra bark", "the quagga bark"),  # both [UNK]
            ]
        },
    )
    model = TableLM(agreement)
    assert score_paradigm(model, found[0], 0) == ParadigmScore("a", "morphology", "agreement", 4, wins=1, ties=2, indistinguishable=1)
    # Sentences that repeat, also as the same tokens, are scored once.
    assert len(model.sequences) == 3 * 5


def test_a_unigram_model_has_a_tie_for_every_pair_of_the_same_words(tmp_path: Path) -> None:
    rng, words = np.random.default_rng(0), ["the", "cat", "dogs", "bark", "sleeps", "dog", "."]
    pairs = [row(" ".join(words), " ".join(rng.permutation(words))) for _ in range(40)]
    found = paradigms(tmp_path, {"a": pairs})[0]
    for model in (TableLM(unigram), NoContext()):
        score = score_paradigm(model, found, 0)
        assert (score.pairs, score.wins, score.ties, score.accuracy) == (40, 0, 40, 0.5)
    assert score_paradigm(TableLM(agreement), found, 0).ties < 40


class NoContext(TableLM):
    """A network of ours whose head sees nothing: each hidden state is the norm's bias, so the logits are those of a unigram model."""

    def __init__(self) -> None:
        from overnight.config import BertConfig
        from overnight.evaluation.masked_lm import RunMaskedLM

        super().__init__(unigram)
        torch.manual_seed(0)
        self.model = BertForPretraining(
            BertConfig(num_layers=1, hidden_size=32, num_heads=2, max_position_embeddings=16), len(TOKENS)
        ).eval()
        torch.nn.init.zeros_(self.model.mlm.norm.weight)
        torch.nn.init.normal_(self.model.mlm.norm.bias)
        self.log_probabilities = RunMaskedLM.log_probabilities.__get__(self)  # type: ignore[method-assign]


def test_a_sentence_that_cannot_be_scored_is_named_with_its_line(tmp_path: Path) -> None:
    long, longest, none = (
        paradigms(tmp_path / name, {"a": [row("the", "cat"), row("dog", bad)]})[0]
        for name, bad in (("long", "the cat " * 6), ("longest", "the cat " * 5), ("none", "\u200b"))
    )
    assert score_paradigm(TableLM(unigram), longest, 0).pairs == 2
    with pytest.raises(DataError, match=r"a.jsonl:2: .* has 12 tokens, table takes 10"):
        score_paradigm(TableLM(unigram), long, 0)
    with pytest.raises(DataError, match=r"a.jsonl:2: the tokenizer of table makes no token of"):
        score_paradigm(TableLM(unigram), none, 0)


def many(folder: Path) -> list[Paradigm]:
    return paradigms(folder, {name: [row("the cat sleeps", f"the cat {word}")] * 2 for name, word in zip("abcd", TOKENS[5:], strict=False)})


def test_what_an_interrupted_evaluation_has_scored_is_not_scored_again(tmp_path: Path) -> None:
    found, whole, out = many(tmp_path / "blimp"), TableLM(agreement), io.StringIO()
    wanted = score_blimp(whole, found, 0, tmp_path / "whole", Line(io.StringIO()))

    class Cut(TableLM):
        def log_probabilities(self, batch):  # type: ignore[no-untyped-def]
            if len(self.sequences) > 10:
                raise KeyboardInterrupt
            return super().log_probabilities(batch)

    first, second = Cut(agreement), TableLM(agreement)
    with pytest.raises(KeyboardInterrupt):
        score_blimp(first, found, 0, tmp_path / "cut", Line(io.StringIO()))
    assert score_blimp(second, found, 0, tmp_path / "cut", Line(out)) == wanted
    assert 0 < len(second.sequences) < len(whole.sequences) and "2 paradigms of 4 are in" in out.getvalue()
    third = TableLM(agreement)
    assert score_blimp(third, found, 0, tmp_path / "cut", Line(io.StringIO())) == wanted and not third.sequences
    assert [p.read_bytes() for p in (tmp_path / "cut").iterdir()] == [p.read_bytes() for p in (tmp_path / "whole").iterdir()]


def test_scores_of_other_weights_pairs_or_precision_are_not_taken(tmp_path: Path) -> None:
    found = many(tmp_path / "blimp")
    score_blimp(TableLM(agreement), found, 0, tmp_path / "x", Line(io.StringIO()))
    for name, value in (("digest", "1" * 16), ("precision", "bf16")):
        other = TableLM(agreement)
        setattr(other, name, value)
        score_blimp(other, found, 0, tmp_path / "x", Line(io.StringIO()))
        assert other.sequences, name
    for pairs, count in ((found[1:], 0), (found, 1)):
        other = TableLM(agreement)
        score_blimp(other, pairs, count, tmp_path / "x", Line(io.StringIO()))
        assert other.sequences
    assert len(list((tmp_path / "x").iterdir())) == 5


def test_a_field_or_term_that_was_changed_since_is_that_of_the_files(tmp_path: Path) -> None:
    found = many(tmp_path / "blimp")
    before = score_blimp(TableLM(agreement), found, 0, tmp_path / "x", Line(io.StringIO()))
    changed = [replace(paradigm, field="syntax", term="islands") for paradigm in found]
    again = TableLM(agreement)
    after = score_blimp(again, changed, 0, tmp_path / "x", Line(io.StringIO()))
    assert after == [replace(score, field="syntax", term="islands") for score in before] and not again.sequences


def test_damaged_scores_are_made_anew_and_a_folder_that_cannot_be_written_only_warns(tmp_path: Path) -> None:
    found, out = many(tmp_path / "blimp"), io.StringIO()
    wanted = score_blimp(TableLM(agreement), found, 0, tmp_path / "x", Line(out))
    (kept,) = (tmp_path / "x").iterdir()
    tree = json.loads(kept.read_text())
    for text in (kept.read_text()[:-9], json.dumps({**tree, "scores": []})):
        kept.write_text(text)
        again = TableLM(agreement)
        assert score_blimp(again, found, 0, tmp_path / "x", Line(out)) == wanted and again.sequences
    assert out.getvalue().count("it is made anew") == 2
    (tmp_path / "file").write_text("")
    assert score_blimp(TableLM(agreement), found, 0, tmp_path / "file", Line(out)) == wanted
    assert out.getvalue().count("cannot be written (") == 1
