"""Course of a worker that is an island, given by the tokens of all islands."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchtitan_diloco.components.checkpoint_folder import Manifest
from torchtitan_diloco.components.run_data import Position, RunData
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import RunProgress
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.course import Place
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.diloco.peers import Peers
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.islands import IslandPeers
from torchtitan_diloco.islands.config import location_id
from torchtitan_diloco.islands.founding import JobCheckpoint


class IslandCourse:
    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        world: World,
        *,
        manifest: Manifest | None,
        data: RunData,
        tokenizer: str,
    ) -> None:
        """`manifest`: of the checkpoint from which this island starts. `tokenizer`: fingerprint."""
        self.run = location_id(config.islands.join)
        self.step = 0 if manifest is None else manifest.step
        self._first_step = self.step
        self._plan = plan
        self._shard_by = config.data.shard_by
        self._validated: tuple[int, float, float] | None = None
        tokens = plan.tokens_per_step // config.workers
        samples = tokens // config.training.sequence_length
        self._peers = IslandPeers(
            replace(config.islands, sync=False),  # the launcher runs it
            total_tokens=plan.total_steps * plan.tokens_per_step,
            tokens_per_step=tokens,
            samples_per_step=samples,
            ranks=world.control,
            liveness=world.liveness,
            facts={
                **data.common_facts,
                "tokenizer": tokenizer,
                **flat_settings(config.model, "model."),
            },
            corpus=data.own_digest,
            phases=[phase.start for phase in config.data.phases],
            job=job_checkpoint(config, plan, manifest, data, block=samples),
        )

    def build_peers(self) -> Peers:
        return self._peers

    def join(self, _: Position, /) -> Place:
        """Take a slot. The run says where it starts, and not a checkpoint."""
        seat = self._peers.join()
        block = seat.block if self._shard_by == "none" else 0
        stream = Stream(seat.slot, seat.streams, block)
        return Place(seat.position, Position(), stream, self.entered)

    @property
    def scheduled_step(self) -> float:
        return self._steps + 1

    @property
    def _steps(self) -> float:
        """Steps of the run so far, counted by the tokens of all islands."""
        return self._peers.clock * self._plan.total_steps / self._peers.total_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all islands so far. At the end, their clock may exceed the total."""
        return min(self._peers.clock, self._peers.total_tokens)

    @property
    def share(self) -> float:
        return self._peers.reports.progress

    @property
    def entered(self) -> Sequence[int]:
        return self._peers.entered

    @property
    def progress(self) -> RunProgress:
        return RunProgress(self._steps, self.tokens)

    @property
    def finished(self) -> bool:
        return self._peers.finished

    @property
    def has_left(self) -> bool:
        return self._peers.left

    @property
    def took_end(self) -> bool:
        is_over = self.finished and not self.has_left
        return is_over and self.step == self._first_step and self._peers.took_copies

    def leave_when(self, is_asked: Callable[[], bool], /) -> None:
        self._peers.is_asked_to_leave = is_asked

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None:
        """Put the losses into the notes of this island."""
        gauges = self._peers.gauges
        gauges.loss = loss
        if validated is not None and validated != self._validated:
            gauges.validated = self.tokens, validated[1]
        self._validated = validated

    def close(self) -> bool:
        has_left = self._peers.left
        self._peers.close()
        return has_left

    def describe_stop(self, _: str, /) -> str:
        return f"left the run after its own step {self.step}"


def job_checkpoint(
    config: Config, plan: RunPlan, manifest: Manifest | None, data: RunData, block: int
) -> JobCheckpoint | None:
    """Return what a run can be founded from, or None without the checkpoint of a job.

    `block`: consecutive samples of a slot in the order that all share.
    """
    if manifest is None or (manifest.outer is not None and manifest.outer.island):
        return None
    slots = config.islands.slots or config.workers

    def in_slot(position: int) -> int:
        if config.data.shard_by != "none":
            return position
        # Slots take turns of a block in the order of the job. They begin with the first turn of all
        # of them of which the job has read nothing.
        return -(-position // (slots * block)) * block

    position = data.position.samples
    starts = [in_slot(start) for start in data.starts_in_run(plan) if start <= position]
    return JobCheckpoint(manifest.tokens, in_slot(position), starts)
