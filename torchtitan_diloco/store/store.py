"""The verbs of a store, over a backend: names, checksums, retries."""

import copy
import re
import secrets
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from torchtitan_diloco.store.attempts import Attempts
from torchtitan_diloco.store.errors import DamagedObjectError, RefusedError, StoreError
from torchtitan_diloco.store.names import check_name, check_prefix, is_name

_MARK = b"tds1"
_CHECKSUM_BYTES = 4
SEAL_BYTES = _CHECKSUM_BYTES + len(_MARK)
"""Bytes of the checksum and the mark with which a stored content ends."""
MOST_BYTES = 2**22
"""Largest content of an object, which bounds the memory of a reader."""
MOST_RAW_BYTES = MOST_BYTES + SEAL_BYTES
"""Largest sealed content that a backend stores and reads."""
SMALL_BYTES = 2**17
"""Largest content that is written within seconds over any link that a run can use."""
PATIENCE_SECONDS = 60.0
RACES = 12
"""Races at once in the test of a store, each of two writers of a name. With more writers, SeaweedFS
lets some of them wait for a lock for seconds, as it looks again after 1, 1.5, 2.25, ... seconds."""

TEST = "test-"
"""Beginning of the names in the test of a store."""
TEST_BYTES = 8
"""Random bytes that follow it, in hexadecimal digits."""
LEFT_SECONDS = 3600.0
"""Seconds after which an object of such a test is left over."""


class Kind(StrEnum):
    """Kind of a store, which decides how often readers look for something new."""

    FOLDER = "folder"
    """A call takes a millisecond and costs nothing."""
    NEAR = "near"
    """A server of one's own: a call costs nothing."""
    CLOUD = "cloud"
    """A bucket of a provider: each call costs money, and of one name one write a second is safe."""


Buffer: TypeAlias = bytes | bytearray | memoryview


class Sealed(NamedTuple):
    """A content and its seal, which are stored one after the other."""

    content: Buffer
    seal: Buffer
    """Checksum of the content, and a mark."""

    @classmethod
    def split(cls, raw: bytes) -> "Sealed":
        """Split the bytes of a stored object."""
        end = max(0, len(raw) - SEAL_BYTES)
        return cls(raw[:end], raw[end:])

    @property
    def whole(self) -> bytes:
        return b"".join(self)


class Raw(NamedTuple):
    """What a backend has stored."""

    sealed: Sealed
    modified: float
    """Time at which it was written, in seconds since 1970, on the clock of the store."""


def too_large(location: str, name: str, size: int, most: int) -> DamagedObjectError:
    return DamagedObjectError(
        f"{location}: {name} has {size} bytes, and at most {most} are expected; delete it"
    )


class Listed(NamedTuple):
    name: str
    size: int
    modified: float
    tag: str


class Found(NamedTuple):
    content: bytes
    age: float
    """Seconds since it was written, according to the store. A newer copy may exist: a shared file
    system may show a reader an older content for some seconds."""


class ListedObject(NamedTuple):
    name: str
    size: int
    """Bytes of the content."""
    age: float
    tag: str
    """Changes with the content, even if times have whole seconds. A folder tells apart contents
    that were written ten milliseconds after each other."""


class Backend(ABC):
    """Backend that stores sealed contents. Each method is one attempt; any thread may call it.

    `large`: the content may have some MB, and takes up to a minute. Other attempts fail after two
    seconds without an answer, because another one may be faster. `durable`: whether the content
    must survive a power cut once the method returns. A temporary failure raises PassingError, and
    any other StoreError.
    """

    location: str
    """Location to show to users, without a password."""
    kind: Kind
    own_prefix: str = ""
    """Prefix below which this login may write, if it has one only."""
    is_new: bool = False
    """Whether nothing was stored here before, as far as is known."""
    has_other_files: bool = False
    """Whether there are files that are no objects, although nothing was stored here before."""

    @abstractmethod
    def create(self, name: str, content: Sealed, *, large: bool, durable: bool) -> bool:
        """Return whether the object holds this content now."""

    @abstractmethod
    def replace(self, name: str, content: Sealed, *, large: bool, durable: bool) -> None: ...

    @abstractmethod
    def get(
        self,
        name: str,
        *,
        large: bool,
        most: int = MOST_RAW_BYTES,
        into: memoryview | None = None,
    ) -> Raw | None:
        """Return an object, or None if there is none. One above `most` bytes is not read:
        DamagedObjectError.

        `into`: where to write a content of exactly this size. One of another size is returned in
        memory of its own.
        """

    @abstractmethod
    def list(self, prefix: str, after: str, most: int | None) -> list[Listed]:
        """Return the objects, or any `most` of them, sorted by name."""

    @abstractmethod
    def delete(self, name: str) -> None: ...

    def tidy(self, now: float) -> None:  # noqa: B027
        """Delete leftovers of killed writers, which have no names, and leave those that cannot be
        deleted, whatever the reason. `now`: on the store's clock."""

    def close(self) -> None:  # noqa: B027
        """Free all resources. Other threads may still be in a method, which then fails."""


class Store:
    """A store. See the docstring of the package for the guarantees of the verbs."""

    def __init__(
        self, backend: Backend, patience: float = PATIENCE_SECONDS, *, quiet: bool = False
    ) -> None:
        self.backend = backend
        self.location = backend.location
        self.kind = backend.kind
        self._attempts = Attempts(backend.location, patience, quiet=quiet)
        self.ahead = 0.0
        """Seconds by which the store's clock is ahead of this machine's, as last tested."""

    def with_patience(self, seconds: float) -> "Store":
        """Return this store with another patience, for a thread that must not wait as long.

        Both share the connections, and one `close` closes both.
        """
        other = copy.copy(self)
        other._attempts = self._attempts.with_patience(seconds)
        return other

    def create(
        self, name: str, content: Buffer, known: bytes = b"", *, durable: bool = True
    ) -> bool:
        """Store an object that does not exist, and return whether it holds this content now.

        `known`: the `checksum` of the content, if it was computed before. `durable`: see `replace`.
        """
        sealed = self._sealed(name, content, known)
        large = len(content) > SMALL_BYTES
        return self._attempts.run(
            "create",
            name,
            lambda: self.backend.create(name, sealed, large=large, durable=durable),
            large=large,
        )

    def replace(self, name: str, content: Buffer, *, durable: bool = True) -> None:
        """Store an object, whether or not it exists.

        `durable`: whether it must survive a power cut once this returns. A note that is replaced
        every second need not: a folder then does without two flushes of the disk.
        """
        sealed = self._sealed(name, content)
        large = len(content) > SMALL_BYTES
        self._attempts.run(
            "replace",
            name,
            lambda: self.backend.replace(name, sealed, large=large, durable=durable),
            large=large,
        )

    def get(self, name: str, *, large: bool = False, most: int = MOST_BYTES) -> Found | None:
        """Return the content of an object, or None if there is none.

        `large`: whether it may have some MB, for which a silence of seconds is no failure. `most`:
        maximum size that the reader accepts; a larger content is not read: DamagedObjectError.
        """
        check_name(name)
        most += SEAL_BYTES
        raw = self._attempts.run(
            "get", name, lambda: self.backend.get(name, large=large, most=most), large=large
        )
        if raw is None:
            return None
        unseal(f"{self.location}: {name}", raw.sealed)
        return Found(bytes(raw.sealed.content), age=self._age(raw.modified))

    def get_into(self, name: str, room: memoryview) -> bytes | None:
        """Write a content to memory of exactly its size, which may be some MB, and return its
        checksum, or None if there is none. After an error, anything may be in the memory."""
        check_name(name)
        raw = self._attempts.run(
            "get", name, lambda: self.backend.get(name, large=True, into=room), large=True
        )
        if raw is None:
            return None
        place = f"{self.location}: {name}"
        digest = unseal(place, raw.sealed)
        if len(raw.sealed.content) != len(room):
            raise DamagedObjectError(
                f"{place} has {len(raw.sealed.content)} bytes, not {len(room)}"
            )
        return digest

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[ListedObject]:
        """Return the sorted objects whose names start with `prefix` and follow `after`.

        Those with names that no store has, such as files that a person has put there, are left out.

        `most`: return any so many of them, so that a writer of a million does not delay a reader.
        """
        check_prefix(prefix)
        check_prefix(after)
        objects = self._attempts.run("list", prefix, lambda: self.backend.list(prefix, after, most))
        return [
            ListedObject(
                listed.name,
                size=max(0, listed.size - SEAL_BYTES),
                age=self._age(listed.modified),
                tag=listed.tag,
            )
            for listed in objects
            if is_name(listed.name)
        ]

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        check_name(name)
        self._attempts.run("delete", name, lambda: self.backend.delete(name))

    def tidy(self) -> None:
        """Delete leftovers of killed writers. Call this from time to time."""
        self.backend.tidy(self._now())

    def self_test(self, prefix: str) -> None:
        """Check that of two writers at once one creates an object, and read the store's clock.

        A store may refuse a second `create` and still accept two at the same time.

        `prefix`: where this login may write.
        """
        races = [_Race(f"{prefix}{TEST}{secrets.token_hex(TEST_BYTES)}") for _ in range(RACES)]
        with ThreadPoolExecutor(2 * RACES, thread_name_prefix="store-test") as pool:
            try:
                created = [
                    [pool.submit(race.write, self, content) for content in race.contents]
                    for race in races
                ]
                winners = [[write.result() for write in pair] for pair in created]
                self.ahead = max(pool.map(self._judge, races, winners))
            except StoreError:
                one_by_one = self.with_patience(0.0)
                with suppress(StoreError):  # the first error is the one to read
                    for race in races:
                        one_by_one.delete(race.name)
                raise
        name_of_race = re.compile(rf"{re.escape(prefix)}{TEST}[0-9a-f]{{{2 * TEST_BYTES}}}")
        for listed in self.list(f"{prefix}{TEST}"):
            if listed.age > LEFT_SECONDS and name_of_race.fullmatch(listed.name):
                self.delete(listed.name)  # of a process that was killed in its test
        self.tidy()

    def close(self) -> None:
        """Close the store. Calls of other threads raise ClosedError soon."""
        self._attempts.close()
        self.backend.close()

    def _judge(self, race: "_Race", created: Sequence[bool]) -> float:
        """Delete the object of a race. Return the seconds by which the store's clock is ahead of
        this machine's, or less if the race has taken long."""
        name = race.name
        raw = self._attempts.run("get", name, lambda: self.backend.get(name, large=False))
        now = time.time()
        self.delete(name)
        if raw is not None:
            unseal(f"{self.location}: {name}", raw.sealed)
        if (
            raw is None
            or sum(created) != 1
            or raw.sealed.content != race.contents[created.index(True)]
        ):
            raise RefusedError(
                f"{self.location}: a second writer could create an object that "
                "already exists, so two syncers could decide at the same time; use a "
                "store with conditional writes (If-None-Match)"
            )
        return raw.modified - now

    def _sealed(self, name: str, content: Buffer, known: bytes = b"") -> Sealed:
        check_name(name)
        if len(content) > MOST_BYTES:
            raise StoreError(
                f"{name}: its {len(content)} bytes are more than {MOST_BYTES}: split it into chunks"
            )
        return seal(content, known)

    def _age(self, modified: float) -> float:
        return max(0.0, self._now() - modified)

    def _now(self) -> float:
        """Return the time on the store's clock."""
        return time.time() + self.ahead


class _Race:
    """An object that two writers create at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contents = [secrets.token_bytes(8) for _ in range(2)]
        self._start = threading.Barrier(2)

    def write(self, store: Store, content: bytes) -> bool:
        self._start.wait()
        return store.create(self.name, content)


# --- the seal: checksum and mark at the end of a stored content -----------------------------------


def checksum(content: Buffer) -> bytes:
    """Return the CRC-32 of a content.

    It detects damage, and nobody else's intentions: who may write an object can seal anything. A
    cryptographic hash would take longer than everything else that is done with a content.
    """
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")


def seal(content: Buffer, known: bytes = b"") -> Sealed:
    """Return a content with its checksum, which may be known."""
    return Sealed(content, (known or checksum(content)) + _MARK)


def unseal(place: str, sealed: Sealed) -> bytes:
    """Check a content, and return its checksum. Raise a DamagedObjectError that names its place."""
    content = sealed.content
    seal_bytes = bytes(sealed.seal)
    if len(seal_bytes) < SEAL_BYTES or not seal_bytes.endswith(_MARK):
        size = len(content) + len(seal_bytes)
        raise DamagedObjectError(
            f"{place} is truncated: its {size} bytes do not end with a checksum"
        )
    digest = checksum(content)
    if seal_bytes[:_CHECKSUM_BYTES] != digest:
        raise DamagedObjectError(
            f"{place} was altered: the checksum of its {len(content)} bytes differs"
        )
    return digest
