"""What an island does, case by case. Each was a hole in the first rules."""

from typing import Any

import msgspec
import pytest

from tests.islands.rules.desk import SHAPES, A, B, checksum, founded
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.islands.rules.checkpoint import Saved
from torchtitan_diloco.islands.rules.decision import REPLACED, SICK, Decision, Fate, Kept, Ledger
from torchtitan_diloco.islands.rules.founding import Founding, WentBackError
from torchtitan_diloco.islands.rules.fragment import Boundary
from torchtitan_diloco.islands.rules.island import LEFT, OVER, REJOIN, Island
from torchtitan_diloco.islands.rules.names import COPY, VERSION, Object
from torchtitan_diloco.islands.rules.note import Note, Part, decode_note
from torchtitan_diloco.islands.rules.settings import RATES


def build_island(fragments: int = 1, **options: Any) -> Island:
    return Island(A, **({"facts": {}, "shapes": [SHAPES] * fragments} | options))


def founding(**changed: Any) -> Founding:
    fields: dict[str, Any] = {"run": "r", "settings": founded().settings, "shapes": [SHAPES]}
    return Founding(**(fields | {"checksums": ["0"]} | changed))


class Hand:
    """An island by hand, which holds what it wants at once."""

    def __init__(self, state: Decision, **options: Any) -> None:
        self.now, self.state = 0.0, state
        self.island = build_island(**options)
        self.applied: list[tuple[int, Mode, float]] = []
        self.read()

    def read(self, **changed: Any) -> None:
        """Let it read a decision with these fields, and download what it wants."""
        for key, value in changed.items():
            setattr(self.state, key, value)
        self.state.number += 1
        raw = msgspec.json.encode(self.state)
        self.island.on_decision(msgspec.json.decode(raw, type=Decision), self.now)
        self.download()

    def download(self) -> None:
        while wanted := self.island.wanted():
            self.island.on_held(wanted[0], self.now)

    def boundary(self) -> Boundary:
        """Do what is due, and return what is left."""
        total = Boundary(0)
        while True:
            due = self.island.boundary(self.now)
            for apply in due.applies:
                self.applied.append((apply.version, apply.mode, apply.share))
                self.island.on_checksum(apply.fragment, apply.version, checksum(apply.version))
            for send in due.sends:
                self.island.on_stored(send.part, 100, self.now)
            total.applies += due.applies
            total.sends += due.sends
            if not due.applies and not due.sends:
                total.waits_until, total.clock = due.waits_until, due.clock
                total.is_training = due.is_training
                return total

    def step(self, count: int = 1) -> Boundary:
        for _ in range(count):
            self.now += 0.1
            self.island.heard_at = self.now
            self.island.finish_step(1, 1, 0.1)
            due = self.boundary()
        return due

    @property
    def sent(self) -> Part:
        outstanding = self.island.fragments[0].sent
        assert outstanding is not None
        return outstanding.part

    @property
    def note(self) -> Note:
        return decode_note(self.island.note())

    def publish(self, *, fate: Fate = Fate.MERGED, own: bool = True, keeps: int = 99) -> None:
        """Let the syncer make the next version, with the own part or without."""
        shared, ledger = self.state.fragments[0], self.state.slots[0].ledgers[0]
        if own:
            ledger.number, ledger.fate = self.sent.number, fate
            if fate is Fate.MERGED or fate.is_lost:
                ledger.taken = self.sent.end
        if fate is Fate.MERGED:
            shared.version += 1
            shared.clock += 20
            shared.kept.append(Kept(shared.version, checksum(shared.version), self.state.number))
            shared.kept = shared.kept[-keeps:]
            ledger.version = shared.version if own else ledger.version
        self.read()


def build_hand() -> Hand:
    """Return an island that has begun, alone."""
    hand = Hand(founded((A,), sync_every=10, delay=2, mixing=0.25))
    hand.boundary()
    return hand


@pytest.fixture
def hand() -> Hand:
    return build_hand()


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
    ledger.number, ledger.taken, ledger.fate = 2, 13, Fate.LOSS
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


def test_it_waits_for_its_grace_at_most_and_not_in_vain() -> None:
    hand = Hand(founded((A,), delay=2, grace=5.0))
    hand.boundary()
    hand.step(10)
    sent = hand.now
    assert hand.step(1).waits_until is None
    assert hand.step(1).waits_until == sent + 5.0
    hand.now = hand.island.heard_at = sent + 5.0
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
    assert ["numbers are repeatedly wrong" in line for line in hand.island.news] == [True]


def saved_of(hand: Hand) -> Saved:
    saved = hand.island.save()
    assert saved is not None
    return saved.with_checksums([checksum(one.version) for one in saved.fragments])


def test_a_restart_takes_the_copy_of_its_checkpoint_and_reads_again(hand: Hand) -> None:
    """The part that was undecided is merged, and theta is P: what came after it is read again."""
    hand.step(11)
    saved = saved_of(hand)
    hand.publish()
    again = Hand(hand.state, saved=saved)
    assert again.boundary().clock >= saved.clock
    assert again.applied == [(0, Mode.TAKE, 0.0), (1, Mode.ADD, 0.0)]
    assert again.island.position == 10
    [send] = again.step(10).sends
    assert (send.part.start, send.part.end, send.part.weight) == (10, 20, 10)


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
    assert island.news == [
        "the location is empty: waiting for an island that may found the run",
    ]
    unfounded = founded(())
    unfounded.fragments, unfounded.founder = [], B
    island.on_decision(unfounded, 0.0)
    assert island.news[-1] == "waiting for island b to store the first copies"
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
