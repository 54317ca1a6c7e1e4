"""What an island hears through the server: records of the log, heartbeats, messages."""

import asyncio
import queue
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from torchtitan_diloco.islands.records import Count, Name, Seconds, digest
from torchtitan_diloco.islands.session import RefusedError, Session

if TYPE_CHECKING:
    from nats.aio.msg import Msg

Bulk: TypeAlias = Literal["parts", "snapshots"]
EVERYBODY = "all"
LEAVE = b"leave"
"""Message that asks an island to leave the run."""
HEARTBEAT = 0.5
"""Seconds after which the server says that there is no new record."""
HEARTBEATS_MISSED = 6
FOLLOW_SECONDS = 4.0


class Hint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an island tells the others of itself. Nothing valid depends on it."""

    incarnation: Name
    step: Count
    tokens: Count
    step_seconds: Seconds
    caught_up: bool
    leaving: bool = False


@dataclass(frozen=True)
class LogRecord:
    sequence: int
    subject: str
    raw: bytes


@dataclass(frozen=True)
class Heard:
    """Another island's heartbeat."""

    hint: Hint


@dataclass(frozen=True)
class Asked:
    """A message of another island."""

    sender: str
    raw: bytes


@dataclass(frozen=True)
class Connected:
    last: int
    """Sequence number of the last record in the log at this moment."""


@dataclass(frozen=True)
class Disconnected:
    """There is no connection. It comes once more if a new attempt fails for another reason."""

    reason: str


Event: TypeAlias = LogRecord | Heard | Asked | Connected | Disconnected


@dataclass(frozen=True)
class Names:
    """Subjects and streams of a run."""

    run: str

    @property
    def prefix(self) -> str:
        return f"islands.{self.run}"

    @property
    def log(self) -> str:
        return f"{self.prefix}.log"

    @property
    def beat(self) -> str:
        return f"{self.prefix}.beat"

    def ask(self, incarnation: str) -> str:
        # A name may contain what has a meaning in a subject.
        target = EVERYBODY if incarnation == EVERYBODY else digest(incarnation.encode())[:32]
        return f"{self.prefix}.ask.{target}"

    def bulk(self, bulk: Bulk) -> str:
        return f"{self.prefix}.{bulk}"

    def stream(self, kind: Literal["log"] | Bulk) -> str:
        return f"islands-{self.run}-{kind}"


class LogReader:
    """Puts all that a session hears into a queue: records of the log in order, without gaps."""

    def __init__(
        self,
        session: Session,
        names: Names,
        name: str,
        events: "queue.SimpleQueue[Event]",
        after: int,
    ) -> None:
        """`after`: last record that the queue has had."""
        self._session, self._names, self._name, self._events = session, names, name, events
        self.delivered = after
        self._consumed = self._silent = 0

    async def start(self) -> None:
        """Follow the log. Raises RefusedError if the server has none of this run."""
        from nats.js.errors import NotFoundError

        try:
            await self._session.run(self._follow(), FOLLOW_SECONDS)
        except (NotFoundError, ConnectionError) as error:
            denied = "permissions violation" in str(error).lower()
            if denied or isinstance(error, NotFoundError):
                raise RefusedError(
                    f"islands.join: the server has no run {self._names.run!r}, or this login has "
                    "no right to it; use the join string of a run of this server"
                ) from error
            raise

    async def _follow(self) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        client, jetstream = self._session.client, self._session.jetstream
        stream = self._names.stream("log")
        info = await jetstream.stream_info(stream)
        self._events.put(Connected(info.state.last_seq))
        await client.subscribe(self._names.beat, cb=self._on_beat)
        for target in (self._name, EVERYBODY):
            await client.subscribe(self._names.ask(target), cb=self._on_question)
        # The consumer that nats-py calls ordered mends gaps by itself, but not a lost connection.
        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=self._on_record)
        await jetstream.add_consumer(
            stream,
            ConsumerConfig(
                deliver_subject=inbox,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self.delivered + 1,
                ack_policy=AckPolicy.NONE,
                flow_control=True,
                idle_heartbeat=HEARTBEAT,
                inactive_threshold=5.0,
                num_replicas=1,
                mem_storage=True,
            ),
        )

    async def notice_silence(self) -> None:
        """Give the session up if the server stops to send the log, for whatever reason."""
        while self._silent < HEARTBEATS_MISSED:
            await asyncio.sleep(HEARTBEAT)
            self._silent += 1  # counted, not timed: a pause of this process is no silence
        self._session.fail("the server has stopped to send the log")

    async def _on_record(self, message: "Msg") -> None:
        self._silent = 0
        if not message.reply.startswith("$JS.ACK."):
            await self._on_control(message)
            return
        sequence = message.metadata.sequence
        self._consumed += 1
        if sequence.consumer != self._consumed:
            self._session.fail("a record was lost on the way")
        if not self._session.lost.done():
            self.delivered = sequence.stream
            subject = message.subject.removeprefix(f"{self._names.log}.")
            self._events.put(LogRecord(sequence.stream, subject, message.data))

    async def _on_control(self, message: "Msg") -> None:
        headers = message.headers or {}
        stalled = headers.get("Nats-Consumer-Stalled")
        if message.reply or stalled:  # flow control: let the server go on
            await self._session.client.publish(message.reply or stalled or "")
        elif headers.get("Status") != "100":
            self._session.fail(f"the server ends the log: {headers.get('Description')}")

    async def _on_beat(self, message: "Msg") -> None:
        with suppress(msgspec.DecodeError):  # garbage
            self._events.put(Heard(msgspec.msgpack.decode(message.data, type=Hint)))

    async def _on_question(self, message: "Msg") -> None:
        sender, _, raw = message.data.partition(b"\n")
        with suppress(UnicodeDecodeError):
            self._events.put(Asked(sender.decode(), raw))
