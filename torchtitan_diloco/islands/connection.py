"""Connection of an island to the NATS server: the log, chunks, and messages between islands.

All network I/O runs in a thread with an event loop. The log and the chunks have separate sessions,
so that chunks do not delay records.
"""

import asyncio
import itertools
import logging
import math
import random
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from torchtitan_diloco.islands.config import Join, RefusedError
from torchtitan_diloco.islands.members import Hint
from torchtitan_diloco.islands.records import AnotherLogError, Chunk, digest
from torchtitan_diloco.islands.session import (
    AnyMessage,
    Inbox,
    LogSession,
    Session,
    ask_subject,
    check_installed,
    stream_of,
    subject_of,
)
from torchtitan_diloco.log import UserError, logger

if TYPE_CHECKING:
    from nats.js import JetStreamContext

T = TypeVar("T")
Bulk: TypeAlias = Literal["parts", "snapshots"]
CHUNK_BYTES = RECORD_BYTES = 1_000_000
"""By default, a server accepts messages of at most 1 MiB."""
UNDER_WAY: dict[Bulk, int] = {"parts": 8, "snapshots": 4}
"""Concurrent chunks. Parts have more, as they are more urgent."""
FIRST_CONNECTION_SECONDS, SERVER_IS_BACK_SECONDS = 10.0, 600.0
"""Time to connect for a new island, and for one that was in the run: a server may reboot."""
LOG_PATIENCE, BULK_PATIENCE = 3.0, 120.0
"""Seconds without an answer to a ping until a session is lost. In the session of the chunks, pings
queue behind chunks, and links may be slow. When one session is lost, both are replaced."""
UNCONFIRMED_SECONDS = 30.0
"""Seconds in which the other end of a socket must acknowledge some of the bytes sent. A slow link
does. A link that silently dropped the connection does not, nor does a server that stops reading,
such as one with a stalled disk."""
ANSWER_SECONDS = 10.0
"""Timeout to store or get a chunk. It doubles with each attempt, as links may be slow."""
GIVE_UP_SECONDS: dict[Bulk, float] = {"parts": math.inf, "snapshots": 120.0}
"""Time of failures, with a connection, after which a chunk is given up. Another island may have a
snapshot, but nobody else has the parts."""
NO_MESSAGE = 10037
"""Error code of the server: no message found."""
PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between attempts."""
EXPIRY = 5.0
"""Seconds without a heartbeat until an island counts as gone."""


class ClosedError(RuntimeError):
    """The connection was closed while something waited for it."""


class GoneError(ValueError):
    """A chunk is no longer in its stream."""


class GivenUpError(ValueError):
    """The server did not take or give a chunk of a snapshot for some time."""


class CorruptError(ValueError):
    """A chunk does not have the size or the hash in its record."""


class EventLoop(asyncio.SelectorEventLoop):
    """Event loop whose connections are closed by the kernel if the peer acknowledges nothing.

    Pings ensure that there is always something to acknowledge. Their answers alone would not
    distinguish a dead connection from one with megabytes in flight.
    """

    async def create_connection(self, *arguments: Any, **named: Any) -> Any:
        transport, protocol = await super().create_connection(*arguments, **named)
        limit = socket.TCP_USER_TIMEOUT, round(1000 * UNCONFIRMED_SECONDS)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, *limit)
        return transport, protocol


class Connection(Inbox):
    """Connection that is restored whenever it is lost. Its `Inbox` holds what was received.

    Any thread may call `append`, `beat`, `ask`, `store`, `fetch` and `close`. They submit
    coroutines to the connection's thread, which alone uses the sessions and all other attributes.
    `_closed` is written under `_lock`, so that nothing is submitted after the end.
    """

    def __init__(self, join: Join, name: str) -> None:
        """`name`: the incarnation."""
        super().__init__(EXPIRY)
        self._join, self._name = join, name
        self._subject, self._stream = partial(subject_of, join.run), partial(stream_of, join.run)
        self._first = Future[None]()
        self._background = set[asyncio.Task[None]]()
        self._log: LogSession | None = None
        self._bulk: Session | None = None
        self._is_there = asyncio.Event()
        self._free = {bulk: asyncio.Semaphore(count) for bulk, count in UNDER_WAY.items()}
        self._warned = ""
        self._loop = EventLoop()
        self._loop.set_exception_handler(_note_failure)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._writer = self._thread
        self._closed, self._lock = False, threading.Lock()

    def start(self, after: int, *, known: bool = False) -> None:
        """Connect, and follow the log after record `after`.

        Raises a ValueError if this fails for some seconds, or minutes if the server is `known`.
        """
        check_installed()
        self.received = after
        self._thread.start()
        self._submit(self._keep_connected(known))
        try:
            self._first.result()
        except BaseException as error:
            self.close()
            if isinstance(error, ValueError):
                raise UserError(str(error)) from None  # a mistake of the user: no traceback
            raise

    def close(self) -> None:
        """Send what was appended before, and disconnect. Calls that wait raise ClosedError."""
        with self._lock:
            if self._closed or not self._thread.is_alive():
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def append(self, raw: bytes) -> None:
        """Send a record to the log. It is in the log only once it is read back."""
        if len(raw) > RECORD_BYTES:
            raise UserError(
                f"a record of {len(raw)} bytes is larger than {RECORD_BYTES}, which a server "
                "takes: set more fragments, or fewer bits (diloco.fragments, diloco.quantization)"
            )
        self._send(self._subject("log"), raw)

    def beat(self, hint: Hint) -> None:
        self._send(self._subject("beat"), msgspec.msgpack.encode(hint))

    def ask(self, incarnation: str, message: AnyMessage) -> None:
        """Send a message to one island."""
        self._send(ask_subject(self._join.run, incarnation), msgspec.msgpack.encode(message))

    def store(self, payload: bytes | memoryview, bulk: Bulk) -> tuple[Chunk, ...]:
        """Store a payload in chunks and wait until all are acknowledged.

        Raises GivenUpError for a snapshot.
        """
        view = memoryview(payload).cast("B")
        pieces = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
        return tuple(self._run_all(self._store(piece, bulk) for piece in pieces))

    def fetch(self, chunks: Sequence[Chunk], bulk: Bulk) -> list[bytes]:
        """Return the chunks. Raises GoneError, CorruptError or, for a snapshot, GivenUpError."""
        return self._run_all(self._fetch(chunk, bulk) for chunk in chunks)

    def _submit(self, operation: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if self._closed:
                operation.close()
                raise ClosedError("the connection is closed")
            return asyncio.run_coroutine_threadsafe(operation, self._loop)

    def _run_all(self, operations: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        try:
            return self._submit(_gather(operations)).result()
        except CancelledError as error:
            raise ClosedError("the connection was closed") from error

    def _send(self, subject: str, raw: bytes) -> None:
        """Publish if there is a connection."""
        with suppress(ClosedError):
            self._submit(self._publish(subject, raw))

    # --- in the thread: the log -------------------------------------------------------------------

    async def _publish(self, subject: str, raw: bytes) -> None:
        if self._log is not None:
            with suppress(Exception):  # the connection fails, and with it everything sent
                await self._log.client.publish(subject, raw)

    async def _keep_connected(self, known: bool) -> None:
        """Connect again whenever the connection is lost."""
        patience = SERVER_IS_BACK_SECONDS if known else FIRST_CONNECTION_SECONDS
        give_up, pause, reason = self._loop.time() + patience, PAUSE, ""
        addresses = random.sample(self._join.addresses, len(self._join.addresses))
        for address in itertools.cycle(addresses):
            if self._closed:  # nats-py ignores some cancellations
                return
            log, bulk = LogSession(LOG_PATIENCE, self), Session(BULK_PATIENCE)
            try:
                await asyncio.gather(
                    log.open(self._join, address, self._name),
                    bulk.open(self._join, address, f"{self._name} bulk"),
                )
                await log.compare(self._join.run)  # before anything is sent
                self._log, self._bulk = log, bulk  # before _is_there is set
                await log.follow(self._join.run, self._name, self.received)
                self._is_there.set()
                if not self._first.done():
                    self._first.set_result(None)
                reason, pause = "", PAUSE
                lost, _ = await asyncio.wait([log.lost, bulk.lost], return_when="FIRST_COMPLETED")
                failure: Exception = ConnectionError(lost.pop().result())
            except Exception as error:  # a damaged server makes the client raise anything
                failure = error
            finally:
                self._is_there.clear()
                self._log = None
                for session in (log, bulk):
                    session.fail("closed")
                    self._in_background(session.close())
            first = not self._first.done()
            if isinstance(failure, AnotherLogError):
                self.note_failure(failure)
                self._is_there.set()  # nobody waits for it any more
                if first:
                    self._first.set_exception(failure)
                return
            if first and (isinstance(failure, RefusedError) or self._loop.time() > give_up):
                self._first.set_exception(_first_error(failure, patience))
                return
            if str(failure) != reason and (known or not first):
                reason = str(failure)
                if first:
                    logger.warning(f"waiting for the server of the islands: {reason}")
                else:
                    self.note_loss(reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    # --- in the thread: chunks --------------------------------------------------------------------

    async def _retry(
        self, bulk: Bulk, operation: Callable[["JetStreamContext"], Coroutine[Any, Any, T]]
    ) -> T:
        """Repeat an operation on chunks until the server answers."""
        from nats import errors

        pause, patience, failing_since = PAUSE, ANSWER_SECONDS, math.inf
        async with self._free[bulk]:
            while not self._closed:
                await self._is_there.wait()
                if self.failure is not None:
                    raise self.failure
                assert self._bulk is not None
                session = self._bulk
                try:
                    found = await session.run(operation(session.jetstream), patience)
                    self._warned = ""
                    return found
                except (OSError, TimeoutError, errors.Error) as error:
                    patience *= 2 if isinstance(error, TimeoutError) else 1
                    text = f"{bulk}: the server does not take or give a chunk: {error}"
                    now = self._loop.time()
                    failing_since = math.inf if session.is_lost else min(failing_since, now)
                    if now - failing_since > GIVE_UP_SECONDS[bulk]:
                        raise GivenUpError(text) from error
                    if not session.is_lost and text != self._warned:
                        self._warned = text
                        logger.warning(text)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        raise ClosedError("the connection was closed")

    async def _store(self, piece: memoryview, bulk: Bulk) -> Chunk:
        subject = self._subject(bulk)  # copy a piece only when it is sent: all wait in `_retry`
        stored = await self._retry(bulk, lambda stream: stream.publish(subject, bytes(piece)))
        return Chunk(stored.seq, len(piece), digest(piece))

    async def _fetch(self, chunk: Chunk, bulk: Bulk) -> bytes:
        if chunk.size > CHUNK_BYTES:
            raise CorruptError(f"chunk {chunk.sequence} of {bulk} claims {chunk.size} bytes")

        async def get(jetstream: "JetStreamContext") -> bytes | None:
            from nats.js.errors import NotFoundError

            # Any replica answers the first request, which is fast. Only the leader of the stream
            # knows that a message is gone.
            place = self._stream(bulk), chunk.sequence
            with suppress(NotFoundError):
                return (await jetstream.get_msg(*place, direct=True)).data
            try:
                return (await jetstream.get_msg(*place)).data
            except NotFoundError as error:
                if error.err_code != NO_MESSAGE:  # the server is starting or ending
                    raise
                return None

        found = await self._retry(bulk, get)
        if found is None:
            raise GoneError(f"chunk {chunk.sequence} of {bulk} is not kept any more")
        if len(found) != chunk.size or digest(found) != chunk.sha256:
            raise CorruptError(f"chunk {chunk.sequence} of {bulk} is not the one recorded")
        return found

    # --- in the thread: shutdown ------------------------------------------------------------------

    def _in_background(self, operation: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(operation)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end(self) -> None:
        if not self._first.done():
            self._first.set_exception(ClosedError("the connection was closed"))
        if self._log is not None:
            with suppress(Exception):
                await self._log.client.flush(timeout=1)
        for _ in range(4):  # nats-py ignores some cancellations, and closing takes a while
            for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=0.5)
            if self._background:
                await asyncio.wait(self._background, timeout=0.5)


async def _gather(operations: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently, and cancel the others after the first failure."""
    tasks = [asyncio.create_task(operation) for operation in operations]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _note_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log failures of nats-py's tasks on a lost connection at debug level only."""
    error = context.get("exception")
    lost = isinstance(error, OSError) or type(error).__module__.startswith("nats.")
    level = logging.DEBUG if lost else logging.ERROR
    logger.log(level, "%s: %s", context["message"], error, exc_info=error)


def _first_error(failure: Exception, patience: float) -> ValueError:
    if isinstance(failure, ValueError):
        return failure
    return UserError(
        f"islands.join: no connection within {patience:g} s ({failure}): check "
        "that the server runs, and that its address and port can be reached from here"
    )
