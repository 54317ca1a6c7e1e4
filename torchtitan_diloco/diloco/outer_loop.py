"""What the trainer asks of an outer loop, and data parallelism, which has none."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import SavedState


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
        return ["outer      none: gradients are averaged at every step"]

    def start_state_dict(self, mesh: DeviceMesh | None = None) -> "Future[SavedState] | None":
        return None

    def load_state_dict(self, saved: SavedState) -> list[str]:
        return []

    def restart_from_model(self, step: int) -> None:
        pass
