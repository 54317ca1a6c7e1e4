"""Report of an island about itself: bounded in size, and judged part by part."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.untrusted import decode_json
from torchtitan_diloco.islands.rules.fields import (
    MOST_FRAGMENTS,
    Checksum,
    Count,
    Digest,
    Entered,
    MalformedError,
    Name,
    Ordinal,
    Seconds,
    Tokens,
)

MOST_NOTE = 512 * 1024
"""Maximum number of bytes of a note."""
MOST_RANKS = 1024
MOST_OF_SITE = 60
"""Maximum number of characters of the name of a site."""
MOST_OF_PROCESS = 80
"""Maximum number of characters of the id of a process and its host."""

Loss = Annotated[float, Meta(ge=-1e6, le=1e6)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Bytes = Annotated[int, Meta(ge=0, le=10**18)]

JOIN = "join"
"""Request to get a slot."""
GIVE = "give"
"""Request to give the slot back."""


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The delta of a fragment, which is stored, or a loss."""

    fragment: Annotated[int, Meta(ge=0, lt=MOST_FRAGMENTS)]
    number: Ordinal
    base: Count  # version of the published copy from which the delta is computed
    checksum: Checksum  # of that copy
    start: Count
    end: Ordinal  # range of the slot's samples, `end` excluded
    weight: Count = 0  # tokens of the range, without skipped steps
    size: Count = 0  # bytes
    codec: Name = "fp32"
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    """Number of ranks whose shards the bytes contain, one after the other."""
    is_loss: bool = False
    """Whether its parameters lack the work of the range."""


class PartHead(msgspec.Struct, array_like=True, frozen=True):
    """The readable content of a malformed part."""

    fragment: Annotated[int, Meta(ge=0, lt=MOST_FRAGMENTS)]
    number: Ordinal


class NotedVitals(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of a step, of checkpoints per step, and of transfers per cycle. 0: unknown."""

    compute: Seconds = 0.0
    data: Seconds = 0.0
    save: Seconds = 0.0
    queued: Seconds = 0.0
    upload: Seconds = 0.0
    download: Seconds = 0.0

    def rounded(self) -> "NotedVitals":
        """Return the values with three digits."""
        return NotedVitals(*(float(f"{value:.3g}") for value in msgspec.structs.astuple(self)))


class NotedGauges(msgspec.Struct, array_like=True, frozen=True):
    """Values of an island for users. No decision depends on them."""

    vitals: NotedVitals = NotedVitals()
    loss: Loss | None = None  # its training loss
    validated: tuple[Tokens, Loss] | None = None
    """Tokens that the run had merged, and the loss of the shared model then."""
    tokens_per_second: Rate = 0.0
    waited: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the time in which it waited for others."""
    round_trip: Seconds = 0.0
    """Seconds from a send to the version with the part."""
    upload_rate: Rate = 0.0
    """Bytes per second of its latest part."""
    sent: Bytes = 0  # since its start
    received: Bytes = 0
    says: Annotated[int, Meta(ge=0, le=255)] = 0
    """Code of what the island says of itself. 0: nothing."""
    site: Annotated[str, Meta(max_length=MOST_OF_SITE)] = ""
    process: Annotated[str, Meta(max_length=MOST_OF_PROCESS)] = ""
    """Id of the process of its first rank, and the host: `4711 on node-1`."""


class Note(msgspec.Struct, array_like=True):
    counter: Ordinal
    """Increases with each note. A lower number is an older note that arrived late."""
    wish: Annotated[str, Meta(pattern=r"^(join|give)?\Z")] = ""
    step: Count = 0
    """Number of its steps since it has its slot."""
    tokens: Tokens = 0
    position: Count = 0
    """First sample that it has not trained on."""
    step_seconds: Seconds = 0.0
    is_idle: bool = False
    """Whether it is stopped: it leaves, or the run should have all its tokens."""
    sending: Annotated[list[Count], Meta(max_length=MOST_FRAGMENTS)] = []
    """Fragments whose upload is in flight."""
    parts: Annotated[list[msgspec.Raw], Meta(max_length=MOST_FRAGMENTS)] = []
    """Parts that are stored but not decided yet, at most one per fragment."""
    corpus: Digest = ""
    needs_copies: bool = False
    """Whether it is so far behind that a newer copy would help."""
    entered: Entered = []
    """Positions at which its stream has entered phases of the data."""
    gauges: msgspec.Raw = msgspec.Raw(b"[]")

    def read_parts(self) -> Iterator[Part | PartHead]:
        """Yield each part, or the readable content of a malformed one."""
        seen = set[int]()
        for raw in self.parts:
            part: Part | PartHead
            try:
                part = decode_json(raw, Part)
            except ValueError:
                try:
                    part = decode_json(raw, PartHead)
                except ValueError:
                    continue
            if part.fragment not in seen:
                seen.add(part.fragment)
                yield part

    def read_gauges(self) -> NotedGauges:
        """Return the values for users, or none if they are malformed."""
        try:
            return decode_json(self.gauges, NotedGauges)
        except ValueError:
            return NotedGauges()


def encode_note(note: Note) -> bytes:
    return msgspec.json.encode(note)


def decode_note(raw: bytes) -> Note:
    if len(raw) > MOST_NOTE:
        raise MalformedError(f"a note has {len(raw)} bytes, which is more than {MOST_NOTE}")
    try:
        return decode_json(raw, Note)
    except ValueError as error:
        raise MalformedError(f"a note is malformed: {error}") from error
