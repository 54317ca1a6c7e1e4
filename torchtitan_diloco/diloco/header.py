"""The 64 bytes in front of every payload: who sends what, how much it weighs, and what the sender holds already."""

import struct
from dataclasses import dataclass, fields

HEADER_BYTES = 64
MAGIC = b"SDLC"
VERSION = 1
_LAYOUT = struct.Struct("<4sHHQIIQdQ")

NOT_FINITE = 1
"""Flag: the sender's delta has a NaN or an infinity; its weight is 0."""
DROPPED = 2
"""Flag: the sender is left out of this round on purpose; its weight is 0."""


@dataclass(frozen=True)
class Header:
    flags: int
    run: int
    """Identifies the run and its configuration: two runs on one coordinator do not mix."""
    fragment: int
    outer_round: int
    step: int
    """Inner step after which the delta was taken."""
    weight: float
    """Share of the sender in the mean, relative to the other weights."""
    checksum: int
    """Of the sender's shared copy of the fragment, which must be everybody's."""

    def pack(self) -> bytes:
        values = [getattr(self, field.name) for field in fields(self)]
        return _LAYOUT.pack(MAGIC, VERSION, *values).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(data: bytes) -> "Header":
        magic, version, *values = _LAYOUT.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError(
                f"a payload begins with {magic!r} version {version} instead of {MAGIC!r} version {VERSION}: some worker "
                "runs other code, or another program uses this process group"
            )
        return Header(*values)


def check_headers(headers: list[Header], mine: int) -> None:
    """Raises where a worker exchanges something else than this one does; the message names both sides."""
    own = headers[mine]
    for worker, other in enumerate(headers):
        if other.run != own.run:
            raise ValueError(
                f"worker {worker} belongs to another run or configuration ({other.run:016x}) than worker {mine} "
                f"({own.run:016x}): start all workers with the same settings and a process group of their own"
            )
        if (other.fragment, other.outer_round) != (own.fragment, own.outer_round):
            raise ValueError(
                f"worker {worker} sent fragment {other.fragment} of outer round {other.outer_round} (its step "
                f"{other.step}) while worker {mine} sent fragment {own.fragment} of outer round {own.outer_round} (its "
                f"step {own.step}): the workers' schedules differ"
            )
        if other.checksum != own.checksum:
            raise ValueError(
                f"fragment {own.fragment} differs between workers before outer round {own.outer_round}: its shared "
                f"parameters have checksum {other.checksum:016x} on worker {worker} and {own.checksum:016x} on worker "
                f"{mine}; restart from the last checkpoint, and look for faulty memory if it happens again"
            )
