"""The largest values of each unit, as places and two-bit values: SparseLoCo (arXiv 2508.15706)."""

import torch
from torch import Tensor
from torch.nn import functional

from torchtitan_diloco.diloco.codecs.base import UNIT, Codec, add_to_mean
from torchtitan_diloco.diloco.codecs.blocks import kernels_for
from torchtitan_diloco.diloco.config import Quantization

PLACE_BITS = 10
"""Bits of a place in its unit. An entry also has a bit for the upper level and one for the sign."""
ENTRY_BITS = PLACE_BITS + 2
ORDER = 0x7FFFFFFF & -UNIT
"""Bits of a magnitude that are compared. Of equal ones, the first are sent."""
SCALE = 0x7FFF0000
"""Bits of a magnitude that are kept in a scale: those of bf16."""
CUT = 15 / 32
"""Place between the smallest and the largest magnitude that is sent, above which a value is sent as
the upper level."""
LEVELS = (3 / 16, 3 / 4)
"""Places of the two levels. They suit an exponential tail, where most values are near the
smallest."""

assert 2**PLACE_BITS == UNIT


class TopKCodec(Codec):
    """Entries of 12 bits for the largest values of a unit, then two scales in bf16."""

    def __init__(self, config: Quantization) -> None:
        super().__init__(config)
        assert config.top_values % 2 == 0
        self.top_values = config.top_values
        self._entry_bytes = self.top_values * ENTRY_BITS // 8

    def details(self) -> list[str]:
        return [f"the largest {self.top_values} of every {UNIT} values", "the others later"]

    def wire_bytes(self, values: int) -> int:
        return -(-values // UNIT) * (self._entry_bytes + 4)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        if kernels := kernels_for(self.format, values):
            kernels.encode_largest(values, payload, self.top_values)
        elif values.numel():
            if missing := -values.numel() % UNIT:
                values = functional.pad(values, (0, missing))
            words = values.view(-1, UNIT).view(torch.int32)
            # The lowest bits of a magnitude are replaced by its place, counted from the end. So all
            # numbers of a unit differ, the first of equal magnitudes is the largest, and the sorted
            # numbers contain the places.
            reverse = torch.arange(UNIT, dtype=torch.int32, device=values.device).flip(0)
            order = words.bitwise_and(ORDER).bitwise_or_(reverse)
            places = UNIT - 1 - order.topk(self.top_values).values.bitwise_and_(UNIT - 1)
            sent = words.gather(1, places.long())
            magnitudes = sent.bitwise_and(0x7FFFFFFF).view(torch.float32)
            scales = sent[:, [-1, 0]].bitwise_and_(SCALE)  # of the smallest and the largest
            low, high = scales.view(torch.float32).split(1, dim=1)
            is_upper = magnitudes > low + (high - low) * CUT
            entries = places | is_upper.int() << PLACE_BITS | (sent < 0).int() << PLACE_BITS + 1
            pairs = entries[:, ::2] | entries[:, 1::2] << ENTRY_BITS
            rows = payload.view(len(words), -1)
            _write_bytes(pairs, rows[:, :-4].unflatten(1, (-1, 3)))
            _write_bytes(scales >> 16, rows[:, -4:].unflatten(1, (-1, 2)))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        self.average([payload], [1.0], values)

    def average(self, payloads: list[Tensor], weights: list[float], out: Tensor) -> None:
        """Write the weighted mean of the payloads that send a value to `out`, and 0 where none do.

        An entry that decodes to 0 does not count: it pads a unit that has fewer values than
        entries, and the value that it represents stays in the parameters of its worker.
        """
        size = -(-out.numel() // UNIT) * UNIT
        room = out if size == out.numel() else self._scratch("mean", size, out.dtype, out.device)
        mean = room.view(-1, UNIT).zero_()
        total = self._scratch("total", size, out.dtype, out.device).view(-1, UNIT).zero_()
        for payload, weight in zip(payloads, weights, strict=True):
            places, values = self._entries(payload)
            is_sent = values != 0
            added = is_sent.float().mul_(weight)
            totals = total.gather(1, places).add_(added)
            # With share = weight / total so far, a running mean of those that send the value.
            share = torch.where(is_sent, added / totals, 0.0)
            # Places of a unit are all different, so the order of writes does not matter.
            total.scatter_(1, places, totals)
            means = mean.gather(1, places)
            add_to_mean(means, values, share)
            mean.scatter_(1, places, means)
        if room is not out:
            out.copy_(room[: out.numel()])

    def _entries(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places and the values that each unit sends, [units, top_values]."""
        rows = payload.view(-1, self._entry_bytes + 4)
        pairs = _read_bytes(rows[:, :-4].unflatten(1, (-1, 3)))
        entries = torch.stack((pairs & 2**ENTRY_BITS - 1, pairs >> ENTRY_BITS), dim=2).flatten(1)
        scales = _read_bytes(rows[:, -4:].unflatten(1, (-1, 2))) << 16
        low, high = scales.view(torch.float32).split(1, dim=1)
        lower, upper = (low + (high - low) * level for level in LEVELS)
        lower = lower.where(low != 0, 0)  # of a unit with fewer values than entries
        magnitudes = torch.where((entries >> PLACE_BITS & 1).bool(), upper, lower)
        values = torch.where((entries >> PLACE_BITS + 1).bool(), -magnitudes, magnitudes)
        return (entries & UNIT - 1).long(), values


def _write_bytes(words: Tensor, room: Tensor) -> None:
    """Write as many lower bytes of each word as fit, little-endian."""
    for number in range(room.shape[2]):
        room[..., number] = words >> 8 * number & 0xFF


def _read_bytes(room: Tensor) -> Tensor:
    words = room[..., 0].int()
    for number in range(1, room.shape[2]):
        words = words | room[..., number].int() << 8 * number
    return words
