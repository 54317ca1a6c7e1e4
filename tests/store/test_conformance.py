"""Every store keeps its promises."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.store.places import PATIENCE, Place, seaweed_place, start_writer
from tests.store.seaweed import SeaweedServer
from torchtitan_diloco.store import (
    MOST_BYTES,
    ClosedError,
    DamagedObjectError,
    Kind,
    RefusedError,
    Store,
    StoreError,
    open_store,
)

SEGMENTS = some.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
CONTENTS = some.binary(max_size=2000)
SAME_STORE = settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def test_an_object_is_created_once(place: Place, store: Store) -> None:
    name = f"{place.own}a"
    assert store.get(name) is None
    assert store.create(name, b"first")
    assert store.create(name, b"first"), "a repeated attempt"
    assert not store.create(name, b"second")
    assert not store.create(name, b"")
    stored = store.get(name)
    assert stored is not None
    assert stored.content == b"first"
    store.delete(name)
    store.delete(name)
    assert store.get(name) is None
    assert store.create(name, b"second")


def test_a_note_is_replaced(place: Place, store: Store) -> None:
    for content in (b"1", b"2" * 1000, b""):
        store.replace(place.note, content)
        stored = store.get(place.note)
        assert stored is not None
        assert stored.content == content
        assert 0 <= stored.age < PATIENCE
    [entry] = store.list(place.notes)
    assert entry[:2] == (place.note, 0)
    assert 0 <= entry.age < PATIENCE


def test_each_replacement_has_another_tag(place: Place, store: Store) -> None:
    """Contents of one size, several in each second: some stores give only whole seconds."""
    tags = list[str]()
    for number in range(10):
        store.replace(place.note, b"%03d" % number, durable=False)
        [entry] = store.list(place.notes)
        assert [again.tag for again in store.list(place.notes)] == [entry.tag]
        assert entry.size == 3
        tags.append(entry.tag)
        time.sleep(0.02)
    assert len(set(tags)) == len(tags)


def test_the_kind_of_a_store(place: Place, store: Store) -> None:
    assert store.kind is (Kind.FOLDER if place.kind == "folder" else Kind.NEAR)


@SAME_STORE
@given(segments=some.lists(SEGMENTS, min_size=1, max_size=3), content=CONTENTS)
def test_any_name_and_content(
    place: Place, store: Store, segments: list[str], content: bytes
) -> None:
    name = f"{place.own}{len(segments)}/{'/'.join(segments)}"
    assert store.create(name, content)
    stored = store.get(name)
    assert stored is not None
    assert stored.content == content
    assert name in [entry.name for entry in store.list(place.own)]
    store.delete(name)


def test_a_list_is_sorted_and_begins_where_it_is_told_to(place: Place, store: Store) -> None:
    names = ["b", "a", "b.1", "b-1", "a/c/d", "a/b", "ab", "a.x", "B", "c0", "c1"]
    names.remove("a")  # the folder of others
    written = sorted(f"{place.own}{name}" for name in names)
    for name in written:
        assert store.create(name, name.encode())
    for prefix in ("", "a", "a/", "a/c", "b", "b.", "c", "d"):
        expected = [name for name in written if name.startswith(place.own + prefix)]
        assert [entry.name for entry in store.list(place.own + prefix)] == expected, prefix
        for after in written:
            later = [name for name in expected if name > after]
            assert [entry.name for entry in store.list(place.own + prefix, after)] == later
    assert {entry.size for entry in store.list(f"{place.own}b.")} == {len(f"{place.own}b.1")}


def test_a_list_may_be_short(place: Place, store: Store) -> None:
    names = {f"{place.own}{number}" for number in range(5)}
    for name in names:
        store.create(name, b"")
    listed = [entry.name for entry in store.list(place.own, most=3)]
    assert len(listed) == 3
    assert listed == sorted(listed)
    assert set(listed) < names
    assert {entry.name for entry in store.list(place.own, most=5)} == names
    assert len(store.list(place.own, after=f"{place.own}2", most=3)) == 2


@pytest.mark.parametrize("name", ["", "..", "a/../b", ".a", "a/.b", "/a", "a/", "a//b", "a b", "ä"])
def test_no_other_names(store: Store, name: str) -> None:
    for call in (store.get, store.delete, lambda name: store.create(name, b"")):
        with pytest.raises(StoreError, match="is not a valid name of an object"):
            call(name)


def test_sizes_are_bounded(place: Place, store: Store) -> None:
    with pytest.raises(StoreError, match="split it into chunks"):
        store.create(f"{place.own}a", bytes(MOST_BYTES + 1))
    assert store.create(f"{place.own}a", bytes(MOST_BYTES))
    stored = store.get(f"{place.own}a", large=True)
    assert stored is not None
    assert stored.content == bytes(MOST_BYTES)


def test_a_reader_bounds_what_it_reads(place: Place, store: Store) -> None:
    name = f"{place.own}bounded"
    store.create(name, b"1234")
    stored = store.get(name, most=4)
    assert stored is not None
    assert stored.content == b"1234"
    with pytest.raises(DamagedObjectError, match="at most"):
        store.get(name, most=3)


def test_of_several_processes_one_creates(place: Place, store: Store) -> None:
    count = 20
    owners = ("one", "two", "three")
    prefix = f"{place.own}race/"
    writers = [start_writer(place, "race", prefix, owner, str(count)) for owner in owners]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    created = [json.loads(writer.communicate(timeout=PATIENCE)[0]) for writer in writers]
    for number in range(count):
        winners = [owner for owner, results in zip(owners, created, strict=True) if results[number]]
        stored = store.get(f"{prefix}{number}")
        assert stored is not None
        assert [stored.content.decode()] == winners


def test_a_list_has_all_that_was_there_before(place: Place, store: Store) -> None:
    created = list[str]()
    count = 60 if place.kind == "folder" else 25

    def create() -> None:
        for number in range(count):
            store.create(f"{place.own}{number:03d}", b"")
            created.append(f"{place.own}{number:03d}")

    thread = threading.Thread(target=create)
    thread.start()
    while thread.is_alive():
        before = list(created)
        names = [entry.name for entry in store.list(place.own)]
        assert names == sorted(names)
        assert set(before) <= set(names)
    thread.join()
    assert [entry.name for entry in store.list(place.own)] == created


def test_readers_see_one_content_or_the_other(place: Place, store: Store) -> None:
    contents = [bytes([number]) * 5000 for number in range(20)]
    store.replace(place.note, contents[0])
    done = threading.Event()

    def replace_all() -> None:
        for content in contents:
            store.replace(place.note, content)
        done.set()

    thread = threading.Thread(target=replace_all)
    thread.start()
    seen = 0
    while not done.is_set():
        stored = store.get(place.note)
        assert stored is not None
        assert stored.content in contents
        seen += 1
    thread.join()
    assert seen


@pytest.mark.parametrize("damage", ["truncated", "altered", "emptied", "longer"])
def test_damage_is_named(place: Place, store: Store, damage: str) -> None:
    name = f"{place.own}a"
    store.create(name, b"content" * 10)
    raw = place.read_raw(name)
    place.write_raw(
        name,
        {
            "truncated": raw[:-30],
            "altered": b"C" + raw[1:],
            "emptied": b"",
            "longer": raw + bytes(MOST_BYTES),
        }[damage],
    )
    with pytest.raises(DamagedObjectError, match=name):
        store.get(name)


def test_a_login_writes_below_its_own_names_only(seaweed: SeaweedServer, tmp_path: Path) -> None:
    """What it may not is refused at once, and not tried again."""
    place = seaweed_place(seaweed, tmp_path)
    store = place.open().with_patience(5.0)
    owner = open_store(seaweed.join_file(tmp_path / "owner.toml", "owner"))
    for name in ("run/1", "version/1", "found/a/1", "change/1", "part/site-b/1", "island/site-b/1"):
        owner.replace(name, b"")
        for verb, call in (
            ("create", lambda name: store.create(f"{name}x", b"")),
            ("replace", lambda name: store.replace(name, b"1")),
            ("delete", store.delete),
        ):
            with pytest.raises(RefusedError, match=rf"no permission to {verb} {name}x? .*grant it"):
                call(name)
        stored = store.get(name)
        assert stored is not None
        assert stored.content == b""
        owner.delete(name)


@pytest.mark.parametrize("writes", ["", "part", "island"])
def test_a_store_is_tested_where_its_login_may_write(
    seaweed: SeaweedServer, tmp_path: Path, writes: str
) -> None:
    place = seaweed_place(seaweed, tmp_path)
    open_store(place.location, writes=writes and f"{writes}/{place.name}/")
    with pytest.raises(RefusedError, match=r"no permission to create part/site-b/test-"):
        open_store(place.location, writes="part/site-b/")
    root = seaweed.join_file(tmp_path / "root.toml")
    with pytest.raises(RefusedError, match=r"no permission to create test-"):
        open_store(root)
    assert isinstance(open_store(root, writes=None).list(place.own), list)


def test_what_a_killed_test_has_left_is_deleted(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_over = f"{place.own}test-{16 * 'a'}"
    of_others = [f"{place.own}{name}" for name in ("test-notes", f"test-{16 * 'b'}/run", "tests")]
    for name in (left_over, *of_others):
        store.create(name, b"")
    store.self_test(place.own)
    assert store.get(left_over) is not None, "it may be that of another process"
    monkeypatch.setattr("torchtitan_diloco.store.store.LEFT_SECONDS", -1.0)
    store.self_test(place.own)
    assert {listed.name for listed in store.list(place.own)} == {*of_others}


def test_a_closed_store_says_so(place: Place) -> None:
    store = place.open()
    store.close()
    with pytest.raises(ClosedError):
        store.get("a")
