"""Jobs of a syncer for its threads."""

from dataclasses import dataclass
from typing import TypeAlias

from torchtitan_diloco.islands_store.decision import Fragment
from torchtitan_diloco.islands_store.names import COPY, OUTER, VERSION, Object
from torchtitan_diloco.islands_store.note import Founding, Part
from torchtitan_diloco.islands_store.rounds import Waiting


@dataclass(frozen=True)
class Commit:
    """Make a decision take effect (`commit`), then call `on_committed`."""

    number: int
    content: bytes


@dataclass(frozen=True)
class Adopt:
    """Fetch and check the copies of a founder: `on_adopted`."""

    incarnation: str
    founding: Founding


@dataclass(frozen=True)
class Load:
    """Load a fragment, after a takeover: `on_loaded`. P is the copy and the versions after it.

    If an object is missing, start again from an older decision.
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
class Merge:
    """Average parts in this order, step the outer optimizer, encode the update: `on_merged`.

    The learning rate is scaled by the weight of the parts over `weight_of_all`. If the result is
    not finite, the momentum stays as it was.
    """

    fragment: int
    version: int
    parts: tuple[Waiting, ...]
    weight_of_all: int


@dataclass(frozen=True)
class Snapshot:
    """Keep copy and outer state of this version until they are uploaded: `on_snapshot`. Jobs of a
    fragment run in order, so the next merge follows it."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Upload:
    """Upload a merged or kept object: `on_uploaded`. An existing object of this name is its own."""

    stored: Object


@dataclass(frozen=True)
class Delete:
    names: tuple[str, ...]


Job: TypeAlias = Commit | Adopt | Load | Fetch | Merge | Snapshot | Upload | Delete


def load(shared: Fragment, number: int) -> Load:
    """Return the job that loads a fragment from the objects that a decision names."""
    copy, outer = shared.copies[-1], shared.outer
    later = (one for one in shared.kept if one.version > copy.version)
    return Load(
        fragment=number,
        copy=Object(COPY, copy.number, number, copy.version),
        versions=tuple(Object(VERSION, one.number, number, one.version) for one in later),
        outer=Object(OUTER, outer.number, number, outer.version) if outer else None,
        checksum=shared.checksum(shared.version) or "",
    )
