"""Payloads of parts: those of this island to be stored, and those of all to be fetched."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from functools import partial

import msgspec
import torch
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.islands.connection import Connection, CorruptError, GoneError
from torchtitan_diloco.islands.copies import Copies
from torchtitan_diloco.islands.records import Part


class Parts:
    def __init__(
        self,
        connection: Connection,
        copies: Copies,
        incarnation: str,
        on_checked: Callable[[], None],
    ) -> None:
        """`on_checked` is called, in any thread, when a part has been fetched and checked."""
        self._connection, self._copies = connection, copies
        self._incarnation, self._on_checked = incarnation, on_checked
        self.stored: dict[int, Part] = {}
        """Latest own part of each fragment, once its chunks are stored."""
        self.checked: dict[int, str] = {}
        """Parts that have been fetched: why each cannot be used, empty if it can."""
        self._own: dict[tuple[int, int], Tensor] = {}
        """Payloads of the latest own parts, by fragment and number."""
        self._payloads: dict[int, Future[Tensor]] = {}
        """Payloads of waiting parts, by sequence number."""
        self._thread = BackgroundThread("islands-fetch")

    def store(self, part: Part, payload: Tensor) -> None:
        """Store the chunks of an own part."""
        self._own = {key: kept for key, kept in self._own.items() if key[0] != part.fragment}
        self._own[part.fragment, part.number] = payload
        if part.finite:
            chunks = self._connection.store([as_buffer(payload)], "parts")
            part = msgspec.structs.replace(part, chunks=chunks)
        self.stored[part.fragment] = part

    def fetch(self, sequence: int, part: Part) -> None:
        """Fetch and check a part in the background."""
        own = None
        if part.incarnation == self._incarnation:
            own = self._own.get((part.fragment, part.number))
        self._payloads[sequence] = self._thread.submit(partial(self._get, sequence, part, own))

    def are_fetched(self, sequences: Collection[int], seconds: float) -> bool:
        """Wait for these parts, not longer than this, and return whether all have been fetched."""
        return not wait([self._payloads[one] for one in sequences], seconds).not_done

    def payload(self, sequence: int) -> Tensor:
        """Return the payload of a part that an entry has taken."""
        payload = self._payloads[sequence].result()
        if self.checked.get(sequence):
            raise RuntimeError(
                f"a part that the run has merged cannot be read: {self.checked[sequence]}; start "
                "this island again, and it takes the copy of another one"
            )
        return payload

    def forget(self, sequences: Collection[int]) -> None:
        for sequence in sequences:
            self._payloads.pop(sequence, None)
            self.checked.pop(sequence, None)

    def close(self) -> None:
        self._thread.close(timeout=1.0)

    def _get(self, sequence: int, part: Part, own: Tensor | None) -> Tensor:
        wanted = sum(self._copies.payload_sizes(part.fragment, part.ranks)) if part.finite else 0
        reason, payload = "", torch.empty(0, dtype=torch.uint8)
        try:
            if sum(chunk.size for chunk in part.chunks) != wanted:
                raise CorruptError(f"its chunks do not have {wanted} bytes")
            if part.finite:
                fetched = self._connection.fetch(part.chunks, "parts") if own is None else []
                payload = join_bytes(fetched) if own is None else own
                if not self._copies.is_finite(part.fragment, payload, part.ranks):
                    reason = "its values are not finite"
        except (CorruptError, GoneError) as error:
            reason = str(error)
        self.checked[sequence] = reason
        self._on_checked()
        return payload


def join_bytes(pieces: Sequence[bytes]) -> Tensor:
    """Return bytes as one tensor."""
    content = bytearray().join(pieces)
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8)


def as_buffer(content: Tensor) -> memoryview:
    return memoryview(content.numpy().data).cast("B") if content.numel() else memoryview(b"")
