import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.conftest import MakeShards
from torchtitan_diloco.data.loader import (
    IGNORE_INDEX,
    TrainLoader,
    build_train_loader,
    build_validation_batches,
)
from torchtitan_diloco.data.shards import TokenShards
from torchtitan_diloco.data.stream import Place, StreamIdentity

LENGTH = 10  # 1000 tokens: 99 sequences, which no batch size below divides


def build(shards: TokenShards, **changes: Any) -> TrainLoader:
    settings = {
        "sequence_length": LENGTH,
        "batch_size": 2,
        "accumulation": 1,
        "rank": 0,
        "ranks": 1,
        "seed": 0,
        "shuffle": True,
        "processes": 0,
    }
    return build_train_loader(shards, **(settings | changes))


def take(loader: TrainLoader, batches: int) -> list[list[int]]:
    """The numbers of the sequences in each batch, after checking that the batches hold exactly these sequences."""
    numbers = []
    for inputs, targets in itertools.islice(loader, batches):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (inputs.shape[0], LENGTH)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        numbers.append(
            [number_of(sequence, target) for sequence, target in zip(inputs, targets, strict=True)]
        )
    assert len(numbers) == batches
    return numbers


def number_of(inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Token i of the test corpus is i % 251, so ten tokens tell where they are from."""
    first = next(i for i in range(0, 1000, LENGTH) if i % 251 == inputs[0])
    assert [i % 251 for i in range(first, first + LENGTH)] == inputs.tolist()
    assert [i % 251 for i in range(first + 1, first + LENGTH + 1)] == targets.tolist()
    return first // LENGTH


@pytest.fixture
def shards(make_shards: MakeShards) -> TokenShards:
    return TokenShards(make_shards(), "train")


def test_without_shuffling_sequences_follow_one_another(shards: TokenShards) -> None:
    flat = list(itertools.chain(*take(build(shards, shuffle=False), 60)))
    assert flat == [*range(99), *range(21)]


def test_an_epoch_has_every_sequence_once_and_the_next_another_order(shards: TokenShards) -> None:
    flat = list(itertools.chain(*take(build(shards), 99)))
    assert sorted(flat[:99]) == sorted(flat[99:]) == list(range(99))
    assert flat[:99] != flat[99:]
    assert flat != list(itertools.chain(*take(build(shards, seed=1), 99)))


@pytest.mark.parametrize(
    ("ranks", "accumulation", "batch_size"), [(4, 1, 3), (2, 2, 3), (1, 12, 1), (3, 2, 2)]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_of_a_step_do_not_depend_on_who_shares_it(
    shards: TokenShards, ranks: int, accumulation: int, batch_size: int, shuffle: bool
) -> None:
    steps = 20  # 240 samples: three epochs
    alone = take(build(shards, accumulation=4, batch_size=3, shuffle=shuffle), 4 * steps)
    shared = [
        take(
            build(
                shards,
                ranks=ranks,
                rank=rank,
                accumulation=accumulation,
                batch_size=batch_size,
                shuffle=shuffle,
            ),
            accumulation * steps,
        )
        for rank in range(ranks)
    ]
    for step in range(steps):
        expected = list(itertools.chain(*alone[4 * step : 4 * step + 4]))
        mine = slice(accumulation * step, accumulation * step + accumulation)
        assert (
            list(itertools.chain(*(batch for rank in shared for batch in rank[mine]))) == expected
        )


def test_it_is_a_stateful_data_loader(shards: TokenShards) -> None:
    assert isinstance(build(shards), StatefulDataLoader)


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize(
    "saved_at", [0, 1, 5, 49, 50, 51, 99]
)  # 99 sequences: an epoch ends within batch 50
def test_resumed_is_uninterrupted(shards: TokenShards, processes: int, saved_at: int) -> None:
    settings = {"accumulation": 3, "ranks": 2, "rank": 1, "processes": processes}
    whole = take(build(shards, **settings | {"processes": 0}), saved_at + 8)
    first = build(shards, **settings)
    assert take(first, saved_at) == whole[:saved_at]
    state = first.state_dict()
    assert first.state_dict() == state, "saving changes nothing"
    second = build(shards, **settings)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert take(second, 8) == whole[saved_at:]


def test_state_saved_on_the_way_does_not_disturb_the_stream(shards: TokenShards) -> None:
    loader, states, seen = build(shards, processes=1), [], []
    iterator = iter(loader)
    for _ in range(6):
        states.append(loader.state_dict())
        inputs, targets = next(iterator)
        seen.append([number_of(*pair) for pair in zip(inputs, targets, strict=True)])
    assert seen == take(build(shards), 6)
    for batch, state in enumerate(states):
        resumed = build(shards)
        resumed.load_state_dict(state)
        assert take(resumed, 1) == [seen[batch]]


def test_resume_twice_and_with_another_number_of_processes(shards: TokenShards) -> None:
    whole = take(build(shards, accumulation=2), 12)
    state = None
    seen = []
    for processes in (2, 0, 1, 0):
        loader = build(shards, accumulation=2, processes=processes)
        if state is not None:
            loader.load_state_dict(state)
        seen += take(loader, 3)
        state = loader.state_dict()
    assert seen == whole


@given(
    st.integers(0, 120), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9)
)
def test_resume_property(
    saved_at: int, accumulation: int, ranks: int, batch_size: int, more: int
) -> None:
    stream = StreamIdentity("corpus", LENGTH, batch_size, accumulation, ranks, 0, True)
    place = Place(7).after(saved_at, stream)
    assert place.after(more, stream) == Place(7).after(saved_at + more, stream)
    for rank in range(ranks):
        whole = Place(7).positions(saved_at + more, stream, rank)
        assert place.positions(more, stream, rank).tolist() == whole[saved_at:].tolist()


def test_iterating_again_goes_on(shards: TokenShards) -> None:
    whole, loader = take(build(shards), 6), build(shards, processes=1)
    assert take(loader, 4) + take(loader, 2) == whole


def test_outdated_iterator_is_refused(shards: TokenShards) -> None:
    loader = build(shards)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(
        RuntimeError, match=r"this iterator is out of date.*take iter\(loader\) again"
    ):
        next(iterator)


def test_start_at_a_global_position(shards: TokenShards) -> None:
    flat = list(itertools.chain(*take(build(shards), 40)))
    assert list(itertools.chain(*take(build(shards, start=24, batch_size=4), 14))) == flat[24:]


def test_position_goes_from_one_layout_to_another(shards: TokenShards) -> None:
    expected = list(itertools.chain(*take(build(shards), 12)))
    before = build(shards, batch_size=4, accumulation=2)
    seen = list(itertools.chain(*take(before, 4)))
    assert before.position == 16
    after = [
        build(shards, ranks=2, rank=rank, batch_size=4, start=before.position) for rank in range(2)
    ]
    assert seen + [number for rank in after for number in take(rank, 1)[0]] == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "run.seed was 0 and is 1"),
        ({"sequence_length": 11}, "training.sequence_length was 10 and is 11"),
        ({"batch_size": 3}, "training.batch_size was 2 and is 3"),
        (
            {"accumulation": 2},
            r"micro-batches per step and rank \(from training.global_batch_size\) was 1 and is 2",
        ),
        ({"ranks": 2}, "the number of ranks was 1 and is 2"),
        ({"shuffle": False}, "data.shuffle was True and is False"),
        ({"seed": 1, "ranks": 2}, "the number of ranks was 1 and is 2; run.seed was 0 and is 1"),
    ],
)
def test_state_of_another_stream_is_refused(
    shards: TokenShards, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"another stream of training data: {named}. Resume with the settings"
    ):
        build(shards, **changes).load_state_dict(build(shards).state_dict())


def test_state_of_another_corpus_is_refused(shards: TokenShards, make_shards: MakeShards) -> None:
    other = TokenShards(make_shards("other", train=900), "train")
    named = f"the fingerprint of the corpus was {shards.fingerprint} and is {other.fingerprint}"
    with pytest.raises(ValueError, match=named):
        build(other).load_state_dict(build(shards).state_dict())


def test_state_of_something_else_is_refused(shards: TokenShards) -> None:
    with pytest.raises(
        ValueError, match=r"this is no state of the training data: it has no corpus, "
    ):
        build(shards).load_state_dict({"seed": 0})


def test_random_numbers_of_the_run_stay_as_they_were(shards: TokenShards) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(build(shards), 3)
    take(build(shards, processes=1), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_corpus_shorter_than_a_sequence(make_shards: MakeShards) -> None:
    shards = TokenShards(make_shards("short", train=10), "train")
    with pytest.raises(
        ValueError,
        match=r"train split of .*short is shorter than one sequence: it has 10 tokens, .* 11",
    ):
        build(shards)
    one = TokenShards(make_shards("one", train=11), "train")
    assert take(build(one), 3) == [[0, 0]] * 3


def test_damaged_token_is_an_error_also_from_a_reading_process(make_shards: MakeShards) -> None:
    folder = make_shards()
    path = folder / "train-00002.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:140] + b"\xff\xff" + content[142:])
    with pytest.raises(ValueError, match=r"train-00002\.tokens is damaged: token 6 is 65535"):
        take(build(TokenShards(folder, "train"), processes=1), 50)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("batch_size", "sequences"), [(1, 1), (2, 7), (4, 16), (3, 29), (8, 1000)])
def test_validation_counts_everything_once(
    make_shards: MakeShards, ranks: int, batch_size: int, sequences: int
) -> None:
    shards = TokenShards(make_shards(), "validation")  # 300 tokens: 29 sequences
    counted: Counter[int] = Counter()
    lengths = set()
    for rank in range(ranks):
        batches = build_validation_batches(
            shards,
            sequence_length=LENGTH,
            batch_size=batch_size,
            rank=rank,
            ranks=ranks,
            sequences=sequences,
        )
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
    assert counted == dict.fromkeys(range(min(sequences, 29)), 1)


def test_validation_shorter_than_a_sequence(make_shards: MakeShards) -> None:
    shards = TokenShards(make_shards(validation=10), "validation")
    with pytest.raises(
        ValueError,
        match=r"validation split .*it has 10 tokens, .*a larger data\.validation_fraction or",
    ):
        build_validation_batches(
            shards, sequence_length=LENGTH, batch_size=1, rank=0, ranks=1, sequences=5
        )
