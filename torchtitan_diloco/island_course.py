"""Course of a worker that is an island, given by the tokens of all islands."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtitan_diloco.components.run_data import Position
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import RunProgress
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.course import Place
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.diloco.peers import Peers
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.islands import IslandPeers
from torchtitan_diloco.islands.config import is_location, run_of
from torchtitan_diloco.islands.store_peers import StorePeers


class IslandCourse:
    def __init__(
        self, config: Config, plan: RunPlan, world: World, step: int, identity: Mapping[str, Any]
    ) -> None:
        """`identity`: data and tokenizer, which must be the same on all islands."""
        self.run = run_of(config.islands.join)
        self.step = step
        self._plan = plan
        self._shard_by = config.data.shard_by
        self._validated: tuple[int, float, float] | None = None
        tokens = plan.tokens_per_step // config.workers
        kind = StorePeers if is_location(config.islands.join) else IslandPeers
        self._peers: StorePeers | IslandPeers = kind(
            replace(config.islands, sync=False),  # the launcher runs it
            total_tokens=plan.total_steps * plan.tokens_per_step,
            tokens_per_step=tokens,
            samples_per_step=tokens // config.training.sequence_length,
            ranks=world.control,
            liveness=world.liveness,
            facts={**identity, **flat_settings(config.model, "model.")},
        )

    def build_peers(self) -> Peers:
        return self._peers

    def join(self, _: Position, /) -> Place:
        """Take a slot. Its start is in the log of the run, not in a checkpoint."""
        seat = self._peers.join()
        block = seat.block if self._shard_by == "none" else 0
        return Place(seat.position, Position(), Stream(seat.slot, seat.streams, block))

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
    def progress(self) -> RunProgress:
        return RunProgress(self._steps, self.tokens)

    @property
    def finished(self) -> bool:
        return self._peers.finished

    @property
    def has_left(self) -> bool:
        return self._peers.left

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None:
        """Put the losses into the heartbeats of this island."""
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
