"""What the work of an exchange takes from the training step beside it, and how much of that is Python's lock.

    OMP_NUM_THREADS=1 python -m benchmarks.contention [--rounds 9] [--steps 10] [--codecs fp32,fp4_e3m0] [--megabytes 6.3]
                                                      [--section.key value ...]

The trainer's step (as in benchmarks/train_step.py) takes turns beside: nothing; a thread that does all the work of an exchange
but its transfer, without a pause (delta, encode, average, outer step); a process that does the same. A process shares cores,
caches and memory with training, a thread shares Python's lock as well: what lies between the two rows is the lock. The last row
is a thread of pure Python, which holds the lock all the time: it shows that the measurement would find it.

A real exchange works for a small part of the time. "Of a step at H": what is left of the thread's row when it works only as
long as it takes to exchange the whole model once in H steps.
"""

import argparse
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing.synchronize import Event as ProcessEvent

import torch

from benchmarks.table import print_table, summary
from benchmarks.train_step import Turn, own_loop, turn
from torchtitan_diloco.components.metrics import MetricsWriter
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.diloco_schema import CodecName, OuterOptimizer, Quantization
from torchtitan_diloco.diloco.codecs import CODECS, build_codec
from torchtitan_diloco.diloco.exchange import CHUNK, CODED_PIECE
from torchtitan_diloco.diloco.outer_optimizer import BLOCK, outer_update
from torchtitan_diloco.tools.device import describe_device


class Work:
    """An exchange of two workers without its transfer: what one worker does with a fragment of so many values."""

    def __init__(self, codec: CodecName, values: int) -> None:
        torch.manual_seed(0)
        self._codec = build_codec(Quantization(codec=codec))
        self._outer, self._momentum = torch.randn(values), torch.zeros(values)
        self._local, self._delta = self._outer + 1e-3 * torch.randn(values), torch.empty(values)
        self._payload = torch.empty(self._codec.wire_bytes(min(CHUNK, values)), dtype=torch.uint8)
        self._piece = BLOCK if self._codec.is_fp32 else CODED_PIECE

    def once(self) -> None:
        torch.sub(self._outer, self._local, out=self._delta)
        for chunk in self._delta.split(CHUNK):
            payload = self._payload[: self._codec.wire_bytes(chunk.numel())].split(self._codec.wire_bytes(self._piece))
            for values, encoded in zip(chunk.split(self._piece), payload, strict=True):
                self._codec.encode(values, encoded)
            for values, encoded in zip(chunk.split(self._piece), payload, strict=True):
                self._codec.average([encoded, encoded], [1.0, 1.0], values)
        outer_update(OuterOptimizer(), self._outer, self._delta, [self._momentum], 1)


def work_until(ended: Callable[[], bool], begun: Callable[[], None], codec: CodecName, values: int) -> None:
    torch.set_num_threads(1)  # of this thread alone
    work = Work(codec, values)
    work.once()
    begun()
    while not ended():
        work.once()


def _process(ended: ProcessEvent, begun: ProcessEvent, codec: CodecName, values: int) -> None:
    work_until(ended.is_set, begun.set, codec, values)


@contextmanager
def beside_thread(codec: CodecName, values: int) -> Iterator[None]:
    ended, begun = threading.Event(), threading.Event()
    thread = threading.Thread(target=work_until, args=(ended.is_set, begun.set, codec, values))
    thread.start()
    begun.wait()
    yield
    ended.set()
    thread.join()


@contextmanager
def beside_process(codec: CodecName, values: int) -> Iterator[None]:
    context = mp.get_context("spawn")
    ended, begun = context.Event(), context.Event()
    process = context.Process(target=_process, args=(ended, begun, codec, values))
    process.start()
    begun.wait()
    yield
    ended.set()
    process.join()


@contextmanager
def beside_python() -> Iterator[None]:
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    yield
    ended.set()
    thread.join()


def seconds_of_work(codec: CodecName, values: int, rounds: int) -> list[float]:
    """Alone, on a core of its own."""
    work, found = Work(codec, values), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work.once()
        found.append(time.perf_counter() - started)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps in one turn")
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=["fp32", "fp4_e3m0"])
    parser.add_argument("--megabytes", type=float, default=6.3, help="of the fragment in fp32")
    own, words = parser.parse_known_args()
    unknown = [name for name in own.codecs if name not in CODECS]
    if unknown:
        parser.error(f"--codecs {','.join(unknown)} is unknown: choose from {', '.join(CODECS)}")
    if (os.cpu_count() or 1) < 2:
        parser.exit(1, "on one core a thread takes the core before it takes a lock: this needs two\n")
    config = from_command_line([*words, "--diloco.workers", "1", "--validation.every", "0", "--diloco.method", "none"])
    assert config is not None
    values = round(own.megabytes * 1e6 / 4)

    conditions: dict[str, Callable[[], AbstractContextManager[None]]] = {"nothing": nullcontext}
    working: dict[str, CodecName] = {}
    for codec in own.codecs:
        conditions[f"a thread, {codec}"] = partial(beside_thread, codec, values)
        conditions[f"a process, {codec}"] = partial(beside_process, codec, values)
        working[f"a thread, {codec}"] = codec
    conditions["a thread of pure Python"] = beside_python
    found: dict[str, list[Turn]] = {name: [] for name in conditions}
    with MetricsWriter(None, config.metrics) as metrics:
        trainer, _, loop = own_loop(config, metrics)
        device = trainer.world.device
        turn(loop, own.steps, device)
        for _ in range(own.rounds):
            for name, beside in conditions.items():
                with beside():
                    found[name].append(turn(loop, own.steps, device))
    alone = found["nothing"]
    sync_every, exchanged = config.diloco.sync_every, trainer.plan.parameters / values

    rows = []
    for name, turns in found.items():
        longer = [100 * (one.seconds / by_itself.seconds - 1) for one, by_itself in zip(turns, alone, strict=True)]
        of_a_step = "-"
        if name in working:
            busy = [exchanged * seconds / sync_every for seconds in seconds_of_work(working[name], values, own.rounds)]
            shares = [share * seconds / one.seconds for share, seconds, one in zip(longer, busy, alone, strict=True)]
            of_a_step = f"{summary(shares, 3)} %"
        beside_text = "-" if name == "nothing" else f"{summary(longer, 1)} %"
        rows.append([name, summary([1e3 * one.seconds for one in turns], 1), beside_text, of_a_step])
    title = (
        f"{trainer.plan.parameters / 1e6:.1f}M parameters, {trainer.plan.tokens_per_step:,} tokens a step; "
        f"{describe_device(device)}; torch {torch.__version__}; fragments of {own.megabytes:g} MB; n = {own.rounds} turns of "
        f"{own.steps} steps; median (min ... max)"
    )
    print_table(title, ["beside", "ms a step", "longer than alone", f"of a step at H = {sync_every}"], rows)


if __name__ == "__main__":
    main()
