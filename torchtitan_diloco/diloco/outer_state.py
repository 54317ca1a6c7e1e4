"""Buffers of one fragment on one rank, their device, and transfers between them and the model."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from torchtitan_diloco.diloco.checksums import block_sums, checksum, checksum_of
from torchtitan_diloco.diloco.config import DiLoCoConfig, OuterOptimizer
from torchtitan_diloco.diloco.delta_norms import DeltaNorms
from torchtitan_diloco.diloco.flags import DROPPED, WENT_WRONG
from torchtitan_diloco.diloco.fragments import Fragment
from torchtitan_diloco.diloco.metrics import OUTER_METRICS, merge_parts
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_step import AVERAGE, STEP_VALUES, outer_step

GPU_SHARE = 0.2
"""Share of a GPU's memory up to which `outer_state = "auto"` means "device"."""


def state_bytes(config: DiLoCoConfig, *, has_optimizer: bool = True) -> int:
    """Return the bytes per parameter in the buffers of an OuterState.

    `has_optimizer`: whether outer steps are made there.
    """
    slots = len(config.outer_optimizer.rule.slots) if has_optimizer else 0
    return 4 * (2 + slots + config.quantization.format.is_sparse)


def build_states(
    fragments: Sequence[Fragment], config: DiLoCoConfig, *, has_optimizer: bool = True
) -> list["OuterState"]:
    """Return the buffers of each fragment, which start from the parameters.

    `has_optimizer`: whether outer steps are made there.
    """
    device = pick_state_device(fragments, config, has_optimizer=has_optimizer)
    is_sparse = config.quantization.format.is_sparse
    optimizer = config.outer_optimizer
    return [
        OuterState(fragment, optimizer, device, is_sparse=is_sparse, has_optimizer=has_optimizer)
        for fragment in fragments
    ]


def pick_state_device(
    fragments: Sequence[Fragment], config: DiLoCoConfig, *, has_optimizer: bool = True
) -> torch.device:
    """Return the device of the outer state. `has_optimizer`: as for `state_bytes`."""
    parameters = [part.local() for fragment in fragments for part in fragment.parts]
    device = parameters[0].device
    choice = config.link.outer_state
    if device.type == "cpu" or choice == "cpu":
        return torch.device("cpu")
    needed = state_bytes(config, has_optimizer=has_optimizer) * sum(
        local.numel() for local in parameters
    )
    is_small = needed <= GPU_SHARE * torch.cuda.get_device_properties(device).total_memory
    return device if choice == "device" or is_small else torch.device("cpu")


@cache
def background_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all background work. There is only one, because a GPU runs few streams
    concurrently and FSDP2 uses several."""
    return torch.cuda.Stream(device)


class OuterState:
    """Shared parameters, optimizer state and delta of a fragment: flat fp32, allocated once.

    `outer` is the shared copy. With a gloo group, `delta` holds this worker's delta, then the mean,
    then the next shared copy; `apply` swaps the two. On an island, another process has the outer
    optimizer, and `delta` holds the delta until it is encoded, and later the next shared copy.

    With the state in host memory and the model on a GPU, a snapshot of the parameters is staged on
    the GPU, so that training continues while it is copied to the host. The result is staged there
    too.
    """

    def __init__(
        self,
        fragment: Fragment,
        config: OuterOptimizer,
        device: torch.device,
        *,
        is_sparse: bool = False,
        has_optimizer: bool = True,
    ) -> None:
        """Allocate the buffers, and read the model.

        `is_sparse`: the codec sends only a part of a delta. The rest stays in the model.
        `has_optimizer`: whether outer steps are made here.
        """
        self.fragment = fragment
        self._config = config
        self._sizes = [local.numel() for local in self._locals()]
        self.values = sum(self._sizes)
        self.model_device = self._locals()[0].device
        self._on_host = device != self.model_device
        self._block = STEP_VALUES if device.type == "cpu" else max(1, self.values)
        names = config.rule.slots if has_optimizer else ()
        self._buffers = [
            torch.zeros(self.values, dtype=torch.float32, device=device, pin_memory=self._on_host)
            for _ in range(2 + len(names) + is_sparse)
        ]
        self.outer, self.delta, *others = self._buffers
        # The delta that was sent in part, as the mean replaces the other one.
        self.sent = others.pop() if is_sparse else None
        self.slots = dict(zip(names, others, strict=True))
        """States of the outer optimizer by name."""
        self.norms = DeltaNorms()
        self.optimizer_steps = 0
        """Number of steps with the state in `slots`. Outer rounds with plain averages make none."""
        self.checksum = 0
        self._block_norms: list[Tensor] = []
        self._staging: Tensor | None = None
        on_gpu = self.model_device.type == "cuda"
        self._stream = background_stream(self.model_device) if on_gpu else None
        self._taken: torch.cuda.Event | None = None
        self.read_model()

    def _locals(self) -> list[Tensor]:
        """Return flat views of the parameters. They are not cached, because the model may move
        them."""
        return [part.local() for part in self.fragment.parts]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return flat views of a buffer, one for each parameter."""
        return list(buffer.split(self._sizes))

    @property
    def bytes(self) -> int:
        size = 4 * self.values
        if self._on_host and size:  # torch allocates pinned memory in powers of two
            size = 1 << (size - 1).bit_length()
        return size * len(self._buffers)

    @torch.no_grad()
    def read_model(self) -> None:
        """Copy the parameters of the model to the shared copy."""
        for local, outer in zip(self._locals(), self.views(self.outer), strict=True):
            outer.copy_(local)
        self.checksum = checksum(self.outer)

    @torch.no_grad()
    def write_model(self) -> None:
        """Copy the shared copy to the parameters of the model."""
        for local, outer in zip(self._locals(), self.views(self.outer), strict=True):
            local.copy_(outer)

    def resume(self, delta_norms: list[float], optimizer_steps: int, *, in_flight: bool) -> None:
        """Continue from loaded buffers, whose optimizer state results from this number of outer
        steps.

        `in_flight`: `delta` holds the next shared copy.
        """
        self.norms = DeltaNorms(delta_norms)
        self.optimizer_steps = optimizer_steps
        self.checksum = checksum(self.delta if in_flight else self.outer)
        self._staging = self.delta.to(self.model_device) if in_flight and self._on_host else None

    # --- training thread --------------------------------------------------------------------------

    @torch.no_grad()
    def take_delta(self) -> None:
        """Compute delta = outer - local parameters, or stage the parameters for it."""
        if self._on_host:
            self._staging = torch.empty(self.values, dtype=torch.float32, device=self.model_device)
            for local, staged in zip(self._locals(), self.views(self._staging), strict=True):
                staged.copy_(local)
        else:
            self._subtract(self._locals(), self._block * torch.get_num_threads())
        self._taken = self.record_event()

    def _subtract(self, parameters: list[Tensor], block: int) -> None:
        """Set delta = outer - local and compute the norm of each block while it is in cache.

        For a model below fp32, the shared copy is first rounded to the type of the model. Otherwise
        the delta would contain the rounding error of the shared copy.
        """
        self._block_norms = []
        views = zip(parameters, self.views(self.outer), self.views(self.delta), strict=True)
        for part, values in zip(self.fragment.parts, views, strict=True):
            dtype = part.parameter.dtype
            for local, outer, delta in zip(*(value.split(block) for value in values), strict=True):
                shared_in_model_type = outer if dtype == torch.float32 else outer.to(dtype).float()
                torch.sub(shared_in_model_type, local, out=delta)
                self._block_norms.append(torch.linalg.vector_norm(delta))

    def _take_copy(self, copy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take the next shared copy. Return the previous one, and the next one on the model's
        device if it is not there."""
        before = self.outer
        self.outer = copy
        staged = None
        if copy is self.delta:
            self.delta = before
            staged = self._staging
            self._staging = None
            if staged is not None and staged.is_cuda:  # it may be of the background stream
                staged.record_stream(torch.cuda.current_stream(staged.device))
        elif self._on_host:  # what is staged is another one
            staged = copy.to(self.model_device, copy=True)
        return before, staged

    @torch.no_grad()
    def apply(
        self, copy: Tensor, mode: Mode, share: float = 0.0, *, measured: bool = False
    ) -> Tensor:
        """Take the next shared copy, and change the local parameters with it.

        `copy`: `delta`, where it was prepared, or `outer`, to apply the same copy again. `share`:
        weight of the local parameters for `MIX`. If measured, return the distance between the two
        before, for the modes that do not add a change, else NaN, as a tensor.
        """
        match mode:
            case Mode.ADD:
                self._add_change(copy, takes_back=False)
            case Mode.TAKE_BACK:
                self._add_change(copy, takes_back=True)
            case Mode.MIX:
                return self._mix(copy, share, measured=measured)
            case Mode.TAKE | Mode.RESET:
                return self._mix(copy, 0.0, measured=measured)
        return torch.tensor(math.nan)

    def _mix(self, copy: Tensor, share: float, *, measured: bool) -> Tensor:
        """Set local = share * local + (1 - share) * copy. Return their distance before."""
        before, staged = self._take_copy(copy)
        # Where the copy is on the model's device, and memory there that may be overwritten: the
        # previous copy, or the staged values themselves once they are read.
        source = copy
        scratch = before
        if staged is not None:
            source = staged
            scratch = staged
        elif before is copy:
            scratch = torch.empty_like(copy)
        distances = []
        views = zip(self._locals(), self.views(source), self.views(scratch), strict=True)
        for local, shared, scratch_view in views:
            if measured:
                out = scratch_view if staged is None else None
                distances.append(torch.linalg.vector_norm(torch.sub(local, shared, out=out)))
            if share == 0.0:
                local.copy_(shared)  # below, `lerp` and `alpha`: only this worker has these bits
            elif share < 1.0 and local.dtype == torch.float32:
                local.lerp_(shared, 1 - share)
            elif share < 1.0:  # mix in fp32 and round once
                torch.mul(shared, 1 - share, out=scratch_view)
                local.copy_(scratch_view.add_(local, alpha=share))
        distance = torch.tensor(math.nan)
        if distances:
            distance = torch.linalg.vector_norm(torch.stack(distances))
        return distance

    def _add_change(self, copy: Tensor, *, takes_back: bool) -> None:
        """Add the change of the shared copy to the local parameters.

        `takes_back`: where it changed, the copy replaces this worker's delta. Work since the send
        is kept.
        """
        before, staged = self._take_copy(copy)
        change = torch.sub(copy, before)
        if takes_back:
            assert self.sent is not None, "only what was sent in part is taken back"
            take_back(change, self.sent)
        if staged is not None:
            change = staged.copy_(change)
        for local, added in zip(self._locals(), self.views(change), strict=True):
            if local.dtype == torch.float32:
                local.add_(added)
            else:  # add in fp32 and round once
                local.copy_(added.add_(local))

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the current stream of the GPU; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.model_device))
        return event

    # --- background thread ------------------------------------------------------------------------

    @contextmanager
    def background(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run the body on the background stream, after an event, and wait for the stream.

        The default event is that of `take_delta`. No effect on a CPU.
        """
        begin = after or self._taken
        if self._stream is None or begin is None:
            yield
            return
        torch.cuda.set_device(self.model_device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(begin)
            try:
                yield
            finally:  # after an error, too, nothing writes to the buffers any more
                self._stream.synchronize()

    @torch.no_grad()
    def finish_delta(self) -> float:
        """Complete the delta and return its squared norm on this rank."""
        if self._on_host and self._staging is not None:
            self.delta.copy_(self._staging, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
            self._subtract(self.views(self.delta), self._block)
        if self.sent is not None:
            self.sent.copy_(self.delta)
        norms = self._block_norms
        return float(torch.stack(norms).double().square().sum()) if norms else 0.0

    @torch.no_grad()
    def advance(self, lr: float | None, *, measured: bool = False) -> dict[str, float]:
        """Turn the mean in `delta` into the next shared copy, and start to stage it.

        `lr`: learning rate of the outer optimizer. None: average plainly, without it. If measured,
        return numbers of the mean for the round.
        """
        optimizer = self._config
        if lr is None:
            optimizer = AVERAGE
            lr = AVERAGE.lr
        else:
            self.optimizer_steps += 1
        sums = list[Tensor]()
        measurements = list[dict[str, float]]()
        # All buffers advance block by block, so that a block is in cache for its whole step.
        buffers = (self.outer, self.delta, *self.slots.values())
        blocks = (buffer.split(self._block) for buffer in buffers)
        for theta, delta, *slots in zip(*blocks, strict=True):
            if measured:
                measurements.append(_measure_mean(delta))
            outer_step(optimizer, theta, delta, slots, count=self.optimizer_steps, lr=lr)
            sums.append(block_sums(delta))
        self.checksum = checksum_of(sums)
        self._stage()
        return merge_parts(measurements, OUTER_METRICS) if measured else {}

    @torch.no_grad()
    def keep_copy(self) -> None:
        """Make the current shared copy the next one, after a round without participants."""
        self.delta.copy_(self.outer)
        self._stage()

    @torch.no_grad()
    def prepare(self, pieces: Iterable[Tensor], *, replaces: bool) -> None:
        """Write the next shared copy to `delta`, and start to stage it.

        The pieces, in order, are the copy itself if it `replaces` this one, and else its change.
        `delta` must not be in use: what was taken before is encoded.
        """
        start = 0
        for piece in pieces:
            end = start + piece.numel()
            if replaces:
                self.delta[start:end].copy_(piece)
            else:
                torch.add(self.outer[start:end], piece, out=self.delta[start:end])
            start = end
        assert start == self.values, "a copy of another size"
        if self._on_host:  # training may still copy the last one from what was staged before
            self._staging = torch.empty(self.values, dtype=torch.float32, device=self.model_device)
        self._stage()

    def _stage(self) -> None:
        """Start to copy the next shared copy to the model's device."""
        if self._staging is not None:
            self._staging.copy_(self.delta, non_blocking=True)


def mode_after(
    flags: int, *, participants: int, mixing: float, is_sparse: bool, is_in_model: bool
) -> tuple[Mode, float]:
    """Return how a worker applies the copy after an exchange, and its share for `MIX`.

    Args:
        flags: of its delta.
        participants: number of workers whose deltas are in the mean.
        mixing: usual share.
        is_sparse: whether the worker has sent only a part of its delta.
        is_in_model: whether its parameters still contain the work that was sent. Otherwise they
            were reset to the copy before, and so follow its change and keep the work since then.
    """
    if not is_in_model:
        return Mode.ADD, 0.0
    if flags & WENT_WRONG:
        return Mode.RESET, 0.0
    # The copy contains nothing of a worker that was dropped, and nothing new without participants.
    share = 1.0 if flags & DROPPED or not participants else mixing
    return Mode.TAKE_BACK if is_sparse and share < 1 else Mode.MIX, share


def _measure_mean(block: Tensor) -> dict[str, float]:
    """Return numbers of a block of the mean of all deltas. An empty one counts as a zero."""
    values = block if block.numel() else block.new_zeros(1)
    low, high = torch.aminmax(values)  # ten times as fast as the infinity norm on a CPU
    return {
        "round/mean_norm": float(torch.linalg.vector_norm(values)),
        "sync/largest_mean_delta": float(torch.maximum(-low, high)),
    }


def take_back(change: Tensor, sent: Tensor) -> None:
    """Add what a worker has sent to the change of the shared copy, where the copy has changed.

    As `sent` = copy before - local parameters at the send, adding the result to the parameters
    gives the next copy plus what the worker has learned since the send.
    """
    is_same = change == 0
    change.add_(sent).masked_fill_(is_same, 0.0)
