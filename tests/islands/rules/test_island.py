"""An island follows the rules as it trains, in cases that the first rules did not cover."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.islands.rules.desk import A, B, checksum, founded
from tests.islands.rules.hand import Hand
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.islands.rules.commit import STANDSTILL
from torchtitan_diloco.islands.rules.decision import REPLACED, SICK, Fate, Kept, Ledger
from torchtitan_diloco.islands.rules.island import LEFT, REJOIN
from torchtitan_diloco.islands.rules.names import COPY, VERSION, Object
from torchtitan_diloco.islands.rules.note import Part, decode_note
from torchtitan_diloco.islands.rules.settings import RATES


def test_it_sends_at_its_turn_and_mixes_in_time(hand: Hand) -> None:
    assert not hand.step(9).sends
    [send] = hand.step().sends
    assert (send.part.start, send.part.end, send.part.weight, send.part.base) == (0, 10, 10, 0)
    hand.publish()
    hand.step()
    assert hand.applied[-1] == (0, Mode.TAKE, 0.0), "not yet"
    hand.step()
    assert hand.applied[-1] == (1, Mode.MIX, 0.25)
    [send] = hand.step(8).sends
    assert (send.part.start, send.part.end, send.part.weight, send.part.base) == (10, 20, 10, 1)


def test_a_part_says_how_its_bytes_are_made() -> None:
    """A syncer decodes the shards of all ranks with this alone."""
    hand = Hand(founded((A,), codec="int8"), ranks=4)
    hand.boundary()
    [send] = hand.step(10).sends
    assert (send.part.codec, send.part.ranks) == ("int8", 4)
    [listed] = hand.note.read_parts()
    assert isinstance(listed, Part)
    assert (listed.ranks, listed.size) == (4, 100)


def test_a_version_that_comes_late_keeps_half_of_the_local_parameters(hand: Hand) -> None:
    hand.step(15)
    hand.publish()
    hand.boundary()
    assert hand.applied[-1] == (1, Mode.MIX, 0.5)


def test_a_version_without_the_own_part_is_added(hand: Hand) -> None:
    hand.step(10)
    hand.publish(own=False)
    hand.boundary()
    assert hand.applied[-1] == (1, Mode.ADD, 0.0)


def test_it_does_not_send_before_its_last_part_is_applied(hand: Hand) -> None:
    """The part is in version 1, whose bytes are under way: theta - P of version 0 contains it."""
    hand.step(10)
    island = hand.island
    hand.state.fragments[0].kept.append(Kept(1, checksum(1), 5))
    hand.state.fragments[0].version = 1
    hand.state.slots[0].ledgers[0] = Ledger(1, 10, 0, Fate.MERGED, 1, 0)
    hand.state.number += 1
    island.on_decision(hand.state, hand.now)
    assert not hand.step(15).sends
    hand.download()
    assert hand.boundary().sends


@pytest.mark.parametrize("fate", [Fate.STALE, Fate.TOO_LONG, Fate.UNREADABLE])
def test_refused_work_is_sent_again(hand: Hand, fate: Fate) -> None:
    hand.step(10)
    hand.publish(fate=fate)
    [send] = hand.step(10).sends
    assert (send.part.number, send.part.start, send.part.end, send.part.weight) == (2, 0, 20, 20)


def test_what_a_reset_has_lost_is_declared(hand: Hand) -> None:
    """Its part was not finite. The work up to the reset is in no part, so it says so."""
    hand.step(10)
    hand.step(3)
    hand.publish(fate=Fate.NOT_FINITE)
    hand.boundary()
    assert hand.applied[-1] == (0, Mode.RESET, 0.0)
    [part] = hand.note.read_parts()
    loss = hand.sent
    assert part == loss
    assert (loss.is_loss, loss.start, loss.end) == (True, 10, 13)
    ledger = hand.state.slots[0].ledgers[0]
    ledger.number = 2
    ledger.taken = 13
    ledger.fate = Fate.LOSS
    hand.read()
    [send] = hand.step(7).sends
    assert (send.part.start, send.part.end, send.part.weight) == (13, 20, 7)


def test_a_part_that_is_not_finite_becomes_a_loss(hand: Hand) -> None:
    for _ in range(10):
        hand.island.finish_step(1, 1, 0.1)
    [send] = hand.island.boundary(1.0).sends
    hand.island.on_stored(send.part, 0, 1.0, is_finite=False)
    [part] = hand.note.read_parts()
    assert (part.number, getattr(part, "is_loss", False)) == (1, True)
    assert hand.boundary().applies[0].mode is Mode.RESET


def test_a_wrong_bit_is_mended_by_a_copy(hand: Hand) -> None:
    hand.step(10)
    island = hand.island
    hand.publish()
    hand.step()
    island.finish_step(1, 1, 0.1)
    assert len(island.boundary(hand.now).applies) == 1
    island.on_checksum(0, 1, "bad")
    hand.state.fragments[0].copies[-1] = msgspec.structs.replace(
        hand.state.fragments[0].copies[-1], version=1, number=3
    )
    hand.read()
    assert island.fragments[0].copy == Object(COPY, 3, 0, 1)
    hand.boundary()
    assert hand.applied[-1] == (1, Mode.TAKE, 0.0)
    assert (hand.sent.is_loss, hand.sent.start, hand.sent.end) == (True, 10, 12)


def test_a_copy_takes_the_place_of_an_update_that_is_missing(hand: Hand) -> None:
    """Such as in a store that was put back by some seconds under a syncer that goes on."""
    hand.step(10)
    shared = hand.state.fragments[0]
    shared.version = 1
    shared.kept.append(Kept(1, checksum(1), 2))
    hand.state.number += 1
    island = hand.island
    island.on_decision(hand.state, hand.now)
    [update] = island.wanted()
    island.on_missing(update)
    assert island.wanted() == [update], "it may become visible"
    shared.copies.append(msgspec.structs.replace(shared.copies[-1], version=1, number=3))
    [copy] = island.wanted()
    assert copy == Object(COPY, 3, 0, 1)
    shared.version = 2
    shared.kept.append(Kept(2, checksum(2), 4))
    shared.copies.append(msgspec.structs.replace(shared.copies[-1], version=2, number=5))
    [newer] = island.wanted()
    assert newer == Object(COPY, 5, 0, 2)
    island.on_missing(newer)
    assert island.wanted() == [copy, Object(VERSION, 4, 0, 2)], "the older copy is as good"
    island.on_held(copy, hand.now)
    assert island.boundary(hand.now).applies[0].source == copy
    assert island.wanted() == [Object(VERSION, 4, 0, 2)]


def test_it_waits_for_its_grace_at_most_and_not_in_vain() -> None:
    hand = Hand(founded((A,), delay=2, grace=5.0))
    hand.boundary()
    hand.step(10)
    sent = hand.now
    assert hand.step(1).waits_until is None
    assert hand.step(1).waits_until == sent + 5.0
    hand.now = sent + 5.0
    hand.island.heard_at = hand.now
    assert hand.boundary().waits_until is None
    hand.now = sent + 7.0
    hand.publish()
    assert hand.island.fragments[0].trips
    hand.step(8)
    assert hand.step(2).waits_until is None, "round trips take longer than the grace"


def test_it_waits_for_no_decision_that_does_not_come() -> None:
    hand = Hand(founded((A,), delay=0, grace=100.0))
    hand.boundary()
    assert hand.step(10).waits_until is not None
    hand.now += 10
    assert hand.boundary().waits_until is None


def test_without_a_delay_it_waits_at_the_boundary_of_its_send() -> None:
    hand = Hand(founded((A,), delay=0, grace=5.0))
    hand.boundary()
    due = hand.step(10)
    assert len(due.sends) == 1
    assert due.waits_until == hand.now + 5.0
    hand.publish()
    due = hand.boundary()
    assert hand.applied[-1] == (1, Mode.MIX, 0.0)
    assert not due.sends
    assert due.waits_until is None


def test_the_clock_of_the_learning_rate_never_goes_back(hand: Hand) -> None:
    hand.read(ready=[A, B, "c/0000", "d/0000"])
    clocks = [hand.step(10).clock]
    hand.publish()
    clocks.append(hand.step(9).clock)
    hand.read(ready=[A])
    hand.publish(own=False)
    clocks += [hand.step().clock, hand.step().clock]
    assert clocks == sorted(clocks)


def among_four(**changed: Any) -> Hand:
    """Return an island that has applied a version that waited for four."""
    hand = Hand(founded((A,), sync_every=10, delay=2, **changed))
    hand.boundary()
    hand.step(10)
    hand.publish()
    hand.read(ready=[A, B, "c/0000", "d/0000"])
    hand.step(2)
    assert hand.applied[-1] == (1, Mode.MIX, 0.0)
    return hand


def train_alone(hand: Hand, steps: int) -> int:
    """Let an island train while nobody decides, and return its clock."""
    hand.now = max(hand.now, hand.island.heard_at + STANDSTILL + 1.0)
    hand.boundary()
    return hand.step(steps, is_decided=False).clock


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=9))
def test_tokens_count_for_the_others_only_while_somebody_decides(
    spells: list[tuple[bool, int]],
) -> None:
    """Otherwise, an island whose syncer is gone together with the others would count for all."""
    hand = among_four()
    expected = hand.boundary().clock
    for is_decided, steps in spells:
        clock = hand.step(steps).clock if is_decided else train_alone(hand, steps)
        expected += steps * (4 if is_decided else 1)
        assert clock == expected


@given(st.integers(2, 50))
def test_the_clock_jumps_when_the_work_of_an_outage_is_merged(steps: int) -> None:
    """Only the tokens since the send are in no version yet. They still count once."""
    hand = among_four()
    hand.step(8)
    part = hand.sent
    before = train_alone(hand, steps)
    hand.state.fragments[0].clock += 1000
    hand.publish()
    after = hand.boundary().clock
    assert hand.applied[-1][1] is Mode.MIX
    assert after == hand.state.fragments[0].clock + hand.island.position - part.end
    assert after > before


def test_an_island_alone_trains_until_its_own_work_completes_the_run() -> None:
    hand = among_four(total_tokens=200)
    missing = 200 - hand.boundary().clock
    assert train_alone(hand, missing - 1) == 199
    assert hand.boundary().is_training
    assert not hand.step(is_decided=False).is_training


def test_it_sends_early_only_if_the_upload_fits_and_the_turn_does_not() -> None:
    def early(upload: float, steps: int) -> bool:
        hand = Hand(founded((A,), grace=0.5))
        hand.boundary()
        hand.step(steps)
        hand.island.fragments[0].uploads.append(upload)
        hand.state.fragments[0].is_open = True
        hand.read()
        return bool(hand.boundary().sends)

    assert early(upload=0.1, steps=2)
    assert not early(upload=0.6, steps=2), "it would miss the round, and send less"
    assert not early(upload=0.1, steps=7), "its turn comes in time"


@pytest.mark.parametrize(("steps", "every", "steps_left"), [(2, 6, 4), (8, 6, 1), (2, 20, 18)])
def test_after_a_change_of_h_it_sends_h_steps_after_its_last_part(
    hand: Hand, steps: int, every: int, steps_left: int
) -> None:
    """Rounds are not due sooner, so that all islands would wait in vain."""
    hand.step(10)
    hand.publish()
    hand.step(steps)
    settings = msgspec.structs.replace(hand.state.settings, sync_every=every)
    hand.read(settings=settings)
    assert not any(hand.step().sends for _ in range(steps_left - 1))
    assert hand.step().sends


def _sends(hand: Hand, steps: int) -> dict[int, list[int]]:
    """Return the steps in which each fragment is sent, while the syncer merges all parts."""
    steps_of_sends: dict[int, list[int]] = {}
    for _ in range(steps):
        for send in hand.step().sends:
            fragment = send.part.fragment
            steps_of_sends.setdefault(fragment, []).append(hand.island.step)
            shared = hand.state.fragments[fragment]
            ledger = hand.state.slots[0].ledgers[fragment]
            ledger.number = send.part.number
            ledger.fate = Fate.MERGED
            ledger.taken = send.part.end
            shared.version += 1
            shared.kept.append(Kept(shared.version, checksum(shared.version), 5))
            ledger.version = shared.version
            hand.read()
    return steps_of_sends


@pytest.mark.parametrize("every", [5, 8, 100])
@pytest.mark.parametrize("before", [3, 47])
def test_fragments_take_turns_at_equal_distances_after_a_change_of_h(
    every: int, before: int
) -> None:
    """Also those that were never sent."""
    hand = Hand(founded((A,), fragments=4, sync_every=10), fragments=4)
    hand.boundary()
    sent = _sends(hand, before)
    hand.read(settings=msgspec.structs.replace(hand.state.settings, sync_every=every))
    later = _sends(hand, 4 * every)
    first = [later[number][0] for number in range(4)]
    distance = every // 4
    assert [step - first[0] for step in first] == [distance * number for number in range(4)]
    for number, steps in sent.items():
        assert first[number] >= steps[-1] + every
    assert first[0] <= before + every + 1
    for steps in later.values():
        assert {after - before for before, after in pairwise(steps)} <= {every}


def test_an_owner_of_nothing_joins_anew_and_a_replaced_start_ends(hand: Hand) -> None:
    hand.step(10)
    slots = hand.state.slots
    assert decode_note(hand.island.note()).parts
    slots[0].owner = B
    hand.read()
    assert hand.island.ending == REJOIN
    last = decode_note(hand.island.note())
    assert (last.wish, last.parts) == ("", []), "its next start asks for a slot"
    assert hand.island.take_garbage() == []
    again = Hand(founded((A,)))
    again.read(told={A: REPLACED})
    assert again.island.ending == REPLACED


def test_an_island_that_has_left_downloads_nothing(hand: Hand) -> None:
    """Not even the version with its last part, as it no longer has a ledger."""
    hand.step(10)
    hand.island.leave()
    hand.state.slots[0].owner = None
    hand.publish()
    assert hand.island.ending == LEFT
    assert hand.island.wanted() == []


def test_a_sick_island_says_so_and_goes_on(hand: Hand) -> None:
    hand.read(told={A: SICK})
    hand.step(3)
    assert not hand.island.ending
    assert hand.island.is_training
    assert ["numbers are repeatedly wrong" in line for line in hand.island.news.lines] == [True]


def test_a_healed_fragment_declares_its_work_lost(hand: Hand) -> None:
    """The skipped step belongs to what is lost. The part in flight counts, and is added."""
    hand.step(12)
    hand.island.finish_step(1, 0, 0.1)
    hand.island.on_reset(0)
    hand.publish()
    hand.boundary()
    assert hand.applied[-1] == (1, Mode.ADD, 0.0)
    assert (hand.sent.is_loss, hand.sent.start, hand.sent.end) == (True, 10, 13)


def test_a_stream_enters_a_phase_where_it_says(hand: Hand) -> None:
    state = founded((A,), phases=(0.5,), total_tokens=100)
    state.slots[0].entered = []
    hand = Hand(state)
    assert hand.boundary().phases == 0
    hand.step(10)
    hand.state.fragments[0].clock = 50
    hand.read()
    assert hand.island.boundary(hand.now).phases == 1
    hand.island.enter_phase(13)
    assert hand.note.entered == [13]
    assert hand.island.boundary(hand.now).phases == 1
    hand.state.slots[0].entered = [13]
    heir = Hand(hand.state)
    heir.boundary()
    assert heir.island.entered == [13]


def test_a_restart_before_an_entered_phase_enters_the_next_one_after_it() -> None:
    """The work before that position was not merged, so that it is read again."""
    state = founded((A,), phases=(0.2, 0.4), total_tokens=100)
    state.slots[0].entered = [15]
    state.fragments[0].clock = 50
    hand = Hand(state)
    hand.boundary()
    assert hand.island.boundary(hand.now).phases == 2
    assert hand.island.position < 15
    hand.island.enter_phase(hand.island.position)
    assert hand.note.entered == [15, 15]


def test_the_mixing_changes_over_the_run() -> None:
    settings = founded(mixing=0.2, mixing_end=0.6, total_tokens=100).settings
    assert [settings.mixing_at(tokens) for tokens in (0, 50, 100, 200)] == [0.2, 0.4, 0.6, 0.6]
    assert founded(mixing=0.2).settings.mixing_at(50) == 0.2


def test_it_stops_waiting_sooner_where_decisions_are_faster() -> None:
    """On a folder after about two seconds without a decision, in a cloud after eight."""
    for kind, seconds in (("folder", 2.0), ("cloud", 8.0)):
        rates = RATES[kind]._replace(grace=100.0)
        hand = Hand(founded((A,), delay=0, **rates._asdict()))
        hand.boundary()
        assert hand.step(10).waits_until is not None
        hand.now += seconds - 0.1
        assert hand.boundary().waits_until is not None
        hand.now += 0.5
        assert hand.boundary().waits_until is None
