"""Heartbeats of the other islands: which are running, and whose slot is free."""

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Annotated

import msgspec

from torchtitan_diloco.base.user import FENCED, PeersLostError, UserError
from torchtitan_diloco.diloco.vitals import HUNG, NOTHING_SAID, STOPPED, Report, Signs, Vitals
from torchtitan_diloco.islands.changes import SLOTS
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.records import Count, Name, Seconds, name_of


class IslandFencedError(UserError):
    """Another island, or another process of this one, has taken its slot."""

    exit_code = FENCED


class IslandFailedError(PeersLostError):
    """This island cannot continue. When it is restarted, it starts from the log."""


MOST_OF_SITE = 60
"""Number of characters that fit into a heartbeat."""


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """Values of an island for users. No decision depends on them."""

    site: Annotated[str, msgspec.Meta(max_length=MOST_OF_SITE)] = ""  # user of its join string
    tokens_per_second: float = 0.0  # over the latest steps, with the time that training waited
    waited: float = 0.0  # share of this time in which it waited for the others
    loss: float | None = None  # its training loss
    validated: tuple[Count, float] | None = None
    """Tokens that the run had merged, and the loss of the shared model then."""
    round_trip_seconds: float | None = None  # to the server and back
    upload_bytes_per_second: float | None = None  # of its latest part
    vitals: Vitals = NOTHING_SAID
    says: tuple[Annotated[str, msgspec.Meta(max_length=100)], ...] = ()
    """Its verdicts about others."""


class Hint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Heartbeat of an island. The validity of records does not depend on it."""

    incarnation: Name
    step: Count
    tokens: Count
    step_seconds: Seconds
    caught_up: bool
    leaving: bool = False
    copies: tuple[tuple[Count, Name], ...] = ()
    """Newest version of each fragment, and its checksum."""
    numbers: Numbers = Numbers()


@dataclass(frozen=True)
class Member:
    """Last heartbeat of another island, and its time of arrival on this island's clock."""

    hint: Hint
    heard: float
    moved: float
    """Time at which its step last changed."""


LATEST_STEPS = 32
"""Number of steps over which the speed of an island is measured."""
LAGS = 8
"""Number of latest parts of a slot that determine its usual lag and weight."""
PATIENCE = 1.5
"""A round waits for a part for this multiple of its usual lag."""


class Habits:
    """Usual lag and weight of the parts of a slot's owner."""

    def __init__(self, fragments: int) -> None:
        self.lags = deque[float](maxlen=LAGS)
        """Seconds from the opening of a round until a part could be used."""
        self.weights = [deque[int](maxlen=LAGS) for _ in range(fragments)]

    def patience(self, longest: float) -> float:
        """Return how long a round waits for the slot, or 0 if that is more than `longest`."""
        usual = PATIENCE * statistics.median(self.lags) if self.lags else longest
        return usual if usual <= longest else 0.0

    def weight(self, fragment: int) -> int:
        """Return the median weight, because a part after an outage has the work of many cycles."""
        weights = self.weights[fragment]
        return statistics.median_low(weights) if weights else 0


class Gauges:
    """Measures an island for its heartbeats. Each attribute has one writer."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.validated: tuple[int, float] | None = None
        self.bytes_per_second: float | None = None
        self.download_bytes_per_second: float | None = None
        self.sent_bytes, self.received_bytes, self.vitals = 0, 0, NOTHING_SAID
        """Time of a cycle, and the times of its steps."""
        self.says: tuple[str, ...] = ()
        self.waited = 0.0  # seconds, since the start
        self._steps = deque[tuple[float, int, float]](maxlen=LATEST_STEPS)

    def finish_step(self, tokens: int, now: float) -> None:
        """`tokens`: number of tokens on which this island has trained so far."""
        self._steps.append((now, tokens, self.waited))

    def read(self, site: str, round_trip: float | None) -> Numbers:
        steps = list(self._steps) or [(0.0, 0, 0.0)]
        begin, end = steps[0], steps[-1]
        seconds = end[0] - begin[0] or math.inf
        return Numbers(
            site,
            (end[1] - begin[1]) / seconds,
            (end[2] - begin[2]) / seconds,
            self.loss,
            self.validated,
            round_trip,
            self.bytes_per_second,
            self.read_vitals(),
            self.says,
        )

    def read_vitals(self) -> Vitals:
        up, down = self.bytes_per_second, self.download_bytes_per_second
        upload = self.sent_bytes / up if up else 0.0
        download = self.received_bytes / down if down else 0.0
        return self.vitals._replace(upload=upload, download=download)


class Members:
    """Heartbeats of the other islands. They decide about waiting, not about validity.

    For `expiry` seconds after a connection is made or this process has paused, no island counts as
    silent, as their heartbeats could not arrive.

    `connect`, `disconnect` and `hear` are called in the connection's thread, `tick` in the thread
    that reads the log. No attribute is written by both.
    """

    def __init__(self, expiry: float, patience: float) -> None:
        """
        Args:
            expiry: seconds without a heartbeat after which rounds do not wait for an island.
            patience: seconds without one after which another island may take its slot.
        """
        self.expiry, self._patience = expiry, max(expiry, patience)
        self._began: float | None = None
        self.heard: dict[str, Member] = {}
        """Copy this before a loop, because a member may be added during it. None is removed."""
        self._connected_at: float | None = None
        self._last_tick = self._paused_at = -math.inf
        self._silent = set[str]()

    @property
    def connected(self) -> bool:
        return self._connected_at is not None

    def connect(self, now: float) -> None:
        self._connected_at = now
        self._began = now if self._began is None else self._began

    def disconnect(self) -> None:
        self._connected_at = None

    def tick(self, now: float) -> None:
        """Detect a pause. Call this first, and then at least twice in `expiry` seconds."""
        if now - self._last_tick > self.expiry / 2:
            self._paused_at = now
        self._last_tick = now

    def hear(self, hint: Hint, now: float) -> None:
        known = self.heard.get(hint.incarnation)
        moved = now if known is None or known.hint.step != hint.step else known.moved
        self.heard[hint.incarnation] = Member(hint, now, moved)

    def has_caught_up(self, incarnation: str) -> bool:
        """Return whether its last heartbeat says that it has caught up with the log."""
        member = self.heard.get(incarnation)
        return member is not None and member.hint.caught_up

    def is_new(self, now: float) -> bool:
        """Return whether heartbeats of some islands may not have arrived yet."""
        since = self._connected_at
        return since is None or now - max(since, self._paused_at) < self.expiry

    def is_silent(self, incarnation: str, now: float) -> bool:
        """Return whether rounds do not wait for it."""
        member = self.heard.get(incarnation)
        return not self.is_new(now) and (member is None or now - member.heard >= self.expiry)

    def changes(self, state: State, own: str, now: float) -> tuple[list[str], list[str]]:
        """Return the names of the islands that became silent, and of those that send heartbeats
        again, since the last call. `own`: an incarnation that does not count."""
        if self.is_new(now):
            return [], []
        owners = {slot.owner for slot in state.slots if slot.owner and not slot.done} - {own}
        before, self._silent = self._silent, {one for one in owners if self.is_silent(one, now)}
        both = self._silent - before, (before - self._silent) & owners
        silent, heard = (sorted(map(name_of, found)) for found in both)
        return silent, heard

    def seconds_until_gone(self, incarnation: str, now: float) -> float:
        """Return the time until another island may take its slot, if it stays silent."""
        member = self.heard.get(incarnation)
        since = self._began if member is None else member.heard
        return max(0.0, (now if since is None else since) + self._patience - now)

    def report(self, incarnation: str, now: float) -> Report:
        """Return the report of an island. While it completes no steps, only the time of its
        downloads counts: it may wait for them, and the other values belong to old steps."""
        member = self.heard.get(incarnation)
        if self.is_silent(incarnation, now):
            return Report(absent=STOPPED)
        if member is None:
            return Report()
        is_moving = self.is_moving(incarnation, now, member.hint.step_seconds)
        said = member.hint.numbers.vitals
        said = said if is_moving else Vitals(download=said.download)
        return Report(said, absent=self._signs(incarnation, self._patience, now).absent)

    def is_moving(self, incarnation: str, now: float, step_seconds: float) -> bool:
        """Return whether an island with heartbeats has completed a step recently. `step_seconds`:
        usual time of a step."""
        return now - self.heard[incarnation].moved < max(self.expiry, 3 * step_seconds)

    def hangs(self, incarnation: str, times: float, now: float) -> bool:
        """Return whether it completes no step for a multiple of the patience, with heartbeats."""
        return self._signs(incarnation, times * self._patience, now).absent == HUNG

    def _signs(self, incarnation: str, longest: float, now: float) -> Signs:
        """`longest`: seconds after which a step hangs."""
        member = self.heard.get(incarnation)
        if member is None or self.is_silent(incarnation, now):
            return Signs(answers=False)
        may_compile = not member.hint.step
        return Signs(
            answers=True,
            still=now - member.moved,
            longest=longest,
            may_wait=member.hint.leaving or may_compile or self.is_new(now),
        )

    def is_ready(self, incarnation: str, now: float, step_seconds: float) -> bool:
        """Return whether a round waits for it. `step_seconds`: time of this island's steps."""
        if self.is_new(now):
            return True
        if not self.has_caught_up(incarnation) or self.is_silent(incarnation, now):
            return False
        return self.is_moving(incarnation, now, step_seconds)

    # --- slots ------------------------------------------------------------------------------------

    def slot_to_take(self, state: State, own: str, now: float) -> tuple[int, str | None] | None:
        """Return a slot for the incarnation `own` to take, and the owner that it replaces.

        The slot of an earlier process of the same island comes first, without a wait. Raises a
        UserError if that process is still running.
        """
        owners = [(slot, found.owner) for slot, found in enumerate(state.slots)]
        for slot, owner in owners:
            if owner is not None and name_of(owner) == name_of(own):
                if self.is_silent(owner, now):
                    return slot, owner
                if self.is_new(now):
                    return None
                raise UserError(
                    f"an island named {name_of(own)} is already running: set "
                    "another islands.name for this one, or end the other one"
                )
        if self._probation(state, own, now) > 0:
            return None
        for slot, owner in sorted(owners, key=lambda pair: pair[1] is not None):
            if owner is None or not (self.is_new(now) or self.seconds_until_gone(owner, now)):
                return slot, owner
        return None

    def _probation(self, state: State, own: str, now: float) -> float:
        """Return for how long an island that was evicted takes no slot while others are running.
        This doubles each time, and counts from the start of the process."""
        name = name_of(own)
        last = [one for one in state.incarnations if name_of(one) == name][-1:]
        if not state.owners() or not set(last).intersection(state.evicted):
            return 0.0
        evictions = sum(name_of(one) == name for one in state.evicted)
        began = now if self._began is None else self._began
        return began + self._patience * 2.0 ** (evictions - 1) - now

    def waits_for(self, state: State, own: str, now: float) -> str:
        """Return what the incarnation `own`, which has not joined yet, waits for, or an empty
        string."""
        owners = state.owners().values()
        if state.facts is not None and own in owners and not state.begun:
            here = ", ".join(map(name_of, owners))
            return f"waiting until {state.facts.begin} islands have joined; so far: {here}"
        if (seconds := self._probation(state, own, now)) > 0:
            return f"the others have evicted this island: it can join again in {seconds:.0f} s"
        restarts = name_of(own) in map(name_of, owners)  # it takes its slot
        if len(owners) < len(state.slots) or restarts or self.is_new(now):
            return ""
        silent = [owner for owner in owners if self.is_silent(owner, now)]
        times = sorted((self.seconds_until_gone(one, now), name_of(one)) for one in silent)
        free = "".join(f"; that of {name}, which is silent, in {s:.0f} s" for s, name in times)
        return (
            f"waiting for a free slot{free}. All {len(owners)} have an owner: `islands leave NAME` "
            f"asks one to leave ({', '.join(sorted(map(name_of, owners)))}), and `islands change "
            f"{SLOTS} {len(owners) + 1}` adds a slot"
        )
