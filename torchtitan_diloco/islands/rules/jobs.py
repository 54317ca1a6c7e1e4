"""Jobs of a syncer for its threads."""

from dataclasses import dataclass
from typing import TypeAlias

from torchtitan_diloco.islands.rules.decision import SharedFragment
from torchtitan_diloco.islands.rules.founding import Founding
from torchtitan_diloco.islands.rules.names import COPY, OUTER, VERSION, Object
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.rounds import WaitingPart


@dataclass(frozen=True)
class Commit:
    """Make a decision take effect (`commit`), then call `on_committed`."""

    number: int
    content: bytes


@dataclass(frozen=True)
class Adopt:
    """Look for the copies of a founder. If all are stored, fetch and check them: `on_adopted`."""

    incarnation: str
    founding: Founding


@dataclass(frozen=True)
class Load:
    """Load a fragment, after a takeover: `on_loaded`. P is the copy and the versions after it.

    If an object is missing, the store has lost it, which is an error.
    """

    fragment: int
    copy: Object
    versions: tuple[Object, ...]
    outer: Object | None
    checksum: str


@dataclass(frozen=True)
class Fetch:
    """Fetch a part and check its bytes: `on_part`."""

    incarnation: str
    part: Part


@dataclass(frozen=True)
class MergeParts:
    """Average parts in this order, step the outer optimizer, encode the update: `on_norms`, and
    `on_merged` if the result counts.

    The learning rate is that at `clock`, the tokens of the fragment with these parts, scaled by the
    weight of the parts over `weight_of_all`. The new state stands beside the one before it until a
    `Settle`, so that nothing has to be undone. If the result is not finite, it is dropped, with its
    momentum.
    """

    fragment: int
    version: int
    parts: tuple[WaitingPart, ...]
    weight_of_all: int
    clock: int


@dataclass(frozen=True)
class Settle:
    """The decision that names this version counts: drop the state before it."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Snapshot:
    """Keep copy and outer state of this version until they are uploaded: `on_snapshot`. Jobs of a
    fragment run in order, so the next merge follows it."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Upload:
    """Upload a merged or kept object: `on_uploaded`.

    If an object of this name exists with other bytes, the store was restored to an older copy while
    a syncer was still uploading: stand by, as if superseded.
    """

    stored: Object


@dataclass(frozen=True)
class Record:
    """Create an object of the history: `on_recorded`. An existing object of this name has the same
    content."""

    number: int
    content: bytes


@dataclass(frozen=True)
class DeleteObjects:
    names: tuple[str, ...]


Job: TypeAlias = (
    Commit | Adopt | Load | Fetch | MergeParts | Settle | Snapshot | Upload | Record | DeleteObjects
)


def load(shared: SharedFragment, number: int) -> Load:
    """Return the job that loads a fragment from the objects that a decision names."""
    copy = shared.copies[-1]
    outer = shared.outer
    later = (kept for kept in shared.kept if kept.version > copy.version)
    return Load(
        fragment=number,
        copy=Object(COPY, copy.number, number, copy.version),
        versions=tuple(Object(VERSION, kept.number, number, kept.version) for kept in later),
        outer=Object(OUTER, outer.number, number, outer.version) if outer else None,
        checksum=shared.checksum(shared.version) or "",
    )
