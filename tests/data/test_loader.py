import itertools
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.conftest import MakeShards
from tests.processes import ProcessPool
from tests.test_trainer import LOSS, VALIDATION, curve, records, settings, train
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.batch import IGNORE_INDEX
from torchtitan_diloco.data.loader import (
    Stream,
    TrainLoader,
    ValidationBatches,
    sequence_indices,
)
from torchtitan_diloco.data.mixture import Indices, Segment
from torchtitan_diloco.data.shards import SPLITS, TokenShards, _map_shard, find_damage

LENGTH = 10  # 1000 tokens: 99 sequences, which no batch size below divides


@pytest.fixture
def shards(make_shards: MakeShards) -> TokenShards:
    return TokenShards(make_shards(), "train")


def build(shards: TokenShards, **changes: Any) -> TrainLoader:
    settings = {"batch_size": 2, "accumulation": 1, "rank": 0, "ranks": 1, "seed": 0}
    settings |= {"sequence_length": LENGTH, "shuffle": True, "prefetch": 0}
    segments = [Segment(0, {"text": 1.0})]
    return TrainLoader({"text": shards}, segments=segments, **(settings | changes))


def take(loader: TrainLoader, batches: int) -> list[list[int]]:
    """Return the numbers of the sequences in each batch, after checking what the batches hold."""
    numbers = []
    for inputs, targets in itertools.islice(loader, batches):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (inputs.shape[0], LENGTH)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        numbers.append([number_of(*pair) for pair in zip(inputs, targets, strict=True)])
    assert len(numbers) == batches
    return numbers


def number_of(inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Token i of the test corpus is i % 251, so ten tokens say where they are from."""
    first = next(i for i in range(0, 1000, LENGTH) if i % 251 == inputs[0])
    assert [i % 251 for i in range(first, first + LENGTH)] == inputs.tolist()
    assert [i % 251 for i in range(first + 1, first + LENGTH + 1)] == targets.tolist()
    return first // LENGTH


def flat(loader: TrainLoader, batches: int) -> list[int]:
    return list(itertools.chain(*take(loader, batches)))


@pytest.mark.parametrize(
    ("ranks", "accumulation", "batch_size"), [(4, 1, 3), (1, 12, 1), (3, 2, 2)]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_of_a_step_do_not_depend_on_who_shares_it(
    shards: TokenShards, ranks: int, accumulation: int, batch_size: int, shuffle: bool
) -> None:
    steps = 20  # 240 samples: three epochs
    alone = take(build(shards, accumulation=4, batch_size=3, shuffle=shuffle), 4 * steps)
    layout = {"accumulation": accumulation, "batch_size": batch_size, "shuffle": shuffle}
    shared = [
        take(build(shards, ranks=ranks, rank=rank, **layout), accumulation * steps)
        for rank in range(ranks)
    ]
    for step in range(steps):
        mine = slice(accumulation * step, accumulation * (step + 1))
        found = list(itertools.chain(*(batch for rank in shared for batch in rank[mine])))
        assert found == list(itertools.chain(*alone[4 * step : 4 * step + 4]))


# 99 sequences: an epoch ends within step 17
@pytest.mark.parametrize(("prefetch", "steps"), [(0, 17), (1, 0), (5, 17)])
def test_resumed_is_uninterrupted(shards: TokenShards, prefetch: int, steps: int) -> None:
    """A position is that of a step's beginning. Reading ahead does not move it."""
    torch.manual_seed(0)
    random_state = torch.get_rng_state()
    settings = {"accumulation": 3, "ranks": 2, "rank": 1}
    whole = take(build(shards, **settings), 3 * steps + 8)
    first = build(shards, prefetch=prefetch, **settings)
    seen = take(first, 3 * steps)
    assert first.position == 12 * steps
    assert seen + take(first, 1) == whole[: 3 * steps + 1], "iterating again continues"
    assert first.position == 12 * steps, "within the step"
    second = build(shards, prefetch=5 - prefetch, start=first.position, **settings)
    assert second.position == first.position
    assert take(second, 8) == whole[3 * steps :]
    assert torch.equal(torch.get_rng_state(), random_state), "the run's own random numbers"


def test_the_thread_that_reads_ahead_ends_with_the_iteration(shards: TokenShards) -> None:
    before = threading.active_count()
    batches = iter(build(shards, prefetch=3))
    next(batches)
    assert threading.active_count() == before + 1
    del batches
    assert threading.active_count() == before


def test_an_error_of_the_thread_that_reads_ahead_is_raised(shards: TokenShards) -> None:
    damaged = UserError("a shard is damaged")
    with (
        patch.object(TokenShards, "read", side_effect=damaged),
        pytest.raises(UserError, match="a shard is damaged"),
    ):
        next(iter(build(shards, prefetch=3)))


def test_training_reads_only_its_own_sequences(text: Path, make_shards: MakeShards) -> None:
    """All other tokens of the corpus may be damaged, which `doctor --corpus` finds."""
    folder = make_shards(train=20_000, validation=2000, shard_tokens=5000)
    ranges = dict[Any, Any]()
    whole = TokenShards.read

    def read(shards: TokenShards, start: int, stop: int) -> Any:
        ranges.setdefault(shards.name.split()[1], []).append((start, stop))
        return whole(shards, start, stop)

    def losses(name: str) -> list[list[float]]:
        found = train(settings(text, data__corpus=folder, run__folder=text.parent / name))
        return [curve(found, key) for key in (LOSS, VALIDATION)]

    with patch.object(TokenShards, "read", read):
        expected = losses("whole")
    for split in SPLITS:
        first = 0
        for file in sorted(folder.glob(f"{split}-*")):
            tokens = np.fromfile(file, "<u2")
            damaged = np.full_like(tokens, 2**16 - 1)
            for start, stop in (np.array(one) - first for one in ranges[split]):
                inside = slice(max(start, 0), max(stop, 0))
                damaged[inside] = tokens[inside]
            damaged.tofile(file)
            first += len(tokens)
    _map_shard.cache_clear()
    assert losses("damaged") == expected
    assert len(find_damage(folder)[1]) == 5


def test_what_cannot_be_read_is_refused(shards: TokenShards, make_shards: MakeShards) -> None:
    short = TokenShards(make_shards("short", train=10, validation=10), "train")
    message = r"train split of .*short is shorter than one sequence: it has 10 tokens, .* 11"
    with pytest.raises(ValueError, match=message):
        build(short)
    one = TokenShards(make_shards("one", train=11), "train")
    assert take(build(one), 3) == [[0, 0]] * 3
    message = r'for each of 100 workers \(data\.shard_by = "random"\): .* needs 1001'
    for worker in (0, 99):  # all see it
        with pytest.raises(ValueError, match=message):
            build(shards, stream=Stream(worker, 100))


# --- streams --------------------------------------------------------------------------------------


def test_streams_take_turns_in_one_order(shards: TokenShards) -> None:
    """Three streams, in turns of four samples, read what one reader of them all reads."""
    whole = flat(build(shards), 60)
    turns = [whole[start : start + 4] for start in range(0, 120, 4)]
    for number in range(3):
        found = flat(build(shards, stream=Stream(number, 3, block=4)), 20)
        assert found == list(itertools.chain(*turns[number::3]))


@pytest.mark.parametrize("block", [0, 4])
def test_a_stream_that_is_added_reads_in_an_order_of_its_own(
    shards: TokenShards, block: int
) -> None:
    """Number 4 of 3 reads all that it can, in an order that none of the others has."""
    orders = [flat(build(shards, stream=Stream(number, 3, block=block)), 60) for number in range(5)]
    if block == 0:
        assert set(orders[4]) == set(orders[1])
    assert len({tuple(order) for order in orders}) == 5
    assert len(set(orders[4])) > 30


@pytest.mark.parametrize(("block", "prefetch"), [(4, 0), (4, 3), (0, 3)])
def test_streams_enter_a_segment_at_positions_of_their_own(
    make_shards: MakeShards, block: int, prefetch: int
) -> None:
    """No sequence is read twice, whether the position is known from the start or not."""
    corpora = {name: TokenShards(make_shards(name, train=2000), "train") for name in "ab"}
    segments = [Segment(0, {"a": 3.0, "b": 1.0}), Segment(0, {"b": 1.0})]

    class Places:
        """Returns what is read in place of its tokens."""

        def __init__(self, readers: Any) -> None:
            self.readers = readers

        def __getitem__(self, places: Indices) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.from_numpy(places), torch.from_numpy(places)

    def loader(number: int, *chosen: Segment) -> TrainLoader:
        layout: dict[str, Any] = {"sequence_length": LENGTH, "batch_size": 2, "accumulation": 2}
        single: dict[str, Any] = {
            "rank": 0,
            "ranks": 1,
            "seed": 0,
            "shuffle": True,
            "prefetch": prefetch,
        }
        stream = Stream(number, 2, block=block)
        found = TrainLoader(
            corpora, segments=chosen, stream=stream, own_turns=True, **layout, **single
        )
        found._reader = Places(found._reader.readers)  # type: ignore[assignment]
        return found

    def read(found: TrainLoader, batches: int) -> list[tuple[int, int]]:
        taken = itertools.islice(iter(found), batches)
        return [tuple(place) for places, _ in taken for place in places.tolist()]

    whole = list[tuple[int, int]]()
    for number, steps in ((0, 6), (1, 11)):
        entering = loader(number, segments[0])
        batches = iter(entering)
        places = [tuple(one) for _ in range(2 * steps) for one in next(batches)[0].tolist()]
        assert Counter(corpus for corpus, _ in places) == {0: 3 * steps, 1: steps}
        later = replace(segments[1], start=entering.position)
        entering.enter(later)
        after = [tuple(one) for _ in range(20) for one in next(batches)[0].tolist()]
        del batches
        assert {corpus for corpus, _ in after} == {1}
        assert entering.segment.start == later.start == 4 * steps
        assert read(loader(number, segments[0], later), 2 * steps + 20) == places + after
        whole += places + after
    if block:
        assert len(set(whole)) == len(whole)


def test_each_worker_has_a_fixed_random_part(shards: TokenShards) -> None:
    workers = 4
    each = 24
    parts = []
    for worker in range(workers):
        settings: dict[str, Any] = {"batch_size": 1, "stream": Stream(worker, workers)}
        order = flat(build(shards, **settings), 3 * each)
        epochs = [order[start : start + each] for start in range(0, 3 * each, each)]
        part = set(epochs[0])
        assert all(set(epoch) == part for epoch in epochs), "the same sequences in each epoch"
        assert len(part) == each, "each of them once"
        assert epochs[0] != epochs[1], "in another order"
        assert set(flat(build(shards, **settings, seed=1), each)) == part
        parts.append(part)
        # Its ranks share its order, and a position continues in it.
        ranks = [build(shards, **settings, rank=rank, ranks=3) for rank in range(3)]
        shared = list(itertools.chain(*zip(*(flat(one, each // 3) for one in ranks), strict=True)))
        again = build(shards, **settings, start=ranks[0].position)
        assert shared + flat(again, each) == order[: len(shared) + each]
    assert len(set.union(*parts)) == workers * each, "no two workers share a sequence"
    assert all(max(part) - min(part) > 60 for part in parts), "from all over the corpus"


def test_a_run_with_parts_of_the_data_is_resumed(text: Path, processes: ProcessPool) -> None:
    streaming = {"diloco.method": "streaming", "diloco.workers": 2, "diloco.sync_every": 2}

    def losses(name: str, *stops: int, shard_by: str = "random") -> list[float]:
        folder = text.parent / name
        for stop in stops:
            changes = {"data.shard_by": shard_by, "training.stop_after": stop}
            changes |= {"run.folder": folder, "checkpoint.at_end": stop == 3}
            run = settings(text, **streaming, **changes)
            processes.run(train, 2, {key: value.lower() for key, value in run.items()})
        return curve(records(folder), LOSS)

    whole = losses("whole", 8)
    assert losses("resumed", 3, 8) == whole != losses("shared", 8, shard_by="none")


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("batch_size", "sequences"), [(1, 1), (2, 7), (8, 1000)])
def test_validation_counts_everything_once(
    make_shards: MakeShards, ranks: int, batch_size: int, sequences: int
) -> None:
    layout = {"sequence_length": LENGTH, "batch_size": batch_size, "sequences": sequences}
    shards = TokenShards(make_shards(), "validation")  # 300 tokens: 29 sequences
    counted: Counter[int] = Counter()
    lengths = set()
    for rank in range(ranks):
        batches = ValidationBatches(shards, rank=rank, ranks=ranks, **layout)
        assert batches.sequences == min(sequences, 29)
        lengths.add(len(list(batches)))
        assert lengths == {len(batches)}
        for inputs, targets in batches:  # iterated a second time
            assert inputs.shape == targets.shape == (batch_size, LENGTH)
            assert inputs.min() >= 0, "an embedding must be able to look it up"
            for sequence, target in zip(inputs, targets, strict=True):
                if (target == IGNORE_INDEX).any():
                    assert (target == IGNORE_INDEX).all()
                else:
                    counted[number_of(sequence, target)] += 1
    count = min(sequences, 29)
    assert counted == {number * 29 // count: 1 for number in range(count)}, "spaced evenly"


# --- order ---------------------------------------------------------------------------------------


def epoch_order(sequences: int, epoch: int, seed: int = 0) -> Indices:
    positions = np.arange(epoch * sequences, (epoch + 1) * sequences)
    return sequence_indices(positions, sequences=sequences, seed=seed, shuffle=True)


@given(st.integers(1, 140) | st.integers(1, 5000), st.integers(0, 10**6), st.integers(0, 2**70))
def test_every_epoch_has_every_sequence_once(sequences: int, epoch: int, seed: int) -> None:
    assert np.array_equal(np.sort(epoch_order(sequences, epoch, seed)), np.arange(sequences))


@given(st.integers(1, 2**62), st.integers(0, 2**62), st.integers(0, 100))
def test_any_position_of_any_corpus_has_a_sequence(size: int, position: int, seed: int) -> None:
    (index,) = sequence_indices(np.array([position]), sequences=size, seed=seed, shuffle=True)
    assert 0 <= index < size


def test_order_is_frozen() -> None:
    """Saved runs continue with it: it may never change."""
    assert epoch_order(10, 0, seed=0).tolist() == [2, 5, 7, 4, 0, 6, 1, 3, 9, 8]
    assert epoch_order(10, 1, seed=0).tolist() == [0, 7, 3, 8, 6, 1, 2, 9, 5, 4]
