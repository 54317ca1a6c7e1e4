"""What the outer loop of a rank owns, and what it does to a fragment.

`take` takes the delta of a fragment, and `apply` applies the next shared copy. The peers
(diloco/peers.py) call them when they are due.
"""

import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan_diloco.base.background import ENCODING_THREADS, BackgroundThread
from torchtitan_diloco.base.tensors import drop_gathered
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import Fragment, check_identity
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.round import Meter, Round
from torchtitan_diloco.diloco.schedule import Schedule, build_schedule, is_measured


@dataclass
class Loop:
    model: nn.Module
    config: DiLoCoConfig
    """Settings in use, which islands change during a run."""
    fragments: tuple[Fragment, ...]
    states: list[OuterState]
    """Buffers of each fragment."""
    optimizer: torch.optim.Optimizer | None = None
    """The inner optimizer, if its state is to be dropped for fragments that are reset."""
    step: int = 0
    """Inner steps so far."""
    healed: int = 0
    """Number of fragments that were reset to the shared parameters so far."""
    reset: set[int] = field(default_factory=set)
    """Fragments that were reset since the last step: work before that is in no delta."""
    meter: Meter = field(default_factory=Meter)
    background: BackgroundThread = field(
        default_factory=partial(BackgroundThread, "diloco-exchange", torch_threads=ENCODING_THREADS)
    )
    """Runs what the peers do with deltas while training continues. Peers build the loop when they
    start, and end this thread. It runs from the beginning, as the number of torch threads of the
    training thread is undefined for a moment while it starts."""

    @property
    def schedule(self) -> Schedule:
        return build_schedule(self.config, len(self.fragments))

    def take(self, round_: Round) -> None:
        """Take the delta of a fragment."""
        drop_gathered(self.model)
        state = self.states[round_.fragment]
        check_identity(self.model, state.fragment)
        begin = state.record_event()
        state.take_delta()
        round_.taken = time.perf_counter()
        self.meter.expose(round_.taken - round_.due, (begin, state.record_event()))

    def apply(self, round_: Round, copy: Tensor, mode: Mode, share: float = 0.0) -> None:
        """Apply a shared copy of a fragment. `share`: weight of the local parameters for `MIX`."""
        drop_gathered(self.model)
        state = self.states[round_.fragment]
        round_.applied_step = self.step
        measured = is_measured(round_.outer_round, self.config.measure_every)
        begin = state.record_event()
        drift = state.apply(copy, mode, share, measured=measured)
        round_.numbers["round/drift_norm"] = drift
        round_.applying = begin, state.record_event()
        if mode is Mode.RESET:
            self.start_afresh(round_.fragment)
        round_.applied = time.perf_counter()
        self.meter.applied(round_)

    def start_afresh(self, index: int) -> None:
        """Drop the training state of a fragment that was reset to the shared parameters."""
        if self.optimizer is not None:
            for part in self.fragments[index].parts:
                self.optimizer.state.pop(part.parameter, None)
        self.reset.add(index)
        self.healed += 1
        self.meter.healed()
