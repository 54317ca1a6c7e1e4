"""Peers, data stream and clock of a worker that is an island, for the trainer."""

from collections.abc import Mapping
from typing import Any

from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import RunProgress
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.islands import IslandPeers
from torchtitan_diloco.islands.config import Join


class IslandRun:
    def __init__(
        self, config: Config, plan: RunPlan, world: World, identity: Mapping[str, Any]
    ) -> None:
        """`identity`: data and tokenizer, which must be the same on all islands."""
        self._plan, self._shard_by = plan, config.data.shard_by
        self._validated: tuple[int, float, float] | None = None
        self.run = Join.parse(config.islands.join).run
        tokens = plan.tokens_per_step // config.workers
        self.peers = IslandPeers(
            config.islands,
            total_tokens=plan.total_steps * plan.tokens_per_step,
            tokens_per_step=tokens,
            samples_per_step=tokens // config.training.sequence_length,
            ranks=world.control,
            liveness=world.liveness,
            facts={**identity, **flat_settings(config.model, "model.")},
        )

    def join(self) -> tuple[int, Stream]:
        """Join the run. Return the first sample of this island, and its stream."""
        seat = self.peers.join()
        block = seat.block if self._shard_by == "none" else 0
        return seat.position, Stream(seat.slot, seat.streams, block)

    def note(self, loss: float | None, validated: tuple[int, float, float] | None) -> None:
        """Note for heartbeats the training loss, and step and loss of the last validation."""
        gauges, before = self.peers.gauges, self._validated
        gauges.loss, self._validated = loss, validated
        if validated is not None and validated != before:
            gauges.validated = self.progress.tokens, validated[1]

    def close(self) -> bool:
        """Disconnect. Return whether this island left before the end of the run."""
        left = self.peers.left
        self.peers.close()
        return left

    @property
    def step(self) -> float:
        """Next step of the run, counted by the tokens of all islands."""
        peers = self.peers
        return peers.clock * self._plan.total_steps / peers.total_tokens + 1

    @property
    def progress(self) -> RunProgress:
        """Steps and tokens of all islands so far. At the end, the clock may exceed the total."""
        tokens = min(self.peers.clock, self.peers.total_tokens)
        return RunProgress(self.step - 1, tokens)
