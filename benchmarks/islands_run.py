"""A run of `benchmarks.islands`: a server and islands in a network, and what they have written."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.faults_run import wait_until
from benchmarks.islands_program import TOKENS
from benchmarks.network import Network

STEP = 0.1
"""Seconds."""
END_SECONDS = 150
Found = dict[str, float]


class Run:
    """A server and islands in a network; the last worker of the network has the server."""

    def __init__(self, folder: Path, network: Network, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.folder, self.network = folder, network
        self.islands = network.workers - 1
        self._settings = {"begin": self.islands, "slots": self.islands, **settings}
        self.programs: dict[str, subprocess.Popen[Any]] = {}
        self.join = ""
        self.serve()

    # --- programs -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the server, or start it again, and return when it is ready."""
        out = self.folder / f"server-{time.time():.1f}.txt"
        address = self.network.address(self.islands)
        command = ["-m", "torchtitan_diloco.islands", "serve", "--folder"]
        words = [*command, str(self.folder / "server"), "--address", address]
        if not self.join:
            words += ["--keep-gb", "1"]
        self.server = self._start(self.islands, words, out)
        wait_until(lambda: "nats+tls://" in out.read_text(), "the server", out.read_text)
        self.join = out.read_text().splitlines()[0]

    def kill_server(self) -> None:
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
        for pid in map(int, children.split()):
            os.kill(pid, signal.SIGKILL)
        self.server.wait()

    def start(self, worker: int, name: str = "", inside: Sequence[str] = (), **more: Any) -> None:
        """Start an island in the namespace of a worker."""
        name = name or f"island-{worker}"
        path = str(self._path(name))
        job = self._settings | more | {"join": self.join, "name": name, "path": path}
        words = ["-m", "benchmarks.islands_program", "island", json.dumps(job)]
        self.programs[name] = self._start(worker, words, self.log(name), inside)

    def start_all(self, workers: int, steps: int) -> None:
        """Start islands, and wait until all have done so many steps."""
        for worker in range(workers):
            self.start(worker)
        for worker in range(workers):
            self.reach(f"island-{worker}", steps)

    def _start(
        self, worker: int, words: Sequence[str], log: Path, inside: Sequence[str] = ()
    ) -> "subprocess.Popen[Any]":
        with log.open("a") as file:
            command = [*inside, sys.executable, *words]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            return self.network.start(worker, command, env, file)

    def kill(self, name: str) -> None:
        self.programs[name].kill()
        self.programs[name].wait()

    # --- what they have written ---------------------------------------------------------------

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        found = []
        if self._path(name).exists():
            for line in self._path(name).read_text().splitlines():
                with suppress(json.JSONDecodeError):  # cut off by a kill
                    found.append(json.loads(line))
        return found

    def steps(self, name: str, since: float = 0, until: float = math.inf) -> list[dict[str, Any]]:
        return [one for one in self.lines(name) if "step" in one and since <= one["time"] <= until]

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.lines(name) if one.get("event") == kind]

    def event(self, name: str, kind: str) -> dict[str, Any]:
        """Return the last event of a kind."""
        return self.events(name, kind)[-1]

    def reach(self, name: str, step: int) -> None:
        def reached() -> bool:
            return len(self.steps(name)) >= step or self.programs[name].poll() is not None

        wait_until(reached, f"step {step} of {name}", self.log(name).read_text)
        if len(self.steps(name)) < step:
            raise SystemExit(f"{name} ended before step {step}; see {self.folder}")

    def wait_for_start(self, name: str, count: int) -> None:
        """Wait until an island has been started so many times."""
        wait_until(lambda: len(self.events(name, "started")) >= count, "a start")

    def usual(self, name: str) -> float:
        return float(statistics.median(one["seconds"] for one in self.steps(name)))

    def seen(self, names: Iterable[str], since: float, until: float = math.inf) -> Found:
        """Return the longest stall of these islands in a span of time, and their idle share."""
        stalls, idle = [], []
        for name in names:
            steps = self.steps(name, since, until)
            exposed, usual = [one["exposed"] for one in steps], self.usual(name)
            if steps:
                stalls.append(max(exposed) / usual)
                idle.append(100 * sum(exposed) / sum(one["seconds"] for one in steps))
        return {"longest stall, steps": max(stalls), "idle, %": max(idle)}

    def next_round(self, names: Iterable[str], since: float) -> float:
        """Return after how many seconds all these islands have read another close."""
        found = []
        for name in names:
            before = max((one["rounds"] for one in self.steps(name, until=since)), default=0)
            later = [one["time"] for one in self.steps(name, since) if one["rounds"] > before]
            found.append(min(later, default=math.inf) - since)
        return max(found)

    # --- the end ------------------------------------------------------------------------------

    def finish(self, *dead: str) -> dict[str, Any]:
        """Wait for the end of all islands but those, and check copies and ledgers."""
        living = [name for name in self.programs if name not in dead]
        until, problems = time.monotonic() + END_SECONDS, []
        for name in living:
            try:
                code = self.programs[name].wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                said = self.log(name).read_text().strip().splitlines()
                problems.append(f"{name} ended with {code}: {''.join(said[-1:])}"[:300])
        audit = self._audit()
        ends = [end for name in living for end in self.events(name, "ended")]
        if len({end["digest"] for end in ends}) > 1:
            problems.append(f"{len(ends)} islands have different parameters")
        if any(end["ledger"] != audit["ledger"] for end in ends):
            problems.append("the ledgers differ")
        problems += audit["problems"] + ([] if audit["ended"] else ["the run has not ended"])
        audit["problems"] = problems
        for problem in problems:
            print(f"PROBLEM in {self.folder}: {problem}", flush=True)
        return audit

    def _audit(self) -> dict[str, Any]:
        inside = self.network.inside(self.network.namespace(self.islands))
        command = [*inside, sys.executable, "-m", "benchmarks.islands_program", "audit", self.join]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        if done.returncode:
            raise SystemExit(f"{self.folder}: the audit failed: {done.stderr[-1000:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        (self.folder / "audit.json").write_text(done.stdout)
        return found


@contextmanager
def running(
    folder: Path, islands: int = 3, seconds: float = 20, rate: float = math.inf, **settings: Any
) -> Iterator[Run]:
    """Yield a run whose islands would train for so many seconds, all together."""
    begin = settings.get("begin", islands)
    settings["total_tokens"] = round(begin * seconds / STEP) * TOKENS
    with Network(islands + 1, up=rate, down=rate) as network:
        yield Run(folder, network, settings)
