"""One connection to a NATS server, given up at its first failure, and what an island hears."""

import asyncio
import logging
import math
import ssl
import threading
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.members import Hint, Members
from torchtitan_diloco.islands.records import Chunk, Count, digest
from torchtitan_diloco.utils import install_command, logger

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

T = TypeVar("T")
POLL, PING = 0.1, 0.5
"""Seconds between two looks at the state of a connection, and between pings."""
TICK = 0.1
"""Seconds between two looks at the clock."""
SETUP_SECONDS = 4.0
"""Time to connect, and to subscribe."""
NO_LIMIT = 1e6
"""Seconds that nats-py waits for an answer: `run` has its own limit."""
HEARTBEAT, SILENT_POLLS = 0.5, 30
"""Seconds after which the server says that there is no new record, and looks without one."""


class LogRecord(NamedTuple):
    sequence: int
    raw: bytes


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one island says to another."""

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


AnyMessage: TypeAlias = Leave | SnapshotWanted | Snapshot


class Inbox:
    """What has come in over a connection.

    The connection's thread writes it, by the methods that begin with `note_`; other threads read.
    One thread at a time takes `records` and `messages` and calls `receive`: the one that calls
    `Leader.join`, and then the leader's own. No lock is needed, because each attribute has one
    writer, which appends to it or replaces it as a whole.
    """

    def __init__(self, expiry: float) -> None:
        self.members = Members(expiry)
        """The other islands, as far as one has heard of them."""
        self.records: deque[LogRecord] = deque()
        """Records that wait to be read."""
        self.messages: deque[SnapshotWanted | Snapshot] = deque()
        """Messages for this island that wait to be read."""
        self.leaving = False
        """This island was asked to leave the run."""
        self.received, self.last = 0, -1
        """Number of the last record received, and of the last one in the log when the connection
        was made last."""
        self.problem = ""
        """Why there is no connection."""
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

    def note_record(self, record: LogRecord) -> None:
        self._check_writer()
        self.records.append(record)
        self.received = record.sequence
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
        """Wait until something has come in, not longer than this."""
        self.members.tick(time.monotonic())
        self._news.wait(seconds)
        self._news.clear()  # before one looks at what has come in, so nothing is overlooked
        self.members.tick(time.monotonic())

    def wake(self) -> None:
        """End a wait in `receive`. Any thread may call this."""
        self._news.set()

    def receive_log(self, patience: float = math.inf) -> None:
        """Receive all records that the log had when the connection was made."""
        end = time.monotonic() + patience
        while self.last < 0 or self.received < self.last:
            self.receive()
            if time.monotonic() > end:
                raise ValueError(f"the server does not send its log {self.problem}".strip())

    def seconds_away(self) -> float:
        """Return for how long there has been no connection, at most 0 if there is one."""
        return time.monotonic() - self._away_since


class RefusedError(ValueError):
    """The server refuses this island, or is not the one of the join string."""


def subject_of(run: str, kind: str) -> str:
    return f"islands.{run}.{kind}"


def ask_subject(run: str, incarnation: str) -> str:
    # A name may contain what has a meaning in a subject.
    return subject_of(run, f"ask.{digest(incarnation.encode())[:32]}")


def stream_of(run: str, kind: str) -> str:
    """Return the name of a stream of the run: "log", "parts" or "snapshots"."""
    return f"islands-{run}-{kind}"


def check_installed() -> None:
    try:
        import nats  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"islands need the package nats-py: {install_command('islands')}"
        ) from error
    logging.getLogger("asyncio").addFilter(_is_no_end_of_tls)


def _is_no_end_of_tls(record: logging.LogRecord) -> bool:
    """Return whether it is not the warning that nats-py causes whenever a TLS connection ends."""
    return not str(record.msg).startswith("returning true from eof_received()")


class Session:
    """A NATS client that does not reconnect. Nothing may be done with it once it is `lost`.

    The client's own recovery takes 2 s at least and was seen to take 17, so a new one is made.
    """

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without an answer to a ping after which the connection is lost."""
        from nats.aio.client import Client

        self.client: Client = Client()
        self.jetstream: JetStreamContext
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._patience = patience
        self._problem: Exception | None = None
        self._watch: asyncio.Task[None] | None = None
        self._polls_left = math.inf
        """Looks until it counts as silent. Not timed: a pause of this process is no silence."""

    async def open(self, join: Join, address: str, name: str) -> None:
        """Connect; raise RefusedError if it is no use to try again, else any other error."""
        from nats import errors

        connect = self.client.connect(
            f"nats://{address}",
            name=name,
            user=join.user or None,
            password=join.password or None,
            tls=join.context(),
            # Else a server in the middle could ask for the password in plain text.
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
            raise _explain(self._problem or error, address, join) from error
        self.jetstream = self.client.jetstream(timeout=NO_LIMIT)
        self._watch = asyncio.create_task(self._notice_loss())

    async def _note(self, error: Exception) -> None:
        self._problem = error
        if "permissions violation" in str(error).lower():  # else one would wait for an answer
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
        """Close the socket. It may take long if the server does not answer."""
        self.fail("closed")
        if self._watch is not None:
            self._watch.cancel()
        # Whatever is wrong with a connection that is given up, there is nothing left to be done.
        with suppress(Exception):
            await self.client.close()


class LogSession(Session):
    """Tells all that it hears: records of the log in order, without gaps."""

    def __init__(self, patience: float, inbox: Inbox) -> None:
        super().__init__(patience)
        self._inbox = inbox
        self._consumed = 0

    async def follow(self, run: str, name: str, after: int) -> None:
        """Let the server send the log behind a record, and messages.

        Raises RefusedError if it has no such run.
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
        # The consumer that nats-py calls ordered mends gaps by itself, but not a lost connection.
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


def _explain(error: Exception, address: str, join: Join) -> Exception:
    """Return what a failure to connect means for a user."""
    text = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError) and not join.certificate:
        return RefusedError(
            f"islands.join: this system does not trust the certificate of {address} "
            f"({error.verify_message}), and the join string has none: it may have been cut off; "
            "copy the whole line that the server printed"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusedError(
            f"islands.join: {address} has another certificate than the join string says "
            f"({error.verify_message}): it is another server, or its folder was made anew; "
            "use the join string that it printed last"
        )
    if isinstance(error, ssl.SSLError):
        return RefusedError(
            f"islands.join: {address} does not begin with TLS ({error.reason}): set "
            "`handshake_first: true` in the tls section of its configuration"
        )
    if not join.tls and "expecting INFO" in text:
        return RefusedError(
            f"islands.join: {address} says nothing without TLS: begin the join string with "
            "nats+tls:// if the server has it"
        )
    if "authorization" in text.lower():
        return RefusedError(
            f"islands.join: {address} refuses the user or the password of the join string; "
            "use the one that the server printed"
        )
    return ConnectionError(f"{address}: {text}")
