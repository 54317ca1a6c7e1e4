"""Parts of other islands: fetched and checked in the background, as soon as they are in the log."""

import time
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from torchtitan_diloco.base.background import BackgroundThread
from torchtitan_diloco.diloco.codecs import CODECS
from torchtitan_diloco.islands.bulk import ChunkError
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Gauges
from torchtitan_diloco.islands.records import LARGEST_NORM, Part
from torchtitan_diloco.islands.rounds import Checked

NOTHING = torch.empty(0, dtype=torch.uint8)


class PartGoneError(RuntimeError):
    """A part that the run has merged can no longer be read."""


class Parts:
    def __init__(self, connection: Connection, copies: Copies, gauges: Gauges) -> None:
        self._connection, self._copies, self._gauges = connection, copies, gauges
        self._fetched: dict[int, Future[tuple[Checked, Tensor]]] = {}
        """Waiting parts by sequence number, and their payloads."""
        self._wanted: Collection[int] = ()
        self._own: dict[int, tuple[Part, Tensor]] = {}
        self._thread = BackgroundThread("islands-fetch")

    def keep(self, part: Part, payload: Tensor) -> None:
        """Keep the payload of this island's latest part of a fragment, which need not be
        fetched."""
        self._own[part.fragment] = part, payload

    def fetch_waiting(self, state: State) -> None:
        """Fetch and check waiting parts in the background, and drop all others."""
        waiting = dict[int, Part]()
        for number, fragment in enumerate(state.fragments):
            copy = self._copies.fragments[number]
            if fragment.version >= copy.newest:  # else the copy contains them
                waiting |= fragment.waiting
        self._wanted = waiting.keys()
        for sequence in self._fetched.keys() - waiting.keys():
            del self._fetched[sequence]
        for sequence in waiting.keys() - self._fetched.keys():
            found = self._thread.submit(partial(self._fetch, sequence, waiting[sequence]))
            self._fetched[sequence] = found
            found.add_done_callback(lambda _: self._connection.wake())

    def checked(self) -> dict[int, Checked]:
        """Return the result of the check of each fetched part."""
        done = [(sequence, one) for sequence, one in self._fetched.items() if one.done()]
        return {sequence: one.result()[0] for sequence, one in done if one.exception() is None}

    def payload(self, sequence: int) -> Tensor:
        """Return the payload of a part in an entry. Raises a PartGoneError."""
        checked, payload = self._fetched[sequence].result()
        if checked.reason:
            raise PartGoneError(f"a part that the run has merged cannot be read: {checked.reason}")
        return payload

    def close(self) -> None:
        self._thread.close(timeout=1.0)

    def _fetch(self, sequence: int, part: Part) -> tuple[Checked, Tensor]:
        if part.codec not in CODECS:
            return Checked(f"its wire format {part.codec} is unknown"), NOTHING
        sizes = self._copies.payload_sizes(part.fragment, part.ranks, part.codec)
        wanted = sum(sizes) if part.finite else 0
        if part.size != wanted:
            return Checked(f"its chunks do not add up to {wanted} bytes"), NOTHING
        if sequence not in self._wanted or not part.finite:
            return Checked(), NOTHING
        own, payload = self._own.get(part.fragment, (None, NOTHING))
        if own != part:
            started = time.monotonic()
            try:
                payload = as_tensor(self._connection.fetch(part.chunks, "parts"))
            except ChunkError as error:
                return Checked(str(error)), NOTHING
            self._gauges.download_bytes_per_second = wanted / (time.monotonic() - started)
        norm = self._copies.norm(part.fragment, payload, part.ranks, part.codec)
        if not norm <= LARGEST_NORM:  # or NaN
            return Checked("its values are not finite"), NOTHING
        return Checked(norm=norm), payload


def as_tensor(content: bytearray) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8) if content else NOTHING


def as_buffer(content: Tensor) -> memoryview:
    return memoryview(content.numpy().data).cast("B") if content.numel() else memoryview(b"")
