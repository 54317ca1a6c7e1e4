"""`method = "none"`: the verbs of StreamingDiLoCo for workers whose gradients are averaged at every step, so that the
trainer has one loop for both. There is one model, so nothing is exchanged here and the shared parameters are the model's."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_diloco.diloco.round import Round


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
