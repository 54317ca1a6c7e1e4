"""What an island says of itself, and what a person asks for: bounded, and judged part by part."""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from torchtitan_diloco.islands_store.decision import (
    MOST_FRAGMENTS,
    MOST_SLOTS,
    Checksum,
    Count,
    DamagedError,
    Name,
    Positive,
    Seconds,
    Settings,
)
from torchtitan_diloco.islands_store.names import LOGIN_PATTERN

MOST_NOTE, MOST_CHANGE = 512 * 1024, 4096
"""Bytes that are read of a note and of a change."""
MOST_CHUNKS = 4096

JOIN, GIVE = "join", "give"
"""Wishes: a slot, and to give it back."""
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
    """Its parameters do not contain the work of the range."""


class PartHead(msgspec.Struct, array_like=True, frozen=True):
    """What a malformed part still says."""

    fragment: Annotated[int, Meta(ge=0, lt=MOST_FRAGMENTS)]
    number: Positive


class Founding(msgspec.Struct, array_like=True, frozen=True):
    """A run as the island that founds it wants it. Its copies are stored under its name."""

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
            raise DamagedError("its clocks or positions do not fit")


class Vitals(msgspec.Struct, array_like=True, frozen=True):
    """What people want to know of an island. No decision depends on it."""

    compute: Seconds = 0.0
    data: Seconds = 0.0
    save: Seconds = 0.0
    upload: Seconds = 0.0
    download: Seconds = 0.0


class Note(msgspec.Struct, array_like=True):
    counter: Positive
    """Grows with each note. A lower one is an older note that landed late."""
    wish: Annotated[str, Meta(pattern=r"^(join|give)?\Z")] = ""
    step: Count = 0
    """Own steps since it has its slot."""
    tokens: Count = 0
    step_seconds: Seconds = 0.0
    is_idle: bool = False
    """It makes no steps for now: it leaves, or the run should have all its tokens."""
    sending: Annotated[list[Count], Meta(max_length=MOST_FRAGMENTS)] = []
    """Fragments whose upload is under way."""
    parts: Annotated[list[msgspec.Raw], Meta(max_length=MOST_FRAGMENTS)] = []
    """Parts that are stored and not decided yet, at most one a fragment."""
    corpus: _Digest = ""
    slot: Annotated[int, Meta(ge=-1, lt=MOST_SLOTS)] = -1
    """Which it had when its checkpoint was written."""
    needs_copies: bool = False
    """It is so far behind that a newer copy would help."""
    founds: msgspec.Raw = msgspec.Raw(b"null")
    vitals: Vitals = Vitals()

    def read_parts(self) -> Iterator[Part | PartHead]:
        """Yield each part, or what can be read of a malformed one."""
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
        raise DamagedError(f"a note has {len(raw)} bytes, and may have {MOST_NOTE}")
    try:
        return msgspec.json.decode(raw, type=Note)
    except msgspec.DecodeError as error:
        raise DamagedError(f"a note is malformed: {error}") from error


# --- changes --------------------------------------------------------------------------------------

Login = Annotated[str, Meta(pattern=rf"^{LOGIN_PATTERN}\Z")]


class _Change(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    pass


class Set(_Change, frozen=True):
    """Change a setting of the run."""

    key: Name
    value: Name


class Leave(_Change, frozen=True):
    """Ask an island to send its work and leave."""

    login: Login


class Evict(_Change, frozen=True):
    """Take the slot of an island, and refuse its login until it is admitted."""

    login: Login


class Admit(_Change, frozen=True):
    login: Login


Change: TypeAlias = Set | Leave | Evict | Admit
_CHANGEABLE = {
    "sync_every",
    "delay",
    "mixing",
    "outer_lr",
    "codec",
    "total_tokens",
    "slots",
    "grace",
    "slot_seconds",
    "fastest",
}


def decode_change(raw: bytes) -> Change:
    if len(raw) > MOST_CHANGE:
        raise DamagedError(f"a change has {len(raw)} bytes, and may have {MOST_CHANGE}")
    try:
        return msgspec.json.decode(raw, type=Set | Leave | Evict | Admit)
    except msgspec.DecodeError as error:
        raise DamagedError(f"a change is malformed: {error}") from error


def changed(settings: Settings, change: Set) -> Settings:
    """Return the settings after a change. Raise a DamagedError if it is not possible."""
    if change.key not in _CHANGEABLE:
        raise DamagedError(f"{change.key} cannot change while a run goes on")
    fields = msgspec.to_builtins(settings) | {change.key: change.value}
    try:
        after = msgspec.convert(fields, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{change.key} = {change.value}: {error}") from error
    if after.delay >= after.sync_every:
        raise DamagedError(f"delay {after.delay} must be smaller than {after.sync_every}")
    if after.slots < settings.slots:
        raise DamagedError(f"the run has {settings.slots} slots, and none is taken away")
    return after
