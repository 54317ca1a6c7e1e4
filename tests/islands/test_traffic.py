"""Bytes and requests of islands and their syncer, against a store that counts them."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from tests.diloco.toy import config
from tests.islands.by_hand import syncer
from tests.islands.trainees import TOKENS, Trainee, trained
from torchtitan_diloco.base.usage import Usage
from torchtitan_diloco.diloco import Quantization
from torchtitan_diloco.islands import link
from torchtitan_diloco.islands.payload import HEADER_BYTES
from torchtitan_diloco.islands.rules.settings import NOTE_PAUSES, RATES
from torchtitan_diloco.islands.syncing import SWEEP_SECONDS, SWEPT
from torchtitan_diloco.islands.traffic import DECISIONS_OF_ROUND, WRITES_OF_DECISION, Meeting
from torchtitan_diloco.store import Kind
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.large import CHUNK_BYTES

STEPS = 60
VERBS = ("create", "replace", "get", "list", "delete")
Calls = Counter[tuple[str, str]]
"""Number of calls, by verb and the first segment of the name."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[int, Calls]:
    """Let folders count their calls, but those of their own test, and be polled as often as a
    server. Return the calls by the `id` of the folder."""
    found = dict[int, Calls]()

    def counting(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(folder: Folder, name: str, *arguments: Any, **options: Any) -> Any:
            own = found.setdefault(id(folder), Counter())
            own[verb, name.partition("/")[0]] += "test-" not in name
            return call(folder, name, *arguments, **options)

        return counted

    for verb in VERBS:
        monkeypatch.setattr(Folder, verb, counting(verb, getattr(Folder, verb)))
    monkeypatch.setattr(Folder, "kind", Kind.NEAR)
    # Islands that wait look more often. On a busy machine, they wait.
    monkeypatch.setattr(link, "LEAST_POLL", RATES[Kind.NEAR].poll_seconds)
    return found


def requests(own: Calls) -> Usage:
    """Return how often a process has read, and written or listed."""
    reads = sum(count for (verb, _), count in own.items() if verb == "get")
    deleted = sum(count for (verb, _), count in own.items() if verb == "delete")
    return Usage(reads=reads, writes=own.total() - reads - deleted)


def test_islands_transfer_and_ask_what_is_predicted(
    tmp_path: Path, calls: dict[int, Calls]
) -> None:
    store = tmp_path / "store"
    chosen = replace(config(2, delay=1), quantization=Quantization("fp4_e3m0"))
    total = STEPS * 2 * TOKENS
    pair = [
        Trainee(store, name, chosen, total_tokens=total, grace=60.0, step_seconds=0.05)
        for name in "ab"
    ]
    backends = set[int]()

    def note_backend(_: int, one: Trainee) -> None:
        assert one.peers._link is not None
        backends.add(id(one.peers._link.run.store.backend))

    for one in pair:
        one.on_step = partial(note_backend, one=one)
    with syncer(store, tmp_path / "scratch") as process:
        started = time.monotonic()
        with trained(*pair):
            pass
        seconds = time.monotonic() - started
        leading = process._run.store.backend
    fragments = [state.values for state in pair[0].outer.loop.states]
    meeting = Meeting(fragments, chosen, 2, Kind.NEAR, step_seconds=seconds / pair[0].steps)
    check_bytes(meeting, pair)
    assert len(backends) == len(pair)
    for backend in backends:
        check_island(calls[backend], seconds)
        check_requests(calls[backend], meeting.of_island(pair[0].steps))
    check_syncer(calls[id(leading)], seconds)
    check_requests(calls[id(leading)], meeting.of_syncer(pair[0].steps))


def check_bytes(meeting: Meeting, pair: list[Trainee]) -> None:
    """Parts and versions have the predicted sizes, and there are as many as predicted, but for one
    of each fragment at the end."""
    copies = sum(HEADER_BYTES + 4 * values for values in meeting.fragments)
    one_each = sum(map(meeting.message_bytes, meeting.fragments))
    for one in pair:
        usage = meeting.of_island(one.steps)
        assert one.peers.gauges.sent == pytest.approx(usage.sent, abs=one_each)
        received = usage.received - copies  # which gauges do not count
        assert one.peers.gauges.received == pytest.approx(received, abs=one_each)


def check_island(own: Calls, seconds: float) -> None:
    """Each new decision that an island reads is a list and a second read, and the others one."""
    polls = own["get", "run"] - own["list", "run"]
    assert 0 < polls <= 1.1 * seconds / RATES[Kind.NEAR].poll_seconds + 5
    assert (
        0
        < own["replace", "island"]
        <= 1.1 * seconds / NOTE_PAUSES[Kind.NEAR] + own["create", "part"] + 5
    )
    assert own["delete", "part"] > 0
    assert own["list", "part"] == own["get", "part"] == 0, "it knows the chunks of its parts"


def check_syncer(own: Calls, seconds: float) -> None:
    """A decision is a write and a list. Each look lists notes and changes. Versions are listed by
    the sweep alone."""
    poll_seconds = RATES[Kind.NEAR].poll_seconds
    assert own["create", "run"] <= own["list", "run"] <= own["create", "run"] + 5
    assert abs(own["list", "change"] - own["list", "island"]) <= 2
    assert own["list", "change"] <= 1.1 * seconds / poll_seconds + 5
    assert own["get", "island"] <= 2 * 1.1 * seconds / poll_seconds + 10
    versions = own["create", "version"]
    assert versions < own["get", "part"] <= 2 * versions + 2, "the parts of both islands"
    for kind in ("version", "copy", "outer"):
        assert own["get", kind] == 0, "it knows their chunks"
        assert own["list", kind] <= seconds / SWEEP_SECONDS


def check_requests(own: Calls, expected: Usage) -> None:
    """Calls take time, so that there are fewer than predicted, above all on a busy machine."""
    counted = requests(own)
    for many, predicted in ((counted.reads, expected.reads), (counted.writes, expected.writes)):
        assert 0.2 * predicted <= many <= 1.3 * predicted + 20


def test_requests_follow_the_polling_of_the_kind() -> None:
    """A cloud is asked once a second, and a folder fifty times."""
    meeting = Meeting([10**6] * 5, config(), islands=4, kind=Kind.CLOUD, step_seconds=10.0)
    island = meeting.island_a_second
    rounds = 5 / 80.0
    assert island.reads == pytest.approx(2 + 1 * rounds)
    assert island.writes == pytest.approx(1 + 1 + rounds)
    leading = meeting.syncer_a_second
    assert leading.reads == pytest.approx(4 + 4 * rounds)
    copies = 5 / 600
    expected = 2 + len(SWEPT) / SWEEP_SECONDS + WRITES_OF_DECISION + rounds + 2 * copies
    # The outer state of a copy, twice as large as it, has two chunks and a description.
    outer_is_in_chunks = HEADER_BYTES + 8 * 10**6 >= CHUNK_BYTES
    assert leading.writes == pytest.approx(expected + 2 * outer_is_in_chunks * copies)
    folder = replace(meeting, kind=Kind.FOLDER).island_a_second
    decisions = 1 + DECISIONS_OF_ROUND * rounds
    assert folder.reads == pytest.approx(50 + decisions + rounds)
    assert folder.sent == island.sent


def test_an_hour_of_a_long_run_is_its_share() -> None:
    for kind in Kind:
        meeting = Meeting([10**5] * 3, config(), islands=2, kind=kind, step_seconds=0.5)
        steps = 400_000
        in_a_second = [meeting.island_a_second, meeting.syncer_a_second]
        for whole, rate in zip(
            (meeting.of_island(steps), meeting.of_syncer(steps)), in_a_second, strict=True
        ):
            assert list(whole) == pytest.approx(list(rate.times(0.5 * steps)), rel=0.01)
