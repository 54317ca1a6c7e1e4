"""The weighted mean of every worker's delta over the inter-worker group.

Every value is encoded once by its sender and averaged in fp32 in the order of the workers. All workers decode the same bytes,
their own included, so they end with the same bits. Two ways, by what they cost: with two workers each sends all it has to
the other (one hop); with more, each worker owns a slice, gets everybody's part of it, and sends the mean of it to all, which
is encoded a second time.

Messages go from worker to worker, not through collectives: when one is silent, it is known which. The headers go first,
then the delta in chunks, several of which are under way while others are encoded and decoded. On a CPU chunks are worked
on in pieces that stay in cache, and fp32 is sent from where it lies: the passes over memory are what a sync costs.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.diloco.chunks import (
    Task,
    chunk_and_window,
    lead_of_sends,
    programme,
    slice_bounds,
    slice_size,
)
from torchtitan_diloco.diloco.codecs import Codec
from torchtitan_diloco.diloco.codecs import Position as Place
from torchtitan_diloco.diloco.header import HEADER_BYTES, Header, check_headers
from torchtitan_diloco.diloco.messages import Messages, Messenger
from torchtitan_diloco.diloco.outer_optimizer import BLOCK
from torchtitan_diloco.diloco.round import Traffic

CODED_PIECE = 4 * BLOCK
"""Values encoded or decoded at once on a CPU. A format takes a dozen passes over a piece: with smaller ones the time goes into
calling them, with larger ones into memory."""

MEANS = 1
"""Tag of the second hop's messages: receives of both hops are posted ahead, and each is to meet its own."""


class Exchange:
    """One at a time, in the same order on every worker, from one thread."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: Codec,
        gather_codec: Codec,
        *,
        largest: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        """`gather_codec` encodes the means that go back with more than two workers; `largest`: values of a fragment."""
        self._messenger = Messenger(group, timeout_seconds, device)
        self.workers, self.me, self._others = (
            self._messenger.workers,
            self._messenger.me,
            self._messenger.others,
        )
        assert self.workers > 1
        self._failure: Exception | None = None
        self._codec, self._gather_codec = codec, gather_codec
        self._chunk, self._window = chunk_and_window(largest, codec)
        values = min(self._chunk, slice_size(self._chunk, self.workers))
        pair = self.workers == 2

        def buffers(workers: Iterable[int], room: int) -> dict[int, Tensor]:
            return {
                worker: torch.zeros(room, dtype=torch.uint8, device=device) for worker in workers
            }

        self._headers = buffers(range(self.workers), HEADER_BYTES)
        # By slot of the window and worker:
        self._incoming = [
            buffers(self._others, codec.wire_bytes(values)) for _ in range(self._window)
        ]
        means = [] if pair else range(self.workers)
        self._means = [buffers(means, gather_codec.wire_bytes(values)) for _ in range(self._window)]
        # By slot of the window:
        sent = 0 if codec.is_fp32 else codec.wire_bytes(self._chunk)
        self._outgoing = list(
            torch.zeros(self._window, sent, dtype=torch.uint8, device=device).unbind()
        )
        self._mean = torch.zeros(0 if pair else values, dtype=torch.float32, device=device)
        self._piece = self._chunk
        if device.type == "cpu":
            self._piece = BLOCK if codec.is_fp32 else CODED_PIECE
        self._before = torch.zeros(
            min(self._piece, self._chunk), dtype=torch.float32, device=device
        )
        self._dot = torch.zeros((), dtype=torch.float64, device=device)

    def average(
        self,
        delta: Tensor,
        header: Header,
        residual: Tensor | None = None,
        keys: tuple[int, int] = (0, 0),
    ) -> tuple[list[Header], Traffic]:
        """Turns `delta` into the mean over workers, or into 0 if all weigh 0; returns everybody's header and what it took.
        After a failure there is no other exchange on this group: messages of the failed one may still be under way.

        `residual`: what encoding lost of this fragment so far; it is sent along, and becomes what is lost now. `keys`: of the
        random numbers that stochastic rounding draws for this delta, and of those for the mean, which are everybody's."""
        if self._failure is not None:
            raise self._failure
        if not header.weight:
            residual = None  # nobody takes anything of this delta, so nothing of the residual is sent either
        self._messenger.begin()
        self._dot.zero_()
        try:
            headers = self._average(delta, header, residual, *keys)
            self._traffic.dot = self._dot.item()
            return headers, self._traffic
        except Exception as error:
            self._failure = error
            raise

    def _average(
        self, delta: Tensor, header: Header, residual: Tensor | None, key: int, mean_key: int
    ) -> list[Header]:
        chunks = delta.split(self._chunk)
        residuals = [None] * len(chunks) if residual is None else residual.split(self._chunk)
        mine, means = Place(key), Place(mean_key)
        greetings = self._send_header(header)
        headers: list[Header] = []
        ahead = range(min(self._window, len(chunks)))
        first_hop = {number: self._expect_parts(number, chunks[number]) for number in ahead}
        second_hop = {
            number: self._expect_means(number, chunks[number])
            for number in ahead
            if self.workers > 2
        }
        lead = lead_of_sends(self._window, self.workers)
        for task, number in programme(len(chunks), self._window, self.workers):
            chunk, start, free = chunks[number], number * self._chunk, number + self._window
            if task is Task.SEND:
                self._send(number, chunk, residuals[number], mine.after(start), first_hop[number])
            elif task is Task.AVERAGE:
                headers = headers or self._read_headers(greetings, header)
                messages = first_hop.pop(number)
                moments = self._messenger.wait(messages)
                if number <= lead:  # later ones wait for what has to be worked on before
                    self._traffic.note_arrivals(messages.sizes, moments)
                if self.workers == 2:
                    self._average_slice(number, headers, chunk, out=chunk)
                else:
                    self._send_mean(number, headers, chunk, means.after(start), second_hop[number])
                if free < len(chunks):
                    first_hop[free] = self._expect_parts(free, chunks[free])
            else:
                self._messenger.wait(second_hop.pop(number))
                self._collect_means(number, chunk)
                if free < len(chunks):
                    second_hop[free] = self._expect_means(free, chunks[free])
        return headers

    def close(self) -> None:
        self._messenger.close()

    @property
    def _traffic(self) -> Traffic:
        return self._messenger.traffic

    # --- headers ---------------------------------------------------------------------------------------------------

    def _send_header(self, header: Header) -> Messages:
        mine = self._headers[self.me].copy_(
            torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        )
        self._traffic.header_sent = time.perf_counter()
        messages = self._messenger.expect(
            [(worker, self._headers[worker]) for worker in self._others]
        )
        self._messenger.send(messages, [(worker, mine) for worker in self._others])
        self._messenger.watch(
            messages
        )  # with two workers, too: the moment is to be known while this thread is encoding
        return messages

    def _read_headers(self, greetings: Messages, header: Header) -> list[Header]:
        self._traffic.heard = self._messenger.wait(greetings)
        headers = [
            header if worker == self.me else Header.unpack(received.cpu().numpy().tobytes())
            for worker, received in self._headers.items()
        ]
        check_headers(headers, self.me)
        return headers

    # --- the slices of a chunk, and their bytes ----------------------------------------------------------------------

    def _bounds(self, chunk: Tensor, worker: int) -> tuple[int, int]:
        return slice_bounds(chunk.numel(), self.workers, worker)

    def _slice(self, chunk: Tensor, worker: int) -> Tensor:
        start, end = self._bounds(chunk, worker)
        return chunk[start:end]

    def _encoded(self, slot: int, chunk: Tensor) -> Tensor:
        """Where the bytes of this worker's chunk lie."""
        if self._codec.is_fp32:
            return chunk.view(torch.uint8)
        return self._outgoing[slot][: self._codec.wire_bytes(chunk.numel())]

    def _encoded_slice(self, slot: int, chunk: Tensor, worker: int) -> Tensor:
        start, end = (self._codec.wire_bytes(bound) for bound in self._bounds(chunk, worker))
        return self._encoded(slot, chunk)[start:end]

    def _received(self, slot: int, worker: int, values: int) -> Tensor:
        """What a worker sends of this worker's slice."""
        return self._incoming[slot][worker][: self._codec.wire_bytes(values)]

    def _mean_of(self, slot: int, chunk: Tensor, worker: int) -> Tensor:
        """The bytes of the mean of a worker's slice."""
        start, end = self._bounds(chunk, worker)
        return self._means[slot][worker][: self._gather_codec.wire_bytes(end - start)]

    def _pieces(
        self, codec: Codec, values: Tensor, payload: Tensor, place: Place
    ) -> Iterator[tuple[Tensor, Tensor, Place]]:
        """Values and bytes of what is worked on at once, one after the other; nothing of an empty slice, whose place in the
        fragment may be any."""
        if not values.numel():
            return
        cuts = zip(
            values.split(self._piece), payload.split(codec.wire_bytes(self._piece)), strict=True
        )
        for number, (piece, encoded) in enumerate(cuts):
            yield piece, encoded, place.after(number * self._piece)

    # --- first hop: everybody's delta ------------------------------------------------------------------------------

    def _expect_parts(self, number: int, chunk: Tensor) -> Messages:
        """Of this worker's slice, from all others."""
        slot, own = number % self._window, self._slice(chunk, self.me).numel()
        return self._messenger.expect(
            [(worker, self._received(slot, worker, own)) for worker in self._others]
        )

    def _send(
        self, number: int, chunk: Tensor, residual: Tensor | None, place: Place, messages: Messages
    ) -> None:
        started = time.perf_counter()
        slot = number % self._window
        if not self._codec.is_fp32:
            lost = repeat(None) if residual is None else residual.split(self._piece)
            pieces = self._pieces(self._codec, chunk, self._encoded(slot, chunk), place)
            for (values, encoded, where), left in zip(pieces, lost, strict=False):
                if left is None:
                    self._codec.encode(values, encoded, where)
                else:
                    self._codec.encode_with_feedback(values, left, encoded, where)
        self._traffic.encoded = time.perf_counter()
        self._traffic.encoding_seconds += self._traffic.encoded - started
        self._messenger.send(
            messages,
            [(worker, self._encoded_slice(slot, chunk, worker)) for worker in self._others],
        )

    def _average_slice(
        self, number: int, headers: list[Header], chunk: Tensor, *, out: Tensor
    ) -> None:
        """The weighted mean of this worker's slice, in the order of the workers. A worker of weight 0 is passed over:
        its values may be anything. `out` is the chunk itself with two workers."""
        started = time.perf_counter()
        slot = number % self._window
        heard = [
            (worker, header.weight) for worker, header in enumerate(headers) if header.weight > 0
        ]
        payloads = [
            self._encoded_slice(slot, chunk, worker)
            if worker == self.me
            else self._received(slot, worker, out.numel())
            for worker, _ in heard
        ]
        if payloads:
            piece_bytes = self._codec.wire_bytes(self._piece)
            cut = [payload.split(piece_bytes) for payload in payloads]
            for piece, *encoded in zip(out.split(self._piece), *cut, strict=True):
                with self._compared(piece) if self.workers == 2 else nullcontext():
                    self._codec.average(encoded, [weight for _, weight in heard], piece)
        else:
            out.zero_()
        self._traffic.decoding_seconds += time.perf_counter() - started

    @contextmanager
    def _compared(self, piece: Tensor) -> Iterator[None]:
        """Around what puts the mean in the place of this worker's delta: adds up their scalar product. On a CPU both are in
        cache at this moment, which spares a pass over memory."""
        before = self._before[: piece.numel()].copy_(piece)
        yield
        self._dot += torch.dot(before, piece)

    # --- second hop: the means -------------------------------------------------------------------------------------

    def _expect_means(self, number: int, chunk: Tensor) -> Messages:
        slot = number % self._window
        return self._messenger.expect(
            [(worker, self._mean_of(slot, chunk, worker)) for worker in self._others], MEANS
        )

    def _send_mean(
        self, number: int, headers: list[Header], chunk: Tensor, place: Place, messages: Messages
    ) -> None:
        slot = number % self._window
        start, end = self._bounds(chunk, self.me)
        mean = self._mean[: end - start]
        self._average_slice(number, headers, chunk, out=mean)
        started = time.perf_counter()
        encoded = self._mean_of(slot, chunk, self.me)
        for values, payload, where in self._pieces(
            self._gather_codec, mean, encoded, place.after(start)
        ):
            self._gather_codec.encode(values, payload, where)
        self._traffic.encoding_seconds += time.perf_counter() - started
        self._messenger.send(messages, [(worker, encoded) for worker in self._others], MEANS)

    def _collect_means(self, number: int, chunk: Tensor) -> None:
        started = time.perf_counter()
        slot = number % self._window
        for worker in range(self.workers):
            mean = self._mean_of(slot, chunk, worker)
            for values, payload, _ in self._pieces(
                self._gather_codec, self._slice(chunk, worker), mean, Place()
            ):
                with self._compared(values):
                    self._gather_codec.decode(payload, values)
        self._traffic.decoding_seconds += time.perf_counter() - started
