"""Inject faults into one worker of a run, and compare the verdicts with what was injected.

    .venv/bin/python -m benchmarks.diagnosis [--repeats 3] [--workers 3,4] [--faults slow-compute-2]

Each run trains in a network of its own (benchmarks/network.py), on links of --rate Mbit/s. A step
is a sleep of 60 ms, as if waiting for an accelerator, as several processes share few cores. After
some rounds the fault begins at one worker. The table counts what worker 0, or if it is the victim
worker 1, says of it: the first verdict, the rounds and seconds until then, and false verdicts.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import core
from benchmarks.network import INTERFACE, Network, NoNetworkError, Program, wait_until
from torchtitan_diloco import train
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.telemetry import Batch
from torchtitan_diloco.trainer import Trainer

STEP_SECONDS, SAVE_EVERY = 0.06, 20
MOST_SECONDS, AFTER_SECONDS = 60.0, 3.0
"""For which a verdict is waited for, and after it for others."""
REACHED = "here the faults begin"
BEGIN, WATCHED = 120, 260
"""Step at which a fault begins, and steps after it until a run without a verdict ends."""
EVERY, FRAGMENTS = 10, 3
SAID = re.compile(r"(?:warning: )?(?P<culprit>\S.*?): (?P<kind>[a-z ]+?)(?: \([A-Z_]+\))? since ")
WAITING = re.compile(r"waiting since \d+ s for worker (?P<culprit>\d+).*header has not come")
LOST = re.compile(r"worker (?P<culprit>\d+) left or did not answer")
WRONG = re.compile(r"worker (?P<culprit>\d+)(: fragments .* are| .*is) not finite")
HEADER = "injected | at | named rightly | named otherwise | rounds | seconds | other verdicts | n"


@dataclass(frozen=True)
class Fault:
    """`inside`: in the victim's own process, by name and amount. `signal`, `link`: from outside."""

    kind: str
    """Verdict that is right. Empty: none."""
    inside: dict[str, float] = field(default_factory=dict)
    signal: int = 0
    up: float = 1.0
    down: float = 1.0
    """Shares of the rate that are left."""
    cut: bool = False
    by_all: bool = False


FAULTS = {
    "clean": Fault(""),
    "slow-compute-1.3": Fault("slow compute", {"compute": 0.3}),
    "slow-compute-2": Fault("slow compute", {"compute": 1.0}),
    "slow-compute-4": Fault("slow compute", {"compute": 3.0}),
    "slow-data": Fault("slow data", {"data": 0.5}),
    "slow-save": Fault("slow save", {"save": 5.0}),
    "uplink-1/2": Fault("slow sending", up=1 / 2),
    "uplink-1/4": Fault("slow sending", up=1 / 4),
    "uplink-1/10": Fault("slow sending", up=1 / 10),
    "downlink-1/4": Fault("slow receiving", down=1 / 4),
    "everybody-slow": Fault("everybody slow", {"compute": 1.0}, by_all=True),
    "nan": Fault("wrong numbers", {"nan": 1.0}),
    "stopped": Fault("stopped", signal=signal.SIGSTOP),
    "killed": Fault("lost", signal=signal.SIGKILL),
    "cut": Fault("stopped", cut=True),
}
SETTINGS = {
    "model.layers": "4",
    "model.width": "128",
    "model.heads": "4",
    "training.sequence_length": "32",
    "training.batch_size": "1",
    "validation.every": "0",
    "checkpoint.every_minutes": "0",
    "checkpoint.at_end": "false",
    "metrics.tensorboard": "false",
    "metrics.log_every": "20",
    "run.device": "cpu",
    "diloco.sync_every": str(EVERY),
    "diloco.fragments.layers_per_fragment": "2",
    "diloco.overlap.delay": "2",
    "diloco.quantization.codec": "int8",
    "diloco.link.interface": INTERFACE,
}


# --- in a worker ----------------------------------------------------------------------------------


class Victim(Trainer):
    """Trainer whose steps sleep, and which has a fault from step BEGIN on."""

    fault: Mapping[str, float] = {}

    def amount(self, name: str) -> float:
        return self.fault.get(name, 0.0) if self.step >= BEGIN else 0.0

    def train_step(self, batches: Iterator[Batch]) -> Any:
        time.sleep(STEP_SECONDS * (1 + self.amount("compute")))
        result = super().train_step(batches)
        if self.amount("nan") and self.step == BEGIN:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(float("nan"))
        if self.step == BEGIN:
            print(REACHED, flush=True)
        return result

    def begin(self) -> None:
        super().begin()
        loader = self.loader

        def delayed(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                time.sleep(STEP_SECONDS * self.amount("data"))
                yield batch

        original = type(loader).__iter__
        type(loader).__iter__ = lambda one: delayed(original(one))  # type: ignore[method-assign]
        save = Checkpointer.save

        def slow_save(one: Checkpointer, manifest: Any) -> float:
            started = time.perf_counter()
            save(one, manifest)
            time.sleep(STEP_SECONDS * self.amount("save"))
            return time.perf_counter() - started

        setattr(Checkpointer, "save", slow_save)  # noqa: B010 - a fault
        setattr(Checkpointer, "due_by_time", lambda _: self.step % SAVE_EVERY == 0)  # noqa: B010


def run_worker(fault: Mapping[str, float], words: list[str]) -> int:
    Victim.fault = fault
    setattr(train, "Trainer", Victim)  # noqa: B010 - the program of a user, with a fault
    return train.main(words)


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    said: list[tuple[str, str]]
    """Kind and culprit of all verdicts, in order."""
    rounds: float
    seconds: float


def verdicts_in(text: str) -> list[tuple[str, str]]:
    """Return the kinds and culprits that a log names, without those that are over."""
    found = list[tuple[str, str]]()
    for line in text.splitlines():
        if line.endswith("is over"):
            continue
        if one := WAITING.search(line):
            found.append(("stopped", f"worker {one['culprit']}"))
        elif one := WRONG.search(line):
            found.append(("wrong numbers", f"worker {one['culprit']}"))
        elif one := LOST.search(line):
            found.append(("lost", f"worker {one['culprit']}"))
        elif one := SAID.search(line):
            found.append((one["kind"], one["culprit"].removeprefix("[rank 0] warning: ")))
    return list(dict.fromkeys(found))


def measure(name: str, workers: int, victim: int, rate: float, folder: Path) -> Outcome:
    fault = FAULTS[name]
    words = core.command_line(
        SETTINGS
        | {
            "run.folder": str(folder),
            "training.steps": str(BEGIN + WATCHED),
            "diloco.workers": str(workers),
        }
    )
    folder.mkdir(parents=True)
    with Network(workers, up=rate, down=rate) as network:
        programs = list[Program]()
        for worker in range(workers):
            mine = fault.inside if fault.by_all or worker == victim else {}
            command = [sys.executable, "-m", "benchmarks.diagnosis", "--inside", json.dumps(mine)]
            log = folder / f"log-{worker}.txt"
            programs.append(network.launch(worker, [*command, *words], log))
        first = programs[0]  # the first rank judges; anybody says whom it waits for
        wait_until(
            lambda: first.line(REACHED) != "" or not first.running, "the fault", first.log, 240
        )
        if not first.line(REACHED):
            raise SystemExit(first.printed())
        began, found = time.monotonic(), list[tuple[str, str]]()
        seconds = math.nan
        if fault.signal:
            os.kill(programs[victim].pid, fault.signal)
        if fault.up < 1 or fault.down < 1:
            network.set_rate(victim, up=rate * fault.up, down=rate * fault.down)
        if fault.cut:
            network.cut(victim, closed=True)
        witness = programs[1] if victim == 0 and (fault.signal or fault.cut) else first
        witness = programs[victim] if "nan" in fault.inside else witness  # it heals itself
        end = began + MOST_SECONDS
        while time.monotonic() < end and all(one.running for one in (first, witness)):
            found = verdicts_in(witness.printed())
            if found and math.isnan(seconds):
                seconds = time.monotonic() - began
                end = min(end, time.monotonic() + AFTER_SECONDS if fault.kind else math.inf)
            time.sleep(0.05)
        found = verdicts_in(witness.printed())
        if fault.signal == signal.SIGSTOP:
            os.kill(programs[victim].pid, signal.SIGCONT)
    verdicts = (one for one in core.read_records(folder) if one.get("kind") == "verdict")
    steps = next((one["step"] - BEGIN for one in verdicts), math.nan)
    return Outcome(found, FRAGMENTS * steps / EVERY, seconds)


# --- the table ------------------------------------------------------------------------------------


def row(name: str, workers: int, outcomes: list[tuple[int, Outcome]]) -> list[str]:
    """`outcomes`: with their victims."""
    kind, right, otherwise, false = FAULTS[name].kind, 0, Counter[str](), Counter[str]()
    for victim, outcome in outcomes:
        culprit = "all" if FAULTS[name].by_all else f"worker {victim}"
        expected = (kind, culprit) if kind else None
        first = outcome.said[0] if outcome.said else None
        right += first == expected
        if first != expected:
            otherwise[" ".join(first) if first else "nothing"] += 1
        false.update(" ".join(one) for one in outcome.said[1:] if one != expected)
    known = [one for _, one in outcomes if not math.isnan(one.seconds)]
    rounds = [one.rounds for one in known if not math.isnan(one.rounds)]

    def text(counts: Counter[str]) -> str:
        return ", ".join(f"{what} {count}x" for what, count in counts.items()) or "-"

    return [
        name,
        ", ".join(f"{victim}" for victim, _ in outcomes) + f" of {workers}",
        f"{right}/{len(outcomes)}",
        text(otherwise),
        core.summary(rounds, ".1f") if rounds else "-",
        core.summary([one.seconds for one in known], ".1f") if known else "-",
        text(false),
        str(len(outcomes)),
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--faults", type=core.one_of(list(FAULTS)), default="", help="default: all")
    parser.add_argument("--workers", type=core.list_of(core.positive), default=[3])
    parser.add_argument("--repeats", type=core.positive, default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="of each link, in Mbit/s")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if options.inside is not None:
        sys.exit(run_worker(options.inside, words))
    if words:
        parser.error(f"{' '.join(words)}: unknown options")
    rows = list[list[str]]()
    for workers in options.workers:
        for name in options.faults:
            outcomes = list[tuple[int, Outcome]]()
            for repeat in range(options.repeats):
                victim = (repeat + 1) % workers
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        path = Path(folder, "run")
                        found = measure(name, workers, victim, options.rate, path)
                    except NoNetworkError as error:
                        parser.error(f"needs network namespaces: {error}")
                outcomes.append((victim, found))
                print(f"{name}, victim {victim} of {workers}: {found}", flush=True)
            rows.append(row(name, workers, outcomes))
    title = f"links of {options.rate:g} Mbit/s, {os.cpu_count()} cores; torch {torch.__version__}"
    core.print_table(title, HEADER, rows)


if __name__ == "__main__":
    main()
