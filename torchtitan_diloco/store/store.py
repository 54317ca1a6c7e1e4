"""The verbs of a store, over a backend: names, checksums, retries."""

import secrets
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import NamedTuple

from torchtitan_diloco.store.attempts import Attempts
from torchtitan_diloco.store.errors import RefusedError, StoreError
from torchtitan_diloco.store.names import check_name, check_prefix
from torchtitan_diloco.store.seal import SEAL_BYTES, checksum, seal, unseal

MOST_BYTES = 2**22
"""Largest content of an object, which bounds the memory of a reader."""
MOST_RAW_BYTES = MOST_BYTES + SEAL_BYTES
"""Largest sealed content that a backend stores and reads."""
PATIENCE_SECONDS = 60.0
SLOWEST = 16_000.0
"""Bytes per second below which the transfer of a content fails."""


class Raw(NamedTuple):
    """A sealed content."""

    content: bytes
    modified: float
    """Time at which it was written, in seconds since 1970, on the clock of the store."""


class Listed(NamedTuple):
    name: str
    size: int
    modified: float


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


class Backend(ABC):
    """Backend that stores sealed contents. Each method is one attempt; any thread may call it.

    `seconds`: how long an attempt waits for an answer. A temporary failure raises PassingError, and
    any other StoreError. A content above `MOST_RAW_BYTES` is not read: StoreError.
    """

    location: str
    """Location to show to users, without a password."""
    own_prefix: str = ""
    """Prefix below which this login may create and delete, but not replace."""

    @abstractmethod
    def create(self, name: str, content: bytes, seconds: float) -> bool:
        """Return whether the object holds this content now."""

    @abstractmethod
    def replace(self, name: str, content: bytes, seconds: float) -> None: ...

    @abstractmethod
    def get(self, name: str, seconds: float) -> Raw | None: ...

    @abstractmethod
    def list(self, prefix: str, after: str, seconds: float) -> list[Listed]:
        """Return the objects, sorted by name."""

    @abstractmethod
    def delete(self, name: str, seconds: float) -> None: ...

    def wait(self, prefix: str, mark: str, seconds: float) -> str:  # noqa: ARG002
        """Wait until something may have changed since `mark`, and return a new mark.

        Without knowledge of changes, sleep.
        """
        if mark:
            time.sleep(seconds)
        return "slept"

    def tidy(self) -> None:  # noqa: B027
        """Delete leftovers of killed writers, which have no names."""

    def close(self) -> None:  # noqa: B027
        """Free all resources. Other threads may still be in a method, which then fails."""


class Store:
    """A store. See the docstring of the package for the guarantees of the verbs."""

    def __init__(
        self, backend: Backend, patience: float = PATIENCE_SECONDS, *, quiet: bool = False
    ) -> None:
        self.backend = backend
        self.location = backend.location
        self._attempts = Attempts(backend.location, patience, quiet=quiet)
        self._ahead = 0.0  # seconds by which the store's clock is ahead of this machine's

    def create(self, name: str, content: bytes | memoryview, known: bytes = b"") -> bool:
        """Store an object that does not exist, and return whether it holds this content now.

        `known`: the `checksum` of the content, if it was computed before.
        """
        raw = self._sealed(name, content, known)
        return self._attempts.run(
            "create", name, lambda seconds: self.backend.create(name, raw, seconds)
        )

    def replace(self, name: str, content: bytes | memoryview) -> None:
        """Store an object, whether or not it exists."""
        raw = self._sealed(name, content)
        self._attempts.run(
            "replace", name, lambda seconds: self.backend.replace(name, raw, seconds)
        )

    def get(self, name: str) -> Found | None:
        """Return the content of an object, or None if there is none."""
        check_name(name)
        raw = self._attempts.run("get", name, lambda seconds: self.backend.get(name, seconds))
        if raw is None:
            return None
        content, digest = unseal(f"{self.location}: {name}", raw.content)
        return Found(content, age=self._age(raw.modified), checksum=digest)

    def list(self, prefix: str, after: str = "") -> list[Entry]:
        """Return the sorted objects whose names start with `prefix` and follow `after`."""
        check_prefix(prefix)
        check_prefix(after)
        objects = self._attempts.run(
            "list", prefix, lambda seconds: self.backend.list(prefix, after, seconds)
        )
        return [
            Entry(
                listed.name,
                size=max(0, listed.size - SEAL_BYTES),
                age=self._age(listed.modified),
            )
            for listed in objects
        ]

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        check_name(name)
        self._attempts.run("delete", name, lambda seconds: self.backend.delete(name, seconds))

    def wait(self, prefix: str, mark: str, seconds: float) -> str:
        """Wait until an object below `prefix` may have changed since `mark`, or for a given time.

        Return a new mark, to read first and then to wait with. For the mark "", return at once, so
        that nothing is missed:

            mark = ""
            while True:
                mark = store.wait("run/", mark, 2.0)
                ...  # read what is there
        """
        check_prefix(prefix)
        return self._attempts.run(
            "wait for", prefix, lambda _: self.backend.wait(prefix, mark, seconds)
        )

    def tidy(self) -> None:
        """Delete leftovers of killed writers. Call this from time to time."""
        self.backend.tidy()

    def self_test(self, prefix: str) -> None:
        """Check that a second `create` is refused, and read the clock of the store.

        `prefix`: where this login may write.
        """
        name = f"{prefix}test-{secrets.token_hex(8)}"
        nonce = secrets.token_bytes(8)
        first = self.create(name, nonce)
        try:
            second = self.create(name, nonce + b"another")
            raw = self._attempts.run("get", name, lambda seconds: self.backend.get(name, seconds))
        finally:
            with suppress(StoreError):  # the first error is the one to read
                self.delete(name)
        if not first or second or raw is None or not raw.content.startswith(nonce):
            raise RefusedError(
                f"{self.location}: a second writer could create an object that "
                "already exists, so two syncers could decide at the same time; use a "
                "store with conditional writes (If-None-Match)"
            )
        self._ahead = raw.modified - time.time()
        self.tidy()

    def close(self) -> None:
        """Close the store. Calls of other threads raise ClosedError soon."""
        self._attempts.close()
        self.backend.close()

    def _sealed(self, name: str, content: bytes | memoryview, known: bytes = b"") -> bytes:
        check_name(name)
        if len(content) > MOST_BYTES:
            raise StoreError(
                f"{name}: its {len(content)} bytes are more than {MOST_BYTES}: split it into chunks"
            )
        return seal(content, known or checksum(content))

    def _age(self, modified: float) -> float:
        return max(0.0, time.time() + self._ahead - modified)
