"""Requests to the streams of a run on its server: the log, chunks, and stored states."""

import base64
import json
import math
import time
from contextlib import closing
from typing import Any

import msgspec

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.records import AnotherLogError, Chunk, digest
from torchtitan_diloco.islands.wire import Message, Wire

PATIENCE = 10.0  # seconds without a byte of an answer
STATE_INDEX = "state"
"""Subject of the message that lists the chunks of a stored state, in the stream of states."""
NO_MESSAGE, NO_STREAM = 10037, 10059  # error codes of the server: no message, and no stream found
LAG_SECONDS, LOOK = 10.0, 0.1
"""Seconds within which the new leader of a cluster has applied all records, even on a busy machine,
and seconds between two checks."""
QUICK, POLL = 0.001, 0.5
"""Minimum and maximum seconds until the log is read again. The minimum applies after an append,
which is announced before it is stored. The pause doubles while there is no new record."""
NO_RECORD = 0, b"", ""
REMEDY = (
    "the run cannot be continued from this log: start `serve` on a newer copy of its "
    "folder, or in an empty folder, in which islands start from the model in their "
    "checkpoints"
)
BATCH = {"batch": 10_000, "max_bytes": 2**18, "next_by_subj": ">"}
"""Request of records to get at a time, from the next existing one on."""


class TrimmedError(UserError):
    """The log starts after a record that is needed."""

    def __init__(self, sequence: int, first: int) -> None:
        super().__init__(
            f"this island needs record {sequence} of the log, and the server has "
            f"only those from {first} on: the island was away for too long; start "
            "it without its checkpoint while another one is running"
        )
        self.first = first


class GapError(UserError):
    """A record is missing between others."""

    def __init__(self, sequence: int) -> None:
        super().__init__(
            f"record {sequence} of the log is missing, although there are later "
            f"ones: the disk of the server has lost it, and {REMEDY}"
        )


class RequestError(ConnectionError):
    """The server refuses a request."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


def read_answer(status: int, raw: bytes) -> dict[str, Any]:
    """Return JetStream's answer to a request. Raises a RequestError."""
    if status:  # 404: no such message; 503: nobody answers
        raise RequestError(f"no stream answers, status {status}", NO_MESSAGE * (status == 404))
    answer: dict[str, Any] = json.loads(raw)
    if error := answer.get("error"):
        raise RequestError(error.get("description", ""), error.get("err_code", 0))
    return answer


def subject_of(run: str, kind: str) -> str:
    return f"islands.{run}.{kind}"


def stream_of(run: str, kind: str) -> str:
    """Return the name of a stream of the run: "log", "parts", "snapshots" or "states"."""
    return f"islands-{run}-{kind}"


class Session(Wire):
    """A connection for requests, each of which waits for its answer."""

    def __init__(self, join: Join, address: str, name: str, patience: float = PATIENCE) -> None:
        super().__init__(join, address, name, patience)
        self.run, self._patience = join.run, patience

    def call(self, request: str, content: object = None) -> dict[str, Any]:
        """Return JetStream's answer. Raises a RequestError. Other messages are dropped.

        Without a leader, there is no answer, while heartbeats may continue. This is a TimeoutError.
        """
        asked = b"" if content is None else json.dumps(content).encode()
        self.publish(f"$JS.API.{request}", asked, 0)
        end = time.monotonic() + self._patience
        while not (message := self.next_answer()).subject.startswith(self.inbox):
            self.content(message)
            if time.monotonic() > end:
                raise TimeoutError(f"the server does not answer {request}")
        return read_answer(message.status, self.content(message))

    def state_of(self, kind: str) -> dict[str, Any]:
        """Return the state of a stream of the run, such as its `first_seq` and `last_seq`."""
        found: dict[str, Any] = self.call(f"STREAM.INFO.{stream_of(self.run, kind)}")["state"]
        return found

    def get(self, kind: str, **which: object) -> bytes | None:
        """Return a message from the leader of its stream, or None if it is not there."""
        try:
            answer = self.call(f"STREAM.MSG.GET.{stream_of(self.run, kind)}", which)
        except RequestError as error:
            if error.code != NO_MESSAGE:  # the server is starting or ending
                raise
            return None
        return base64.b64decode(answer["message"].get("data", ""))

    def newest_state(self) -> bytes | None:
        """Return the state of the run that was stored last, or None if there is none."""
        index = self.get("states", last_by_subj=subject_of(self.run, STATE_INDEX))
        chunks = [] if index is None else msgspec.json.decode(index, type=list[Chunk])
        pieces = [self.get("states", seq=chunk.sequence) for chunk in chunks]
        return b"".join(piece for piece in pieces if piece) if pieces and all(pieces) else None

    def find_record(self, sequence: int) -> bytes:
        """Return a record of the log. Raises a UserError if it does not exist."""
        end = time.monotonic() + LAG_SECONDS
        while (found := self.get("log", seq=sequence)) is None:
            state = self.state_of("log")
            if sequence < state["first_seq"]:
                raise TrimmedError(sequence, state["first_seq"])
            if time.monotonic() > end:
                if sequence <= state["last_seq"]:
                    raise GapError(sequence)
                raise AnotherLogError(
                    f"it has {state['last_seq']} records, and the island has read {sequence}"
                )
            time.sleep(LOOK)
        return found

    def compare_log(self, after: int, newest: str) -> None:
        """Raise a UserError if the log lacks records after this one, or if its digest differs."""
        if after == 0:
            return
        try:
            found = self.find_record(after)
        except TrimmedError as error:
            if after + 1 < error.first:
                raise
        else:
            if newest and digest(found) != newest:
                raise AnotherLogError(f"its record {after} is another one")


class LogReader:
    """Reads the log in order and without gaps, in batches of records."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pause, self._look_at, self._asked = QUICK, 0.0, -1
        self._answers_until = 0.0
        """Time at which an answer is late. 0: no answer is awaited."""

    def look_soon(self) -> None:
        """Look at the log: a record was appended, which the server may not have stored yet."""
        self._pause = QUICK
        self._look_at = min(self._look_at, time.monotonic() + QUICK)

    def look(self, after: int, now: float) -> None:
        """Request the records after this one if it is time. Any replica answers, even one that
        still lacks the newest."""
        if self._answers_until:
            if now > self._answers_until:
                raise TimeoutError("the server does not return its log")
        elif now >= self._look_at:
            self._asked, self._answers_until = after, now + PATIENCE
            wanted = json.dumps(BATCH | {"seq": after + 1}).encode()
            stream = stream_of(self._session.run, "log")
            self._session.publish(f"$JS.API.DIRECT.GET.{stream}", wanted, 0)

    def seconds_until_look(self, now: float) -> float:
        return math.inf if self._answers_until else max(0.0, self._look_at - now)

    def read(self, answer: Message, raw: bytes, after: int, last: int) -> tuple[int, bytes, str]:
        """Return sequence number, content and time of the record in an answer, or (0, b"", "").

        `after`: the record read last. `last`: one that the log is known to have.
        """
        if answer.status not in (0, 204, 404):
            raise RequestError(f"the server does not return its log: status {answer.status}")
        headers, now, found = answer.headers, time.monotonic(), NO_RECORD
        sequence = 0 if answer.status else int(headers.get("Nats-Sequence", 0))
        if sequence:
            self._answers_until = now + PATIENCE
            is_next = sequence == after + 1
            return (sequence, raw, headers.get("Nats-Time-Stamp", "")) if is_next else NO_RECORD
        if int(headers.get("Nats-Last-Sequence", 0)) > after or after == self._asked < last:
            after += 1
            found = after, self._session.find_record(after), ""
        if after > self._asked:
            self._pause = QUICK
        more = after > self._asked and headers.get("Nats-Num-Pending") != "0"
        self._answers_until, self._look_at = 0.0, now + (0.0 if more else self._pause)
        self._pause = min(2 * self._pause, POLL)
        return found


def open_session(join: Join, name: str) -> closing[Session]:
    return closing(Session(join, join.addresses[0], name))
