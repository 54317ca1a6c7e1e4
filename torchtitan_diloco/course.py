"""Position of a run: the step of its schedules, its tokens, the data of a worker, and the end.

A job counts its own steps (`JobCourse`). Islands count the tokens of all islands together
(`IslandCourse`, island_course.py). The trainer uses its course without knowing its kind.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torchtitan_diloco.components.checkpoint_folder import Manifest
from torchtitan_diloco.components.run_data import Position
from torchtitan_diloco.components.run_plan import Counted, RunPlan
from torchtitan_diloco.components.telemetry import RunProgress
from torchtitan_diloco.config import Config
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.peers import Peers
from torchtitan_diloco.distributed.world import WORKER, World


class Place(NamedTuple):
    """Position at which a worker starts to read."""

    first_sample: int
    """Position in its stream."""
    planned_from: Position
    """Position from which the segments of the mixture are planned."""
    stream: Stream | None
    """The stream that the ranks of this worker share. None: all ranks share the only one."""
    entered: Sequence[int] | None = None
    """Positions at which the stream has entered phases of the data. None: they follow from the
    plan."""


class Course(Protocol):
    run: str
    """Id of the run that islands share; empty for a job."""
    step: int
    """Inner steps of this worker so far. The trainer counts them."""

    def build_peers(self) -> Peers:
        """Return the other side of the outer loop."""

    def join(self, position: Position, /) -> Place:
        """Join the run, and return the position at which this worker starts to read.

        `position`: position in its checkpoint.
        """

    @property
    def scheduled_step(self) -> float:
        """Place of the current step in a schedule of `RunPlan.schedule_steps` steps."""

    @property
    def tokens(self) -> int:
        """Tokens of the whole run so far."""

    @property
    def share(self) -> float:
        """Completed share of the run."""

    @property
    def entered(self) -> Sequence[int]:
        """Positions at which the stream of this worker has entered phases of the data. Empty if
        they follow from the plan."""

    @property
    def progress(self) -> RunProgress | None:
        """Progress of the run, unless it equals the steps of this worker."""

    @property
    def finished(self) -> bool:
        """Whether all tokens of the run have been trained, or this worker was asked to leave."""

    @property
    def has_left(self) -> bool:
        """Whether this worker leaves the run before its end, or has left it."""

    @property
    def took_end(self) -> bool:
        """Whether the run had ended before this worker took a step, and it has taken a final model
        that is in no checkpoint of it."""

    def leave_when(self, is_asked: Callable[[], bool], /) -> None:
        """Leave the run if `is_asked()` is true while a step waits for other workers.

        Between two steps, the trainer stops all ranks of this worker.
        """

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None:
        """Record the training loss, and step, loss and bits of the last validation."""

    def close(self) -> bool:
        """End the course. Return whether this worker ended before the end of the run."""

    def describe_stop(self, reason: str, /) -> str:
        """Describe where this worker has stopped. `reason`: why it was asked to stop."""


class JobCourse:
    """The course of workers that train the same steps together."""

    run = ""
    progress = None
    entered: Sequence[int] = ()
    has_left = False
    took_end = False

    def __init__(self, config: Config, plan: RunPlan, world: World) -> None:
        self._config = config
        self._plan = plan
        self._world = world
        self.step = plan.start_step

    def build_peers(self) -> Peers:
        world = self._world
        return GlooPeers(
            world.group(WORKER),
            shard_group=world.shards,
            reports=world.reports,
            total_steps=self._plan.schedule_steps,
            scheduled_step=self._plan.scheduled_step,
            step_at=self._plan.step_at,
            seed=self._config.run.seed,
            streams=world.streams,
        )

    def join(self, position: Position, /) -> Place:
        has_streams = self._config.data.shard_by != "none"
        stream = Stream(self._world.worker, self._world.workers) if has_streams else None
        return Place(position.samples, position, stream)

    @property
    def scheduled_step(self) -> float:
        return self._plan.scheduled_step(self.step)

    @property
    def tokens(self) -> int:
        return self._plan.tokens_at(self.step)

    @property
    def share(self) -> float:
        return self.tokens / self._plan.tokens_at(self._plan.total_steps)

    @property
    def finished(self) -> bool:
        return self.step == self._plan.total_steps

    def leave_when(self, is_asked: Callable[[], bool], /) -> None:
        """Do nothing, as workers of a job stop together (`StopRequest`)."""

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None: ...

    def close(self) -> bool:
        return not self.finished

    def describe_stop(self, reason: str, /) -> str:
        return f"stopped after step {self.step} of {self._plan.total_steps}, as asked by {reason}"


def counted_before(config: Config, manifest: Manifest | None) -> Counted:
    """Return what a run has counted up to its checkpoint. Islands count in their log."""
    if manifest is None or config.islands.join:
        return Counted()
    return Counted(
        manifest.step,
        manifest.tokens,
        manifest.schedule_tokens,
        ended_beginning=0 if manifest.outer is None else manifest.outer.ended_beginning,
    )
