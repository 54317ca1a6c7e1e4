"""The verbs of a store, over a backend: names, checksums, retries."""

import copy
import hashlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from torchtitan_diloco.store.attempts import Attempts
from torchtitan_diloco.store.errors import DamagedError, RefusedError, StoreError
from torchtitan_diloco.store.names import check_name, check_prefix

_MARK = b"tds1"
_CHECKSUM_BYTES = 16
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


class Kind(StrEnum):
    """Kind of a store, which decides how often readers look for something new."""

    FOLDER = "folder"
    """A call takes a millisecond and costs nothing."""
    NEAR = "near"
    """A server of one's own: a call costs nothing."""
    CLOUD = "cloud"
    """A bucket of a provider: each call costs money, and of one name one write a second is safe."""


class Raw(NamedTuple):
    """A sealed content."""

    content: bytes
    modified: float
    """Time at which it was written, in seconds since 1970, on the clock of the store."""


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
    checksum: bytes


class Entry(NamedTuple):
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
    seconds without an answer, because another one may be faster. A temporary failure raises
    PassingError, and any other StoreError. A content above `MOST_RAW_BYTES` is not read:
    DamagedError.
    """

    location: str
    """Location to show to users, without a password."""
    kind: Kind
    own_prefix: str = ""
    """Prefix below which this login may write, if it has one only."""

    @abstractmethod
    def create(self, name: str, content: bytes, *, large: bool) -> bool:
        """Return whether the object holds this content now."""

    @abstractmethod
    def replace(self, name: str, content: bytes, *, large: bool, durable: bool) -> None:
        """`durable`: whether the content must survive a power cut once this returns."""

    @abstractmethod
    def get(self, name: str, *, large: bool) -> Raw | None: ...

    @abstractmethod
    def list(self, prefix: str, after: str, most: int | None) -> list[Listed]:
        """Return the objects, or any `most` of them, sorted by name."""

    @abstractmethod
    def delete(self, name: str) -> None: ...

    def tidy(self, now: float) -> None:  # noqa: B027
        """Delete leftovers of killed writers, which have no names. `now`: on the store's clock."""

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

    def create(self, name: str, content: bytes | memoryview, known: bytes = b"") -> bool:
        """Store an object that does not exist, and return whether it holds this content now.

        `known`: the `checksum` of the content, if it was computed before.
        """
        raw = self._sealed(name, content, known)
        large = len(content) > SMALL_BYTES
        return self._attempts.run(
            "create", name, lambda: self.backend.create(name, raw, large=large), large=large
        )

    def replace(self, name: str, content: bytes | memoryview, *, durable: bool = True) -> None:
        """Store an object, whether or not it exists.

        `durable`: whether it must survive a power cut once this returns. A note that is replaced
        every second need not: a folder then does without two flushes of the disk.
        """
        raw = self._sealed(name, content)
        large = len(content) > SMALL_BYTES
        self._attempts.run(
            "replace",
            name,
            lambda: self.backend.replace(name, raw, large=large, durable=durable),
            large=large,
        )

    def get(self, name: str, *, large: bool = False) -> Found | None:
        """Return the content of an object, or None if there is none.

        `large`: whether it may have some MB, for which a silence of seconds is no failure.
        """
        check_name(name)
        raw = self._attempts.run(
            "get", name, lambda: self.backend.get(name, large=large), large=large
        )
        if raw is None:
            return None
        content, digest = unseal(f"{self.location}: {name}", raw.content)
        return Found(content, age=self._age(raw.modified), checksum=digest)

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        """Return the sorted objects whose names start with `prefix` and follow `after`.

        `most`: return any so many of them, so that a writer of a million does not delay a reader.
        """
        check_prefix(prefix)
        check_prefix(after)
        objects = self._attempts.run("list", prefix, lambda: self.backend.list(prefix, after, most))
        return [
            Entry(
                listed.name,
                size=max(0, listed.size - SEAL_BYTES),
                age=self._age(listed.modified),
                tag=listed.tag,
            )
            for listed in objects
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
        races = [_Race(f"{prefix}test-{secrets.token_hex(8)}") for _ in range(RACES)]
        with ThreadPoolExecutor(2 * RACES, thread_name_prefix="store-test") as pool:
            try:
                created = [
                    [pool.submit(race.write, self, content) for content in race.contents]
                    for race in races
                ]
                winners = [[one.result() for one in pair] for pair in created]
                self.ahead = max(pool.map(self._judge, races, winners))
            except StoreError:
                one_by_one = self.with_patience(0.0)
                with suppress(StoreError):  # the first error is the one to read
                    for race in races:
                        one_by_one.delete(race.name)
                raise
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
        stored = unseal(f"{self.location}: {name}", raw.content)[0] if raw else b""
        if raw is None or sum(created) != 1 or stored != race.contents[created.index(True)]:
            raise RefusedError(
                f"{self.location}: a second writer could create an object that "
                "already exists, so two syncers could decide at the same time; use a "
                "store with conditional writes (If-None-Match)"
            )
        return raw.modified - now

    def _sealed(self, name: str, content: bytes | memoryview, known: bytes = b"") -> bytes:
        check_name(name)
        if len(content) > MOST_BYTES:
            raise StoreError(
                f"{name}: its {len(content)} bytes are more than {MOST_BYTES}: split it into chunks"
            )
        return seal(content, known or checksum(content))

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
