"""What a wire format must do, and what all of them share: means and error feedback."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from torchtitan_diloco.diloco.codecs.scratch import Scratch

UNIT = 1024
"""Values cut at a multiple of this may be encoded one piece after the other, into one piece of bytes after the other."""


@dataclass(frozen=True)
class Place:
    """Where values stand, for rounding at random: the same key and place give the same numbers, on any device and however
    the values are cut. Formats that round to nearest do not look at it."""

    key: int = 0
    start: int = 0
    """Index of the first value, a multiple of UNIT."""

    def after(self, values: int) -> "Place":
        return replace(self, start=self.start + values)


START = Place()


class Codec(Protocol):
    """Turns fp32 values into bytes and back, into buffers that the caller owns. Working room is kept from call to call, so one
    codec serves one thread.

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

    def encode(self, values: Tensor, payload: Tensor, place: Place = START) -> None:
        """fp32 [n] -> uint8 [wire_bytes(n)]."""
        ...

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """uint8 [wire_bytes(n)] -> fp32 [n]."""
        ...

    def encode_with_feedback(
        self, values: Tensor, residual: Tensor, payload: Tensor, place: Place = START
    ) -> None:
        """Encodes values + residual; the residual becomes what was lost on the way. `values` is overwritten."""
        ...

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        """The weighted mean of what was encoded, in fp32 and in the order given. In fp32 a payload may lie where `out` does."""
        ...


class PlainTorch(ABC):
    """The parts of a codec that need no more than its encode() and decode(), in plain torch."""

    is_fp32 = False

    def __init__(self) -> None:
        self._room = Scratch()

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, place: Place = START) -> None: ...

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor) -> None: ...

    def encode_with_feedback(
        self, values: Tensor, residual: Tensor, payload: Tensor, place: Place = START
    ) -> None:
        values.add_(residual)
        self.encode(values, payload, place)
        self.decode(payload, residual)
        torch.sub(values, residual, out=residual)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        """A running mean: one pass over memory for each worker after the first. `out` is written last."""
        running, decoded = (
            self._room.floats(name, out.numel(), out.device) for name in ("running", "decoded")
        )
        mean, total = self._values(payloads[0], running), weights[0]
        for number, (weight, payload) in enumerate(
            zip(weights[1:], payloads[1:], strict=True), start=2
        ):
            values, total = self._values(payload, decoded), total + weight
            mean = torch.lerp(
                mean, values, weight / total, out=out if number == len(payloads) else running
            )
        if len(payloads) == 1:
            out.copy_(mean)

    def _values(self, payload: Tensor, room: Tensor) -> Tensor:
        """The values, in `room` unless they can be read where they are."""
        if self.is_fp32:
            return payload.view(torch.float32)
        self.decode(payload, room)
        return room
