"""Measure what the work of an exchange takes from the training step beside it, and how much of that
is due to Python's lock.

    OMP_NUM_THREADS=1 python -m benchmarks.contention [--section.key value ...]

The trainer's step (as in benchmarks/train_step.py) runs beside, in turns: nothing; a thread that
exchanges a fragment over and over, without a transfer (delta, encode, average, outer step,
checksum, merge); a process that does the same. A process shares cores, caches and memory with
training, a thread also shares Python's lock: what its exchange costs more is due to the lock. The
last row is a thread of pure Python, which holds the lock as long as it can: it shows that the
measurement would find it.

"of a step at H" is for the exchanges of the whole model in H steps.
"""

import ctypes
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import core
from benchmarks.train_step import ONE_WORKER, build_trainer_loop, run_steps
from torchtitan_diloco.diloco.chunks import CHUNK
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import Fragments, OuterOptimizer, Quantization
from torchtitan_diloco.diloco.exchange import PIECE
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.utils import describe_device

Count = Callable[[], int]
"""Returns the number of exchanges done so far."""
PURE_PYTHON = ""
"""Stands for a codec's name in the row of pure Python."""
NOTHING = "nothing"


class Work:
    """Rounds of one fragment in which nothing is sent: the worker's own delta is the mean."""

    def __init__(self, codec: str, values: int) -> None:
        self._codec = build_codec(Quantization(codec=codec))  # type: ignore[arg-type]
        model = nn.Linear(values, 1, bias=False)
        (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
        self.state = OuterState(fragment, OuterOptimizer(), torch.device("cpu"))
        size = self._codec.wire_bytes(min(CHUNK, values))
        self._payload = torch.empty(size, dtype=torch.uint8)

    def exchange(self) -> None:
        self.state.take_delta()
        self.state.finish_delta()
        for chunk in self.state.delta.split(CHUNK):
            payload = self._payload[: self._codec.wire_bytes(chunk.numel())]
            encoded = payload.split(self._codec.wire_bytes(PIECE))
            for values, part in zip(chunk.split(PIECE), encoded, strict=True):
                self._codec.encode(values, part)
            for values, part in zip(chunk.split(PIECE), encoded, strict=True):
                self._codec.average([part, part], [1.0, 1.0], values)
        self.state.advance()
        self.state.apply(0.5)


def work_until(ended: Any, done: Any, codec: str, values: int) -> None:
    """Exchange until the event `ended`, counting in `done.value`: the first round counts as 0."""
    torch.set_num_threads(1)
    work = Work(codec, values)
    while not ended.is_set():
        work.exchange()
        done.value += 1


def spin_until(ended: Any, done: Any) -> None:
    done.value = 0
    while not ended.is_set():
        sum(range(100))


@contextmanager
def beside(worker: Any, ended: Any, done: Any) -> Iterator[Count]:
    """Run a thread or process in the body, from the end of its first exchange."""
    worker.start()
    try:
        while done.value < 0:
            if not worker.is_alive():
                raise RuntimeError("the work beside training has ended; its error stands above")
            time.sleep(0.01)
        yield lambda: int(done.value)
    finally:
        ended.set()
        worker.join()


def in_thread(codec: str, values: int) -> AbstractContextManager[Count]:
    ended, done = threading.Event(), ctypes.c_long(-1)
    target = partial(work_until, codec=codec, values=values) if codec else spin_until
    return beside(threading.Thread(target=target, args=(ended, done), daemon=True), ended, done)


def in_process(codec: str, values: int) -> AbstractContextManager[Count]:
    context = mp.get_context("spawn")
    ended, done = context.Event(), context.RawValue(ctypes.c_long, -1)
    arguments = ended, done, codec, values
    return beside(context.Process(target=work_until, args=arguments, daemon=True), ended, done)


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Seconds of a step."""
    exchanges: float
    """Done during a step."""


def build_row(
    name: str, measured: list[Measured], alone: list[Measured], exchanges_per_step: float
) -> list[str]:
    """`exchanges_per_step`: in a real run."""
    pairs = list(zip(measured, alone, strict=True))
    cells = [name, core.summary([one.seconds for one in measured], 1, 1e3)]
    if measured is alone:
        return [*cells, "-", "-", "-"]
    longer = [one.seconds / own.seconds - 1 for one, own in pairs]
    cells.append(f"{core.summary(longer, 1, 100)} %")
    if not all(one.exchanges for one in measured):
        return [*cells, "-", "-"]
    lost = [(one.seconds - own.seconds) / one.exchanges for one, own in pairs]
    shares = [
        seconds * exchanges_per_step / own.seconds for seconds, own in zip(lost, alone, strict=True)
    ]
    return [*cells, core.summary(lost, 2, 1e3), f"{core.summary(shares, 3, 100)} %"]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=9)
    parser.add_argument("--steps", type=core.positive, default=10, help="steps in one turn")
    parser.add_argument(
        "--codecs", type=core.list_of(core.codec_name), default=["fp32", "fp4_e3m0"]
    )
    size_help = "size of the fragment in fp32"
    parser.add_argument("--megabytes", type=core.positive_number, default=6.3, help=size_help)
    options, words = parser.parse_known_args()
    if (os.cpu_count() or 1) < 2:
        parser.exit(1, "this needs two cores: on one, a thread waits for the core, not the lock\n")
    config = core.parse_config(parser, [*words, *ONE_WORKER])
    torch.set_num_threads(1)  # of training: the other core is for the work beside it
    values = max(1, round(options.megabytes * 1e6 / 4))
    conditions: dict[str, Callable[[], AbstractContextManager[Count]]] = {
        NOTHING: lambda: nullcontext(lambda: 0)
    }
    for codec in options.codecs:
        conditions[f"a thread, {codec}"] = partial(in_thread, codec, values)
        conditions[f"a process, {codec}"] = partial(in_process, codec, values)
    conditions["a thread of pure Python"] = partial(in_thread, PURE_PYTHON, values)
    trainer, _, loop = build_trainer_loop(config)
    device = trainer.world.device

    def measure(name: str) -> Measured:
        with conditions[name]() as count:
            before = count()
            seconds = run_steps(loop, options.steps, device).seconds
            return Measured(seconds, (count() - before) / options.steps)

    run_steps(loop, options.steps, device)
    tasks = {name: partial(measure, name) for name in conditions}
    found = core.take_turns(tasks, options.rounds, warm_up=0)
    every, parameters = config.diloco.sync_every, trainer.plan.parameters
    exchanges = parameters / values / every
    rows = [
        build_row(name, measured, found[NOTHING], exchanges) for name, measured in found.items()
    ]
    title = (
        f"{parameters / 1e6:.1f}M parameters, {trainer.plan.tokens_per_step:,} tokens a step; "
        f"{describe_device(device)}; torch {torch.__version__}; fragments of "
        f"{options.megabytes:g} MB; n = {options.rounds} turns of {options.steps} steps; median "
        "(min ... max)"
    )
    last = f"of a step at H = {every}"
    header = f"beside | ms a step | longer than alone | ms lost to an exchange | {last}"
    core.print_table(title, header, rows)


if __name__ == "__main__":
    main()
