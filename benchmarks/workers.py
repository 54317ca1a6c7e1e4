"""Trainers in a network, as one job or as islands: start, harm and watch them.

A worker is a forked process with one rank. Each writes down its steps, a JSON object in a line.
Islands whose store is served have a network namespace each, and the host of the store has the last
one. Those with a folder stay in the network of this machine.
"""

import errno
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch

from benchmarks import core
from benchmarks.hosts import Host, StoreKind, build_host, site_of
from benchmarks.network import INTERFACE, Network, NoNetwork, read_counters
from tests.processes import FORKS
from tests.waiting import wait_until
from torchtitan_diloco import train
from torchtitan_diloco.components import checkpoint
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.data.batch import Batch
from torchtitan_diloco.diagnosis.kinds import Verdict
from torchtitan_diloco.diagnosis.verdicts import Judge, Observation
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo
from torchtitan_diloco.islands.layout import Layout, hexadecimal, shapes_of
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.peers import IslandPeers
from torchtitan_diloco.islands.rules.names import PART
from torchtitan_diloco.islands.rules.settings import RATES
from torchtitan_diloco.launching import rank
from torchtitan_diloco.store import LargeObjects
from torchtitan_diloco.trainer import Trainer

BEGIN = 120
"""Step at which a fault begins."""
STUCK_SECONDS = 150
"""Time without a step of any worker after which a run is considered stuck."""


# --- in the process of a worker -------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Settings, handicaps and faults of a worker."""

    settings: core.Settings
    sleep: float = 0.0
    """Seconds that a step sleeps, as if waiting for an accelerator."""
    slow: float = 1.0
    """Length of its steps / that of the others."""
    late: int = 0
    """Steps that the upload of an island takes longer."""
    hasty: bool = False
    """Islands are missed, and rounds close without them, sooner than by default: for runs of short
    steps."""
    fault: Mapping[str, float] = field(default_factory=dict)
    """Amounts of faults, by name, from step BEGIN on."""
    recorded: bool = False
    """Whether it also writes down what its judge is told."""
    counted: bool = False
    """Whether it also writes down the bytes of its link."""
    clock: Any = field(default_factory=lambda: FORKS.Value("d", 0.0))
    """Tokens of a run of islands so far."""


class Worker(Trainer):
    """Trainer with handicaps, and with a fault from step BEGIN on."""

    job: Job
    notes: Path
    durations = deque[float](maxlen=32)
    """Seconds of the latest steps."""
    exposed = 0.0
    """Seconds in the outer loop."""

    def note(self, **facts: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps({"time": time.time(), **facts}) + "\n")

    @property
    def island_peers(self) -> IslandPeers | None:
        peers = getattr(self.outer, "peers", None)
        return peers if isinstance(peers, IslandPeers) else None

    def amount(self, name: str) -> float:
        return self.job.fault.get(name, 0.0) if self.step >= BEGIN else 0.0

    def run(self) -> Path:
        folder = super().run()
        if isinstance(self.outer, StreamingDiLoCo) and self.island_peers is not None:
            self.note(
                shared=[
                    hexadecimal(Layout(shapes_of(state.fragment)).checksum(state.outer))
                    for state in self.outer.loop.states
                ]
            )
        return folder

    def begin(self) -> None:
        super().begin()
        if (peers := self.island_peers) is not None:
            self.note(slot=peers.seat.slot)
        step = self.outer.step

        def timed_step(weight: float = 1.0) -> None:
            self.exposed += core.timed(lambda: step(weight)).wall

        setattr(self.outer, "step", timed_step)  # noqa: B010 - observed
        if "data" in self.job.fault:
            loader = type(self.data.loader)
            setattr(loader, "__iter__", self.delayed(loader.__iter__))  # noqa: B010 - a fault

    def delayed(self, original: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
        def batches(loader: object) -> Iterator[Batch]:
            for batch in original(loader):
                time.sleep(self.job.sleep * self.amount("data"))
                yield batch

        return batches

    def train_step(self, batches: Iterator[Batch]) -> Any:
        job = self.job
        started = time.time()
        usual = statistics.median(self.durations or [0.0])
        time.sleep(job.sleep * (1 + self.amount("compute")) + (job.slow - 1) * usual)
        begun = time.time()
        exposed = self.exposed
        if self.step == BEGIN - 1:
            self.break_once()
        if self.amount("outlier"):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(torch.randn_like(parameter))
        result = super().train_step(batches)
        if self.amount("nan") and self.step == BEGIN:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(math.nan)
        self.durations.append(time.time() - begun)
        facts = {"seconds": time.time() - started, "exposed": self.exposed - exposed}
        if (peers := self.island_peers) is not None:
            decision = peers.machine.decision
            assert decision is not None
            facts["merged"] = max(fragment.clock for fragment in decision.fragments)
            facts["rounds"] = sum(fragment.version for fragment in decision.fragments)
            facts["parts"] = peers.gauges.sent
            facts["versions"] = peers.gauges.received
            job.clock.value = max(job.clock.value, peers.clock)
        if job.counted:
            facts["up"], facts["down"] = read_counters(INTERFACE)
        self.note(step=self.step, **facts)
        return result

    def break_once(self) -> None:
        fault = self.job.fault
        time.sleep(fault.get("hang", 0.0))
        if "bit" in fault:
            copy = self.outer.loop.states[0].outer  # type: ignore[union-attr]
            copy.view(torch.int32)[0] ^= 1 << 20
        if "clock" in fault:
            now = time.time
            jump = fault["clock"]
            setattr(time, "time", lambda: now() + jump)  # noqa: B010
        if "disk" in fault:
            full = OSError(errno.ENOSPC, "No space left on device")
            setattr(checkpoint, "save_file", mock.Mock(side_effect=full))  # noqa: B010
        if "save" in fault:
            save = Checkpointer.save
            seconds = self.job.sleep * fault["save"]

            def slow_save(checkpointer: Checkpointer, *progress: Any) -> float:
                time.sleep(seconds)
                return seconds + save(checkpointer, *progress)

            setattr(Checkpointer, "save", slow_save)  # noqa: B010


def record_inputs(path: Path) -> None:
    """Write all that the judge is told, a JSON object in a line."""
    file = path.open("w", buffering=1)
    hear = Judge.hear

    def short(value: float) -> float:
        return float(f"{value:.3g}")

    def heard(judge: Judge, observed: Observation) -> list[Verdict]:
        told: dict[str, Any] = {"step": observed.step, "now": round(observed.now, 2)}
        if observed.cycle is not None:
            told["cycle"] = round(observed.cycle, 3)
        told["seen"] = {
            worker: [
                *map(short, report.vitals[:-1]),
                [*map(short, report.vitals.transfers)],
                *report[1:],
            ]
            for worker, report in observed.reports.items()
        }
        file.write(json.dumps(told) + "\n")
        return hear(judge, observed)

    setattr(Judge, "hear", heard)  # noqa: B010 - observed


def delay_uploads(steps: int) -> None:
    """Store each part of this island only so many steps after it was encoded."""
    encoded = deque[float]()  # when each part was, as uploads are in this order
    store = Link.store
    create = LargeObjects.create

    def noted_store(link: Link, part: Any, payload: Any) -> None:
        if payload is not None:
            encoded.append(time.monotonic())
        store(link, part, payload)

    def late_create(large: LargeObjects, name: str, *content: Any, **options: Any) -> bool:
        if name.startswith(PART):
            until = encoded.popleft() + steps * statistics.median(Worker.durations or [0.0])
            time.sleep(max(0.0, until - time.monotonic()))
        return create(large, name, *content, **options)

    setattr(Link, "store", noted_store)  # noqa: B010 - observed
    setattr(LargeObjects, "create", late_create)  # noqa: B010


def run_worker(job: Job, notes: Path, history: Path) -> None:
    """Train, as the program of a user does."""
    Worker.job = job
    Worker.notes = notes
    if job.hasty:
        for kind, rates in list(RATES.items()):
            RATES[kind] = rates._replace(grace=0.0)
    if job.recorded:
        record_inputs(history)
    if job.late:
        delay_uploads(job.late)
    setattr(rank, "Trainer", Worker)  # noqa: B010
    sys.exit(train.main(core.command_line(job.settings)))


# --- the run --------------------------------------------------------------------------------------


class Run:
    """Workers in a network. With a served store, its host is in the place after them."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        job: Job,
        *,
        store: StoreKind | None = None,
        rate: float = math.inf,
    ) -> None:
        """Prepare workers.

        `store`: that of islands. None: the workers are one job. `rate`: of the link of each worker,
        in Mbit/s.
        """
        self.folder = folder
        self.workers = workers
        self.job = job
        self.store = store
        self.rate = rate
        places = workers + (store is not None)
        self.network = NoNetwork() if store == "folder" else Network(places, up=rate, down=rate)
        self.host: Host | None = None
        self.living = dict[int, BaseProcess]()
        """Workers that are expected to reach the end."""
        self.started = dict[int, float]()
        """When each was started last."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self.network.__enter__()
        if self.store is not None:
            try:
                self._start_host(self.store)
            except BaseException:
                self._close()
                raise
        return self

    def _start_host(self, store: StoreKind) -> None:
        hasty = self.job.hasty
        self.host = build_host(store, self.folder, self.network, self.workers, hasty=hasty)
        if store == "serve":  # its link is not what limits the islands
            rate = self.workers * self.rate
            self.network.set_rate(self.workers, up=rate, down=rate)
        self.host.start()

    def __exit__(self, *error: object) -> None:
        for worker in [*self.living]:
            self.kill(worker)
        self._close()

    def _close(self) -> None:
        if self.host is not None:
            self.host.stop()
        self.network.close()

    def start(self, worker: int, **changes: Any) -> None:
        """Start a worker with changes of its job."""
        self.started[worker] = time.time()
        run = "run"
        variables = self.network.rank_variables(worker)
        settings_of_worker = core.Settings()
        if self.host is not None:
            run = f"run-{worker}-{self.started[worker]:.2f}"
            variables = {}
            settings_of_worker = {
                "islands.join": self.host.join(worker),
                "islands.name": site_of(worker),
            }
        settings_of_worker["run.folder"] = str(self.folder / run)
        counted = self.store == "serve"
        job = replace(
            self.job, settings=self.job.settings | settings_of_worker, counted=counted, **changes
        )
        self.living[worker] = self.network.fork(
            worker,
            run_worker,
            self.log(worker),
            job,
            self.notes(worker),
            self.history(worker),
            variables=variables,
        )

    def start_all(self, workers: int, steps: int) -> None:
        """Start workers, and wait until each has taken `steps` steps."""
        for worker in range(workers):
            self.start(worker)
        for worker in range(workers):
            self.reach(worker, steps)

    def reach(self, worker: int, step: int, seconds: float = 90.0) -> None:
        process = self.living[worker]
        wait_until(
            lambda: len(self.steps(worker)) >= step or not process.is_alive(),
            f"step {step} of worker {worker}",
            self.log(worker),
            seconds,
        )
        if len(self.steps(worker)) < step:
            raise SystemExit(self.printed(worker)[-2000:])

    def kill(self, worker: int) -> None:
        process = self.living.pop(worker)
        process.kill()
        process.join()

    def leave(self, worker: int) -> None:
        """Stop an island in order."""
        process = self.living.pop(worker)
        process.terminate()
        process.join()

    def signal(self, worker: int, number: int) -> None:
        pid = self.living[worker].pid
        assert pid is not None
        os.kill(pid, number)

    def wait(self) -> None:
        """Wait until all living workers have ended, or are stuck."""
        while any(process.is_alive() for process in self.living.values()):
            latest = max(self.notes(worker).stat().st_mtime for worker in self.living)
            if time.time() - latest > STUCK_SECONDS:
                break
            time.sleep(0.1)

    # --- what they have written ---------------------------------------------------------------

    def notes(self, worker: int) -> Path:
        return self.folder / f"notes-{worker}.jsonl"

    def history(self, worker: int) -> Path:
        return self.folder / f"history-{worker}.jsonl"

    def log(self, worker: int) -> Path:
        return self.folder / f"log-{worker}.txt"

    def printed(self, *workers: int) -> str:
        return "".join(self.log(worker).read_text(errors="replace") for worker in workers)

    def steps(self, worker: int, since: float = 0, until: float = math.inf) -> list[core.Record]:
        return [step for step in self.noted(worker, "step") if since <= step["time"] <= until]

    def noted(self, worker: int, key: str) -> list[core.Record]:
        """Return the notes with this key."""
        path = self.notes(worker)
        notes = read_json_lines(path)[0] if path.exists() else []
        return [note for note in notes if key in note]

    def records(self, worker: int) -> list[core.Record]:
        """Return the records of a worker, of an island those of its last life."""
        if self.store is None:
            return core.read_records(self.folder / "run", worker)
        return core.read_records(max(self.folder.glob(f"run-{worker}-*")))
