"""Checksum that is stored with a content: a sealed content ends with the checksum and a mark."""

import hashlib

from torchtitan_diloco.store.errors import DamagedError

_MARK = b"tds1"
_CHECKSUM_BYTES = 16
SEAL_BYTES = _CHECKSUM_BYTES + len(_MARK)


def checksum(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECKSUM_BYTES]


def seal(content: bytes | memoryview, digest: bytes) -> bytes:
    """Return a content with its checksum `digest` at the end."""
    return b"".join((content, digest, _MARK))


def unseal(place: str, raw: bytes) -> tuple[bytes, bytes]:
    """Return a content and its checksum. Raise a DamagedError that names its location."""
    if len(raw) < SEAL_BYTES or raw[-len(_MARK) :] != _MARK:
        raise DamagedError(f"{place} is truncated: its {len(raw)} bytes do not end with a checksum")
    content = raw[:-SEAL_BYTES]
    expected = raw[-SEAL_BYTES : -len(_MARK)]
    if checksum(content) != expected:
        raise DamagedError(f"{place} was altered: the checksum of its {len(content)} bytes differs")
    return content, expected
