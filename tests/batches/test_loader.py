"""Batches of any step, cut in any way: the same samples, each once an epoch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from overnight.batches import loader, pairs
from overnight.batches.batch_size import batch_size, pad_to_multiple
from overnight.batches.loader import Samples
from overnight.batches.packing import IGNORED, Batch, StepBatches
from overnight.config import BatchWarmup, BertPhase
from overnight.corpus.shards import Shard
from overnight.errors import ConfigError, DataError
from tests.batches.corpus import book_like, shard, words

VOCABULARY = words()
SHARDS = [shard(book_like(seed, 12), f"train-0000{seed}.arrow") for seed in (1, 2, 3)]


def samples(cache: Path | None = None, shards: list[Shard] = SHARDS, seed: tuple[int, ...] = (7, 0, 0), **changes: object) -> Samples:
    phase = BertPhase(steps=100, global_batch_size=16, seq_len=64, micro_batch_size=4, max_predictions_per_seq=10)
    return Samples(shards, VOCABULARY, dataclasses.replace(phase, **changes), seed, cache)  # type: ignore[arg-type]


Sequence = tuple[bytes, ...]


def sequences(batch: Batch) -> list[Sequence]:
    """All that is known of each sequence with targets, to compare by content."""
    assert batch.predicted_M is not None
    real = batch.targets["mlm"] != IGNORED
    predicted, labels = batch.predicted_M[real], batch.targets["mlm"][real]
    found = []
    for i in range(len(batch.targets["nsp"]) if "nsp" in batch.targets else len(batch.lengths)):
        start, end = batch.starts[i : i + 2].tolist()
        here = (predicted >= start) & (predicted < end)
        parts = [batch.ids_N[start:end], batch.positions_N[start:end], batch.segments_N[start:end], predicted[here] - start, labels[here]]
        parts += [batch.targets["nsp"][i]] if "nsp" in batch.targets else []
        found.append(tuple(part.numpy().tobytes() for part in parts))
    return found


def of_steps(*steps: StepBatches) -> Counter[Sequence]:
    return Counter(sequence for step in steps for batch in step.micro for sequence in sequences(batch))


def equal(a: Batch, b: Batch) -> bool:
    return a.lengths == b.lengths and sequences(a) == sequences(b) and torch.equal(a.ids_N, b.ids_N)


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize("whole_word", [True, False])
def test_a_batch_is_what_its_plan_says(nsp: bool, whole_word: bool) -> None:
    stream = samples(nsp=nsp, whole_word=whole_word)
    epochs, numbers_in_epoch = stream.locate(np.arange(16))
    numbers, rows = stream.rows(epochs, numbers_in_epoch)
    batch = stream.batch(epochs, numbers_in_epoch, numbers, rows)
    assert batch.predicted_M is not None
    true = batch.ids_N.clone()
    true[batch.predicted_M] = batch.targets["mlm"]
    assert batch.starts.tolist() == [0, *np.cumsum(batch.lengths).tolist()] and len(true) == sum(batch.lengths)
    for i, (number, (a_start, a_end, b_start, b_end, is_random)) in enumerate(zip(numbers, rows, strict=True)):
        tokens, start, end = SHARDS[number].tokens, batch.starts[i], batch.starts[i + 1]
        a, b = tokens[a_start:a_end].tolist(), tokens[b_start:b_end].tolist()
        expected = [VOCABULARY.cls, *a, VOCABULARY.sep, *([*b, VOCABULARY.sep] if nsp else [])]
        assert true[start:end].tolist() == expected and len(expected) <= 64
        assert batch.positions_N[start:end].tolist() == list(range(len(expected)))
        assert batch.segments_N[start:end].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1 if nsp else 0)
        if nsp:
            assert batch.targets["nsp"][i] == is_random
    assert ("nsp" in batch.targets) == nsp


@pytest.mark.parametrize("step", [0, 11, 200])
def test_a_step_is_the_same_samples_however_it_is_cut(step: int, tmp_path: Path) -> None:
    whole = samples(tmp_path, micro_batch_size=16).step(step)
    assert len(whole.micro) == 1 and whole.sequences == 16
    for world in (1, 2, 4, 16):
        for micro_batch_size in (1, 2, 4, 16):
            shares = [samples(tmp_path, micro_batch_size=micro_batch_size).step(step, rank, world) for rank in range(world)]
            assert of_steps(*shares) == of_steps(whole)
            assert {len(share.micro) for share in shares} == {max(1, 16 // world // micro_batch_size)}
            assert {(share.tokens, share.sequences) for share in shares} == {(whole.tokens, 16)}
            assert sum(len(batch.ids_N) for share in shares for batch in share.micro) == whole.tokens
            totals = Counter[str]()
            for share in shares:
                totals.update(share.divisors())
            assert totals == whole.divisors()


def test_micro_batches_differ_by_at_most_the_longest_sequence() -> None:
    sizes = [len(batch.ids_N) for batch in samples().step(3).micro]
    assert max(sizes) - min(sizes) <= 64


@pytest.mark.parametrize(("batch", "world"), [(16, 3), (12, 5), (12, 2), (2, 4)])
def test_a_global_batch_that_cannot_be_cut_for_the_processes_is_refused(batch: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"global_batch_size = {batch}: cannot be split for {world} processes"):
        samples(global_batch_size=batch, micro_batch_size=4).step(0, 0, world)


def test_every_sample_comes_once_an_epoch_across_step_boundaries() -> None:
    stream = samples()
    bounds = stream.sizes(3 * stream.epoch_size())
    assert bounds[1] % 16, "the epoch must end within a step"
    epochs, numbers = stream.locate(np.arange(bounds[3]))
    for epoch in range(3):
        here = numbers[epochs == epoch]
        assert np.array_equal(np.sort(here), np.arange(bounds[epoch + 1] - bounds[epoch]))
        assert not np.array_equal(here, np.sort(here))
    steps = [stream.step(step) for step in range(int(bounds[1]) // 16 + 1)]
    content = of_steps(*steps)
    # Masks differ, so equal content would be the same sample twice.
    assert max(content.values()) == 1


GROWING = BatchWarmup(initial_batch_size=4, steps=30)


def test_every_sample_comes_once_and_in_order_while_the_batch_warms_up() -> None:
    growing, plain = samples(batch_warmup=GROWING), samples()
    steps = [growing.step(step) for step in range(40)]
    sizes = [step.sequences for step in steps]
    assert sizes == [batch_size(growing.phase, step) for step in range(40)] and (sizes[0], sizes[-1]) == (4, 16)
    total = sum(sizes)
    # The stream is the one without a warm-up, cut elsewhere: any number of whole steps is a beginning of it.
    assert total % 16 == 0 and of_steps(*steps) == of_steps(*(plain.step(step) for step in range(total // 16)))
    assert total > growing.epoch_size() and max(of_steps(*steps).values()) == 1


@pytest.mark.parametrize("step", [0, 7, 29, 30])
def test_a_warming_step_is_the_same_samples_however_it_is_cut(step: int, tmp_path: Path) -> None:
    whole = samples(tmp_path, micro_batch_size=16, batch_warmup=GROWING).step(step)
    assert len(whole.micro) == 1
    for world in (1, 2, 4):
        for micro_batch_size in (1, 2, 4, 16):
            shares = [
                samples(tmp_path, micro_batch_size=micro_batch_size, batch_warmup=GROWING).step(step, rank, world) for rank in range(world)
            ]
            assert of_steps(*shares) == of_steps(whole)
            assert len({len(batch.targets["nsp"]) for share in shares for batch in share.micro}) == 1
            assert {(share.tokens, share.sequences) for share in shares} == {(whole.tokens, whole.sequences)}


def test_a_warming_step_does_not_depend_on_the_steps_before() -> None:
    stream = samples(batch_warmup=GROWING)
    for step in (31, 3, 29, 0, 200, 12):
        fresh, used = samples(batch_warmup=GROWING).step(step), stream.step(step)
        assert all(equal(a, b) for a, b in zip(fresh.micro, used.micro, strict=True))


def test_what_is_passed_over_moves_where_a_warming_step_reads_and_not_how_much() -> None:
    growing, plain = samples(batch_warmup=GROWING), samples(global_batch_size=4, micro_batch_size=4)
    growing.passed_over = 12
    assert [growing.step(step).sequences for step in (0, 20)] == [batch_size(growing.phase, step) for step in (0, 20)]
    assert of_steps(*(growing.step(step) for step in range(12))) == of_steps(*(plain.step(step) for step in range(3, 17)))
    assert growing.provenance(0, 1, 0) == plain.provenance(3, 1, 0)


def test_each_epoch_has_other_pairs_order_and_masks() -> None:
    stream = samples()
    first, second = stream._load(0), stream._load(1)
    assert all(not np.array_equal(a[:5], b[:5]) for a, b in zip(first, second, strict=True))
    # Where only the epoch's number differs, the same row has another mask.
    numbers, rows = stream.rows(np.zeros(4, int), np.arange(4))
    a, b = (stream.batch(np.full(4, epoch), np.arange(4), numbers, rows) for epoch in (0, 1))
    assert not torch.equal(a.ids_N, b.ids_N)
    # Epochs of one size, so that only the key of the order differs.
    even = samples(nsp=False, short_seq_prob=0.0)
    size = even.epoch_size()
    orders = even.locate(np.arange(2 * size))[1].reshape(2, size)
    assert (orders[0] == orders[1]).mean() < 0.2


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    stream = samples()
    size = stream.epoch_size() // 16
    wanted = [0, size, size + 1, 3 * size, 2, 5 * size, 1]
    for step in wanted:
        fresh, used = samples().step(step), stream.step(step)
        assert all(equal(a, b) for a, b in zip(fresh.micro, used.micro, strict=True))


def test_seed_phase_and_split_each_make_another_stream() -> None:
    streams = [of_steps(samples(seed=seed).step(0)) for seed in ((7, 0, 0), (8, 0, 0), (7, 1, 0), (7, 0, 1))]
    assert all(not (a & b) for i, a in enumerate(streams) for b in streams[:i])


def test_validation_batches_are_the_same_every_time_and_at_most_an_epoch() -> None:
    stream = samples()
    held = stream.validation_steps(30)
    stream.step(50)
    assert of_steps(*held) == of_steps(*stream.validation_steps(30)) == of_steps(*samples(micro_batch_size=2).validation_steps(30))
    assert sum(step.sequences for step in held) == 30 and [step.sequences for step in held][:-1] == [4] * 7
    assert sum(step.tokens for step in held) == sum(len(step.micro[0].ids_N) for step in held)
    assert sum(step.sequences for step in stream.validation_steps(10**6)) == stream.epoch_size()


def test_a_corpus_without_a_document_is_refused() -> None:
    for shards in ([], [shard([])]):
        with pytest.raises(DataError, match="no example"):
            samples(shards=shards).step(0)


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize("pad_to_multiple", [64, 100, 256, 1024])
def test_a_filled_batch_has_constant_shapes_and_the_same_targets(nsp: bool, pad_to_multiple: int) -> None:
    stream = samples(nsp=nsp)
    shapes = set()
    for step in range(8):
        for plain, filled in zip(stream.step(step).micro, stream.step(step, pad_to_multiple=pad_to_multiple).micro, strict=True):
            assert filled.predicted_M is not None and plain.predicted_M is not None
            count, size = len(plain.ids_N), len(filled.ids_N)
            slots = -(-pad_to_multiple // 64) + 1
            assert size % pad_to_multiple == 0 and slots <= size - count < pad_to_multiple + slots
            assert min(filled.lengths) > 0 and filled.longest == 64 and len(filled.lengths) == len(plain.lengths) + slots
            assert torch.equal(filled.ids_N[:count], plain.ids_N)
            assert (filled.ids_N[count:] == VOCABULARY.pad).all()
            assert filled.starts[-1] == size == sum(filled.lengths) == len(filled.positions_N) == len(filled.segments_N)
            assert filled.starts.tolist() == [0, *np.cumsum(filled.lengths).tolist()] and max(filled.lengths) <= 64
            assert filled.lengths[: len(plain.lengths)] == plain.lengths
            expected = [np.arange(length) for length in filled.lengths]
            assert np.array_equal(filled.positions_N, np.concatenate(expected))
            real = filled.targets["mlm"] != IGNORED
            assert torch.equal(filled.predicted_M[real], plain.predicted_M)
            assert torch.equal(filled.targets["mlm"][real], plain.targets["mlm"])
            assert not nsp or torch.equal(filled.targets["nsp"], plain.targets["nsp"])
            shapes.add((size, len(filled.lengths), len(filled.predicted_M)))
    assert all(len({shape for shape in shapes if shape[0] == size}) == 1 for size, _, _ in shapes)


def test_the_cached_plan_equals_the_fresh_one_and_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [of_steps(samples().step(step)) for step in (0, 40)]
    assert [of_steps(samples(tmp_path).step(step)) for step in (0, 40)] == expected
    files = list(tmp_path.iterdir())
    assert len(files) % len(SHARDS) == 0 and all(path.suffix == ".npy" for path in files)
    monkeypatch.setattr(pairs, "plan_pairs", lambda *arguments: pytest.fail("the plan was made again"))
    assert [of_steps(samples(tmp_path).step(step)) for step in (0, 40)] == expected


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_header(path: Path) -> None:
    path.write_bytes(b"not numpy" * 9)


def damage_type(path: Path) -> None:
    np.save(path, np.zeros((3, 5), np.float64))


def damage_shape(path: Path) -> None:
    np.save(path, np.zeros((3, 4), np.int32))


def damage_pickle(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)


def damage_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])


@pytest.mark.parametrize("damage", [damage_bit, damage_cut, damage_empty, damage_header, damage_type, damage_shape, damage_pickle])
def test_a_damaged_cache_file_is_made_again(tmp_path: Path, damage: object) -> None:
    expected = of_steps(samples(tmp_path).step(0))
    for path in tmp_path.iterdir():
        damage(path)  # type: ignore[operator]
    assert of_steps(samples(tmp_path).step(0)) == expected
    assert all(np.load(path).dtype == np.int32 for path in tmp_path.iterdir())


def test_a_corpus_prepared_anew_with_as_many_tokens_does_not_read_the_old_plan(tmp_path: Path) -> None:
    old, new = shard([[10, 20, 30] * 5] * 6), shard([[30, 20, 10] * 5] * 6)
    assert old.name == new.name and len(old.tokens) == len(new.tokens)
    samples(tmp_path, [old]).step(0)
    assert of_steps(samples(tmp_path, [new]).step(0)) == of_steps(samples(shards=[new]).step(0))


@pytest.mark.parametrize("changes", [{"seq_len": 48}, {"nsp": False}, {"short_seq_prob": 0.5}])
def test_another_phase_does_not_read_the_plan(tmp_path: Path, changes: dict[str, object]) -> None:
    samples(tmp_path).step(0)
    assert of_steps(samples(tmp_path, **changes).step(0)) == of_steps(samples(**changes).step(0))  # type: ignore[arg-type]


def test_segments_do_not_read_the_plan_of_whole_sentences(tmp_path: Path) -> None:
    samples(tmp_path, nsp=False, whole_sentences=True).step(0)
    assert of_steps(samples(tmp_path, nsp=False).step(0)) == of_steps(samples(nsp=False).step(0))


def test_the_counters_of_plans_order_and_masks_are_distinct() -> None:
    assert len({loader._PLAN, loader._ORDER, loader._MASK, loader._MATCH}) == 4


@pytest.mark.parametrize("nsp", [True, False])
def test_the_longest_micro_batch_is_as_long_as_any_of_the_stream(nsp: bool) -> None:
    phase = BertPhase(
        steps=20, global_batch_size=16, seq_len=64, micro_batch_size=4, max_predictions_per_seq=20, nsp=nsp, short_seq_prob=0.0
    )
    stream = Samples([shard(book_like(1, 40), size=500)], words(500), phase, (0,))
    tried, fill = stream.longest(4), pad_to_multiple(phase, 4)
    micro = [batch for step in range(5) for batch in stream.step(step, pad_to_multiple=fill).micro]
    assert tried.lengths[:4] == (64,) * 4 and len(tried.ids_N) == max(len(batch.ids_N) for batch in micro)
    assert tried.predicted_M is not None and micro[0].predicted_M is not None
    assert len(tried.predicted_M) >= max(len(batch.predicted_M) for batch in micro if batch.predicted_M is not None)
    assert tried.longest == micro[0].longest and len(tried.lengths) == len(micro[0].lengths)
    assert ("nsp" in tried.targets) == nsp and np.all(tried.positions_N.numpy() < 64)


def test_of_a_corpus_shorter_than_a_sequence_the_longest_is_all() -> None:
    phase = BertPhase(steps=1, global_batch_size=4, seq_len=512)
    tokens = shard(book_like(1, 1), size=500)
    assert Samples([tokens], words(500), phase, (0,)).longest(2).lengths[0] == min(512, len(tokens.tokens) + 3)
