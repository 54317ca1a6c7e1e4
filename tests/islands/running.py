"""Islands with a toy model in threads of this process, and a server for them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.diloco.toy import Net, config, inner_step, sgd
from tests.islands.servers import PATIENCE, wait_until
from torchtitan_diloco.diloco import DiLoCoConfig, Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.islands import IslandPeers, Islands
from torchtitan_diloco.islands.bulk import ClosedError
from torchtitan_diloco.islands.config import Join

TOKENS = 4
"""Weight of a step."""
PATIENT = 60
"""Seconds for parts to arrive, enough for running islands to stay in lockstep."""
FP4 = replace(config(), quantization=Quantization(codec="fp4_e3m0"))


@dataclass
class Result:
    outer: StreamingDiLoCo
    peers: IslandPeers
    model: Net
    shared: dict[str, Tensor]
    steps: int
    rounds: list[Any]


@dataclass
class Island(threading.Thread):
    """One island that trains until the run ends, or until `stop` is set."""

    join_string: Join
    name_: str
    chosen: DiLoCoConfig = FP4
    steps: int = 24
    """Length of the run if `begin` islands train in lockstep."""
    begin: int = 2
    slots: int = 2
    grace: float = PATIENT
    step_seconds: float = 0.0
    each_step: Callable[["Island"], object] | None = None
    tokens: int = TOKENS
    """Weight of its steps."""
    facts: dict[str, object] = field(default_factory=dict)
    saved: SavedState | None = None
    """State to resume from."""

    def __post_init__(self) -> None:
        super().__init__(name=self.name_, daemon=True)
        self.died = threading.Event()
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self.result: Result | None = None
        self.step = 0
        self.model = Net()
        self.optimizer = sgd(self.model)
        settings = Islands(
            join=str(self.join_string),
            name=self.name_,
            slots=self.slots,
            begin=self.begin,
            grace_seconds=self.grace,
            slot_seconds=1,
        )
        self.peers = IslandPeers(
            settings,
            total_tokens=self.steps * self.begin * TOKENS,
            tokens_per_step=self.tokens,
            samples_per_step=2,
            facts=self.facts,
        )
        self.outer = StreamingDiLoCo(self.model, self.peers, self.chosen, optimizer=self.optimizer)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._train()
        except ClosedError:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self.outer.close()

    def _train(self) -> None:
        outer = self.outer
        if self.saved is not None:
            outer.load_state_dict(self.saved)
        seat = self.peers.join()
        while not self.peers.finished and not self.stop.is_set():
            self.step += 1
            inner_step(self.model, self.optimizer, seat.slot, self.step)
            time.sleep(self.step_seconds)
            if self.each_step is not None:
                self.each_step(self)
            if self.died.is_set():
                return
            outer.step(weight=self.tokens)
        outer.drain()
        shared = {name: value.clone() for name, value in outer.global_state_dict().items()}
        self.result = Result(outer, self.peers, self.model, shared, self.step, outer.rounds())

    def finish(self, seconds: float = PATIENCE) -> Result:
        """Wait for the island to end. Return its result or raise its error."""
        self.join(seconds)
        assert not self.is_alive(), f"{self.name} does not end"
        if self.failure is not None:
            raise self.failure
        assert self.result is not None
        return self.result

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step >= step or not self.is_alive(), f"step {step} of {self.name}")


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@contextmanager
def started(*islands: Island) -> Iterator[None]:
    """Start islands, and stop them at the end. Print the errors."""
    for island in islands:
        island.start()
    try:
        yield
    except BaseException:
        print([f"{island.name}, step {island.step}: {island.failure!r}" for island in islands])
        raise
    finally:
        for island in islands:
            island.died.set()
            if island.peers._leader is not None:
                island.peers._leader._closed.set()
        for island in islands:
            island.join(PATIENCE)
