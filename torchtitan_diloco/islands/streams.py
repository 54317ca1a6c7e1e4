"""Connections of an island that carry chunks: as many as the link to the server needs."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from torchtitan_diloco.diloco.link import MOST_STREAMS, PINGS, SHORT_SECONDS, Speed, rate
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.session import Session, gather, subject_of
from torchtitan_diloco.log import logger

PATIENCE = 120.0
"""Seconds without an answer to a ping until a session is lost. Pings queue behind chunks, and links
may be slow."""
PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between attempts."""
FIRST_BYTES, MOST_BYTES = 2**14, 2**22
"""Bytes that a measurement sends at a time, twice as many after a prompt answer."""
MESSAGE = bytes(2**19)


class Streams:
    """Sessions that are used in turn. A lost one is replaced while another one is there."""

    def __init__(
        self,
        join: Join,
        name: str,
        count: int,
        in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`count`: their number, or 0 to find it by a measurement."""
        self._join, self._name, self.count = join, name, count
        self._in_background = in_background
        self._sessions, self._turn = list[Session](), 0

    def next(self) -> Session:
        """Return the next session, a lost one only if there is no other."""
        self._turn += 1
        there = [session for session in self._sessions if not session.is_lost] or self._sessions
        return there[self._turn % len(there)]

    async def open(self, address: str) -> Session:
        """Open one more session."""
        session = Session(PATIENCE)
        try:
            await session.open(self._join, address, f"{self._name} bulk")
        except BaseException:
            self._end(session)
            raise
        self._sessions.append(session)
        return session

    async def keep(self, address: str) -> Exception:
        """Keep `count` sessions open. Return why the last one was lost when none is left."""
        self._sessions = self._sessions[-1:]
        given = [*self._sessions, *[None] * (self.count - 1)]
        tasks = [asyncio.create_task(self._keep(address, session)) for session in given]
        try:
            (ended, *_), _ = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
            failure: Exception = ended.result()
            return failure
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        for session in self._sessions:
            self._end(session)
        self._sessions = self._sessions[-1:]  # for those who ask for it before the next is open

    async def _keep(self, address: str, session: Session | None) -> Exception:
        pause, said = PAUSE, ""
        while True:
            try:
                session = session or await self.open(address)
                pause = PAUSE
                await asyncio.wait([session.lost])
                reason = session.lost.result()
                if all(one.is_lost for one in self._sessions):
                    return reason
                self._sessions.remove(session)
                self._end(session)
            except Exception as error:  # a damaged server makes the client raise anything
                reason = error
            session = None
            if str(reason) != said:
                said = str(reason)
                logger.warning(f"a connection to the server was lost, others carry on: {said}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _end(self, session: Session) -> None:
        session.fail(ConnectionError("closed"))
        self._in_background(session.close())

    # --- measurement ------------------------------------------------------------------------------

    async def measure(self, address: str) -> None:
        """Set `count` to what the link needs, unless it is known, and say so."""
        if self.count:
            return
        try:
            speed = await self._speed(address)
        except Exception as error:
            self.count = 1
            logger.warning(
                f"the link to the server could not be measured ({error}): 1 stream; set "
                "diloco.link.streams if the link is long"
            )
        else:
            self.count = speed.streams
            logger.info(f"link to the server: {speed}, {self.count} stream{'s' * (self.count > 1)}")

    async def _speed(self, address: str) -> Speed:
        """Measure the round trip, and unless it is short the rate, with messages to nobody."""
        first, subject = self._sessions[-1], subject_of(self._join.run, "probe")
        round_trip = min([await self._send(first, subject, 0) for _ in range(PINGS)])
        if round_trip < SHORT_SECONDS:
            return Speed(round_trip)
        arrived = 0

        async def flood(session: Session) -> None:
            nonlocal arrived
            size = FIRST_BYTES
            while True:
                seconds = await self._send(session, subject, size)
                arrived += size
                if seconds < 2 * round_trip:  # otherwise it only waits longer
                    size = min(2 * size, MOST_BYTES)

        tasks = list[asyncio.Task[None]]()
        try:
            # Not the first one: nats-py does not survive a `flush` that is cancelled.
            others = await gather(self.open(address) for _ in range(MOST_STREAMS))
            for session in others * 2:  # while one waits for an answer, the other sends
                tasks.append(asyncio.create_task(flood(session)))
            return Speed(round_trip, await rate(lambda: arrived, round_trip))
        finally:
            for task in tasks:
                task.cancel()
            for session in [one for one in self._sessions if one is not first]:
                self._sessions.remove(session)
                self._end(session)

    @staticmethod
    async def _send(session: Session, subject: str, size: int) -> float:
        """Return the seconds until the server has received so many bytes."""
        started = time.perf_counter()
        for start in range(0, size, len(MESSAGE)):
            await session.client.publish(subject, MESSAGE[: size - start])
        await session.run(session.client.flush())
        return time.perf_counter() - started
