"""Records of the log of a run, and their encoding."""

import hashlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.user import UserError


class VoidError(ValueError):
    """A record is not valid at its position in the log."""


class DisputeError(VoidError):
    """The writer has a different checksum of a version."""


class AnotherLogError(UserError):
    """The log of the server is not the one that this island has read."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            "the server's log is not the one that this island has read: "
            f"{difference}. The server uses an older copy of its folder, or another "
            "run. If the previous folder still exists, start `serve` on it; "
            "otherwise, start a new run with `serve` in an empty folder, in which "
            "islands start from the model in their checkpoints"
        )


PROTOCOL = 6
"""Version of records, their rules, chunks and heartbeats. Islands with another one cannot join."""
LARGEST = 2**53  # largest number in a record: all JSON readers keep it exactly
LARGEST_NORM = 1e18  # a part with a larger norm counts as one that is not finite
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
CODEC = "diloco.quantization.codec"
MOST_SLOTS, MOST_RANKS, MOST_GRACE = 1024, 4096, 3600.0
"""Bounds of slots of a run, ranks of an island, and seconds of a grace period. A larger number in a
record would cost its readers memory or time."""


class Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=str.lower,
):
    run: Name


class Facts(Record, frozen=True):
    """First record: the facts on which all islands must agree."""

    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    """Data streams of the run, each read by one island at a time."""
    begin: Positive  # islands that start together
    total_tokens: Positive
    cycle: Positive  # tokens that the islands that start together train on in H steps
    outer_lr: Annotated[float, Meta(gt=0, le=1e6)]
    """Largest outer learning rate of a close."""
    checksums: tuple[Name, ...]  # checksum of version 0 of each fragment
    fingerprints: dict[Name, Name]
    """Fingerprints of the settings, layout, data, tokenizer and arithmetic."""
    quorum: Positive = 1  # parts that a round needs after its grace
    protocol: Positive = PROTOCOL
    code: Name = "unknown"
    """Hash of the source. Different code is allowed, so that bug fixes can be installed during a
    run."""
    block: Positive = 1  # consecutive samples of a slot in the order of all samples
    streams: Count = 0
    """Number of slots that share this order. Slots added later have separate orders. 0: all."""
    clocks: tuple[Count, ...] = ()
    """Tokens that each fragment had merged in the log that this one continues. Empty: in none."""
    positions: tuple[Count, ...] = ()  # first sample of each slot that no fragment had taken there

    @property
    def codec(self) -> str:
        """Wire format of new parts."""
        return self.fingerprints.get(CODEC, "fp32")

    @property
    def most_weight(self) -> int:
        """Largest weight of a part: more than the work of an outage, and less than a run."""
        return max(8 * self.cycle, self.total_tokens // 16)

    def check_size(self) -> None:
        """Raise a VoidError if a clock of the run could not be written."""
        if self.streams > self.slots:
            raise VoidError("has more streams than slots")
        if (largest := self.total_tokens + self.slots * self.most_weight) > LARGEST:
            raise VoidError(f"a clock of {largest} could not be written")


class Change(Record, frozen=True):
    """Change a setting of the run from here on. Any login that can write to the log may write
    it."""

    key: Name
    value: Name


class SlotRecord(Record, frozen=True):
    """Record of an island about the slot that it owns or takes."""

    slot: Count
    incarnation: Name  # unique name of one start of an island


class Take(SlotRecord, frozen=True):
    replaces: Name | None
    """Owner of the slot when the writer read the log. The record is void if it has changed."""


class Give(SlotRecord, frozen=True):
    """The owner leaves."""


class Evict(SlotRecord, frozen=True):
    """Vote to take the slot from another, faulty island, as if it had left."""

    target: Name  # its incarnation
    reason: Annotated[str, Meta(max_length=100)]


class Done(SlotRecord, frozen=True):
    """The owner sends nothing more, because the run has had all its tokens."""


class End(SlotRecord, frozen=True):
    """End the run. The shared copies are final."""

    absent: tuple[Name, ...]  # owners that are not done but gone
    heads: tuple[str, ...]  # hash of the last entry of each fragment


class Open(SlotRecord, frozen=True):
    """Begin the round of a fragment for this version."""

    fragment: Count
    version: Positive
    grace: Annotated[float, Meta(ge=0, le=MOST_GRACE)]
    """Time for parts to arrive, from when each island reads this record."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Message in the stream of parts or of snapshots."""

    sequence: Positive
    size: Positive
    sha256: Name


class Part(SlotRecord, frozen=True):
    """Delta of a fragment, appended after all its chunks are stored."""

    fragment: Count
    number: Positive
    """Grows with each part of a fragment that an incarnation sends, to detect repeated ones."""
    base: Count  # version of the shared copy from which the delta is computed
    checksum: Name  # checksum of that version
    start: Count
    end: Positive  # range of the slot's samples that the delta was trained on, `end` excluded
    weight: Count
    """Weight in the mean: the tokens of the range, without skipped steps, but at most
    `Facts.most_weight`."""
    finite: bool = True
    """False: the delta was unusable. The island takes the shared copy, and its work is lost."""
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1
    """Ranks of the island. The payload is their encoded shards, in order."""
    codec: Name = "fp32"  # wire format of the payload, which can change while the run goes on
    chunks: tuple[Chunk, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return sum(chunk.size for chunk in self.chunks)


class Refusal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    part: Positive
    reason: str
    outlier: bool = False
    """Whether its norm is the reason: its work is lost, and its island takes the shared copy."""


class Close(SlotRecord, frozen=True):
    """Create a version of a fragment from parts. A valid close is an entry of the fragment.

    Its writer has fetched and checked all parts that it names.
    """

    fragment: Count
    version: Positive
    after: Count
    """Sequence number of the fragment's last valid record, as read by the writer. The close is void
    if there is a later one, so its writer has seen every part before it."""
    previous: str  # hash of the last entry of the fragment
    checksum: Name  # checksum of the version before
    parts: tuple[Positive, ...]
    """Sequence numbers of the parts in the order of their slots, the order of the mean."""
    weights: tuple[Count, ...]
    norms: tuple[Annotated[float, Meta(ge=0, le=LARGEST_NORM)], ...]
    """Norm of each part for H steps, as computed by the writer. Later parts are judged by these."""
    refused: tuple[Refusal, ...]  # unusable parts, which are given up
    clock: Count  # tokens that the fragment has merged, these included
    lr: Annotated[float, Meta(ge=0)]
    """Outer learning rate."""


AnyRecord: TypeAlias = Facts | Change | Take | Give | Evict | Done | End | Open | Part | Close


# --- messages between islands ---------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message from one island to another."""

    sender: str


class Leave(Message, frozen=True):
    """Leave the run."""


class SnapshotWanted(Message, frozen=True):
    fragment: Count


class Snapshot(Message, frozen=True):
    fragment: Count
    version: Count
    head: str  # hash of the entry that made the version
    chunks: tuple[Chunk, ...] = ()
    problem: str = ""  # why there are no chunks


AnyMessage: TypeAlias = Leave | SnapshotWanted | Snapshot


# --- encoding -------------------------------------------------------------------------------------


def attempt_of(record: Record) -> tuple[object, ...]:
    """Return a key that is equal for records with the same purpose, even with newer values."""
    names = "slot", "replaces", "fragment", "version", "number", "after", "target"
    return type(record), *(getattr(record, name, None) for name in names)


def encode(record: Record) -> bytes:
    """Return the only valid encoding of a record."""
    return msgspec.json.encode(record, order="deterministic")


def decode(raw: bytes) -> AnyRecord:
    """Return the record. Raises VoidError for anything that `encode` cannot return."""
    try:
        record: AnyRecord = msgspec.json.decode(raw, type=AnyRecord)
        canonical = encode(record) == raw
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise VoidError(f"not a record: {error}") from error
    if not canonical:
        raise VoidError("not a record: its encoding is not the canonical one")
    return record


def digest(raw: bytes | memoryview) -> str:
    return hashlib.sha256(raw).hexdigest()


def name_of(incarnation: str) -> str:
    """Return the name of the island to which an incarnation belongs."""
    return incarnation.partition("/")[0]
