"""A run of `benchmarks.islands`, and what its islands and its store show at the end."""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Self

from benchmarks import core
from benchmarks.hosts import StoreKind
from benchmarks.parity import read_tables
from benchmarks.workers import Job, Run
from tests.islands.audit import Audit, audited
from tests.processes import FORKS
from tests.waiting import wait_until
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.islands.rules.decision import Decision, encode_decision
from torchtitan_diloco.store import AwayError, Store, open_store

LENGTH = 64
"""Tokens of a sample."""
LOOK_SECONDS = 0.2
"""Seconds between two looks at the decisions of a run."""
COUNT_SECONDS = 10.0
"""Seconds between two counts of its objects."""
Measurements = dict[str, float]


def island_settings(samples: int) -> core.Settings:
    """Return the settings of the decoder of 0.12M parameters of benchmarks/records/loss.md."""
    tables = read_tables()
    settings = tables.defaults | tables.shapes["many-steps"]
    for key in ("training.global_batch_size", "diloco.workers"):
        del settings[key]
    return settings | {"training.batch_size": str(samples)}


# --- in the process that watches ------------------------------------------------------------------


def watch(location: str, folder: Path, is_over: Event) -> None:
    """Audit a run until it is over. Write down its decisions, the numbers of its objects, and, at
    the end, what its ledgers say and what is wrong."""
    problems = list[str]()
    summary: core.Record = {}
    store = open_store(location, writes=None)
    try:
        with audited(Path(location)) as audit:
            follow(audit, store, folder, is_over)
        summary = summarize(audit.newest)
        audit.check(LENGTH)
    except Exception as error:  # it belongs to the result of the run
        problems.append(f"the audit of the store: {type(error).__name__}: {error}")
    finally:
        store.close()
    (folder / "audit.json").write_text(json.dumps(summary | {"problems": problems}))


def follow(audit: Audit, store: Store, folder: Path, is_over: Event) -> None:
    """Write down decisions, and now and then the numbers of objects."""
    newest = 0
    counted_at = -math.inf
    is_last = False
    with (
        (folder / "decisions.jsonl").open("w", buffering=1) as decisions,
        (folder / "objects.jsonl").open("w", buffering=1) as objects,
    ):
        while not is_last:
            is_last = is_over.wait(LOOK_SECONDS)
            for number in sorted(key for key in list(audit.decisions) if key > newest):
                newest = number
                decisions.write(json.dumps(describe(audit.decisions[number])) + "\n")
            if is_last or time.monotonic() - counted_at > COUNT_SECONDS:
                counted_at = time.monotonic()
                with suppress(AwayError):
                    objects.write(json.dumps(count_objects(store)) + "\n")


def describe(decision: Decision) -> core.Record:
    return {
        "time": decision.written,
        "session": decision.session,
        "bytes": len(encode_decision(decision)),
        "versions": sum(fragment.version for fragment in decision.fragments),
    }


def count_objects(store: Store) -> core.Record:
    """Return the number of objects of each kind, and the bytes of all."""
    entries = store.list("")
    kinds = Counter(entry.name.partition("/")[0] for entry in entries)
    sizes = sum(entry.size for entry in entries)
    return {"time": time.time(), "bytes": sizes, "all": len(entries), **kinds}


def summarize(decision: Decision) -> core.Record:
    """Return what a decision says of the whole run, as means over fragments."""
    ledgers = [slot.ledgers for slot in decision.slots]
    return {
        "ended": decision.ended,
        "merged_tokens": statistics.mean(fragment.clock for fragment in decision.fragments),
        "merged_samples": [
            statistics.mean(ledger.taken - ledger.lost for ledger in of_slot) for of_slot in ledgers
        ],
        "lost_samples": [statistics.mean(ledger.lost for ledger in of_slot) for of_slot in ledgers],
        "read_twice": [slot.read_twice for slot in decision.slots],
        "shared": [fragment.checksum(fragment.version) for fragment in decision.fragments],
    }


# --- the run --------------------------------------------------------------------------------------


class IslandsRun(Run):
    def __init__(
        self, folder: Path, islands: int, job: Job, store: StoreKind, rate: float = math.inf
    ) -> None:
        super().__init__(folder, islands, job, store=store, rate=rate)
        self._is_over = FORKS.Event()

    def __enter__(self) -> Self:
        super().__enter__()
        assert self.host is not None
        log = self.folder / "watch.txt"
        given = (self.host.location, self.folder, self._is_over)
        self._watching = self.network.fork(self.workers, watch, log, *given)
        return self

    def __exit__(self, *error: object) -> None:
        self._watching.kill()
        super().__exit__(*error)

    def finish(self, *, ends: bool = True) -> dict[str, Any]:
        """Wait until all living islands have ended, and check store, ledgers and copies.

        `ends`: whether the run has all its tokens then.
        """
        self.wait()
        self._is_over.set()
        self._watching.join()
        path = self.folder / "audit.json"
        if not path.exists():
            raise SystemExit((self.folder / "watch.txt").read_text()[-2000:])
        summary: dict[str, Any] = json.loads(path.read_text())
        problems = summary["problems"] + [
            f"island {worker} ended with {process.exitcode}"
            for worker, process in self.living.items()
            if process.exitcode != 0
        ]
        if ends and not summary.get("ended"):
            problems.append("the run has not ended")
        for worker in self.living if ends else ():
            notes = self.noted(worker, "shared")
            if not notes or notes[-1]["shared"] != summary.get("shared"):
                problems.append(f"island {worker} has other shared parameters than the store")
        for problem in problems:
            print(f"PROBLEM in {self.folder}: {problem}", flush=True)
        return summary | {"problems": problems}

    # --- what the store has shown -----------------------------------------------------------------

    def decisions(self) -> list[core.Record]:
        return read_json_lines(self.folder / "decisions.jsonl")[0]

    def objects(self) -> list[core.Record]:
        return read_json_lines(self.folder / "objects.jsonl")[0]

    def wait_for_successor(self, before: str, seconds: float = 120.0) -> float:
        """Wait for a syncer after session `before`, and return when its first decision was
        written."""

        def later() -> list[core.Record]:
            decisions = self.decisions()
            last = max(
                number for number, decision in enumerate(decisions) if decision["session"] == before
            )
            return decisions[last + 1 :]

        wait_until(lambda: bool(later()), "another syncer", seconds=seconds)
        return float(later()[0]["time"])

    # --- what the islands have shown --------------------------------------------------------------

    def final_loss(self, worker: int) -> float | None:
        """Return the last loss of the shared parameters in the last life of an island."""
        losses = [record["loss/val"] for record in self.records(worker) if "loss/val" in record]
        return losses[-1] if losses else None

    def usual(self, worker: int) -> float:
        return float(statistics.median(step["seconds"] for step in self.steps(worker)))

    def seen(
        self, workers: Iterable[int], since: float, until: float = math.inf, *, but_last: int = 0
    ) -> Measurements:
        """Return the longest stall and the largest idle share of these islands in a time span.

        `but_last`: number of the last steps to leave out, in which islands wait until the run has
        merged all of its tokens.
        """
        stalls = []
        idle = []
        for worker in workers:
            steps = self.steps(worker, since, until)
            steps = steps[: len(steps) - but_last]
            exposed = [step["exposed"] for step in steps]
            stalls.append(max(exposed) / self.usual(worker))
            idle.append(100 * sum(exposed) / sum(step["seconds"] for step in steps))
        return {"longest stall, steps": max(stalls), "idle, %": max(idle)}

    def next_round(self, workers: Iterable[int], since: float) -> float:
        """Return the seconds until all these islands have read another version."""

        def wait(worker: int) -> float:
            before = max((step["rounds"] for step in self.steps(worker, until=since)), default=0)
            later = [step["time"] for step in self.steps(worker, since) if step["rounds"] > before]
            return min(later, default=math.inf) - since

        return max(map(wait, workers))

    def traffic(
        self, workers: Iterable[int], sync_every: int, since: float = 0, until: float = math.inf
    ) -> Measurements:
        """Return the bytes of the links of these islands, by the counters of the kernel, and those
        of the versions that they have applied, as multiples of the parts that they have sent in
        whole cycles of this time span."""
        up = list[float]()
        down = list[float]()
        versions = list[float]()
        for worker in workers:
            steps = self.steps(worker, since, until)
            cycles = (len(steps) - 1) // sync_every
            if cycles < 1:
                raise SystemExit(f"worker {worker} has taken {len(steps)} steps: no whole cycle")
            first = steps[0]
            last = steps[cycles * sync_every]
            parts = last["parts"] - first["parts"]
            up.append((last["up"] - first["up"]) / parts)
            down.append((last["down"] - first["down"]) / parts)
            versions.append((last["versions"] - first["versions"]) / parts)
        return {
            "up, parts": max(up),
            "down, parts": max(down),
            "versions down, parts": max(versions),
        }

    def losses(self, audit: dict[str, Any], workers: Iterable[int]) -> Measurements:
        """Return the number of steps that are lost or were repeated, and of problems."""
        slots = [self.slot(worker) for worker in workers]
        lost = sum(audit["lost_samples"][slot] + audit["read_twice"][slot] for slot in slots)
        return {"steps lost": lost, "problems": len(audit["problems"])}

    def slot(self, worker: int) -> int:
        return int(self.noted(worker, "slot")[-1]["slot"])

    def trained(self) -> Counter[int]:
        """Return the steps that the owners of each slot have taken."""
        steps_of_slot = Counter[int]()
        slot = 0
        for note in (note for worker in range(self.workers) for note in self.noted(worker, "time")):
            slot = note.get("slot", slot)
            steps_of_slot[slot] += "step" in note
        return steps_of_slot
