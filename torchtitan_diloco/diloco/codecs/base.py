"""Interface of wire formats, and the formats without scales: consecutive little-endian values."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torchtitan_diloco.diloco.config import Quantization

UNIT = 1024
"""Pieces of a multiple of this many values can be encoded separately, into consecutive bytes."""
BIAS = 127
"""Exponent bias of fp32 and of scale bytes."""
LOWEST = BIAS - 100
"""Smallest scale byte, even for blocks of smaller values. It keeps intermediate results from being
subnormal, because processors are slow with subnormal numbers or flush them to zero."""
NOT_FINITE_SCALE = 255
"""Scale byte of a block with a NaN or infinity. All its values are decoded as NaN."""


def add_to_mean(mean: Tensor, values: Tensor, share: float | Tensor) -> None:
    """Add values with this share to the mean. Overwrites `values`.

    Unlike `lerp`, which fuses a product and a sum on some processors, this gives the same bits on
    all of them.
    """
    mean.add_(values.sub_(mean).mul_(share))


class Codec(ABC):
    """Converts fp32 values to bytes and back, in buffers of the caller.

    A format has no header and no state: the payload of values that are cut at multiples of UNIT is
    the concatenation of the payloads of the pieces, and `wire_bytes(UNIT * k + n)` is `k *
    wire_bytes(UNIT) + wire_bytes(n)`. Callers can thus process pieces that fit into the cache. A
    codec keeps scratch buffers, so only one thread may use it.

    All workers must get the same bits: avoid reductions whose order depends on the number of
    threads or the processor, and `alpha=` and `lerp` (see `add_to_mean`); write the whole payload.
    """

    is_fp32 = False
    """A payload is the memory of the values, so it can be sent and read without a copy."""

    def __init__(self, config: Quantization) -> None:
        self.name = config.codec
        self.format = config.format
        self._scratch_buffers: dict[str, Tensor] = {}

    def details(self) -> list[str]:
        """Describe what a user may want to know of it, such as its blocks, in a few words each."""
        return []

    @abstractmethod
    def wire_bytes(self, values: int) -> int:
        """Return the size of the payload of this number of values."""

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Encode fp32 [n] into uint8 [wire_bytes(n)]."""

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Decode uint8 [wire_bytes(n)] into fp32 [n]."""

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        """Write the weighted mean of the decoded payloads to `out`, summed in fp32 in their order.

        A payload may share memory with `out` only if `is_fp32`.
        """
        self.decode(payloads[0], out)
        total = weights[0]
        for payload, weight in zip(payloads[1:], weights[1:], strict=True):
            total += weight
            decoded = self._scratch("decoded", out.numel(), out.dtype, out.device)
            self.decode(payload, decoded)
            add_to_mean(out, decoded, weight / total)

    def _scratch(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with unspecified contents. It is kept for the next call, because on a CPU
        a new buffer costs more than the work that is done in it."""
        buffer = self._scratch_buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = torch.empty(size, dtype=dtype, device=device)
            self._scratch_buffers[name] = buffer
        return buffer[:size]


class Fp32Codec(Codec):
    """The unchanged values."""

    is_fp32 = True

    def wire_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_(values.view(torch.uint8))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.view(torch.uint8).copy_(payload)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        # Payloads are read in place. `out` is written last, as it may be the memory of one.
        mean = payloads[0].view(torch.float32)
        total = weights[0]
        for payload, weight in zip(payloads[1:], weights[1:], strict=True):
            total += weight
            change = self._scratch("change", out.numel(), out.dtype, out.device)
            torch.sub(payload.view(torch.float32), mean, out=change).mul_(weight / total)
            running = out
            if payload is not payloads[-1]:
                running = self._scratch("running", out.numel(), out.dtype, out.device)
            mean = torch.add(mean, change, out=running)
        if len(payloads) == 1:
            out.copy_(mean)


class Bf16Codec(Codec):
    """The upper half of each value, rounded to nearest even."""

    def wire_bytes(self, values: int) -> int:
        return 2 * values

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))
