"""The other workers, as the outer loop sees them.

The outer loop (diloco/loop.py) takes deltas and applies shared copies. Its peers say when, and turn
the deltas of all workers into the next shared copies. There are two kinds: `GlooPeers`, the workers
of one job, and `IslandPeers`, separate jobs that meet in a store.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.loop import Loop
from torchtitan_diloco.diloco.reports import Reports
from torchtitan_diloco.diloco.state_dict import OuterFacts, SavedState


class Peers(ABC):
    """What the outer loop needs of the other workers.

    To add a kind of peers, implement these methods, and pass an instance to `StreamingDiLoCo` as
    its group. The thread that trains calls them.
    """

    reports: Reports
    """What the peers know of the workers, for diagnosis, telemetry and descriptions. `Reports()`
    knows nothing."""

    @abstractmethod
    def start(
        self, model: nn.Module, config: DiLoCoConfig, optimizer: torch.optim.Optimizer | None
    ) -> Loop:
        """Return the loop that these peers are part of.

        Raise an error for settings that do not fit, or that differ between workers. The buffers of
        the loop (`build_states`) copy the parameters, so make these equal on all workers before.
        """

    @abstractmethod
    def due(self, weight: float, reset: Collection[int]) -> None:
        """Do what is due after an inner step, which the loop has counted: call `take` and `apply`
        of the loop, after waiting if necessary.

        `weight`: weight of the step. `reset`: fragments that were reset to the shared parameters
        after this step, or before it, since the last call. Work before a reset is in no delta.
        """

    @abstractmethod
    def rest(self) -> None:
        """Do what is left to do after the last step."""

    @abstractmethod
    def check(self) -> None:
        """Raise an error if a worker is lost or an exchange has failed."""

    @abstractmethod
    def save(self, facts: OuterFacts, mesh: DeviceMesh | None) -> SavedState:
        """Return the buffers and everything else that a restart needs, after waiting for what it
        contains of exchanges in flight. `mesh`: as for `StreamingDiLoCo.state_dict`."""

    @abstractmethod
    def load(self, saved: SavedState) -> list[str]:
        """Drop what is in flight, and fill the buffers. Return a line for each thing that could not
        be kept."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, including that of the loop."""


def end_thread(background: BackgroundThread, liveness: Liveness) -> None:
    """End the thread of an outer loop, which may hang for long if a rank is lost."""
    background.close(timeout=0.0 if liveness.is_lost else 5.0)
