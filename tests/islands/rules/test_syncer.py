"""What the syncer decides, case by case. Each was a hole in the first rules."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.islands.rules.desk import A, B, C, Desk, checksum, founded, round_of_all
from torchtitan_diloco.islands.rules.changes import Set
from torchtitan_diloco.islands.rules.decision import (
    PROTOCOL,
    REPLACED,
    RUNNING,
    Decision,
    Fate,
    Kept,
    Ledger,
    NewerProtocolError,
    Seen,
    SharedFragment,
    Slot,
    Stored,
    decode_decision,
    encode_decision,
)
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.names import VERSION, Object
from torchtitan_diloco.islands.rules.note import NotedVitals
from torchtitan_diloco.islands.rules.presence import WITHOUT_WORK


def test_a_round_of_all_takes_a_whole_outer_step() -> None:
    desk = Desk(founded())
    round_of_all(desk, 10)
    round_of_all(desk, 20)
    assert [merge.version for merge in desk.merges] == [1, 2]
    assert [merge.weight_of_all for merge in desk.merges] == [20, 20]
    assert desk.state.fragments[0].version == 2
    assert [desk.ledger(slot).taken for slot in (0, 1)] == [20, 20]


def test_late_halves_of_a_round_do_not_move_twice_as_far() -> None:
    desk = Desk(founded())
    round_of_all(desk, 10)
    desk.note(A, desk.part(0), step=20)
    desk.pass_time(0.3)
    assert len(desk.merges) == 1, "it waits for the other one"
    for step in (21, 22, 23):
        desk.note(B, step=step)
        desk.note(A, desk.part(0), step=step)
        desk.pass_time(0.5)
    assert [waiting_part.slot for waiting_part in desk.merges[1].parts] == [0]
    assert desk.merges[1].weight_of_all == 20, "with the usual weight of the missing island"


def test_a_part_of_too_many_samples_does_not_end_the_run() -> None:
    desk = Desk(founded())
    desk.note(A, desk.part(0, samples=10**6), step=1)
    desk.pass_time(2.0)
    assert desk.ledger(0).fate is Fate.TOO_LONG
    assert desk.ledger(0).taken == 0
    assert not desk.state.ended
    assert not desk.merges


def test_a_loss_of_too_many_samples_spoils_no_slot() -> None:
    desk = Desk(founded())
    desk.note(A, desk.part(0, samples=10**6, is_loss=True, weight=0, size=0), step=1)
    desk.pass_time(1.0)
    assert desk.ledger(0).taken == 0


@pytest.mark.parametrize(
    ("changed", "fate"),
    [
        ({"base": 1}, Fate.WRONG_BASE),
        ({"checksum": "f"}, Fate.WRONG_BASE),
        ({"start": 1, "end": 9}, Fate.WRONG_START),
        ({"end": 0}, Fate.MALFORMED),
        ({"weight": 11}, Fate.TOO_HEAVY),
        ({"size": 10**9}, Fate.TOO_HEAVY),
        ({"size": 0}, Fate.TOO_HEAVY),
        ({"fragment": 9}, Fate.NONE),
        ({"number": 7}, Fate.NONE),
    ],
)
def test_what_does_not_count_is_refused_with_a_reason(changed: dict[str, Any], fate: Fate) -> None:
    desk = Desk(founded())
    desk.note(A, desk.part(0, **changed), step=10)
    desk.pass_time(0.5)
    assert (desk.ledger(0).fate, desk.ledger(0).taken) == (fate, 0)
    desk.note(A, desk.part(0), step=10)
    desk.pass_time(2.0)
    assert desk.ledger(0).fate is Fate.MERGED, "the next one counts"


def test_a_part_is_not_merged_again_from_an_older_base() -> None:
    """Theta - P of before the last part's version contains that part, too."""
    desk = Desk(founded())
    round_of_all(desk, 10)
    desk.note(A, desk.part(0, base=0, checksum=checksum(0)), step=20)
    desk.pass_time(1.0)
    assert desk.ledger(0).fate is Fate.STALE


def test_a_malformed_part_does_not_silence_its_island() -> None:
    desk = Desk(founded(fragments=2))
    other = desk.part(0, fragment=1)
    desk.note(A, b'[0,1,-1,"",0,0]', other, step=10)
    desk.pass_time(2.5)
    assert desk.ledger(0).fate is Fate.MALFORMED
    assert desk.ledger(0, 1).fate is Fate.MERGED


def test_an_island_that_never_delivers_delays_two_versions() -> None:
    desk = Desk(founded())
    waited = list[float]()
    for number in range(1, 6):
        began = desk.now
        while len(desk.merges) < number:
            step = round(10 * desk.now)
            desk.note(A, desk.part(0), step=10 * number + step)
            desk.note(B, step=step)
            desk.pass_time(0.1)
            assert desk.now < began + 5
        waited.append(desk.now - began)
        desk.pass_time(0.5)
    assert waited[0] >= 1.0
    assert max(waited[2:]) < 0.5


def test_a_late_part_opens_no_round_of_its_own() -> None:
    desk = Desk(founded())
    round_of_all(desk, 10)
    late = desk.part(1)
    for step in range(12, 18):
        desk.note(A, step=step)
        desk.note(B, late, step=step)
        desk.pass_time(0.3)
        assert not desk.state.fragments[0].is_open
    desk.note(A, step=20)
    desk.note(B, late, step=20)
    desk.pass_time(0.3)
    assert desk.state.fragments[0].is_open


def test_the_part_of_an_island_that_is_gone_is_merged_at_once() -> None:
    desk = Desk(founded((A,)))
    round_of_all_alone = desk.part(0)
    desk.note(A, round_of_all_alone, step=10)
    desk.pass_time(2.0)
    desk.note(A, desk.part(0), step=12)
    desk.pass_time(0.5)
    assert desk.ledger(0).number == 1, "not H steps yet"
    desk.pass_time(10.0)
    assert desk.ledger(0).number == 2


def test_an_island_that_leaves_after_a_late_part_waits_for_no_cycle_of_the_others() -> None:
    """Its machine may be taken away after half a minute."""
    desk = Desk(founded((A, B), sync_every=500))
    round_of_all(desk, 500)
    desk.note(A, desk.part(0), step=1000)
    desk.note(B, step=990)
    desk.pass_time(2.0)
    late = desk.part(1, base=1, checksum=checksum(1))
    for step in range(1010, 1040, 10):
        desk.note(A, step=step)
        desk.note(B, late, step=step)
        desk.pass_time(0.5)
    assert desk.ledger(1).number == 1, "a late part opens no round"
    for number in (2, 3):
        desk.note(A, step=1030 + 10 * number)
        part = late if number == 2 else desk.part(1)
        desk.note(B, part, step=1030, is_idle=True)
        desk.pass_time(1.5)  # the grace period of the other one
        assert desk.ledger(1).number == number
    for step in range(1070, 1100, 10):
        desk.note(A, step=step)
        desk.note(B, desk.part(1), step=1030, is_idle=True)
        desk.pass_time(0.5)
    assert desk.ledger(1).number == 3, "it cannot close rounds as fast as it sends"


def test_an_outage_of_the_store_takes_no_slot() -> None:
    desk = Desk(founded((A, B), slots=2))
    desk.note(A, step=1)
    desk.note(B, step=1)
    desk.pass_time(1.0)
    desk.pass_time(120.0, listens=False)
    for _ in range(8):  # a spare is back first
        desk.note(C, wish="join")
        desk.pass_time(0.5)
    assert desk.state.owners() == [A, B]


def test_a_spare_takes_the_slot_of_one_that_is_silent_or_never_delivers() -> None:
    desk = Desk(founded((A, B), slots=2))
    for step in range(120):
        desk.note(A, step=step)
        desk.note(C, wish="join")
        desk.pass_time(0.5)
    assert C in desk.state.owners()
    assert B not in desk.state.owners()
    assert desk.state.told == {}, "it may come back in another slot"


@pytest.mark.parametrize("waits", [2.0, 20.0])
def test_a_spare_takes_no_slot_for_work_that_was_missing_before_the_run(waits: float) -> None:
    """Without parts, an owner keeps its slot for some time of the run, however long it has waited
    for the others."""
    state = founded((), slots=2, slot_seconds=2.0)
    state.settings = msgspec.structs.replace(state.settings, start_with=2)
    desk = Desk(state)
    lasts = WITHOUT_WORK * state.settings.slot_seconds
    for number in range(int(2 * (waits + lasts)) - 1):
        desk.note(A, wish="join", step=0)
        if desk.now >= waits:
            desk.note(B, wish="join", step=0)
            desk.note(C, wish="join", step=0)
        desk.pass_time(0.5)
        assert A in desk.state.owners()
        assert desk.state.begun == (number >= 2 * waits)
    assert desk.state.owners() == [A, B]
    for _ in range(4):
        desk.note(C, wish="join")
        desk.pass_time(0.5)
    assert C in desk.state.owners()


def test_the_next_start_of_a_killed_island_takes_its_slot() -> None:
    """Also if a note of the first one lands after it was killed."""
    desk = Desk(founded((A,), slots=1))
    desk.note(A, step=1)
    desk.pass_time(0.5)
    again = "a/1111"
    for number in range(20):
        desk.note(again, wish="join")
        if number == 2:
            desk.note(A, step=2)
        desk.pass_time(0.5)
    assert desk.state.owners() == [again]
    assert desk.state.told == {A: REPLACED}


def test_the_second_of_two_starts_is_told() -> None:
    desk = Desk(founded((A,), slots=2))
    for step in range(30):
        desk.note(A, step=step)
        desk.note("a/1111", wish="join")
        desk.pass_time(0.5)
    assert desk.state.owners() == [A]
    assert desk.state.told == {"a/1111": RUNNING}


def test_a_number_is_used_once() -> None:
    """Also if an island changes what it has said: it may have been merged by then."""
    desk = Desk(founded())
    desk.note(B, step=10)
    part = desk.part(0)
    desk.note(A, part, step=10)
    desk.pass_time(0.3)
    loss = msgspec.structs.replace(part, end=part.end - 3, is_loss=True)
    desk.note(A, loss, step=11)
    desk.pass_time(3.0)
    assert (desk.ledger(0).number, desk.ledger(0).fate, desk.ledger(0).taken) == (
        part.number,
        Fate.MERGED,
        part.end,
    )


def test_an_older_note_that_lands_late_is_ignored() -> None:
    desk = Desk(founded())
    desk.note(A, step=5, counter=9)
    desk.note(A, desk.part(0), step=4, counter=8)
    desk.pass_time(2.0)
    assert desk.ledger(0).number == 0


def test_a_slot_changes_hands_when_no_part_of_it_waits() -> None:
    desk = Desk(founded((A,), slots=1))
    desk.merges_last = True
    desk.note(A, desk.part(0), step=10)
    desk.pass_time(1.0)
    assert len(desk.merges) == 1
    for _ in range(40):  # its owner is dead
        desk.note(B, wish="join")
        desk.pass_time(0.5)
    assert desk.state.owners() == [A]
    desk.syncer.on_merged(0, 1, checksum(1))
    desk.note(B, wish="join")
    desk.pass_time(1.0)
    assert desk.state.owners() == [B]
    assert desk.ledger(0).taken == 10, "its successor begins there"


def test_it_decides_each_second_while_a_merge_lasts() -> None:
    desk = Desk(founded((A,)))
    desk.merges_last = True
    desk.note(A, desk.part(0), step=10)
    desk.pass_time(1.0)
    before = desk.state.number
    desk.pass_time(30.0)
    assert desk.state.number >= before + 29


def test_a_version_is_announced_before_and_named_after_its_upload() -> None:
    desk = Desk(founded((A,)))
    desk.note(A, desk.part(0), step=10)
    desk.pass_time(2.0)
    [kept] = desk.state.fragments[0].kept[1:]
    version = Object(VERSION, kept.number, 0, 1)
    by_number = {decision.number: decision for decision in desk.decisions}
    assert version in by_number[kept.number].writing
    assert version.name not in {
        stored.name
        for fragment in by_number[kept.number].fragments
        for stored in fragment.objects(0)
    }


def has_ended(desk: Desk) -> bool:
    return desk.state.ended


def test_the_run_ends_with_its_copies_and_goes_on_with_a_larger_total() -> None:
    desk = Desk(founded(total_tokens=40))
    round_of_all(desk, 10)
    round_of_all(desk, 20)
    desk.pass_time(1.0)
    assert has_ended(desk)
    assert desk.state.fragments[0].copies[-1].version == 2
    desk.note(A, desk.part(0), step=30)
    desk.pass_time(1.0)
    assert desk.ledger(0).fate is Fate.OVER
    desk.syncer.on_change("change/1", msgspec.json.encode(Set("total_tokens", "60")))
    desk.pass_time(1.0)
    assert not has_ended(desk)
    round_of_all(desk, 40)
    assert has_ended(desk)


def test_rounds_begin_when_enough_islands_are_there() -> None:
    state = founded(())
    state.settings = msgspec.structs.replace(state.settings, start_with=2)
    desk = Desk(state)
    for _ in range(3):
        desk.note(A, wish="join")
        desk.pass_time(0.3)
    assert not desk.state.begun
    desk.note(B, wish="join")
    desk.pass_time(0.3)
    assert desk.state.begun


def test_another_corpus_gets_a_fresh_slot() -> None:
    desk = Desk(founded(()))
    desk.note(A, wish="join", corpus="aa")
    desk.pass_time(0.3)
    desk.note(A, wish="give", corpus="aa")
    desk.pass_time(0.3)
    desk.note(B, wish="join", corpus="bb")
    desk.note(C, wish="join", corpus="aa")
    desk.pass_time(0.3)
    assert [(slot.owner, slot.corpus) for slot in desk.state.slots] == [(C, "aa"), (B, "bb")]


def has_stopped(desk: Desk) -> bool:
    return desk.syncer.has_stopped


def test_a_stop_in_order_publishes_what_is_merged() -> None:
    desk = Desk(founded())
    desk.merges_last = True
    for slot, incarnation in enumerate((A, B)):
        desk.note(incarnation, desk.part(slot), step=10)
    desk.pass_time(1.0)
    desk.syncer.is_stopping = True
    desk.pass_time(3.0)
    assert not has_stopped(desk)
    desk.syncer.on_merged(0, 1, checksum(1))
    desk.pass_time(1.5)
    assert has_stopped(desk)
    assert desk.state.stopped
    assert desk.state.fragments[0].version == 1
    assert desk.state.fragments[0].outer is None, "the scratch of its machine has it"


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_no_note_breaks_the_syncer(raw: bytes) -> None:
    desk = Desk(founded())
    desk.syncer.on_note(A, raw)
    desk.syncer.on_change("change/1", raw)
    desk.pass_time(0.2)
    assert not desk.merges


_VALUES = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=5)


@given(
    part=st.lists(_VALUES, max_size=13),
    note=st.lists(_VALUES | st.lists(_VALUES, max_size=4), max_size=13),
)
def test_no_list_of_values_in_a_note_breaks_the_syncer(part: list[Any], note: list[Any]) -> None:
    desk = Desk(founded())
    desk.syncer.on_note(A, msgspec.json.encode([1, "", 1, 1, 0, 0.1, False, [], [part]]))
    desk.syncer.on_note(A, msgspec.json.encode(note))
    desk.pass_time(0.2)
    assert desk.state.fragments[0].version == 0


def large(fragments: int, islands: int, versions: int) -> Decision:
    """Return a decision with made-up values that do not deflate."""
    rng = random.Random(0)
    vitals = NotedVitals(0.231, 0.0012, 0.005, 0.01, 3.21, 2.12)

    def ledger() -> Ledger:
        """Return one of a slot whose fragments are at about the same place."""
        taken = 10**6 + rng.randrange(1000)
        return Ledger(990 + rng.randrange(10), taken, 0, Fate.MERGED, 999, 10**5)

    return Decision(
        PROTOCOL,
        123456,
        "0123456789abcdef",
        "run",
        founded().settings,
        [
            SharedFragment(
                [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 1)] * 3,
                version=1000,
                clock=10**9 + rng.randrange(10**6),
                norms=[1.23, 1.24, 1.25, 1.26, 1.27],
                kept=[
                    Kept(1000 - v, f"{rng.getrandbits(64):016x}", 123000 + 3 * f + v)
                    for v in range(versions)
                ],
                copies=[Stored(984, 122000 + f), Stored(992, 122500 + f)],
                outer=Stored(992, 122500 + f),
            )
            for f in range(fragments)
        ],
        [
            Slot([ledger() for _ in range(fragments)], f"site-{island}/0123456789abcdef")
            for island in range(islands)
        ],
        writing=[Object(VERSION, 123400 + f, f, 1001) for f in range(fragments)],
        seen=[
            Seen(rng.randrange(1000) / 10, 0.1, step, 10**9, 10**7, 0.25, vitals, 1)
            for step in range(islands)
        ],
    )


@pytest.mark.parametrize(
    ("fragments", "islands", "kilobytes"), [(4, 2, 2), (24, 4, 9), (100, 16, 50)]
)
def test_a_decision_is_small(fragments: int, islands: int, kilobytes: int) -> None:
    decision = large(fragments, islands, versions=9)
    raw = encode_decision(decision)
    assert len(raw) < 1000 * kilobytes
    assert decode_decision(raw, 123456) == decision


def test_a_decision_of_newer_code_is_an_error_for_people() -> None:
    decision = founded()
    decision.protocol = PROTOCOL + 1
    with pytest.raises(NewerProtocolError, match="install the same version"):
        decode_decision(encode_decision(decision))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_an_altered_decision_is_not_read(place: int, change: int) -> None:
    raw = bytearray(encode_decision(founded()))
    raw[place % len(raw)] ^= change
    with pytest.raises(MalformedError):
        decode_decision(bytes(raw), 1)
    with pytest.raises(MalformedError):
        decode_decision(encode_decision(founded())[: place % len(raw)], 1)
