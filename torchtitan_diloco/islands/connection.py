"""Connection of an island to the NATS server: the log, chunks, and messages between islands.

The log and messages share a thread with a connection. Chunks use separate streams (bulk.py), so
that they do not delay records.
"""

import itertools
import math
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.bulk import Bulk, ClosedError, Streams
from torchtitan_diloco.islands.config import Join, LoginError, RefusedError, explain
from torchtitan_diloco.islands.members import MOST_OF_SITE, Hint, Members
from torchtitan_diloco.islands.records import (
    AnotherLogError,
    AnyMessage,
    Chunk,
    Leave,
    Snapshot,
    SnapshotWanted,
    digest,
)
from torchtitan_diloco.islands.session import (
    NO_STREAM,
    STATE_INDEX,
    GapError,
    LogReader,
    RequestError,
    Session,
    TrimmedError,
    subject_of,
)

T = TypeVar("T")
RECORD_BYTES = 1_000_000  # by default, a server accepts messages of at most 1 MiB
FIRST_CONNECTION_SECONDS, SERVER_IS_BACK_SECONDS = 10.0, 600.0
"""Seconds to connect for a new island, and for one that was in the run: a server may reboot."""
LOG_PATIENCE, PING = 3.0, 0.5
"""Seconds without a byte from the server after which a connection is lost, and between pings."""
PAUSE, LONGEST_PAUSE = 0.1, 1.0  # seconds between attempts
TICK = 0.1  # longest wait in `receive`, in seconds
EXPIRY = 5.0  # seconds without a heartbeat until an island counts as gone
SUBJECTS = "log", "beat"
FINAL = AnotherLogError, TrimmedError, GapError, LoginError
"""Errors that a new connection would also meet."""


class LogRecord(NamedTuple):
    sequence: int
    raw: bytes
    at: float  # `time.monotonic()` when it arrived
    stored: str = ""
    """Time of the server at which it was stored, in ISO format. Empty: unknown."""


class Connection:
    """Connection that is restored whenever it is lost, and the data that it has received.

    Any thread may call the public methods. Only one at a time takes `records` and `messages` and
    calls `receive`: first the caller of `Leader.join`, then the leader's own thread. No lock is
    needed, as each attribute has one writer, which appends to it or replaces it as a whole. The
    connection's thread alone uses `Session`s that last.
    """

    def __init__(
        self, join: Join, name: str, slot_seconds: float = 0.0, *, streams: int = 1
    ) -> None:
        """`name`: the incarnation. `slot_seconds`: see `islands`; `streams`: see `diloco.link`."""
        self._join, self._name, self.site = join, name, join.user[:MOST_OF_SITE]
        self.members = Members(EXPIRY, slot_seconds)  # heartbeats of the other islands
        self.records = deque[LogRecord]()  # records not read yet
        self.messages = deque[SnapshotWanted | Snapshot]()  # messages to this island not read yet
        self.leaving = False  # this island was asked to leave the run
        self.received, self.newest = 0, ""
        """Sequence number and `digest` of the last record received."""
        self.first, self.last = 1, -1
        """Sequence numbers of the first and the last record in the log when the connection was
        opened. `last` is 0 if the log is empty, and -1 without a connection."""
        self.problem = ""  # why there is no connection
        self.failure: UserError | None = None  # why there will be none again
        self.round_trip: float | None = None  # seconds to the server and back, as measured last
        self.streams, self._count = Streams(join, f"{name} chunks"), streams
        self._log_subject, self._beat_subject = (subject_of(join.run, one) for one in SUBJECTS)
        self._known, self._connected = False, Future[None]()
        self._outgoing = deque[tuple[str, bytes]]()
        self._is_there = self._follows = self._closed = False
        self._away_since, self._news = math.inf, threading.Event()
        self._alarm, self._alarmed = socket.socketpair()
        """A byte in the first socket ends a wait of the thread for the other."""
        for one in (self._alarm, self._alarmed):
            one.setblocking(False)
        self._thread = threading.Thread(target=self._keep_connected, name=name, daemon=True)

    def connect(self, *, known: bool = False) -> None:
        """Connect.

        Raises a UserError if this fails for some seconds, or minutes if the server is `known`.
        """
        self._known = known
        self._thread.start()
        try:
            self._connected.result()
        except BaseException:
            self.close()
            raise
        self.streams.grow(1 if self._join.is_on_this_machine else self._count)

    def follow(self, after: int, newest: str = "") -> None:
        """Receive the records after record `after`, now and after each loss of the connection.

        `newest`: the `digest` of this record if it is known. Raises AnotherLogError if the digest
        differs, and TrimmedError if records after it are no longer stored.
        """
        if after + 1 < self.first:
            raise TrimmedError(after + 1, self.first)
        self._ask_server(lambda session: session.compare_log(after, newest))
        self.received, self.newest = after, newest
        self._follows = True
        self._ring()

    def close(self) -> None:
        """Send the records appended so far, and disconnect. Calls that wait raise ClosedError."""
        self._closed = True
        self.streams.close()
        self._ring()
        if self._thread.is_alive():
            self._thread.join(LOG_PATIENCE)
        if not self._thread.is_alive():
            self._alarm.close()
            self._alarmed.close()

    def append(self, raw: bytes) -> None:
        """Send a record to the log. It is in the log only once it is read back."""
        if len(raw) > RECORD_BYTES:
            raise UserError(
                f"a record has {len(raw)} bytes, and a server accepts at most "
                f"{RECORD_BYTES}: use more fragments or fewer bits "
                "(diloco.fragments, diloco.quantization)"
            )
        self._send(self._log_subject, raw)

    def beat(self, hint: Hint) -> None:
        self._send(self._beat_subject, msgspec.msgpack.encode(hint))

    def ask(self, incarnation: str, message: AnyMessage) -> None:
        """Send a message to one island."""
        self._send(ask_subject(self._join.run, incarnation), msgspec.msgpack.encode(message))

    def store(self, payload: bytes | memoryview, bulk: Bulk) -> tuple[Chunk, ...]:
        return self.streams.store(payload, bulk)

    def fetch(self, chunks: Sequence[Chunk], bulk: Bulk) -> bytearray:
        return self.streams.fetch(chunks, bulk)

    def store_state(self, state: bytes) -> None:
        index = msgspec.json.encode(self.store(state, "states"))
        self.streams.store(index, "states", STATE_INDEX)

    def newest_state(self) -> bytes | None:
        """Return the state that was stored last, or None if there is none."""
        return self._ask_server(Session.newest_state)

    # --- what was received ------------------------------------------------------------------------

    def receive(self, seconds: float = TICK) -> None:
        """Wait until something arrives, at most for this time. Raises `failure`."""
        self.members.tick(time.monotonic())
        self._news.wait(seconds)
        self._news.clear()  # before the caller reads, so that nothing is missed
        if self.failure is not None:
            raise self.failure
        self.members.tick(time.monotonic())

    def wake(self) -> None:
        """End a wait in `receive`. Any thread may call this."""
        self._news.set()

    def receive_log(self, patience: float = math.inf) -> None:
        """Wait for all records that the log had when the connection was opened."""
        end = time.monotonic() + patience
        while self.last < 0 or self.received < self.last:
            self.receive()
            if time.monotonic() > end:
                raise UserError(f"the server does not send its log {self.problem}".strip())

    def seconds_away(self) -> float:
        """Return the time since the connection was lost, or at most 0 while there is one."""
        return time.monotonic() - self._away_since

    # --- any thread -------------------------------------------------------------------------------

    def _send(self, subject: str, raw: bytes) -> None:
        """Publish if there is a connection."""
        if self._is_there and not self._closed:
            self._outgoing.append((subject, raw))
            self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or is closed
            self._alarm.send(b".")

    def _ask_server(self, operation: Callable[[Session], T]) -> T:
        """Return an answer of the server, over a separate connection, as soon as it gives one."""
        for address in itertools.cycle(self._join.addresses):
            if self._closed:
                raise ClosedError("the connection was closed")
            if self.failure is not None:
                raise self.failure
            with suppress(OSError), closing(Session(self._join, address, self._name)) as session:
                return operation(session)
            time.sleep(PAUSE)
        raise AssertionError

    # --- in the thread ----------------------------------------------------------------------------

    def _keep_connected(self) -> None:
        """Connect again whenever the connection is lost."""
        patience = SERVER_IS_BACK_SECONDS if self._known else FIRST_CONNECTION_SECONDS
        give_up, pause, reason = time.monotonic() + patience, PAUSE, ""
        addresses = random.sample(self._join.addresses, len(self._join.addresses))
        for address in itertools.cycle(addresses):
            failure: Exception
            try:
                self._stay_connected(address)
            except Exception as error:  # a damaged server may send anything
                is_said = isinstance(error, UserError)
                failure = error if is_said else explain(error, address, self._join)
            if self._is_there:
                self._is_there, pause, reason = False, PAUSE, ""
            first = not self._connected.done()
            if self._closed:
                if first:
                    self._connected.set_exception(ClosedError("the connection was closed"))
                return
            if first and (isinstance(failure, RefusedError) or time.monotonic() > give_up):
                if not isinstance(failure, ValueError):
                    failure = UserError(
                        f"islands.join: no connection within {patience:g} s ({failure}): check "
                        "that the server runs, and that its address and port can be reached from "
                        "here"
                    )
                self._connected.set_exception(failure)
                return
            if isinstance(failure, FINAL):
                self.failure = failure
                self.wake()
                self.streams.fail(failure)
                return
            if str(failure) != reason and (self._known or not first):
                reason = str(failure)
                if first:
                    logger.warning(f"waiting for the server of the islands: {reason}")
                else:
                    self._note_loss(reason)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _stay_connected(self, address: str) -> None:
        """Connect, and receive until `close`. Raises an error once the connection is lost."""
        with closing(Session(self._join, address, self._name, LOG_PATIENCE)) as session:
            own = ask_subject(self._join.run, self._name)
            for subject in (self._log_subject, self._beat_subject, own):
                session.subscribe(subject)
            first, last = self._ends_of_log(session)
            if self._follows:  # before anything is sent
                session.compare_log(self.received, self.newest)
            self._outgoing.clear()
            self._is_there = True
            self._note_connection(first, last)
            if self._connected.done():
                self.streams.renew()
            else:
                self._connected.set_result(None)
            self._converse(session)

    def _ends_of_log(self, session: Session) -> tuple[int, int]:
        """Return the numbers of the first and the last record in the log."""
        try:
            state = session.state_of("log")
        except RequestError as error:
            if error.code != NO_STREAM:
                raise
            raise RefusedError(
                f"islands.join: the server has no run {self._join.run!r}: use the "
                "join string of a run on this server"
            ) from error
        return max(1, state["first_seq"]), state["last_seq"]

    def _converse(self, session: Session) -> None:
        """Send pending messages, and pass on those that arrive, until `close`."""
        log, pings = LogReader(session), deque[float]()
        pinged, heard, pongs = -math.inf, -math.inf, session.pongs
        while True:
            with suppress(BlockingIOError):
                self._alarmed.recv(2**12)
            while self._outgoing:
                subject, raw = self._outgoing.popleft()
                session.publish(subject, raw)
                if subject == self._log_subject:
                    log.look_soon()
            if self._closed:
                session.ask()
                for _ in [*pings, self]:
                    session.wait()
                return
            if (now := time.monotonic()) > pinged + PING:
                heard = now if now > pinged + 2 * PING else heard  # this process has paused
                session.ask()
                pinged = now
                pings.append(now)
            if self._follows:
                log.look(self.received, now)
            if not session.is_readable(min(log.seconds_until_look(now), PING), self._alarmed):
                if now > heard + LOG_PATIENCE:
                    raise TimeoutError("the server does not answer")
                continue
            heard, message = time.monotonic(), session.next_message()
            while pongs < session.pongs:
                pongs, self.round_trip = pongs + 1, heard - pings.popleft()
            if message is None:
                continue
            if message.subject.startswith(session.inbox):
                raw = session.content(message)
                self._note_record(*log.read(message, raw, self.received, self.last))
            elif message.subject == self._log_subject:
                session.content(message)
                log.look_soon()
            else:
                kind: Any = Hint if message.subject == self._beat_subject else AnyMessage
                with suppress(msgspec.DecodeError):  # garbage
                    self._note(msgspec.msgpack.decode(session.content(message), type=kind))

    def _note_connection(self, first: int, last: int) -> None:
        if self.problem:
            logger.info("reconnected to the server of the islands")
        self.problem, self._away_since = "", math.inf
        self.members.connect(time.monotonic())
        self.first = first
        self.last = last  # after this, `receive_log` may return

    def _note_loss(self, reason: str) -> None:
        self._away_since = min(self._away_since, time.monotonic())
        self.members.disconnect()
        self.problem = reason
        logger.warning(f"no connection to the server of the islands: {reason}")
        self.wake()

    def _note(self, message: Hint | AnyMessage) -> None:
        if isinstance(message, Hint):
            self.members.hear(message, time.monotonic())
        elif isinstance(message, Leave):
            logger.info("this island was asked to leave the run")
            self.leaving = True
        else:
            self.messages.append(message)
            self.wake()

    def _note_record(self, sequence: int, raw: bytes, stored: str) -> None:
        """`sequence`: 0 if there is none."""
        if sequence:
            self.records.append(LogRecord(sequence, raw, time.monotonic(), stored))
            self.received, self.newest = sequence, digest(raw)
            self.wake()


def ask_subject(run: str, incarnation: str) -> str:
    # A name may contain special characters of subjects.
    return subject_of(run, f"ask.{digest(incarnation.encode())[:32]}")
