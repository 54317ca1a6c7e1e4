"""A run of `benchmarks.islands`, and what its islands and its log show at the end."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import core
from benchmarks.parity import read_tables
from benchmarks.workers import Job, Run
from tests.islands.simulation import check_ledger
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.reader import open_reader

LENGTH = 64
"""Tokens of a sample."""
Found = dict[str, float]


def island_settings(samples: int) -> core.Settings:
    """Return the settings of the decoder of 0.12M parameters of benchmarks/records/loss.md."""
    tables = read_tables()
    settings = tables.defaults | tables.shapes["many-steps"]
    for key in ("training.global_batch_size", "diloco.workers"):
        del settings[key]
    return settings | {"training.batch_size": str(samples)}


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


class IslandsRun(Run):
    def __init__(self, folder: Path, islands: int, job: Job, rate: float = math.inf) -> None:
        super().__init__(folder, islands, job, islands=True, rate=rate)

    def finish(self) -> dict[str, Any]:
        """Wait until all living islands have ended, and check copies and ledgers."""
        self.wait()
        path, log = self.folder / "audit.json", self.folder / "audit.txt"
        self.network.fork(self.workers, audit, log, self.join, path).join()
        found: dict[str, Any] = json.loads(path.read_text())
        problems = found["problems"] + [
            f"island {worker} ended with {process.exitcode}"
            for worker, process in self.living.items()
            if process.exitcode != 0
        ]
        losses = {self.final_loss(worker) for worker in self.living}
        if len(losses) > 1:
            problems.append("the shared parameters of the islands have different losses")
        for problem in problems:
            print(f"PROBLEM in {self.folder}: {problem}", flush=True)
        return found | {"problems": problems, "loss": losses.pop()}

    def final_loss(self, worker: int) -> float | None:
        """Return the last loss of the shared parameters in the last life of an island."""
        losses = [one["loss/val"] for one in self.records(worker) if "loss/val" in one]
        return losses[-1] if losses else None

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
        slots = [int(self.noted(worker, "slot")[-1]["slot"]) for worker in workers]
        lost = sum(audit["lost_samples"][one] + audit["read_twice"][one] for one in slots)
        return {"steps lost": lost, "problems": len(audit["problems"])}

    def trained(self) -> Counter[int]:
        """Return the steps that the owners of each slot have taken."""
        found, slot = Counter[int](), 0
        for note in (note for worker in range(self.workers) for note in self.noted(worker, "time")):
            slot = note.get("slot", slot)
            found[slot] += "step" in note
        return found
