"""Connection of an island to the NATS server: the log, chunks, and messages between islands.

The log and messages have a thread with a session. Chunks have streams of their own (bulk.py), so
they do not delay records.
"""

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec

from torchtitan_diloco.islands.bulk import Bulk, ClosedError, Streams
from torchtitan_diloco.islands.config import Join, LoginError, RefusedError
from torchtitan_diloco.islands.inbox import AnyMessage, Inbox
from torchtitan_diloco.islands.members import Hint
from torchtitan_diloco.islands.probe import streams_to_server
from torchtitan_diloco.islands.records import AnotherLogError, Chunk
from torchtitan_diloco.islands.session import (
    STATE_INDEX,
    EventLoop,
    GapError,
    LogSession,
    Session,
    TrimmedError,
    ask_subject,
    check_installed,
    stream_of,
    subject_of,
)
from torchtitan_diloco.log import UserError, logger

T = TypeVar("T")
RECORD_BYTES = 1_000_000
"""By default, a server accepts messages of at most 1 MiB."""
FIRST_CONNECTION_SECONDS, SERVER_IS_BACK_SECONDS = 10.0, 600.0
"""Time to connect for a new island, and for one that was in the run: a server may reboot."""
LOG_PATIENCE = 3.0
"""Seconds without an answer to a ping until a session is lost."""
PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between attempts."""
EXPIRY = 5.0
"""Seconds without a heartbeat until an island counts as gone."""
FINAL = AnotherLogError, TrimmedError, GapError, LoginError
"""Errors that another connection would meet, too."""


class Connection(Inbox):
    """Connection that is restored whenever it is lost. Its `Inbox` holds what was received.

    Any thread may call the public methods. They submit coroutines to the connection's thread, which
    alone uses the sessions and all other attributes. `_closed` is written under `_lock`, so that
    nothing is submitted after the end.
    """

    def __init__(
        self, join: Join, name: str, slot_seconds: float = 0.0, *, streams: int = 1
    ) -> None:
        """`name`: the incarnation. `slot_seconds`: see `islands`; `streams`: see `diloco.link`."""
        super().__init__(EXPIRY, slot_seconds)
        self._join, self._name, self.site = join, name, join.user
        self._subject, self._stream = partial(subject_of, join.run), partial(stream_of, join.run)
        self._connected = Future[None]()
        self._background = set[asyncio.Task[None]]()
        self._log: LogSession | None = None
        self._is_there, self._follows = asyncio.Event(), asyncio.Event()
        self._loop = EventLoop()
        self._loop.set_exception_handler(_note_failure)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self.streams, self._count = Streams(join, f"{name} chunks", 0), streams
        """They begin with the first connection."""
        self._closed, self._lock = False, threading.Lock()

    def connect(self, *, known: bool = False) -> None:
        """Connect.

        Raises a UserError if this fails for some seconds, or minutes if the server is `known`.
        """
        check_installed()
        self._thread.start()
        self._submit(self._keep_connected(known))
        try:
            self._connected.result()
        except BaseException:
            self.close()
            raise
        self.streams.grow(self._count or streams_to_server(self._join))

    def follow(self, after: int, newest: str = "") -> None:
        """Receive the records after record `after`, now and after each loss of the connection.

        `newest`: the `digest` of this record if it is known. Raises AnotherLogError if it is
        another one, and TrimmedError if records after it are no longer kept.
        """
        self._wait_for(self._begin_to_follow(after, newest))

    def close(self) -> None:
        """Send what was appended before, and disconnect. Calls that wait raise ClosedError."""
        with self._lock:
            if self._closed or not self._thread.is_alive():
                return
            self._closed = True
        self.streams.close()
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
        self._send(self._subject("log"), raw, wake=True)

    def beat(self, hint: Hint) -> None:
        self._send(self._subject("beat"), msgspec.msgpack.encode(hint))
        with suppress(ClosedError):
            self._submit(self._measure())

    def ask(self, incarnation: str, message: AnyMessage) -> None:
        """Send a message to one island."""
        self._send(ask_subject(self._join.run, incarnation), msgspec.msgpack.encode(message))

    def store(self, payload: bytes | memoryview, bulk: Bulk) -> tuple[Chunk, ...]:
        return self.streams.store(payload, bulk)

    def fetch(self, chunks: Sequence[Chunk], bulk: Bulk) -> bytearray:
        return self.streams.fetch(chunks, bulk)

    def store_state(self, state: bytes) -> Chunk:
        """Store a state, and return the chunk that lists its chunks."""
        index = msgspec.json.encode(self.store(state, "states"))
        [chunk] = self.streams.store(index, "states", STATE_INDEX)
        return chunk

    def fetch_state(self, index: Chunk) -> bytes:
        """Return a stored state. Raises errors of `fetch`, or a DecodeError."""
        chunks = msgspec.json.decode(self.fetch([index], "states"), type=list[Chunk])
        return bytes(self.fetch(chunks, "states"))

    def first_part(self) -> int:
        """Return the sequence number of the first chunk that the stream of parts keeps."""
        stream = self._stream("parts")
        found = self._retry(lambda session: session.jetstream.stream_info(stream))
        return self._wait_for(found).state.first_seq

    def newest_state(self) -> bytes | None:
        """Return the state that was stored last, or None if there is none."""
        run = self._join.run
        return self._wait_for(self._retry(lambda session: session.newest_state(run)))

    def _submit(self, operation: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if self._closed:
                operation.close()
                raise ClosedError("the connection is closed")
            return asyncio.run_coroutine_threadsafe(operation, self._loop)

    def _wait_for(self, operation: Coroutine[Any, Any, T]) -> T:
        try:
            return self._submit(operation).result()
        except CancelledError as error:
            raise ClosedError("the connection was closed") from error

    def _send(self, subject: str, raw: bytes, *, wake: bool = False) -> None:
        """Publish if there is a connection. `wake`: read the log soon."""

        async def publish() -> None:
            if self._log is not None:
                with suppress(Exception):  # the connection fails, and with it everything sent
                    await self._log.client.publish(subject, raw)
                    if wake:
                        self._log.note_append()

        with suppress(ClosedError):
            self._submit(publish())

    # --- in the thread: connect -------------------------------------------------------------------

    async def _keep_connected(self, known: bool) -> None:
        """Connect again whenever the connection is lost."""
        patience = SERVER_IS_BACK_SECONDS if known else FIRST_CONNECTION_SECONDS
        give_up, pause, reason = self._loop.time() + patience, PAUSE, ""
        addresses = random.sample(self._join.addresses, len(self._join.addresses))
        for address in itertools.cycle(addresses):
            if self._closed:  # nats-py ignores some cancellations
                return
            failure: Exception
            try:
                failure = await self._stay_connected(address)
                pause, reason = PAUSE, ""
            except Exception as error:  # a damaged server makes the client raise anything
                failure = error
            first = not self._connected.done()
            if first and (isinstance(failure, RefusedError) or self._loop.time() > give_up):
                self._connected.set_exception(_first_error(failure, patience))
                return
            if isinstance(failure, FINAL):
                self.note_failure(failure)
                self.streams.fail(failure)
                self._is_there.set()  # nobody waits for it any more
                return
            if str(failure) != reason and (known or not first):
                reason = str(failure)
                if first:
                    logger.warning(f"waiting for the server of the islands: {reason}")
                else:
                    self.note_loss(reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _stay_connected(self, address: str) -> Exception:
        """Connect, and return why the connection was lost. Raises any error if there was none."""
        log = LogSession(LOG_PATIENCE, self, self._join.run)
        reading = asyncio.create_task(self._follow(log))
        try:
            await log.open(self._join, address, self._name)
            first, last = await log.run(log.subscribe(self._name))
            if self._follows.is_set():  # before anything is sent
                await log.run(log.compare_log(self._join.run, self.received, self.newest))
            self._log = log
            self.note_connection(first, last)
            self._is_there.set()
            if not self._connected.done():
                self._connected.set_result(None)
            ends: list[asyncio.Future[Any]] = [reading, log.lost]
            (ended, *_), _ = await asyncio.wait(ends, return_when="FIRST_COMPLETED")
            failure: Exception = ended.result()
            return failure
        finally:
            self._is_there.clear()
            self._log = None
            reading.cancel()
            log.fail(ConnectionError("closed"))
            self._in_background(log.close())

    async def _measure(self) -> None:
        """Measure the round trip to the server."""
        with suppress(Exception):  # there is no connection
            assert self._log is not None
            self.round_trip = await self._log.client.rtt()

    async def _follow(self, log: LogSession) -> NoReturn:
        await self._is_there.wait()
        await self._follows.wait()
        await log.read_log()

    async def _begin_to_follow(self, after: int, newest: str) -> None:
        if after + 1 < self.first:
            raise TrimmedError(after + 1, self.first)
        await self._retry(lambda session: session.compare_log(self._join.run, after, newest))
        self.received, self.newest = after, newest
        self._follows.set()

    def _in_background(self, operation: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(operation)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end(self) -> None:
        if not self._connected.done():
            self._connected.set_exception(ClosedError("the connection was closed"))
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

    async def _retry(self, operation: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Repeat an operation until the server answers."""
        from nats import errors

        pause = PAUSE
        while not self._closed:
            await self._is_there.wait()
            if self.failure is not None:
                raise self.failure
            if (session := self._log) is not None:
                with suppress(OSError, TimeoutError, errors.Error):
                    return await session.run(operation(session))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise ClosedError("the connection was closed")


def _note_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log failures of nats-py's tasks on a lost connection at debug level only."""
    error = context.get("exception")
    lost = isinstance(error, OSError) or type(error).__module__.startswith("nats.")
    level = logging.DEBUG if lost else logging.ERROR
    logger.log(level, "%s: %s", context["message"], error, exc_info=error)


def _first_error(failure: Exception, patience: float) -> Exception:
    if isinstance(failure, ValueError):
        return failure
    return UserError(
        f"islands.join: no connection within {patience:g} s ({failure}): check "
        "that the server runs, and that its address and port can be reached from here"
    )
