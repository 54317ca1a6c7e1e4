"""Notes of one island or login are bounded: they harm no other island, and fill no decision."""

import itertools

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.islands.rules.desk import SHAPES, A, B, Desk, checksum, founded
from torchtitan_diloco.islands.rules.decision import (
    RUNNING,
    Decision,
    Fate,
    Seen,
    decode_decision,
    encode_decision,
)
from torchtitan_diloco.islands.rules.fields import FURTHEST
from torchtitan_diloco.islands.rules.founding import Founding, encode_founding
from torchtitan_diloco.islands.rules.jobs import Settle
from torchtitan_diloco.islands.rules.names import ISLAND, LARGEST, VERSION
from torchtitan_diloco.islands.rules.note import Note, NotedGauges, NotedVitals, encode_note
from torchtitan_diloco.islands.rules.presence import (
    FORGOTTEN,
    MOST_OF_LOGIN,
    MOST_STARTS,
    SILENT,
    WITHOUT_WORK,
    Presence,
)
from torchtitan_diloco.islands.rules.rounds import HEADROOM
from torchtitan_diloco.islands.rules.settings import MOST_PAUSE
from torchtitan_diloco.islands.rules.syncer import Syncer


def test_losses_do_not_use_up_the_numbers_of_a_slot() -> None:
    """Each may take what was possible since the last one, and not since the last merged part."""
    desk = Desk(founded((A,)))
    for number in range(400):
        samples = [150, 100, 20][number % 3]
        desk.note(A, desk.part(0, samples, is_loss=True, weight=0, size=0), step=1)
        desk.pass_time(0.1)
    assert 50.0 * desk.now < desk.ledger(0).taken <= 100.0 * (desk.now + 3)


def test_a_part_beyond_all_positions_is_refused() -> None:
    state = founded((A,), fastest=1e9)
    state.slots[0].ledgers[0].taken = FURTHEST - 5
    desk = Desk(state)
    desk.note(A, desk.part(0), step=10)
    desk.pass_time(0.5)
    assert desk.ledger(0).fate is Fate.TOO_LONG
    desk.note(A, desk.part(0, is_loss=True, weight=0, size=0), step=10)
    desk.pass_time(0.5)
    assert (desk.ledger(0).fate, desk.ledger(0).taken) == (Fate.TOO_LONG, FURTHEST - 5)


def test_losses_hold_no_slot() -> None:
    """A spare takes the slot of an island that declares its work lost, and delivers nothing."""
    desk = Desk(founded((A,), slots=1))
    for step in range(round(WITHOUT_WORK * 10.0 / 0.5) + 10):
        desk.note(A, desk.part(0, 1, is_loss=True, weight=0, size=0), step=step)
        desk.note(B, wish="join")
        desk.pass_time(0.5)
    assert desk.state.owners() == [B]


def test_the_speed_of_islands_is_measured_before_it_is_limited() -> None:
    desk = Desk(founded((A, B), fastest=0.0, block=1))
    for number in range(3):
        for slot, incarnation in enumerate((A, B)):
            desk.note(incarnation, desk.part(slot, 10), step=10 * (number + 1))
        desk.pass_time(2.0)
    fastest = desk.state.settings.fastest
    assert HEADROOM * 2 <= fastest <= HEADROOM * 10, "two or ten samples a second"
    desk.note(A, desk.part(0, int(fastest) * 100), step=40)
    desk.pass_time(1.0)
    assert desk.ledger(0).fate is Fate.TOO_LONG
    assert any("raise `fastest`" in line for line in desk.syncer.news.lines)


def test_a_slow_start_is_no_speed() -> None:
    """Islands that were started again before their first parts: these have waited for long."""
    desk = Desk(founded((A, B), fastest=0.0, block=1))
    for incarnation in (A, B):
        desk.note(incarnation, step=0)
    desk.pass_time(300.0)
    for number in range(4):
        for slot, incarnation in enumerate((A, B)):
            desk.note(incarnation, desk.part(slot, 10), step=10 * (number + 1))
        desk.pass_time(2.0)
    assert desk.state.settings.fastest >= HEADROOM * 2


def test_a_part_that_has_waited_shortens_the_time_of_no_other() -> None:
    """Its island has trained on meanwhile, and sends all of that next."""
    desk = Desk(founded((A, B), fastest=100.0, block=1))
    desk.merges_last = True
    desk.note(A, desk.part(0, 10), step=10)
    for step in range(11, 100):
        desk.note(A, desk.part(0, 10), step=step)
        desk.pass_time(1.0)
    desk.merges_last = False
    desk.syncer.on_merged(0, 1, checksum(1))
    desk.pass_time(1.0)
    assert desk.ledger(0).fate is Fate.MERGED
    desk.note(A, desk.part(0, 2000), step=2010)
    desk.pass_time(3.0)
    assert (desk.ledger(0).number, desk.ledger(0).fate) == (2, Fate.MERGED)


def test_a_part_is_bounded_before_the_speed_is_known() -> None:
    desk = Desk(founded(fastest=0.0, block=2, total_tokens=10**6))
    desk.note(A, desk.part(0, samples=10**5), step=1)
    desk.pass_time(2.0)
    assert desk.ledger(0).fate is Fate.TOO_LONG
    desk.note(A, desk.part(0, samples=1000), step=1)
    desk.pass_time(2.0)
    assert desk.ledger(0).fate is Fate.MERGED


def test_a_founder_of_small_batches_refuses_nobody() -> None:
    """While no speed is known, an island may send a hundredth of the run."""
    desk = Desk(founded(fastest=0.0, block=1, sync_every=10, total_tokens=10**6))
    desk.note(B, desk.part(1, samples=5000), step=1)
    desk.pass_time(2.0)
    assert desk.ledger(1).fate is Fate.MERGED


def test_a_hundred_starts_of_a_name_are_eight() -> None:
    desk = Desk(founded((A,)))
    starts = [f"a/{number:04x}" for number in range(1, 101)]
    for step in range(20):
        desk.note(A, step=step)
        for incarnation in starts:
            desk.note(incarnation, wish="join")
        desk.pass_time(0.5)
    assert len(desk.syncer.presence.members) == 1 + MOST_STARTS
    assert desk.state.told == dict.fromkeys(starts[:MOST_STARTS], RUNNING)
    assert desk.state.owners() == [A]
    names = [f"{ISLAND}{incarnation}" for incarnation in (*starts, A, B)]
    assert desk.syncer.choose_notes(names) == [
        *(f"{ISLAND}{incarnation}" for incarnation in starts[:MOST_STARTS]),
        f"{ISLAND}{A}",
        f"{ISLAND}{B}",
    ]
    desk.pass_time(SILENT + 1)
    desk.note(starts[50], wish="join")
    assert starts[50] in desk.syncer.presence.members, "the others are silent"


def test_islands_of_a_login_are_bounded_and_owners_are_heard_always() -> None:
    owners = tuple(f"site.{number}/0000" for number in range(3))
    desk = Desk(founded(owners))
    for number in range(100):
        desk.note(f"site.x{number}/0000", wish="join")
    desk.note("other/0000", wish="join")
    for owner in owners:
        desk.note(owner, step=1)
    assert len(desk.syncer.presence.members) == MOST_OF_LOGIN + 1 + 3


def test_messages_to_incarnations_that_are_gone_are_forgotten() -> None:
    """Also those that this syncer has never heard."""
    state = founded((A,))
    state.told = {f"x/{number:04x}": RUNNING for number in range(500)}
    desk = Desk(state)
    for step in range(round(FORGOTTEN) + 10):
        desk.note(A, step=step)
        desk.pass_time(1.0)
        desk.syncer.garbage([])
    assert desk.state.told == {}


def test_an_island_is_heard_although_polls_are_rare() -> None:
    presence = Presence()
    for poll in range(10):
        presence.listen(MOST_PAUSE * poll, pause=MOST_PAUSE)
        presence.hear(A, Note(counter=poll + 1, step=poll), [A])
        assert presence.silence(A) == 0.0
    presence.listen(MOST_PAUSE * 9 + 100.0, pause=MOST_PAUSE)
    assert presence.is_heard(A), "it was an outage"
    presence.listen(MOST_PAUSE * 10 + 100.0, pause=MOST_PAUSE)
    assert presence.is_silent(A)


def test_a_sweep_before_the_run_is_founded_forgets_nobody() -> None:
    syncer = Syncer(None, "session", 0.0, 0.0)
    founding = Founding(run="r", settings=founded().settings, shapes=[SHAPES], checksums=["0"])
    syncer.on_founding(A, encode_founding(founding))
    syncer.on_note(A, encode_note(Note(counter=1)))
    for now in (1.0, 2.0):
        syncer.tick(now)
    assert syncer.state is not None
    assert not syncer.state.is_founded
    assert syncer.garbage([]) == []


def test_starts_that_are_gone_leave_nothing_in_memory() -> None:
    """Runs last for months, and islands of spot machines start many times a day."""
    desk = Desk(founded((A, B)))
    for number in range(3):
        for slot, name in enumerate((A, B)):
            desk.note(name, desk.part(slot), step=10 * number)
        desk.pass_time(1.0)
    (round_,) = desk.syncer.rounds
    assert B in round_.weights
    desk.note(B, wish="give")
    desk.pass_time(FORGOTTEN + 5.0)
    desk.syncer.garbage([])
    speeds = desk.syncer._speeds
    kept = [*round_.weights, *round_.began, *round_.steps, *speeds._speeds]
    kept += [incarnation for incarnation, _ in speeds._merged_at]
    assert B not in kept
    assert A in kept


def test_malformed_values_for_users_silence_no_island() -> None:
    desk = Desk(founded((A,)))
    for raw in (b'["x",{}]', b"[[1e300]]", b"{}", b"[[],null,[1,2,3]]"):
        desk.note(A, step=3, gauges=msgspec.Raw(raw))
        desk.pass_time(0.3)
        [seen] = desk.state.seen
        assert seen is not None
        assert seen.step == 3
        assert seen.vitals == NotedVitals()


DEEP = b"[" * 100_000 + b"]" * 100_000
"""JSON that is nested too deeply to be decoded."""


def test_no_bytes_of_a_note_end_the_syncer() -> None:
    desk = Desk(founded((A,)))
    note = b'[%d,"",0,0,0,0.0,false,[],[%b],"",false,[],%b]'
    for raw in (
        DEEP,
        b"",
        b"\xff",
        b'[2,"\xff"]',
        note % (1, DEEP, b"[]"),
        note % (1, b'"\xff"', b"[]"),
        note % (1, b"[0,1," + DEEP + b"]", DEEP),
        note % (1, b"1e999", b'["\xff"]'),
    ):
        desk.syncer.on_note(A, raw)
        desk.pass_time(0.3)
    desk.note(A, step=2)
    desk.note(A, step=3)
    desk.pass_time(0.3)
    [seen] = desk.state.seen
    assert seen is not None
    assert seen.step == 3
    desk.syncer.on_change("change/1", DEEP)
    desk.pass_time(0.3)
    assert [name for name, reason in desk.state.done.items() if reason] == ["change/1"]


_EXTREME = st.sampled_from([0, 1, FURTHEST - 1, FURTHEST, LARGEST])
_FLOATS = st.sampled_from([0.0, 1e-300, 1.0, 1e6, 1e15, 1e308])


@given(
    fastest=st.sampled_from([0.0, 1e-300, 1.0, 1e9]),
    parts=st.lists(st.tuples(_EXTREME, _EXTREME, _EXTREME, st.booleans()), max_size=4),
    position=_EXTREME,
    loss=_FLOATS,
    seconds=_FLOATS,
)
@example(fastest=1e9, parts=[], position=0, loss=1e308, seconds=0.0)
def test_no_values_of_an_island_make_decisions_unreadable(
    fastest: float,
    parts: list[tuple[int, int, int, bool]],
    position: int,
    loss: float,
    seconds: float,
) -> None:
    """A value that a reader refuses would end the run for all."""
    desk = Desk(founded((A, B), fastest=fastest, tokens_per_sample=10**6, total_tokens=10**15))
    gauges = msgspec.json.encode([[seconds] * 6, loss, [position, loss]])
    for start, end, weight, is_loss in [(0, 10, 10, False), (10, 20, 10, False), *parts]:
        part = desk.part(0, start=start, end=max(1, end), weight=weight, is_loss=is_loss)
        fields = {"tokens": position, "position": position, "entered": [position]}
        step_seconds = min(seconds, 1e6)
        raw = msgspec.Raw(gauges)
        desk.note(A, part, step=end, step_seconds=step_seconds, gauges=raw, **fields)
        desk.pass_time(1.2)
    desk.note(A, wish="give", position=position)
    desk.pass_time(1.5)
    assert decode_decision(encode_decision(desk.state), desk.state.number) == desk.state


# --- what users see of an island ------------------------------------------------------------------


def seen_of(state: Decision, slot: int) -> Seen:
    seen = state.seen[slot]
    assert seen is not None
    return seen


def test_a_decision_has_what_was_last_seen_of_each_owner() -> None:
    desk = Desk(founded())
    gauges = msgspec.json.encode(NotedGauges(vitals=NotedVitals(compute=0.12345), says=7))
    desk.note(A, step=4, tokens=40, position=50, sending=[0], gauges=msgspec.Raw(gauges))
    desk.pass_time(3.0)
    seen = seen_of(desk.state, 0)
    assert (seen.step, seen.tokens, seen.position, seen.says) == (4, 40, 50, 7)
    assert seen.vitals.compute == pytest.approx(0.123)
    assert seen.flags == 2
    assert 1.9 <= seen.heard <= 3.0
    never_heard = seen_of(desk.state, 1)
    assert (never_heard.step, never_heard.tokens, never_heard.position) == (0, 0, 0)


def test_steps_alone_write_no_decisions() -> None:
    """What was seen of islands goes with the next decision, which comes each second at least."""
    desk = Desk(founded())
    before = desk.state.number
    for step in range(100):
        desk.note(A, step=step)
        desk.note(B, step=step)
        desk.pass_time(0.1)
    assert desk.state.number - before <= 15
    assert seen_of(desk.state, 0).step > 80


def test_samples_that_the_next_owner_reads_again_are_counted() -> None:
    desk = Desk(founded((A,), slots=1))
    desk.note(A, desk.part(0), step=10, position=14)
    desk.pass_time(2.0)
    desk.note(A, step=14, position=14)
    for _ in range(20):
        desk.note("a/1111", wish="join")
        desk.pass_time(0.5)
    assert desk.state.owners() == ["a/1111"]
    assert (desk.ledger(0).taken, desk.state.slots[0].read_twice) == (10, 4)
    desk.note("a/1111", wish="give", position=10**11)
    desk.pass_time(0.5)
    assert desk.state.slots[0].read_twice < 10**4, "bounded by time, too"


def test_streams_enter_phases_once_and_before_later_parts_count() -> None:
    state = founded((A, B), phases=(0.002, 0.5), total_tokens=10_000)
    desk = Desk(state)
    desk.note(A, desk.part(0), step=1, entered=[5], position=5)
    desk.pass_time(1.5)
    assert desk.state.slots[0].entered == [], "the run is not there yet"
    assert desk.ledger(0).number == 0, "half of it may be of another phase"
    for slot, incarnation in enumerate((A, B)):
        desk.note(incarnation, desk.part(slot), step=10)
    desk.pass_time(1.0)
    assert desk.state.phases == 1
    desk.note(A, desk.part(0), step=20, entered=[14])
    desk.note(B, step=20, entered=[3])
    desk.pass_time(2.0)
    assert desk.ledger(0).taken == 20
    assert desk.state.slots[0].entered == [14]
    assert desk.state.slots[1].entered == [], "that sample is merged"
    desk.note(A, step=21, entered=[17, 40])
    desk.note(B, step=21, entered=[10**11])
    desk.pass_time(1.0)
    assert desk.state.slots[0].entered == [14]
    assert desk.state.slots[1].entered == [], "no island can be there"


# --- decisions ------------------------------------------------------------------------------------


def test_the_next_version_is_announced_with_the_one_before_it() -> None:
    """So a round needs no decision between its merge and its upload."""
    desk = Desk(founded())
    for number in range(1, 4):
        announced = [stored for stored in desk.state.writing if stored.kind == VERSION]
        assert [stored.version for stored in announced] == [number]
        before = desk.state.number
        for slot, incarnation in enumerate((A, B)):
            desk.note(incarnation, desk.part(slot), step=10 * number)
        desk.pass_time(0.2)
        assert desk.state.fragments[0].version == number
        assert announced[0].number <= before
        desk.note(A, step=10 * number + 1)
        desk.note(B, step=10 * number + 1)
        desk.pass_time(0.5)


@pytest.mark.parametrize(("commit_seconds", "most"), [(0.1, 100), (1.0, 12)])
def test_the_rate_of_decisions_is_limited_and_not_their_distance(
    commit_seconds: float, most: int
) -> None:
    desk = Desk(founded(commit_seconds=commit_seconds))
    desk.pass_time(3.0)
    before = desk.state.number
    times = list[float]()
    for number in range(100):  # each tick has a change
        setting = msgspec.json.encode({"kind": "set", "key": "grace", "value": str(1 + number)})
        desk.syncer.on_change(f"change/{number}", setting)
        known = len(desk.decisions)
        desk.pass_time(0.1)
        times += [desk.now] * (len(desk.decisions) - known)
    assert desk.state.number - before <= most + 5
    gaps = [after - time for time, after in itertools.pairwise(times)]
    assert min(gaps) <= 0.15, "two at once are possible"


def test_a_merge_waits_for_the_version_before_it() -> None:
    """So at most one state of a fragment stands beside the one that counts."""
    desk = Desk(founded())
    for slot, incarnation in enumerate((A, B)):
        desk.note(incarnation, desk.part(slot), step=10)
    desk.pass_time(0.2)
    assert desk.settled == [Settle(0, 1)]
    for slot, incarnation in enumerate((A, B)):
        desk.note(incarnation, desk.part(slot), step=20)
    desk.merges_last = True
    desk.pass_time(2.0)
    desk.commits_last = True
    desk.syncer.on_merged(0, 2, checksum(2))
    desk.pass_time(0.2)
    assert desk.syncer.state is not None
    assert desk.syncer.state.fragments[0].version == 2
    for slot, incarnation in enumerate((A, B)):
        part = desk.part(slot, number=3, start=20, end=30, base=2, checksum=checksum(2))
        desk.note(incarnation, part, step=30)
    desk.pass_time(2.0)
    assert len(desk.merges) == 2
    assert desk.settled == [Settle(0, 1)], "version 2 does not count yet"
