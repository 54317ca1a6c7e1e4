"""Contents of any size: chunks of some MB, over several connections.

A content below `MOST_BYTES` is one object. For a larger one, the chunks `NAME.ROOT.00000` and so on
are stored first, and then the object NAME, which contains the number of bytes and chunks. ROOT is a
checksum of all chunks: two writers of the same name have separate chunks, and the object NAME
decides whose content it is. What an interrupted writer has left is below the name of its object:
who lists a folder of the store finds it there (`owner_of`). Only `create` looks for it, to go on
with an upload.
"""

import hashlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Annotated, TypeVar, overload

import msgspec

from torchtitan_diloco.base.untrusted import decode_json
from torchtitan_diloco.store.errors import AwayError, DamagedObjectError, StoreError
from torchtitan_diloco.store.store import MOST_BYTES, Buffer, ListedObject, Store, checksum

T = TypeVar("T")
Result = TypeVar("Result")
_WHOLE = b"\0"
"""First byte of an object whose content follows."""
_CUT = b"\1"
"""First byte of an object that contains the description of its chunks."""
CHUNK_BYTES = MOST_BYTES
MOST_CHUNKS = 100_000
"""Maximum number of chunks, whose names a reader keeps in memory and which have five digits."""
QUICK_SECONDS = 10.0
"""Seconds for a chunk up to which the link has room for more at a time. An attempt has a minute."""
MOST_KNOWN = 10_000
"""Maximum number of objects whose chunks a process knows without reading."""
_CHUNK = re.compile(r"\.[0-9a-f]{16}\.[0-9]{5}$")


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the object of a content in chunks."""

    size: int
    chunk_bytes: int
    root: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]

    def names(self, name: str) -> list[str]:
        return chunk_names(name, self.root, -(-self.size // self.chunk_bytes))


_NO_CHUNKS = _Head(size=0, chunk_bytes=1, root="")
"""What is known of an object that is its own content."""


class LargeObjects:
    """Reads and writes contents of any size. Any thread may call this; all share the connections.

    A thread that waits for its turn does not delay the small objects of the same store.
    """

    def __init__(self, store: Store, streams: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Open `streams` connections: the number of chunks in flight at a time."""
        assert 0 < chunk_bytes <= CHUNK_BYTES
        self._store = store
        self._chunk_bytes = chunk_bytes
        self.stored_at = -math.inf
        """Time of `time.monotonic` at which a chunk was last stored."""
        self.in_flight_bytes = streams * chunk_bytes
        """Maximum number of bytes of chunks that are stored at a time."""
        self._known = _Known()
        self._up = _Turns(streams)
        self._down = _Turns(streams)
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="store")

    def create(
        self, name: str, content: Buffer, *, resume: bool = False, durable: bool = True
    ) -> bool:
        """Store an object that does not exist, and return whether it holds this content now.

        After an attempt of this process has failed, the chunks that it has stored are listed, and
        only the others are sent. `resume`: also after one of an earlier process. `durable`: whether
        it must survive a power cut once this returns.
        """
        view = memoryview(content).cast("B")
        if len(view) < self._chunk_bytes:
            self._known.note(name, _NO_CHUNKS)
            return self._create_head(name, b"".join((_WHOLE, view)), durable=durable)
        if len(view) > MOST_CHUNKS * self._chunk_bytes:
            raise StoreError(f"{name}: its {len(view)} bytes do not fit into {MOST_CHUNKS} chunks")
        pieces = [
            view[at : at + self._chunk_bytes] for at in range(0, len(view), self._chunk_bytes)
        ]
        checksums = self._map(checksum, pieces)
        root = _root_of(checksums)
        head = _Head(size=len(view), chunk_bytes=self._chunk_bytes, root=root)
        names = head.names(name)
        stored = dict[str, int]()
        if resume or self._known.find(name) is not None:
            stored = {chunk.name: chunk.size for chunk in self._chunks(name, root)}
        self._known.note(name, head)

        def store_chunk(number: int) -> None:
            piece = pieces[number]
            if not self._store.create(names[number], piece, checksums[number], durable=durable):
                raise DamagedObjectError(
                    f"{self._store.location}: the bytes of {names[number]} do not "
                    "match the hash in its name; delete it"
                )
            self.stored_at = time.monotonic()

        missing = [n for n, piece in enumerate(pieces) if stored.get(names[n]) != len(piece)]
        self._map(store_chunk, missing, self._up)
        if self._create_head(name, _CUT + msgspec.json.encode(head), durable=durable):
            return True
        self._map(self._store.delete, names)  # nobody reads them
        return False

    def _create_head(self, name: str, content: bytes, *, durable: bool) -> bool:
        """Create the object itself, or forget what is known of it if another writer was faster."""
        is_created = self._store.create(name, content, durable=durable)
        if not is_created:
            self._known.forget(name)
        return is_created

    @overload
    def get(self, name: str, most: int) -> bytearray | None: ...

    @overload
    def get(self, name: str, *, into: memoryview) -> memoryview | None: ...

    def get(
        self, name: str, most: int = 0, *, into: memoryview | None = None
    ) -> bytearray | memoryview | None:
        """Return a content, or None if there is none.

        `most`: maximum size that the reader accepts, whatever the writer declares. `into`: bytes in
        place of new memory, which must have room for the content; the part with the content is
        returned. After an error, the memory must not be used for anything else, because a chunk
        that is under way may still be written to it. Raises DamagedObjectError if the content is
        larger, or a part of it is missing, truncated or altered.
        """
        most = len(into) if into is not None else most
        head = self._head(name)
        if head is None:
            return None
        size = head.size if isinstance(head, _Head) else len(head)
        if size > most:
            raise DamagedObjectError(
                f"{self._store.location}: {name} declares {size} bytes, "
                f"but at most {most} are expected"
            )
        if isinstance(head, _Head):
            content = bytearray(size) if into is None else into[:size]
            return content if self._fetch(name, head, memoryview(content)) else None
        if into is None:
            return bytearray(head)
        into[:size] = head
        return into[:size]

    def _fetch(self, name: str, head: _Head, content: memoryview) -> bool:
        """Fetch the chunks of a content, or return False if it is deleted meanwhile."""
        names = head.names(name)

        def fetch_chunk(number: int) -> bytes:
            room = content[number * head.chunk_bytes :][: head.chunk_bytes]
            digest = self._store.get_into(names[number], room)
            if digest is None:
                place = f"{self._store.location}: chunk {number + 1} of {len(names)} of {name}"
                raise _MissingError(f"{place} is missing")
            return digest

        try:
            checksums = self._map(fetch_chunk, range(len(names)), self._down)
        except _MissingError:
            if self._store.get(name) is None:
                return False
            raise
        if _root_of(checksums) != head.root:
            raise DamagedObjectError(
                f"{self._store.location}: the chunks of {name} have different content"
            )
        return True

    def delete(self, name: str, listed: Sequence[str] | None = None) -> None:
        """Delete an object, and then the chunks that this process has begun to store, or otherwise
        those that the object names. Those of an interrupted writer stay, and so do those of another
        process that has stored another content under a name that this one has stored before.

        `listed`: names of all chunks below its name, as a list has found them, to delete instead.
        """
        if listed is None:
            head = self._known.find(name) or self._head_to_delete(name)
            self._known.note(name, head)  # for the next attempt, if this one fails
            listed = head.names(name)
        self._store.delete(name)
        self._map(self._store.delete, listed)
        self._known.forget(name)

    def close(self) -> None:
        """Drop the chunks that wait for a connection. Chunks in flight end with the store."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "LargeObjects":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _head(self, name: str) -> _Head | memoryview | None:
        """Return the description of the chunks, or the content itself."""
        stored = self._store.get(name, large=True)
        if stored is None:
            return None
        if stored.content.startswith(_WHOLE):
            return memoryview(stored.content)[1:]
        try:
            head = decode_json(stored.content[1:], _Head)
            if not (
                0 < head.chunk_bytes <= min(head.size, CHUNK_BYTES)
                and head.size <= MOST_CHUNKS * head.chunk_bytes
            ):
                raise ValueError("impossible sizes")
        except ValueError as error:
            raise DamagedObjectError(
                f"{self._store.location}: {name} is not a large object ({error})"
            ) from error
        return head

    def _head_to_delete(self, name: str) -> _Head:
        """Return the description of the chunks of an object, without chunks if it has none, cannot
        be read, or is none of this class."""
        with suppress(DamagedObjectError):
            head = self._head(name)
            if isinstance(head, _Head):
                return head
        return _NO_CHUNKS

    def _chunks(self, name: str, root: str) -> list[ListedObject]:
        """Return the chunks of a content that are stored."""
        entries = self._store.list(f"{name}.{root}")
        return [entry for entry in entries if _CHUNK.fullmatch(entry.name[len(name) :])]

    def _map(
        self,
        function: Callable[[T], Result],
        values: Iterable[T],
        turns: "_Turns | None" = None,
    ) -> list[Result]:
        """Call a function for each value, `streams` at a time. Raise the first error at once.

        `turns`: of the direction in which each call transfers a chunk.
        """
        futures = list[Future[Result]]()
        failed = threading.Event()

        def note_end(future: Future[Result]) -> None:
            if future.cancelled() or future.exception() is not None:
                failed.set()
            if turns is not None:
                turns.give_back()

        try:
            for value in values:
                if turns is not None:
                    turns.take()
                call = function if turns is None else partial(turns.timed, function)
                futures.append(self._pool.submit(call, value))
                futures[-1].add_done_callback(note_end)
                if failed.is_set():
                    break
            done = wait(futures, return_when=FIRST_EXCEPTION).done
        finally:
            for future in futures:
                future.cancel()  # those that have begun go on
        for future in done:
            future.result()
        return [future.result() for future in futures]


class _Turns:
    """Turns of the chunks in one direction. All that are in flight share the link.

    If the store did not answer in time, half as many are in flight at a time, and more again once
    each takes a short time.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._taken = 0
        self._halved_at = -math.inf
        self._changed = threading.Condition()

    def take(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self.limit)
            self._taken += 1

    def give_back(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify()

    def timed(self, call: Callable[[T], Result], value: T) -> Result:
        """Call a function, which transfers a chunk, and learn from the time that it takes."""
        began = time.monotonic()
        try:
            result = call(value)
        except AwayError:
            with self._changed:
                if began > self._halved_at:  # those that were in flight together fail together
                    self._halved_at = time.monotonic()
                    self.limit = max(1, self.limit // 2)
            raise
        if time.monotonic() - began < QUICK_SECONDS:
            with self._changed:
                self.limit = min(self._most, self.limit + 1)
        return result


class _Known:
    """Descriptions of the chunks that this process has begun to store or to delete, by the names of
    their objects. Any thread may call this."""

    def __init__(self) -> None:
        self._heads = dict[str, _Head]()
        self._lock = threading.Lock()

    def find(self, name: str) -> _Head | None:
        return self._heads.get(name)

    def note(self, name: str, head: _Head) -> None:
        """Note one, and forget the oldest if there are many. Objects that are stored name their
        chunks, too. For one whose upload is under way, another attempt sends all chunks again."""
        with self._lock:
            self._heads[name] = head
            if len(self._heads) > MOST_KNOWN:
                del self._heads[next(iter(self._heads))]

    def forget(self, name: str) -> None:
        with self._lock:
            self._heads.pop(name, None)


class _MissingError(DamagedObjectError):
    """A chunk is missing."""


def chunk_names(name: str, root: str, count: int) -> list[str]:
    return [f"{name}.{root}.{number:05d}" for number in range(count)]


def owner_of(name: str) -> str:
    """Return the name of the object to which a chunk belongs, or any other name unchanged."""
    return _CHUNK.sub("", name)


def _root_of(checksums: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(checksums)).hexdigest()[:16]
