"""What one rank keeps of one fragment: flat fp32 buffers, and the ways between them and the model's parameters."""

import torch
from torch import Tensor

from torchtitan_diloco.config.schema import OuterOptimizer
from torchtitan_diloco.diloco.checksum import checksum
from torchtitan_diloco.diloco.fragments import Fragment
from torchtitan_diloco.diloco.outer_optimizer import STATE_BUFFERS, outer_update


class OuterState:
    """Shared parameters, optimizer state and one delta, allocated once.

    `outer` is the shared copy that everybody holds. While the fragment is under way `delta` turns, in place, from this
    worker's delta into the mean and then into the next shared copy; `apply` swaps the two.

    With the state in host memory and the model on a GPU, `staging` takes the parameters' snapshot on the GPU, so that
    training goes on while it is copied over on a stream of its own; the way back is the same.
    """

    def __init__(self, fragment: Fragment, config: OuterOptimizer, device: torch.device) -> None:
        self.fragment = fragment
        self._config = config
        self._locals = [part.local() for part in fragment.parts]
        self.values = sum(local.numel() for local in self._locals)
        self._model_device = self._locals[0].device
        pinned = device.type == "cpu" and self._model_device.type == "cuda"

        def buffer() -> Tensor:
            return torch.zeros(self.values, dtype=torch.float32, device=device, pin_memory=pinned)

        self.outer, self.delta = buffer(), buffer()
        self.slots = [buffer() for _ in range(STATE_BUFFERS[config.name])]
        self.rounds = 0
        """Outer steps taken; rounds in which nobody had anything to give do not count."""
        self.checksum = 0
        self._staging = torch.zeros(self.values, device=self._model_device) if pinned else None
        self._stream = torch.cuda.Stream(self._model_device) if pinned else None
        self._moved: torch.cuda.Event | None = None
        self.read_model()

    @torch.no_grad()
    def read_model(self) -> None:
        """The shared copy becomes what the model holds."""
        for local, outer in zip(self._locals, self.views(self.outer), strict=True):
            outer.copy_(local)
        self.checksum = checksum(self.outer)

    @torch.no_grad()
    def write_model(self) -> None:
        """The model takes the shared copy."""
        for local, outer in zip(self._locals, self.views(self.outer), strict=True):
            local.copy_(outer)

    @torch.no_grad()
    def take_delta(self) -> None:
        """delta = outer - local parameters, in the training thread: one pass over memory, after which training goes on."""
        if self._staging is None:
            views = zip(self._locals, self.views(self.outer), self.views(self.delta), strict=True)
            for local, outer, delta in views:
                torch.sub(outer, local, out=delta)
            return
        for local, staged in zip(self._locals, self.views(self._staging), strict=True):
            staged.copy_(local)
        self._moved = torch.cuda.Event()
        self._moved.record()

    @torch.no_grad()
    def finish_delta(self) -> None:
        """In the background: what the training thread left to do."""
        if self._staging is None or self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            assert self._moved is not None
            self._stream.wait_event(self._moved)
            self.delta.copy_(self._staging, non_blocking=True)
        self._stream.synchronize()
        torch.sub(self.outer, self.delta, out=self.delta)

    @torch.no_grad()
    def advance(self) -> None:
        """In the background: the mean in `delta` becomes the next shared copy, on its way to the model's device."""
        self.rounds += 1
        outer_update(self._config, self.outer, self.delta, self.slots, self.rounds)
        self._ready()

    @torch.no_grad()
    def keep(self) -> None:
        """In the background: nobody had anything to give, the next shared copy is the present one."""
        self.delta.copy_(self.outer)
        self._ready()

    def _ready(self) -> None:
        self.checksum = checksum(self.delta)
        if self._staging is not None and self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._staging.copy_(self.delta, non_blocking=True)
                self._moved = torch.cuda.Event()
                self._moved.record()

    @torch.no_grad()
    def apply(self, mixing: float) -> None:
        """Takes over the next shared copy and merges it: local = mixing * local + (1 - mixing) * shared."""
        self.outer, self.delta = self.delta, self.outer
        if mixing == 1.0:
            return
        source = self.outer
        if self._staging is not None:
            assert self._moved is not None
            torch.cuda.current_stream(self._model_device).wait_event(self._moved)
            source = self._staging
        scratch = self.views(self.delta if self._staging is None else source)
        for local, shared, free in zip(self._locals, self.views(source), scratch, strict=True):
            if mixing == 0.0:
                local.copy_(shared)
            elif local.dtype == torch.float32:
                local.lerp_(shared, 1 - mixing)
            else:  # mixed in fp32 and rounded once; `free` holds nothing that is still needed
                torch.mul(shared, 1 - mixing, out=free)
                free.add_(local, alpha=mixing)
                local.copy_(free)

    def load(self, outer: Tensor, slots: list[Tensor], rounds: int, saved_checksum: int) -> None:
        """Takes back what was saved of a fragment that is not under way."""
        self.outer.copy_(outer)
        for mine, saved in zip(self.slots, slots, strict=True):
            mine.copy_(saved)
        self.rounds, self.checksum = rounds, saved_checksum

    def load_next(self, shared: Tensor) -> None:
        """Takes back the next shared copy of a fragment that had come back and was not applied."""
        self.delta.copy_(shared)
        self._ready()

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.outer, self.delta, *self.slots))

    def norm_of_delta(self) -> float:
        return float(torch.linalg.vector_norm(self.delta))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A flat buffer, cut as the fragment's parts."""
        return list(buffer.split([local.numel() for local in self._locals]))
