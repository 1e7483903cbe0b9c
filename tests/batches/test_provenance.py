"""Where samples come from may be asked while others are made: the loader works in a thread of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from overnight.batches.loader import Samples
from overnight.batches.packing import StepBatches
from overnight.batches.streams import Streams
from overnight.config import BytePhase
from overnight.corpus.shards import Shard
from tests.batches.test_loader import of_steps, samples


@pytest.fixture
def threads_that_switch_often() -> Iterator[None]:
    """After every microsecond, so that what two of them change at once shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def steps_while_provenance_is_asked(stream: Samples | Streams, steps: int, of_step: Callable[[StepBatches], object]) -> list[object]:
    """What the steps of a stream hold while another thread asks without a pause where they come from."""
    at, stopped = [0], threading.Event()

    def ask() -> None:
        while not stopped.is_set():
            for step in (max(at[0] - 1, 0), at[0] + 1):
                stream.provenance(step, 1, 0)

    asking = threading.Thread(target=ask)
    asking.start()
    found = []
    try:
        for step in range(steps):
            at[0] = step
            found.append(of_step(stream.step(step)))
    finally:
        stopped.set()
        asking.join()
    return found


@pytest.mark.usefixtures("threads_that_switch_often")
def test_asking_where_a_step_came_from_changes_no_step_that_is_made_meanwhile() -> None:
    steps, alone = 4 * (samples().epoch_size() // 16 + 1), samples()
    assert steps_while_provenance_is_asked(samples(), steps, of_steps) == [of_steps(alone.step(step)) for step in range(steps)]


@pytest.mark.usefixtures("threads_that_switch_often")
def test_asking_where_a_window_came_from_changes_no_window_that_is_made_meanwhile() -> None:
    text = np.random.default_rng(0).integers(0, 256, 96).astype(np.uint8)
    documents = Shard("train-00000", text, np.arange(0, 97, 8), np.arange(13))

    def streams() -> Streams:
        return Streams([documents], BytePhase(100, 4, seq_len=8, num_document_groups=4, micro_batch_size=4), (7, 0, 0))

    def windows(made: StepBatches) -> object:
        return [batch.ids_BT.tolist() for batch in made.micro]

    alone = streams()
    assert steps_while_provenance_is_asked(streams(), 200, windows) == [windows(alone.step(step)) for step in range(200)]
