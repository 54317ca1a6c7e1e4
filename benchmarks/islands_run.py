"""A run of `benchmarks.islands`: a server and islands in a network, and what they have noted."""

import json
import math
import os
import signal
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from benchmarks import core
from benchmarks.network import Network, Program, wait_until
from benchmarks.parity import read_tables
from tests.islands.simulation import check_ledger
from tests.processes import FORKS
from torchtitan_diloco import train
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.islands import IslandPeers, connection, leader
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.trainer import Trainer

LENGTH = 64
"""Tokens of a sample."""
STUCK_SECONDS = 150
"""Time without a step of any island after which a run is considered stuck."""
Found = dict[str, float]


def island_settings(samples: int) -> core.Settings:
    """Return the settings of the decoder of 0.12M parameters of docs/measurements.md."""
    tables = read_tables()
    settings = tables.defaults | tables.shapes["many-steps"]
    for key in ("training.global_batch_size", "diloco.workers"):
        del settings[key]
    return settings | {"training.batch_size": str(samples)}


# --- in an island's process -----------------------------------------------------------------------


@dataclass
class Job:
    """Settings and handicaps of an island, and the file of its notes, one of JSON in a line."""

    settings: core.Settings
    notes: Path
    sleep: float = 0.0
    """Seconds that a step takes longer."""
    slow: float = 1.0
    """Length of its steps / that of the others."""
    late: int = 0
    """Steps that an upload takes longer."""
    hasty: bool = False
    """Islands are missed and lead sooner than by default, for runs of short steps."""
    clock: Any = field(default_factory=lambda: FORKS.Value("d", 0.0))
    """Tokens of the run so far."""


def train_island(job: Job) -> None:
    """Run the trainer, and note each step."""
    if job.hasty:
        connection.EXPIRY, leader.BEAT = 2.0, 0.1
    step, outer_step, upload = Trainer.train_step, StreamingDiLoCo.step, IslandPeers._upload
    seconds, exposed, joined = deque[float](maxlen=32), [0.0], set[int]()
    file = job.notes.open("a", buffering=1)

    def usual() -> float:
        return statistics.median(seconds or [0.0])

    def note(**facts: Any) -> None:
        file.write(json.dumps({"time": time.time(), **facts}) + "\n")

    def observed_step(trainer: Trainer, batches: Any) -> Any:
        assert trainer.island is not None
        peers, started = trainer.island.peers, time.time()
        fragments, slot = peers._leader.state.fragments, peers.seat.slot  # type: ignore[union-attr]
        if not joined:
            joined.add(slot)
            note(event="joined", slot=slot)
        time.sleep(job.sleep + (job.slow - 1) * usual())
        begun, before = time.time(), exposed[0]
        result = step(trainer, batches)
        seconds.append(time.time() - begun)
        note(
            step=trainer.step,
            seconds=time.time() - started,
            exposed=exposed[0] - before,
            merged=max(one.clock for one in fragments),
            rounds=sum(one.version for one in fragments),
        )
        job.clock.value = max(job.clock.value, peers.clock)
        return result

    def timed_step(outer: StreamingDiLoCo, weight: float = 1.0) -> None:
        exposed[0] += core.timed(lambda: outer_step(outer, weight)).wall

    def late_upload(*part: Any) -> None:
        time.sleep(job.late * usual())
        upload(*part)

    note(event="started")
    for owner, name, replaced in (
        (Trainer, "train_step", observed_step),
        (StreamingDiLoCo, "step", timed_step),
        (IslandPeers, "_upload", late_upload),
    ):
        setattr(owner, name, replaced)
    sys.exit(train.main(core.command_line(job.settings)))


def audit(join: str, path: Path) -> None:
    """Write statistics and inconsistencies of the log of a run."""
    outcomes: list[Outcome] = []
    with open_reader(Join.parse(join), outcomes.append, whole=True) as reader:
        state = reader.state
    entries = [one.entry for one in outcomes if one.entry is not None]
    problems = [] if state.ended else ["it has not ended"]
    problems += [
        f"{part.incarnation}: {part.weight} tokens in {part.start, part.end}"
        for part in (part for entry in entries for part in entry.parts)
        if part.finite and part.weight != (part.end - part.start) * LENGTH
    ]
    try:
        check_ledger(state, entries)
    except AssertionError as error:
        problems.append(f"the ledgers do not fit the entries: {error}")

    def samples(fate: str) -> list[float]:
        """Return the samples of each slot with this fate, as the mean over fragments."""
        return [statistics.mean(getattr(one, fate) for one in slot.ledgers) for slot in state.slots]

    found = {
        "problems": problems,
        "merged_tokens": statistics.mean(one.clock for one in state.fragments),
        "merged_samples": samples("merged"),
        "lost_samples": samples("lost"),
        "read_twice": [slot.read_twice for slot in state.slots],
    }
    path.write_text(json.dumps(found))


# --- the run --------------------------------------------------------------------------------------


class Run:
    """A server and islands in a network, whose last worker runs the server."""

    def __init__(self, folder: Path, islands: int, job: Job, rate: float = math.inf) -> None:
        """`rate`: of each link, in Mbit/s."""
        self.folder, self.job = folder, job
        self.network = Network(islands + 1, up=rate, down=rate)
        self.server_place, self.join = islands, ""
        self.server: Program
        self.living = dict[int, BaseProcess]()
        """Islands that are expected to reach the end."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self.network.__enter__()
        self.serve()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in [*self.living]:
            self.kill(worker)
        self.network.close()

    def serve(self) -> None:
        """Start or restart the server, and wait until it is ready."""
        more = [] if self.join else ["--keep-gb", "1"]
        folder = self.folder / "server"
        self.server, self.join = self.network.serve_islands(self.server_place, folder, *more)

    def kill_server(self) -> None:
        """Kill `serve`, which would start nats-server again, and nats-server."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
        for pid in (self.server.pid, *map(int, children.split())):
            with suppress(ProcessLookupError):  # it ends with `serve`
                os.kill(pid, signal.SIGKILL)
        self.server.wait()

    def start(self, worker: int, **handicaps: float) -> None:
        """Start an island in the namespace of a worker."""
        run = self.folder / f"run-{worker}-{time.time():.2f}"
        own = {"run.folder": str(run), "islands.join": self.join}
        settings = self.job.settings | own | {"islands.name": f"island-{worker}"}
        more = {"settings": settings, "notes": self.notes(worker)}
        job = Job(**vars(self.job) | handicaps | more)
        self.living[worker] = self.network.fork(worker, train_island, self.log(worker), job)

    def start_all(self, workers: int, steps: int) -> None:
        """Start islands, and wait until each has taken `steps` steps."""
        for worker in range(workers):
            self.start(worker)
        for worker in range(workers):
            self.reach(worker, steps)

    def kill(self, worker: int) -> None:
        process = self.living.pop(worker)
        process.kill()
        process.join()

    def reach(self, worker: int, step: int) -> None:
        process = self.living[worker]
        wait_until(
            lambda: len(self.steps(worker)) >= step or not process.is_alive(),
            f"step {step} of island-{worker}",
            self.log(worker),
        )
        if len(self.steps(worker)) < step:
            raise SystemExit(self.log(worker).read_text()[-2000:])

    def finish(self) -> dict[str, Any]:
        """Wait until all living islands have ended, and check copies and ledgers."""
        while any(process.is_alive() for process in self.living.values()):
            latest = max(self.notes(one).stat().st_mtime for one in self.living)
            if time.time() - latest > STUCK_SECONDS:
                break
            time.sleep(0.1)
        path, log = self.folder / "audit.json", self.folder / "audit.txt"
        self.network.fork(self.server_place, audit, log, self.join, path).join()
        found: dict[str, Any] = json.loads(path.read_text())
        problems = found["problems"] + [
            f"island-{worker} ended with {process.exitcode}"
            for worker, process in self.living.items()
            if process.exitcode != 0
        ]
        losses = {self.final_loss(worker) for worker in self.living}
        if len(losses) > 1:
            problems.append("the shared parameters of the islands have different losses")
        for problem in problems:
            print(f"PROBLEM in {self.folder}: {problem}", flush=True)
        return found | {"problems": problems, "loss": losses.pop()}

    # --- what they have written ---------------------------------------------------------------

    def notes(self, worker: int) -> Path:
        return self.folder / f"island-{worker}.jsonl"

    def log(self, worker: int) -> Path:
        return self.folder / f"island-{worker}.txt"

    def read_notes(self, worker: int) -> list[core.Record]:
        path = self.notes(worker)
        return read_json_lines(path)[0] if path.exists() else []

    def final_loss(self, worker: int) -> float | None:
        """Return the last loss of the shared parameters in the last life of an island."""
        records = core.read_records(max(self.folder.glob(f"run-{worker}-*")))
        return next((one["loss/val"] for one in reversed(records) if "loss/val" in one), None)

    def steps(self, worker: int, since: float = 0, until: float = math.inf) -> list[core.Record]:
        notes = self.read_notes(worker)
        return [one for one in notes if "step" in one and since <= one["time"] <= until]

    def event(self, worker: int, kind: str) -> core.Record:
        """Return the last event of this kind."""
        return [one for one in self.read_notes(worker) if one.get("event") == kind][-1]

    def usual(self, worker: int) -> float:
        return float(statistics.median(one["seconds"] for one in self.steps(worker)))

    def seen(self, workers: Iterable[int], since: float, until: float = math.inf) -> Found:
        """Return the longest stall and the largest idle share of these islands in a time span."""
        stalls, idle = [], []
        for worker in workers:
            steps = self.steps(worker, since, until)
            exposed = [one["exposed"] for one in steps]
            stalls.append(max(exposed) / self.usual(worker))
            idle.append(100 * sum(exposed) / sum(one["seconds"] for one in steps))
        return {"longest stall, steps": max(stalls), "idle, %": max(idle)}

    def next_round(self, workers: Iterable[int], since: float) -> float:
        """Return the seconds until all these islands have read the close of another round."""

        def wait(worker: int) -> float:
            before = max((one["rounds"] for one in self.steps(worker, until=since)), default=0)
            later = [one["time"] for one in self.steps(worker, since) if one["rounds"] > before]
            return min(later, default=math.inf) - since

        return max(map(wait, workers))

    def losses(self, audit: dict[str, Any], workers: Iterable[int]) -> Found:
        """Return the number of steps that are lost or were repeated, and of problems."""
        slots = [int(self.event(worker, "joined")["slot"]) for worker in workers]
        lost = sum(audit["lost_samples"][one] + audit["read_twice"][one] for one in slots)
        return {"steps lost": lost, "problems": len(audit["problems"])}

    def trained(self, workers: int) -> Counter[int]:
        """Return the steps that the owners of each slot have taken."""
        found, slot = Counter[int](), 0
        for note in (note for worker in range(workers) for note in self.read_notes(worker)):
            slot = note.get("slot", slot)
            found[slot] += "step" in note
        return found
