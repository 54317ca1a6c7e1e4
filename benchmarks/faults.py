"""Inject faults into real runs and report what happens.

    .venv/bin/python -m benchmarks.faults [--only killed,cut] [--repeats 3]

Each fault has a small run of its own, in a network of its own (benchmarks/network.py). The table
says what happened, how many seconds it took (until the fault was named, or training went on), how
many steps of work were lost, and whether the documentation promises this. All faults take about six
minutes on two cores. Faults of files, disks and settings are covered by the tests.
"""

import os
import random
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import core
from benchmarks.network import LOOPBACK, Network, NoNetworkError, Program, wait_until
from torchtitan_diloco.components.records import read_json_lines

HEADER = "fault | what happened | seconds | steps lost | as promised | n"
SETTINGS: core.Settings = {
    "run.device": "cpu",
    "model.activation": "gelu",
    "model.layers": "2",
    "model.width": "128",
    "model.heads": "2",
    "model.head_dim": "64",
    "model.feed_forward": "512",
    "training.sequence_length": "64",
    "training.batch_size": "8",
    "training.steps": "400",
    "optimizer.lr": "4e-3",
    "lr_schedule.warmup_steps": "50",
    "diloco.sync_every": "10",
    "diloco.overlap.delay": "1",
    "diloco.fragments.layers_per_fragment": "1",
    "validation.every": "0",
    "metrics.log_every": "10",
    "metrics.tensorboard": "false",
}
"""0.5M parameters in 3 fragments. A step takes about 30 ms on one core."""


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run: a program for each worker, or one launcher."""

    network: Network
    folder: Path
    programs: list[Program]

    @property
    def first(self) -> Program:
        return self.programs[0]

    @property
    def step(self) -> int:
        """Last step with a record."""
        path = self.folder / "run" / "worker-0" / "metrics.jsonl"
        records: list[dict[str, Any]] = read_json_lines(path)[0] if path.exists() else []
        return max((int(one["step"]) for one in records if "kind" not in one), default=0)

    def reach(self, step: int) -> None:
        wait_until(lambda: self.step >= step or not self.first.running, "a step", self.first.log)
        if self.step < step:
            raise SystemExit(f"the run ended before step {step}:\n{self.first.printed()[-3000:]}")

    def wait(self) -> list[int | None]:
        """Return the exit codes, with None for a program that does not end."""
        return [program.wait() for program in self.programs]

    def ranks(self) -> list[int]:
        """Return the process ids of the launcher's ranks, by rank."""
        found = []
        for children in Path(f"/proc/{self.first.pid}/task").glob("*/children"):
            for pid in map(int, children.read_text().split()):
                with suppress(OSError):
                    if b"run_rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
        return sorted(found)


@contextmanager
def running(
    folder: Path, workers: int = 2, more: core.Settings | None = None, *, launcher: bool = False
) -> Iterator[Job]:
    """Start a run: each worker in its own namespace, or one launcher in a single namespace."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"run.folder": str(folder / "run"), "diloco.workers": str(workers)}
    settings = SETTINGS | (more or {}) | own
    module = "torchtitan_diloco.launch" if launcher else "torchtitan_diloco.train"
    command = [sys.executable, "-u", "-m", module, *core.command_line(settings)]
    if launcher:
        command = ["env", f"GLOO_SOCKET_IFNAME={LOOPBACK}", *command]
    with Network(1 if launcher else workers) as network:
        job, number = Job(network, folder, []), time.time()
        for worker in range(network.workers):
            log = folder / f"log-{number:.0f}-{worker}.txt"
            job.programs.append(network.launch(worker, command, log))
        yield job


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    happened: str
    seconds: float | None = None
    steps_lost: int | None = None
    promised: bool = True


def killed(folder: Path) -> Outcome:
    slow = {"diloco.overlap.delay": "5", "diloco.quantization.codec": "fp32"}
    with running(folder, 3, slow) as job:
        network = job.network
        job.reach(20)
        for worker in range(3):
            network.set_rate(worker, up=4, down=4)
        sent = network.counters(2)[0]
        wait_until(lambda: network.counters(2)[0] > sent + 100_000, "a payload")
        job.programs[2].process.kill()
        found = [one.seconds_until("worker 2 left or did not answer") for one in job.programs[:2]]
        codes = job.wait()
    seconds = None if None in found else max(one or 0.0 for one in found)
    happened = f"named by {2 - found.count(None)} of 2, exit codes {codes[:2]}"
    return Outcome(happened, seconds, promised=seconds is not None and seconds <= 2.5)


def silent(folder: Path, by_link: bool) -> Outcome:
    with running(folder, 2 if by_link else 3) as job:
        victim = len(job.programs) - 1

        def silence(begins: bool) -> None:
            if by_link:
                job.network.cut(victim, closed=begins)
            else:
                os.kill(job.programs[victim].pid, signal.SIGSTOP if begins else signal.SIGCONT)

        job.reach(20)
        silence(True)
        said = job.first.seconds_until(f"waiting for worker {victim}")
        time.sleep(15 - min(15.0, said or 15.0))
        silence(False)
        codes = job.wait()
    happened = f"said; {f'ended with {codes}' if any(codes) else 'went on'}"
    return Outcome(happened, said, 0, promised=said is not None and said <= 12 and not any(codes))


def flapping(folder: Path) -> Outcome:
    with running(folder) as job:
        job.reach(20)
        before = job.step
        for _ in range(5):
            job.network.cut(1, closed=True)
            time.sleep(1)
            job.network.cut(1, closed=False)
            time.sleep(3)
        steps, codes = job.step - before, job.wait()
    return Outcome(f"{steps} steps in 20 s, exit codes {codes}", promised=not any(codes))


def strangers(folder: Path) -> Outcome:
    with running(folder, launcher=True) as job:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # Before the launcher starts the ranks, which inherit the limit.
        resource.prlimit(job.first.pid, resource.RLIMIT_NOFILE, (1024, hard))
        job.reach(20)
        call = "from benchmarks.faults import scribble; scribble(200)"
        said = job.network.run(0, [sys.executable, "-c", call]).strip()
        (code,) = job.wait()
    return Outcome(f"{said}, exit code {code}", steps_lost=0, promised=code == 0)


def scribble(connections: int) -> None:
    """Send garbage to every listening port of this network, and stay connected."""
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            if state == "0A":  # listening
                ports.add(int(address.rpartition(":")[2], 16))
    kept = []
    for port in [port for port in ports for _ in range(connections)]:
        with suppress(OSError):
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            kept[-1].sendall(os.urandom(4096))
    time.sleep(2)
    print(f"{len(kept)} connections to {len(ports)} ports")


def restarted(folder: Path) -> Outcome:
    more = {"checkpoint.every": "20", "checkpoint.keep_latest": "3", "run.restarts": "1"}
    with running(folder, more=more, launcher=True) as job:
        job.reach(110)
        os.kill(job.ranks()[1], signal.SIGKILL)
        died_at, seconds = job.step, job.first.seconds_until("resumed from")
        (code,) = job.wait()
        resumed = re.search(r"step (\d+)", job.first.line("resumed from"))
    lost = max(0, died_at - int(resumed[1])) if resumed else None
    happened = f"{'went on by itself' if resumed else 'ended'}, exit code {code}"
    return Outcome(happened, seconds, lost, promised=resumed is not None and not code)


def killed_in_save(folder: Path) -> Outcome:
    generator, resumes = random.Random(0), 0
    more = {"checkpoint.every": "5", "checkpoint.keep_latest": "3", "training.steps": "2000"}
    for number in range(5):
        with running(folder, more=more, launcher=True) as job:
            job.first.seconds_until("resumed from" if number else "step ")
            job.reach(job.step + 20)
            time.sleep(generator.random() / 2)
            for pid in [*job.ranks(), job.first.pid]:
                os.kill(pid, signal.SIGKILL)
            (code,) = job.wait()
            resumes += "resumed from" in job.first.printed()
    return Outcome(f"resumed {resumes} of 4 times, last exit code {code}", promised=resumes == 4)


def interrupted(folder: Path) -> Outcome:
    with running(folder, more={"training.steps": "4000"}, launcher=True) as job:
        job.reach(20)
        os.kill(job.ranks()[-1], signal.SIGSTOP)
        time.sleep(2)
        started = time.monotonic()
        os.kill(job.first.pid, signal.SIGINT)
        saved = job.first.seconds_until("checkpoint of step")
        (code,) = job.wait()
        seconds = time.monotonic() - started
        found = re.search(r"saves step (\d+) alone", job.first.printed())
        hangs = job.first.line("hangs")
        lost = max(0, job.step - int(found[1])) if found else None
    happened = f"exit code {code} after {seconds:.0f} s; {hangs[:90]}"
    return Outcome(happened, saved, lost, saved is not None and saved <= 20 and bool(hangs))


# --- the table ------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Path], Outcome]] = {
    "killed in a payload, 4 Mbit/s, 3 workers": killed,
    "stopped for 15 s (SIGSTOP), 3 workers": lambda folder: silent(folder, by_link=False),
    "link cut without a word for 15 s": lambda folder: silent(folder, by_link=True),
    "link down 1 s in every 4 s, 5 times": flapping,
    "200 connections with garbage to every port, 1,024 descriptors": strangers,
    "a worker killed, run.restarts = 1": restarted,
    "all processes killed during a save, 5 times": killed_in_save,
    "Ctrl-C while a worker is stopped": interrupted,
}


def run_case(name: str, out: Path, repeats: int) -> list[str]:
    """Inject a fault `repeats` times, and return its row of the table."""
    outcomes = []
    for number in range(repeats):
        folder = out / re.sub(r"\W+", "-", name) / f"{time.time():.0f}-{number}"
        try:
            outcomes.append(CASES[name](folder))
        except (SystemExit, TimeoutError) as error:
            outcomes.append(Outcome(str(error).splitlines()[0], promised=False))
    seconds = [one.seconds for one in outcomes if one.seconds is not None]
    lost = [one.steps_lost for one in outcomes if one.steps_lost is not None]
    texts = dict.fromkeys(re.sub(r"/\S*/", "", one.happened) for one in outcomes)
    return [
        name,
        "; or ".join(texts),
        core.summary(seconds, 1) if seconds else "-",
        core.summary(lost, 0) if lost else "-",
        f"{sum(one.promised for one in outcomes)} of {repeats}",
        str(repeats),
    ]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--only", type=core.list_of(str), default=[], help="parts of names")
    parser.add_argument("--repeats", type=core.positive, default=1)
    parser.add_argument("--out", type=core.folder, default=Path("outputs/faults"))
    options = parser.parse_args()
    names = [one for one in CASES if not options.only or any(part in one for part in options.only)]
    if not names:
        parser.error(f"--only {','.join(options.only)}: the faults are {'; '.join(CASES)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    rows = []
    try:
        for name in names:
            rows.append(run_case(name, options.out.absolute(), options.repeats))
            print(" | ".join(rows[-1]), flush=True)
    except NoNetworkError as error:
        parser.exit(1, f"faults need network namespaces: {error}\n")
    core.print_table(f"{len(names)} faults, n = {options.repeats} each", HEADER, rows)


if __name__ == "__main__":
    main()
