"""One connection to a NATS server, which ends at its first failure, and how it reads the log."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from torchtitan_diloco.islands.config import Join, RefusedError, explain
from torchtitan_diloco.islands.inbox import AnyMessage, Inbox
from torchtitan_diloco.islands.members import Hint
from torchtitan_diloco.islands.records import AnotherLogError, Chunk, digest
from torchtitan_diloco.log import UserError, install_command

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

T = TypeVar("T")
CHECK, PING = 0.1, 0.5
"""Seconds between checks of a connection, and between pings."""
SETUP_SECONDS, ANSWER_SECONDS = 4.0, 10.0
"""Timeouts to connect, and to get records or chunks."""
STATE_INDEX = "state"
"""Subject of the message that lists the chunks of a stored state, in the stream of states."""
NO_LIMIT = 1e6
"""Timeout of nats-py in seconds. The timeout of `Session.run` applies instead."""
NO_MESSAGE = 10037
"""Error code of the server: no message found."""
LAG_SECONDS = 2.0
"""Time in which the new leader of a cluster has applied all records."""
QUICK, POLL = 0.001, 0.5
"""Seconds until the log is read again: after an append, which is announced before it is stored, and
at most. The pause doubles while there is no new record."""
UNCONFIRMED_SECONDS = 30.0
"""Seconds in which the other end must acknowledge some bytes. A slow link does, a dead one not."""
BATCH = {"batch": 10_000, "next_by_subj": ">"}
"""Records to get at a time, from the next one that there is."""
BATCH_BYTES, LARGEST_BATCH, BATCH_SECONDS = 2**16, 2**22, 0.25
"""Bytes to get at a time, at first and at most. They double after an answer within these seconds:
on a slow link, answers to pings queue behind them."""


class TrimmedError(UserError):
    """The log begins after a record that is needed."""

    def __init__(self, sequence: int, first: int) -> None:
        super().__init__(
            f"record {sequence} of the log is needed, and the server keeps those from {first} on: "
            "this island was away for too long; start it without its checkpoint while another one "
            "is running"
        )
        self.first = first


class GapError(UserError):
    """A record is missing between others."""

    def __init__(self, sequence: int) -> None:
        super().__init__(
            f"record {sequence} of the log is missing, and later ones are there: the disk of the "
            "server has lost it, and the run cannot be continued from this log; start `serve` on a "
            "newer copy of its folder, or in an empty folder, where islands begin with the model "
            "in their checkpoints"
        )


def subject_of(run: str, kind: str) -> str:
    return f"islands.{run}.{kind}"


def ask_subject(run: str, incarnation: str) -> str:
    # A name may contain special characters of subjects.
    return subject_of(run, f"ask.{digest(incarnation.encode())[:32]}")


def stream_of(run: str, kind: str) -> str:
    """Return the name of a stream of the run: "log", "parts", "snapshots" or "states"."""
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


class Session:
    """A NATS client that does not reconnect. It must not be used once it is lost.

    A new client replaces it, as the client's own recovery takes at least 2 s and up to 17, and
    would send what was appended before the logs are compared.
    """

    def __init__(self, patience: float) -> None:
        """`patience`: seconds without an answer to a ping until the connection is lost."""
        from nats.aio.client import Client

        self.client: Client = Client()
        self.jetstream: JetStreamContext = self.client.jetstream(timeout=NO_LIMIT)
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Why the connection was lost."""
        self._patience = patience
        self._problem: Exception | None = None
        self._watch: asyncio.Task[None] | None = None

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
        self._watch = asyncio.create_task(self._notice_loss())

    async def _note(self, error: Exception) -> None:
        self._problem = error
        if "permissions violation" in str(error).lower():  # there will be no answer
            self.fail(
                RefusedError(
                    f"islands.join: this login has no right to the run ({error}); use the join "
                    "string of a run of this server"
                )
            )

    async def _notice_loss(self) -> None:
        while not self.client.is_closed:  # the client's own callback may come 30 s later
            await asyncio.sleep(CHECK)
        reason = self._problem or self.client.last_error or "the server does not answer"
        self.fail(ConnectionError(str(reason)))

    @property
    def is_lost(self) -> bool:
        return self.lost.done() or self.client.is_closed

    def fail(self, reason: Exception) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def run(self, operation: Awaitable[T], seconds: float = ANSWER_SECONDS) -> T:
        """Return the operation's result. Raises an error once the connection is lost."""
        task = asyncio.ensure_future(operation)
        try:
            both = task, self.lost
            await asyncio.wait(both, timeout=seconds, return_when="FIRST_COMPLETED")
            if task.done():
                return task.result()
            if self.lost.done():
                raise self.lost.result()
            raise TimeoutError(f"no answer within {seconds:g} s")
        finally:
            task.cancel()  # without waiting for it: nats-py ignores some cancellations

    async def get(self, stream: str, **which: Any) -> bytes | None:
        """Return a message from the leader of its stream, or None if it is not there."""
        from nats.js.errors import NotFoundError

        try:
            return (await self.jetstream.get_msg(stream, **which)).data or b""
        except NotFoundError as error:
            if error.err_code != NO_MESSAGE:  # the server is starting or ending
                raise
            return None

    async def newest_state(self, run: str) -> bytes | None:
        """Return the state of the run that was stored last, or None if there is none."""
        stream = stream_of(run, "states")
        index = await self.get(stream, subject=subject_of(run, STATE_INDEX))
        chunks = [] if index is None else msgspec.json.decode(index, type=list[Chunk])
        pieces = [await self.get(stream, seq=chunk.sequence) for chunk in chunks]
        return b"".join(piece for piece in pieces if piece) if pieces and all(pieces) else None

    async def find_record(self, run: str, sequence: int) -> bytes:
        """Return a record of the log. Raises a UserError if it is not there."""
        stream, end = stream_of(run, "log"), asyncio.get_running_loop().time() + LAG_SECONDS
        while (found := await self.get(stream, seq=sequence)) is None:
            state = (await self.jetstream.stream_info(stream)).state
            if sequence < state.first_seq:
                raise TrimmedError(sequence, state.first_seq)
            if sequence <= state.last_seq:
                raise GapError(sequence)
            if asyncio.get_running_loop().time() > end:
                raise AnotherLogError(
                    f"it has {state.last_seq} records, and the island has read {sequence}"
                )
            await asyncio.sleep(CHECK)
        return found

    async def compare_log(self, run: str, after: int, newest: str) -> None:
        """Raise a UserError if the log lacks records after this one, or its digest is another."""
        if after == 0:
            return
        try:
            found = await self.find_record(run, after)
        except TrimmedError as error:
            if after + 1 < error.first:
                raise
        else:
            if newest and digest(found) != newest:
                raise AnotherLogError(f"its record {after} is another one")

    async def close(self) -> None:
        """Close the socket. This may take long if the server does not answer."""
        if self._watch is not None:
            self._watch.cancel()
        with suppress(Exception):  # nothing can be done about it
            await self.client.close()


class LogSession(Session):
    """Session that passes on messages of other islands, and the log."""

    def __init__(self, patience: float, inbox: Inbox, run: str) -> None:
        super().__init__(patience)
        self._appended, self._outstanding = asyncio.Event(), 0
        """Whether a record was appended, and how many of them were not received yet."""
        self._inbox, self._run = inbox, run
        self._ends = asyncio.Queue[dict[str, str]]()

    async def subscribe(self, name: str) -> tuple[int, int]:
        """Subscribe to messages. Return the numbers of the first and the last record in the log.

        Raises RefusedError if the server has no such run.
        """
        from nats.js.errors import NotFoundError

        async def hear(message: "Msg") -> None:
            kind: Any = Hint if message.subject == beat else AnyMessage
            with suppress(msgspec.DecodeError):  # garbage
                self._inbox.note_message(msgspec.msgpack.decode(message.data, type=kind))

        async def wake(_: "Msg") -> None:
            self.note_append()

        beat = subject_of(self._run, "beat")
        await self.client.subscribe(beat, cb=hear)
        await self.client.subscribe(ask_subject(self._run, name), cb=hear)
        await self.client.subscribe(subject_of(self._run, "log"), cb=wake)
        try:
            state = (await self.jetstream.stream_info(stream_of(self._run, "log"))).state
        except NotFoundError as error:
            raise RefusedError(
                f"islands.join: the server has no run {self._run!r}; use the join string of a run "
                "of this server"
            ) from error
        return max(1, state.first_seq), state.last_seq

    def note_append(self) -> None:
        """Read the log soon: a record was appended, which the server may not have stored yet."""
        self._outstanding += 1
        self._appended.set()

    async def read_log(self) -> NoReturn:
        """Pass on records in order and without gaps. Never returns.

        Any replica answers, also one that still lacks the newest records.
        """
        inbox, answers = self._inbox, self.client.new_inbox()
        await self.client.subscribe(answers, cb=self._on_record)
        size, pause = BATCH_BYTES, QUICK
        while True:
            self._appended.clear()
            known, begin = inbox.received, asyncio.get_running_loop().time()
            wanted = json.dumps(BATCH | {"seq": known + 1, "max_bytes": size}).encode()
            subject = f"$JS.API.DIRECT.GET.{stream_of(self._run, 'log')}"
            await self.client.publish(subject, wanted, reply=answers)
            end = await self.run(self._ends.get())
            if end.get("Status") not in ("204", "404"):
                raise ConnectionError(f"the server does not give its log: {end}")
            seen = int(end.get("Nats-Last-Sequence", 0))
            if seen > inbox.received or inbox.received == known < inbox.last:
                sequence = inbox.received + 1
                inbox.note_record(sequence, await self.run(self.find_record(self._run, sequence)))
            if inbox.received > known:
                quick = asyncio.get_running_loop().time() - begin < BATCH_SECONDS
                size, pause = min((1 + quick) * size, LARGEST_BATCH), QUICK
                if end.get("Nats-Num-Pending") != "0":
                    continue
            try:
                soon = pause if self._outstanding else POLL
                await asyncio.wait_for(self._appended.wait(), soon)
                await asyncio.sleep(QUICK)  # until the server has stored it
                pause = QUICK
            except TimeoutError:
                pause = min(2 * pause, POLL)

    async def _on_record(self, message: "Msg") -> None:
        headers = message.headers or {}
        sequence = int(headers.get("Nats-Sequence", 0))
        if not sequence:
            self._ends.put_nowait(headers)
        elif sequence == self._inbox.received + 1 and not self.lost.done():
            self._inbox.note_record(sequence, message.data, headers.get("Nats-Time-Stamp", ""))
            self._outstanding = max(0, self._outstanding - 1)
