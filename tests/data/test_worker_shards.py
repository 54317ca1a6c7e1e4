import dataclasses
import itertools
import json
import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.processes import ProcessPool
from tests.test_trainer import records, settings, train
from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.clusters import text_features
from torchtitan_diloco.data.loader import TrainLoader, build_train_loader
from torchtitan_diloco.data.shards import TokenShards
from torchtitan_diloco.data.splits import open_split
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.data.worker_shards import WorkerShards, document_ends, share_out

BYTES = build_tokenizer("bytes")
END = BYTES.end_of_document
LENGTH = 10
ShardBy = Literal["none", "random", "clusters"]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Sixty documents, a third of them in each of three alphabets, of 100 to 218 letters and an end."""
    random = np.random.default_rng(0)
    alphabets = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    texts = [
        "".join(random.choice(list(alphabets[number % 3]), 100 + 2 * number))
        for number in range(60)
    ]
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cache = str(tmp_path / "cache")
    return Data(
        corpus=str(corpus), validation_fraction=0.0, cache_folder=cache, shard_by="clusters"
    )


@pytest.fixture
def tokens(data: Data) -> TokenShards:
    return open_split(data, BYTES, "train")


def documents(tokens: list[int]) -> list[tuple[int, ...]]:
    """Cut behind each end of a document."""
    found: list[tuple[int, ...]] = []
    start = 0
    for stop in [place + 1 for place, token in enumerate(tokens) if token == END]:
        found.append(tuple(tokens[start:stop]))
        start = stop
    assert start == len(tokens)
    return found


def of_worker(shards: WorkerShards, worker: int) -> list[int]:
    tokens: list[int] = shards.parts[worker].read(0, len(shards.parts[worker])).tolist()
    return tokens


def loader(
    tokens: TokenShards, shards: WorkerShards, *, rank: int, ranks: int, start: int = 0, **more: int
) -> TrainLoader:
    settings: dict[str, Any] = {"batch_size": 2, "accumulation": 1, "processes": 0} | more
    return build_train_loader(
        tokens,
        sequence_length=LENGTH,
        rank=rank,
        ranks=ranks,
        seed=3,
        shuffle=True,
        start=start,
        worker_shards=shards,
        **settings,
    )


def sequences(reader: TrainLoader, batches: int) -> list[tuple[int, ...]]:
    """Inputs and the last target of each sequence."""
    found = []
    for inputs, targets in itertools.islice(reader, batches):
        found += [
            (*row.tolist(), int(target[-1])) for row, target in zip(inputs, targets, strict=True)
        ]
    return found


@pytest.mark.parametrize("shard_by", ["random", "clusters"])
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_shards_partition_the_documents(
    data: Data, tokens: TokenShards, shard_by: ShardBy, workers: int
) -> None:
    shards = share_out(dataclasses.replace(data, shard_by=shard_by), tokens, BYTES, workers)
    assert len(shards.parts) == workers
    apart = [documents(of_worker(shards, worker)) for worker in range(workers)]
    assert sorted(itertools.chain(*apart)) == sorted(
        documents(tokens.read(0, len(tokens)).tolist())
    )
    assert [part.documents for part in shards.parts] == [len(own) for own in apart]
    assert shards.shares == [len(part) / len(tokens) for part in shards.parts]


def test_clusters_differ_in_their_text_and_random_shards_do_not(
    data: Data, tokens: TokenShards
) -> None:
    def apart(shards: WorkerShards) -> float:
        features = [text_features(np.array(of_worker(shards, worker))) for worker in range(3)]
        return float(min(np.linalg.norm(a - b) for a, b in itertools.combinations(features, 2)))

    random = share_out(dataclasses.replace(data, shard_by="random"), tokens, BYTES, 3)
    clusters = share_out(data, tokens, BYTES, 3)
    assert apart(clusters) > 3 * apart(random)
    for worker in range(3):
        letters = set(of_worker(clusters, worker)) - {END}
        assert len(letters) == 8, "one alphabet each"


def test_any_range_across_documents(data: Data, tokens: TokenShards) -> None:
    part = share_out(dataclasses.replace(data, shard_by="random"), tokens, BYTES, 2).parts[1]
    whole = part.read(0, len(part)).tolist()
    for start, stop in [(0, 1), (99, 104), (0, 500), (101, 102), (len(part) - 300, len(part))]:
        assert part.read(start, stop).tolist() == whole[start:stop]
    again = pickle.loads(pickle.dumps(part))
    assert again.read(0, len(part)).tolist() == whole


@pytest.mark.parametrize("ranks_per_worker", [1, 2])
def test_an_epoch_of_each_worker_has_its_own_sequences_once(
    data: Data, tokens: TokenShards, ranks_per_worker: int
) -> None:
    shards = share_out(data, tokens, BYTES, 3)
    for worker in range(3):
        whole = of_worker(shards, worker)
        expected = [
            tuple(whole[start : start + LENGTH + 1])
            for start in range(0, len(whole) - LENGTH, LENGTH)
        ]
        ranks = [
            loader(
                tokens,
                shards,
                rank=ranks_per_worker * worker + rank,
                ranks=3 * ranks_per_worker,
                batch_size=1,
            )
            for rank in range(ranks_per_worker)
        ]
        steps = -(-len(expected) // ranks_per_worker)
        by_step = zip(*[sequences(rank, steps) for rank in ranks], strict=True)
        epoch = list(itertools.chain(*by_step))[: len(expected)]
        assert sorted(epoch) == sorted(expected)
        assert epoch != expected, "shuffled"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_position_goes_on_where_it_was_saved(
    data: Data, tokens: TokenShards, processes: int
) -> None:
    shards = share_out(data, tokens, BYTES, 3)
    for rank in range(6):
        whole = sequences(loader(tokens, shards, rank=rank, ranks=6), 40)
        first = loader(tokens, shards, rank=rank, ranks=6, processes=processes)
        seen = sequences(first, 25)
        assert first.position == 25 * 6 * 2, "samples of all ranks, the same on each"
        second = loader(
            tokens, share_out(data, tokens, BYTES, 3), rank=rank, ranks=6, start=first.position
        )
        third = loader(tokens, shards, rank=rank, ranks=6, processes=processes)
        third.load_state_dict(first.state_dict())
        assert seen + sequences(second, 15) == seen + sequences(third, 15) == whole


def test_worked_out_once_and_the_same_anywhere(
    data: Data, tokens: TokenShards, tmp_path: Path
) -> None:
    shards = share_out(data, tokens, BYTES, 3)
    (kept,) = Path(data.cache_folder).glob("worker-shards-*/documents.npy")
    written = kept.stat().st_mtime_ns
    elsewhere = dataclasses.replace(data, cache_folder=str(tmp_path / "another cache"))
    assert share_out(data, tokens, BYTES, 3).fingerprint == shards.fingerprint
    assert share_out(elsewhere, tokens, BYTES, 3).fingerprint == shards.fingerprint
    assert kept.stat().st_mtime_ns == written
    others = [
        share_out(data, tokens, BYTES, 2),
        share_out(dataclasses.replace(data, shard_by="random"), tokens, BYTES, 3),
    ]
    assert (
        len({shards.fingerprint, tokens.fingerprint, *(other.fingerprint for other in others)}) == 4
    )


def test_without_shards_everything_is_as_it_was(data: Data, tokens: TokenShards) -> None:
    shards = share_out(dataclasses.replace(data, shard_by="none"), tokens, BYTES, 4)
    assert (shards.fingerprint, shards.shares) == (tokens.fingerprint, [0.25] * 4)
    plain = build_train_loader(
        tokens,
        sequence_length=LENGTH,
        batch_size=2,
        accumulation=1,
        rank=3,
        ranks=4,
        seed=3,
        shuffle=True,
        processes=0,
    )
    assert sequences(loader(tokens, shards, rank=3, ranks=4), 9) == sequences(plain, 9)


def test_a_document_that_never_ends_is_one_too(data: Data, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 40_000)  # two pieces, the second of which is held out
    shards = open_split(
        dataclasses.replace(data, corpus=str(tmp_path / "long.txt"), validation_fraction=0.5),
        BYTES,
        "train",
    )
    assert document_ends(shards, END).tolist() == [len(shards)]
    assert document_ends(shards, end_of_document=300).tolist() == [len(shards)], (
        "nor is a corpus without an end"
    )


def test_fewer_documents_than_workers(data: Data, tokens: TokenShards) -> None:
    with pytest.raises(
        ValueError,
        match=r'shard_by = "clusters" gives .* has 60 for diloco\.workers = 61: use .*fewer workers',
    ):
        share_out(data, tokens, BYTES, 61)


def test_documents_that_are_all_alike(data: Data, tmp_path: Path) -> None:
    (tmp_path / "same.jsonl").write_text('{"text": "the same"}\n' * 8)
    data = dataclasses.replace(data, corpus=str(tmp_path / "same.jsonl"))
    with pytest.raises(
        ValueError,
        match=r"leaves workers \[.*\] of 8 without a document: .*too much alike.*\"random\"",
    ):
        share_out(data, open_split(data, BYTES, "train"), BYTES, 8)


def test_a_shard_shorter_than_a_sequence_is_named_on_every_rank(data: Data, tmp_path: Path) -> None:
    (tmp_path / "uneven.jsonl").write_text(
        '{"text": "short"}\n' + json.dumps({"text": "long " * 100}) + "\n"
    )
    data = dataclasses.replace(data, corpus=str(tmp_path / "uneven.jsonl"), shard_by="random")
    tokens = open_split(data, BYTES, "train")
    shards = share_out(data, tokens, BYTES, 2)
    for rank in range(2):
        with pytest.raises(
            ValueError,
            match=r"shard of worker \d \(data\.shard_by = random\) of the train split .* 6 tokens",
        ):
            loader(tokens, shards, rank=rank, ranks=2)


def test_damaged_assignment_says_what_to_do(data: Data, tokens: TokenShards) -> None:
    share_out(data, tokens, BYTES, 2)
    (kept,) = Path(data.cache_folder).glob("worker-shards-*/documents.npy")
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(
        ValueError,
        match=r"cannot read .*documents\.npy: .*; delete .*worker-shards.*, it is made again",
    ):
        share_out(data, tokens, BYTES, 2)


def test_workers_of_a_run_count_by_their_tokens_and_go_on_where_they_were(
    data: Data, tokens: TokenShards, processes: ProcessPool
) -> None:
    run = settings(
        Path(data.corpus),
        validation__every=0,
        data__validation_fraction=0.0,
        data__cache_folder=data.cache_folder,
    )
    run |= {
        "data.shard_by": "clusters",
        "diloco.method": "streaming",
        "diloco.workers": "2",
        "diloco.sync_every": "2",
    }
    run |= {
        "lr_schedule.decay": "constant",
        "diloco.overlap.delay": "0",
    }  # the end of a shorter run is as any other step
    whole, broken = (
        {"run.folder": str(Path(data.corpus).parent / name)} for name in ("whole", "broken")
    )
    processes.run(train, 2, run | whole)
    for steps in ("4", "8"):
        processes.run(
            train, 2, run | broken | {"training.steps": steps, "checkpoint.at_end": "true"}
        )

    shares = share_out(data, tokens, BYTES, 2).shares
    assert shares[0] != shares[1]
    rounds = records(Path(whole["run.folder"]), "round")
    assert rounds
    for exchange in rounds:
        weights = [worker["weight"] for worker in exchange["workers"]]
        assert [weight / sum(weights) for weight in weights] == pytest.approx(shares)

    def losses(chosen: dict[str, str]) -> list[float]:
        found = records(Path(chosen["run.folder"]))
        return [
            record["train/loss_nats_per_token_global"] for record in found if "train/lr" in record
        ]

    assert len(losses(whole)) == 8
    assert losses(broken) == losses(whole)
