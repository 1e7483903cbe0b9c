"""A loaded model as a part of other programs: it can be copied and pickled, so that each thread or process has its own, and takes numbers of numpy."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import pytest

import overnight
from overnight.config import BertRun
from overnight.inference.model import Model

TEXTS = ["An integer.", "The string literal of a class. " * 9, "a [SEP] b"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_answers_as_the_model_does_bit_for_bit(precision: str, trained_run: BertRun) -> None:
    model = overnight.load(trained_run.run_dir, precision=precision)
    marked = "The [SEP] of a [MASK]."  # a mark that is text here, which a copied tokenizer forgets
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        assert np.array_equal(same.embed(TEXTS), model.embed(TEXTS)) and same.fill(marked) == model.fill(marked)


def test_a_layer_may_be_a_number_of_numpy(trained_run: BertRun) -> None:
    model = overnight.load(trained_run.run_dir)
    for layer in np.arange(-2, 2):
        assert np.array_equal(model.embed(TEXTS, layer=layer), model.embed(TEXTS, layer=int(layer)))


def test_threads_that_have_a_copy_each_answer_at_once(trained_run: BertRun) -> None:
    model = overnight.load(trained_run.run_dir)
    expected, copies = model.embed(TEXTS, layer=0), [copy.deepcopy(model) for _ in range(4)]

    def ask(own: Model, layer: int) -> bool:
        return all(np.array_equal(own.embed(TEXTS, layer=layer), expected) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, copies, repeat(0)))
