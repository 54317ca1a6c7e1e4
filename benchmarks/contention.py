"""What the work of an exchange takes from the training step beside it, and how much of that is Python's lock.

    OMP_NUM_THREADS=1 python -m benchmarks.contention [--rounds 9] [--steps 10] [--codecs fp32,fp4_e3m0] [--megabytes 6.3]
                                                      [--section.key value ...]

The trainer's step (as in benchmarks/train_step.py) takes turns beside: nothing; a thread that exchanges a fragment over
and over, without a transfer (delta, encode, average, norms, outer step, checksum, merge); a process that does the same. A
process shares cores, caches and memory with training, a thread shares Python's lock as well. What training lost is
divided by the exchanges that were done meanwhile: what a thread's exchange costs more than a process's is the lock. The
last row is a thread of pure Python, which gives the lock up as seldom as it can: it shows that the measurement would find
it.

"Of a step at H": of the exchanges that the whole model takes in H steps.
"""

import argparse
import ctypes
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import codec_names, config_of, positive, positive_number
from benchmarks.table import print_table, summary
from benchmarks.train_step import own_loop, turn
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.diloco import DiLoCoConfig, Overlap, StreamingDiLoCo
from torchtitan_diloco.diloco.chunks import CHUNK
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import CodecName, Fragments, Quantization
from torchtitan_diloco.diloco.exchange import PIECE
from torchtitan_diloco.utils import describe_device

Count = Callable[[], int]
"""Exchanges done so far."""


class Work:
    """A fragment of so many values and its rounds, as a worker's, but that nothing is sent and its own delta is the mean."""

    def __init__(self, codec: CodecName, values: int) -> None:
        self._codec = build_codec(Quantization(codec=codec))
        config = DiLoCoConfig(
            sync_every=1, fragments=Fragments(layers_per_fragment=0), overlap=Overlap(delay=0)
        )
        self.model = model = nn.Linear(values, 1, bias=False)
        self.outer, self._delta = StreamingDiLoCo(model, None, config), torch.randn(values)
        self._payload = torch.empty(self._codec.wire_bytes(min(CHUNK, values)), dtype=torch.uint8)

    def once(self) -> None:
        for chunk in self._delta.split(CHUNK):
            pieces = chunk.split(PIECE)
            size, piece_size = map(self._codec.wire_bytes, (chunk.numel(), PIECE))
            payload = self._payload[:size].split(piece_size)
            for values, encoded in zip(pieces, payload, strict=True):
                self._codec.encode(values, encoded)
            for values, encoded in zip(pieces, payload, strict=True):
                self._codec.average([encoded, encoded], [1.0, 1.0], values)
        self.outer.step()


def work_until(ended: Callable[[], bool], done: Any, codec: CodecName, values: int) -> None:
    """`done.value` counts; 0 is the first one, which touches memory and code for the first time."""
    torch.set_num_threads(1)  # of this thread alone
    work = Work(codec, values)
    while not ended():
        work.once()
        done.value += 1


def _process(ended: Any, done: Any, codec: CodecName, values: int) -> None:
    work_until(ended.is_set, done, codec, values)


@contextmanager
def beside(worker: Any, ended: Any, done: Any) -> Iterator[Count]:
    worker.start()
    try:
        while done.value < 0:
            if not worker.is_alive():
                raise RuntimeError(
                    "what was to work beside training has ended; its error stands above"
                )
            time.sleep(0.01)
        yield lambda: int(done.value)
    finally:
        ended.set()
        worker.join()


def a_thread(codec: CodecName, values: int) -> AbstractContextManager[Count]:
    ended, done = threading.Event(), ctypes.c_long(-1)
    arguments = ended.is_set, done, codec, values
    return beside(threading.Thread(target=work_until, args=arguments, daemon=True), ended, done)


def a_process(codec: CodecName, values: int) -> AbstractContextManager[Count]:
    context = mp.get_context("spawn")
    ended, done = context.Event(), context.RawValue(ctypes.c_long, -1)
    return beside(
        context.Process(target=_process, args=(ended, done, codec, values), daemon=True),
        ended,
        done,
    )


def pure_python() -> AbstractContextManager[Count]:
    ended, done = threading.Event(), ctypes.c_long(0)

    def spin() -> None:
        while not ended.is_set():
            sum(range(100))

    return beside(threading.Thread(target=spin, daemon=True), ended, done)


@contextmanager
def nothing() -> Iterator[Count]:
    yield lambda: 0


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Of a step."""
    exchanges: float
    """Done meanwhile, for each step."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, default=10, help="steps in one turn")
    parser.add_argument("--codecs", type=codec_names, default=["fp32", "fp4_e3m0"])
    parser.add_argument(
        "--megabytes", type=positive_number, default=6.3, help="of the fragment in fp32"
    )
    own, words = parser.parse_known_args()
    if (os.cpu_count() or 1) < 2:
        parser.exit(
            1, "on one core a thread takes the core before it takes a lock: this needs two\n"
        )
    config = config_of(
        parser,
        [*words, "--diloco.workers", "1", "--validation.every", "0", "--diloco.method", "none"],
    )
    torch.set_num_threads(1)  # of training: the other core is for what works beside it
    values = max(1, round(own.megabytes * 1e6 / 4))

    conditions: dict[str, Callable[[], AbstractContextManager[Count]]] = {"nothing": nothing}
    for codec in own.codecs:
        conditions[f"a thread, {codec}"] = partial(a_thread, codec, values)
        conditions[f"a process, {codec}"] = partial(a_process, codec, values)
    conditions["a thread of pure Python"] = pure_python
    found: dict[str, list[Measured]] = {name: [] for name in conditions}
    with MetricsWriter(None, config.metrics) as metrics:
        trainer, _, loop = own_loop(config, metrics)
        device = trainer.world.device
        turn(loop, own.steps, device)
        for _ in range(own.rounds):
            for name, condition in conditions.items():
                with condition() as count:
                    before = count()
                    seconds = turn(loop, own.steps, device).seconds
                    found[name].append(Measured(seconds, (count() - before) / own.steps))
    sync_every, exchanges = config.diloco.sync_every, trainer.plan.parameters / values
    rows = [
        row(name, measured, found["nothing"], exchanges / sync_every)
        for name, measured in found.items()
    ]
    title = (
        f"{trainer.plan.parameters / 1e6:.1f}M parameters, {trainer.plan.tokens_per_step:,} tokens a step; "
        f"{describe_device(device)}; torch {torch.__version__}; fragments of {own.megabytes:g} MB; n = {own.rounds} turns of "
        f"{own.steps} steps; median (min ... max)"
    )
    header = [
        "beside",
        "ms a step",
        "longer than alone",
        "ms lost to an exchange",
        f"of a step at H = {sync_every}",
    ]
    print_table(title, header, rows)


def row(
    name: str, measured: list[Measured], alone: list[Measured], exchanges_a_step: float
) -> list[str]:
    """`exchanges_a_step`: of a real run."""
    pairs = list(zip(measured, alone, strict=True))
    cells = [name, summary([1e3 * one.seconds for one in measured], 1)]
    if measured is alone:
        return [*cells, "-", "-", "-"]
    cells.append(
        f"{summary([100 * (one.seconds / by_itself.seconds - 1) for one, by_itself in pairs], 1)} %"
    )
    if not all(one.exchanges for one in measured):
        return [*cells, "-", "-"]
    lost = [(one.seconds - by_itself.seconds) / one.exchanges for one, by_itself in pairs]
    shares = [
        100 * seconds * exchanges_a_step / by_itself.seconds
        for seconds, by_itself in zip(lost, alone, strict=True)
    ]
    return [*cells, summary([1e3 * seconds for seconds in lost], 2), f"{summary(shares, 3)} %"]


if __name__ == "__main__":
    main()
