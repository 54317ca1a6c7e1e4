"""What one rank keeps of one fragment: flat fp32 buffers, and the ways between them and the model's parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan_diloco.diloco.checksum import checksum
from torchtitan_diloco.diloco.config import OuterOptimizer
from torchtitan_diloco.diloco.fragments import Fragment
from torchtitan_diloco.diloco.outer_optimizer import STATE_BUFFERS, outer_update


class OuterState:
    """Shared parameters, optimizer state and one delta, allocated once.

    `outer` is the shared copy that everybody holds. While the fragment is under way `delta` turns, in place, from this
    worker's delta into the mean and then into the next shared copy; `apply` swaps the two.

    With the state in host memory and the model on a GPU, a snapshot of the parameters is taken on the GPU, so that training
    goes on while it is copied over; what comes back is staged there too. Background work on a GPU has a stream of its own.
    """

    def __init__(
        self,
        fragment: Fragment,
        config: OuterOptimizer,
        device: torch.device,
        error_feedback: bool = False,
    ) -> None:
        self.fragment = fragment
        self._config = config
        self._sizes = [local.numel() for local in self._locals()]
        self.values = sum(self._sizes)
        self._model_device = self._locals()[0].device
        self._on_host = device != self._model_device

        def buffer() -> Tensor:
            return torch.zeros(
                self.values, dtype=torch.float32, device=device, pin_memory=self._on_host
            )

        self.outer, self.delta = buffer(), buffer()
        self.slots = [buffer() for _ in range(STATE_BUFFERS[config.name])]
        self.residual = buffer() if error_feedback else None
        """What encoding has lost of this worker's deltas and not sent yet."""
        self.rounds = 0
        """Outer steps taken; rounds in which nobody had anything to give do not count."""
        self.checksum = 0
        self._staging: Tensor | None = None
        on_gpu = self._model_device.type == "cuda"
        self._stream = torch.cuda.Stream(self._model_device) if on_gpu else None
        self._taken: torch.cuda.Event | None = None
        self.read_model()

    def _locals(self) -> list[Tensor]:
        """The parameters on this rank, flat. Looked up each time: the model may have moved them to other memory."""
        return [part.local() for part in self.fragment.parts]

    @torch.no_grad()
    def read_model(self) -> None:
        """The shared copy becomes what the model holds."""
        for local, outer in zip(self._locals(), self.views(self.outer), strict=True):
            outer.copy_(local)
        self.checksum = checksum(self.outer)

    def restart(self) -> None:
        """Begins anew from the model, with nothing remembered."""
        for buffer in (*self.slots, *([] if self.residual is None else [self.residual])):
            buffer.zero_()
        self.rounds, self._staging = 0, None
        self.read_model()

    @torch.no_grad()
    def write_model(self) -> None:
        """The model takes the shared copy."""
        for local, outer in zip(self._locals(), self.views(self.outer), strict=True):
            local.copy_(outer)

    # --- in the training thread ------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_delta(self) -> None:
        """delta = outer - local parameters: one pass over memory, after which training goes on."""
        locals_ = self._locals()
        if self._on_host:
            self._staging = torch.empty(self.values, dtype=torch.float32, device=self._model_device)
            for local, staged in zip(locals_, self.views(self._staging), strict=True):
                staged.copy_(local)
        else:
            views = zip(locals_, self.views(self.outer), self.views(self.delta), strict=True)
            for local, outer, delta in views:
                torch.sub(_as_held(outer, local.dtype), local, out=delta)
        self._taken = self.moment()

    @torch.no_grad()
    def apply(self, mixing: float) -> Tensor:
        """Takes over the next shared copy and merges it: local = mixing * local + (1 - mixing) * shared. Returns how far apart
        the two were before (a norm, on the model's device: reading it may have to wait for that device)."""
        self.outer, self.delta = self.delta, self.outer
        source, scratch = self.outer, self.delta
        if self._staging is not None:
            source = scratch = self._staging
            self._staging = None
        apart = []
        distinct = source is not scratch  # staged values lie in one buffer only
        for local, shared, free in zip(
            self._locals(), self.views(source), self.views(scratch), strict=True
        ):
            apart.append(
                torch.linalg.vector_norm(torch.sub(local, shared, out=free if distinct else None))
            )
            if mixing == 1.0:
                continue
            if mixing == 0.0:
                local.copy_(shared)
            elif local.dtype == torch.float32:
                local.lerp_(shared, 1 - mixing)
            else:  # mixed in fp32 and rounded once; `free` holds nothing that is still needed
                torch.mul(shared, 1 - mixing, out=free)
                free.add_(local, alpha=mixing)
                local.copy_(free)
        return torch.linalg.vector_norm(torch.stack(apart)) if apart else torch.zeros(())

    def moment(self) -> torch.cuda.Event | None:
        """When a GPU has done all that this thread has given it so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._model_device))
        return event

    # --- in the background -----------------------------------------------------------------------------------------

    @contextmanager
    def background(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Around the background's work on this fragment. On a GPU it begins `after` a moment of the training thread's, by
        default when the delta has been taken, and is complete at the end, so that the training thread finds it done."""
        begins = after or self._taken
        if self._stream is None or begins is None:
            yield
            return
        torch.cuda.set_device(self._model_device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(begins)
            yield
            self._stream.synchronize()

    @torch.no_grad()
    def finish_delta(self) -> None:
        """What the training thread left to do."""
        if self._staging is None or self._stream is None:
            return
        self.delta.copy_(self._staging, non_blocking=True)
        self._stream.synchronize()
        for part, outer, delta in zip(
            self.fragment.parts, self.views(self.outer), self.views(self.delta), strict=True
        ):
            torch.sub(_as_held(outer, part.parameter.dtype), delta, out=delta)

    @torch.no_grad()
    def advance(self) -> float:
        """The mean in `delta` becomes the next shared copy, on its way to the model's device. Returns the square of the norm of
        what has changed."""
        self.rounds += 1
        change = outer_update(self._config, self.outer, self.delta, self.slots, self.rounds)
        self._ready()
        return change

    @torch.no_grad()
    def keep(self) -> None:
        """Nobody had anything to give: the next shared copy is the present one."""
        self.delta.copy_(self.outer)
        self._ready()

    def _ready(self) -> None:
        self.checksum = checksum(self.delta)
        if self._staging is not None:
            self._staging.copy_(self.delta, non_blocking=True)

    # --- restart ---------------------------------------------------------------------------------------------------

    def loaded(self, rounds: int, *, in_flight: bool) -> None:
        """After the buffers have been filled with what was saved; `delta` holds the next shared copy of a fragment that had
        come back and was not applied."""
        self.rounds = rounds
        self.checksum = checksum(self.delta if in_flight else self.outer)
        self._staging = self.delta.to(self._model_device) if in_flight and self._on_host else None

    @property
    def bytes(self) -> int:
        """Memory taken."""
        residual = [] if self.residual is None else [self.residual]
        sizes = [buffer.nbytes for buffer in (self.outer, self.delta, *self.slots, *residual)]
        return sum(map(pinned_bytes, sizes)) if self._on_host else sum(sizes)

    def norm_of_delta(self) -> float:
        return float(torch.linalg.vector_norm(self.delta))

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A flat buffer, cut as the fragment's parts."""
        return list(buffer.split(self._sizes))


def pinned_bytes(wanted: int) -> int:
    """That torch takes for a pinned buffer: a power of two."""
    return 1 << (wanted - 1).bit_length() if wanted else 0


def _as_held(outer: Tensor, dtype: torch.dtype) -> Tensor:
    """The shared parameters as a worker would hold them, in fp32. What rounding to the model's type takes away is no change
    of the worker's: in the delta it would pull the shared copy back to what the model can represent."""
    return outer if dtype == torch.float32 else outer.to(dtype).float()
