"""How a run begins: heads first, one founder, and from a checkpoint."""

import re
from typing import Any

import msgspec
import pytest

from tests.islands.rules.desk import SHAPES, A, B, Desk, checksum, founded
from tests.islands.rules.hand import build_island
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.islands.rules.checkpoint import Saved, save
from torchtitan_diloco.islands.rules.decision import Decision, Ledger, Slot, decode_decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.founding import (
    RETRY_SECONDS,
    Founding,
    SlotStart,
    check_founding,
    decode_founding,
    encode_founding,
)
from torchtitan_diloco.islands.rules.jobs import Adopt, Commit, Job, Upload
from torchtitan_diloco.islands.rules.names import COPY, founding_name, part_name, run_name
from torchtitan_diloco.islands.rules.note import Note, encode_note
from torchtitan_diloco.islands.rules.presence import SILENT
from torchtitan_diloco.islands.rules.settings import RATES, Settings
from torchtitan_diloco.islands.rules.syncer import Syncer

FOUNDING = Founding("r", founded().settings, [SHAPES], [checksum(0)])


class Founders:
    """A syncer by hand in an empty location."""

    def __init__(self, decision: Decision | None = None) -> None:
        self.now = 0.0
        self.counter = 0
        self.syncer = Syncer(decision, "s", 0.0, 0.0)
        self.decisions: list[Decision] = []
        self.jobs: list[Job] = []

    def hear(self, *incarnations: str) -> None:
        for incarnation in incarnations:
            self.counter += 1
            self.syncer.on_note(incarnation, encode_note(Note(counter=self.counter)))

    def tick(self, seconds: float = 0.1) -> list[Job]:
        """Let time pass, commit at once, and return the other jobs."""
        others = list[Job]()
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.now += 0.1
            self.syncer.on_poll(self.now)
            for job in self.syncer.tick(self.now):
                if isinstance(job, Commit):
                    self.decisions.append(decode_decision(job.content, job.number))
                    self.syncer.on_committed()
                else:
                    others.append(job)
        return others


def test_one_founder_is_named_before_any_copy_is_stored() -> None:
    desk = Founders()
    desk.hear(A, B)
    for incarnation in (B, A):
        desk.syncer.on_founding(incarnation, encode_founding(FOUNDING))
    assert desk.tick() == []
    [first] = desk.decisions
    assert (first.number, first.founder, first.fragments) == (1, B, [])
    assert not first.is_founded
    assert desk.tick() == [Adopt(B, FOUNDING)], "after the decision counts"
    desk.syncer.on_adopted(B, FOUNDING, is_whole=False)
    assert desk.tick(RETRY_SECONDS - 0.2) == [], "they may be visible later"
    assert desk.tick(0.4) == [Adopt(B, FOUNDING)]
    desk.syncer.on_adopted(B, FOUNDING, is_whole=True)
    [upload] = desk.tick(0.3)
    assert isinstance(upload, Upload)
    assert upload.stored.kind == COPY
    desk.syncer.on_uploaded(upload.stored)
    desk.tick(0.2)
    assert desk.decisions[-1].is_founded
    assert desk.decisions[-1].settings == FOUNDING.settings
    assert desk.decisions[-1].fragments[0].shapes == SHAPES


def test_the_age_of_a_run_begins_with_its_founding() -> None:
    """However long its syncer has waited for islands."""
    desk = Founders()
    desk.tick(3600.0)
    desk.hear(A)
    desk.syncer.on_founding(A, encode_founding(FOUNDING))
    desk.tick(0.3)
    desk.syncer.on_adopted(A, FOUNDING, is_whole=True)
    [upload] = desk.tick(0.3)
    assert isinstance(upload, Upload)
    desk.syncer.on_uploaded(upload.stored)
    desk.tick(0.5)
    decision = desk.decisions[-1]
    assert decision.is_founded
    assert 0.0 < decision.age < 1.0
    assert 3600.0 < decision.written < desk.now, "the time of day goes on"


def test_another_founder_follows_one_that_dies() -> None:
    desk = Founders()
    desk.hear(A, B)
    for incarnation in (A, B):
        desk.syncer.on_founding(incarnation, encode_founding(FOUNDING))
    desk.tick(0.2)
    desk.syncer.on_adopted(A, FOUNDING, is_whole=False)
    for _ in range(int(2 * SILENT) + 4):
        desk.hear(B)
        for job in desk.tick(0.5):
            assert isinstance(job, Adopt)
            desk.syncer.on_adopted(job.incarnation, job.founding, is_whole=False)
    assert [decision.founder for decision in desk.decisions][-1] == B


def test_a_successor_fetches_the_copies_of_the_founder_again() -> None:
    """Its predecessor was killed before it had stored them."""
    killed = FOUNDING.decision(3, "before", A)
    desk = Founders(killed)
    desk.hear(A)
    desk.syncer.on_founding(A, encode_founding(FOUNDING))
    assert desk.tick(0.2) == [Adopt(A, FOUNDING)]


@pytest.mark.parametrize(
    "changed",
    [
        {"checksums": ["0", "1"]},
        {"shapes": []},
        {"shapes": [[]]},
        {"shapes": [[(0, 4)]]},
        {"clocks": [1, 2]},
        {"slots": [SlotStart()] * 4},
        {"settings": founded(start_with=4).settings},
        {"settings": founded(delay=10).settings},
        {"settings": founded(streams=4).settings},
    ],
)
def test_a_founding_is_bounded(changed: dict[str, object]) -> None:
    founding = msgspec.structs.replace(FOUNDING, **changed)
    with pytest.raises(MalformedError):
        decode_founding(encode_founding(founding))
    desk = Founders()
    desk.hear(A)
    desk.syncer.on_founding(A, encode_founding(founding))
    assert desk.tick(1.0) == []
    assert desk.syncer.news.lines


def test_a_note_founds_nothing() -> None:
    """Only a login of an owner may write a founding."""
    desk = Founders()
    desk.hear(A)
    assert desk.tick(1.0) == []
    assert desk.decisions == []


def test_foundings_of_a_run_that_is_founded_are_garbage() -> None:
    desk = Desk(founded((A,)))
    desk.note(A, step=1)
    names = [founding_name(A), founding_name(B, 3), part_name(A, 0, 1)]
    assert desk.syncer.garbage([*names, run_name(desk.state.number)]) == names[:2]
    assert desk.syncer.garbage([*names, run_name(1)]) == [], "the store was put back"
    unfounded = Founders()
    unfounded.hear(A)
    unfounded.syncer.on_founding(A, encode_founding(FOUNDING))
    unfounded.tick(0.2)
    assert unfounded.syncer.garbage([*names, run_name(1)]) == []


def test_a_lost_location_is_founded_from_a_checkpoint() -> None:
    """It goes on with the clocks, positions, phases and corpora of the checkpoint."""
    before = founded((A,), fragments=2)
    before.slots = [
        Slot([Ledger(taken=70), Ledger(taken=60)], A, corpus="aa", entered=[40]),
        Slot([Ledger(taken=80), Ledger(taken=80)]),
    ]
    before.fragments[0].clock = 500
    before.fragments[1].clock = 490
    saved = save(before, [3, 4], slot=0, position=75)
    founding = saved.found(Founding("r2", before.settings, [SHAPES] * 2, ["0", "1"]))
    state = decode_founding(encode_founding(founding)).decision(2, "s", B)
    assert state.run == "r", "the other islands return with their checkpoints"
    assert [shared.clock for shared in state.fragments] == [500, 490]
    assert [[ledger.taken for ledger in slot.ledgers] for slot in state.slots] == [
        [70, 70],
        [80, 80],
    ]
    assert (state.slots[0].corpus, state.slots[0].entered) == ("aa", [40])
    assert state.owners() == []


@pytest.mark.parametrize("kind", RATES)
def test_a_lost_location_is_founded_with_the_settings_that_the_run_had(kind: str) -> None:
    """The config of the founder only says how many islands start together, and which rates suit a
    store of another kind."""
    rates = RATES[kind]._asdict()
    of_founder = founded(start_with=2, store_kind=kind, facts={"a": "b"}, **rates).settings
    before = founded(
        sync_every=7, total_tokens=20_000, slots=5, outer_lr=0.3, poll_seconds=0.05, grace=3.0
    )
    before.slots = [Slot([Ledger(taken=number)]) for number in range(5)]
    saved = save(before, [3], slot=None, position=0)
    rates["grace"] = max(rates["grace"], 3.0)  # which may suit a slow link
    changed = {"start_with": 2, "store_kind": kind}
    expected = msgspec.structs.replace(
        before.settings, **(changed if kind == "folder" else changed | rates)
    )
    of_this_island = msgspec.structs.replace(FOUNDING, settings=of_founder)
    founding = saved.found(of_this_island)
    assert founding.settings == expected
    assert founding.settings.streams == before.settings.streams < 5, "positions stay the same"
    check_founding(founding, {})
    fewer = msgspec.structs.replace(of_founder, start_with=9, slots=9)
    assert before.settings.founded_again(fewer).start_with == 5, "as many as there are slots"
    of_job = Saved.of_job(10, 1, [SlotStart(position=4)])
    assert of_job.found(of_this_island).settings == of_founder


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"outer_lr": 1000.0}, r"Expected `float` <= 100.0 - at `\$\[1\].outer_lr`"),
        ({"start_with": 4}, "start_with 4 is above 3 slots"),
        ({"facts": {"tokenizer": "b"}}, "tokenizer is None here and b in the run"),
    ],
)
def test_an_island_says_itself_why_no_syncer_would_begin_its_run(
    changed: dict[str, Any], reason: str
) -> None:
    founding = msgspec.structs.replace(FOUNDING, settings=founded(**changed).settings)
    island = build_island(founds=founding)
    with pytest.raises(UserError, match=reason) as caught:
        island.on_empty()
    assert "\n" not in str(caught.value)
    assert not island.may_found
    joins = build_island(founds=founding, facts=founding.settings.facts)
    joins.on_decision(founded(facts=founding.settings.facts), 0.0)
    assert not joins.may_found, "the run of others has other settings"
    waits = build_island(founds=founding)
    chosen = founded()
    chosen.fragments = []
    chosen.founder = B
    waits.on_decision(chosen, 0.0)
    assert not waits.may_found
    assert re.search(f"{reason}.*it joins the run of another founder", waits.news.lines[0])


def test_outliers_are_judged_as_in_one_job() -> None:
    settings = Settings(
        sync_every=1, delay=0, total_tokens=1, slots=1, start_with=1, streams=1, block=1
    )
    job = DiLoCoConfig()
    assert settings.norm_limit == job.delta_norm_limit
    assert settings.block_size == job.quantization.block_size


def test_rates_and_copies_follow_the_kind_of_the_store() -> None:
    for kind, commit_seconds, copies, grace in (
        ("folder", 0.05, 8, 1.0),
        ("near", 0.05, 8, 1.0),
        ("cloud", 1.0, 64, 4.0),
    ):
        rates = RATES[kind]
        assert (rates.commit_seconds, rates.copies_every, rates.grace) == (
            commit_seconds,
            copies,
            grace,
        )
        assert founded(**rates._asdict()).settings.poll_seconds == rates.poll_seconds
