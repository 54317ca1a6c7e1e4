"""Measure the speed of wire formats, and what a sync takes.

    .venv/bin/python -m benchmarks.sync [--rounds 20] [--codecs fp32,int8] [--tables syncs]
    .venv/bin/python -m benchmarks.sync --tables syncs --kinds folder,serve --turns 3
    .venv/bin/python -m benchmarks.sync --tables syncs --sync-every 20 --delay 10 --step-seconds 0.1

The formats run in turns in one process. A sync exchanges the whole model between two gloo processes
of one thread each, which wait for it. Like most rounds of a run (see `diloco.measure_every`), rows
do not measure norms, cosines and drift, except for "fp32, measured". If torchft is installed (extra
`bench`), its DiLoCo also syncs the same model.

With the extra `islands`, two islands do so: through a folder with a syncer (folder), and through a
bucket of one's own with TLS (serve). With --turns, all
rows are measured so often in turns. With --delay, a sync has so many steps of --step-seconds to
hide behind, of the --sync-every steps of a cycle.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks import core, torchft_loop
from benchmarks.hosts import build_host, site_of
from benchmarks.network import NoNetwork
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
from torchtitan_diloco.diloco.codecs import Codec, build_codec
from torchtitan_diloco.diloco.exchange import GPU_CHUNK, PIECE
from torchtitan_diloco.diloco.formats import FORMATS
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.distributed.world import WORKER, World, join_world
from torchtitan_diloco.islands import Islands
from torchtitan_diloco.islands.peers import IslandPeers
from torchtitan_diloco.models.decoder import Decoder, resolve_shape
from torchtitan_diloco.models.interface import init_weights

WORKERS = 2
MEGABYTES = 33.6
"""Size of the parameters in fp32."""
TIMEOUT = 600
FORMAT_COLUMNS = "format | bits | encode GB/s | decode GB/s"
SYNCS = {"exposed ms": ",.1f", "CPU ms": ".0f", "server CPU ms": ".0f", "sent MB": ".3f"}
"""Columns of a sync, and their formats."""
LEGEND = """\
GB/s count fp32 values; outer step: of a measured round. exposed: of the training thread; CPU: all
threads of one process, without inner steps; server: of islands, the syncer and SeaweedFS;
memory: peak above that of the same loop without syncs, library files aside. Numbers of
a sync are worker 0's. Median (min ... max)."""
Kind = Literal["gloo", "folder", "serve", "torchft"]


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
    times_of_turn = core.take_turns(turns, rounds)
    return {name: [seconds.wall for seconds in times] for name, times in times_of_turn.items()}


def share_of_copy(seconds: dict[str, list[float]]) -> list[float]:
    turns = zip(seconds["encode"], seconds["decode"], seconds["copy"], strict=True)
    return [2 * copy / (encode + decode) for encode, decode, copy in turns]


def format_row(name: str, rounds: int) -> list[str]:
    values = 1e-3 * torch.randn(round(MEGABYTES * 1e6 / 4))
    codec = build_codec(Quantization(codec=name))
    seconds_of_turn = measure_codec(codec, values, rounds)
    speeds = [
        core.summary([values.nbytes / seconds for seconds in seconds_of_turn[key]], ".2f", 1e-9)
        for key in ("encode", "decode")
    ]
    return [name, f"{8 * codec.wire_bytes(len(values)) / len(values):.3f}", *speeds]


def measure_outer_step(rounds: int) -> str:
    model = nn.Linear(round(MEGABYTES * 1e6 / 4), 1, bias=False)
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state = OuterState(fragment, OuterOptimizer(), core.CPU)

    def step() -> float:
        state.delta.normal_(std=1e-3)
        return core.timed(lambda: state.advance(OuterOptimizer.lr, measured=True)).wall

    (seconds,) = core.take_turns({"step": step}, rounds).values()
    return f"outer step: {core.summary(seconds, '.2f', 1e3)} ms"


# --- a sync, in the processes ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    rounds: int
    codec: str = "fp32"
    measured: bool = False
    """Measure norms, cosines and drift in all rounds instead of none."""
    through: Kind = "gloo"
    places: tuple[str, ...] = ()
    """`islands.join` of each island, or the address of torchft's lighthouse."""
    servers: tuple[int, ...] = ()
    """Process ids of the servers of islands."""
    device: str = "cpu"
    """Where the models are; "cuda": both workers share the first GPU."""
    sync_every: int = 1
    delay: int = 0
    step_seconds: float = 0.0
    """Seconds that a step sleeps, as if it waited for an accelerator."""

    @property
    def config(self) -> DiLoCoConfig:
        """Exchange the whole model, by default in every step, and wait for it."""
        return DiLoCoConfig(
            link=Link(timeout_seconds=TIMEOUT),
            sync_every=self.sync_every,
            measure_every=int(self.measured),
            fragments=Fragments(layers_per_fragment=0),
            overlap=Overlap(delay=self.delay, mixing=0.0),
            outer_optimizer=OuterOptimizer(name="nesterov", lr=0.7, momentum=0.9),
            quantization=Quantization(codec=self.codec),
        )


@torch.no_grad()
def inner_step(model: nn.Module, worker: int) -> None:
    """Move the parameters of the workers apart, as training on different data does."""
    for parameter in model.parameters():
        parameter.mul_(0.999 - 0.0001 * worker)


def measure(case: Case) -> tuple[list[tuple[float, ...]], float]:
    """Measure syncs on this rank.

    Return the numbers of each sync, and the peak memory in MB above the same loop without syncs.
    """
    world = join_world(
        Distributed(),
        case.config.link,
        device=case.device,
        workers=WORKERS,
        fsdp=0,
        outer_loop=case.device == "cuda",  # which lets workers share a GPU
    )
    # Half of the values are in blocks, the rest in an embedding and a head.
    config = Model(layers=4, width=256, heads=4, head_dim=64, feed_forward=1536, activation="gelu")
    model = Decoder(resolve_shape(config), vocab_size=16_384).to(world.device)
    for _ in range(3):
        inner_step(model, world.worker)
    plain = peak_megabytes()
    syncs = list[tuple[float, ...]]()
    outer, step = build_loop(model, world, case)
    for number in range(case.rounds + 1):
        dist.barrier()
        server = sum(map(cpu_seconds, case.servers))
        dist.barrier()
        cpu = time.process_time()
        exposed = 0.0
        for _ in range(case.sync_every):
            inner = time.thread_time()
            inner_step(model, world.worker)
            cpu += time.thread_time() - inner
            time.sleep(case.step_seconds)
            exposed += core.timed(step, world.device).wall
        cpu = time.process_time() - cpu
        dist.barrier()
        server = sum(map(cpu_seconds, case.servers)) - server
        sent = outer.metrics().get("worker/sent_bytes", 0.0)
        if number:  # the first round touches all buffers for the first time
            syncs.append((1e3 * exposed, 1e3 * cpu, 1e3 * server, sent / 1e6))
    memory = peak_megabytes() - plain
    outer.close()
    return syncs, memory


def build_loop(
    model: Decoder, world: World, case: Case
) -> tuple[StreamingDiLoCo | torchft_loop.TorchftLoop, Callable[[], object]]:
    """Return StreamingDiLoCo, an island or torchft's DiLoCo, and its step."""
    if case.through == "torchft":
        inner = SGD(model.parameters(), lr=0.0)  # without gradients, a step only runs the hooks
        loop = torchft_loop.TorchftLoop(model, inner, case.config, world, lighthouse=case.places[0])
        return loop, inner.step
    if case.through == "gloo":
        outer = StreamingDiLoCo(model, world.group(WORKER), case.config)
        return outer, outer.step
    init_weights(model, seed=0)
    name = site_of(world.worker)
    settings = Islands(case.places[world.worker], name, begin=WORKERS, grace_seconds=TIMEOUT)
    island = IslandPeers(settings, total_tokens=10**9)
    outer = StreamingDiLoCo(model, island, case.config)
    island.join()
    return outer, outer.step


def cpu_seconds(process: int) -> float:
    """Return the CPU time of another process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        yield replace(case, places=(f"http://localhost:{port}",))
        lighthouse.shutdown()
    elif case.through == "gloo":
        yield case
    else:
        with tempfile.TemporaryDirectory() as folder, NoNetwork() as network:
            host = build_host(case.through, Path(folder), network, WORKERS)
            try:
                host.start()
                places = tuple(host.join(worker) for worker in range(WORKERS))
                yield replace(case, places=places, servers=tuple(host.processes))
            finally:
                host.stop()


def measure_in_processes(case: Case) -> tuple[list[tuple[float, ...]], float]:
    """Measure in new processes, as memory freed by earlier cases would be reused."""
    pool = ProcessPool(TIMEOUT)
    with connected(case) as connected_case:
        syncs, memory = pool.run(measure, WORKERS, connected_case)[0]
    pool.close()
    return syncs, memory


def sync_row(name: str, measured: Sequence[tuple[list[tuple[float, ...]], float]]) -> list[str]:
    """Return a row of all turns."""
    syncs = [sync for turn, _ in measured for sync in turn]
    columns = zip(zip(*syncs, strict=True), SYNCS.values(), strict=True)
    texts = [core.summary(column, form) if any(column) else "-" for column, form in columns]
    return [name, *texts, core.summary([memory for _, memory in measured], "+.0f")]


def sync_cases(codecs: list[str], kinds: list[str], case: Case) -> dict[str, Case]:
    """Return what is measured on CPUs, as changes of a case: each codec, also through islands, and
    torchft."""
    cases = dict[str, Case]()
    for kind in get_args(Kind):
        if kind not in kinds or kind == "torchft":
            continue
        for codec in codecs:
            name = codec if kind == "gloo" else f"{kind}, {codec}"
            cases[name] = replace(case, codec=codec, through=kind)
            if name == "fp32":
                cases["fp32, measured"] = replace(case, measured=True)
    if "torchft" in kinds and torchft_loop.is_installed():
        cases["torchft, fp32"] = replace(case, through="torchft")
    return cases


def measure_syncs(options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of all syncs."""
    case = Case(
        options.rounds,
        sync_every=options.sync_every,
        delay=options.delay,
        step_seconds=options.step_seconds,
    )
    cases = sync_cases(options.codecs, options.kinds, case)
    turns = {name: partial(measure_in_processes, case) for name, case in cases.items()}
    results = core.take_turns(turns, options.turns, warm_up=0)
    return [sync_row(name, measured) for name, measured in results.items()]


def main() -> None:
    parser = core.build_parser(__doc__)
    tables = core.one_of(("formats", "syncs"))
    parser.add_argument("--tables", type=tables, default="", help="default: both")
    parser.add_argument("--codecs", type=core.one_of(FORMATS), default="fp32,bf16,int8,fp4_e3m0")
    parser.add_argument("--rounds", type=core.positive, default=9)
    kinds = core.one_of(get_args(Kind))
    parser.add_argument("--kinds", type=kinds, default="", help="of syncs; default: all")
    parser.add_argument("--turns", type=core.positive, default=1, help="of all syncs")
    parser.add_argument("--sync-every", type=core.positive, default=1, help="H")
    parser.add_argument("--delay", type=int, default=0, help="tau, below H")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = f"{MEGABYTES} MB of fp32 parameters, n = {options.rounds}, {os.cpu_count()} cores"
    print(f"{about}; torch {torch.__version__}\n{LEGEND}")
    if "formats" in options.tables:
        rows = [format_row(name, options.rounds) for name in options.codecs]
        core.print_table(f"one thread; {measure_outer_step(options.rounds)}", FORMAT_COLUMNS, rows)
    if "syncs" in options.tables:
        rows = measure_syncs(options)
        header = " | ".join(["loop", *SYNCS, "memory MB"])
        core.print_table(f"{WORKERS} gloo processes of 1 thread, loopback", header, rows)


if __name__ == "__main__":
    main()
