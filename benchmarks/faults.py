"""Inject faults into real runs and say what happened.

    python -m benchmarks.faults [--only killed,cut] [--repeats 3]

Each fault meets a small run of its own, in a network of its own where links or hosts are concerned
(benchmarks/network.py; those are left out where the system does not allow it). The table says what
happened, how many seconds it took (until the fault was named, or until training went on), how many
steps of work were lost, and whether that is what the documentation promises. All faults take about
seven minutes on two cores.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import core
from benchmarks.faults_run import running, wait_until
from benchmarks.network import Network, NoNetworkError, port_of, run_command

HEADER = "fault | what happened | seconds | steps lost | as promised | n"
LOST = r"worker {} left or did not answer"
SLOW_LINK = {"diloco.overlap.delay": "5", "diloco.quantization.codec": "fp32"}


@dataclass(frozen=True)
class Outcome:
    happened: str
    seconds: float | None = None
    steps_lost: int | None = None
    promised: bool = True


Case = Callable[[Path], Outcome]
CASES: dict[str, Case] = {}


def case(
    name: str, *arguments: object
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Add a function to the table, once for these arguments."""

    def add(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        CASES[name] = lambda folder: function(folder, *arguments)
        return function

    return add


# --- a worker dies or is silent -------------------------------------------------------------------


@case("killed in a payload, 4 Mbit/s, 2 workers", 2, True)
@case("killed in a payload, 4 Mbit/s, 3 workers", 3, True)
@case("killed between exchanges, 3 workers", 3, False)
def killed(folder: Path, workers: int, payload: bool) -> Outcome:
    victim, survivors = workers - 1, range(workers - 1)
    with Network(workers) as network, running(folder, SLOW_LINK, network=network) as job:
        job.reach(20)
        if payload:  # over a link that has become slow
            for worker in range(workers):
                network.set_rate(worker, up=4, down=4)
            sent = network.counters(victim)[0]
            wait_until(lambda: network.counters(victim)[0] > sent + 100_000, "a payload")
        os.kill(job.programs[victim].pid, signal.SIGKILL)
        found = [job.seconds_until(LOST.format(victim), worker) for worker in survivors]
        codes = job.wait()
    named = [one for one in found if one is not None]
    seconds = max(named) if len(named) == len(found) else None
    happened = f"named by {len(named)} of {len(found)}, exit codes {codes[:-1]}"
    return Outcome(happened, seconds, promised=seconds is not None and seconds <= 2.5)


def cut(network: Network, worker: int, *, closed: bool) -> None:
    """Drop all packets of a worker's link without a word, or let them pass again."""
    change = f"ip link set {port_of(worker)} {'nomaster' if closed else 'master switch'}"
    run_command([*network.inside(network.switch), *change.split()])


@case("stopped for 15 s (SIGSTOP), 3 workers", 3, False)
@case("link cut without a word for 15 s", 2, True)
def silent(folder: Path, workers: int, by_link: bool) -> Outcome:
    victim = workers - 1
    with Network(workers) as network, running(folder, {}, network=network) as job:

        def silence(begins: bool) -> None:
            if by_link:
                cut(network, victim, closed=begins)
            else:
                number = signal.SIGSTOP if begins else signal.SIGCONT
                os.kill(job.programs[victim].pid, number)

        job.reach(20)
        silence(True)
        said = job.seconds_until(f"waiting for worker {victim}")
        time.sleep(15 - min(15.0, said or 15.0))
        silence(False)
        codes = job.wait()
    happened = f"said; {f'ended with {codes}' if any(codes) else 'went on'}"
    return Outcome(happened, said, 0, promised=said is not None and said <= 12 and not any(codes))


@case("link down 1 s in every 4 s, 5 times")
def flapping(folder: Path) -> Outcome:
    with Network(2) as network, running(folder, {}, network=network) as job:
        job.reach(20)
        before = job.step
        for _ in range(5):
            cut(network, 1, closed=True)
            time.sleep(1)
            cut(network, 1, closed=False)
            time.sleep(3)
        steps, codes = job.step - before, job.wait()
    return Outcome(f"{steps} steps in 20 s, exit codes {codes}", promised=not any(codes))


@case("garbage at every port", 1, "")
@case("200 connections to every port, 1,024 descriptors", 200, "ulimit -Sn 1024; ")
def strangers(folder: Path, connections: int, limit: str) -> Outcome:
    with Network(1) as network:
        inside = network.inside(network.namespace(0))
        shell = [*inside, "sh", "-c", limit + 'exec "$@"', "sh"]
        with running(folder, {}, inside=shell) as job:
            job.reach(20)
            call = f"from benchmarks.faults_run import scribble; scribble({connections})"
            done = subprocess.run(
                [*inside, sys.executable, "-c", call], capture_output=True, text=True, check=True
            )
            (code,) = job.wait()
    happened = f"{done.stdout.strip()}, exit code {code}"
    return Outcome(happened, steps_lost=0, promised=code == 0)


# --- checkpoints and restarts ---------------------------------------------------------------------

SAVING = {"checkpoint.every": "20", "checkpoint.keep_latest": "3"}


@case("a worker killed, run.restarts = 1")
def restarted(folder: Path) -> Outcome:
    with running(folder, SAVING | {"run.restarts": "1"}) as job:
        job.reach(110)
        os.kill(job.ranks()[1], signal.SIGKILL)
        died_at, seconds = job.step, job.seconds_until("resumed from")
        (code,) = job.wait()
        resumed = re.search(r"step (\d+)", job.line("resumed from"))
    lost = max(0, died_at - int(resumed[1])) if resumed else None
    happened = f"{'went on by itself' if resumed else 'ended'}, exit code {code}"
    return Outcome(happened, seconds, lost, promised=resumed is not None and not code)


@case("all processes killed during a save, 5 times")
def killed_in_save(folder: Path) -> Outcome:
    generator, resumes = random.Random(0), 0
    for _ in range(5):
        with running(folder, SAVING | {"checkpoint.every": "5", "training.steps": "2000"}) as job:
            job.seconds_until("resumed from" if resumes else "step ")
            start = job.step
            job.reach(start + 20)
            time.sleep(generator.random() / 2)
            for pid in [*job.ranks(), job.programs[0].pid]:
                os.kill(pid, signal.SIGKILL)
            (code,) = job.wait()
        resumes += "resumed from" in job.log()
    return Outcome(f"resumed {resumes} of 4 times, last exit code {code}", promised=resumes == 4)


# --- people ---------------------------------------------------------------------------------------


@case("Ctrl-C while a worker is stopped")
def interrupted(folder: Path) -> Outcome:
    with running(folder, {"training.steps": "4000"}) as job:
        job.reach(20)
        rank = job.ranks()[-1]
        os.kill(rank, signal.SIGSTOP)
        time.sleep(2)
        started = time.monotonic()
        os.kill(job.programs[0].pid, signal.SIGINT)
        saved = job.seconds_until("checkpoint of step")
        (code,) = job.wait()
        seconds = time.monotonic() - started
    found = re.search(r"saves step (\d+) alone", job.log())
    lost = max(0, job.step - int(found[1])) if found else None
    happened = f"exit code {code} after {seconds:.0f} s; {job.line('hangs')[:90]}"
    fine = saved is not None and saved <= 20 and bool(job.line("hangs"))
    return Outcome(happened, saved, lost, promised=fine)


# --- the table ------------------------------------------------------------------------------------


def run_case(name: str, out: Path, repeats: int) -> list[Outcome]:
    outcomes = []
    for number in range(repeats):
        folder = out / re.sub(r"\W+", "-", name) / f"{time.time():.0f}-{number}"
        try:
            outcomes.append(CASES[name](folder))
        except NoNetworkError as error:
            return [Outcome(f"left out: {error}")]
        except (SystemExit, TimeoutError) as error:
            outcomes.append(Outcome(str(error).splitlines()[0], promised=False))
    return outcomes


def build_row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    lost = [one.steps_lost for one in outcomes if one.steps_lost is not None]
    kept = sum(one.promised for one in outcomes)
    texts = list(dict.fromkeys(re.sub(r"/\S*/", "", one.happened) for one in outcomes))
    return [
        name,
        texts[0] + f" (and {len(texts) - 1} others)" * (len(texts) > 1),
        core.summary(seconds, 1) if seconds else "-",
        core.summary(lost, 0) if lost else "-",
        "yes" if kept == len(outcomes) else f"{kept} of {len(outcomes)}",
        str(len(outcomes)),
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--only", type=core.list_of(str), default=[], help="parts of names")
    parser.add_argument("--repeats", type=core.positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/faults"))
    options = parser.parse_args()
    names = [one for one in CASES if not options.only or any(part in one for part in options.only)]
    if not names:
        parser.error(f"--only {','.join(options.only)}: the faults are {'; '.join(CASES)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of scripts ignore Ctrl-C
    rows = []
    for name in names:
        rows.append(build_row(name, run_case(name, options.out, options.repeats)))
        print(" | ".join(rows[-1]), flush=True)
    core.print_table(f"{len(names)} faults, n = {options.repeats} each", HEADER, rows)


if __name__ == "__main__":
    main()
