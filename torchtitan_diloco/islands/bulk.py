"""Payloads in the streams of the server, split into chunks, over separate TCP streams.

Each stream has a thread and a connection, which is reopened whenever it fails. Its chunks are then
repeated, while the other streams continue.
"""

import base64
import itertools
import json
import math
import queue
import random
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.records import Chunk, digest
from torchtitan_diloco.islands.session import (
    NO_MESSAGE,
    RequestError,
    read_answer,
    stream_of,
    subject_of,
)
from torchtitan_diloco.islands.wire import ServerError, Wire

Bulk: TypeAlias = Literal["parts", "snapshots", "states"]
CHUNK_BYTES = 1_000_000  # by default, a server accepts messages of at most 1 MiB
UNDER_WAY = 8  # chunks that a stream has sent or asked for at a time: more than a TCP window holds
IDLE_SECONDS = 30.0  # seconds between two pings of a stream without chunks
SILENT_SECONDS = 2.0
"""Seconds without a packet after which a stream is replaced by a new one."""
GIVE_UP_SECONDS: dict[Bulk, float] = {"parts": math.inf, "snapshots": 120.0, "states": 120.0}
"""Seconds of refusals by the server after which a chunk is abandoned. Another island may have a
snapshot, but no other island has the parts."""
PAUSE, LONGEST_PAUSE = 0.1, 1.0  # seconds between attempts
URGENCY: dict[Bulk, int] = {"parts": 0, "states": 1, "snapshots": 2}
WAKE = (-1, 0, None)  # in the queue of jobs: look whether to end


class ClosedError(RuntimeError):
    """The connection is closed."""


class ChunkError(ValueError):
    """A chunk is no longer stored, does not have the size or hash in its record, or the server
    cannot store or return it for some time."""


@dataclass(eq=False)
class Job:
    """Store or fetch a chunk."""

    number: int  # the end of the subject of the answer, and the order of equally urgent jobs
    bulk: Bulk
    content: memoryview  # what to store, or where to write what is fetched
    kind: str  # subject in which it is stored
    sequence: int = 0  # number of a chunk to fetch, 0 to store one
    asks_leader: bool = False
    """Any replica answers the first request, which is fast. Only the leader of the stream knows
    that a message is gone."""
    failing_since: float = math.inf
    done: Future[int] = field(default_factory=Future)  # sequence number of the chunk

    @property
    def is_direct(self) -> bool:
        """Whether any replica is asked for the chunk."""
        return self.sequence > 0 and not self.asks_leader

    @property
    def place(self) -> tuple[int, int, "Job"]:
        """Position in the queue."""
        return URGENCY[self.bulk], self.number, self

    @property
    def corrupt(self) -> ChunkError:
        return ChunkError(f"chunk {self.sequence} of {self.bulk} is not the one recorded")

    def request(self, run: str) -> tuple[str, bytes | memoryview]:
        """Return the subject and the content of a message that stores or asks for the chunk."""
        if not self.sequence:
            return subject_of(run, self.kind), self.content
        call = "DIRECT.GET" if self.is_direct else "STREAM.MSG.GET"
        wanted = json.dumps({"seq": self.sequence}).encode()
        return f"$JS.API.{call}.{stream_of(run, self.bulk)}", wanted

    def read(self, status: int, raw: bytes) -> int:
        """Read an answer that is not the wanted chunk itself. Return the chunk's number."""
        if self.is_direct and not status:
            raise self.corrupt
        answer = read_answer(status, raw)
        if self.sequence:
            content = base64.b64decode(answer["message"].get("data", ""))
            if len(content) != len(self.content):
                raise self.corrupt
            self.content[:] = content
        return self.sequence or int(answer["seq"])

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # another thread was faster
            self.done.set_exception(error)


class Streams:
    """TCP streams to the server. Any thread may call the public methods, which wait."""

    def __init__(self, join: Join, name: str) -> None:
        """Starts without streams; see `grow`."""
        self.join, self._name = join, name
        self.jobs = queue.PriorityQueue[tuple[int, int, Job | None]]()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards all below, so that no job is added after the end
        self._open = weakref.WeakSet[Job]()
        self.failure: Exception | None = None
        self._threads = list[_Stream]()
        self._warned, self.stored = "", -math.inf  # when a chunk was last stored

    def grow(self, count: int) -> None:
        """Increase the number of streams to this one."""
        with self._lock:
            for number in range(len(self._threads), count if self.failure is None else 0):
                self._threads.append(_Stream(self, f"{self._name} {number}"))
                self._threads[-1].start()

    def store(self, payload: bytes | memoryview, bulk: Bulk, kind: str = "") -> tuple[Chunk, ...]:
        """Store a payload in chunks and wait until all are acknowledged.

        `kind`: subject, by default that of the stream. Raises ChunkError, but not for parts.
        """
        view = memoryview(payload).cast("B")
        pieces = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
        jobs = [self._add(bulk, piece, kind or bulk) for piece in pieces]
        hashes = [digest(piece) for piece in pieces]  # while they are sent
        return tuple(
            Chunk(job.done.result(), len(piece), found)
            for job, piece, found in zip(jobs, pieces, hashes, strict=True)
        )

    def fetch(self, chunks: Sequence[Chunk], bulk: Bulk) -> bytearray:
        """Return the payload in chunks. Raises ChunkError."""
        for chunk in chunks:
            if chunk.size > CHUNK_BYTES:
                raise ChunkError(
                    f"chunk {chunk.sequence} of {bulk} has an invalid size of {chunk.size} bytes"
                )
        payload, end, jobs = bytearray(sum(chunk.size for chunk in chunks)), 0, list[Job]()
        for chunk in chunks:
            room = memoryview(payload)[end : (end := end + chunk.size)]
            jobs.append(self._add(bulk, room, bulk, chunk.sequence))
        for job, chunk in zip(jobs, chunks, strict=True):
            job.done.result()
            if digest(job.content) != chunk.sha256:  # while others arrive
                raise job.corrupt
        return payload

    def _add(self, bulk: Bulk, content: memoryview, kind: str, sequence: int = 0) -> Job:
        job = Job(next(self._numbers), bulk, content, kind, sequence)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._open.add(job)
        self.jobs.put(job.place)
        return job

    def renew(self) -> None:
        """Reconnect the streams that wait for an answer while nothing arrives.

        The longer a link was cut, the later the kernel repeats what was lost.
        """
        for thread in self._threads:
            thread.renew()

    def fail(self, reason: Exception) -> None:
        """Raise this error in all current and later calls, and end the streams."""
        with self._lock:
            self.failure = self.failure or reason
        for job in list(self._open):
            job.fail(reason)
        for thread in self._threads:
            thread.end()

    def close(self) -> None:
        self.fail(ClosedError("the connection was closed"))

    def warn(self, text: str) -> None:
        """Warn once, until a chunk was stored or fetched again."""
        if text and text != self._warned:
            logger.warning(text)
        self._warned = text


class _Stream(threading.Thread):
    """Run jobs over one connection, which is reopened whenever it fails."""

    def __init__(self, streams: Streams, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._streams = streams
        self._wire: Wire | None = None
        self._under_way: dict[int, Job] = {}
        self._pause = PAUSE

    def run(self) -> None:
        join = self._streams.join
        for address in itertools.cycle(random.sample(join.addresses, len(join.addresses))):
            try:
                self._wire = Wire(join, address, self.name)
                while self._streams.failure is None:
                    self._ask()
                    self._hear()
            except Exception as error:  # a damaged server may send anything
                is_away = isinstance(error, OSError) and not isinstance(error, TimeoutError)
                if self._under_way and (not is_away or isinstance(error, ServerError)):
                    self._streams.warn(f"the server cannot store or return a chunk: {error}")
            if self._wire is not None:
                self._wire.close()
            for job in self._under_way.values():
                job.failing_since = math.inf
                self._streams.jobs.put(job.place)
            self._under_way.clear()
            if self._streams.failure is not None:
                return
            self._wait()

    def end(self) -> None:
        """Wake the thread, so that it notices that it should end."""
        self._streams.jobs.put(WAKE)
        if self._wire is not None:
            self._wire.close()

    def renew(self) -> None:
        wire = self._wire
        with suppress(OSError):  # it is closed
            if wire and self._under_way and wire.silent_seconds() > SILENT_SECONDS:
                wire.end()

    def _wait(self) -> None:
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _ask(self) -> None:
        """Send jobs while there are any and few are in flight. Wait for the first one."""
        assert self._wire is not None
        while len(self._under_way) < UNDER_WAY:
            try:
                _, number, job = self._streams.jobs.get(not self._under_way, IDLE_SECONDS)
            except queue.Empty:
                if self._under_way:
                    return
                self._wire.ping()
                continue
            if job is None:
                return
            if job.done.done():
                continue
            self._under_way[number] = job
            subject, content = job.request(self._streams.join.run)
            self._wire.publish(subject, content, number)

    def _hear(self) -> None:
        """Read the next answer. Finish its job, or return the job to the queue."""
        if not self._under_way:
            return
        assert self._wire is not None
        answer = self._wire.next_answer()
        job = self._under_way[answer.number]
        is_whole = job.is_direct and not answer.status and answer.size == len(job.content)
        if is_whole:
            self._wire.read(job.content)
            self._wire.read_end()
        raw = b"" if is_whole else self._wire.content(answer)
        del self._under_way[answer.number]
        try:
            sequence = job.sequence if is_whole else job.read(answer.status, raw)
        except ChunkError as error:
            job.fail(error)
        except RequestError as error:
            self._repeat(job, error)
        else:
            self._pause = PAUSE
            self._streams.warn("")
            if not job.sequence:
                self._streams.stored = time.monotonic()
            with suppress(InvalidStateError):
                job.done.set_result(sequence)

    def _repeat(self, job: Job, error: RequestError) -> None:
        """Repeat a job that the server has refused, or abandon it."""
        if error.code == NO_MESSAGE and not job.is_direct:
            job.fail(ChunkError(f"the server no longer has chunk {job.sequence} of {job.bulk}"))
            return
        if error.code == NO_MESSAGE:
            job.asks_leader = True
        else:
            text = f"{job.bulk}: the server cannot store or return a chunk: {error}"
            self._streams.warn(text)
            job.failing_since = min(job.failing_since, time.monotonic())
            if time.monotonic() - job.failing_since > GIVE_UP_SECONDS[job.bulk]:
                job.fail(ChunkError(text))
                return
            self._wait()
        self._streams.jobs.put(job.place)
