"""Islands with several ranks and a toy model, each rank in a process of its own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.diloco.toy import full, inner_step, join, parameters, sgd, sharded
from torchtitan_diloco.diloco import DiLoCoConfig, StreamingDiLoCo
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.islands.peers import IslandPeers

TOKENS = 100
SAMPLES = 2
NAMES = "ab"
Versions = dict[tuple[int, int], Tensor]


class RankedIsland:
    """A rank of one of several islands: the ranks of a world are divided evenly among them.

    Its own island sees no rank of another one.
    """

    def __init__(
        self,
        store: Path | str,
        chosen: DiLoCoConfig,
        *,
        islands: int = 2,
        total_tokens: int = 10**9,
        tokens_per_step: int = TOKENS,
        grace: float = 120.0,
        adam: bool = True,
        saved: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        ranks = int(os.environ["WORLD_SIZE"]) // islands
        world = join(islands, ranks)
        self.world = world
        self.name = NAMES[world.worker]
        self.model = sharded(world)
        self.optimizer: torch.optim.Optimizer = sgd(self.model)
        if adam:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.peers = IslandPeers(
            Islands(str(store), self.name, slots=islands, begin=islands, grace_seconds=grace),
            total_tokens=total_tokens,
            tokens_per_step=tokens_per_step,
            samples_per_step=SAMPLES,
            ranks=world.shards,
            liveness=Liveness.between(world.shards),
            **options,
        )
        self.outer = StreamingDiLoCo(self.model, self.peers, chosen, optimizer=self.optimizer)
        if saved is not None:
            self.outer.load_state_dict(saved)
        self.versions: Versions = {}
        """This rank's shards of P, by fragment and version."""
        self.steps = 0

    @property
    def rank(self) -> int:
        return self.world.rank_in_worker

    def train(
        self,
        steps: int = 10**9,
        *,
        tokens: list[int] | None = None,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Train to the end of the run, or so many steps. `tokens`: of a step, by slot."""
        seat = self.peers.seat
        weights = tokens or [TOKENS] * seat.slots
        while not self.peers.finished and self.steps < steps:
            self.steps += 1
            step = seat.position // SAMPLES + self.steps
            inner_step(self.model, self.optimizer, seat.slot, step)
            self.outer.step(weights[seat.slot])
            if self.rank == 0:
                assert not any(one.is_wrong for one in self.peers.machine.fragments)
            for round_ in self.outer.rounds():
                state = self.outer.loop.states[round_.fragment]
                self.versions[round_.fragment, round_.outer_round] = state.outer.clone()
            on_step(self.steps)

    def shared(self) -> dict[str, Tensor]:
        return {name: full(value) for name, value in self.outer.global_state_dict().items()}


def versions_of_islands(
    store: Path | str, chosen: DiLoCoConfig, tokens: list[int], steps: int
) -> tuple[int, Versions, dict[str, Tensor]]:
    """Return the slot of an island, and after so many steps the versions and its parameters."""
    island = RankedIsland(store, chosen, tokens_per_step=max(tokens))
    seat = island.peers.join()
    island.train(steps, tokens=tokens)
    found = parameters(island.model)
    island.outer.drain()
    island.outer.close()
    return seat.slot, island.versions, found
