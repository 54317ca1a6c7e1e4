"""Clusters are a partition, even, the same everywhere, and of documents that are alike."""

import json
import random
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from torchtitan_diloco.data import clusters as clusters_module
from torchtitan_diloco.data.clusters import write_clusters
from torchtitan_diloco.data.prepare import main
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


def written(folder: Path, count: int) -> list[TokenShards]:
    write_clusters(folder, BYTES, count)
    folders = [folder.with_name(f"{folder.name}-{number}") for number in range(count)]
    return [TokenShards(each, "train", BYTES) for each in folders]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 64])
def test_each_document_is_in_one_cluster_and_they_are_even(folder: Path, count: int) -> None:
    tokens = TokenShards(folder, "train", BYTES)
    found = written(folder, count)
    assert sorted(chain(*map(documents, found))) == sorted(documents(tokens))
    sizes = [*map(len, found)]
    longest = 101
    assert sum(sizes) == len(tokens)
    assert max(sizes) - min(sizes) <= longest * count.bit_length()
    assert all(find_damage(each.folder)[1] == [] for each in found)
    assert not write_clusters(folder, BYTES, count), "there is nothing left to do"


def test_documents_of_a_cluster_are_alike(folder: Path) -> None:
    kinds = [set(b"".join(documents(each))) for each in written(folder, 4)]
    assert sorted(map(sorted, kinds)) == sorted(sorted(kind.encode()) for kind in KINDS)


def test_a_sample_of_the_documents_suffices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters_module, "_SAMPLE", 150)
    shares = np.array([*map(len, written(folder, 4))])
    shares = shares / shares.sum()
    assert shares.min() > 0.2
    assert shares.max() < 0.3


def test_bad_clusters(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"too few different documents \(400 in all\) for 401"):
        write_clusters(folder, BYTES, 401)
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "new"), "--clusters", "2"])
    assert not (tmp_path / "new").exists()
