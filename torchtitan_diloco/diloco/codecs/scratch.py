"""Working room that is allocated once and used again: on a CPU a fresh buffer costs more than the work done in it."""

import torch
from torch import Tensor


class Scratch:
    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def floats(self, name: str, values: int, device: torch.device) -> Tensor:
        """fp32 [values] with whatever was in it, the same memory for the same name."""
        return self._bytes(name, 4 * values, device).view(torch.float32)

    def ints(self, name: str, values: int, device: torch.device) -> Tensor:
        """int32 [values]."""
        return self._bytes(name, 4 * values, device).view(torch.int32)

    def octets(self, name: str, values: int, device: torch.device) -> Tensor:
        """uint8 [values]."""
        return self._bytes(name, values, device)

    def counter(self, values: int, device: torch.device) -> Tensor:
        """int32 0, 1, 2, ..."""
        known = self._buffers.get(("counter", device))
        if known is None or known.numel() < values:
            known = self._buffers["counter", device] = torch.arange(
                values, dtype=torch.int32, device=device
            )
        return known[:values]

    def _bytes(self, name: str, size: int, device: torch.device) -> Tensor:
        known = self._buffers.get((name, device))
        if known is None or known.numel() < size:
            room = -(-size // 64) * 64
            known = self._buffers[name, device] = torch.empty(
                room, dtype=torch.uint8, device=device
            )
        return known[:size]
