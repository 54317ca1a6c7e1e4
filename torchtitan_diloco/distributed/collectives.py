"""Agreement of all ranks on errors, small sums, and the step after which they stop or save."""

import math
import os
import signal
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.log import is_first_on_node, logger
from torchtitan_diloco.base.messages import TransferError, gather_objects, transfers
from torchtitan_diloco.base.process import SAME_SIGNAL_SECONDS, STOP_SIGNALS
from torchtitan_diloco.base.user import PeersLostError, UserError, cause_of
from torchtitan_diloco.config.schema import Run
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.distributed.notices import Notice, NoticeWatch
from torchtitan_diloco.distributed.world import World

Value = TypeVar("Value")
ASK_EVERY = 2
"""Steps between two reductions of workers that train independently, if steps are short. Each takes
time on the links."""
STEPS_APART = 6
"""Steps that workers that train independently may be apart before they wait for an answer, if steps
are short."""
FEWEST_STEPS_APART = 2
"""The same if steps are long, so that a stop does not come too late."""
SECONDS_APART = 4.0
"""Time that decides between the two: an answer is read after so many seconds of training."""
RECENT_ANSWERS = 3
"""Answers whose median is the usual time of a step: one of them may contain a pause."""


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


class Pending(ABC):
    """A collective of some numbers in the background, over a group of ranks, None for one rank.

    `where` completes the error message if ranks are lost during it.
    """

    def __init__(
        self,
        world: World,
        values: Sequence[float],
        where: str,
        *,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._values = torch.tensor(values, dtype=torch.float64)
        self._world = world
        self._where = where
        self._work: dist.Work | None = None
        if group is not None and values:
            with naming_lost_ranks(world, where), transfers():
                self._work = self._start(group)

    @abstractmethod
    def _start(self, group: dist.ProcessGroup) -> dist.Work: ...

    @property
    def is_complete(self) -> bool:
        return self._work is None or self._work.is_completed()

    def _wait(self) -> None:
        if self._work is not None:
            with naming_lost_ranks(self._world, self._where):
                self._world.liveness.wait_for(
                    self._work.get_future(), onlooker=self._world.reports.waiting
                )
                with transfers():
                    self._work.wait()  # raises its error


class PendingSum(Pending):
    """Element-wise sum over all ranks, exact for counts up to 2**53."""

    _operation = dist.ReduceOp.SUM

    def __init__(self, world: World, values: Sequence[float], where: str) -> None:
        super().__init__(world, values, where, group=world.control)

    def _start(self, group: dist.ProcessGroup) -> dist.Work:
        work: dist.Work = dist.all_reduce(self._values, self._operation, group=group, async_op=True)
        return work

    def result(self) -> list[float]:
        """Wait for the reduced values and return them."""
        self._wait()
        values: list[float] = self._values.tolist()
        return values


class PendingMax(PendingSum):
    """Element-wise maximum over all ranks."""

    _operation = dist.ReduceOp.MAX


class PendingRows(Pending):
    """The numbers of each rank of this worker."""

    def __init__(self, world: World, values: Sequence[float], where: str) -> None:
        self._rows: list[Tensor] = []
        super().__init__(world, values, where, group=world.in_worker)

    def _start(self, group: dist.ProcessGroup) -> dist.Work:
        self._rows = [torch.empty_like(self._values) for _ in range(group.size())]
        work: dist.Work = dist.all_gather(self._rows, self._values, group=group, async_op=True)
        return work

    def result(self) -> list[list[float]]:
        """Wait for the numbers and return them by rank in the worker."""
        self._wait()
        return [row.tolist() for row in self._rows or [self._values]]


class RanksLostError(PeersLostError):
    """Ranks died, or did not answer within the timeout."""


@contextmanager
def naming_lost_ranks(world: World, where: str) -> Iterator[None]:
    """Convert an error of the body that says that a rank is lost into one that names the rank.

    Others, such as a full memory or a bug, are raised as they are.
    """
    try:
        yield
    except WorkerLostError as error:
        raise WorkerLostError(error.workers, f"{error.reason}; seen {where}") from error
    except TransferError as error:
        lost = [
            f"rank {rank} (worker {rank // world.ranks_per_worker}: {reason})"
            for rank, reason in world.liveness.lost_ranks().items()
        ]
        names = " and ".join(lost) or "some rank"
        raise RanksLostError(
            f"{names} left or did not answer in time {where} ({cause_of(error)})"
        ) from error


# --- stopping and saving --------------------------------------------------------------------------


def longest_lag(world: World, diloco: DiLoCoConfig) -> int:
    """Return the most steps between asking the other ranks and reading the answer, so that workers
    that train independently do not have to wait for it."""
    if world.control is None:
        return 0
    if diloco.method == "none" or world.workers == 1:
        return 1
    return max(STEPS_APART, diloco.overlap.delay)


def lag_in_steps(step_seconds: float, longest: int) -> int:
    """Return the steps between asking and reading the answer, for steps of this duration."""
    steps = math.ceil(SECONDS_APART / max(step_seconds, 1e-3))
    return min(longest, max(FEWEST_STEPS_APART, steps))


class Requests(NamedTuple):
    """Requests that all ranks have agreed on after a step."""

    stop: bool
    save: bool


class Asked(NamedTuple):
    """What a rank asks and tells the others, before the numbers of the log line."""

    stop: float = 0.0
    """Whether it asks to stop. The sum counts the ranks that do."""
    save: float = 0.0
    """Whether it asks to save."""
    step_seconds: float = 0.0
    """Its time for a step."""


class Question(NamedTuple):
    """A sum over all ranks that may not be there yet."""

    asked_at: int
    """Step after which it was asked."""
    due: int
    """Step after which all ranks read the answer."""
    answer: PendingSum


class StopRequest:
    """Agreement of all ranks to stop on one of STOP_SIGNALS, or on a notice that a machine is taken
    away, or to save, after the same step.

    Signals reach ranks at different moments, and a rank that stops alone leaves the others waiting
    in a collective. So the ranks ask each other in the background and read the answer some steps
    later: at most `longest_lag`, fewer if steps are long. They derive the number from the same
    sums, which also carry the numbers of the log line. A second signal ends the process at once.
    """

    def __init__(self, world: World, longest_lag: int = 1) -> None:
        # A signal ends a rank that is not here yet. The others, which would miss it, wait here,
        # where the same signal ends them, too.
        PendingSum(world, [1.0], "at the start").result()
        self._world = world
        self._longest_lag = longest_lag
        self._lag = lag_in_steps(math.inf, longest_lag)  # until the time of a step is known
        self._recent = deque[float](maxlen=RECENT_ANSWERS)  # time of a step, mean over ranks
        self._steps = 0  # since the last question
        self._since = time.perf_counter()
        self.waited_seconds = 0.0  # of the training thread, for answers
        self._save = False  # asked for, and not yet passed on to the other ranks
        self._announced = False  # whether the other ranks were told that this one wants to stop
        self._received: float | None = None  # time of the first signal
        self._noticed = False  # a signal after a notice is the first one
        self._any_stops = False  # whether an answer says that a rank wants to stop
        self._end_of_machine = math.inf
        self._questions = deque[Question]()  # those that are not read yet
        self._latest: Question | None = None
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
        time_left = "" if notice.seconds is None else f", {notice.seconds:.0f} s left"
        then = "the run saves and stops" if notice.stops else "the run saves and continues"
        logger.warning(f"notice: {notice.what}{time_left}: {then}")
        if notice.seconds is not None:
            self._end_of_machine = time.monotonic() + notice.seconds
        if notice.stops:
            self._noticed = True
        else:
            self._save = True

    @property
    def got_signal(self) -> bool:
        """Whether this rank got a signal to stop."""
        return self._received is not None

    @property
    def knows_of_stop(self) -> bool:
        """Whether this rank got a signal or a notice to stop, or knows that another one got one
        before the last question. Others may know of later ones."""
        return self.got_signal or self._noticed or self._any_stops

    @property
    def seconds_left(self) -> float:
        """Seconds until this machine is taken away, or infinity if unknown."""
        return max(0.0, self._end_of_machine - time.monotonic())

    @property
    def _every(self) -> int:
        """Steps between two questions."""
        return 1 if self._lag <= FEWEST_STEPS_APART else ASK_EVERY

    @property
    def steps_to_stop(self) -> int:
        """Steps that a signal or a notice may have to wait for."""
        return self._every + self._lag

    @property
    def step_seconds(self) -> float:
        """Usual time of a step, mean over ranks, 0 as long as it is not known."""
        is_known = len(self._recent) == RECENT_ANSWERS
        return statistics.median(self._recent) if is_known else 0.0

    def agreed(self, step: int, numbers: Sequence[float] = (), *, save: bool = False) -> Requests:
        """Return the action of all ranks after this step; `save` asks them to save soon. Each rank
        calls this once after each step. `numbers`: as in `ask`."""
        self._save |= save
        self._steps += 1
        if step % self._every == 0:
            self.ask(step, numbers)
        # All ranks have asked the same questions, and read each answer after the same step. As the
        # lag follows from the answers, it is the same on all ranks, too.
        stops = 0.0
        saves = 0.0
        while self._questions and step >= self._questions[0].due:
            started = time.perf_counter()
            asked = self._answer(self._questions.popleft())
            self.waited_seconds += time.perf_counter() - started
            stops += asked.stop
            saves += asked.save
            self._recent.append(asked.step_seconds / self._world.size)
            self._lag = lag_in_steps(statistics.median(self._recent), self._longest_lag)
        return Requests(stop=stops > 0, save=saves > 0)

    def _answer(self, question: Question) -> Asked:
        """Wait for the sums over all ranks of what they ask."""
        asked = Asked(*question.answer.result()[: len(Asked._fields)])
        self._any_stops |= asked.stop > 0
        return asked

    def ask(self, step: int, numbers: Sequence[float]) -> PendingSum:
        """Return the sum over all ranks of `Asked` and the numbers after this step, which may
        already have been started."""
        if self._latest is not None and self._latest.asked_at == step:
            return self._latest.answer
        now = time.perf_counter()
        stop = self._noticed or self.got_signal
        asked = Asked(
            stop=float(stop),
            save=float(self._save),
            step_seconds=(now - self._since) / max(1, self._steps),
        )
        self._save = False
        # Not before those that were asked earlier, with a longer lag.
        due = max([step + self._lag, *(question.due for question in self._questions)])
        answer = PendingSum(self._world, [*asked, *numbers], f"up to step {step}")
        self._latest = Question(asked_at=step, due=due, answer=answer)
        self._questions.append(self._latest)
        if stop and not self._announced and due > step:
            reason = "signal received" if self.got_signal else "noticed"
            logger.info(f"{reason}: the run stops after step {due}")
        self._announced = stop
        self._steps = 0
        self._since = now
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        """Restore the signal handlers, and wait for pending reductions unless the run has
        failed."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if error is None:
            for question in self._questions:
                self._answer(question)


def watch_notices(config: Run, stop: StopRequest) -> NoticeWatch:
    """Return a watch of this node, on its first rank: the others learn of a notice by agreement."""
    cloud = config.preemption if is_first_on_node() else "none"
    return NoticeWatch(cloud, config.preemption_address, stop.note)
