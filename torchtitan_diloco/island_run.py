"""Outer loop, data stream and clock of a worker that is an island, for the trainer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.telemetry import RunProgress
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.islands import IslandDiLoCo


class IslandRun:
    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        identity: Mapping[str, Any],
    ) -> None:
        """`identity`: data and tokenizer, which must be the same on all islands."""
        self._plan, self._apart = plan, config.data.shard_by == "random"
        samples = plan.tokens_per_step // config.workers // config.training.sequence_length
        self.outer = IslandDiLoCo(
            model,
            config.islands,
            config.diloco,
            total_tokens=plan.total_steps * plan.tokens_per_step,
            tokens_per_step=plan.tokens_per_step // config.workers,
            optimizer=optimizer,
            ranks=world.control,
            liveness=world.liveness,
            samples_per_step=samples,
            facts={**identity, **flat_settings(config.model, "model.")},
        )

    def join(self) -> tuple[int, Stream]:
        """Join the run. Return the first sample of this island, and its stream."""
        self.outer.join()
        seat = self.outer.seat
        return seat.position, Stream(seat.slot, seat.slots, 0 if self._apart else seat.block)

    def close(self) -> bool:
        """Disconnect. Return whether this island left before the end of the run."""
        left = self.outer.left
        self.outer.close()
        return left

    @property
    def step(self) -> float:
        """Next step of the run, counted by the tokens of all islands."""
        outer = self.outer
        return outer.clock * self._plan.total_steps / outer.seat.total_tokens + 1

    @property
    def progress(self) -> RunProgress:
        """Steps and tokens of all islands so far. At the end, the clock may exceed the total."""
        tokens = min(self.outer.clock, self.outer.seat.total_tokens)
        return RunProgress(self.step - 1, tokens)
