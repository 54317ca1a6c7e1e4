"""Chunks of a large object over a link that is too slow for as many at a time as are allowed."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.store.places import PATIENCE
from tests.waiting import wait_until
from torchtitan_diloco.store import AwayError, LargeObjects, open_store
from torchtitan_diloco.store import large as large_objects


def test_a_slow_link_has_fewer_chunks_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at a time get no answer in time, nor do two, and one does."""
    store = open_store(tmp_path)
    large = LargeObjects(store, 4, chunk_bytes=1000)
    real = store.create
    lock = threading.Lock()
    in_flight = set[str]()
    together = threading.Barrier(1)
    most = list[int]()

    def create(name: str, *arguments: Any, **options: Any) -> bool:
        with lock:
            in_flight.add(name)
            most.append(len(in_flight))
        try:
            if together.parties > 1:
                together.wait(PATIENCE)
                raise AwayError("no answer")
            return real(name, *arguments, **options)
        finally:
            with lock:
                in_flight.remove(name)

    monkeypatch.setattr(store, "create", create)
    content = bytes(number % 251 for number in range(4000))
    for limit in (4, 2):
        together = threading.Barrier(limit)
        most.clear()
        with pytest.raises(AwayError, match="no answer"):
            large.create("a", content, resume=True)
        wait_until(lambda: not in_flight, "the end of the chunks in flight")
        assert max(most) == limit
    together = threading.Barrier(1)
    monkeypatch.setattr(large_objects, "QUICK_SECONDS", 0.0)
    most.clear()
    assert large.create("a", content, resume=True)
    assert max(most) == 1
    assert bytes(large.get("a", len(content)) or b"") == content
    monkeypatch.setattr(large_objects, "QUICK_SECONDS", 60.0)
    assert large.create("b", content)
    assert large._up.limit == 4, "more again, as they are fast"
    large.close()
    store.close()
