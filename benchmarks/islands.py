"""Inject faults into islands, and let them come and go: stalls, lost steps, loss.

    .venv/bin/python -m benchmarks.islands [--cases 'control; killed'] [--repeats 3]
    .venv/bin/python -m benchmarks.islands --store folder [--cases 'syncer killed']
    .venv/bin/python -m benchmarks.islands --storm 3600 --repeats 1
    .venv/bin/python -m benchmarks.islands --come-and-go 3600 --repeats 1
    .venv/bin/python -m benchmarks.islands --quality [--cases 'one always late']

Each island, and the bucket with its syncer (`islands serve`), have a network namespace of their own
(benchmarks/network.py). With --store folder, islands share a folder instead, without links, and
their syncer is `islands sync`. In each run, another process reads all decisions and objects while
they are stored. At the end, islands must have the same shared parameters as the store, to the bit,
and from the store must follow: each range of samples is merged once, weights equal tokens, and all
versions follow from the first copies.

Faults: a step is a sleep of 0.1 s, so that four islands fit on two cores; H = 20, and tau = 10
steps are as long as the grace period of a server of one's own, 1 s. A stall is the time of a step
that a surviving island does not compute, as a multiple of its usual step, without the last cycle of
the run, in which islands wait until all tokens are merged. The next round is counted from the end
of the fault, and after the syncer was killed, from the first decision of the next one.
"up, parts" and "down, parts" are the bytes of the link of an island, by the counters of the kernel,
as multiples of the parts that it has sent; what is above 1 are requests and notes, which the rate
of steps determines, and not the size of the model. "versions down" is what it has applied.

--storm: a fault every 40 s at one of four islands, the syncer or the bucket, in random order.
--come-and-go: up to four islands of a folder start, leave and are killed every 10 s on average. The
table shows the numbers of objects and the sizes of decisions in the four quarters of the run.

--quality: loss of islands that are slow, late, or come and go (benchmarks/islands_quality.py).

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
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks import core
from benchmarks.hosts import BucketHost, StoreKind
from benchmarks.islands_quality import QUALITY, measure_quality
from benchmarks.islands_run import LENGTH, IslandsRun, Measurements, island_settings
from benchmarks.workers import Job
from tests.waiting import wait_until

# --- faults ---------------------------------------------------------------------------------------

STEP = 0.1
"""Seconds that a step sleeps. It also trains on one sample."""
SYNC_EVERY = 20
STORM_EVERY = 40.0
MEDIUM = 40.0
"""Mbit/s at which the parts of a round in fp32 take 0.1 s, and most of the round at a tenth."""
SETTINGS = island_settings(samples=1) | {
    "diloco.sync_every": str(SYNC_EVERY),
    "diloco.overlap.delay": "10",
    "validation.sequences": "64",
}
LARGE = {
    "model.layers": "8",
    "model.width": "128",
    "model.head_dim": "64",
    "model.feed_forward": "768",
    "diloco.fragments.layers_per_fragment": "2",
}
"""2.2M parameters: 8.7 MB in fp32."""
ISLAND_FAULTS = {
    "killed": math.inf,
    "killed in an exchange": MEDIUM,
    "stopped for 8 s": math.inf,
    "link cut for 10 s": math.inf,
    "link at 1/10": MEDIUM,
}
"""Faults of an island, and the rates of their links."""
HOST_FAULTS = (
    "syncer stopped for 6 s",
    "syncer killed",
    "store stopped for 6 s",
    "store cut off for 6 s",
)
STORM = [*(fault for fault in ISLAND_FAULTS if fault != "killed in an exchange"), *HOST_FAULTS]
STEADY_STEP = 0.5
"""Seconds of a step in runs whose bytes are counted, for eight islands on two cores."""


def run_of(
    folder: Path,
    islands: int = 3,
    seconds: float = 20,
    rate: float = math.inf,
    begin: int = 0,
    settings: core.Settings | None = None,
    store: StoreKind = "serve",
    step: float = STEP,
) -> IslandsRun:
    """Return a run with as many tokens as its first islands train in `seconds`."""
    begin = begin or islands
    own_settings = {
        "training.tokens": str(round(begin * seconds / step) * LENGTH),
        "diloco.quantization.codec": "fp32" if rate == MEDIUM else "fp4_e3m0",
        "islands.begin": str(begin),
        "islands.slots": str(islands),
    }
    job = Job(SETTINGS | own_settings | (settings or {}), sleep=step)
    return IslandsRun(folder, islands, job, store, rate)


def strike(run: IslandsRun, fault: str, worker: int) -> float:
    """Inject a fault, at this worker or at the host of the store. Return when it was over."""
    network = run.network
    host = run.host
    assert host is not None
    match fault:
        case "killed":
            run.kill(worker)
        case "killed in an exchange":
            network.set_rate(worker, up=4, down=4)
            wait_until(lambda: is_uploading(run, worker), "an upload")
            run.kill(worker)
        case "stopped for 8 s":
            run.signal(worker, signal.SIGSTOP)
            time.sleep(8)
            run.signal(worker, signal.SIGCONT)
        case "link cut for 10 s":
            cut(run, worker, 10)
        case "link at 1/10":
            network.set_rate(worker, up=4, down=4)
            time.sleep(20)
        case "syncer stopped for 6 s":
            stop(host.syncer, 6)
        case "syncer killed":
            session = run.decisions()[-1]["session"]
            host.kill_syncer()
            return run.wait_for_successor(session)
        case "store stopped for 6 s":
            assert isinstance(host, BucketHost)
            stop(host.weed, 6)
        case "store cut off for 6 s":
            cut(run, run.workers, 6)
    return time.time()


def is_uploading(run: IslandsRun, worker: int) -> bool:
    """Return whether an island sends more than requests and notes."""
    sent = run.network.counters(worker)[0]
    seconds = 0.15
    time.sleep(seconds)
    return run.network.counters(worker)[0] - sent > 200_000 * seconds


def stop(process: int, seconds: float) -> None:
    os.kill(process, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process, signal.SIGCONT)


def cut(run: IslandsRun, place: int, seconds: float) -> None:
    run.network.cut(place, closed=True)
    time.sleep(seconds)
    run.network.cut(place, closed=False)


def fault_case(folder: Path, fault: str, store: StoreKind = "serve") -> Measurements:
    others = [0, 1] if fault in ISLAND_FAULTS else [0, 1, 2]
    seconds = 50 if fault == "syncer killed" else 30
    with run_of(
        folder, seconds=seconds, rate=ISLAND_FAULTS.get(fault, math.inf), store=store
    ) as run:
        run.start_all(3, 50)
        since = time.time()
        back = strike(run, fault, 2)
        audit = run.finish()
        measured = run.seen(others, since, but_last=SYNC_EVERY)
        measured |= {"next round, s": run.next_round(run.living, back)}
        return measured | run.losses(audit, run.living)


def join(folder: Path) -> Measurements:
    """Start an island that joins two others over 200 Mbit/s."""
    with run_of(folder, seconds=50, rate=200, begin=2, settings=LARGE) as run:
        run.start_all(2, 3 * SYNC_EVERY)
        since = time.time()
        run.start(2)
        run.reach(2, 50)
        audit = run.finish()
        until = run.steps(2)[SYNC_EVERY]["time"]
        others = [worker for worker in run.living if worker != 2]
        before = run.traffic(others, SYNC_EVERY, until=since)
        while_joining = run.traffic(others, SYNC_EVERY, since, until)
        return (
            run.seen(others, since, until)
            | run.losses(audit, others)
            | {"start until joined, s": run.noted(2, "slot")[0]["time"] - run.started[2]}
            | {"up before, parts": before["up, parts"], "up, parts": while_joining["up, parts"]}
        )


def fast_and_slow(folder: Path, store: StoreKind = "serve") -> Measurements:
    """Train with one island that is four times as fast as the other."""
    with run_of(folder, islands=2, seconds=60, store=store) as run:
        run.start(0)
        run.start(1, sleep=4 * STEP)
        run.reach(1, 5)
        since = time.time()
        audit = run.finish()
        slot = run.slot(1)
        merged = 100 * audit["merged_samples"][slot] / run.trained()[slot]
        measured = run.seen([0], since, but_last=SYNC_EVERY) | run.losses(audit, run.living)
        return measured | {"merged of the slow one, %": merged}


def count_bytes(folder: Path, islands: int) -> Measurements:
    """Count the bytes of the links of so many islands that train in fp32."""
    settings = LARGE | {"diloco.quantization.codec": "fp32"}
    seconds = 6 * SYNC_EVERY * STEADY_STEP
    with run_of(folder, islands, seconds=seconds, settings=settings, step=STEADY_STEP) as run:
        run.start_all(islands, SYNC_EVERY)
        since = time.time()
        for worker in range(islands):
            run.reach(worker, 4 * SYNC_EVERY + 5, seconds=20 * seconds)
        until = time.time()
        audit = run.finish()
        measured = run.traffic(range(islands), SYNC_EVERY, since, until)
        return measured | run.losses(audit, range(islands))


def storm(folder: Path, seconds: float, store: StoreKind = "serve") -> Measurements:
    """Inject a fault every 40 s, in random order."""
    generator = random.Random(folder.name)  # number of the run, so that a storm can be repeated
    faults = [*STORM] if store == "serve" else [name for name in STORM if is_for(store, name)]
    with run_of(folder, islands=4, seconds=seconds, rate=MEDIUM, store=store) as run:
        run.start_all(4, 20)
        began = time.time()
        merged = run.steps(0)[-1]["merged"]
        for number in range(int(seconds // STORM_EVERY)):
            if number % len(faults) == 0:
                generator.shuffle(faults)
            fault = faults[number % len(faults)]
            worker = generator.randrange(4)
            time.sleep(max(0.0, began + (number + 0.25) * STORM_EVERY - time.time()))
            whom = f"island {worker}" if fault in ISLAND_FAULTS else "the host"
            print(f"storm: {fault}, {whom}", flush=True)
            strike(run, fault, worker)
            if fault == "link at 1/10":
                run.network.set_rate(worker, up=MEDIUM, down=MEDIUM)
            if fault == "killed":
                run.start(worker)
        audit = run.finish()
        ended = max(run.steps(worker)[-1]["time"] for worker in run.living)
        usual = statistics.median(map(run.usual, run.living))
        measured = run.losses(audit, run.living)
    measured["kept time, %"] = 100 * (audit["merged_tokens"] - merged) * usual / (ended - began)
    measured["kept time, %"] /= 4 * LENGTH
    return measured


COME_AND_GO = 4, 2, 10.0
"""Most and first islands of a run in which they come and go, and the average seconds between."""


def come_and_go_for(folder: Path, seconds: float) -> Measurements:
    """Start, stop and kill islands for so many seconds, and watch what the store holds."""
    most, begin, pause = COME_AND_GO
    generator = random.Random(folder.name)
    with run_of(folder, most, seconds=10 * seconds, begin=begin, store="folder") as run:
        run.start_all(begin, 20)
        ends_at = time.time() + seconds
        starts = begin
        while time.time() < ends_at:
            time.sleep(generator.uniform(0.5, 1.5) * pause)
            absent = [worker for worker in range(most) if worker not in run.living]
            if absent and (len(run.living) == 1 or generator.random() < 0.5):
                run.start(generator.choice(absent))
                starts += 1
                continue
            worker = generator.choice([*run.living])
            if generator.random() < 0.5:
                run.kill(worker)
            else:
                run.leave(worker)
        for worker in [*run.living]:
            run.leave(worker)
        audit = run.finish(ends=False)
        return summarize_store(run) | {"starts": starts, "problems": len(audit["problems"])}


def summarize_store(run: IslandsRun) -> Measurements:
    """Return the most objects, and the largest decision, in each quarter of a run."""
    objects = run.objects()
    decisions = run.decisions()
    measured = Measurements()
    for kind, records, key in (
        ("objects", objects, "all"),
        ("decision, bytes", decisions, "bytes"),
    ):
        began = records[0]["time"]
        ended = records[-1]["time"]
        for quarter in range(4):
            until = began + (quarter + 1) / 4 * (ended - began)
            since = until - (ended - began) / 4
            values = [record[key] for record in records if since <= record["time"] <= until]
            measured[f"{kind}, quarter {quarter + 1}"] = max(values, default=math.nan)
    return measured


Measure = Callable[..., Measurements]
CASES: dict[str, Measure] = {
    "control": partial(fault_case, fault="control"),
    **{fault: partial(fault_case, fault=fault) for fault in (*ISLAND_FAULTS, *HOST_FAULTS)},
    "join": join,
    "fast and slow": fast_and_slow,
    **{f"bytes, M = {count}": partial(count_bytes, islands=count) for count in (2, 4, 8)},
}
COLUMNS = "longest stall, steps", "idle, %", "next round, s", "steps lost"
GOALS = (
    "Goals: no stall above 0.1 steps, the next round within 2 s, 0 steps lost, kept time 95 %, 98 "
    "% merged of the slow one, 1 part down with any number of islands, 0 problems."
)


def is_for(store: StoreKind, case: str) -> bool:
    """Return whether a case needs no links or server that this store does not have."""
    return store == "serve" or case in (
        "control",
        "killed",
        "stopped for 8 s",
        "syncer stopped for 6 s",
        "syncer killed",
        "fast and slow",
    )


def measure_faults(cases: Mapping[str, Measure], repeats: int, out: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends all programs
    results = dict[str, list[Measurements]]()
    out = out.absolute() / f"{time.time():.0f}"
    for name, number in product(cases, range(repeats)):
        try:
            measurements = cases[name](out / re.sub(r"\W+", "-", name) / str(number))
        except (SystemExit, TimeoutError, IndexError) as error:
            print(f"PROBLEM in {name}: {error}", flush=True)
        else:
            print(f"{name}: {measurements}, load {os.getloadavg()[0]:.1f}", flush=True)
            results.setdefault(name, []).append(measurements)
    rows = []
    for name, repetitions in results.items():
        texts = {
            key: core.summary(
                [measurements[key] for measurements in repetitions],
                ".2f" if "stall" in key or "part" in key else ".1f",
            )
            for key in repetitions[0]
        }
        other_columns = "; ".join(
            f"{key}: {text}" for key, text in texts.items() if key not in COLUMNS
        )
        rows.append(
            [
                name,
                *(texts.get(column, "") for column in COLUMNS),
                other_columns,
                str(len(repetitions)),
            ]
        )
    header = " | ".join(["case", *COLUMNS, "also measured", "n"])
    core.print_table(f"Islands. {GOALS}", header, rows)


def main() -> None:
    parser = core.build_parser(__doc__)
    known = core.one_of([*CASES, *QUALITY], ";")
    parser.add_argument("--cases", type=known, default="", help=f"default: {'; '.join(CASES)}")
    parser.add_argument("--repeats", type=core.positive, default=3)
    store_help = "serve: a bucket of one's own. folder: the cases without links"
    parser.add_argument("--store", choices=["serve", "folder"], default="serve", help=store_help)
    storm_help = "seconds of a run with many faults, instead of the cases"
    parser.add_argument("--storm", type=core.positive, default=0, help=storm_help)
    come_help = "seconds of a run whose islands come and go, instead of the cases"
    parser.add_argument("--come-and-go", type=core.positive, default=0, help=come_help)
    parser.add_argument("--quality", action="store_true", help=f"loss of {'; '.join(QUALITY)}")
    parser.add_argument("--tokens", type=core.positive, default=409_600, help="of --quality")
    parser.add_argument("--out", type=Path, default=Path("outputs/islands"))
    options = parser.parse_args()
    if options.quality:
        names = [name for name in options.cases if name in QUALITY]
        measure_quality(names, options.repeats, options.tokens, options.out)
        return
    cases = {
        name: partial(CASES[name], store="folder") if options.store == "folder" else CASES[name]
        for name in options.cases
        if name in CASES and is_for(options.store, name)
    }
    if options.storm:
        cases = {"storm": partial(storm, seconds=options.storm, store=options.store)}
    if options.come_and_go:
        cases = {"come and go": partial(come_and_go_for, seconds=options.come_and_go)}
    measure_faults(cases, options.repeats, options.out)


if __name__ == "__main__":
    main()
