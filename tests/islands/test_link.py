"""Test what a link does when downloads and sends need the same buffer."""

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.diloco.toy import config
from tests.islands.by_hand import newest, syncer
from tests.islands.rules.desk import A
from tests.islands.test_peers import same
from tests.islands.trainees import TOKENS, Trainee, trained
from tests.waiting import wait_until
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.islands import link as module
from torchtitan_diloco.islands.followers import Claim, SharedCopies
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.rules.fragment import Boundary, Send
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.names import VERSION, Object, part_name
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import AwayError, DamagedObjectError, FullError
from torchtitan_diloco.store.store import Buffer


def test_a_version_of_others_waits_for_the_buffer_of_a_slow_upload(tmp_path: Path) -> None:
    """It leaves the delta as it was taken, and is applied once the delta is encoded."""
    store = tmp_path / "store"
    chosen = config(0, delay=1)
    total = 80 * 2 * TOKENS
    slow, fast = (
        Trainee(store, name, chosen, total_tokens=total, step_seconds=0.02) for name in "ab"
    )
    encode = slow.peers._encode
    seen = list[tuple[int, int]]()  # version of a part's base, and the newest one afterwards

    def encode_late(part: Part, round_: Round) -> None:
        state = slow.outer.loop.states[part.fragment]
        taken = state.delta.clone()
        if part.number in (2, 4):
            time.sleep(2.5)  # rounds close after a second
        assert torch.equal(state.delta, taken)
        seen.append((part.base, slow.peers.machine.fragments[0].shared.version))
        encode(part, round_)

    slow.peers._encode = encode_late  # type: ignore[method-assign]
    with syncer(store, tmp_path / "scratch"), trained(slow, fast):
        pass
    same(slow, fast)
    assert any(newest_version > base for base, newest_version in seen), "others were merged"
    assert not any(ledger.lost for slot in newest(store).slots for ledger in slot.ledgers)


def test_a_download_is_dropped_if_its_base_was_reset_meanwhile(tmp_path: Path) -> None:
    store = tmp_path / "store"
    total = 60 * 2 * TOKENS
    first, second = (Trainee(store, name, config(8), total_tokens=total) for name in "ab")
    prepare = first.peers._copies.prepare
    calls = count(1)
    seen = list[bool]()

    def reset_meanwhile(
        fragment: int, content: Buffer, is_claimed: Callable[[], bool]
    ) -> str | None:
        checksum = prepare(fragment, content, is_claimed)
        if next(calls) == 9:
            link = first.peers._link
            assert link is not None
            own = link.machine.fragments[fragment]
            with link._changed:
                link.machine.on_checksum(fragment, own.applied, "0" * 16)
                seen.append(own.is_wrong)
        return checksum

    first.peers._copies.prepare = reset_meanwhile  # type: ignore[method-assign]
    with syncer(store, tmp_path / "scratch"), trained(first, second):
        pass
    same(first, second)
    assert seen == [True]
    slots = newest(store).slots
    assert any(ledger.lost for slot in slots for ledger in slot.ledgers)


def test_a_download_that_fails_while_a_send_waits_for_its_buffer_is_an_error() -> None:
    stored = Object(VERSION, 1, 0, 1)
    part = Part(fragment=0, number=1, base=0, checksum="0", start=0, end=1)

    def fail(_: int, __: Buffer, is_claimed: Callable[[], bool]) -> str | None:
        while not is_claimed():
            time.sleep(0.01)
        raise ValueError("the device is lost")

    machine = SimpleNamespace(
        incarnation=A,
        news=[],
        wanted=lambda: [stored],
        boundary=lambda _: Boundary(0, sends=[Send(part)], is_training=True),
    )
    large = SimpleNamespace(get=lambda _, into: into[:10])
    copies = SimpleNamespace(values=lambda _: 1, prepare=fail)
    link = Link(
        cast("Run", SimpleNamespace(large=large)),
        cast("Island", machine),
        cast("SharedCopies", copies),
        ["0"],
    )
    threading.Thread(target=link._guard, args=(link._download,), daemon=True).start()
    wait_until(lambda: link._claims[0] is Claim.PREPARING, "a claim")
    with pytest.raises(ValueError, match="the device is lost"):
        link.decide()


def test_what_cannot_be_read_delays_no_other_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes its place if that lasts, although the store is there."""
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.001)
    monkeypatch.setattr("torchtitan_diloco.islands.transfers.UNREADABLE_SECONDS", 0.05)
    updates = [Object(VERSION, 50 + number, number, 1) for number in range(2)]
    missing = list[Object]()
    read = list[str]()

    def get(name: str, **_: object) -> None:
        read.append(name)
        if name == updates[0].name:
            raise AwayError(f"{name} cannot be read")
        raise DamagedObjectError(f"{name} is damaged")

    def on_missing(stored: Object) -> None:
        missing.append(stored)
        if missing.count(updates[0]) > 1:
            link._closed.set()

    machine = SimpleNamespace(wanted=lambda: updates, on_missing=on_missing, incarnation=A)
    run = SimpleNamespace(large=SimpleNamespace(get=get))
    copies = SimpleNamespace(values=lambda _: 1)
    link = Link(cast(Run, run), cast(Island, machine), cast(SharedCopies, copies), ["0", "0"])
    with pytest.raises(module._ClosedError):
        link._download()
    assert read[:2] == [updates[0].name, updates[1].name]
    assert updates[0] in missing


def test_old_parts_are_deleted_while_others_wait_for_their_upload() -> None:
    """An island whose uploads take longer than a cycle always has one that waits. A deletion that
    fails is tried again."""
    done = list[str]()
    old = ["old"]
    failures = [AwayError("the store is away"), FullError("the quota is used up")]

    def delete(name: str) -> None:
        if failures:
            raise failures.pop()
        done.append(f"delete {name}")

    def create(name: str, _: memoryview, **__: bool) -> bool:
        done.append(name)
        return True

    def take_garbage() -> list[str]:
        taken = old.copy()
        old.clear()
        return taken

    machine = SimpleNamespace(
        incarnation=A,
        may_found=False,
        is_founder=False,
        fragments=[0],
        take_garbage=take_garbage,
        on_stored=lambda *_, **__: None,
    )
    link = Link(
        cast("Run", SimpleNamespace(large=SimpleNamespace(create=create, delete=delete))),
        cast("Island", machine),
        cast("SharedCopies", SimpleNamespace(values=lambda _: 1)),
        ["0"],
    )
    for number in (1, 2, 3):
        part = Part(fragment=0, number=number, base=0, checksum="0", start=0, end=1)
        link._uploads.put((part, torch.zeros(4, dtype=torch.uint8)))
    thread = threading.Thread(target=link._guard, args=(link._upload,), daemon=True)
    thread.start()
    wait_until(lambda: len(done) == 4, "all uploads")
    link._closed.set()
    thread.join()
    assert link._failure is None
    first, second, third = (part_name(A, 0, number) for number in (1, 2, 3))
    assert done == [first, second, "delete old", third]


def test_an_island_leaves_although_a_full_quota_refuses_to_delete_its_note() -> None:
    def refuse(_: str) -> None:
        raise FullError("the quota is used up")

    done = list[str]()
    run = SimpleNamespace(
        brief=SimpleNamespace(delete=refuse), close=lambda: done.append("the store")
    )
    copies = SimpleNamespace(stop=lambda: done.append("the copies"))
    link = Link(
        cast("Run", run),
        cast("Island", SimpleNamespace(incarnation=A)),
        cast("SharedCopies", copies),
        [],
    )
    link._threads = []
    link.close(deletes_note=True)
    assert done == ["the copies", "the store"]
