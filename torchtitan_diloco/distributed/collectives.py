"""Agreement of all ranks on errors, small sums, and the step after which they stop or save."""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from torchtitan_diloco.config.schema import Run
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.messages import gather_objects
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.distributed.notices import Notice, NoticeWatch
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import logger
from torchtitan_diloco.process import SAME_SIGNAL_SECONDS, STOP_SIGNALS
from torchtitan_diloco.user import PeersLostError, UserError, cause_of

Value = TypeVar("Value")
ASK_EVERY = 2
"""Steps between two reductions of workers that train independently. Each takes time on the
links."""
STEPS_APART = 6
"""Steps that workers that train independently may be apart before they wait for an answer."""


def on_all_ranks(group: dist.ProcessGroup | None, task: Callable[[], Value]) -> Value:
    """Run `task` on every rank and return its result. If a rank gets a ValueError or OSError, raise
    it there, with its traceback, and as a ValueError on the others."""
    try:
        value = task()
    except (ValueError, OSError) as error:
        gather_objects(str(error) or repr(error), group)
        raise
    for rank, mistake in enumerate(gather_objects("", group)):
        if mistake:
            raise UserError(f"{mistake} (on rank {rank})")
    return value


class PendingSum:
    """Element-wise sum over all ranks in the background, exact for counts up to 2**53.

    `where` completes the error message if ranks are lost during the reduction.
    """

    def __init__(self, world: World, values: Sequence[float], where: str) -> None:
        self._values = torch.tensor(values, dtype=torch.float64)
        self._world = world
        self._where = where
        self._work = None
        if world.control is not None and values:
            with naming_lost_ranks(world, where):
                self._work = dist.all_reduce(self._values, group=world.control, async_op=True)

    @property
    def is_complete(self) -> bool:
        return self._work is None or self._work.is_completed()

    def result(self) -> list[float]:
        """Wait for the reduced values and return them."""
        if self._work is not None:
            with naming_lost_ranks(self._world, self._where):
                self._world.liveness.wait_for(self._work.get_future(), onlooker=self._world.witness)
                self._work.wait()  # raises its error
        values: list[float] = self._values.tolist()
        return values


class RanksLostError(PeersLostError):
    """Ranks died, or did not answer within the timeout."""


@contextmanager
def naming_lost_ranks(world: World, where: str) -> Iterator[None]:
    """Convert a failure of the body, which waits for all ranks, into one that names the lost
    rank."""
    try:
        yield
    except WorkerLostError as error:
        raise WorkerLostError(error.workers, f"{error.reason}; seen {where}") from error
    except RuntimeError as error:
        if world.control is None:
            raise
        lost = [
            f"rank {rank} (worker {rank // world.ranks_per_worker}: {reason})"
            for rank, reason in world.liveness.lost_ranks().items()
        ]
        names = " and ".join(lost) or "some rank"
        raise RanksLostError(
            f"{names} left or did not answer in time {where} ({cause_of(error)})"
        ) from error


# --- stopping and saving --------------------------------------------------------------------------


def answer_lag(world: World, diloco: DiLoCoConfig) -> int:
    """Return the steps between asking the other ranks and reading the answer, so that workers that
    train independently do not have to wait for it."""
    if world.control is None:
        return 0
    if diloco.method == "none" or world.workers == 1:
        return 1
    return max(STEPS_APART, diloco.overlap.delay)


class Requests(NamedTuple):
    """Requests that all ranks have agreed on after a step."""

    stop: bool
    save: bool


class StopRequest:
    """Agreement of all ranks to stop on one of STOP_SIGNALS, or on a notice that a machine is taken
    away, or to save, after the same step.

    Signals reach ranks at different moments, and a rank that stops alone leaves the others waiting
    in a collective. So the ranks ask each other in the background and read the answer `lag` steps
    later. The same small sum carries the numbers of the log line. A second signal ends the process
    at once.
    """

    def __init__(self, world: World, lag: int = 1) -> None:
        self._world = world
        self._lag = lag
        self._every = 1 if lag <= 1 else ASK_EVERY
        self.waited_seconds = 0.0  # of the training thread, for answers
        self._save = False  # asked for, and not yet passed on to the other ranks
        self._announced = False  # whether the other ranks were told that this one wants to stop
        self._received: float | None = None  # time of the first signal
        self._noticed = False  # a signal after a notice is the first one
        self._end_of_machine = math.inf
        self._questions: deque[tuple[int, PendingSum]] = deque()  # open ones, by their step
        self._latest: tuple[int, PendingSum] | None = None
        # nohup and background jobs of scripts ignore some signals on purpose.
        handled = [
            number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._handle) for number in handled}

    def _handle(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received = now
        elif now - self._received > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def note(self, notice: Notice) -> None:
        """Stop, or save, on a notice about this machine. Any thread may call this."""
        left = "" if notice.seconds is None else f", {notice.seconds:.0f} s left"
        then = "the run saves and stops" if notice.stops else "the run saves and continues"
        logger.warning(f"notice: {notice.what}{left}: {then}")
        if notice.seconds is not None:
            self._end_of_machine = time.monotonic() + notice.seconds
        if notice.stops:
            self._noticed = True
        else:
            self._save = True

    @property
    def only_noticed(self) -> bool:
        """Whether this rank got a notice and no signal, of which the launcher would know."""
        return self._noticed and self._received is None

    @property
    def seconds_left(self) -> float:
        """Seconds until this machine is taken away, or infinity if unknown."""
        return max(0.0, self._end_of_machine - time.monotonic())

    def agreed(self, step: int, numbers: Sequence[float] = (), *, save: bool = False) -> Requests:
        """Return the action of all ranks after this step; `save` asks them to save soon. Each rank
        calls this once after each step. `numbers`: as in `ask`."""
        self._save |= save
        if step % self._every == 0:
            self.ask(step, numbers)
        # All ranks have the same questions open, and each reads the answer to one `lag` steps after
        # it was asked. So all read the same answer after the same step.
        if not self._questions:
            return Requests(stop=False, save=False)
        asked_at, answer = self._questions[0]
        if step < asked_at + self._lag:
            return Requests(stop=False, save=False)
        self._questions.popleft()
        started = time.perf_counter()
        stops, saves, *_ = answer.result()  # how many ranks ask for it
        self.waited_seconds += time.perf_counter() - started
        return Requests(stop=stops > 0, save=saves > 0)

    def ask(self, step: int, numbers: Sequence[float]) -> PendingSum:
        """Return the sum over all ranks of both requests and the numbers after this step, which may
        already have been started."""
        if self._latest is None or self._latest[0] != step:
            stop = self._noticed or self._received is not None
            values = [float(stop), float(self._save), *numbers]
            self._latest = (step, PendingSum(self._world, values, f"up to step {step}"))
            self._questions.append(self._latest)
            if stop and not self._announced and self._lag:
                asked = "signal received" if self._received is not None else "noticed"
                logger.info(f"{asked}: the run stops after step {step + self._lag}")
            self._save = False
            self._announced = stop
        return self._latest[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        """Restore the signal handlers, and wait for pending reductions unless the run has
        failed."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is None:
            for _, question in self._questions:
                question.result()


def watch_notices(config: Run, stop: StopRequest) -> NoticeWatch:
    """Return a watch of this node, on its first rank: the others learn of a notice by agreement."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    cloud = config.preemption if first else "none"
    return NoticeWatch(cloud, config.preemption_address, stop.note)
