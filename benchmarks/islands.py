"""Inject faults into islands, and let them come and go: stalls, lost steps, loss.

    .venv/bin/python -m benchmarks.islands [--cases control,killed] [--repeats 3]
    .venv/bin/python -m benchmarks.islands --storm 600
    .venv/bin/python -m benchmarks.islands --torchft --cases killed
    .venv/bin/python -m benchmarks.islands --quality [--cases 'one always late']

Faults: each island and the server have a network namespace of their own (benchmarks/network.py). A
step is a sleep of 0.1 s, so that four islands fit on two cores; H = 20, tau = 5 steps. A stall is
the time of a step that a surviving island does not compute, as a multiple of its usual step. After
every run, islands that have reached the end must have the same shared parameters, and the log must
be consistent: each range of samples is merged once, weights equal tokens, and all islands have the
same ledger. All cases take about half an hour.

--quality: loss at equal tokens against islands in lockstep. The trainer trains the decoder of
0.12M parameters of docs/measurements.md on the source of the Python standard library. A slow island
sleeps in multiples of its usual step. Except in lockstep, rounds wait for 0.1 s. Finished runs are
kept in --out.

Needs the extra `islands`.
"""

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
from typing import Any

from benchmarks import core
from benchmarks.islands_program import LENGTH, audit, island_settings
from benchmarks.islands_run import (
    SAMPLES,
    STEP,
    TOKENS,
    Case,
    Found,
    Run,
    TextRun,
    TorchftRun,
    running,
)
from benchmarks.network import wait_until
from benchmarks.torchft_loop import is_installed
from torchtitan_diloco.islands.local import local_server
from torchtitan_diloco.log import install_command

# --- faults ---------------------------------------------------------------------------------------

STORM_EVERY = 40.0
MEDIUM: dict[str, Any] = {"rate": 40, "settings": {"diloco.quantization.codec": "fp32"}}
"""Exchanging the parts of a round takes 0.1 s, and half of the round at a tenth of the rate."""
LARGE: core.Settings = {
    "model.layers": "8",
    "model.width": "128",
    "model.head_dim": "64",
    "model.feed_forward": "768",
    "diloco.fragments.layers_per_fragment": "2",
}
"""2.2M parameters: 8.7 MB in fp32, a snapshot of 17.4 MB."""
FAULTS: dict[str, dict[str, Any]] = {
    "control": {},
    "killed": {},
    "killed in an exchange": MEDIUM,
    "stopped for 8 s": {},
    "link cut for 10 s": {},
    "link at 1/10": MEDIUM,
    "server away for 6 s": {},
}


def strike(run: Run, fault: str, worker: int) -> None:
    """Inject a fault at a worker, and return when it is over."""
    network = run.network
    program = run.programs[f"island-{worker}"]
    match fault:
        case "killed":
            program.kill()
        case "killed in an exchange":
            sent = network.counters(worker)[0]
            network.set_rate(worker, up=4, down=4)
            wait_until(lambda: network.counters(worker)[0] > sent + 100_000, "an upload")
            program.kill()
        case "stopped for 8 s":
            os.kill(program.pid, signal.SIGSTOP)
            time.sleep(8)
            os.kill(program.pid, signal.SIGCONT)
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


def fault_case(folder: Path, fault: str, kind: type[Run] = Run) -> Found:
    victim = "" if fault in ("control", "server away for 6 s") else "island-2"
    dead = victim if fault.startswith("killed") else ""
    with running(folder, seconds=30, kind=kind, **FAULTS[fault]) as run:
        run.start_all(3, 50)
        since = time.time()
        strike(run, fault, 2)
        back, audit = time.time(), run.finish(dead)
        found = run.seen(run.others(victim), since)
        found["next round, s"] = run.next_round(run.others(dead), back)
        return found | run.losses(audit, run.others(dead))


def join(folder: Path, kind: type[Run] = Run) -> Found:
    """Start an island that joins two others over 200 Mbit/s."""
    with running(folder, seconds=50, rate=200, begin=2, kind=kind, settings=LARGE) as run:
        run.start_all(2, 50)
        since = time.time()
        run.start(2)
        return joined(run, "", since)


def donor_dies(folder: Path) -> Found:
    """Kill the island that sends a snapshot, over 20 Mbit/s, when it has sent a part of it."""
    with running(folder, seconds=60, rate=20, begin=2, settings=LARGE) as run:
        run.start_all(2, 50)
        sent = [run.network.counters(worker)[0] for worker in range(2)]
        run.start(2)

        def given(worker: int) -> float:
            return run.network.counters(worker)[0] - sent[worker]

        wait_until(lambda: max(given(0), given(1)) > 3e6, "a snapshot on its way")
        donor = f"island-{int(given(1) > given(0))}"
        run.programs[donor].kill()
        return joined(run, donor, time.time())


def joined(run: Run, dead: str, since: float) -> Found:
    """Wait until island-2 has joined, and return what was measured until its first merge."""
    run.reach("island-2", 50)
    audit = run.finish(dead)
    joined = run.event("island-2", "joined")["time"]
    merged = next(one for one in run.steps("island-2", joined) if one["own"])
    names = [name for name in run.others("island-2") if name != dead]
    found = run.seen(names, since, merged["time"]) | run.losses(audit, names)
    if run.torchft:  # torchft joins when it sends a part
        return found | {"start until a part, s": joined - run.event("island-2", "started")["time"]}
    found["start until joined, s"] = joined - run.event("island-2", "started")["time"]
    return found | {"first part merged after, steps": merged["step"]}


def fast_and_slow(folder: Path, kind: type[Run] = Run) -> Found:
    """Train with one island that is four times as fast as the other."""
    with running(folder, islands=2, seconds=25, kind=kind) as run:
        run.start(0)
        run.start(1, sleep=4 * STEP)
        run.reach("island-1", 5)
        since, audit = time.time(), run.finish()
        found = run.seen(["island-0"], since) | run.losses(audit, run.programs)
        if not run.torchft:
            steps, slot = run.steps("island-1"), run.event("island-1", "joined")["slot"]
            # Steps after the last round can no longer be merged.
            before = sum(one["rounds"] < steps[-1]["rounds"] for one in steps)
            merged = min(1.0, audit["merged_samples"][slot] / before)
            found["slow one's steps merged, %"] = 100 * merged
        return found


def clocks(folder: Path) -> Found:
    """Set the monotonic clock of an island an hour ahead, by a time namespace."""
    with running(folder) as run:
        ahead = ["unshare", "--time", "--monotonic", "3600", "--boottime", "3600", "--"]
        for worker in range(3):
            run.start(worker, inside=ahead if worker == 2 else ())
        run.reach("island-2", 20)
        since, audit = time.time(), run.finish()
        return run.seen(run.programs, since) | run.losses(audit, run.programs)


def storm(folder: Path, seconds: float) -> Found:
    """Inject a fault every 40 s at one of four islands, in random order."""
    generator = random.Random(folder.name)  # number of the run, so that a storm can be repeated
    faults = ["killed", *(one for one in FAULTS if one.endswith(" s")), "link at 1/10"]
    with running(folder, islands=4, seconds=seconds, **MEDIUM) as run:
        run.start_all(4, 20)
        began, merged = time.time(), run.steps("island-0")[-1]["merged"]
        for number in range(int(seconds // STORM_EVERY)):
            if number % len(faults) == 0:
                generator.shuffle(faults)
            fault, worker = faults[number % len(faults)], generator.randrange(4)
            time.sleep(max(0.0, began + (number + 0.25) * STORM_EVERY - time.time()))
            print(f"storm: {fault}, island-{worker}", flush=True)
            strike(run, fault, worker)
            run.network.set_rate(worker, up=40, down=40)
            if fault == "killed":
                run.start(worker)
        audit = run.finish()
        ended = max(run.steps(name)[-1]["time"] for name in run.programs)
        usual = statistics.median(map(run.usual, run.programs))
        found = run.losses(audit, run.programs)
    full = 4 * LENGTH * (ended - began) / usual
    found["goodput, %"] = 100 * (audit["merged_tokens"] - merged) / full
    return found | {"participation, %": 100 * statistics.mean(audit["participants"]) / 4}


CASES: dict[str, Callable[..., Found]] = {
    **{fault: partial(fault_case, fault=fault) for fault in FAULTS},
    "join": join,
    "donor dies": donor_dies,
    "fast and slow": fast_and_slow,
    "clocks an hour apart": clocks,
}
OF_TORCHFT = [*FAULTS, "join", "fast and slow"]
COLUMNS = ("longest stall, steps", "idle, %", "next round, s", "steps lost")
GOALS = (
    "Goals: no stall above 1 step, the next round within 2 s, 0 steps lost, the first part merged "
    "within H = 20 steps, 95 % of a slow island's steps merged, goodput 95 %, 0 problems."
)


def measure_faults(cases: Mapping[str, Callable[..., Found]], repeats: int, out: Path) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends all programs
    results, out = dict[str, list[Found]](), out.absolute() / f"{time.time():.0f}"
    for name, number in product(cases, range(repeats)):
        try:
            found = cases[name](out / re.sub(r"\W+", "-", name) / str(number))
        except (SystemExit, TimeoutError, IndexError) as error:
            print(f"PROBLEM in {name}: {error}", flush=True)
            continue
        print(f"{name}: {found}, load {os.getloadavg()[0]:.1f}", flush=True)
        results.setdefault(name, []).append(found)
    rows = []
    for name, measured in results.items():
        texts = {
            key: core.summary([one[key] for one in measured], ".2f" if "stall" in key else ".1f")
            for key in measured[0]
        }
        more = "; ".join(f"{key}: {text}" for key, text in texts.items() if key not in COLUMNS)
        columns = [texts.get(column, "") for column in COLUMNS]
        rows.append([name, *columns, more, str(len(measured))])
    header = " | ".join(["case", *COLUMNS, "also measured", "n"])
    core.print_table(f"Islands. {GOALS}", header, rows)


# --- quality --------------------------------------------------------------------------------------

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


def train_case(case: Case, tokens: int, seed: int, folder: Path) -> core.Record:
    begin = case.islands[0]
    settings = island_settings(SAMPLES) | {
        "training.tokens": str(tokens),
        "lr_schedule.warmup_steps": str(3 * tokens // (10 * begin * TOKENS)),
        "run.seed": str(seed),
        "islands.begin": str(begin),
        "islands.slots": str(max(case.islands)),
        "islands.grace_seconds": str(case.grace),
    }
    folder /= f"{time.time():.0f}"
    folder.mkdir(parents=True)
    with local_server(folder / "server") as server:
        settings["islands.join"] = str(server.join_file)
        run = TextRun(case, tokens, settings, folder)
        try:
            loss = run.train()
        finally:
            for _, process in run.lives:
                process.kill()
        found = audit(server.join)
    trained = run.trained()
    return {
        "loss": loss,
        "merged": min(found["merged_samples"][slot] / trained[slot] for slot in trained),
        "late": [found["late"].count(number) for number in range(max(found["late"]) + 1)],
        "problems": found["problems"],
    }


def measure_quality(names: list[str], seeds: int, tokens: int, out: Path) -> None:
    results: dict[str, dict[int, core.Record]] = {name: {} for name in [CONTROL, *names]}
    for seed, name in product(range(seeds), results):
        folder = out.absolute() / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{tokens}-{seed}"
        train = partial(train_case, QUALITY[name], tokens, seed, folder)
        results[name][seed] = core.kept(folder, {"tokens": tokens}, train)
        print(f"{name}, seed {seed}: {results[name][seed]}", flush=True)
    losses = {
        name: {seed: found["loss"] for seed, found in runs.items()}
        for name, runs in results.items()
    }
    rows = []
    for name, runs in results.items():
        late = [found["late"] for found in runs.values()]
        share = statistics.mean(100 * (1 - counts[0] / sum(counts)) for counts in late)
        rows.append(
            [
                name,
                core.summary(list(losses[name].values()), ".4f", middle=statistics.mean),
                "" if name == CONTROL else core.against(losses[name], losses[CONTROL]),
                f"{100 * min(found['merged'] for found in runs.values()):.1f} %",
                f"{share:.0f} %, {max(map(len, late)) - 1}",
                str(sum(len(found["problems"]) for found in runs.values())),
                str(len(runs)),
            ]
        )
    title = f"validation loss of the shared copy after {tokens:,} tokens, mean (min ... max)"
    core.print_table(
        title, "case | loss | against lockstep | merged | parts late | problems | n", rows
    )


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--cases", default="", help=f"separated by ';': {'; '.join(CASES)}")
    parser.add_argument("--repeats", type=core.positive, default=3)
    storm_help = "seconds of a run with many faults, instead of the cases or after those given"
    parser.add_argument("--storm", type=core.positive, default=0, help=storm_help)
    torchft_help = "let torchft run each case that it can run, too (extra bench)"
    parser.add_argument("--torchft", action="store_true", help=torchft_help)
    quality_help = f"loss of {'; '.join(QUALITY)}"
    parser.add_argument("--quality", action="store_true", help=quality_help)
    parser.add_argument("--tokens", type=core.positive, default=409_600, help="of --quality")
    parser.add_argument("--out", type=Path, default=Path("outputs/islands"))
    options = parser.parse_args()
    known = QUALITY if options.quality else CASES
    names = [name.strip() for name in options.cases.split(";") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--cases {unknown[0]!r}: there are {'; '.join(known)}")
    if options.torchft and not is_installed():
        parser.error(f"--torchft: it is not installed: {install_command('bench')}")
    if options.quality:
        return measure_quality(names or list(QUALITY), options.repeats, options.tokens, options.out)
    cases = {name: CASES[name] for name in names or ([] if options.storm else CASES)}
    for name in [one for one in cases if options.torchft and one in OF_TORCHFT]:
        cases[f"{name}, torchft"] = partial(cases[name], kind=TorchftRun)
    if options.storm:
        cases["storm"] = partial(storm, seconds=options.storm)
    return measure_faults(cases, options.repeats, options.out)


if __name__ == "__main__":
    main()
