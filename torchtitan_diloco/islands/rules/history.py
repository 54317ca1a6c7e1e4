"""What has happened in a run: events, and the sums of each island in bins of ten minutes.

The sums of the open bin are part of each decision, so nothing is lost with a syncer. A bin that is
full is closed: its content no longer changes. Once a decision with the closed bin counts, the bin
is created as `history/NNNNNN`, and then dropped from the decision. A syncer that is killed in
between leaves the closed bin to its successor, which creates the same object.
"""

import zlib
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.untrusted import decode_json
from torchtitan_diloco.islands.rules.fields import Count, MalformedError, Tokens
from torchtitan_diloco.islands.rules.names import name_of
from torchtitan_diloco.islands.rules.note import Note

BIN_SECONDS = 600.0
"""Length of a bin."""
LEAST_BIN_SECONDS = 60.0
"""Minimum length of a bin that is closed earlier because it is full of events."""
MOST_EVENTS = 64
MOST_VALIDATED = 32
MOST_NAMES = 1100
"""Maximum number of islands with sums in a bin: more than a run has slots."""
MOST_TEXT = 100
MOST_BIN = 64 * 1024
"""Maximum number of bytes of a bin that is stored."""
MOST_PLAIN = 2**20

Text = Annotated[str, Meta(max_length=MOST_TEXT)]


class EventKind(IntEnum):
    LED = 0  # a syncer has taken over
    BEGUN = 1
    ENDED = 2
    JOINED = 3
    RETURNED = 4  # another start of the same island has its slot
    LEFT = 5
    LOST = 6  # another island has its slot
    EVICTED = 7
    AWAY = 8  # nothing is heard of it
    BACK = 9
    CHANGED = 10  # a setting, or another change by a person
    WRONG = 11  # its numbers are repeatedly wrong


class Event(msgspec.Struct, array_like=True, frozen=True):
    age: Count
    kind: EventKind
    who: str = ""
    """Name of an island, or of a change."""
    text: Text = ""


class Sums(msgspec.Struct, array_like=True):
    """Sums of an island in a bin."""

    tokens: Tokens = 0
    parts: Count = 0
    """Merged parts."""
    late: Count = 0
    """Those of them whose base was older than the newest version."""
    refused: Count = 0
    lost: Count = 0
    """Parts that were not finite, or outliers."""
    step_seconds: float = 0.0
    """Sum over the merged parts."""
    loss: float = 0.0
    """Sum over the merged parts whose island has reported a loss."""
    with_loss: Count = 0


class Bin(msgspec.Struct, array_like=True):
    since: Count = 0
    """Age of the run, in seconds."""
    until: Count = 0
    """Age at which it was closed."""
    events: list[Event] = []
    left_out: Count = 0
    """Number of events that did not fit."""
    islands: dict[str, Sums] = {}
    """By the name of the island."""
    validated: list[tuple[Tokens, float]] = []
    """Merged tokens, and the loss of the shared model."""


class History(msgspec.Struct, array_like=True):
    number: Count = 0
    """Number of the next object of the history."""
    open: Bin = msgspec.field(default_factory=Bin)
    closed: Bin | None = None
    """A bin that no object contains yet."""

    def note(self, age: float, kind: EventKind, who: str = "", text: str = "") -> None:
        """Add an event."""
        if len(self.open.events) >= MOST_EVENTS:
            self.open.left_out += 1
            return
        self.open.events.append(Event(int(age), kind, who[:MOST_TEXT], text[:MOST_TEXT]))

    def note_handover(
        self, age: float, before: str | None, after: str | None, *, is_evicted: bool
    ) -> None:
        """Add the events of a slot whose owner, an incarnation, changes."""
        if before is not None and after is not None and name_of(before) == name_of(after):
            self.note(age, EventKind.RETURNED, name_of(after))
            return
        if before is not None:
            kind = EventKind.LEFT if after is None else EventKind.LOST
            self.note(age, EventKind.EVICTED if is_evicted else kind, name_of(before))
        if after is not None:
            self.note(age, EventKind.JOINED, name_of(after))

    def _sums(self, incarnation: str) -> Sums:
        name = name_of(incarnation)
        sums = self.open.islands.get(name)
        if sums is None:
            sums = Sums()
            if len(self.open.islands) < MOST_NAMES:
                self.open.islands[name] = sums
        return sums

    def add_merged(self, incarnation: str, tokens: int, note: Note | None, *, late: bool) -> None:
        sums = self._sums(incarnation)
        sums.tokens += tokens
        sums.parts += 1
        sums.late += late
        if note is None:
            return
        sums.step_seconds = float(f"{sums.step_seconds + note.step_seconds:.6g}")
        gauges = note.read_gauges()
        if gauges.loss is not None:
            sums.loss = float(f"{sums.loss + gauges.loss:.6g}")
            sums.with_loss += 1
        newest = self.open.validated[-1][0] if self.open.validated else -1
        if gauges.validated is not None and gauges.validated[0] > newest:
            self.open.validated.append(gauges.validated)
            if len(self.open.validated) > MOST_VALIDATED:
                del self.open.validated[1::2]

    def add_left_out(self, incarnation: str, *, is_lost: bool) -> None:
        sums = self._sums(incarnation)
        if is_lost:
            sums.lost += 1
        else:
            sums.refused += 1

    def close_if_due(self, age: float) -> None:
        """Close the open bin once it is old or full, and the last closed one is stored."""
        lasted = age - self.open.since
        is_full = len(self.open.events) >= MOST_EVENTS and lasted >= LEAST_BIN_SECONDS
        if self.closed is None and (is_full or lasted >= BIN_SECONDS):
            self.open.until = int(age)
            self.closed = self.open
            self.open = Bin(since=int(age))

    def forget_closed(self, number: int) -> None:
        """Continue after the closed bin was stored as the object of this number."""
        if self.closed is not None and number == self.number:
            self.closed = None
            self.number += 1


def encode_bin(bin_: Bin) -> bytes:
    """Return the content of an object of the history. It is the same for each syncer."""
    return zlib.compress(msgspec.json.encode(bin_), 6)


def decode_bin(raw: bytes) -> Bin:
    inflate = zlib.decompressobj()
    try:
        if len(raw) > MOST_BIN:
            raise MalformedError("it is too large")
        plain = inflate.decompress(raw, MOST_PLAIN)
        if not inflate.eof or inflate.unconsumed_tail:
            raise MalformedError("it is truncated, or too large")
        return decode_json(plain, Bin)
    except (zlib.error, ValueError) as error:
        raise MalformedError(f"an object of the history: {error}") from error
