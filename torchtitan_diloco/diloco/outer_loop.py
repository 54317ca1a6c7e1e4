"""What the trainer asks of an outer loop, and data parallelism, which has none."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.fragments import local_rows
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import SavedState, shared_parameter_name


class OuterLoop(Protocol):
    @property
    def fragment_names(self) -> Sequence[str]: ...

    @property
    def exposed_seconds(self) -> float: ...

    def step(self, weight: float = 1.0) -> None: ...

    def check(self) -> None: ...

    def drain(self) -> None: ...

    def global_parameters(self) -> AbstractContextManager[None]: ...

    def metrics(self) -> dict[str, float]: ...

    def rounds(self) -> list[Round]: ...

    def describe(self) -> list[str]: ...

    def start_state_dict(self, mesh: DeviceMesh | None = None) -> "Future[SavedState] | None": ...

    def load_state_dict(self, saved: SavedState) -> list[str]: ...

    def restart_from_model(self, step: int) -> None: ...


class DataParallel:
    fragment_names: tuple[str, ...] = ()
    exposed_seconds = 0.0

    def __init__(self, model: nn.Module, workers: int = 1) -> None:
        self._model, self._workers = model, workers

    def step(self, weight: float = 1.0) -> None:
        pass

    def check(self) -> None:
        pass

    def drain(self) -> None:
        pass

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        yield

    def metrics(self) -> dict[str, float]:
        return {}

    def rounds(self) -> list[Round]:
        return []

    def describe(self) -> list[str]:
        text = "gradients are averaged at every step; of [diloco] only workers and link are read"
        return [f"{'outer':<10} none: {text}"] if self._workers > 1 else []

    def start_state_dict(self, mesh: DeviceMesh | None = None) -> "Future[SavedState] | None":
        return None

    def load_state_dict(self, saved: SavedState) -> list[str]:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                shared = saved.shared.get(shared_parameter_name(name))
                if shared is not None:
                    value = parameter.detach()
                    local_rows(name, value, 0, 1).copy_(local_rows(name, shared, 0, 1))
        return [
            "there is no outer loop any more: the model starts from the shared parameters, the "
            "optimizer from worker 0's"
        ]

    def restart_from_model(self, step: int) -> None:
        pass
