"""Datasets of Hugging Face: which rows there are, and where a stream continues."""

import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import torchtitan_diloco.data.hub as hub_module
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.data.pieces import BEGINNING, Corpus, Located, Place, split_into_pieces
from torchtitan_diloco.data.text import open_corpus

TYPED = """---
dataset_info:
  features:
  - name: text
    dtype: string
  splits:
  - name: train
    num_bytes: 1000
    num_examples: 15
---
"""
FILES = 3
ROWS = 5
BUILDER = "datasets.load_dataset_builder"


def pieces(spec: object) -> list[str]:
    return [piece.text for piece in open_corpus(str(spec)).pieces()]


def written_down(place: Place) -> Place:
    return msgspec.json.decode(msgspec.json.encode(place), type=Place)


@pytest.fixture(params=["json", "typed json", "parquet", "text"])
def corpus(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Corpus:
    """Several data files, with rows of one piece, of several, and of none."""
    kind = request.param
    short = partial(split_into_pieces, limit=6)
    monkeypatch.setattr(hub_module, "split_into_pieces", short)
    import datasets  # takes seconds, which no other test needs

    once = cache(datasets.load_dataset_builder)  # it takes a quarter of a second
    monkeypatch.setattr(BUILDER, once)
    for file in range(FILES):
        texts = [f"{file}, {row} " * (row % 4) for row in range(ROWS)]
        table = datasets.Dataset.from_dict({"text": texts, "id": [*range(ROWS)]})
        name = str(tmp_path / f"train-{file}.{'parquet' if kind == 'parquet' else 'jsonl'}")
        if kind == "text":
            (tmp_path / f"train-{file}.txt").write_text("\n".join(texts))
        elif kind == "parquet":
            table.to_parquet(name, batch_size=4)
        else:
            table.select_columns("text").to_json(name)
    if kind == "typed json":
        (tmp_path / "README.md").write_text(TYPED)
    return open_corpus(f"hf:{tmp_path}")


def test_a_stream_continues_at_each_place(corpus: Corpus) -> None:
    located = [*corpus.read(BEGINNING).pieces]
    assert len(located) > FILES * ROWS
    assert located[-1].after.bytes == sum(len(piece.text) for piece, _ in located)
    for number, (_, place) in enumerate(located, start=1):
        assert_continues(corpus, place, located[number:])


def test_a_stream_that_was_continued_continues_again(corpus: Corpus) -> None:
    located = [*corpus.read(BEGINNING).pieces]
    for first in (2, len(located) // 2):
        again = [*corpus.read(written_down(located[first].after)).pieces]
        for number, (_, place) in enumerate(again, start=1):
            assert_continues(corpus, place, again[number:])


def assert_continues(corpus: Corpus, place: Place, expected: list[Located]) -> None:
    reading = corpus.read(written_down(place))
    assert "; the rows before in its data file are read again" in reading.how
    assert [(piece, after.bytes) for piece, after in reading.pieces] == [
        (piece, after.bytes) for piece, after in expected
    ]


def test_the_number_of_rows_is_known_if_the_dataset_says_it(corpus: Corpus) -> None:
    is_typed = Path(corpus.spec.removeprefix("hf:"), "README.md").exists()
    assert corpus.read(BEGINNING).documents == (FILES * ROWS if is_typed else None)


class Stream:
    """As of `datasets`, over 9 rows, the first of which is `first`."""

    def __init__(self, first: int = 0, *, state: Any = None, fails: int | None = None) -> None:
        self.rows = range(first, first + 9)
        self.state = state
        self.fails = fails
        import datasets

        self.info = datasets.DatasetInfo()

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in self.rows:
            if number == self.fails:
                raise ConnectionError("the network is gone")
            yield {"text": f"row {number}"}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """It has no effect: the stream begins at its beginning."""


class Builder:
    """As of `datasets`, of a dataset on the hub."""

    revisions: list[str | None] = []

    def __init__(self, stream: Stream, hash: str = "a" * 40) -> None:
        self.stream = stream
        self.hash = hash

    def __call__(self, *_: str, revision: str | None) -> "Builder":
        self.revisions.append(revision)
        return self

    def as_streaming_dataset(self, split: str) -> Stream:
        assert split == "train"
        return self.stream


@pytest.mark.parametrize("state", [{"of no effect": True}, {"no json": {1, 2}}, None])
def test_a_stream_that_cannot_continue_is_read_again(
    monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    monkeypatch.setattr(BUILDER, Builder(Stream(state=state)))
    corpus = open_corpus("hf:owner/set")
    located = [*corpus.read(BEGINNING).pieces]
    for number, (_, place) in enumerate(located, start=1):
        reading = corpus.read(written_down(place))
        if number > 1 or place.state is None:
            assert "all rows before are read again" in reading.how
        assert [*reading.pieces] == located[number:]


def test_a_dataset_on_the_hub_is_read_in_one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder(Stream())
    builder.revisions.clear()
    monkeypatch.setattr(BUILDER, builder)
    corpus = open_corpus("hf:owner/set")
    place = [*corpus.read(BEGINNING).pieces][3].after
    builder.hash = "b" * 40
    [*corpus.read(place).pieces]
    assert builder.revisions == [None, "a" * 40]


def test_another_dataset_and_a_lost_network_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUILDER, Builder(Stream(fails=7)))
    corpus = open_corpus("hf:owner/set")
    message = r"cannot read row 7 of hf:owner/set \(ConnectionError: the network is gone\): check"
    with pytest.raises(UserError, match=message):
        [*corpus.read(BEGINNING).pieces]
    place = next(iter(corpus.read(BEGINNING).pieces)).after
    monkeypatch.setattr(BUILDER, Builder(Stream(first=1)))
    with pytest.raises(UserError, match=r"row 0 of .* is not the one .* has changed; del"):
        corpus.read(place)
    monkeypatch.setattr(BUILDER, Builder(Stream(fails=0)))
    with pytest.raises(UserError, match="cannot read row 0 of hf:owner/set"):
        corpus.read(place)


def test_hugging_face_folders(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(5)]
    texts = [row["text"] for row in rows]
    files = tmp_path / "files"
    folder = f"hf:{tmp_path}/files"
    files.mkdir()
    (files / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (files / "test.jsonl").write_text(json.dumps({"text": "of the test"}))
    assert pieces(folder) == pieces(f"{folder}:train") == texts
    assert pieces(f"{folder}:test") == ["of the test"]
    assert open_corpus(f"{folder}:test").fingerprint != open_corpus(folder).fingerprint
    with pytest.raises(ValueError, match=r"cannot open .*files:none'"):
        pieces(f"{folder}:none")
    for row, message in (
        ({"content": "a"}, r"row 0: there is no field \"text\" .*: content\. Set"),
        ({"text": ""}, "has no text"),
    ):
        (files / "test.jsonl").unlink(missing_ok=True)
        (files / "train.jsonl").write_text(json.dumps(row))
        with pytest.raises(ValueError, match=message):
            pieces(folder)

    for name in ("/nowhere/at/all", "owner/set/subset:train"):
        message = rf"(?s)cannot open 'hf:{name}' .*write hf:OWNER/DATASET.*the network"
        with pytest.raises(ValueError, match=message):
            pieces(f"hf:{name}")


@pytest.mark.parametrize("name", ["owner/", "owner//subset", "a/b/c/d", ":train"])
def test_what_is_no_name_of_a_dataset(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf'^"hf:{name}" is not the name of a dataset: write hf:OWNER'
    ):
        open_corpus(f"hf:{name}")


def test_a_source_without_a_name() -> None:
    reason = r'^"hf:" names nothing after the colon: write hf:NAME'
    with pytest.raises(UserError, match=reason):
        open_corpus("hf:")
