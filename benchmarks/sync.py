"""Compare wire formats with a copy in memory, and a sync with a flat all-reduce in plain torch.

    .venv/bin/python -m benchmarks.sync [--rounds 20] [--codecs fp32,int8] [--rate 200mbit]

The formats run in turns in one process. A sync and the all-reduce run in turns on two gloo
processes of one thread each. Like most rounds of a run (see `diloco.measure_every`), rows do not
measure norms, cosines and drift, except for "fp32, measured".

If torchft is installed (extra `bench`), its DiLoCo also syncs the same model. With the extra
`islands`, two islands do so through a server with TLS. If the system allows it, everything runs in
a network namespace, so that its interface counts no other traffic and `--rate` can limit it.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks import core, torchft_loop
from benchmarks.network import NoNetworkError, enter_own_network, loopback_bytes
from tests.processes import ProcessPool
from torchtitan_diloco.config.schema import Distributed, Model
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.codecs import CODECS, Codec, build_codec
from torchtitan_diloco.diloco.exchange import GPU_CHUNK, PIECE
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.distributed.world import WORKER, World, join_world
from torchtitan_diloco.islands import IslandPeers, Islands
from torchtitan_diloco.islands.local import local_server
from torchtitan_diloco.models.decoder import Decoder

WORKERS = 2
LAYERS = 4
MEGABYTES = 33.6
"""Size of the parameters in fp32."""
TIMEOUT = 600
INNER_SECONDS = 0.4
"""Length of an inner step with a delay: a sleep, as if waiting for an accelerator."""
FORMATS = "format | bits | encode GB/s | decode GB/s | ms | share of copy % | n"
SYNCS = {
    "exposed ms": ",.1f",
    "all-reduce ms": ",.1f",
    "CPU ms": ".0f",
    "all-reduce CPU ms": ".0f",
    "server CPU ms": ".0f",
    "sent MB, one worker": ".3f",
    "on lo MB, both": ".3f",
}
"""Columns of a sync, and their formats."""
LEGEND = """\
GB/s count fp32 values; share of copy: twice the time of the copy / time of encode + decode; outer
step: of a measured round. exposed: of the training thread; all-reduce: one flat fp32 all-reduce of
as many values; CPU: all threads of one process; server: of islands; memory: peak above
that of the same loop without syncs, library files aside. Numbers of a sync are worker 0's. Median
(min ... max) of n."""


# --- wire formats ---------------------------------------------------------------------------------


def measure_codec(codec: Codec, values: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of encoding and decoding, in pieces as in an exchange, and of a copy."""
    piece = GPU_CHUNK if values.device.type == "cuda" else PIECE
    payload = torch.empty(codec.wire_bytes(len(values)), dtype=torch.uint8, device=values.device)
    decoded = torch.empty_like(values)
    encoded = payload.split(codec.wire_bytes(piece))

    def encode() -> None:
        for part, target in zip(values.split(piece), encoded, strict=True):
            codec.encode(part, target)

    def decode() -> None:
        for source, part in zip(encoded, decoded.split(piece), strict=True):
            codec.decode(source, part)

    tasks: dict[str, Callable[[], object]]
    tasks = {"encode": encode, "decode": decode, "copy": lambda: decoded.copy_(values)}
    turns = {name: partial(core.timed, task, values.device) for name, task in tasks.items()}
    found = core.take_turns(turns, rounds)
    return {name: [one.wall for one in times] for name, times in found.items()}


def share_of_copy(found: dict[str, list[float]]) -> list[float]:
    turns = zip(found["encode"], found["decode"], found["copy"], strict=True)
    return [2 * copy / (encode + decode) for encode, decode, copy in turns]


def format_row(name: str, rounds: int) -> list[str]:
    values = 1e-3 * torch.randn(round(MEGABYTES * 1e6 / 4))
    codec = build_codec(Quantization(codec=name))  # type: ignore[arg-type]
    found = measure_codec(codec, values, rounds)
    both = list(map(sum, zip(found["encode"], found["decode"], strict=True)))
    return [
        name,
        f"{8 * codec.wire_bytes(len(values)) / len(values):.3f}",
        *(
            core.summary([values.nbytes / one for one in found[key]], ".2f", 1e-9)
            for key in ("encode", "decode")
        ),
        core.summary(both, ".2f", 1e3),
        core.summary(share_of_copy(found), ".0f", 100),
        str(rounds),
    ]


def outer_step_row(rounds: int) -> list[str]:
    model = nn.Linear(round(MEGABYTES * 1e6 / 4), 1, bias=False)
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state = OuterState(fragment, OuterOptimizer(), core.CPU)

    def step() -> float:
        state.delta.normal_(std=1e-3)
        return core.timed(lambda: state.advance(measured=True)).wall

    (seconds,) = core.take_turns({"step": step}, rounds).values()
    return ["outer step", "", "", "", core.summary(seconds, ".2f", 1e3), "", str(rounds)]


# --- a sync, in the processes ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    fragments: int
    delay: int
    rounds: int
    codec: str = "fp32"
    measured: bool = False
    """Measure norms, cosines and drift in all rounds instead of none."""
    through: Literal["gloo", "islands", "torchft"] = "gloo"
    place: str = ""
    """Join string of islands, or address of torchft's lighthouse."""
    server: int = 0
    """Process id of the server of islands."""

    @property
    def config(self) -> DiLoCoConfig:
        """Give each fragment `delay` + 1 steps of a cycle, in which its sync begins and ends."""
        # The last fragment holds the parameters outside the blocks.
        layers = LAYERS // (self.fragments - 1) if self.fragments > 1 else 0
        return DiLoCoConfig(
            sync_every=self.fragments * (self.delay + 1),
            measure_every=int(self.measured),
            fragments=Fragments(layers_per_fragment=layers),
            overlap=Overlap(delay=self.delay, mixing=0.5 if self.delay else 0.0),
            outer_optimizer=OuterOptimizer(name="nesterov", lr=0.7, momentum=0.9),
            quantization=Quantization(codec=self.codec),  # type: ignore[arg-type]
        )


Measured = tuple[dict[str, list[float]], float]
"""Numbers of each sync by column, and peak memory in MB above the same loop without syncs."""


@torch.no_grad()
def inner_step(model: nn.Module, worker: int) -> None:
    """Move the parameters of the workers apart, as training on different data does."""
    for parameter in model.parameters():
        parameter.mul_(0.999 - 0.0001 * worker)


def measure(case: Case) -> Measured:
    """Measure StreamingDiLoCo, an island or torchft's DiLoCo on this rank."""
    link = Link(timeout_seconds=TIMEOUT)
    world = join_world(Distributed(), link, device="cpu", workers=WORKERS, fsdp=0)
    # Half of the values are in blocks, the rest in an embedding and a head.
    shape = Model(
        layers=LAYERS, width=256, heads=4, head_dim=64, feed_forward=1536, activation="gelu"
    )
    model = Decoder(shape, 16_384, 128)
    values = torch.ones(round(MEGABYTES * 1e6 / 4))  # kept, so that a sync cannot reuse its memory
    for _ in range(3):
        inner_step(model, world.worker)
        time_all_reduce(values)
    # Two at once, as each thread of gloo allocates memory for its first one.
    for work in [dist.all_reduce(values, async_op=True) for _ in range(2)]:
        work.wait()
    plain, step = peak_megabytes(), None
    outer: StreamingDiLoCo | torchft_loop.TorchftLoop
    if case.through == "torchft":
        inner = SGD(model.parameters(), lr=0.0)  # without gradients, a step only runs the hooks
        outer, step = (
            torchft_loop.TorchftLoop(
                model,
                inner,
                case.config,
                WORKERS,
                f"replica_{world.worker}",
                lighthouse=case.place,
                address="localhost",
                timeout_seconds=TIMEOUT,
            ),
            inner.step,
        )
        sizes = outer.sizes
    else:
        outer = build_loop(model, world, case)
        sizes = [one.parameters for one in outer.fragments]
        for _ in range(case.config.sync_every - 1):  # nothing is sent in the first cycle
            outer.step()
    syncs: dict[str, list[float]] = {column: [] for column in SYNCS}
    for number in range((case.rounds + 1) * case.fragments):
        inner_step(model, world.worker)
        floor = time_all_reduce(values[: sizes[number % case.fragments]])
        found = time_window(step or outer.step, case)
        sent = outer.metrics().get("worker/sent_bytes", 0)
        numbers = [found[0], 1e3 * floor.wall, found[1], 1e3 * floor.cpu, found[2], sent / 1e6]
        if number >= case.fragments:  # the first round touches all buffers for the first time
            for column, value in zip(SYNCS, [*numbers, found[3]], strict=True):
                syncs[column].append(value)
    memory = peak_megabytes() - plain
    outer.close()
    return syncs, memory


def build_loop(model: Decoder, world: World, case: Case) -> StreamingDiLoCo:
    if case.through == "gloo":
        return StreamingDiLoCo(model, world.group(WORKER), case.config)
    model.init_weights(seed=0)
    name = f"island-{world.worker}"
    settings = Islands(case.place, name, begin=WORKERS, grace_seconds=TIMEOUT)
    island = IslandPeers(settings, total_tokens=10**9)
    outer = StreamingDiLoCo(model, island, case.config)
    island.join()
    return outer


def cpu_seconds(process: int) -> float:
    """Return the CPU time of another process so far, or 0 if `process` is 0."""
    if not process:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def time_all_reduce(values: Tensor) -> core.Seconds:
    values.fill_(1.0)
    dist.barrier()
    return core.timed(lambda: dist.all_reduce(values))


def time_window(step: Callable[[], object], case: Case) -> tuple[float, float, float, float]:
    """Return exposed, CPU and server CPU milliseconds, and megabytes on the wire, of one sync."""
    dist.barrier()
    wire, server = loopback_bytes(), cpu_seconds(case.server)
    dist.barrier()
    exposed, cpu = 0.0, time.process_time()
    for number in range(case.delay + 1):
        if number:
            time.sleep(INNER_SECONDS)
        exposed += core.timed(step).wall
    cpu = time.process_time() - cpu
    dist.barrier()
    wire, server = loopback_bytes() - wire, cpu_seconds(case.server) - server
    return 1e3 * exposed, 1e3 * cpu, 1e3 * server, wire / 1e6


def peak_megabytes() -> float:
    """Return the peak memory of this process, without mapped library files.

    getrusage would include the peak of the parent process.
    """
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("VmHWM:", "RssFile:")}
    return (kib["VmHWM:"] - kib["RssFile:"]) * 1024 / 1e6


# --- the tables -----------------------------------------------------------------------------------


@contextmanager
def connected(case: Case) -> Iterator[Case]:
    """Start what the workers need besides each other."""
    if case.through == "torchft":
        os.environ.setdefault("RUST_LOG", "warn")  # otherwise it logs every quorum
        lighthouse = torchft_loop.serve_lighthouse("127.0.0.1:0", WORKERS)
        port = lighthouse.address().rpartition(":")[2]
        yield replace(case, place=f"http://localhost:{port}")
        lighthouse.shutdown()
    elif case.through == "islands":
        with tempfile.TemporaryDirectory() as folder, local_server(Path(folder, "it")) as server:
            assert server.process is not None
            yield replace(case, place=str(server.join), server=server.process.pid)
    else:
        yield case


def sync_row(name: str, case: Case) -> list[str]:
    """Measure in new processes, as memory freed by earlier cases would be reused."""
    pool = ProcessPool(TIMEOUT)
    with connected(case) as case:
        syncs, memory = pool.run(measure, WORKERS, case)[0]
    pool.close()
    columns = [
        core.summary(syncs[column], form) if any(syncs[column]) else "-"
        for column, form in SYNCS.items()
    ]
    about = [name, f"{MEGABYTES / case.fragments:.1f}", str(case.delay)]
    return [*about, *columns, f"{memory:+.0f}", str(len(syncs["CPU ms"]))]


def sync_rows(options: argparse.Namespace) -> list[list[str]]:
    rows = []
    for fragments, delay in product(options.fragments, options.delays):
        plain = Case(fragments, delay, options.rounds)
        cases = {codec: replace(plain, codec=codec) for codec in options.codecs}
        if "fp32" in options.codecs:
            cases["fp32, measured"] = replace(plain, measured=True)
        for codec in options.codecs:
            cases[f"islands, {codec}"] = replace(plain, codec=codec, through="islands")
        if torchft_loop.is_installed():
            cases["torchft, fp32"] = replace(plain, through="torchft")
        rows += [sync_row(name, case) for name, case in cases.items()]
    return rows


def main() -> None:
    parser = core.build_parser(__doc__)
    tables = "formats", "syncs"
    parser.add_argument("--tables", type=core.one_of(tables), default="", help="default: both")
    parser.add_argument("--fragments", type=core.list_of(core.positive), default=[1, 2])
    parser.add_argument("--delays", type=core.list_of(int), default=[0], help="tau")
    parser.add_argument("--codecs", type=core.one_of(CODECS), default="fp32,bf16,int8,fp4_e3m0")
    parser.add_argument("--rounds", type=core.positive, default=9, help="syncs of each fragment")
    rate_help = "as tc writes it (200mbit), of both directions together"
    parser.add_argument("--rate", default="", help=rate_help)
    options = parser.parse_args()
    for fragments in options.fragments:
        if fragments > 1 and LAYERS % (fragments - 1):
            parser.error(
                f"--fragments {fragments}: all but the last must share the {LAYERS} blocks of the "
                "model evenly"
            )
    try:
        enter_own_network("benchmarks.sync", options.rate)
    except NoNetworkError as error:
        if options.rate:
            parser.error(f"--rate {options.rate} needs a network namespace: {error}")
        print(f"no network namespace, so no bytes from the interface's counter: {error}")
    torch.set_num_threads(1)
    print(f"{MEGABYTES} MB of fp32 parameters, {os.cpu_count()} cores; torch {torch.__version__}")
    print(LEGEND)
    if "formats" in options.tables:
        rows = [format_row(name, options.rounds) for name in options.codecs]
        core.print_table("one thread", FORMATS, [*rows, outer_step_row(options.rounds)])
    if "syncs" in options.tables:
        speed = f" at {options.rate} for both directions together" if options.rate else ""
        sleep = f", inner steps of {INNER_SECONDS:g} s" if any(options.delays) else ""
        title = f"{WORKERS} gloo processes of 1 thread, loopback{speed}{sleep}"
        header = " | ".join(["loop", "MB fp32", "tau", *SYNCS, "memory MB", "n"])
        core.print_table(title, header, sync_rows(options))


if __name__ == "__main__":
    main()
