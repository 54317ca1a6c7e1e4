"""What a process transfers: bytes, and requests to a store."""

from typing import NamedTuple


class Usage(NamedTuple):
    """Bytes and requests of a process, which may be averages."""

    sent: float = 0.0
    received: float = 0.0
    reads: float = 0.0
    """Requests to a store that read an object."""
    writes: float = 0.0
    """Requests that write an object or list some. Providers charge more for them than for reads,
    and nothing for deletions, which do not count."""

    def plus(self, other: "Usage") -> "Usage":
        pairs = zip(self, other, strict=True)
        return Usage(*(number + added for number, added in pairs))

    def times(self, factor: float) -> "Usage":
        return Usage(*(factor * value for value in self))
