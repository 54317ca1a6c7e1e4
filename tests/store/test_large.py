"""Large objects: contents in chunks, which any store may hold."""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.store.places import PATIENCE, Place, bucket_environment, start_writer
from tests.store.proxy import Proxy
from tests.store.writer import payload
from torchtitan_diloco.store import (
    AwayError,
    DamagedObjectError,
    LargeObjects,
    Store,
)


@pytest.fixture
def large(store: Store) -> Iterator[LargeObjects]:
    with LargeObjects(store, 4, chunk_bytes=1000) as large_objects:
        yield large_objects


def fetch(large: LargeObjects, name: str, most: int) -> bytes | None:
    stored = large.get(name, most)
    return None if stored is None else bytes(stored)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3500])
def test_a_content_of_any_size(place: Place, store: Store, large: LargeObjects, size: int) -> None:
    name = f"{place.own}a"
    content = bytes(number % 251 for number in range(size))
    assert large.get(name, size) is None
    assert large.create(name, memoryview(content))
    assert large.create(name, content)
    assert not large.create(name, content + b"x")
    assert fetch(large, name, size) == content
    chunks = -(-size // 1000) if size >= 1000 else 0
    assert len(store.list(place.own)) == 1 + chunks, "the loser's chunks are gone"
    large.delete(name)
    assert large.get(name, size) is None
    assert store.list(place.own) == []


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 3500])
def test_a_content_into_memory_that_is_there(place: Place, large: LargeObjects, size: int) -> None:
    name = f"{place.own}a"
    content = bytes(number % 251 for number in range(size))
    room = bytearray(b"x" * 4000)
    assert large.get(name, into=memoryview(room)) is None
    large.create(name, content)
    stored = large.get(name, into=memoryview(room))
    assert stored is not None
    assert stored.obj is room
    assert stored == content
    assert room == content + b"x" * (4000 - size)
    if size:
        with pytest.raises(
            DamagedObjectError, match=rf"declares {size} bytes, but at most {size - 1} "
        ):
            large.get(name, into=memoryview(room)[: size - 1])


def test_damage_of_a_chunk_is_named(place: Place, store: Store, large: LargeObjects) -> None:
    name = f"{place.own}a"
    content = bytes(3500)
    large.create(name, content)
    third = store.list(f"{name}.")[2].name
    raw = place.read_raw(third)
    place.write_raw(third, b"x" + raw[1:])
    with pytest.raises(DamagedObjectError, match=third):
        large.get(name, 3500)
    store.delete(third)
    with pytest.raises(DamagedObjectError, match=r"chunk 3 of 4 .* is missing"):
        large.get(name, 3500)
    store.create(third, b"another chunk")
    with pytest.raises(DamagedObjectError, match=f"{third} has 13 bytes, not 1000"):
        large.get(name, 3500)
    store.delete(third)
    store.create(third, b"x" * 1000)
    with pytest.raises(DamagedObjectError, match="different content"):
        large.get(name, 3500)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"", "is not a large object"),
        (b"\1", "is not a large object"),
        (b"\1{}", "is not a large object"),
        (b'\1{"size": 10, "chunk_bytes": 0, "root": "0123456789abcdef"}', "impossible sizes"),
        (
            b'\1{"size": -10, "chunk_bytes": 1000, "root": "0123456789abcdef"}',
            "impossible sizes",
        ),
        (
            b'\1{"size": 1e15, "chunk_bytes": 1000, "root": "0123456789abcdef"}',
            "is not a large object",
        ),
        (
            b'\1{"size": 1000000000000000, "chunk_bytes": 1, "root": "0123456789abcdef"}',
            "impossible sizes",
        ),
        (
            b'\1{"size": 5001, "chunk_bytes": 1000, "root": "0123456789abcdef"}',
            "at most 5000 are",
        ),
        (b'\1{"size": 10, "chunk_bytes": 9, "root": "../a"}', "is not a large object"),
    ],
)
def test_a_writer_may_claim_anything(
    place: Place, store: Store, large: LargeObjects, head: bytes, says: str
) -> None:
    store.create(f"{place.own}a", head)
    with pytest.raises(DamagedObjectError, match=says):
        large.get(f"{place.own}a", 5000)


def through(place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place behind a proxy."""
    if place.at_port is not None:
        return replace(place, location=place.at_port(proxy.port))
    for key, value in bucket_environment(proxy.port).items():
        monkeypatch.setenv(key, value)
    return place


def test_a_cut_does_not_end_a_transfer(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """64 MB with a cut in the middle of the upload and of the download."""
    if place.kind == "folder":
        pytest.skip("a folder has no connections")
    caplog.set_level(logging.INFO, "torchtitan_diloco")
    proxy = Proxy(place.port)
    store = through(place, proxy, monkeypatch).open()
    content = payload(64)
    name = f"{place.own}a"
    with LargeObjects(store, 4) as large:
        proxy.cut_after(20_000_000, 20_000_000)
        assert large.create(name, content)
        assert proxy.cuts == 2
        proxy.cut_after(30_000_000)
        assert fetch(large, name, len(content)) == content
        assert proxy.cuts == 3
    assert any("trying again" in message for message in caplog.messages)
    store.close()
    proxy.close()


def test_a_transfer_is_resumed(place: Place, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{place.own}a"
    content = bytes(number % 251 for number in range(9500))
    sent = list[str]()
    create = Store.create

    def break_off(self: Store, name: str, *rest: bytes, durable: bool) -> bool:
        if len(sent) == 4:
            raise AwayError("the link is cut")
        sent.append(name)
        return create(self, name, *rest, durable=durable)

    def note_and_create(self: Store, name: str, *rest: bytes, durable: bool) -> bool:
        sent.append(name)
        return create(self, name, *rest, durable=durable)

    with LargeObjects(store, 1, chunk_bytes=1000) as large:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "create", break_off)
            with pytest.raises(AwayError):
                large.create(name, content)
        assert large.get(name, len(content)) is None
        with monkeypatch.context() as patch:
            patch.setattr(Store, "create", note_and_create)
            assert large.create(name, content)
        assert fetch(large, name, len(content)) == content
    assert len(sent) == 11, "each chunk was sent once, and the head"
    assert len(set(sent)) == 11


@pytest.mark.parametrize("size", [999, 3500])
def test_nothing_is_listed_without_a_reason(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A bucket lists all that is beside an object. A writer need not read what it deletes."""
    first, second, third = (f"{place.own}{letter}" for letter in "abc")
    delete = store.delete
    calls = list[str]()

    def break_off(name: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise AwayError("the link is cut")
        delete(name)

    with LargeObjects(store, 1, chunk_bytes=1000) as large, monkeypatch.context() as patch:
        patch.setattr(store, "list", pytest.fail)
        assert large.create(first, bytes(size))
        assert large.create(second, bytes(size))
        with LargeObjects(store, 1, chunk_bytes=1000) as other:
            patch.setattr(store, "delete", break_off)
            for name in (first, second, second):
                with suppress(AwayError):  # after the object, or before the second one
                    other.delete(name)
            other.delete(first)
        assert large.create(third, bytes(size))
        patch.setattr(store, "get", pytest.fail)
        large.delete(third)
    assert store.list(place.own) == []


def test_a_killed_upload_is_resumed(place: Place, store: Store) -> None:
    """Kill a process in the middle of its upload: there is no object, and another one goes on."""
    name = f"{place.own}a"
    content = payload(24)
    writer = start_writer(place, "upload", name, "24")
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.stdin.write("\n")
    writer.stdin.flush()
    until = time.monotonic() + PATIENCE
    while not store.list(f"{name}."):
        assert time.monotonic() < until
        time.sleep(0.005)
    writer.kill()
    writer.communicate()
    with LargeObjects(store, 2) as large:
        assert fetch(large, name, len(content)) in (None, content), "it may have been faster"
        assert large.create(name, content, resume=True)
        assert fetch(large, name, len(content)) == content
        large.delete(name)
    assert store.list(place.own) == []
