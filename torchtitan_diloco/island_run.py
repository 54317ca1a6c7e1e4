"""A worker that is an island, as the trainer sees it: its outer loop, its data and its clock."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.config import Config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.data.shards import TokenArray
from torchtitan_diloco.data.worker_shards import WorkerShards
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
        """`identity`: what a position in the data refers to, the same on all islands."""
        self._plan, self._workers = plan, config.workers
        facts = {**identity, **flat_settings(config.model, "model.")}
        samples = plan.tokens_per_step // self._workers // config.training.sequence_length
        self.outer = IslandDiLoCo(
            model,
            config.islands,
            config.diloco,
            total_tokens=plan.total_steps * plan.tokens_per_step,
            optimizer=optimizer,
            ranks=world.control,
            liveness=world.liveness,
            samples_per_step=samples,
            facts={key: str(value) for key, value in facts.items()},
        )

    def join(self, parts: Sequence[TokenArray]) -> tuple[Sequence[TokenArray], int, Stream | None]:
        """Join the run; return the tokens of this island, and where and how it reads them."""
        self.outer.join()
        seat = self.outer.seat
        if len(parts) > 1:  # each slot has documents of its own
            return parts[seat.slot : seat.slot + 1], seat.position, None
        return parts, seat.position, Stream(seat.slot, seat.slots, seat.block)

    def close(self) -> bool:
        """Disconnect. Return whether this island has left before the end of the run."""
        left = self.outer.left
        self.outer.close()
        return left

    @property
    def step(self) -> float:
        """Step of the run that begins, by the tokens of all islands."""
        outer = self.outer
        return outer.clock * self._plan.total_steps / outer.seat.total_tokens + 1

    def tokens_of_step(self, shards: WorkerShards) -> int:
        """Return the weight of a step: larger in a slot with more tokens of its own."""
        share = shards.shares[self.outer.seat.slot] * len(shards.shares)
        return round(self._plan.tokens_per_step / self._workers * share)
