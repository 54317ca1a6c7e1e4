"""Formats without scales: one value after the other, little-endian."""

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.base import Codec


class Fp32Codec(Codec):
    """The values as they are."""

    is_fp32 = True

    def wire_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.copy_(values.view(torch.uint8))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.view(torch.uint8).copy_(payload)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        # Reads the payloads where they are, and writes `out` last, as one of them may lie there.
        mean, total = payloads[0].view(torch.float32), weights[0]
        for payload, weight in zip(payloads[1:-1], weights[1:-1], strict=True):
            total += weight
            running = self._scratch.get("running", out.numel(), out.dtype, out.device)
            mean = torch.lerp(mean, payload.view(torch.float32), weight / total, out=running)
        if len(payloads) == 1:
            out.copy_(mean)
        else:
            share = weights[-1] / (total + weights[-1])
            torch.lerp(mean, payloads[-1].view(torch.float32), share, out=out)


class Bf16Codec(Codec):
    """The upper half of each value, rounded to nearest even."""

    def wire_bytes(self, values: int) -> int:
        return 2 * values

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))
