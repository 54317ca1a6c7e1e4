"""Decisions of the syncer: the whole state of a run, in one object that is created once.

A decision is a compact JSON array, compressed with zlib. It starts with the version
of the protocol and its number, which every later version keeps.
"""

import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.untrusted import decode_json
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.rules.fields import (
    Checksum,
    Count,
    Digest,
    Entered,
    MalformedError,
    Name,
    Ordinal,
    Seconds,
    Shapes,
    Tokens,
)
from torchtitan_diloco.islands.rules.history import History
from torchtitan_diloco.islands.rules.names import COPY, OUTER, VERSION, Object
from torchtitan_diloco.islands.rules.note import NotedVitals
from torchtitan_diloco.islands.rules.settings import Settings

PROTOCOL = 3
MOST_PLAIN = 16 * 2**20
"""Maximum number of bytes of a decision before compression."""
VERSIONS_LATE = 4
"""Maximum number of versions by which the base of a part may be older than the newest one."""


class NewerProtocolError(UserError):
    """The run is written by newer code."""


class Fate(IntEnum):
    """Fate of the last part of a slot in a fragment."""

    NONE = 0
    MERGED = 1
    LOSS = 2  # a range without bytes, as its island has declared
    NOT_FINITE = 3  # lost: its island takes the published copy
    OUTLIER = 4  # lost: its norm is far from the usual one
    STALE = 5  # refused from here on: the work stays in theta, and is sent again
    WRONG_BASE = 6
    WRONG_START = 7
    TOO_LONG = 8
    TOO_HEAVY = 9
    OVER = 10
    UNREADABLE = 11
    MALFORMED = 12

    @property
    def is_lost(self) -> bool:
        return self in (Fate.NOT_FINITE, Fate.OUTLIER)

    @property
    def is_left_out(self) -> bool:
        """Whether the work of the part is not in the shared model."""
        return self not in (Fate.NONE, Fate.MERGED, Fate.LOSS)

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


class Ledger(msgspec.Struct, array_like=True):
    """The fate of a slot's samples in a fragment."""

    number: Count = 0
    """Number of its last decided part. Each number is used once, regardless of the owner of the
    slot."""
    taken: Count = 0
    """Samples before this one are merged or lost. The next part starts here."""
    lost: Count = 0
    fate: Fate = Fate.NONE
    """Fate of part `number`."""
    version: Count = 0
    """Version that contains its last merged part."""
    since: Annotated[float, Meta(ge=0)] = 0.0
    """Age of the run, in seconds, from which on the samples of the next part can have been read:
    their number is bounded by the time since then."""


class Slot(msgspec.Struct, array_like=True):
    ledgers: list[Ledger]
    owner: str | None = None
    corpus: Digest = ""
    """Digest of the corpus in which its samples are numbered."""
    entered: Entered = []
    """Positions at which its stream entered the first, second, ... phase of the data."""
    read_twice: Count = 0
    """Number of samples that an owner had read, and the next one had to read again."""

    @property
    def furthest(self) -> int:
        """Position of the first sample that is not merged or lost in any fragment."""
        return max((ledger.taken for ledger in self.ledgers), default=0)


class Seen(msgspec.Struct, array_like=True, frozen=True):
    """What the syncer has last seen of the owner of a slot, on its clock. For users: no decision
    depends on it."""

    heard: Seconds = 0.0
    """Seconds since its last note, in time during which the syncer has listened."""
    still: Seconds = 0.0
    """Seconds since its last step."""
    step: Count = 0
    tokens: Tokens = 0
    position: Count = 0
    step_seconds: Seconds = 0.0
    vitals: NotedVitals = NotedVitals()
    flags: Annotated[int, Meta(ge=0, le=255)] = 0
    """`IS_IDLE` and `IS_SENDING`."""
    says: Annotated[int, Meta(ge=0, le=255)] = 0
    """Code of what the island says of itself. 0: nothing."""


IS_IDLE = 1
"""Flag: the island has stopped on purpose."""
IS_SENDING = 2
"""Flag: an upload of the island is in flight."""


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """A version that is still stored."""

    version: Count
    checksum: Checksum  # of the published copy
    number: Count  # of the decision that has announced its update; 0: there is no update


class Stored(msgspec.Struct, array_like=True, frozen=True):
    """A copy, or the state of the outer optimizer."""

    version: Count
    number: Count


class SharedFragment(msgspec.Struct, array_like=True):
    shapes: Shapes
    version: Count = 0
    clock: Tokens = 0
    """Number of merged tokens."""
    is_open: bool = False
    """Whether a round waits for parts."""
    norms: list[float] = []
    """Median norms of the parts of the latest versions, each part in units of its usual weight."""
    kept: list[Kept] = []
    copies: list[Stored] = []
    """At most two copies, the newest one last."""
    outer: Stored | None = None

    @property
    def elements(self) -> int:
        return sum(rows * width for rows, width in self.shapes)

    def checksum(self, version: int) -> str | None:
        return next((kept.checksum for kept in self.kept if kept.version == version), None)

    def objects(self, fragment: int) -> Iterator[Object]:
        """Yield the objects that it names."""
        for kept in self.kept:
            if kept.number:
                yield Object(VERSION, kept.number, fragment, kept.version)
        for stored in self.copies:
            yield Object(COPY, stored.number, fragment, stored.version)
        if self.outer is not None:
            yield Object(OUTER, self.outer.number, fragment, self.outer.version)

    def forget_old(self) -> None:
        """Drop all copies except two, and versions before the older one."""
        self.copies = self.copies[-2:]
        oldest = max(0, self.version - VERSIONS_LATE)
        oldest = min([oldest, *(copy.version for copy in self.copies)])
        self.kept = [kept for kept in self.kept if kept.version >= oldest]


class Decision(msgspec.Struct, array_like=True):
    protocol: int
    number: Ordinal
    session: str
    """Nonce of the syncer, so that two syncers never write the same bytes."""
    run: Name
    settings: Settings
    fragments: list[SharedFragment] = []
    """Empty while the copies of the founder are not stored."""
    slots: list[Slot] = []
    age: float = 0.0
    """Seconds since the run was founded."""
    written: float = 0.0
    """Wall clock of the syncer, used only for the age of a run after a takeover."""
    ready: list[str] = []
    """Islands for which rounds wait."""
    told: dict[str, str] = {}
    """Messages to incarnations of islands: a key of `ORDERS`."""
    barred: list[str] = []
    """Names of islands that are evicted until they are admitted."""
    done: dict[str, str] = {}
    """The latest changes, and why they were refused, or empty if they were applied. They are not
    applied again, and their objects are deleted once this decision counts."""
    writing: list[Object] = []
    """Objects whose upload may start once this decision counts."""
    founder: str = ""
    """Incarnation of the island whose copies the run begins with."""
    begun: bool = False
    ended: bool = False
    stopped: bool = False
    """Whether the syncer has ended in order, so that another one may follow at once."""
    seen: list[Seen | None] = []
    """What is known of the owner of each slot."""
    history: History = msgspec.field(default_factory=History)

    @property
    def is_founded(self) -> bool:
        return bool(self.fragments) and all(shared.copies for shared in self.fragments)

    @property
    def names(self) -> set[str]:
        """Names of all objects that this decision names or announces."""
        named = (
            stored
            for number, shared in enumerate(self.fragments)
            for stored in shared.objects(number)
        )
        return {stored.name for stored in (*named, *self.writing)}

    @property
    def phases(self) -> int:
        """Number of phases of the data that have begun."""
        clocks = (shared.clock for shared in self.fragments)
        return self.settings.phases_at(max(clocks, default=0))

    def owners(self) -> list[str]:
        return [slot.owner for slot in self.slots if slot.owner is not None]

    def slot_of(self, incarnation: str) -> int | None:
        numbers = (number for number, slot in enumerate(self.slots) if slot.owner == incarnation)
        return next(numbers, None)


class _Head(msgspec.Struct, array_like=True):
    protocol: int
    number: int


RUNNING = "running"
REPLACED = "replaced"
BARRED = "barred"
SICK = "sick"
LEAVE = "leave"
ORDERS = {
    RUNNING: (
        "another process of this island is running: stop it first, or give this one another name"
    ),
    REPLACED: "another process of this island has taken its place",
    BARRED: (
        "the owner of the run has evicted this island: ask the owner for `islands change admit`"
    ),
    SICK: "its numbers are repeatedly wrong, and rounds do not wait for it: check its memory",
    LEAVE: "the owner of the run has asked it to leave",
}
ENDS = {RUNNING, REPLACED, BARRED}
"""Messages after which an incarnation ends at once."""


def encode_decision(decision: Decision) -> bytes:
    return zlib.compress(msgspec.json.encode(decision), 6)


def decode_decision(raw: bytes, number: int | None = None) -> Decision:
    """Return a decision. Raise a MalformedError if its bytes are incomplete, and a
    NewerProtocolError if newer code wrote them."""
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(raw, MOST_PLAIN)
        if not inflate.eof or inflate.unconsumed_tail:
            raise ValueError("it is truncated, or too large")
        protocol = decode_json(plain, _Head).protocol
        decision = decode_json(plain, Decision) if protocol <= PROTOCOL else None
    except (zlib.error, ValueError) as error:
        raise MalformedError(f"decision {number}: {error}") from error
    if decision is None:
        raise NewerProtocolError(
            f"the run uses protocol {protocol}, and this code supports "
            f"{PROTOCOL}: install the same version as the syncer of the run"
        )
    if number is not None and decision.number != number:
        raise MalformedError(f"decision {number} contains the number {decision.number}")
    return decision
