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

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands_store.names import COPY, LARGEST, OUTER, VERSION, Object

PROTOCOL = 1
MOST_PLAIN = 16 * 2**20
"""Maximum number of bytes of a decision before compression."""
MOST_SLOTS, MOST_FRAGMENTS = 1024, 4096
VERSIONS_LATE = 4
"""Maximum number of versions by which the base of a part may be older than the newest one."""

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}\Z")]


class NewerProtocolError(UserError):
    """The run is written by newer code."""


class DamagedError(ValueError):
    """An object differs from what its writer has written."""


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
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a run, set by the island that founds it."""

    sync_every: Positive
    """H."""
    delay: Count
    """tau."""
    total_tokens: Positive
    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    """Maximum number of islands that train at a time, each on a separate stream of samples."""
    start_with: Positive
    mixing: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """alpha."""
    outer_lr: Annotated[float, Meta(gt=0, le=100)] = 1.0
    codec: Name = "fp32"
    grace: Seconds = 1.0
    slot_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 60.0
    fastest: Annotated[float, Meta(gt=0, le=1e9)] = 1e6
    """Maximum number of samples per second of an island."""
    tokens_per_sample: Positive = 1
    norm_limit: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Multiple of the usual norm above which a part is an outlier. 0: no part is."""
    copies_every: Positive = 8
    """Number of versions between two copies if no island requests one."""
    commit_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 0.2
    """Minimum seconds between two decisions: 1 on a bucket."""
    facts: dict[Name, Name] = {}
    """Fingerprints of all other facts on which islands must agree."""


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
    since: Count = 0
    """Age of the run, in seconds, when it was merged."""


class Slot(msgspec.Struct, array_like=True):
    ledgers: list[Ledger]
    owner: str | None = None
    corpus: str = ""
    """Digest of the corpus in which its samples are numbered."""


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """A version that is still stored."""

    version: Count
    checksum: Checksum  # of the published copy
    number: Count  # of the decision that has announced its update; 0: there is no update


class Stored(msgspec.Struct, array_like=True, frozen=True):
    """A copy, or the state of the outer optimizer."""

    version: Count
    number: Count


class Fragment(msgspec.Struct, array_like=True):
    elements: Count
    version: Count = 0
    clock: Count = 0
    """Number of merged tokens."""
    is_open: bool = False
    """Whether a round waits for parts."""
    norm: float = 0.0
    """Usual norm of recently merged parts, each in units of its share of H steps."""
    kept: list[Kept] = []
    copies: list[Stored] = []
    """At most two copies, the newest one last."""
    outer: Stored | None = None

    def checksum(self, version: int) -> str | None:
        return next((one.checksum for one in self.kept if one.version == version), None)

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
        self.kept = [one for one in self.kept if one.version >= oldest]


class Decision(msgspec.Struct, array_like=True):
    protocol: int
    number: Count
    session: str
    """Nonce of the syncer, so that two syncers never write the same bytes."""
    run: Name
    settings: Settings
    fragments: list[Fragment]
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
    """Logins that are evicted until they are admitted."""
    done: dict[str, str] = {}
    """The latest changes, and why they were refused, or empty if they were applied. They are not
    applied again, and their objects are deleted."""
    writing: list[Object] = []
    """Objects whose upload may start once this decision counts."""
    begun: bool = False
    ended: bool = False
    stopped: bool = False
    """Whether the syncer has ended in order, so that another one may follow at once."""

    @property
    def is_founded(self) -> bool:
        return bool(self.fragments) and all(one.copies for one in self.fragments)

    @property
    def names(self) -> set[str]:
        """Names of all objects that this decision names or announces."""
        named = (one for f, part in enumerate(self.fragments) for one in part.objects(f))
        return {one.name for one in named} | {one.name for one in self.writing}

    def owners(self) -> list[str]:
        return [slot.owner for slot in self.slots if slot.owner is not None]

    def slot_of(self, incarnation: str) -> int | None:
        owned = (n for n, slot in enumerate(self.slots) if slot.owner == incarnation)
        return next(owned, None)


class _Head(msgspec.Struct, array_like=True):
    protocol: int
    number: int


RUNNING, REPLACED, BARRED, SICK, LEAVE = "running", "replaced", "barred", "sick", "leave"
ORDERS = {
    RUNNING: (
        "another process of this island is running: stop it first, or give this one another name"
    ),
    REPLACED: "another process of this island has taken its place",
    BARRED: (
        "the owner of the run has evicted this island: ask the owner for `islands change admit`"
    ),
    SICK: "its numbers were repeatedly wrong: check its memory and machine",
    LEAVE: "the owner of the run has asked it to leave",
}


def encode_decision(decision: Decision) -> bytes:
    return zlib.compress(msgspec.json.encode(decision), 6)


def decode_decision(raw: bytes, number: int | None = None) -> Decision:
    """Return a decision. Raise a DamagedError if its bytes are incomplete, and a NewerProtocolError
    if newer code wrote them."""
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(raw, MOST_PLAIN)
        if not inflate.eof or inflate.unconsumed_tail:
            raise DamagedError("it is truncated, or too large")
        head = msgspec.json.decode(plain, type=_Head)
        if head.protocol > PROTOCOL:
            raise NewerProtocolError(
                f"the run uses protocol {head.protocol}, and this code supports "
                f"{PROTOCOL}: install the same version as the syncer of the run"
            )
        decision = msgspec.json.decode(plain, type=Decision)
    except (zlib.error, msgspec.DecodeError) as error:
        raise DamagedError(f"decision {number}: {error}") from error
    if number is not None and decision.number != number:
        raise DamagedError(f"decision {number} contains the number {decision.number}")
    return decision
