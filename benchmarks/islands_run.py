"""A run of `benchmarks.islands`: a server and islands in a network, and their records."""

import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.islands_program import SAMPLES, TOKENS
from benchmarks.network import Network, Program, wait_until
from benchmarks.torchft_loop import LIGHTHOUSE_PORT

STEP = 0.1
"""Seconds of a step."""
END_SECONDS = 150
"""Time without a step of any island after which a run is considered stuck."""
AFTER_SECONDS = 15.0
"""Time for which torchft continues to train after the last fault."""
Found = dict[str, float]


class Run:
    """A server and islands in a network, whose last worker runs the server."""

    program = "benchmarks.islands_program"
    has_log = True
    """Whether there is a log of what was merged."""

    def __init__(self, folder: Path, network: Network, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.folder, self.network = folder, network
        self.islands = network.workers - 1
        self._settings = {"begin": self.islands, "slots": self.islands, **settings}
        self.programs: dict[str, Program] = {}
        self.join = ""
        self.serve()

    # --- programs -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Start or restart the server, and wait until it is ready."""
        out = self.folder / f"server-{time.time():.1f}.txt"
        command = [sys.executable, "-m", "torchtitan_diloco.islands", "serve", "--folder"]
        command += [str(self.folder / "server"), "--address", self.network.address(self.islands)]
        if not self.join:
            command += ["--keep-gb", "1"]
        self.server = self.network.launch(self.islands, command, out)
        wait_until(lambda: "nats+tls://" in self.server.printed(), "the server", out)
        self.join = self.server.printed().splitlines()[0]

    def kill_server(self) -> None:
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
        for pid in map(int, children.split()):
            os.kill(pid, signal.SIGKILL)
        self.server.wait()

    def start(self, worker: int, inside: Sequence[str] = (), **more: Any) -> None:
        """Start an island in the namespace of a worker."""
        name = f"island-{worker}"
        job = self._settings | more | {"join": self.join, "name": name}
        job["path"] = str(self._path(name))
        command = [*inside, sys.executable, "-m", self.program, "island"]
        log = self.folder / f"{name}.txt"
        self.programs[name] = self.network.launch(worker, [*command, json.dumps(job)], log)

    def start_all(self, workers: int, steps: int) -> None:
        """Start islands, and wait until each has taken `steps` steps."""
        for worker in range(workers):
            self.start(worker)
        for worker in range(workers):
            self.reach(f"island-{worker}", steps)

    def reach(self, name: str, step: int) -> None:
        program = self.programs[name]
        wait_until(
            lambda: len(self.steps(name)) >= step or not program.running,
            f"step {step} of {name}",
            program.log,
        )
        if len(self.steps(name)) < step:
            raise SystemExit(f"{name} ended before step {step}; see {self.folder}")

    # --- what they have written ---------------------------------------------------------------

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

    def event(self, name: str, kind: str) -> dict[str, Any]:
        """Return the last event of this kind."""
        return [one for one in self.lines(name) if one.get("event") == kind][-1]

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
        living = [name for name in self.programs if name != dead]
        problems = []
        while any(self.programs[name].running for name in living):
            if time.time() - max(self._path(name).stat().st_mtime for name in living) > END_SECONDS:
                break
            time.sleep(0.1)
        for name in living:
            code = self.programs[name].wait(0)
            if code != 0:
                said = self.programs[name].printed().strip().splitlines()[-1:]
                problems.append(f"{name} ended with {code}: {''.join(said)}"[:300])
        command = [sys.executable, "-m", "benchmarks.islands_program", "audit", self.join]
        audit: dict[str, Any] = json.loads(self.network.run(self.islands, command))
        ends = [self.event(name, "ended") for name in living]
        if len({end["digest"] for end in ends}) > 1:
            problems.append("the islands have different parameters")
        if any(end["ledger"] != audit["ledger"] for end in ends):
            problems.append("the ledgers differ")
        problems += audit["problems"] + ([] if audit["ended"] else ["the run has not ended"])
        for problem in problems:
            print(f"PROBLEM in {self.folder}: {problem}", flush=True)
        return audit | {"problems": problems}

    def losses(self, audit: dict[str, Any], names: Iterable[str]) -> Found:
        """Return the number of steps that are lost or were repeated, and of problems."""
        slots = [int(self.event(name, "joined")["slot"]) for name in names]
        samples = sum(audit["lost_samples"][one] + audit["read_twice"][one] for one in slots)
        return {
            "steps lost": samples / SAMPLES,
            "most versions late": max(audit["late"]),
            "problems": len(audit["problems"]),
        }


class TorchftRun(Run):
    """The same with torchft, whose runs are stopped some seconds after the last fault."""

    program = "benchmarks.islands_torchft"
    has_log = False

    def serve(self) -> None:
        out, port = self.folder / f"server-{time.time():.1f}.txt", LIGHTHOUSE_PORT
        command = [sys.executable, "-m", self.program, "lighthouse", f"0.0.0.0:{port}"]
        self.server = self.network.launch(self.islands, command, out)
        wait_until(lambda: "ready" in self.server.printed(), "the lighthouse", out)
        self.join = f"http://{self.network.address(self.islands)}:{port}"

    def kill_server(self) -> None:
        self.server.kill()

    def start(self, worker: int, inside: Sequence[str] = (), **more: Any) -> None:
        super().start(worker, inside, address=self.network.address(worker), **more)

    def finish(self, dead: str = "") -> dict[str, Any]:
        time.sleep(AFTER_SECONDS)
        ended = [name for name, one in self.programs.items() if name != dead and not one.running]
        for program in self.programs.values():
            program.kill()
        for name in ended:
            print(f"torchft's {name} has ended: {self.programs[name].printed()[-300:]}")
        return {}

    def losses(self, audit: dict[str, Any], names: Iterable[str]) -> Found:  # noqa: ARG002
        return {"steps lost": sum(self.steps(name)[-1]["lost"] for name in names)}


@contextmanager
def running(
    folder: Path,
    islands: int = 3,
    seconds: float = 20,
    rate: float = math.inf,
    kind: type[Run] = Run,
    **settings: Any,
) -> Iterator[Run]:
    """Yield a run with as many tokens as its first islands train in `seconds`."""
    begin = settings.get("begin", islands)
    settings["total_tokens"] = round(begin * seconds / STEP) * TOKENS
    with Network(islands + 1, up=rate, down=rate) as network:
        yield kind(folder, network, settings)
