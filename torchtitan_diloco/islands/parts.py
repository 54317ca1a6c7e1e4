"""Payloads of parts: those of this island to be stored, and those of all to be fetched."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.islands.connection import Connection, CorruptError, GoneError
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.members import IslandFailedError
from torchtitan_diloco.islands.records import Part

NOTHING = torch.empty(0, dtype=torch.uint8)


class Parts:
    def __init__(
        self, connection: Connection, copies: Copies, on_checked: Callable[[], None]
    ) -> None:
        """`on_checked` is called, in any thread, when a part has been fetched and checked."""
        self._connection, self._copies, self._on_checked = connection, copies, on_checked
        self.stored: dict[int, tuple[Part, Tensor]] = {}
        """Latest own part of each fragment, once its chunks are stored, and its payload."""
        self._fetched: dict[int, Future[tuple[str, Tensor]]] = {}
        """By sequence number: why a part cannot be used, empty if it can, and its payload."""
        self._wanted: set[int] = set()
        self._thread = BackgroundThread("islands-fetch")

    def store(self, part: Part, payload: Tensor) -> None:
        """Store the chunks of an own part."""
        if part.finite:
            chunks = self._connection.store(as_buffer(payload), "parts")
            part = msgspec.structs.replace(part, chunks=chunks)
        self.stored[part.fragment] = part, payload

    def fetch(self, waiting: dict[int, Part]) -> None:
        """Fetch and check parts in the background, and forget all others."""
        self._wanted = set(waiting)
        for sequence in self._fetched.keys() - self._wanted:
            del self._fetched[sequence]
        for sequence in waiting.keys() - self._fetched.keys():
            found = self._thread.submit(partial(self._get, sequence, waiting[sequence]))
            self._fetched[sequence] = found
            found.add_done_callback(lambda _: self._on_checked())

    def checked(self) -> dict[int, str]:
        """Return why each part that was fetched cannot be used, empty if it can."""
        done = [(sequence, one) for sequence, one in list(self._fetched.items()) if one.done()]
        return {sequence: one.result()[0] for sequence, one in done if one.exception() is None}

    def payload(self, sequence: int) -> Tensor:
        """Return the payload of a part that an entry has taken."""
        reason, payload = self._fetched[sequence].result()
        if reason:
            raise IslandFailedError(
                f"a part that the run has merged cannot be read: {reason}; an island that is "
                "started again takes the shared copies of another one, if one is running"
            )
        return payload

    def close(self) -> None:
        self._thread.close(timeout=1.0)

    def _get(self, sequence: int, part: Part) -> tuple[str, Tensor]:
        wanted = sum(self._copies.payload_sizes(part.fragment, part.ranks)) if part.finite else 0
        if sequence not in self._wanted:
            return "it is not needed any more", NOTHING
        if sum(chunk.size for chunk in part.chunks) != wanted:
            return f"its chunks do not have {wanted} bytes", NOTHING
        if not part.finite:
            return "", NOTHING
        own, payload = self.stored.get(part.fragment, (None, NOTHING))
        if own != part:
            try:
                payload = join_bytes(self._connection.fetch(part.chunks, "parts"))
            except (CorruptError, GoneError) as error:
                return str(error), NOTHING
        if not self._copies.is_finite(part.fragment, payload, part.ranks):
            return "its values are not finite", NOTHING
        return "", payload


def join_bytes(pieces: Sequence[bytes]) -> Tensor:
    """Return bytes as one tensor."""
    content = bytearray().join(pieces)
    return torch.frombuffer(content, dtype=torch.uint8) if content else NOTHING


def as_buffer(content: Tensor) -> memoryview:
    return memoryview(content.numpy().data).cast("B") if content.numel() else memoryview(b"")
