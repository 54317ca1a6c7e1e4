"""What a wire format must do."""

from typing import Protocol

from torch import Tensor

UNIT = 1024
"""Values cut at a multiple of this may be encoded one piece after the other, into one piece of bytes after the other."""


class Codec(Protocol):
    """Turns fp32 values into bytes and back, into buffers that the caller owns: nothing is allocated per exchange.

    A format has no state and no header: the bytes of values that are cut at multiples of UNIT are the bytes of the pieces,
    one after the other, so `wire_bytes(UNIT * k + n) == k * wire_bytes(UNIT) + wire_bytes(n)`. Whoever works on large
    buffers can go through them in pieces that stay in cache.
    """

    name: str

    is_fp32: bool
    """The bytes are the values as they lie in memory: they can be sent from where they are and read where they arrive."""

    def wire_bytes(self, values: int) -> int:
        """Bytes that so many values take on the wire."""
        ...

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """fp32 [n] -> uint8 [wire_bytes(n)]."""
        ...

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """uint8 [wire_bytes(n)] -> fp32 [n]."""
        ...
