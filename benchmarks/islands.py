"""Inject faults into islands, and let them come and go: stalls, lost steps, loss.

    .venv/bin/python -m benchmarks.islands [--cases control,killed] [--repeats 3]
    .venv/bin/python -m benchmarks.islands --storm 600
    .venv/bin/python -m benchmarks.islands --quality [--cases 'one always late']

Each island and the server have a network namespace of their own (benchmarks/network.py). After
every run, islands that have reached the end must have the same shared parameters, and the log must
be consistent: each range of samples is merged once, weights equal tokens, and all islands have the
same ledger.

Faults: a step is a sleep of 0.1 s, so that four islands fit on two cores; H = 20, tau = 5 steps. A
stall is the time of a step that a surviving island does not compute, as a multiple of its usual
step. All cases take about half an hour.

--quality: loss at equal tokens against islands in lockstep. The trainer trains the decoder of
0.12M parameters of `benchmarks.parity` on the source of the Python standard library. A slow island
sleeps in multiples of its usual step. Except in lockstep, rounds wait for 0.1 s. Finished runs are
kept in --out.

Needs the extra `islands`.
"""

import math
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks import core
from benchmarks.islands_run import LENGTH, Found, IslandsRun, island_settings
from benchmarks.network import wait_until
from benchmarks.workers import Job

# --- faults ---------------------------------------------------------------------------------------

STEP = 0.1
"""Seconds that a step sleeps. It also trains on one sample."""
STORM_EVERY = 40.0
MEDIUM = 40.0
"""Mbit/s at which the parts of a round in fp32 take 0.1 s, and half of the round at a tenth."""
SETTINGS = island_settings(samples=1) | {
    "diloco.sync_every": "20",
    "diloco.overlap.delay": "5",
    "validation.sequences": "64",
}
LARGE = {
    "model.layers": "8",
    "model.width": "128",
    "model.head_dim": "64",
    "model.feed_forward": "768",
    "diloco.fragments.layers_per_fragment": "2",
}
"""2.2M parameters: 8.7 MB in fp32, a snapshot of 17.4 MB."""
FAULTS = {
    "control": math.inf,
    "killed": math.inf,
    "killed in an exchange": MEDIUM,
    "stopped for 8 s": math.inf,
    "link cut for 10 s": math.inf,
    "link at 1/10": MEDIUM,
    "server away for 6 s": math.inf,
}
"""Faults of an island, and the rates of their links."""


def run_of(
    folder: Path,
    islands: int = 3,
    seconds: float = 20,
    rate: float = math.inf,
    begin: int = 0,
    settings: core.Settings | None = None,
) -> IslandsRun:
    """Return a run with as many tokens as its first islands train in `seconds`."""
    begin = begin or islands
    own = {
        "training.tokens": str(round(begin * seconds / STEP) * LENGTH),
        "diloco.quantization.codec": "fp32" if rate == MEDIUM else "fp4_e3m0",
        "islands.begin": str(begin),
        "islands.slots": str(islands),
        "islands.grace_seconds": str(5 * STEP),
    }
    job = Job(SETTINGS | own | (settings or {}), sleep=STEP)
    return IslandsRun(folder, islands, job, rate)


def strike(run: IslandsRun, fault: str, worker: int) -> None:
    """Inject a fault at a worker, and return when it is over."""
    network = run.network
    match fault:
        case "killed":
            run.kill(worker)
        case "killed in an exchange":
            sent = network.counters(worker)[0]
            network.set_rate(worker, up=4, down=4)
            wait_until(lambda: network.counters(worker)[0] > sent + 100_000, "an upload")
            run.kill(worker)
        case "stopped for 8 s":
            run.signal(worker, signal.SIGSTOP)
            time.sleep(8)
            run.signal(worker, signal.SIGCONT)
        case "link cut for 10 s":
            network.cut(worker, closed=True)
            time.sleep(10)
            network.cut(worker, closed=False)
        case "link at 1/10":
            network.set_rate(worker, up=4, down=4)
            time.sleep(20)
        case "server away for 6 s":
            run.kill_server()
            time.sleep(6)
            run.serve()


def fault_case(folder: Path, fault: str) -> Found:
    others = [0, 1, 2] if fault in ("control", "server away for 6 s") else [0, 1]
    with run_of(folder, seconds=30, rate=FAULTS[fault]) as run:
        run.start_all(3, 50)
        since = time.time()
        strike(run, fault, 2)
        back, audit = time.time(), run.finish()
        found = run.seen(others, since) | {"next round, s": run.next_round(run.living, back)}
        return found | run.losses(audit, run.living)


def join(folder: Path) -> Found:
    """Start an island that joins two others over 200 Mbit/s."""
    with run_of(folder, seconds=50, rate=200, begin=2, settings=LARGE) as run:
        run.start_all(2, 50)
        since = time.time()
        run.start(2)
        return joined(run, since)


def donor_dies(folder: Path) -> Found:
    """Kill the island that sends a snapshot, over 20 Mbit/s, when it has sent a part of it."""
    with run_of(folder, seconds=60, rate=20, begin=2, settings=LARGE) as run:
        run.start_all(2, 50)
        sent = [run.network.counters(worker)[0] for worker in range(2)]
        run.start(2)

        def given(worker: int) -> float:
            return run.network.counters(worker)[0] - sent[worker]

        wait_until(lambda: max(given(0), given(1)) > 3e6, "a snapshot on its way")
        run.kill(int(given(1) > given(0)))
        return joined(run, time.time())


def joined(run: IslandsRun, since: float) -> Found:
    """Wait until island 2 has joined, and return what was measured until its first cycle ended."""
    run.reach(2, 50)
    audit, until = run.finish(), run.steps(2)[int(SETTINGS["diloco.sync_every"])]["time"]
    others = [worker for worker in run.living if worker != 2]
    found = run.seen(others, since, until) | run.losses(audit, others)
    return found | {"start until joined, s": run.noted(2, "slot")[0]["time"] - run.started[2]}


def fast_and_slow(folder: Path) -> Found:
    """Train with one island that is four times as fast as the other."""
    with run_of(folder, islands=2, seconds=25) as run:
        run.start(0)
        run.start(1, sleep=4 * STEP)
        run.reach(1, 5)
        since, audit = time.time(), run.finish()
        return run.seen([0], since) | run.losses(audit, run.living)


def storm(folder: Path, seconds: float) -> Found:
    """Inject a fault every 40 s at one of four islands, in random order."""
    generator = random.Random(folder.name)  # number of the run, so that a storm can be repeated
    faults = ["killed", *(one for one in FAULTS if one.endswith(" s")), "link at 1/10"]
    with run_of(folder, islands=4, seconds=seconds, rate=MEDIUM) as run:
        run.start_all(4, 20)
        began, merged = time.time(), run.steps(0)[-1]["merged"]
        for number in range(int(seconds // STORM_EVERY)):
            if number % len(faults) == 0:
                generator.shuffle(faults)
            fault, worker = faults[number % len(faults)], generator.randrange(4)
            time.sleep(max(0.0, began + (number + 0.25) * STORM_EVERY - time.time()))
            print(f"storm: {fault}, island-{worker}", flush=True)
            strike(run, fault, worker)
            run.network.set_rate(worker, up=MEDIUM, down=MEDIUM)
            if fault == "killed":
                run.start(worker)
        audit = run.finish()
        ended = max(run.steps(worker)[-1]["time"] for worker in run.living)
        usual = statistics.median(map(run.usual, run.living))
        found = run.losses(audit, run.living)
    found["kept time, %"] = 100 * (audit["merged_tokens"] - merged) * usual / (ended - began)
    found["kept time, %"] /= 4 * LENGTH
    return found


CASES: dict[str, Callable[..., Found]] = {
    **{fault: partial(fault_case, fault=fault) for fault in FAULTS},
    "join": join,
    "donor dies": donor_dies,
    "fast and slow": fast_and_slow,
}
COLUMNS = "longest stall, steps", "idle, %", "next round, s", "steps lost"
GOALS = (
    "Goals: no stall above 1 step, the next round within 2 s, 0 steps lost, kept time 95 %, 0 "
    "problems."
)


def measure_faults(cases: Mapping[str, Callable[..., Found]], repeats: int, out: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends all programs
    results, out = dict[str, list[Found]](), out.absolute() / f"{time.time():.0f}"
    for name, number in product(cases, range(repeats)):
        try:
            found = cases[name](out / re.sub(r"\W+", "-", name) / str(number))
        except (SystemExit, TimeoutError, IndexError) as error:
            print(f"PROBLEM in {name}: {error}", flush=True)
        else:
            print(f"{name}: {found}, load {os.getloadavg()[0]:.1f}", flush=True)
            results.setdefault(name, []).append(found)
    rows = []
    for name, measured in results.items():
        texts = {
            key: core.summary([one[key] for one in measured], ".2f" if "stall" in key else ".1f")
            for key in measured[0]
        }
        more = "; ".join(f"{key}: {text}" for key, text in texts.items() if key not in COLUMNS)
        rows.append([name, *(texts.get(one, "") for one in COLUMNS), more, str(len(measured))])
    header = " | ".join(["case", *COLUMNS, "also measured", "n"])
    core.print_table(f"Islands. {GOALS}", header, rows)


# --- quality --------------------------------------------------------------------------------------

SAMPLES = 4
"""Samples of an island's step."""
UPLOAD_STEPS = 5
"""By how much the uploads of a late island take longer: more than the grace, less than H."""
LIFE = 20 * 10 * 2 * SAMPLES * LENGTH
"""Tokens of the run in a life of a dying island: 20 rounds, as H = 10 and there are two islands."""


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


CONTROL = "lockstep"
QUALITY = {
    CONTROL: Case(grace=60.0),
    "constant, 2": Case(),
    "one 3x slower": Case(slow=3.0),
    "one absent, middle third": Case((2, 1, 2), (1 / 3, 2 / 3, 1.0)),
    "one dies, optimizer fresh": Case(dies=True),
    "one always late": Case(late=True),
    "doubling, 1 2 4": Case((1, 2, 4), (1 / 7, 3 / 7, 1.0)),
    "halving, 4 2 1": Case((4, 2, 1), (4 / 7, 6 / 7, 1.0)),
    "ramp up, 1 2 3 4": Case((1, 2, 3, 4), (0.1, 0.3, 0.6, 1.0)),
    "ramp down, 4 3 2 1": Case((4, 3, 2, 1), (0.4, 0.7, 0.9, 1.0)),
}
"""All phases of a case take equally long if all islands are equally fast."""


def come_and_go(run: IslandsRun, case: Case, tokens: int) -> None:
    """Start and stop islands as a case says, until the first has reached the end."""
    died, clock = 0, run.job.clock
    while not any(process.exitcode == 0 for process in run.living.values()):
        now, phases = clock.value, zip(case.ends, case.islands, strict=True)
        wanted = next((n for end, n in phases if now < end * tokens), case.islands[-1])
        for worker in range(max(case.islands)):
            if worker < wanted and worker not in run.living and now < tokens:
                last = worker == case.islands[0] - 1
                handicaps = {"slow": case.slow, "late": UPLOAD_STEPS * case.late} if last else {}
                run.start(worker, **handicaps)
            elif worker >= wanted and worker in run.living:
                leaving = run.living.pop(worker)
                leaving.terminate()
                leaving.join()
        if case.dies and LIFE * (died + 1) < now < 0.9 * tokens:
            died += 1
            run.kill(1)
        for worker, process in run.living.items():
            if process.exitcode:
                raise SystemExit(run.log(worker).read_text()[-2000:])
        time.sleep(0.01)


def train_case(case: Case, tokens: int, seed: int, folder: Path) -> core.Record:
    begin, most = case.islands[0], max(case.islands)
    settings = island_settings(SAMPLES) | {
        "training.tokens": str(tokens),
        "lr_schedule.warmup": str(3 * tokens // (10 * begin * SAMPLES * LENGTH)),
        "run.seed": str(seed),
        "islands.begin": str(begin),
        "islands.slots": str(most),
        "islands.grace_seconds": str(case.grace),
    }
    folder /= f"{time.time():.0f}"
    with IslandsRun(folder, most, Job(settings, hasty=True)) as run:
        come_and_go(run, case, tokens)
        found = run.finish()
    trained = run.trained()
    return {
        "loss": found["loss"],
        "merged": min(found["merged_samples"][one] / SAMPLES / trained[one] for one in trained),
        "problems": found["problems"],
    }


def measure_quality(names: list[str], seeds: int, tokens: int, out: Path) -> None:
    results: dict[str, dict[int, core.Record]] = {name: {} for name in [CONTROL, *names]}
    for seed, name in product(range(seeds), results):
        folder = out.absolute() / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{tokens}-{seed}"
        train = partial(train_case, QUALITY[name], tokens, seed, folder)
        results[name][seed] = core.kept(folder, {"tokens": tokens}, train)
        print(f"{name}, seed {seed}: {results[name][seed]}", flush=True)
    losses = {name: {seed: one["loss"] for seed, one in results[name].items()} for name in results}
    rows = []
    for name, runs in results.items():
        rows.append(
            [
                name,
                core.summary(list(losses[name].values()), ".4f", middle=statistics.mean),
                "" if name == CONTROL else core.against(losses[name], losses[CONTROL]),
                f"{100 * min(found['merged'] for found in runs.values()):.1f} %",
                str(sum(len(found["problems"]) for found in runs.values())),
                str(len(runs)),
            ]
        )
    title = f"validation loss of the shared copy after {tokens:,} tokens, mean (min ... max)"
    columns = "case | loss | against lockstep | merged | problems | n"
    core.print_table(title, columns, rows)


def main() -> None:
    parser = core.build_parser(__doc__)
    known = core.one_of([*CASES, *QUALITY], ";")
    parser.add_argument("--cases", type=known, default="", help=f"default: {'; '.join(CASES)}")
    parser.add_argument("--repeats", type=core.positive, default=3)
    storm_help = "seconds of a run with many faults, instead of the cases"
    parser.add_argument("--storm", type=core.positive, default=0, help=storm_help)
    parser.add_argument("--quality", action="store_true", help=f"loss of {'; '.join(QUALITY)}")
    parser.add_argument("--tokens", type=core.positive, default=409_600, help="of --quality")
    parser.add_argument("--out", type=Path, default=Path("outputs/islands"))
    options = parser.parse_args()
    if options.quality:
        names = [name for name in options.cases if name in QUALITY]
        measure_quality(names, options.repeats, options.tokens, options.out)
        return
    cases = {name: CASES[name] for name in options.cases if name in CASES}
    if options.storm:
        cases = {"storm": partial(storm, seconds=options.storm)}
    measure_faults(cases, options.repeats, options.out)


if __name__ == "__main__":
    main()
