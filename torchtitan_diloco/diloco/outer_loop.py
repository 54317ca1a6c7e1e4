"""What a trainer needs of an outer loop, and its counterpart for data parallelism."""

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.fragments import local_rows
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import SavedState, shared_parameter_name


class OuterLoop(Protocol):
    """Keeps workers together. Implemented by StreamingDiLoCo and DataParallel."""

    @property
    def fragment_names(self) -> tuple[str, ...]: ...

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the training thread has spent or waited in the outer loop so far."""
        ...

    def step(self, weight: float = 1.0) -> None:
        """Do what is due after an inner step. `weight`: of the step in the mean over workers."""
        ...

    def check(self) -> None:
        """Raise the error of an exchange that failed in the background."""
        ...

    def drain(self) -> None:
        """Wait for everything in flight and apply it."""
        ...

    def global_parameters(self) -> AbstractContextManager[None]:
        """Let the model hold the shared parameters in the body of a with statement."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return totals since the last call."""
        ...

    def rounds(self) -> list[Round]:
        """Return the rounds applied since the last call."""
        ...

    def describe(self) -> list[str]:
        """Return lines for the start of a run."""
        ...

    def start_state_dict(self, mesh: DeviceMesh | None = None) -> Future[SavedState] | None:
        """Copy the state of this moment in the background; None: there is none."""
        ...

    def load_state_dict(self, saved: SavedState) -> list[str]:
        """Resume from a saved state; return what could not be kept, one line each."""
        ...

    def restart_from_model(self, step: int) -> None:
        """Start over after so many steps with the model's parameters as the shared ones."""
        ...


class DataParallel:
    """`method = "none"`: gradients are averaged at every step, so there is nothing to exchange."""

    fragment_names: tuple[str, ...] = ()
    exposed_seconds = 0.0

    def __init__(self, model: nn.Module, workers: int = 1) -> None:
        self._model, self._workers = model, workers

    def step(self, weight: float = 1.0) -> None: ...

    def check(self) -> None: ...

    def drain(self) -> None: ...

    def restart_from_model(self, step: int) -> None: ...

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}

    def rounds(self) -> list[Round]:
        return []

    def describe(self) -> list[str]:
        if self._workers == 1:
            return []
        text = (
            "none: gradients are averaged at every step; of [diloco] only workers and link are read"
        )
        return [f"{'outer':<10} {text}"]

    def start_state_dict(self, mesh: DeviceMesh | None = None) -> None:  # noqa: ARG002
        return None

    @torch.no_grad()
    def load_state_dict(self, saved: SavedState) -> list[str]:
        """Start from the shared parameters of a run that had an outer loop."""
        for name, parameter in self._model.named_parameters():
            if (shared := saved.shared.get(shared_parameter_name(name))) is not None:
                local_rows(name, parameter.detach()).copy_(local_rows(name, shared))
        return [
            "there is no outer loop any more: the model starts from the shared parameters, the "
            "optimizer from worker 0's"
        ]
