"""Inject faults into one worker of a run, and compare the verdicts with what was injected.

    .venv/bin/python -m benchmarks.diagnosis [--repeats 3] [--workers 3,4] [--faults slow-compute-2]
        [--islands] [--minutes 0.5] [--record tests/diagnosis/histories]

Each run trains in a network of its own (benchmarks/network.py), on links of limited rate. A step
is a sleep of 60 ms, as if waiting for an accelerator, as several processes share few cores. After
some rounds the fault begins at one worker. The table counts what worker 0, or if it is the victim
worker 1, says of it: the first verdict, the rounds and seconds until then, and false verdicts.

--record writes what the judge of worker 0 was told around the fault, for a replay without a network
(tests/diagnosis/test_histories.py). --islands: the workers are islands, with a bucket of one's own.
"""

import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from benchmarks import core
from benchmarks.hosts import StoreKind
from benchmarks.network import INTERFACE
from benchmarks.workers import BEGIN, Job, Run
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.diagnosis.kinds import WORDS
from torchtitan_diloco.diloco.vitals import ALL_WORKERS

STEP_SECONDS = 0.06
MOST_SECONDS = 75.0
"""For which a verdict is waited for."""
AFTER_SECONDS = 3.0
"""For which others are waited for after it."""
WATCHED = 260
"""Steps after the fault began until a run without a verdict ends."""
BEFORE = 12
"""Rounds before the beginning of a fault that are recorded."""
AFTER = 40
"""Rounds from the beginning of a fault on that are recorded."""
SAID = {
    re.compile(r"worker (?P<culprit>\d+)(: fragments .* are| .*is) not finite"): "wrong numbers",
    re.compile(
        r"different bits on some workers .*: (?P<culprit>worker \d+) differs"
    ): "wrong numbers",
    re.compile(r"island (?P<culprit>worker-\d+): .* copy has wrong bits"): "wrong numbers",
    re.compile(r"worker (?P<culprit>\d+) left or did not answer"): "lost",
}
"""Patterns of lines in logs, and the kind of verdict."""
SUBJECT = r"^(?:.*warning: )?(?:the link )?(?P<culprit>\S.*?) ha(s|ve)"
SAID |= {
    re.compile(f"{SUBJECT} {re.escape(words.has)} since "): kind for kind, words in WORDS.items()
}
HEADER = "injected | at | named rightly | named otherwise | rounds | seconds | other verdicts | n"


@dataclass(frozen=True)
class Fault:
    """A fault: `inside` the victim's process, by name and amount, or by `signal` or `link` from
    outside."""

    kind: str
    """Verdict that is right. Empty: none."""
    inside: dict[str, float] = field(default_factory=dict)
    signal: int = 0
    up: float = 1.0
    down: float = 1.0
    """Shares of the rate that are left."""
    cut: bool = False
    pair: float = 1.0
    """Share that is left of the fair part of the link that the path to the next worker has."""
    lossy: bool = False
    """Only large packets are lost."""
    lasts: float = math.inf
    """Seconds after which a stopped process goes on."""
    by_all: bool = False
    judged: bool = True
    """Whether the judge sees it. Otherwise, others say it."""
    also: str = ""
    """Another verdict that is right."""


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
    "downlink-1/2": Fault("slow receiving", down=1 / 2),
    "downlink-1/4": Fault("slow receiving", down=1 / 4),
    "downlink-1/10": Fault("slow receiving", down=1 / 10),
    "both-1/4": Fault("slow sending", up=1 / 4, down=1 / 4, also="slow receiving"),
    "pair-1/4": Fault("slow link", pair=1 / 4),
    "everybody-slow": Fault("everybody slow", {"compute": 1.0}, by_all=True),
    "nan": Fault("wrong numbers", {"nan": 1.0}, judged=False),
    "outlier": Fault("wrong numbers", {"outlier": 1.0}),
    "other-bits": Fault("wrong numbers", {"bit": 1.0}, judged=False),
    "clock-jumps": Fault("", {"clock": 3600.0}),
    "full-disk": Fault("", {"disk": 1.0}),
    "hung": Fault("hung outside communication", {"hang": 3600.0}),
    "stopped": Fault("stopped", signal=signal.SIGSTOP),
    "stopped-8-s": Fault("stopped", signal=signal.SIGSTOP, lasts=8.0),
    "killed": Fault("lost", signal=signal.SIGKILL, judged=False),
    "cut": Fault("stopped", cut=True),
    "large-packets-lost": Fault("hung in communication", lossy=True),
}
SETTINGS = {
    "training.steps": str(BEGIN + WATCHED),
    "model.layers": "4",
    "model.width": "128",
    "model.heads": "4",
    "training.sequence_length": "32",
    "training.batch_size": "1",
    "validation.every": "0",
    "checkpoint.every": "20",
    "checkpoint.every_minutes": "0",
    "checkpoint.at_end": "false",
    "metrics.boards": "none",
    "metrics.log_every": "20",
    "run.device": "cpu",
    "diloco.fragments.layers_per_fragment": "2",
    "diloco.link.interface": INTERFACE,
}
JOB = {
    "diloco.sync_every": "20",
    "diloco.overlap.delay": "4",
    "diloco.quantization.codec": "fp32",
}
ISLANDS = {
    "diloco.sync_every": "20",
    "diloco.overlap.delay": "10",
    "diloco.quantization.codec": "int8",
}
"""Longer delays, as the syncer looks for parts, and islands for versions, ten times a second."""
JOB_RATE = 60.0
"""Rate of each link of a job, in Mbit/s."""
ISLANDS_RATE = 20.0
"""Rate of each link of islands, in Mbit/s."""


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    workers: int
    victim: int
    rate: float
    islands: bool
    minutes: float
    """Of training after a step at which nothing happens that is worth a verdict."""

    @property
    def fault(self) -> Fault:
        return FAULTS[self.name]

    @property
    def expected(self) -> tuple[str, str] | None:
        """The right kind and culprit. `fault.also` is right, too."""
        kind = self.fault.kind
        culprit = f"worker {self.victim}"
        kind = "stopped" if self.islands and kind == "lost" else kind
        if self.islands and "nan" in self.fault.inside:  # it is the first worker of its own job
            culprit = "worker 0"
        if kind == "stopped" and self.fault.lasts < 10 and not self.islands:
            kind = ""  # training waits, and says for whom after 10 s
        if self.fault.pair < 1:
            culprit += f" -> worker {(self.victim + 1) % self.workers}"
        return (kind, "all" if self.fault.by_all else culprit) if kind else None


@dataclass
class Outcome:
    case: Case
    verdicts: list[tuple[str, str]]
    """Kind and culprit of all verdicts, in order."""
    rounds: float
    seconds: float
    history: list[core.Record]


def verdicts_in(text: str) -> list[tuple[str, str]]:
    """Return the kinds and culprits that a log names, without those that are over."""
    verdicts = list[tuple[str, str]]()
    for line in text.splitlines():
        if "waiting since" in line:
            continue
        for pattern, kind in SAID.items():
            if match := pattern.search(line):
                culprit = re.sub(r"^(?=\d)|worker-", "worker ", match["culprit"])
                verdicts.append((kind, ALL_WORKERS if culprit == "all workers" else culprit))
                break
    return list(dict.fromkeys(verdicts))


def inject(case: Case, run: Run) -> None:
    """Begin a fault from outside of the victim's process."""
    fault = case.fault
    network = run.network
    victim = case.victim
    rate = case.rate
    if fault.signal:
        run.signal(victim, fault.signal)
    if fault.up < 1 or fault.down < 1:
        network.set_rate(victim, up=rate * fault.up, down=rate * fault.down)
    if fault.pair < 1:
        share = rate / (case.workers - 1)
        network.set_rate_to(victim, (victim + 1) % case.workers, share * fault.pair)
    if fault.cut:
        network.cut(victim, closed=True)
    if fault.lossy:
        network.lose_large(victim)


def measure(case: Case, folder: Path) -> Outcome:
    fault = case.fault
    victim = case.victim
    # The first rank judges; anybody says whom it waits for; who heals itself says so.
    unable = fault.signal or fault.cut or fault.lossy or {"hang", "bit"} & fault.inside.keys()
    first = 1 if case.islands and victim == 0 else 0
    numbers = [worker for worker in range(case.workers) if worker != victim] if unable else [first]
    heals = {"nan", "bit"} if case.islands else {"nan"}
    witnesses = [victim] if heals & fault.inside.keys() else numbers
    settings = SETTINGS | (ISLANDS if case.islands else JOB)
    settings["diloco.workers"] = str(case.workers)
    watched = MOST_SECONDS if case.expected else 60 * case.minutes
    if not case.expected or "hang" in fault.inside:  # islands go on without it
        settings["training.steps"] = str(BEGIN + math.ceil(watched / STEP_SECONDS))
    job = Job(settings, sleep=STEP_SECONDS, recorded=True)
    store: StoreKind | None = "serve" if case.islands else None
    with Run(folder, case.workers, job, store=store, rate=case.rate) as run:
        for worker in range(case.workers):
            run.start(worker, fault=fault.inside if fault.by_all or worker == victim else {})
        run.reach(witnesses[0], BEGIN, seconds=240)  # who hangs does not end this step
        before = verdicts_in(run.printed(*witnesses))
        began = time.monotonic()
        seconds = math.nan
        inject(case, run)
        end = began + watched
        while time.monotonic() < end and all(run.living[worker].is_alive() for worker in witnesses):
            if math.isnan(seconds) and set(verdicts_in(run.printed(*witnesses))) - set(before):
                seconds = time.monotonic() - began
                end = min(end, time.monotonic() + AFTER_SECONDS if fault.kind else math.inf)
            if time.monotonic() > began + fault.lasts:
                run.signal(victim, signal.SIGCONT)
            time.sleep(0.05)
        verdicts = verdicts_in(run.printed(*witnesses))  # before they lose each other at the end
        if math.isnan(seconds) and set(verdicts) - set(before):  # a run that it has ended
            seconds = time.monotonic() - began
        for worker in witnesses:
            if run.living[worker].exitcode and not verdicts:
                print(f"worker {worker} ended: {run.printed(worker)[-2000:]}", flush=True)
    number = next((worker for worker in numbers if verdicts_in(run.printed(worker))), 0)
    history = read_json_lines(run.history(number))[0]
    records = run.records(number)
    steps = [record["step"] for record in records if record.get("kind") == "verdict"]
    until = min((step for step in steps if step >= BEGIN), default=0)
    rounds = math.nan
    if until:
        rounds = sum(BEGIN <= int(record["step"]) <= until for record in history)
    return Outcome(case, verdicts, rounds, seconds, history)


def write_history(folder: Path, outcome: Outcome) -> None:
    """Write the rounds around the fault, after a line about it."""
    case = outcome.case
    history = outcome.history
    about = {"fault": case.name, "workers": case.workers, "expected": case.expected, "begin": BEGIN}
    split = sum(record["step"] < BEGIN for record in history)
    lines = [about, *history[max(0, split - BEFORE) : split + AFTER]]
    folder.mkdir(parents=True, exist_ok=True)
    kind = "islands" if case.islands else "job"
    name = f"{kind}-{case.name.replace('/', '-of-')}-{case.victim}-of-{case.workers}"
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in lines))


# --- the table ------------------------------------------------------------------------------------


def row(outcomes: list[Outcome]) -> list[str]:
    """Return the row of a fault."""
    right = 0
    otherwise = Counter[str]()
    false = Counter[str]()
    for outcome in outcomes:
        expected = outcome.case.expected
        also = outcome.case.fault.also
        correct = {expected, (also, expected[1])} if also and expected else {expected}
        first = outcome.verdicts[0] if outcome.verdicts else None
        if first in correct:
            right += 1
        else:
            otherwise[" ".join(first) if first else "nothing"] += 1
        false.update(
            " ".join(verdict) for verdict in outcome.verdicts[1:] if verdict not in correct
        )
    seconds = [outcome.seconds for outcome in outcomes if not math.isnan(outcome.seconds)]
    rounds = [outcome.rounds for outcome in outcomes if not math.isnan(outcome.rounds)]

    def text(counts: Counter[str]) -> str:
        return ", ".join(f"{verdict} {count}x" for verdict, count in counts.items()) or "-"

    case = outcomes[0].case
    return [
        case.name,
        ", ".join(f"{outcome.case.victim}" for outcome in outcomes) + f" of {case.workers}",
        f"{right}/{len(outcomes)}",
        text(otherwise),
        core.summary(rounds, ".0f") if rounds else "-",
        core.summary(seconds, ".1f") if seconds else "-",
        text(false),
        str(len(outcomes)),
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--faults", type=core.one_of(list(FAULTS)), default="", help="default: all")
    parser.add_argument("--workers", type=core.list_of(core.positive), default=[3])
    parser.add_argument("--repeats", type=core.positive, default=3)
    text = "of each run that has no fault, after its beginning"
    parser.add_argument("--minutes", type=float, default=0.5, help=text)
    parser.add_argument("--islands", action="store_true", help="workers are islands")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write what the judge is told")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the programs, too
    rows = list[list[str]]()
    rate = ISLANDS_RATE if options.islands else JOB_RATE
    for workers, name in product(options.workers, options.faults):
        if options.islands and FAULTS[name].pair < 1:
            continue  # islands exchange through the store
        outcomes = list[Outcome]()
        for repeat in range(options.repeats):
            victim = (repeat + 1) % workers
            case = Case(name, workers, victim, rate, options.islands, options.minutes)
            with tempfile.TemporaryDirectory() as folder:
                outcome = measure(case, Path(folder, "case"))
            if options.record is not None and case.fault.judged:
                write_history(options.record, outcome)
            outcomes.append(outcome)
            about = f"{outcome.verdicts}, {outcome.rounds:.0f} rounds, {outcome.seconds:.1f} s"
            load = os.getloadavg()[0]
            print(
                f"{name}, victim {case.victim} of {workers}: {about}, load {load:.1f}", flush=True
            )
        rows.append(row(outcomes))
    title = f"links of {rate:g} Mbit/s, {os.cpu_count()} cores; torch {torch.__version__}"
    core.print_table(title, HEADER, rows)


if __name__ == "__main__":
    main()
