"""Report of an island about itself: bounded in size, and judged part by part."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from torchtitan_diloco.islands_store.decision import (
    MOST_FRAGMENTS,
    MOST_SLOTS,
    PROTOCOL,
    Checksum,
    Count,
    DamagedError,
    Decision,
    Fragment,
    Kept,
    Ledger,
    Name,
    Positive,
    Seconds,
    Settings,
    Slot,
)

MOST_NOTE = 512 * 1024
"""Maximum number of bytes of a note."""
MOST_CHUNKS = 4096

JOIN, GIVE = "join", "give"
"""Requests: to get a slot, and to give it back."""
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")]


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The delta of a fragment, whose chunks are stored, or a loss."""

    fragment: Annotated[int, Meta(ge=0, lt=MOST_FRAGMENTS)]
    number: Positive
    base: Count  # version of the published copy from which the delta is computed
    checksum: Checksum  # of that copy
    start: Count
    end: Positive  # range of the slot's samples, `end` excluded
    weight: Count = 0  # tokens of the range, without skipped steps
    size: Count = 0  # bytes
    chunks: Annotated[int, Meta(ge=0, le=MOST_CHUNKS)] = 0
    digest: _Digest = ""  # SHA-256 of the bytes
    codec: Name = "fp32"
    is_loss: bool = False
    """Whether its parameters lack the work of the range."""


class PartHead(msgspec.Struct, array_like=True, frozen=True):
    """The readable content of a malformed part."""

    fragment: Annotated[int, Meta(ge=0, lt=MOST_FRAGMENTS)]
    number: Positive


class Founding(msgspec.Struct, array_like=True, frozen=True):
    """Settings of a run by the island that founds it. Its copies are stored under its name."""

    run: Name
    settings: Settings
    elements: Annotated[list[Positive], Meta(min_length=1, max_length=MOST_FRAGMENTS)]
    checksums: list[Checksum]
    chunks: Annotated[list[Positive], Meta(max_length=MOST_FRAGMENTS)]
    clocks: list[Count] = []  # tokens that the fragments have merged in the run that was lost
    positions: Annotated[list[Count], Meta(max_length=MOST_SLOTS)] = []  # of its slots

    def check(self) -> None:
        fragments = len(self.elements)
        if not fragments == len(self.checksums) == len(self.chunks):
            raise DamagedError("its lists differ in length")
        if len(self.clocks) not in (0, fragments) or len(self.positions) > self.settings.slots:
            raise DamagedError("its clocks or positions are inconsistent")

    def decision(self, number: int, session: str) -> Decision:
        """Return the state of the run before any island has a slot."""
        clocks = self.clocks or [0] * len(self.elements)
        fragments = [
            Fragment(elements, clock=clock, kept=[Kept(0, checksum, 0)])
            for elements, checksum, clock in zip(self.elements, self.checksums, clocks, strict=True)
        ]
        return Decision(
            protocol=PROTOCOL,
            number=number,
            session=session,
            run=self.run,
            settings=self.settings,
            fragments=fragments,
            slots=[Slot([Ledger(taken=taken) for _ in fragments]) for taken in self.positions],
        )


class Vitals(msgspec.Struct, array_like=True, frozen=True):
    """Values of an island for users. No decision depends on them."""

    compute: Seconds = 0.0
    data: Seconds = 0.0
    save: Seconds = 0.0
    upload: Seconds = 0.0
    download: Seconds = 0.0


class Note(msgspec.Struct, array_like=True):
    counter: Positive
    """Increases with each note. A lower number is an older note that arrived late."""
    wish: Annotated[str, Meta(pattern=r"^(join|give)?\Z")] = ""
    step: Count = 0
    """Number of its steps since it has its slot."""
    tokens: Count = 0
    step_seconds: Seconds = 0.0
    is_idle: bool = False
    """Whether it is stopped: it leaves, or the run should have all its tokens."""
    sending: Annotated[list[Count], Meta(max_length=MOST_FRAGMENTS)] = []
    """Fragments whose upload is in flight."""
    parts: Annotated[list[msgspec.Raw], Meta(max_length=MOST_FRAGMENTS)] = []
    """Parts that are stored but not decided yet, at most one per fragment."""
    corpus: _Digest = ""
    slot: Annotated[int, Meta(ge=-1, lt=MOST_SLOTS)] = -1
    """Slot that it had when its checkpoint was written."""
    needs_copies: bool = False
    """Whether it is so far behind that a newer copy would help."""
    founds: msgspec.Raw = msgspec.Raw(b"null")
    vitals: Vitals = Vitals()

    def read_parts(self) -> Iterator[Part | PartHead]:
        """Yield each part, or the readable content of a malformed one."""
        seen = set[int]()
        for raw in self.parts:
            part: Part | PartHead
            try:
                part = msgspec.json.decode(raw, type=Part)
            except msgspec.DecodeError:
                try:
                    part = msgspec.json.decode(raw, type=PartHead)
                except msgspec.DecodeError:
                    continue
            if part.fragment not in seen:
                seen.add(part.fragment)
                yield part

    def read_founding(self) -> Founding | None:
        try:
            founding = msgspec.json.decode(self.founds, type=Founding | None)
            if founding is not None:
                founding.check()
        except (msgspec.DecodeError, DamagedError):
            return None
        return founding


def encode_note(note: Note) -> bytes:
    return msgspec.json.encode(note)


def decode_note(raw: bytes) -> Note:
    if len(raw) > MOST_NOTE:
        raise DamagedError(f"a note has {len(raw)} bytes, which is more than {MOST_NOTE}")
    try:
        return msgspec.json.decode(raw, type=Note)
    except msgspec.DecodeError as error:
        raise DamagedError(f"a note is malformed: {error}") from error
