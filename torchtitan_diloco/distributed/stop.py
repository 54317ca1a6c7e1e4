"""SIGINT and SIGTERM end the run after a whole step, the same step on every rank."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from torchtitan_diloco.distributed.world import World


class StopRequest:
    """Ranks get a signal at different moments; one that left alone would keep the others waiting in a collective. So
    they ask each other, in the background: the answer to the question of one step is read at the end of the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._received: int | None = None
        self._asked = torch.zeros(1, dtype=torch.int32)
        self._answer: dist.Work | None = None
        self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received is not None:  # asked a second time: at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = number

    def agreed(self) -> bool:
        """Called by every rank once after each step: whether all of them stop here."""
        if self._world.control is None:
            return self._received is not None
        stop = False
        if self._answer is not None:
            self._answer.wait()
            stop = bool(self._asked.item())
        self._asked.fill_(int(self._received is not None))
        self._answer = dist.all_reduce(self._asked, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        return stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the signals back, and waits for the last question (which fails with the run, if that failed)."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._answer is not None and error is None:
            self._answer.wait()
