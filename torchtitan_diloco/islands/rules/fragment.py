"""One fragment on an island: its state, its parts, and its actions between two steps."""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.islands.rules.decision import (
    VERSIONS_LATE,
    Fate,
    Ledger,
    SharedFragment,
)
from torchtitan_diloco.islands.rules.names import COPY, VERSION, Object
from torchtitan_diloco.islands.rules.note import Part

if TYPE_CHECKING:
    from torchtitan_diloco.islands.rules.island import Island

LATE_MIXING = 0.5
"""Minimum share of the local parameters when a version is applied late, because they contain later
work."""
TRIPS = 8
"""Number of round trips, and of uploads, whose median is the usual value."""
FRESH = 2.0
"""Seconds without a new decision after which training no longer waits, in addition to
`FRESH_CALLS`."""
FRESH_CALLS = 3
"""Number of pauses between two decisions, and between two polls, that are added to `FRESH`."""


@dataclass(frozen=True)
class Apply:
    """Update P to a version, and theta with it."""

    fragment: int
    version: int
    mode: Mode
    share: float = 0.0
    source: Object | None = None
    """Update to add to P, or a copy that replaces it. None: P is unchanged."""


@dataclass(frozen=True)
class Send:
    """Take the delta theta - P now, store it, then call `on_stored`."""

    part: Part


@dataclass
class Boundary:
    """Actions between two steps, in this order."""

    clock: int
    """Tokens of the run, which determine the inner learning rate."""
    applies: list[Apply] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    waits_until: float | None = None
    """Training waits: ask again after the next event, or at this time."""
    is_training: bool = False
    """Whether to take a step next, unless training waits."""
    phases: int = 0
    """Number of phases of the data that its stream should have entered: call `enter_phase` for each
    one more than before."""


@dataclass
class Outstanding:
    """A part of this island, until it is decided and, if it is merged, applied:

    sent -> stored -> merged -> applied
                   -> refused: its work is still in theta, and is sent again
                   -> lost: theta takes P
    """

    part: Part
    step: int
    at: float
    """Time of the send."""
    is_stored: bool
    is_in_theta: bool = True
    """Whether theta still contains the work that was sent."""


@dataclass
class OwnFragment:
    island: "Island"
    number: int
    applied: int = -1
    """Version of P. -1: none yet."""
    is_wrong: bool = False
    """Whether P differs from the published copy, so that only a copy repairs it."""
    resets: Mode | None = None
    """How theta takes P at the next boundary, if at all."""
    updates: dict[int, Object] = field(default_factory=dict)
    """Updates by version, downloaded but not applied."""
    copy: Object | None = None
    """Copy, downloaded but not applied."""
    missing: set[Object] = field(default_factory=set)
    """Updates and copies that the store does not have, or not yet."""
    sent: Outstanding | None = None
    turn: int = 0
    """Step of this island at which it sends next."""
    last_sent: int | None = None
    """Step of this island at which it has sent last."""
    lost_to: int = 0
    """Sample before which theta does not contain the work."""
    counted: int = 0
    """Tokens of this island when the work that is in no part began."""
    expected_tokens: int = 0
    """`expected_tokens` of the clock of this island at its last send."""
    opened_at: float | None = None
    """Time at which it has read that a round is open."""
    trips: deque[float] = field(default_factory=lambda: deque(maxlen=TRIPS))
    uploads: deque[float] = field(default_factory=lambda: deque(maxlen=TRIPS))

    @property
    def shared(self) -> SharedFragment:
        assert self.island.decision is not None
        return self.island.decision.fragments[self.number]

    @property
    def ledger(self) -> Ledger:
        assert self.island.decision is not None
        assert self.island.slot is not None
        return self.island.decision.slots[self.island.slot].ledgers[self.number]

    @property
    def is_undecided(self) -> bool:
        return self.sent is not None and self.ledger.number < self.sent.part.number

    @property
    def is_sending(self) -> bool:
        """Whether the upload of a part is in flight."""
        return self.sent is not None and not self.sent.is_stored

    # --- downloads --------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Newest version that is available without a gap."""
        version = self.applied if not self.is_wrong else -1
        if self.copy is not None:
            version = max(version, self.copy.version)
        while version + 1 in self.updates:
            version += 1
        return version

    def wanted(self) -> list[Object]:
        """Return the next downloads, in order: a copy if it is necessary, then the versions after
        it. A missing update is asked for again until there is a newer copy."""
        shared = self.shared
        held = self.held
        updates = {
            kept.version: Object(VERSION, kept.number, self.number, kept.version)
            for kept in shared.kept
            if kept.number
        }
        downloads = list[Object]()
        needed = [updates.get(version) for version in range(held + 1, shared.version + 1)]
        if held < 0 or any(update is None or update in self.missing for update in needed):
            copy = self._newest_copy()
            if copy.version > held:
                downloads.append(copy)
                held = copy.version
        for version in range(held + 1, shared.version + 1):
            if version not in updates:
                break  # it is lost: a newer copy comes
            if version not in self.updates:
                downloads.append(updates[version])
        return downloads

    def _newest_copy(self) -> Object:
        """Return the newest copy that is not missing. With the updates since, the older one of two
        is as good."""
        copies = [
            Object(COPY, stored.number, self.number, stored.version)
            for stored in self.shared.copies
        ]
        return next((copy for copy in reversed(copies) if copy not in self.missing), copies[-1])

    def on_held(self, stored: Object, now: float) -> None:
        if stored.kind == COPY:
            self.copy = stored
        else:
            self.updates[stored.version] = stored
        if self.sent is not None and self._is_merged() and stored.version == self.ledger.version:
            self.trips.append(now - self.sent.at)

    # --- decisions --------------------------------------------------------------------------------

    def _is_merged(self) -> bool:
        if self.sent is None:
            return False
        return self.ledger.number == self.sent.part.number and self.ledger.fate is Fate.MERGED

    def on_decision(self, now: float) -> None:
        """Process the fate of this island's part."""
        self.opened_at = (self.opened_at or now) if self.shared.is_open else None
        if self.sent is None or self.is_undecided or self._is_merged():
            return
        if self.ledger.fate.is_lost:
            self.resets = Mode.RESET
        elif self.sent.is_in_theta and not self.sent.part.is_loss:
            self.counted -= self.sent.part.weight  # refused: it is in theta, and sent again
        self.sent = None

    def lose(self) -> None:
        """Declare the work that theta has lost, because it now equals P."""
        self.resets = None
        if self.sent is not None:
            self.sent.is_in_theta = False
        self.lost_to = self.island.position
        self.counted = self.island.tokens

    def on_checksum(self, version: int, checksum: str) -> None:
        """Take the computed checksum of P, and compare it with the published one."""
        if version != self.applied:
            return
        known = self.shared.checksum(version)
        is_same = version <= self.shared.version and known in (None, checksum)
        if not is_same and not self.is_wrong:
            self.is_wrong = True
            self.copy = None
            self.updates = {}
            self.resets = self.resets or Mode.TAKE
            self.island.news.say(
                f"fragment {self.number}: its copy has wrong bits, and is downloaded again"
            )

    # --- between two steps ------------------------------------------------------------------------

    def next_apply(self) -> Apply | None:
        """Return the version to apply now, and count it as applied."""
        island = self.island
        copy = self.copy
        if self.is_wrong or self.applied < 0:
            return None if copy is None else self._apply(copy, self.resets or Mode.TAKE)
        if self.resets is not None:
            mode = self.resets
            self.lose()
            return Apply(self.number, self.applied, mode)
        source = self.updates.get(self.applied + 1)
        if source is None and copy is not None and copy.version > self.applied:
            source = copy
        if source is None:
            return None
        if not island.is_training:
            return self._apply(source, Mode.TAKE)
        is_own = self._is_merged() and self.applied < self.ledger.version <= source.version
        if self.sent is None or not is_own or not self.sent.is_in_theta:
            return self._apply(source, Mode.ADD)
        late = island.step - self.sent.step - island.settings.delay
        if late < 0 and not island.is_stopped:
            return None
        mixing = island.settings.mixing_at(island.clock.tokens)
        return self._apply(source, Mode.MIX, mixing if late <= 0 else max(mixing, LATE_MIXING))

    def _apply(self, source: Object, mode: Mode, share: float = 0.0) -> Apply:
        self.applied = source.version
        self.updates = {
            version: update for version, update in self.updates.items() if version > self.applied
        }
        self.missing = {stored for stored in self.missing if stored.version > self.applied}
        if self.copy is not None and self.copy.version <= self.applied:
            self.copy = None
        if mode in (Mode.TAKE, Mode.RESET):
            self.is_wrong = False
            self.lose()
        if self._is_merged() and self.applied >= self.ledger.version:
            self.sent = None
        self.island.on_applied(self, mode)
        return Apply(self.number, self.applied, mode, share, source)

    def next_send(self, now: float, *, may_send: bool) -> Part | None:
        """Return the part to send now, whose bytes are not stored yet, or a loss."""
        island = self.island
        ledger = self.ledger
        shared = self.shared
        oldest = max(ledger.version, shared.version - VERSIONS_LATE)
        checksum = shared.checksum(self.applied)
        is_able = self.sent is None and not self.is_wrong and self.resets is None
        if not is_able or checksum is None or self.applied < oldest:
            return None
        is_loss = self.lost_to > ledger.taken
        end = self.lost_to if is_loss else island.position
        if end <= ledger.taken or not (is_loss or (may_send and self._is_due(now))):
            return None
        part = Part(
            fragment=self.number,
            number=ledger.number + 1,
            base=self.applied,
            checksum=checksum,
            start=ledger.taken,
            end=end,
            weight=0 if is_loss else island.tokens - self.counted,
            codec=island.settings.codec,
            ranks=island.ranks,
            is_loss=is_loss,
        )
        self.sent = Outstanding(part, step=island.step, at=now, is_stored=is_loss)
        if not is_loss:
            self.counted = island.tokens
            self.expected_tokens = island.clock.expected_tokens
            self.last_sent = island.step
            self.turn = island.step + island.settings.sync_every
        return part

    def _is_due(self, now: float) -> bool:
        """Return whether it is time to send.

        It is at its turn, at the end, or while a round is open, if the usual upload fits into the
        rest of the grace period and the turn does not. It then sends all its work so far, which is
        weighted by its tokens.
        """
        island = self.island
        if self.shared.clock >= island.settings.total_tokens:
            return False
        if island.is_stopped or island.step >= self.turn:
            return True
        if self.opened_at is None:
            return False
        seconds_left = self.opened_at + island.grace - now
        upload = statistics.median(self.uploads) if self.uploads else 0.0
        turn = (self.turn - island.step) * island.step_seconds
        return upload <= seconds_left < turn + upload

    def waits_until(self, now: float) -> float | None:
        """Return until when training waits for the version with this island's part.

        It waits at the boundary at which that version is applied, even while the upload is in
        flight, but not if no decisions arrive, and not if waiting is usually in vain.
        """
        island = self.island
        sent = self.sent
        settings = self.island.settings
        if sent is None or sent.part.is_loss or not sent.is_in_theta or island.is_stopped:
            return None
        if island.step != sent.step + settings.delay:
            return None
        fresh = FRESH + FRESH_CALLS * (settings.commit_seconds + settings.poll_seconds)
        usual = statistics.median(self.trips) if self.trips else 0.0
        if now > island.heard_at + fresh or usual > island.grace:
            return None
        until = sent.at + island.grace
        return until if now < until else None
