"""A run of `benchmarks.islands`: a server and islands in a network, and their records."""

import json
import math
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks import core
from benchmarks.islands_program import LENGTH, fork, island_settings
from benchmarks.network import Network, Program, wait_until
from benchmarks.torchft_loop import LIGHTHOUSE_PORT
from tests.processes import FORKS
from torchtitan_diloco.components.records import read_json_lines

STEP = 0.1
"""Seconds that a step sleeps. It also trains on one sample."""
SETTINGS = island_settings(samples=1) | {
    "diloco.sync_every": "20",
    "diloco.overlap.delay": "5",
    "validation.sequences": "64",
}
TORCHFT_SETTINGS = {  # H is a multiple of the number of fragments, and tau below H / fragments
    "diloco.workers": "1",
    "diloco.link.timeout_seconds": "10",
    "diloco.quantization.codec": "fp32",
    "training.tokens": "1000000000",
}
END_SECONDS = 150
"""Time without a step of any island after which a run is considered stuck."""
AFTER_SECONDS = 15.0
"""Time for which torchft continues to train after the last fault."""
Found = dict[str, float]


class Run:
    """A server and islands in a network, whose last worker runs the server."""

    torchft = False

    def __init__(self, folder: Path, network: Network, begin: int, settings: core.Settings) -> None:
        """`begin`: number of islands that start together."""
        folder.mkdir(parents=True)
        self.folder, self.network, self.begin = folder, network, begin
        self.islands = network.workers - 1
        self.settings = SETTINGS | settings
        self.programs: dict[str, Program] = {}
        self.join = ""
        self.serve()

    # --- programs -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Start or restart the server, and wait until it is ready."""
        address = self.network.address(self.islands)
        words = ["-m", "torchtitan_diloco", "islands", "serve", "--address", address, "--folder"]
        words += [str(self.folder / "server"), *([] if self.join else ["--keep-gb", "1"])]
        self._serve(words, "nats+tls://")
        self.join = self.server.printed().splitlines()[0]

    def _serve(self, words: list[str], ready: str) -> None:
        out = self.folder / f"server-{time.time():.1f}.txt"
        self.server = self.network.launch(self.islands, [sys.executable, *words], out)
        wait_until(lambda: ready in self.server.printed(), "the server", out)

    def kill_server(self) -> None:
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
        for pid in map(int, children.split()):
            os.kill(pid, signal.SIGKILL)
        self.server.wait()

    def start(self, worker: int, sleep: float = STEP, inside: Sequence[str] = ()) -> None:
        """Start an island in the namespace of a worker."""
        name, folder = f"island-{worker}", self.folder / f"run-{worker}-{time.time():.1f}"
        settings = self.settings | self.join_settings(name) | {"run.folder": str(folder)}
        path = str(self._path(name))
        job = {"settings": settings, "path": path, "sleep": sleep, "torchft": self.torchft}
        words = ["-m", "benchmarks.islands_program", "train", json.dumps(job)]
        self.programs[name] = self.network.launch(
            worker,
            [*inside, sys.executable, *words],
            self.folder / f"{name}.txt",
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR=self.network.address(worker),
            LIGHTHOUSE=self.join,
            WORKER_ADDRESS=self.network.address(worker),
        )

    def join_settings(self, name: str) -> core.Settings:
        return {
            "islands.join": self.join,
            "islands.name": name,
            "islands.begin": str(self.begin),
            "islands.slots": str(self.islands),
            "islands.grace_seconds": str(5 * STEP),
        }

    def start_all(self, workers: int, steps: int) -> None:
        """Start islands, and wait until each has taken `steps` steps."""
        for worker in range(workers):
            self.start(worker)
        for worker in range(workers):
            self.reach(f"island-{worker}", steps)

    def reach(self, name: str, step: int) -> None:
        program = self.programs[name]

        def done() -> bool:
            return len(self.steps(name)) >= step or not program.running

        wait_until(done, f"step {step} of {name}", program.log)
        if len(self.steps(name)) < step:
            raise SystemExit(f"{name} ended before step {step}; see {self.folder}")

    def others(self, gone: str) -> list[str]:
        return [name for name in self.programs if name != gone]

    # --- what they have written ---------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _latest(self, name: str) -> Path:
        """Return the folder of the last life of an island."""
        return max(self.folder.glob(f"run-{name.removeprefix('island-')}-*"))

    def steps(self, name: str, since: float = 0, until: float = math.inf) -> list[core.Record]:
        lines = read_notes(self._path(name))
        return [one for one in lines if "step" in one and since <= one["time"] <= until]

    def event(self, name: str, kind: str) -> core.Record:
        """Return the last event of this kind."""
        return [one for one in read_notes(self._path(name)) if one.get("event") == kind][-1]

    def usual(self, name: str) -> float:
        return float(statistics.median(one["seconds"] for one in self.steps(name)))

    def seen(self, names: Iterable[str], since: float, until: float = math.inf) -> Found:
        """Return the longest stall and the largest idle share of these islands in a time span."""
        stalls, idle = [], []
        for name in names:
            steps = self.steps(name, since, until)
            exposed = [one["exposed"] for one in steps]
            stalls.append(max(exposed) / self.usual(name))
            idle.append(100 * sum(exposed) / sum(one["seconds"] for one in steps))
        return {"longest stall, steps": max(stalls), "idle, %": max(idle)}

    def next_round(self, names: Iterable[str], since: float) -> float:
        """Return the seconds until all these islands have read the close of another round."""
        found = []
        for name in names:
            before = max((one["rounds"] for one in self.steps(name, until=since)), default=0)
            later = [one["time"] for one in self.steps(name, since) if one["rounds"] > before]
            found.append(min(later, default=math.inf) - since)
        return max(found)

    # --- the end ------------------------------------------------------------------------------

    def finish(self, dead: str = "") -> dict[str, Any]:
        """Wait until all islands except `dead` have ended, and check copies and ledgers."""
        living, problems = self.others(dead), []
        while any(self.programs[name].running for name in living):
            if time.time() - max(self._path(name).stat().st_mtime for name in living) > END_SECONDS:
                break
            time.sleep(0.1)
        for name in living:
            if (code := self.programs[name].wait(0)) != 0:
                said = self.programs[name].printed().strip().splitlines()[-1:]
                problems.append(f"{name} ended with {code}: {''.join(said)}"[:300])
        command = [sys.executable, "-m", "benchmarks.islands_program", "audit", self.join]
        audit: dict[str, Any] = json.loads(self.network.run(self.islands, command))
        if len({final_loss(self._latest(name)) for name in living}) > 1:
            problems.append("the shared parameters of the islands have different losses")
        problems += audit["problems"]
        for problem in problems:
            print(f"PROBLEM in {self.folder}: {problem}", flush=True)
        return audit | {"problems": problems}

    def losses(self, audit: dict[str, Any], names: Iterable[str]) -> Found:
        """Return the number of steps that are lost or were repeated, and of problems."""
        slots = [int(self.event(name, "joined")["slot"]) for name in names]
        samples = sum(audit["lost_samples"][one] + audit["read_twice"][one] for one in slots)
        return {
            "steps lost": samples,
            "most versions late": max(audit["late"]),
            "problems": len(audit["problems"]),
        }


class TorchftRun(Run):
    """The same with torchft, whose runs are stopped some seconds after the last fault."""

    torchft = True

    def serve(self) -> None:
        address = f"0.0.0.0:{LIGHTHOUSE_PORT}"
        self._serve(["-m", "benchmarks.torchft_loop", "lighthouse", address], "ready")
        self.join = f"http://{self.network.address(self.islands)}:{LIGHTHOUSE_PORT}"

    def kill_server(self) -> None:
        self.server.kill()

    def join_settings(self, name: str) -> core.Settings:
        layers, at_once = "model.layers", "diloco.fragments.layers_per_fragment"
        fragments = int(self.settings[layers]) // int(self.settings[at_once]) + 1
        turn = round(20 / fragments)
        own = {
            "diloco.sync_every": str(turn * fragments),
            "diloco.overlap.delay": str(min(5, turn - 1)),
        }
        return TORCHFT_SETTINGS | own | {"run.description": name}

    def finish(self, dead: str = "") -> dict[str, Any]:
        time.sleep(AFTER_SECONDS)
        for name in self.others(dead):
            if not self.programs[name].running:
                print(f"torchft's {name} has ended: {self.programs[name].printed()[-300:]}")
        for program in self.programs.values():
            program.kill()
        return {}

    def losses(self, audit: dict[str, Any], names: Iterable[str]) -> Found:  # noqa: ARG002
        return {"steps lost": sum(self.steps(name)[-1]["lost"] for name in names)}


def read_notes(path: Path) -> list[core.Record]:
    """Return what an island has noted of its steps and events."""
    return read_json_lines(path)[0] if path.exists() else []


def final_loss(folder: Path) -> float | None:
    """Return the last loss of the shared parameters, or None if the island left before."""
    records = core.read_records(folder)
    return next((one["loss/val"] for one in reversed(records) if "loss/val" in one), None)


@contextmanager
def running(
    folder: Path,
    islands: int = 3,
    seconds: float = 20,
    rate: float = math.inf,
    kind: type[Run] = Run,
    begin: int = 0,
    settings: core.Settings | None = None,
) -> Iterator[Run]:
    """Yield a run with as many tokens as its first islands train in `seconds`."""
    begin = begin or islands
    length = {"training.tokens": str(round(begin * seconds / STEP) * LENGTH)}
    with Network(islands + 1, up=rate, down=rate) as network:
        yield kind(folder, network, begin, length | (settings or {}))


# --- islands that come and go --------------------------------------------------------------------

SAMPLES = 4
"""Samples of an island's step."""
TOKENS = SAMPLES * LENGTH
UPLOAD_STEPS = 5
"""By how much the uploads of a late island take longer: more than the grace, less than H."""
ROUNDS_OF_A_LIFE = 20


@dataclass(frozen=True)
class Case:
    islands: tuple[int, ...] = (2,)
    """Number of islands in each phase."""
    ends: tuple[float, ...] = (1.0,)
    """End of each phase, as a share of the tokens of the run."""
    grace: float = 0.1
    slow: float = 1.0
    """Length of the last island's steps / that of the others."""
    late: bool = False
    """The uploads of the last island take UPLOAD_STEPS longer."""
    dies: bool = False
    """The last island dies repeatedly, and restarts with a fresh inner optimizer."""


@dataclass
class TextRun:
    """Starts and stops islands as a case says."""

    case: Case
    tokens: int
    settings: core.Settings
    folder: Path
    clock: Any = field(default_factory=lambda: FORKS.Value("d", 0.0))
    """Tokens of the run so far."""
    lives: list[tuple[Path, BaseProcess]] = field(default_factory=list)
    latest: dict[int, BaseProcess] = field(default_factory=dict)

    def start(self, number: int) -> None:
        case, name = self.case, f"island-{number}"
        folder = self.folder / f"{name}-{len(self.lives)}"
        own = {"run.folder": str(folder), "islands.name": name}
        last = number == case.islands[0] - 1
        slow, late = (case.slow, UPLOAD_STEPS * case.late) if last else (1.0, 0)
        arguments = {
            "settings": self.settings | own,
            "path": str(folder.with_suffix(".jsonl")),
            "slow": slow,
            "late": late,
            "clock": self.clock,
        }
        given = folder.with_suffix(".txt"), arguments
        self.latest[number] = FORKS.Process(target=fork, args=given, daemon=True)
        self.latest[number].start()
        self.lives.append((folder, self.latest[number]))

    def train(self) -> float:
        """Return the loss of the shared copy, which all islands that reach the end agree on."""
        case, died = self.case, 0
        life = ROUNDS_OF_A_LIFE * 10 * 2 * TOKENS  # H = 10, two islands
        while not any(process.exitcode == 0 for process in self.latest.values()):
            clock, phases = self.clock.value, zip(case.ends, case.islands, strict=True)
            wanted = next((n for end, n in phases if clock < end * self.tokens), case.islands[-1])
            for number in range(max(case.islands)):
                if number < wanted and number not in self.latest and clock < self.tokens:
                    self.start(number)
                elif number >= wanted and number in self.latest:
                    leaving = self.latest.pop(number)
                    leaving.terminate()
                    leaving.join()
            if case.dies and life * (died + 1) < clock < 0.9 * self.tokens:
                died += 1
                self.latest.pop(1).kill()
            for folder, process in self.lives:
                if process.exitcode not in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
                    raise SystemExit(folder.with_suffix(".txt").read_text()[-2000:])
            time.sleep(0.01)
        for process in self.latest.values():
            process.join(60.0)
        losses = {final_loss(folder) for folder, _ in self.lives} - {None}
        assert len(losses) == 1, f"{self.folder}: copies differ: {losses}"
        return losses.pop() or 0.0

    def trained(self) -> Counter[int]:
        """Return the samples that the owners of each slot have trained on."""
        found = Counter[int]()
        for folder, _ in self.lives:
            notes = read_notes(folder.with_suffix(".jsonl"))
            for slot in (one["slot"] for one in notes if "slot" in one):
                found[slot] += SAMPLES * sum("step" in one for one in notes)
        return found
