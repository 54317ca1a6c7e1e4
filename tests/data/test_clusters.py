"""Clusters are a partition, even, the same everywhere, and of documents that are alike."""

import json
import os
import random
import re
import shutil
import signal
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.processes import DIED, ProcessPool
from torchtitan_diloco.data import clusters as clusters_module
from torchtitan_diloco.data.clusters import write_clusters
from torchtitan_diloco.data.prepare import main
from torchtitan_diloco.data.shards import INDEX_NAME, TokenShards, find_damage, read_index
from torchtitan_diloco.data.tokenizer import build_tokenizer

BYTES = build_tokenizer("bytes")
KINDS = ["0123 ", "abcd ", "WXYZ ", "{;}= "]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of four kinds of text in turn, as much of each."""
    numbers = random.Random(0)
    path = tmp_path / "text.jsonl"
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
    assert not list(folder.parent.glob(f"{folder.name}-*")), "nothing is left of them"
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "new"), "--clusters", "2"])
    assert not (tmp_path / "new").exists()


def test_the_clusters_are_named_and_which_have_no_held_out_documents(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shards"
    names = [f"{folder}-0", f"{folder}-1"]
    main(["--source", str(corpus), "--out", str(folder), "--clusters", "2"])
    printed = capsys.readouterr()
    sizes = [f"{len(TokenShards(Path(name), 'train', BYTES)):,}" for name in names]
    described = [f"{name} ({size} tokens)" for name, size in zip(names, sizes, strict=True)]
    assert f"clusters: 2 corpora, {', '.join(described)}\n" in printed.out
    warned = re.findall(
        r"warning: (\S+): none of the documents of this cluster is held out: raise", printed.err
    )
    held_out = [read_index(Path(name) / INDEX_NAME).splits["validation"].tokens for name in names]
    assert warned == [name for name, tokens in zip(names, held_out, strict=True) if not tokens]


def test_a_corpus_without_held_out_documents_is_warned_of_unless_it_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one document")
    warning = "the text is a single piece: add text, or set data.validation_corpus"
    for fraction, warnings in (("0.005", 1), ("0", 0)):
        out = str(tmp_path / fraction)
        main(["--source", str(text), "--out", out, "--validation-fraction", fraction])
        assert capsys.readouterr().err.count(warning) == warnings


def test_clusters_of_another_number_or_corpus_are_not_taken_for_these(folder: Path) -> None:
    written(folder, 4)
    with pytest.raises(ValueError, match=r"shards-0 was .* settings \(clusters was 4 and is 2\)"):
        write_clusters(folder, BYTES, 2)
    shutil.rmtree(folder)
    text = folder.with_name("other.txt")
    text.write_text("ab\ncd\n" * 900)
    main(["--source", str(text), "--out", str(folder), "--validation-fraction", "0"])
    with pytest.raises(ValueError, match=r"shards-0 was prepared with other settings \(source "):
        write_clusters(folder, BYTES, 4)


# --- killed ---------------------------------------------------------------------------------------

COUNT = 3


def prepare_until(folder: Path, moment: int) -> int:
    """Divide a corpus, and die by SIGKILL at a moment: just before a file of the clusters is opened
    or renamed, or a folder of theirs made. Return the number of such moments."""
    seen = 0

    def watch(event: str, given: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in ("open", "os.rename", "os.mkdir") or f"{folder}-" not in str(given[0]):
            return
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)  # for the rest of this process
    main(["--out", str(folder), "--clusters", str(COUNT)])
    return seen


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def clusters_of(folder: Path) -> list[dict[str, bytes]]:
    return [content(folder.with_name(f"{folder.name}-{number}")) for number in range(COUNT)]


@pytest.fixture
def divided(corpus: Path, tmp_path: Path) -> Path:
    """A corpus with both splits. Shards of its clusters are larger than the buffer of a file, so
    that part of one that is being written is on the disk."""
    corpus.write_text(corpus.read_text() * 4)
    folder = tmp_path / "whole" / "shards"
    options = ["--source", corpus, "--out", folder, "--shard-tokens", 5000]
    main([*map(str, options), "--validation-fraction", "0.3"])
    return folder


def copy_of(divided: Path, name: str) -> Path:
    folder = divided.parents[1] / name / divided.name
    shutil.copytree(divided, folder)
    return folder


def check_that_none_is_half(folder: Path, whole: list[dict[str, bytes]]) -> None:
    """A cluster that can be read is complete; the others are refused."""
    for number, complete in enumerate(whole):
        target = folder.with_name(f"{folder.name}-{number}")
        if (target / INDEX_NAME).exists():
            assert content(target) == complete
            assert find_damage(target)[1] == []
        else:
            with pytest.raises(ValueError, match=r"does not exist|is empty|is not finished"):
                TokenShards(target, "train", BYTES)


def test_killed_at_any_moment_and_started_again_is_uninterrupted(
    divided: Path, processes: ProcessPool
) -> None:
    processes.close()  # what watches stays in its process
    (moments,) = processes.run(prepare_until, 1, divided, 0)
    processes.close()
    whole = clusters_of(divided)
    shards = sum(name.endswith(".tokens") for each in whole for name in each)
    assert shards > 3 * COUNT
    assert moments >= 3 * shards
    last = moments - COUNT  # before the clusters get their indices
    for moment in [*range(2, last, 29), *range(last, moments + 1)]:
        folder = copy_of(divided, f"killed-{moment}")
        assert processes.run(prepare_until, 1, folder, moment, dying=[0]) == [DIED]
        check_that_none_is_half(folder, whole)
        main(["--out", str(folder), "--clusters", str(COUNT)])
        assert clusters_of(folder) == whole, f"killed before file {moment} of {moments}"


def test_killed_again_and_again(divided: Path, processes: ProcessPool) -> None:
    """Each start comes a little further."""
    folder = copy_of(divided, "again")
    starts = 0
    found = [DIED]
    while found == [DIED]:
        starts += 1
        moment = 20 if starts < 20 else 0
        found = processes.run(prepare_until, 1, folder, moment, dying=[0])
    assert 2 < starts < 20
    write_clusters(divided, BYTES, COUNT)
    assert clusters_of(folder) == clusters_of(divided)
