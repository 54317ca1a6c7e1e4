"""The interface of the outer loop for runs that have none."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco import state_dict as saving
from torchtitan_diloco.diloco.fragments import Fragment
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo


class DataParallel:
    """The interface of StreamingDiLoCo for `method = "none"`, where nothing is exchanged."""

    fragments: tuple[Fragment, ...] = ()
    exposed_seconds = 0.0

    def __init__(self, model: nn.Module, workers: int = 1) -> None:
        self._model = model
        self._workers = workers

    def step(self, weight: float = 1.0) -> None: ...
    def drain(self) -> None: ...
    def restart_from_model(self, step: int) -> None: ...

    def saved_state(self, _: DeviceMesh | None = None) -> None:
        """Return nothing: there is no outer loop."""

    def heal(self, _: dist.ProcessGroup | None) -> list[int]:
        """Return no fragments: there is no shared copy to heal from."""
        return []

    def global_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}

    def rounds(self) -> list[Round]:
        return []

    def describe(self) -> list[str]:
        text = "gradients are averaged at every step; only workers and link of [diloco] are used"
        return [f"{'outer':<10} none: {text}"] if self._workers > 1 else []

    def load_state(self, saved: SavedState) -> list[str]:
        """Start from the shared parameters of a run with an outer loop."""
        saving.write_shared(self._model, saved, ends_rounds=True)
        return [
            "the run no longer has an outer loop: the model starts from the shared "
            "parameters, and the optimizer from that of worker 0"
        ]


OuterLoop = StreamingDiLoCo | DataParallel
