"""How a run begins, and whether a location contains the run of an island.

An island that may found a run stores its founding, without copies. The syncer names one founder in
its first decision. Only that island stores its copies, which the syncer then takes over.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.untrusted import decode_json
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.rules.decision import (
    PROTOCOL,
    Decision,
    Kept,
    Ledger,
    SharedFragment,
    Slot,
)
from torchtitan_diloco.islands.rules.fields import (
    MOST_FRAGMENTS,
    MOST_SLOTS,
    Checksum,
    Count,
    Digest,
    Entered,
    MalformedError,
    Name,
    Shapes,
    Tokens,
)
from torchtitan_diloco.islands.rules.presence import Presence
from torchtitan_diloco.islands.rules.settings import Settings

MOST_FOUNDING = 4 * 2**20
"""Maximum number of bytes of a founding."""
RETRY_SECONDS = 1.0
"""Seconds after which the copies of a founder are looked for again."""
Facts: TypeAlias = Mapping[str, str]


class WentBackError(UserError):
    """The store was restored to an older state."""

    what_happened = (
        "the store was restored to an older copy while the run was active; restart the syncer and "
        "all islands, which then continue from that copy"
    )

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: {self.what_happened}")


class EmptiedError(WentBackError):
    """The store has no decision any more."""

    what_happened = (
        "the store was emptied while the run was active; put back a copy of it, or restart the "
        "syncer, and then first the island with the newest checkpoint, with --islands.found true"
    )


class StrayDecisionError(WentBackError):
    """The newest decision was created in a store that was restored to an older copy, by a syncer
    that has died before it could withdraw it."""

    def __init__(self, newest: str, before: str) -> None:
        """Take the name of the newest decision, and of the highest one `before` it."""
        self.name = newest
        self.what_happened = (
            "the store was restored to an older copy while the run was active, so it may lack what "
            f"{newest} names; delete {newest} from it, and the run goes on from {before}"
        )
        super().__init__(f"{newest} is stored, and between it and {before}, decisions are missing")


class SlotStart(msgspec.Struct, array_like=True, frozen=True):
    """Where the samples of a slot begin."""

    position: Count = 0
    entered: Entered = []
    corpus: Digest = ""


class Founding(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a run by the island that founds it."""

    run: Name
    settings: Settings
    shapes: Annotated[list[Shapes], Meta(min_length=1, max_length=MOST_FRAGMENTS)]
    checksums: Annotated[list[Checksum], Meta(max_length=MOST_FRAGMENTS)]
    clocks: Annotated[list[Tokens], Meta(max_length=MOST_FRAGMENTS)] = []
    """Tokens that the fragments have merged in the run, or the job, that it continues."""
    slots: Annotated[list[SlotStart], Meta(max_length=MOST_SLOTS)] = []
    """Slots of that run, or where those of this one begin after the samples of the job."""

    def check(self) -> None:
        fragments = len(self.shapes)
        settings = self.settings
        if fragments != len(self.checksums) or len(self.clocks) not in (0, fragments):
            raise MalformedError("its lists differ in length")
        if max(len(self.slots), settings.streams) > settings.slots:
            raise MalformedError(f"it has more slots or streams than {settings.slots} slots")
        if settings.start_with > settings.slots:
            raise MalformedError(
                f"start_with {settings.start_with} is above {settings.slots} slots"
            )
        if settings.delay >= settings.sync_every:
            raise MalformedError(f"delay {settings.delay} is not below {settings.sync_every}")

    def name_founder(self, number: int, session: str, founder: str) -> Decision:
        """Return the decision that asks an island for the copies of the run that it founds."""
        return Decision(
            protocol=PROTOCOL,
            number=number,
            session=session,
            run=self.run,
            settings=self.settings,
            founder=founder,
        )

    def decision(self, number: int, session: str, founder: str) -> Decision:
        """Return the state of the run before any island has a slot."""
        clocks = self.clocks or [0] * len(self.shapes)
        decision = self.name_founder(number, session, founder)
        decision.fragments = [
            SharedFragment(shapes, clock=clock, kept=[Kept(0, checksum, 0)])
            for shapes, checksum, clock in zip(self.shapes, self.checksums, clocks, strict=True)
        ]
        decision.slots = [
            Slot(
                [Ledger(taken=began.position) for _ in self.shapes],
                corpus=began.corpus,
                entered=list(began.entered),
            )
            for began in self.slots
        ]
        return decision


def encode_founding(founding: Founding) -> bytes:
    return msgspec.json.encode(founding)


def decode_founding(raw: bytes) -> Founding:
    if len(raw) > MOST_FOUNDING:
        raise MalformedError(f"a founding has more than {MOST_FOUNDING} bytes")
    try:
        founding = decode_json(raw, Founding)
    except ValueError as error:
        raise MalformedError(f"a founding is malformed: {error}") from error
    founding.check()
    return founding


class Founders:
    """The islands that would found a run in an empty location, in the memory of the syncer."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._foundings = dict[str, Founding]()
        self._is_adopting = False
        self._looked_at = -RETRY_SECONDS

    def hear(self, incarnation: str, raw: bytes) -> None:
        """Process a founding. Raise a MalformedError if it is unusable."""
        if incarnation not in self._foundings:
            self._foundings[incarnation] = decode_founding(raw)

    def choose(self, current: str) -> str:
        """Return the founder: the current one while it is heard, else the first one that is."""
        is_known = current in self._foundings
        if is_known and (self._is_adopting or not self._presence.is_silent(current)):
            return current
        return next(filter(self._presence.is_heard, self._foundings), current)

    def founding_of(self, incarnation: str) -> Founding:
        return self._foundings[incarnation]

    def adopt_if_due(self, founder: str, now: float) -> Founding | None:
        """Return the founding whose copies are to be fetched now."""
        founding = self._foundings.get(founder)
        if founding is None or self._is_adopting or now - self._looked_at < RETRY_SECONDS:
            return None
        self._is_adopting = True
        return founding

    def note_missing(self, now: float) -> None:
        """Look again later, because copies are missing."""
        self._is_adopting = False
        self._looked_at = now


# --- is this the run of an island? ----------------------------------------------------------------


def check_empty(saved_run: str | None) -> None:
    """Raise a UserError if an island that may not found a run has a checkpoint, and the location is
    empty: it may be a folder that is not mounted, or a typo. `saved_run`: empty for a job."""
    if saved_run is not None:
        whose = f"run {saved_run}" if saved_run else "a job"
        raise UserError(
            f"the location is empty, and the checkpoint is of {whose}: give the location "
            "of the run, or set --islands.found true to continue there from this checkpoint"
        )


def check_founding(founding: Founding, facts: Facts) -> None:
    """Raise a UserError if an island does not fit the run that it would found again, or a syncer
    would refuse its founding."""
    check_facts(facts, founding.settings.facts)
    try:
        decode_founding(encode_founding(founding))
    except MalformedError as error:
        raise UserError(
            f"no syncer would begin run {founding.run} with the settings of this island: {error}"
        ) from error


def check_facts(facts: Facts, of_run: Facts) -> None:
    """Raise a UserError if facts on which all islands must agree differ from those of the run."""
    for key in sorted(facts.keys() | of_run.keys()):
        if facts.get(key) != of_run.get(key):
            raise UserError(
                f"{key} is {facts.get(key)} here and {of_run.get(key)} in the "
                "run: start this island with the value of the run"
            )


def check_run(
    decision: Decision, facts: Facts, shapes: Sequence[Shapes], saved_run: str | None
) -> None:
    """Raise a UserError if an island does not fit the run, whether it is new or resumes."""
    if saved_run and saved_run != decision.run:
        raise UserError(
            f"the location contains run {decision.run}, but the checkpoint belongs to run "
            f"{saved_run}: give the location of that run, or another run.folder"
        )
    check_facts(facts, decision.settings.facts)
    if len(shapes) != len(decision.fragments):
        raise UserError(
            f"the model has {len(shapes)} fragments here and {len(decision.fragments)} in the "
            "run: start this island with the model and the fragments of the run"
        )
    for number, (shapes_here, shared) in enumerate(zip(shapes, decision.fragments, strict=True)):
        if shapes_here != shared.shapes:
            raise UserError(
                f"fragment {number} has other parameters here than in the run: start this island "
                "with the model and the fragments of the run"
            )


def check_continues(before: Decision, after: Decision, slot: int | None) -> None:
    """Raise a WentBackError if a later decision does not follow from an earlier one."""
    if not before.is_founded:
        return
    if before.run != after.run or len(after.fragments) != len(before.fragments):
        raise WentBackError(f"the location now contains run {after.run}, and not {before.run}")
    for number, (old, new) in enumerate(zip(before.fragments, after.fragments, strict=True)):
        if old.version > new.version:
            raise WentBackError(
                f"fragment {number} is at version {new.version}, and was at {old.version}"
            )
        known = {kept.version: kept.checksum for kept in old.kept}
        if any(known.get(kept.version, kept.checksum) != kept.checksum for kept in new.kept):
            raise WentBackError(f"a version of fragment {number} has another checksum")
    if slot is None:
        return
    if slot >= len(after.slots):
        raise WentBackError(f"the run now has {len(after.slots)} slots")
    ledgers = zip(before.slots[slot].ledgers, after.slots[slot].ledgers, strict=True)
    if any(old.number > new.number for old, new in ledgers):
        raise WentBackError(f"parts of slot {slot} that were decided are not")
