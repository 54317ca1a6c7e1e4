"""What a wire format must do."""

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """Turns fp32 values into bytes and back, into buffers that the caller owns: nothing is allocated per exchange."""

    name: str

    def wire_bytes(self, values: int) -> int:
        """Bytes that so many values take on the wire."""
        ...

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """fp32 [n] -> uint8 [wire_bytes(n)]."""
        ...

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """uint8 [wire_bytes(n)] -> fp32 [n]."""
        ...
