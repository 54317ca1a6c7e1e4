"""Objects and decisions in flight, and which objects then are garbage."""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from torchtitan_diloco.islands.rules.decision import Decision, decode_decision, encode_decision
from torchtitan_diloco.islands.rules.history import History
from torchtitan_diloco.islands.rules.jobs import Commit
from torchtitan_diloco.islands.rules.names import (
    FOUND,
    Object,
    incarnation_of,
    is_garbage,
    run_name,
    run_number,
)
from torchtitan_diloco.islands.rules.presence import Presence

DECISION_SECONDS = 1.0
"""Maximum seconds between two decisions."""
LARGE = 10_000
"""Number of bytes of a decision above which there are fewer."""
LARGE_SECONDS = 0.2
"""Minimum average of the seconds between two large decisions."""
BURST_SECONDS = 1.0
"""Time over which the average is taken."""
KEPT = 12
"""Minimum number of decisions to keep."""
KEPT_SECONDS = 60.0
"""Time for which all decisions are kept for late readers."""


@dataclass
class _Upload:
    number: int = 0  # of the decision that announces it
    is_announced: bool = False
    is_prepared: bool = False
    """Whether its bytes are stored."""
    is_started: bool = False


class Uploads:
    """Objects of the syncer, which are announced in a decision, then uploaded, and then named.

    An upload starts when its announcement counts, and may outlast many decisions.
    """

    def __init__(self) -> None:
        self._uploads: dict[tuple[str, int, int], _Upload] = {}

    def plan(self, kind: str, fragment: int, version: int) -> None:
        self._uploads[kind, fragment, version] = _Upload()

    def prepare(self, kind: str, fragment: int, version: int) -> None:
        if (kind, fragment, version) in self._uploads:
            self._uploads[kind, fragment, version].is_prepared = True

    def is_under_way(self, kind: str, fragment: int) -> bool:
        return any(key[:2] == (kind, fragment) for key in self._uploads)

    def announce(self, number: int) -> list[Object]:
        """Return the objects that decision `number` must announce, still or for the first time."""
        announced = list[Object]()
        for (kind, fragment, version), upload in self._uploads.items():
            upload.number = upload.number or number
            announced.append(Object(kind, upload.number, fragment, version))
        return announced

    def commit(self, number: int) -> None:
        for upload in self._uploads.values():
            upload.is_announced |= 0 < upload.number <= number

    def start(self) -> list[Object]:
        """Return the objects whose upload starts now."""
        begun = list[Object]()
        for (kind, fragment, version), upload in self._uploads.items():
            if upload.is_announced and upload.is_prepared and not upload.is_started:
                upload.is_started = True
                begun.append(Object(kind, upload.number, fragment, version))
        return begun

    def finish(self, stored: Object) -> bool:
        """Record the end of an upload, and return whether the object is still wanted."""
        key = stored.kind, stored.fragment, stored.version
        upload = self._uploads.get(key)
        if upload is None or upload.number != stored.number:
            return False
        del self._uploads[key]
        return True


class Writer:
    """Writes decisions, and knows the last one that counts: `committed`. The state of the syncer
    is ahead of it."""

    def __init__(self, decision: Decision | None, now: float) -> None:
        self.committed: Decision | None = None
        if decision is not None:
            self.committed = decode_decision(encode_decision(decision), decision.number)
        self.is_writing = False
        self._next: Decision | None = None
        self._began = now
        self._written_at = -math.inf
        self._credit_seconds = math.inf
        self._credited_at = now
        self._size = 0
        self._body = b""
        self._recent = deque[tuple[float, int]]()  # when own decisions began to count

    @property
    def number(self) -> int:
        """Number of the last decision that counts."""
        return 0 if self.committed is None else self.committed.number

    def write_if_due(self, state: Decision, now: float) -> Commit | None:
        """Return a decision to write after changes, and at least each second.

        The average number of decisions per second is limited, and not the pause after each: a round
        needs several at once.
        """
        least = state.settings.commit_seconds
        if self._size > LARGE:
            least = max(least, LARGE_SECONDS)
        credit_seconds = self._credit_seconds + now - self._credited_at
        self._credit_seconds = min(credit_seconds, max(BURST_SECONDS, 2 * least))
        self._credited_at = now
        if self.is_writing or self._credit_seconds < least:
            return None
        same = msgspec.structs.replace(
            state, number=1, age=0.0, written=0.0, seen=[], history=History()
        )
        body = msgspec.json.encode(same)
        if body == self._body and now - self._written_at < DECISION_SECONDS:
            return None
        self._credit_seconds -= least
        self._body = body
        self.is_writing = True
        self._written_at = now
        content = encode_decision(state)
        self._size = len(content)
        self._next = decode_decision(content, state.number)
        return Commit(state.number, content)

    def on_committed(self, now: float) -> tuple[str, ...]:
        """Record that a decision counts. Return the names of objects that no decision names any
        longer."""
        assert self._next is not None
        before = set[str]() if self.committed is None else self.committed.names
        dropped = before - self._next.names
        self.committed = self._next
        self._next = None
        self.is_writing = False
        self._recent.append((now, self.number))
        return tuple(sorted(dropped))

    def garbage(
        self, names: list[str], presence: Presence, gone: Collection[str], now: float
    ) -> list[str]:
        """Return which of all names are garbage: orphans of dead syncers, objects of incarnations
        that are `gone`, foundings of a run that is founded, and old decisions.

        Nothing is if the last decision that counts is not listed: the store was restored to an
        older copy, whose decisions name other objects.
        """
        decision = self.committed
        oldest = self._oldest_kept(now)
        if decision is None or run_name(decision.number) not in names:
            return []
        known = decision.names
        owners = set(decision.owners())
        garbage = list[str]()
        for name in names:
            incarnation = incarnation_of(name)
            number = run_number(name)
            if name.startswith(FOUND):
                is_old = decision.is_founded
            elif incarnation is not None:
                is_gone = incarnation in gone or presence.is_unknown(incarnation)
                is_old = is_gone and incarnation not in owners
            else:
                is_old = is_garbage(name, decision.number, known)
            if is_old or (number is not None and number < oldest):
                garbage.append(name)
        return garbage

    def _oldest_kept(self, now: float) -> int:
        if now - self._began < KEPT_SECONDS:
            return 0  # it does not know how old those of its predecessor are
        while len(self._recent) > KEPT and now - self._recent[0][0] > KEPT_SECONDS:
            self._recent.popleft()
        return self._recent[0][1] if self._recent else 0
