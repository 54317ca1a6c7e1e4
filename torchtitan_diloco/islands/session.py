"""One connection to a NATS server, which ends at its first failure, and what it receives."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from torchtitan_diloco.islands.config import Join, RefusedError, explain
from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import AnotherLogError, Chunk, Count, digest
from torchtitan_diloco.log import UserError, install_command, logger

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

T = TypeVar("T")
POLL, PING = 0.1, 0.5
"""Seconds between checks of a connection, and between pings."""
TICK = 0.1
"""Longest wait in `receive`, in seconds."""
SETUP_SECONDS = 4.0
"""Timeout to connect, and to subscribe."""
NO_LIMIT = 1e6
"""Timeout of nats-py in seconds. The timeout of `Session.run` applies instead."""
LAG_SECONDS = 2.0
"""Time in which the new leader of a cluster has applied all records."""
HEARTBEAT, SILENT_POLLS = 0.5, 30
"""Seconds until the server reports that there is no new record, and polls without a report."""


class LogRecord(NamedTuple):
    sequence: int
    raw: bytes


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Message from one island to another."""

    sender: str


class Leave(Message, frozen=True):
    """Leave the run."""


class SnapshotWanted(Message, frozen=True):
    fragment: Count


class Snapshot(Message, frozen=True):
    fragment: Count
    version: Count
    head: str
    """Hash of the entry that made the version."""
    chunks: tuple[Chunk, ...] = ()
    problem: str = ""
    """Why there are no chunks."""


AnyMessage: TypeAlias = Leave | SnapshotWanted | Snapshot


class Inbox:
    """Records, messages and heartbeats that a connection has received.

    Only the connection's thread calls the methods that begin with `note_`. Only one thread at a
    time takes `records` and `messages` and calls `receive`: first the caller of `Leader.join`, then
    the leader's own thread. No lock is needed, as each attribute has one writer, which appends to
    it or replaces it as a whole.
    """

    def __init__(self, expiry: float) -> None:
        self.members = Members(expiry)
        """Heartbeats of the other islands."""
        self.records: deque[LogRecord] = deque()
        """Records not read yet."""
        self.messages: deque[SnapshotWanted | Snapshot] = deque()
        """Messages to this island not read yet."""
        self.leaving = False
        """This island was asked to leave the run."""
        self.received, self.last = 0, -1
        """Sequence numbers of the last record received, and of the last one in the log when the
        connection was made."""
        self.newest = b""
        """The last record received."""
        self.problem = ""
        """Why there is no connection."""
        self.failure: AnotherLogError | None = None
        """Why there will be none again."""
        self._away_since = math.inf
        self._news = threading.Event()
        self._writer: threading.Thread | None = None

    def note_connection(self, last: int) -> None:
        """`last`: sequence number of the last record in the log."""
        self._check_writer()
        if self.problem:
            logger.info("the server of the islands is there again")
        self.problem, self._away_since = "", math.inf
        self.members.connect(time.monotonic())
        self.last = last  # after this, `receive_log` may return

    def note_loss(self, reason: str) -> None:
        self._check_writer()
        self._away_since = min(self._away_since, time.monotonic())
        self.members.disconnect()
        self.problem = reason
        logger.warning(f"no connection to the server of the islands: {reason}")
        self.wake()

    def note_failure(self, failure: AnotherLogError) -> None:
        self._check_writer()
        self.failure = failure
        self.wake()

    def note_record(self, record: LogRecord) -> None:
        self._check_writer()
        self.records.append(record)
        self.received, self.newest = record
        self.wake()

    def note_message(self, message: "Hint | AnyMessage") -> None:
        self._check_writer()
        if isinstance(message, Hint):
            self.members.hear(message, time.monotonic())
        elif isinstance(message, Leave):
            logger.info("this island was asked to leave the run")
            self.leaving = True
        else:
            self.messages.append(message)
            self.wake()

    def _check_writer(self) -> None:
        assert threading.current_thread() is self._writer, "only the connection's thread writes"

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
        """Wait for all records that the log had when the connection was made."""
        end = time.monotonic() + patience
        while self.last < 0 or self.received < self.last:
            self.receive()
            if time.monotonic() > end:
                raise UserError(f"the server does not send its log {self.problem}".strip())

    def seconds_away(self) -> float:
        """Return the time since the connection was lost, at most 0 if there is one."""
        return time.monotonic() - self._away_since


def subject_of(run: str, kind: str) -> str:
    return f"islands.{run}.{kind}"


def ask_subject(run: str, incarnation: str) -> str:
    # A name may contain special characters of subjects.
    return subject_of(run, f"ask.{digest(incarnation.encode())[:32]}")


def stream_of(run: str, kind: str) -> str:
    """Return the name of a stream of the run: "log", "parts" or "snapshots"."""
    return f"islands-{run}-{kind}"


def check_installed() -> None:
    try:
        import nats  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"islands need the package nats-py: {install_command('islands')}"
        ) from error
    logging.getLogger("asyncio").addFilter(_is_no_end_of_tls)


def _is_no_end_of_tls(record: logging.LogRecord) -> bool:
    """Filter out the warning that nats-py causes whenever a TLS connection ends."""
    return not str(record.msg).startswith("returning true from eof_received()")


class Session:
    """A NATS client that does not reconnect. It must not be used once it is `lost`.

    A new client replaces it, as the client's own recovery takes at least 2 s and up to 17.
    """

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without an answer to a ping until the connection is lost."""
        from nats.aio.client import Client

        self.client: Client = Client()
        self.jetstream: JetStreamContext
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._patience = patience
        self._problem: Exception | None = None
        self._watch: asyncio.Task[None] | None = None
        self._polls_left = math.inf
        """Polls until the connection counts as lost. A time would include pauses of the process."""

    async def open(self, join: Join, address: str, name: str) -> None:
        """Connect. Raises RefusedError if another attempt would fail, too, else any other error."""
        from nats import errors

        connect = self.client.connect(
            f"nats://{address}",
            name=name,
            user=join.user or None,
            password=join.password or None,
            tls=join.context(),
            # Otherwise a server in the middle could ask for the password in plain text.
            tls_handshake_first=join.tls,
            error_cb=self._note,
            allow_reconnect=False,
            connect_timeout=2,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            ping_interval=PING,  # type: ignore[arg-type]
            max_outstanding_pings=round(self._patience / PING),
            no_echo=True,
        )
        try:
            await self.run(connect, SETUP_SECONDS)
        except (OSError, errors.Error, TimeoutError) as error:
            raise explain(self._problem or error, address, join) from error
        self.jetstream = self.client.jetstream(timeout=NO_LIMIT)
        self._watch = asyncio.create_task(self._notice_loss())

    async def _note(self, error: Exception) -> None:
        self._problem = error
        if "permissions violation" in str(error).lower():  # there will be no answer
            self.fail(str(error))

    async def _notice_loss(self) -> None:
        while not self.client.is_closed and self._polls_left > 0:
            await asyncio.sleep(POLL)
            self._polls_left -= 1
        self.fail(str(self._problem or self.client.last_error or "the server does not answer"))

    @property
    def is_lost(self) -> bool:
        return self.lost.done() or self.client.is_closed

    def fail(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def run(self, operation: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the operation's result. Raises ConnectionError once the connection is lost."""
        task = asyncio.ensure_future(operation)
        try:
            both = task, self.lost
            await asyncio.wait(both, timeout=seconds, return_when="FIRST_COMPLETED")
            if task.done():
                return task.result()
            if self.lost.done():
                raise ConnectionError(self.lost.result())
            raise TimeoutError(f"no answer within {seconds:g} s")
        finally:
            task.cancel()  # without waiting for it: nats-py ignores some cancellations

    async def close(self) -> None:
        """Close the socket. This may take long if the server does not answer."""
        self.fail("closed")
        if self._watch is not None:
            self._watch.cancel()
        with suppress(Exception):  # nothing can be done about it
            await self.client.close()


class LogSession(Session):
    """Session that passes on what it receives: records of the log, in order and without gaps."""

    def __init__(self, patience: float, inbox: Inbox) -> None:
        super().__init__(patience)
        self._inbox = inbox
        self._consumed = 0

    async def compare(self, run: str) -> None:
        """Raise AnotherLogError if the log is not the one that the records received are from."""
        if self._inbox.newest:
            await self.run(self._compare(stream_of(run, "log")), SETUP_SECONDS)

    async def _compare(self, stream: str) -> None:
        known, end = self._inbox.received, time.monotonic() + LAG_SECONDS
        while (last := (await self.jetstream.stream_info(stream)).state.last_seq) < known:
            if time.monotonic() > end:
                raise AnotherLogError(f"it has {last} records, and the island has read {known}")
            await asyncio.sleep(POLL)
        if (await self.jetstream.get_msg(stream, known)).data != self._inbox.newest:
            raise AnotherLogError(f"its record {known} is another one")

    async def follow(self, run: str, name: str, after: int) -> None:
        """Subscribe to the log after a record, and to messages.

        Raises RefusedError if the server has no such run.
        """
        from nats.js.errors import NotFoundError

        try:
            await self.run(self._subscribe(run, name, after), SETUP_SECONDS)
        except (NotFoundError, ConnectionError) as error:
            denied = "permissions violation" in str(error).lower()
            if denied or isinstance(error, NotFoundError):
                raise RefusedError(
                    f"islands.join: the server has no run {run!r}, or this login has no right to "
                    "it; use the join string of a run of this server"
                ) from error
            raise

    async def _subscribe(self, run: str, name: str, after: int) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        client, stream = self.client, stream_of(run, "log")
        info = await self.jetstream.stream_info(stream)
        self._inbox.note_connection(info.state.last_seq)
        self._polls_left = SILENT_POLLS
        await client.subscribe(subject_of(run, "beat"), cb=partial(self._on_message, Hint))
        await client.subscribe(ask_subject(run, name), cb=partial(self._on_message, AnyMessage))
        # The ordered consumer of nats-py repairs gaps, but not a lost connection.
        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=self._on_record)
        await self.jetstream.add_consumer(
            stream,
            ConsumerConfig(
                deliver_subject=inbox,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=after + 1,
                ack_policy=AckPolicy.NONE,
                flow_control=True,
                idle_heartbeat=HEARTBEAT,
                inactive_threshold=5.0,
                num_replicas=1,
                mem_storage=True,
            ),
        )

    async def _on_record(self, message: "Msg") -> None:
        self._polls_left, headers = SILENT_POLLS, message.headers or {}
        if self.lost.done():
            return
        if message.reply.startswith("$JS.ACK."):
            sequence = message.metadata.sequence
            self._consumed += 1
            if sequence.consumer != self._consumed:
                self.fail("a record was lost on the way")
                return
            self._inbox.note_record(LogRecord(sequence.stream, message.data))
        elif go_on := message.reply or headers.get("Nats-Consumer-Stalled"):  # flow control
            await self.client.publish(go_on)
        elif headers.get("Status") != "100":
            self.fail(f"the server ends the log: {headers.get('Description')}")

    async def _on_message(self, kind: Any, message: "Msg") -> None:
        with suppress(msgspec.DecodeError):  # garbage
            self._inbox.note_message(msgspec.msgpack.decode(message.data, type=kind))
