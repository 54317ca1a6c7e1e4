import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import ProcessPool
from tests.test_trainer import records, settings, train
from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.loader import TrainLoader
from torchtitan_diloco.data.shards import TokenShards
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.data.worker_shards import (
    FULL,
    WorkerShards,
    assign,
    deal_out,
    document_ends,
    learn_centres,
    share_out,
    text_features,
)

BYTES = build_tokenizer("bytes")
END = BYTES.end_of_document
LENGTH = 10
ShardBy = Literal["none", "random", "clusters"]
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


# --- clusters ---


@pytest.mark.parametrize("alphabets", [["abcdef", "uvwxyz"], ["ab", "bc", "cd", "de"]])
def test_alike_texts_come_together(alphabets: list[str]) -> None:
    random, count = np.random.default_rng(0), len(alphabets)
    letters = [np.frombuffer(alphabet.encode(), np.uint8) for alphabet in alphabets]
    texts = [random.choice(letters[n % count], 300).astype(np.uint16) for n in range(6 * count)]
    features, sizes = np.stack([text_features(text) for text in texts]), np.full(len(texts), 300)

    def found() -> list[int]:
        similarity = features @ learn_centres(features, sizes, count).T
        return [int(cluster) for cluster in assign(similarity, sizes)]

    of_alphabet = [set(found()[start::count]) for start in range(count)]
    assert [len(clusters) for clusters in of_alphabet] == [1] * count
    assert len(set.union(*of_alphabet)) == count
    assert found() == found()


@given(SIZES, st.integers(1, 8), st.integers(0, 100))
def test_no_cluster_takes_documents_once_it_is_full(
    sizes: list[int], clusters: int, seed: int
) -> None:
    similarity = np.random.default_rng(seed).random((len(sizes), clusters))
    similarity[:, 0] += 1  # everybody's favourite
    chosen = assign(similarity, np.array(sizes))
    assert ((chosen >= 0) & (chosen < clusters)).all()
    for cluster in range(clusters):
        own = [size for size, at in zip(sizes, chosen.tolist(), strict=True) if at == cluster]
        assert sum(own) <= FULL * sum(sizes) / clusters + max(own, default=0)


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        ([[2, 1], [1, 2], [3, 1], [1, 3]], [0, 1, 0, 1]),  # nobody moves without need
        ([[9, 8], [9, 1], [9, 7], [9, 8.9]], [0, 0, 0, 1]),  # full at 12.5: after the third
    ],
)
def test_who_has_most_to_lose_chooses_first(similarity: list[Any], expected: list[int]) -> None:
    found = assign(np.array(similarity), np.array([5, 5, 5, 5]))
    assert found.tolist() == expected


@given(SIZES, st.integers(1, 8))
def test_documents_are_dealt_out_evenly(sizes: list[int], workers: int) -> None:
    filled = np.bincount(deal_out(np.array(sizes), workers), weights=sizes, minlength=workers)
    assert filled.max() - filled.min() <= max(sizes)


# --- shards of workers ---


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Sixty documents of 100 to 218 letters and an end, a third in each of three alphabets."""
    random, alphabets = np.random.default_rng(0), ["abcdefgh", "ijklmnop", "qrstuvwx"]
    lines = []
    for number in range(60):
        text = "".join(random.choice(list(alphabets[number % 3]), 100 + 2 * number))
        lines.append(json.dumps({"text": text}) + "\n")
    corpus, cache = tmp_path / "text.jsonl", str(tmp_path / "cache")
    corpus.write_text("".join(lines))
    by_text: ShardBy = "clusters"
    return Data(corpus=str(corpus), validation_fraction=0.0, cache_folder=cache, shard_by=by_text)


@pytest.fixture
def tokens(data: Data) -> TokenShards:
    return open_split(data, BYTES, "train")


def documents(tokens: list[int]) -> list[tuple[int, ...]]:
    ends = [place + 1 for place, token in enumerate(tokens) if token == END]
    assert ends[-1] == len(tokens)
    return [tuple(tokens[start:stop]) for start, stop in itertools.pairwise([0, *ends])]


def of_worker(shards: WorkerShards, worker: int) -> list[int]:
    return [int(token) for token in shards.parts[worker].read(0, len(shards.parts[worker]))]


def loader(shards: WorkerShards, **changes: int) -> TrainLoader:
    layout: dict[str, Any] = {"batch_size": 2, "accumulation": 1, "processes": 0, "seed": 3}
    layout |= {"sequence_length": LENGTH, "shuffle": True}
    return TrainLoader(shards.parts, **(layout | changes))


def sequences(reader: TrainLoader, batches: int) -> list[tuple[int, ...]]:
    """Return inputs and the last target of each sequence."""
    found = []
    for inputs, targets in itertools.islice(reader, batches):
        pairs = zip(inputs.tolist(), targets.tolist(), strict=True)
        found += [(*row, target[-1]) for row, target in pairs]
    return found


@pytest.mark.parametrize("shard_by", ["random", "clusters"])
@pytest.mark.parametrize("workers", [3, 7])
def test_shards_partition_the_documents(
    data: Data, tokens: TokenShards, shard_by: ShardBy, workers: int
) -> None:
    shards = share_out(replace(data, shard_by=shard_by), tokens, BYTES, workers)
    apart = [documents(of_worker(shards, worker)) for worker in range(workers)]
    whole = documents(tokens.read(0, len(tokens)).tolist())
    assert sorted(itertools.chain(*apart)) == sorted(whole)
    assert shards.shares == [len(part) / len(tokens) for part in shards.parts]
    if (shard_by, workers) == ("clusters", 3):
        alphabets = [set(of_worker(shards, worker)) - {END} for worker in range(workers)]
        assert [len(alphabet) for alphabet in alphabets] == [8, 8, 8], "one alphabet each"


def test_an_epoch_of_each_worker_has_its_own_sequences_once(
    data: Data, tokens: TokenShards
) -> None:
    shards, each = share_out(data, tokens, BYTES, 3), 2
    for worker in range(3):
        whole = of_worker(shards, worker)
        starts = range(0, len(whole) - LENGTH, LENGTH)
        expected = [tuple(whole[start : start + LENGTH + 1]) for start in starts]
        steps = -(-len(expected) // each)
        ranks = [
            sequences(loader(shards, rank=rank, ranks=3 * each, batch_size=1), steps)
            for rank in range(each * worker, each * worker + each)
        ]
        epoch = list(itertools.chain(*zip(*ranks, strict=True)))[: len(expected)]
        assert sorted(epoch) == sorted(expected)
        assert epoch != expected, "shuffled"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_position_continues_where_it_was_saved(
    data: Data, tokens: TokenShards, processes: int
) -> None:
    shards = share_out(data, tokens, BYTES, 3)
    for rank in range(6):
        whole = sequences(loader(shards, rank=rank, ranks=6), 40)
        first = loader(shards, rank=rank, ranks=6, processes=processes)
        seen = sequences(first, 25)
        assert first.position == 25 * 6 * 2, "samples of all ranks, the same on each"
        again = share_out(data, tokens, BYTES, 3)
        second = loader(again, rank=rank, ranks=6, start=first.position)
        assert seen + sequences(second, 15) == whole


def test_decided_once_and_the_same_anywhere(
    data: Data, tokens: TokenShards, tmp_path: Path
) -> None:
    shards = share_out(data, tokens, BYTES, 3)
    (kept,) = Path(data.cache_folder).glob("worker-shards-*/documents.npy")
    written = kept.stat().st_mtime_ns
    elsewhere = replace(data, cache_folder=str(tmp_path / "another cache"))
    for same in (data, elsewhere):
        assert share_out(same, tokens, BYTES, 3).fingerprint == shards.fingerprint
    assert kept.stat().st_mtime_ns == written
    random = share_out(replace(data, shard_by="random"), tokens, BYTES, 3)
    others = {share_out(data, tokens, BYTES, 2).fingerprint, random.fingerprint}
    assert len({shards.fingerprint, tokens.fingerprint, *others}) == 4


def test_without_shards_all_share_one_order(data: Data, tokens: TokenShards) -> None:
    shards = share_out(replace(data, shard_by="none"), tokens, BYTES, 4)
    assert (shards.fingerprint, shards.shares) == (tokens.fingerprint, [0.25] * 4)
    assert shards.parts == [tokens]


def test_a_document_that_never_ends_is_one_too(data: Data, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 40_000)  # two pieces, the second of which is held out
    half = replace(data, corpus=str(tmp_path / "long.txt"), validation_fraction=0.5)
    shards = open_split(half, BYTES, "train")
    assert document_ends(shards, END).tolist() == [len(shards)]
    assert document_ends(shards, end_of_document=300).tolist() == [len(shards)], "no end at all"


@pytest.mark.parametrize(
    ("lines", "shard_by", "workers", "message"),
    [
        (["a"] * 6, "clusters", 7, r'"clusters" leaves workers .* of diloco\.workers = 7 .* 6 doc'),
        (["same"] * 8, "clusters", 8, r"leaves workers \[.*\] of .*too much alike.*\"random\""),
        (["a"] * 6, "random", 7, r"leaves workers \[.*\] of .* 6 documents of"),
        (["short", "long " * 100], "random", 2, r"shard of worker \d .*random\) of .* 6 tokens"),
    ],
)
def test_documents_that_do_not_suffice(
    data: Data, tmp_path: Path, lines: list[str], shard_by: ShardBy, workers: int, message: str
) -> None:
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "few.jsonl").write_text(text)
    few = replace(data, corpus=str(tmp_path / "few.jsonl"), shard_by=shard_by)
    tokens = open_split(few, BYTES, "train")
    for rank in range(workers):  # all see it
        with pytest.raises(ValueError, match=message):
            loader(share_out(few, tokens, BYTES, workers), rank=rank, ranks=workers)


def test_workers_of_a_run_count_by_their_tokens(
    data: Data, tokens: TokenShards, processes: ProcessPool
) -> None:
    own = {"data.shard_by": "clusters", "data.validation_fraction": 0.0, "validation.every": 0}
    own |= {"data.cache_folder": data.cache_folder, "training.steps": 4, "diloco.sync_every": 2}
    run = settings(Path(data.corpus), diloco__method="streaming", diloco__workers=2, **own)
    processes.run(train, 2, run)
    shares = share_out(data, tokens, BYTES, 2).shares
    assert shares[0] != shares[1]
    rounds = records(Path(run["run.folder"]), "round")
    assert rounds
    for exchange in rounds:
        weights = [worker["weight"] for worker in exchange["workers"]]
        assert [weight / sum(weights) for weight in weights] == pytest.approx(shares)
