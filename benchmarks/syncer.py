"""Measure what a syncer takes for a cycle of a large model: CPU time, seconds and memory.

    .venv/bin/python -m benchmarks.syncer [--millions 100] [--islands 2,4,8] [--threads 2]
        [--codec fp4_e3m0] [--fragments 8] [--cycles 3] [--folder DIR]

`islands sync` decides and merges in a process of its own, for a run in a folder. The islands are
the shipped rules without tensors: in each cycle they store the same random delta of every fragment.
All parts of a cycle are listed at once, when their bytes are stored, and then the syncer fetches,
merges and publishes them, `--threads` fragments side by side. The time of a cycle ends when all
versions are decided. The first cycle touches all memory for the first time, and is left out; the
copies and outer states, which are stored every eight versions, are in none.

A syncer also takes some CPU time each second while it has nothing to merge, which does not grow
with the model. It is measured before these cycles, and subtracted from their CPU time.

The table extrapolates to --to millions of parameters (default: 1,000), as all of the rest grows in
proportion to them, and shows the time as a share of a cycle of 100 s. Bytes are the increase above
the same process before the run was founded: private memory, and the mapped files of its scratch
folder, which the system may write to the disk. The disk has to hold about 80 bytes a parameter.
"""

import argparse
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import core
from benchmarks.hosts import FolderHost
from benchmarks.network import NoNetwork
from benchmarks.sync import cpu_seconds
from tests.waiting import wait_until
from torchtitan_diloco.diloco.formats import island_formats
from torchtitan_diloco.islands.layout import Layout, hexadecimal
from torchtitan_diloco.islands.link import NOTE_SECONDS
from torchtitan_diloco.islands.payload import PartHeader, encode, memory_of
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.founding import Founding, encode_founding
from torchtitan_diloco.islands.rules.fragment import Boundary
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.names import ISLAND, founding_name, part_name
from torchtitan_diloco.islands.rules.settings import RATES, Settings
from torchtitan_diloco.islands.runs import Decisions, Run
from torchtitan_diloco.store import open_store

WIDTH = 1024
"""Values of a row of the parameters."""
PATIENCE = 600.0
CYCLE_SECONDS = 100.0
IDLE_SECONDS = 5.0
HEADER = (
    "parameters | islands | CPU s a cycle | idle, CPU s in 100 s | s a cycle | of 100 s | "
    "private bytes a parameter | mapped bytes a parameter | n"
)


class Memory(NamedTuple):
    """Resident bytes of a process."""

    private: int
    mapped: int


def memory_of_process(pid: int) -> Memory:
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssFile:")}
    return Memory(1024 * kib["RssAnon:"], 1024 * kib["RssFile:"])


# --- islands without tensors ----------------------------------------------------------------------


class Model(NamedTuple):
    """Contents that all islands store."""

    rows: int
    fragments: int
    copy: memoryview
    """Copy of a fragment, in fp32."""
    checksum: str
    delta: memoryview
    """Encoded delta of a fragment."""

    @property
    def values(self) -> int:
        return self.rows * WIDTH * self.fragments


def build_model(parameters: int, fragments: int, codec: str) -> Model:
    rows = max(1, round(parameters / fragments / WIDTH))
    layout = Layout([(rows, WIDTH)])
    copy = torch.randn(layout.values).mul_(0.02)
    delta = torch.randn(layout.values).mul_(1e-3)
    return Model(
        rows,
        fragments,
        memory_of(encode(copy, PartHeader())),
        hexadecimal(layout.checksum(copy)),
        memory_of(encode(delta, PartHeader(codec, 64))),
    )


class Puppet:
    """An island by its rules alone, whose deltas are always the same."""

    def __init__(self, run: Run, name: str, model: Model, settings: Settings) -> None:
        self.run = run
        self.model = model
        self.incarnation = f"{name}/{secrets.token_hex(4)}"
        founding = Founding(
            run="measured",
            settings=settings,
            shapes=[[(model.rows, WIDTH)]] * model.fragments,
            checksums=[model.checksum] * model.fragments,
        )
        self.founding = founding
        self.machine = Island(self.incarnation, facts={}, shapes=founding.shapes, founds=founding)

    def found(self) -> None:
        """Found the run, and store the copies once this island is the founder."""
        self.run.store.create(founding_name(self.incarnation), encode_founding(self.founding))

    def store_copies(self) -> None:
        for number in range(self.model.fragments):
            self.run.large.create(founding_name(self.incarnation, number), self.model.copy)

    def read(self, decision: Decision) -> None:
        """Process a decision, and hold what it names: nothing is downloaded."""
        self.machine.on_decision(decision, 0.0)
        for stored in self.machine.wanted():
            self.machine.on_held(stored, 0.0)

    def write_note(self) -> None:
        self.run.store.replace(ISLAND + self.incarnation, self.machine.note(), durable=False)

    def boundary(self) -> Boundary:
        """Apply what is due. The checksums of copies are those that the syncer has published."""
        due = self.machine.boundary(0.0)
        for apply in due.applies:
            fragment = self.machine.fragments[apply.fragment]
            checksum = fragment.shared.checksum(apply.version)
            assert checksum is not None
            self.machine.on_checksum(apply.fragment, apply.version, checksum)
        return due

    def train_cycle(self) -> None:
        """Take steps until a part of each fragment is stored."""
        while not all(fragment.is_undecided for fragment in self.machine.fragments):
            self.machine.finish_step(1, 1, 0.01)
            while (due := self.boundary()).applies or due.sends:
                for send in due.sends:
                    part = send.part
                    name = part_name(self.incarnation, part.fragment, part.number)
                    assert self.run.large.create(name, self.model.delta)
                    self.machine.on_stored(part, len(self.model.delta), 0.0)

    def drop_parts(self) -> None:
        for name in self.machine.take_garbage():
            self.run.large.delete(name)


def settings_of(fragments: int, islands: int, codec: str) -> Settings:
    """Return settings with which all fragments are sent before the first is applied."""
    rates = RATES["folder"]
    return Settings(
        sync_every=2 * fragments,
        delay=2 * fragments - 1,
        total_tokens=10**12,
        slots=islands,
        start_with=islands,
        streams=islands,
        block=1,
        outer_optimizer="nesterov",
        outer_lr=0.4,
        outer_numbers={"momentum": 0.8},
        codec=codec,
        grace=PATIENCE,
        norm_limit=0.0,
        copies_every=10**6,
        commit_seconds=rates.commit_seconds,
        poll_seconds=rates.poll_seconds,
    )


# --- measuring ------------------------------------------------------------------------------------


class Cycle(NamedTuple):
    cpu: float
    """CPU time of the work."""
    seconds: float
    private: int
    """Most bytes above those before the run."""
    mapped: int


class Measured:
    """A run of puppets beside a syncer."""

    def __init__(self, run: Run, host: FolderHost, puppets: Sequence[Puppet]) -> None:
        self.run = run
        self.host = host
        self.puppets = puppets
        self.decisions = Decisions(run)
        self.newest: Decision | None = None
        self._noted_at = time.monotonic()

    def write_notes(self) -> None:
        self._noted_at = time.monotonic()
        for puppet in self.puppets:
            puppet.write_note()

    def wait(self, reached: Callable[[Decision], bool], awaited: str) -> None:
        """Pass decisions to all puppets until one is reached."""

        def look() -> bool:
            decision = self.decisions.next()
            if decision is not None:
                self.newest = decision
                for puppet in self.puppets:
                    puppet.read(decision)
            if time.monotonic() - self._noted_at > NOTE_SECONDS:
                self.write_notes()
            return self.newest is not None and reached(self.newest)

        wait_until(look, awaited, seconds=PATIENCE)

    def begin(self) -> None:
        """Found the run, and let all puppets take a slot."""
        founder = self.puppets[0]
        self.write_notes()
        founder.found()
        self.wait(lambda decision: decision.founder == founder.incarnation, "a founder")
        founder.store_copies()
        self.wait(lambda decision: decision.is_founded, "the first copies")

        def is_begun(decision: Decision) -> bool:
            for puppet in self.puppets:
                puppet.boundary()
            self.write_notes()
            return decision.begun and all(puppet.machine.is_training for puppet in self.puppets)

        self.wait(is_begun, "all islands")

    def idle(self) -> float:
        """Return the CPU time of a second in which nothing is merged."""
        cpu = cpu_seconds(self.host.syncer)
        began = time.monotonic()
        self.wait(lambda _: time.monotonic() > began + IDLE_SECONDS, "the end of a pause")
        return (cpu_seconds(self.host.syncer) - cpu) / (time.monotonic() - began)

    def cycle(self, number: int, before: Memory, idle: float = 0.0) -> Cycle:
        """Measure the cycle that creates version `number` of each fragment. `idle`: CPU time of a
        second to subtract."""
        pid = self.host.syncer
        for puppet in self.puppets:
            puppet.train_cycle()
        cpu = cpu_seconds(pid)
        began = time.monotonic()
        most = before
        self.write_notes()

        def is_over(decision: Decision) -> bool:
            nonlocal most
            most = Memory(*map(max, most, memory_of_process(pid)))
            return all(fragment.version >= number for fragment in decision.fragments)

        self.wait(is_over, f"version {number}")
        seconds = time.monotonic() - began
        measured = Cycle(
            cpu_seconds(pid) - cpu - idle * seconds,
            seconds,
            most.private - before.private,
            most.mapped - before.mapped,
        )
        for puppet in self.puppets:
            puppet.drop_parts()
        return measured


def measure(
    model: Model, islands: int, codec: str, cycles: int, threads: int, folder: Path
) -> tuple[float, list[Cycle]]:
    """Return the CPU time of a second without work, and the cycles of a run, without the first."""
    settings = settings_of(model.fragments, islands, codec)
    with NoNetwork() as network, ExitStack() as stack:
        host = FolderHost(folder, network, threads=threads)
        host.start()
        stack.callback(host.stop)
        run = Run(open_store(host.location))
        stack.callback(run.close)
        puppets = [Puppet(run, f"island-{number}", model, settings) for number in range(islands)]
        measured = Measured(run, host, puppets)
        before = memory_of_process(host.syncer)
        measured.begin()
        measured.cycle(1, before)
        idle = measured.idle()
        return idle, [measured.cycle(number, before, idle) for number in range(2, 2 + cycles)]


def row(values: int, islands: int, idle: float, cycles: Sequence[Cycle], to: float) -> list[str]:
    factor = 1.0 if math.isnan(to) else to / values
    share = factor * 100 / CYCLE_SECONDS
    return [
        f"{factor * values:,.0f}",
        str(islands),
        core.summary([cycle.cpu for cycle in cycles], ".2f", factor),
        f"{100 * idle:.1f}",
        core.summary([cycle.seconds for cycle in cycles], ".2f", factor),
        f"{core.summary([cycle.seconds for cycle in cycles], '.1f', share)} %",
        core.summary([cycle.private / values for cycle in cycles], ".1f"),
        core.summary([cycle.mapped / values for cycle in cycles], ".1f"),
        str(len(cycles)),
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    add = parser.add_argument
    add("--millions", type=float, default=100.0, help="of parameters")
    add("--to", type=float, default=1000.0, help="millions of parameters to extrapolate to")
    add("--islands", type=core.list_of(core.positive), default=[2, 4, 8])
    add("--threads", type=core.positive, default=os.cpu_count(), help="default: all cores")
    add("--fragments", type=core.positive, default=8)
    add("--codec", choices=island_formats(), default="fp4_e3m0")
    add("--cycles", type=core.positive, default=3)
    add("--folder", type=Path, help="for the store and the scratch folder")
    options = parser.parse_args()
    rows = measure_all(options)
    title = f"{options.codec}, {options.threads} threads of {os.cpu_count()} cores, a folder"
    core.print_table(f"{title}; torch {torch.__version__}", HEADER, rows)


def measure_all(options: argparse.Namespace) -> list[list[str]]:
    model = build_model(round(1e6 * options.millions), options.fragments, options.codec)
    rows = list[list[str]]()
    for islands in options.islands:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            idle, cycles = measure(
                model, islands, options.codec, options.cycles, options.threads, Path(folder)
            )
        print(
            f"{islands} islands: idle {idle}, {cycles}, load {os.getloadavg()[0]:.1f}", flush=True
        )
        rows.append(row(model.values, islands, idle, cycles, math.nan))
        rows.append(row(model.values, islands, idle, cycles, 1e6 * options.to))
    return rows


if __name__ == "__main__":
    main()
