"""Where a run is: the step of its schedules, its tokens, what a worker reads, and when it is over.

A job counts its own steps (`JobCourse`). Islands count the tokens of all of them together
(`IslandCourse`, island_course.py). The trainer asks its course and does not know which it has.
"""

from typing import NamedTuple, Protocol

from torchtitan_diloco.components.checkpoint import Manifest
from torchtitan_diloco.components.run_data import Position
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import RunProgress
from torchtitan_diloco.config import Config
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.peers import Peers
from torchtitan_diloco.distributed.world import WORKER, World


class Place(NamedTuple):
    """Where a worker begins to read."""

    first_sample: int
    """Of its stream."""
    planned_from: Position
    """Position from which the segments of the mixture are planned."""
    stream: Stream | None
    """The stream that the ranks of this worker divide. None: all ranks divide the only one."""


class Course(Protocol):
    run: str
    """Id of the run that islands share; empty for a job."""
    step: int
    """Inner steps of this worker so far. The trainer counts them."""

    def build_peers(self) -> Peers:
        """Return the other side of the outer loop."""

    def join(self, position: Position, /) -> Place:
        """Join the run, and return where this worker begins to read.

        `position`: where its checkpoint has stopped.
        """

    @property
    def scheduled_step(self) -> float:
        """Step of the run that is trained now, for the schedule of the learning rate."""

    @property
    def tokens(self) -> int:
        """Tokens of the whole run so far."""

    @property
    def progress(self) -> RunProgress | None:
        """Progress of the run, unless the steps of this worker say all."""

    @property
    def finished(self) -> bool:
        """Whether all tokens of the run have been trained, or this worker was asked to leave."""

    @property
    def has_left(self) -> bool:
        """Whether this worker leaves the run before its end, or has left it."""

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None:
        """Take note of the training loss, and of step, loss and bits of the last validation."""

    def close(self) -> bool:
        """End the course. Return whether it ended here before the end of the run."""

    def describe_stop(self, reason: str, /) -> str:
        """Say where this worker has stopped. `reason`: what asked for it."""


class JobCourse:
    """The course of workers that train the same steps together."""

    run = ""
    progress = None
    has_left = False

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
            witness=world.witness,
            total_steps=self._plan.total_steps,
            seed=self._config.run.seed,
            streams=world.streams,
        )

    def join(self, position: Position, /) -> Place:
        has_streams = self._config.data.shard_by != "none"
        stream = Stream(self._world.worker, self._world.workers) if has_streams else None
        return Place(position.samples, position, stream)

    @property
    def scheduled_step(self) -> float:
        return self.step

    @property
    def tokens(self) -> int:
        return self._plan.tokens_at(self.step)

    @property
    def finished(self) -> bool:
        return self.step == self._plan.total_steps

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None: ...

    def close(self) -> bool:
        return not self.finished

    def describe_stop(self, reason: str, /) -> str:
        return f"stopped after step {self.step} of {self._plan.total_steps}, as asked by {reason}"


def counted_before(config: Config, manifest: Manifest | None) -> tuple[int, int]:
    """Return the steps and the tokens of a run up to its checkpoint, which its plan goes on from.

    Those of islands are counted in their log.
    """
    if manifest is None or config.islands.join:
        return 0, 0
    return manifest.step, manifest.tokens
