"""SIGINT, SIGTERM and SIGHUP end the run after a whole step, the same step on every rank."""

import os
import signal
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from torchtitan_diloco.distributed.roll_call import naming_lost_ranks
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.utils import STOP_SIGNALS, logger

SAME_REQUEST_SECONDS = 1.0
"""Schedulers and launchers pass a signal on, so one request may arrive more than once."""


class StopRequest:
    """Ranks get a signal at different moments; one that left alone would keep the others waiting in a collective. So
    they ask each other, in the background: the answer to the question of one step is read `lag` steps later. Workers that
    train on their own can be no further apart than that, and the question travels behind what they exchange: it is asked
    seldom."""

    def __init__(self, world: World, lag: int = 1, every: int = 1) -> None:
        """`every`: steps between two questions."""
        self._world, self._lag, self._every = world, lag, every
        self.waited_seconds = 0.0
        """For answers, so far."""
        self._save, self._told = False, False
        self._received: float | None = None
        """When the first signal came."""
        self._questions: deque[tuple[int, torch.Tensor, dist.Work]] = deque()
        """The step of each, and what comes back."""
        # nohup and background jobs of scripts ignore some signals on purpose.
        heard = [
            number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._handle) for number in heard}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if (
            self._received is not None and now - self._received > SAME_REQUEST_SECONDS
        ):  # asked again: at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received = self._received or now

    def agreed(self, step: int, save: bool = False) -> tuple[bool, bool]:
        """Called by every rank once after each step: whether all of them stop here, and whether all of them save because some
        rank has asked for it with `save`."""
        if self._world.control is None:
            return self._received is not None, save
        stop, saving = False, False
        if self._questions and self._questions[0][0] + self._lag <= step:
            _, answer, work = self._questions.popleft()
            started = time.perf_counter()
            with naming_lost_ranks(self._world, f"up to step {step}"):
                work.wait()
            self.waited_seconds += time.perf_counter() - started
            stop, saving = (bool(flag) for flag in answer.tolist())
        self._save |= save
        if step % self._every == 0:
            asked = torch.tensor(
                [int(self._received is not None), int(self._save)], dtype=torch.int32
            )
            with naming_lost_ranks(self._world, f"up to step {step}"):
                work = dist.all_reduce(
                    asked, dist.ReduceOp.MAX, group=self._world.control, async_op=True
                )
            self._questions.append((step, asked, work))
            self._save = False
            if self._received is not None and not self._told:
                logger.info(f"signal received: stops after step {step + self._lag}")
                self._told = True
        return stop, saving

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the signals back, and waits for the last questions (which fail with the run, if that failed)."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for _, _, work in self._questions if error is None else ():
            with naming_lost_ranks(self._world, "at the end"):
                work.wait()
