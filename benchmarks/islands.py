"""Inject faults into runs of islands, and measure how they affect the other islands.

    .venv/bin/python -m benchmarks.islands [--cases control,killed] [--repeats 3]
    .venv/bin/python -m benchmarks.islands --storm 600 --repeats 1
    .venv/bin/python -m benchmarks.islands --torchft --cases killed

The first table is the one of docs/islands.md. Each island and the server have a network namespace
of their own (benchmarks/network.py). The model is small and a step is a sleep of 0.1 s, so that
three or four islands fit on two cores; H = 20, tau = 5 steps. A stall is the time of a step that a
surviving island does not compute, as a multiple of its usual step. After every run, islands that
have reached the end must have the same shared parameters, and the log must be consistent: each
range of samples is merged once, weights equal tokens, and all islands have the same ledger. Needs
the extra `islands`, and takes about half an hour.
"""

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import core
from benchmarks.islands_program import SAMPLES, TOKENS
from benchmarks.islands_run import STEP, Found, Run, TorchftRun, running
from benchmarks.network import wait_until
from benchmarks.torchft_loop import is_installed
from torchtitan_diloco.log import install_command

COLUMNS = {"longest stall, steps": 2, "idle, %": 1, "next round, s": 1, "steps lost": 1}
"""Columns of the first table, with their number of decimals."""
HEADER = "case | measured | goal | found | n"
STORM_EVERY = 40.0
MEDIUM: dict[str, Any] = {"width": 180, "codec": "fp32", "rate": 40}
"""Exchanging the parts of a round takes 0.1 s, and half of the round at a tenth of the rate."""
LARGE: dict[str, Any] = {"blocks": 8, "width": 512}
"""2.1M parameters: 8.4 MB in fp32, a snapshot of 16.8 MB."""
FAULTS: dict[str, dict[str, Any]] = {
    "control": {},
    "killed": {},
    "killed in an exchange": MEDIUM,
    "stopped for 8 s": {},
    "link cut for 10 s": {},
    "link at 1/10": MEDIUM,
    "server away for 6 s": {},
}


def others(run: Run, gone: str) -> list[str]:
    return [name for name in run.programs if name != gone]


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
        found = run.seen(others(run, victim), since)
        found["next round, s"] = run.next_round(others(run, dead), back)
        return found | run.losses(audit, others(run, dead))


def join(folder: Path, kind: type[Run] = Run) -> Found:
    """Start an island that joins two others over 200 Mbit/s."""
    with running(folder, seconds=50, rate=200, begin=2, kind=kind, **LARGE) as run:
        run.start_all(2, 50)
        since = time.time()
        run.start(2)
        return joined(run, "", since)


def donor_dies(folder: Path) -> Found:
    """Kill the island that sends a snapshot, over 20 Mbit/s, when it has sent a part of it."""
    with running(folder, seconds=60, rate=20, begin=2, **LARGE) as run:
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
    names = [name for name in others(run, "island-2") if name != dead]
    found = run.seen(names, since, merged["time"]) | run.losses(audit, names)
    if not run.has_log:  # torchft joins when it sends a part
        return found | {"start until a part, s": joined - run.event("island-2", "started")["time"]}
    found["start until joined, s"] = joined - run.event("island-2", "started")["time"]
    return found | {"first part merged after, steps": merged["step"]}


def fast_and_slow(folder: Path, kind: type[Run] = Run) -> Found:
    """Train with one island that is four times as fast as the other."""
    with running(folder, islands=2, seconds=25, kind=kind) as run:
        run.start(0)
        run.start(1, step_seconds=4 * STEP)
        run.reach("island-1", 5)
        since, audit = time.time(), run.finish()
        if not run.has_log:
            return run.seen(["island-0"], since) | run.losses(audit, run.programs)
        steps, slot = run.steps("island-1"), run.event("island-1", "joined")["slot"]
        # Steps after the last round can no longer be merged.
        before = sum(one["rounds"] < steps[-1]["rounds"] for one in steps)
        merged = statistics.mean(spans[-1][1] for spans in audit["ledger"][slot]) / SAMPLES
        found = run.seen(["island-0"], since) | run.losses(audit, run.programs)
    found["slow one's steps merged, %"] = 100 * merged / before
    return found | {"its steps after the last round": len(steps) - before}


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
        ended = max(run.event(name, "ended")["time"] for name in run.programs)
        usual = statistics.median(map(run.usual, run.programs))
        found = run.losses(audit, run.programs)
    full = 4 * TOKENS * (ended - began) / usual
    return found | {
        "goodput, %": 100 * (audit["merged_tokens"] - merged) / full,
        "participation, %": 100 * statistics.mean(audit["participants"]) / 4,
    }


# --- the table ------------------------------------------------------------------------------------

CASES: dict[str, Callable[..., Found]] = {
    **{fault: partial(fault_case, fault=fault) for fault in FAULTS},
    "join": join,
    "donor dies": donor_dies,
    "fast and slow": fast_and_slow,
    "clocks an hour apart": clocks,
}
OF_TORCHFT = [*FAULTS, "join", "fast and slow"]
GOALS = {
    "longest stall, steps": "at most 1",
    "steps lost": "0",
    "next round, s": "at most 2",
    "first part merged after, steps": "at most H = 20",
    "slow one's steps merged, %": "at least 95",
    "goodput, %": "at least 95",
    "problems": "0",
}


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--cases", default="", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=core.positive, default=3)
    storm_help = "seconds of a run with many faults, instead of the cases or after those given"
    parser.add_argument("--storm", type=core.positive_number, default=0.0, help=storm_help)
    torchft_help = "let torchft run each case that it can run, too (extra bench)"
    parser.add_argument("--torchft", action="store_true", help=torchft_help)
    parser.add_argument("--out", type=core.folder, default=Path("outputs/islands"))
    options = parser.parse_args()
    names = core.parse_names(parser, "--cases", options.cases, CASES, ",")
    cases = {name: CASES[name] for name in names if options.cases or not options.storm}
    for name in [one for one in cases if options.torchft and one in OF_TORCHFT]:
        cases[f"{name}, torchft"] = partial(cases[name], kind=TorchftRun)
    if options.storm:
        cases["storm"] = partial(storm, seconds=options.storm)
    if options.torchft and not is_installed():
        parser.error(f"--torchft: it is not installed: {install_command('bench')}")
    if options.torchft and not any(one in OF_TORCHFT for one in cases):
        parser.error(f"--torchft: give --cases of those that it can run: {', '.join(OF_TORCHFT)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends all programs
    results, out = dict[str, list[Found]](), options.out.absolute() / f"{time.time():.0f}"
    for name, task in cases.items():
        for number in range(options.repeats):
            try:
                found = task(out / re.sub(r"\W+", "-", name) / str(number))
            except (SystemExit, TimeoutError, IndexError) as error:
                print(f"PROBLEM in {name}: {error}", flush=True)
                continue
            print(f"{name}: {found}, load {os.getloadavg()[0]:.1f}", flush=True)
            results.setdefault(name, []).append(found)
    print_results(results)


def print_results(results: dict[str, list[Found]]) -> None:
    rows, more = [], []
    for name, found in results.items():
        count = str(len(found))
        spread = {one: _spread(found, one, COLUMNS.get(one, 1)) for one in found[0]}
        rows.append([name, *(spread.get(column, "") for column in COLUMNS), count])
        for measure in (one for one in spread if one not in COLUMNS or one in GOALS):
            more.append([name, measure, GOALS.get(measure, ""), spread[measure], count])
    load = f"load {os.getloadavg()[0]:.1f}"
    core.print_table(f"Islands, {load}", " | ".join(["case", *COLUMNS, "n"]), rows)
    core.print_table("Goals, and what else was measured", HEADER, more)


def _spread(found: list[Found], measure: str, digits: int) -> str:
    values = [one[measure] for one in found]
    return f"{values[0]:.0f}" if not any(values) else core.summary(values, digits)


if __name__ == "__main__":
    main()
