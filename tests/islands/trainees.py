"""Islands, each a training loop in a thread of this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.diloco.toy import Net, full, inner_step, parameters
from torchtitan_diloco.diloco import DiLoCoConfig, StreamingDiLoCo
from torchtitan_diloco.islands.config import Islands
from torchtitan_diloco.islands.peers import IslandPeers
from torchtitan_diloco.islands.seat import Seat

TOKENS = 100
SAMPLES = 2
PATIENCE = 240.0


class Trainee:
    """`run` trains to the end of the run, `steps` steps, or until `stop`."""

    def __init__(
        self,
        store: Path,
        name: str,
        config: DiLoCoConfig,
        *,
        total_tokens: int,
        begin: int = 2,
        slots: int = 2,
        saved: dict[str, Any] | None = None,
        step_seconds: float = 0.0,
        grace: float = 1.0,
        found: bool = False,
        slot_seconds: float = 60.0,
        **options: Any,
    ) -> None:
        islands = Islands(
            str(store),
            name,
            slots=slots,
            begin=begin,
            grace_seconds=grace,
            slot_seconds=slot_seconds,
            found=found,
        )
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.peers = IslandPeers(
            islands,
            total_tokens=total_tokens,
            tokens_per_step=TOKENS,
            samples_per_step=SAMPLES,
            **options,
        )
        self.outer = StreamingDiLoCo(self.model, self.peers, config, optimizer=self.optimizer)
        self.notes = [] if saved is None else self.outer.load_state_dict(saved)
        self.step_seconds = step_seconds
        self.steps = 0
        self.on_join: Callable[[Seat], None] = lambda _: None
        self.on_step: Callable[[int], None] = lambda _: None
        self.stop = threading.Event()
        self.shared = dict[str, Tensor]()
        self.saved = dict[str, Any]()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.train()
        except BaseException as error:
            self.error = error
        finally:
            self.outer.close()

    def train(self) -> None:
        peers = self.peers
        seat = peers.join()
        self.on_join(seat)
        while not peers.finished and not self.stop.is_set():
            self.steps += 1
            step = seat.position // SAMPLES + self.steps
            inner_step(self.model, self.optimizer, seat.slot, step)
            time.sleep(self.step_seconds)
            self.outer.step(TOKENS)
            self.on_step(self.steps)
        self.saved = self.outer.state_dict()
        self.outer.drain()
        self.shared = {n: full(value) for n, value in self.outer.global_state_dict().items()}
        self.locals = parameters(self.model)

    def finish(self) -> "Trainee":
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), (self.steps, self.peers._link)
        if self.error is not None:
            raise self.error
        return self


class KilledError(Exception):
    """An island ends without leaving, as if it was killed."""


@contextmanager
def trained(*trainees: Trainee) -> Iterator[None]:
    """Run trainees, and wait for them."""
    for one in trainees:
        one.thread.start()
    try:
        yield
    except BaseException:
        for one in trainees:
            one.stop.set()
        raise
    for one in trainees:
        one.finish()
