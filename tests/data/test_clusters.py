"""Clusters are a partition, even, the same everywhere, and of documents that are alike."""

import json
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import MakeShards
from torchtitan_diloco.config.schema import Data
from torchtitan_diloco.data import clusters as clusters_module
from torchtitan_diloco.data.clusters import ClusterDocuments, add_clusters, choose_clusters
from torchtitan_diloco.data.corpus import main, open_split
from torchtitan_diloco.data.loader import Stream, TrainLoader
from torchtitan_diloco.data.shards import TokenShards, find_damage
from torchtitan_diloco.data.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes")
KINDS = ["0123 ", "abcd ", "WXYZ ", "{;}= "]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of four kinds of text in turn, as much of each."""
    numbers, path = random.Random(0), tmp_path / "text.jsonl"
    texts = ["".join(numbers.choices(KINDS[i % 4], k=10 + i // 4 % 90)) for i in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def folder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It is read in many portions."""
    monkeypatch.setattr(clusters_module, "_TOKENS_AT_ONCE", 1000)
    monkeypatch.setattr(clusters_module, "_DOCUMENTS_AT_ONCE", 7)
    folder = tmp_path / "shards"
    options = ["--source", corpus, "--out", folder, "--shard-tokens", 1000]
    main([*map(str, options), "--validation-fraction", "0"])
    return folder


def documents(tokens: TokenShards) -> list[bytes]:
    content = tokens.read(0, len(tokens)).astype(int).tolist()
    assert content[-1] == BYTES.end_of_document
    joined = bytes(0 if one == BYTES.end_of_document else one for one in content)
    return joined.split(b"\0")[:-1]


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (2, 2), (4, 4), (5, 5), (8, 3), (64, 7)])
def test_each_document_is_in_one_part_and_parts_are_even(
    folder: Path, count: int, parts: int
) -> None:
    add_clusters(folder, BYTES, count)
    tokens = TokenShards(folder, "train", BYTES)
    found = [ClusterDocuments(tokens, part, parts) for part in range(parts)]
    assert sorted(chain(*map(documents, found))) == sorted(documents(tokens))
    assert sum(map(len, found)) == len(tokens)
    longest, sizes = 101, choose_clusters(tokens, parts).tokens
    assert max(sizes) - min(sizes) <= longest * count.bit_length()
    for part in found:  # any place, across documents
        whole = part.read(0, len(part))
        for start in range(0, len(part) - 150, 97):
            assert np.array_equal(part.read(start, start + 150), whole[start : start + 150])


@pytest.mark.parametrize("clusters", [4, 8])
def test_documents_of_a_part_are_alike(folder: Path, clusters: int) -> None:
    add_clusters(folder, BYTES, clusters)
    tokens = TokenShards(folder, "train", BYTES)
    kinds = [set(b"".join(documents(ClusterDocuments(tokens, part, 4)))) for part in range(4)]
    assert sorted(map(sorted, kinds)) == sorted(sorted(kind.encode()) for kind in KINDS)


def test_a_sample_of_the_documents_suffices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters_module, "_SAMPLE", 150)
    add_clusters(folder, BYTES, 4)
    tokens = TokenShards(folder, "train", BYTES)
    shares = np.array(choose_clusters(tokens, 4).tokens) / len(tokens)
    assert shares.min() > 0.2
    assert shares.max() < 0.3


def test_each_worker_reads_its_part_and_added_ones_read_one_again(folder: Path) -> None:
    add_clusters(folder, BYTES, 2)
    tokens = TokenShards(folder, "train", BYTES)
    options: dict[str, Any] = {"sequence_length": 8, "batch_size": 4, "accumulation": 1}
    options |= {"rank": 0, "ranks": 1, "seed": 0, "shuffle": True, "processes": 0}
    shares, seen = [], []
    for number in range(3):
        loader = TrainLoader(tokens, stream=Stream(number, 2, clusters=True), **options)
        batches = iter(loader)
        seen.append(np.concatenate([next(batches)[0].numpy() for _ in range(2000)]).tolist())
        shares.append(loader.share)
        mine = ClusterDocuments(tokens, number % 2, 2)
        places = range(0, len(mine) - 8, 8)
        assert {*map(tuple, seen[-1])} == {tuple(mine.read(i, i + 8).tolist()) for i in places}
    assert shares[0] + shares[1] == pytest.approx(1)
    assert shares[2] == shares[0]
    assert seen[2] != seen[0], "in another order"


def test_text_is_divided_at_the_start_and_shards_by_a_command(
    corpus: Path, folder: Path, tmp_path: Path
) -> None:
    text = Data(str(corpus), cache_folder=str(tmp_path / "cache"), shard_by="clusters")
    for parts in (2, 3, 2):
        tokens = open_split(text, BYTES, "train", clusters=parts)
        assert len(choose_clusters(tokens, parts).tokens) == parts
    assert open_split(text, BYTES, "validation").name

    shards = Data(str(folder), shard_by="clusters")
    with pytest.raises(ValueError, match=r"needs 3 clusters or more") as refusal:
        choose_clusters(open_split(shards, BYTES, "train", clusters=3), 3)
    main(str(refusal.value).rpartition(" prepare ")[2].split())
    tokens = open_split(shards, BYTES, "train", clusters=2)
    assert len(choose_clusters(tokens, 2).tokens) == 3


def test_bad_clusters(folder: Path, make_shards: MakeShards, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"too few different documents \(400 in all\) for 401"):
        add_clusters(folder, BYTES, 401)
    with pytest.raises(ValueError, match="too few different documents"):
        add_clusters(make_shards("other", words=1), BYTES, 2)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "new"), "--clusters", "2"])
    assert not (tmp_path / "new").exists()
    add_clusters(folder, BYTES, 2)
    assert find_damage(folder)[1] == []
    (folder / "train-2.clusters").write_bytes(b"")
    assert find_damage(folder)[1] == ["train-2.clusters: its checksum is wrong"]
    with pytest.raises(ValueError, match="is damaged"):
        ClusterDocuments(TokenShards(folder, "train", BYTES), 0, 2)
