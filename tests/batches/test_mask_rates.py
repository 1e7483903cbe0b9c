"""Batches of a mask rate that changes from step to step, and plans that are read by many threads."""

from __future__ import annotations

import ast
import contextlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from overnight.batches import loader
from overnight.batches.batch_size import pad_to_multiple
from overnight.batches.packing import IGNORED
from tests.batches.test_loader import SHARDS, of_steps, samples


def test_at_a_lower_rate_fewer_of_the_same_tokens_are_predicted_and_there_is_less_room() -> None:
    stream = samples(mlm_probability=0.4, max_predictions_per_seq=0)
    multiple = pad_to_multiple(stream.phase, 4)
    whole = stream.step(3, pad_to_multiple=multiple)
    assert of_steps(stream.step(3, pad_to_multiple=multiple)) == of_steps(whole)
    stream.set_mask_rate(lambda step: 0.17 if step == 3 else 0.4)
    less = stream.step(3, pad_to_multiple=multiple)
    assert less.sizes is not None and whole.sizes is not None
    assert 0.35 < less.sizes.predicted / whole.sizes.predicted < 0.5 and less.tokens == whole.tokens
    for few, many in zip(less.micro, whole.micro, strict=True):
        assert few.predicted_M is not None and many.predicted_M is not None
        chosen = [set(batch.predicted_M[batch.targets["mlm"] != IGNORED].tolist()) for batch in (few, many)]
        assert chosen[0] < chosen[1], "they are drawn in one order"
        # Room for 20 % instead of 40 %.
        assert 0.45 < len(few.predicted_M) / len(many.predicted_M) < 0.6
    assert of_steps(stream.step(4, pad_to_multiple=multiple)) == of_steps(
        samples(mlm_probability=0.4, max_predictions_per_seq=0).step(4, pad_to_multiple=multiple)
    )


def test_a_run_that_resumes_in_a_later_epoch_looks_at_the_plans_of_that_one_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = samples(tmp_path)
    far = int(first.sizes(4 * first.epoch_size())[4]) // 16 + 1
    expected, made = of_steps(first.step(far)), []
    real = loader.pairs.plan_pairs
    monkeypatch.setattr(loader.pairs, "plan_pairs", lambda *given: made.append(given) or real(*given))
    monkeypatch.setattr(loader, "kept_array", lambda path, real=loader.kept_array: kept.append(path) or real(path))
    kept: list[Path] = []
    assert of_steps(samples(tmp_path).step(far)) == expected and not made
    # The sizes of five epochs or six, and the plans of one or two.
    assert len([path for path in kept if len(np.load(path)) > 1 or np.load(path).ndim > 1]) in (len(SHARDS), 2 * len(SHARDS))


def test_many_threads_read_kept_plans_while_others_parse_python(tmp_path: Path) -> None:
    """The state of CPython's parser is one for all threads: np.load, which parses a header, fails in some of them."""
    samples(tmp_path).epoch_size()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # 50 times as many turns, so that they meet sooner
    done = threading.Event()

    def parse() -> None:
        while not done.is_set():
            with contextlib.suppress(SystemError):
                ast.parse("[(1, 2), {'a': (3, 4)}]", mode="eval")

    threads = [threading.Thread(target=parse) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            again = samples(tmp_path)
            again.rows(np.zeros(1, np.int64), np.zeros(1, np.int64))
    finally:
        sys.setswitchinterval(interval)
        done.set()
        for thread in threads:
            thread.join()
