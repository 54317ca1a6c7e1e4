"""Records of the log of a run with islands, and their encoding."""

import hashlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta


class VoidError(ValueError):
    """A record is not valid where it stands."""


Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


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
    """First record: what all islands must agree on."""

    slots: Positive
    """Data streams of the run. Each is read by one island at a time."""
    begin: Positive
    """Islands that start together."""
    total_tokens: Positive
    checksums: tuple[Name, ...]
    """Checksum of version 0 of each fragment."""
    fingerprints: dict[Name, Name]
    """Fingerprints of the settings, code, layout, data, tokenizer and arithmetic."""
    block: Positive = 1
    """Samples of a slot that lie together in the order of all samples."""


class SlotRecord(Record, frozen=True):
    """Record of an island about the slot that it owns, or takes."""

    slot: Count
    incarnation: Name
    """Name of one start of an island. No two starts have the same."""


class Take(SlotRecord, frozen=True):
    replaces: Name | None
    """Owner of the slot in the log that the writer has read: if it is another, this is void."""


class Give(SlotRecord, frozen=True):
    """The owner leaves."""


class Done(SlotRecord, frozen=True):
    """The owner sends nothing more, because the run has had its tokens."""


class End(SlotRecord, frozen=True):
    """Fix the final copy."""

    absent: tuple[Name, ...]
    """Owners that are not done and are not waited for."""
    heads: tuple[str, ...]
    """Hash of the last entry of each fragment."""


class Open(SlotRecord, frozen=True):
    """Begin the round of a fragment that makes this version."""

    fragment: Count
    version: Positive
    grace: Seconds
    """Time for parts to arrive, which each island counts from when it reads this record."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Message in the stream of parts."""

    sequence: Positive
    size: Positive
    sha256: Name


class Part(SlotRecord, frozen=True):
    """Delta of a fragment. It is appended after all its chunks are stored."""

    fragment: Count
    number: Positive
    """Grows with each part that an incarnation sends of a fragment: a repeated one counts once."""
    base: Count
    """Version of the shared copy that the delta is relative to."""
    checksum: Name
    """Checksum of that version."""
    start: Count
    end: Positive
    """Range of the slot's samples that the delta was trained on, `end` not included."""
    weight: Count
    """Weight in the mean: the tokens of the range, without those of skipped steps."""
    finite: bool = True
    """False: the parameters were not finite. The island takes the shared copy; the work is lost."""
    ranks: Positive = 1
    """Ranks of the island. The payload is what each has encoded of its shard, in their order."""
    chunks: tuple[Chunk, ...] = ()


class Refusal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    part: Positive
    reason: str


class Close(SlotRecord, frozen=True):
    """Make a version of a fragment from parts. Valid, it is an entry of that fragment.

    Its writer has fetched and checked all the parts that it names.
    """

    fragment: Count
    version: Positive
    after: Count
    """Sequence number of the fragment's last valid record that the writer has read. If it is not
    the last one here, the close is void: so its writer has seen every part before it."""
    previous: str
    """Hash of the last entry of the fragment."""
    checksum: Name
    """Checksum of the version before."""
    parts: tuple[Positive, ...]
    """Sequence numbers of the parts, in the order of their slots, which is that of the mean."""
    weights: tuple[Count, ...]
    refused: tuple[Refusal, ...]
    """Parts that cannot be used. They are given up."""
    clock: Count
    """Tokens that the fragment has merged, with these."""
    lr: Annotated[float, Meta(ge=0)]
    """Outer learning rate."""


AnyRecord: TypeAlias = Facts | Take | Give | Done | End | Open | Part | Close


def attempt_of(record: Record) -> tuple[object, ...]:
    """Return what records have in common that ask for the same, perhaps with newer figures."""
    names = "slot", "replaces", "fragment", "version", "number", "after"
    return type(record), *(getattr(record, name, None) for name in names)


def encode(record: Record) -> bytes:
    """Return the one valid encoding of a record."""
    return msgspec.json.encode(record, order="deterministic")


def decode(raw: bytes) -> AnyRecord:
    """Return the record, or raise VoidError for anything that `encode` does not return."""
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
