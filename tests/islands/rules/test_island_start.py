"""An island starts from the right state: its checkpoint, copies of others, or nothing."""

import msgspec
import pytest

from tests.islands.rules.desk import A, B, checksum, founded
from tests.islands.rules.hand import Hand, build_island, founding, saved_of
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.islands.rules.checkpoint import Saved, SavedFragment
from torchtitan_diloco.islands.rules.decision import Decision, Fate, Kept, Ledger
from torchtitan_diloco.islands.rules.founding import SlotStart, WentBackError
from torchtitan_diloco.islands.rules.island import OVER
from torchtitan_diloco.islands.rules.names import COPY, VERSION, Object
from torchtitan_diloco.islands.rules.note import decode_note


def test_a_restart_takes_the_copy_of_its_checkpoint_and_reads_again(hand: Hand) -> None:
    """The part that was undecided is merged, and theta is P: what came after it is read again."""
    hand.step(11)
    saved = saved_of(hand)
    hand.publish()
    again = Hand(hand.state, saved=saved)
    again.boundary()
    assert again.applied == [(0, Mode.TAKE, 0.0), (1, Mode.ADD, 0.0)]
    assert again.island.position == 10
    assert again.island.dropped_samples == 1
    [send] = again.step(10).sends
    assert (send.part.start, send.part.end, send.part.weight) == (10, 20, 10)


@pytest.mark.parametrize("steps", [1, 500])
def test_a_restart_drops_the_tokens_of_work_that_nobody_merged(hand: Hand, steps: int) -> None:
    """Otherwise, an island that has trained alone would stay at the learning rate of the tokens
    that its next incarnation drops."""
    hand.step(10)
    hand.publish()
    hand.step(steps)
    saved = saved_of(hand)
    merged = hand.state.fragments[0].clock
    again = Hand(hand.state, saved=saved)
    assert again.boundary().clock == merged
    assert again.island.dropped_samples == saved.position - hand.state.slots[0].furthest
    assert again.step(1).clock == merged + 1


def test_a_heir_and_then_an_old_checkpoint_merge_nothing_twice(hand: Hand) -> None:
    """Its part 1 is [0, 10), and that of its heir [0, 4)."""
    hand.step(10)
    saved = saved_of(hand)
    hand.state.slots[0].ledgers[0] = Ledger(1, 4, 0, Fate.MERGED, 0, 0)
    again = Hand(hand.state, saved=saved)
    again.boundary()
    [send] = again.step(10).sends
    assert (send.part.number, send.part.start, send.part.end) == (2, 4, 14)


def test_a_checkpoint_with_a_wrong_bit_is_not_carried_on(hand: Hand) -> None:
    saved = saved_of(hand).with_checksums(["bad"])
    again = Hand(hand.state, saved=saved)
    assert again.boundary().applies[0].source == Object(COPY, 1, 0, 0)


@pytest.mark.parametrize("version", [57, 0])
def test_an_old_checkpoint_of_a_run_that_was_founded_again_is_not_trained(version: int) -> None:
    """Its island waits for the copy of the founder, although the run is at version 0 again."""
    saved = Saved("r", [SavedFragment(version, "bad")], [500], [SlotStart(100)], settings=None)
    joins = build_island(saved=saved)
    joins.on_decision(founded((B,)), 0.0)
    assert decode_note(joins.note()).wish == "", "it has no copy yet"
    island = build_island(saved=saved)
    island.on_decision(founded((A, B)), 0.0)
    assert not island.boundary(0.0).applies
    [copy] = island.wanted()
    island.on_held(copy, 0.0)
    assert not island.is_training, "the copy is not applied yet"
    due = island.boundary(0.0)
    assert [(apply.source, apply.mode) for apply in due.applies] == [(copy, Mode.TAKE)]
    assert island.is_training


def test_a_checkpoint_names_its_run_at_any_time(hand: Hand) -> None:
    """Else a restart would found another one in an empty folder."""
    joins = build_island()
    assert joins.save() is None
    joins.on_decision(founded((B,)), 0.0)
    saved = joins.save()
    assert saved is not None
    assert (saved.run, saved.fragments) == ("r", [])
    hand.step(10)
    hand.publish(fate=Fate.NOT_FINITE)
    assert saved_of(hand).run == "r"


def test_a_joiner_takes_a_copy_and_the_versions_after_it() -> None:
    state = founded((B,), fragments=2)
    for number, shared in enumerate(state.fragments):
        shared.version = 9
        shared.kept = [Kept(v, checksum(v), 50 + v) for v in range(10)]
        copy = msgspec.structs.replace(shared.copies[0], version=8, number=40 + number)
        shared.copies.append(copy)
    island = build_island(fragments=2)
    island.on_decision(state, 0.0)
    assert island.wanted() == [
        Object(COPY, 40, 0, 8),
        Object(VERSION, 59, 0, 9),
        Object(COPY, 41, 1, 8),
        Object(VERSION, 59, 1, 9),
    ]
    assert decode_note(island.note()).wish == ""
    for stored in island.wanted():
        island.on_held(stored, 0.0)
    assert decode_note(island.note()).wish == "join"
    island.on_decision(msgspec.structs.replace(state, number=state.number + 1, ended=True), 0.0)
    assert decode_note(island.note()).wish == "", "nothing is left to train"
    assert not island.ending, "it takes the final copies first"
    assert [apply.version for apply in island.boundary(0.0).applies] == [8, 9, 8, 9]
    island.may_go_on = True
    assert not island.boundary(0.0).applies
    assert not island.ending, "the run may be longer soon"
    island.may_go_on = False
    assert not island.boundary(0.0).applies
    assert island.ending == OVER


def test_an_empty_or_another_location_is_an_error_for_people(hand: Hand) -> None:
    saved = saved_of(hand)
    with pytest.raises(UserError, match="run r"):
        build_island(saved=saved).on_empty()
    state = founded((A,))
    state.run = "other"
    with pytest.raises(UserError, match="the checkpoint belongs to run r"):
        build_island(saved=saved).on_decision(state, 0.0)
    may_found = build_island(founds=founding(), saved=saved)
    may_found.on_empty()
    assert may_found.may_found


def test_an_island_that_may_not_found_waits_and_says_for_whom() -> None:
    island = build_island()
    island.on_empty()
    assert not island.may_found
    assert island.news.lines == [
        "the location is empty: waiting for an island that may found the run",
    ]
    unfounded = founded(())
    unfounded.fragments = []
    unfounded.founder = B
    island.on_decision(unfounded, 0.0)
    assert island.news.lines[-1] == "waiting for island b to store the first copies"
    assert not island.is_founder
    founder = build_island(founds=founding())
    unfounded.founder = A
    founder.on_decision(unfounded, 0.0)
    assert founder.is_founder
    founder.on_decision(msgspec.structs.replace(founded(), number=2), 0.0)
    assert not founder.is_founder


@pytest.mark.parametrize("is_saved", [False, True])
def test_another_tokenizer_or_model_is_an_error_for_people(hand: Hand, *, is_saved: bool) -> None:
    """Also if the island resumes."""
    saved = saved_of(hand) if is_saved else None
    with pytest.raises(UserError, match="tokenizer is a here and None in the run"):
        build_island(facts={"tokenizer": "a"}, saved=saved).on_decision(founded(), 0.0)
    with pytest.raises(UserError, match="fragment 0 has other parameters here"):
        build_island(shapes=[[(100, 11)]], saved=saved).on_decision(founded(), 0.0)
    with pytest.raises(UserError, match="2 fragments here and 1 in the run"):
        build_island(fragments=2, saved=saved).on_decision(founded(), 0.0)


@pytest.mark.parametrize("what", ["run", "version", "checksum", "ledger", "slots"])
def test_a_store_that_was_put_back_is_an_error_for_people(hand: Hand, what: str) -> None:
    """A later decision contradicts one that was read."""
    hand.step(10)
    hand.publish()
    older = founded((A,), sync_every=10, delay=2, mixing=0.25)
    older.number = hand.state.number + 1
    if what != "version":
        older.fragments = hand.state.fragments
    if what == "run":
        older.run = "other"
    elif what == "checksum":
        older = msgspec.json.decode(msgspec.json.encode(hand.state), type=Decision)
        older.number += 1
        kept = older.fragments[0].kept
        kept[-1] = msgspec.structs.replace(kept[-1], checksum="ffff")
    elif what == "slots":
        older.slots = []
    with pytest.raises(WentBackError, match="restart the syncer and all islands"):
        hand.island.on_decision(older, hand.now)
