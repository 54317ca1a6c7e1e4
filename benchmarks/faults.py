"""Inject faults into real runs and say what happened.

    python -m benchmarks.faults [--only killed,nan] [--repeats 3]

Each fault meets a small run of its own, in a network of its own where links or hosts are concerned
(benchmarks/network.py; those are left out where the system does not allow it). The table says what
happened, how many seconds it took (until the fault was named, or until training went on), how many
steps of work were lost, and whether that is what the documentation promises. All faults take about
ten minutes on two cores.
"""

import math
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
from benchmarks.faults_run import Job, in_network, launched, wait_until
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


def in_payload(network: Network, job: Job, victim: int) -> None:
    """Return when the victim is in the middle of a payload over a link that has become slow."""
    job.reach(10)
    for worker in range(network.workers):
        network.set_rate(worker, up=4, down=4)
    sent = network.counters(victim)[0]
    wait_until(lambda: network.counters(victim)[0] > sent + 100_000, "a payload")


@case("killed in a payload, 4 Mbit/s, 2 workers", 2, True)
@case("killed in a payload, 4 Mbit/s, 3 workers", 3, True)
@case("killed between exchanges, 3 workers", 3, False)
def killed(folder: Path, workers: int, payload: bool) -> Outcome:
    victim, survivors = workers - 1, range(workers - 1)
    with Network(workers) as network, in_network(folder, network, SLOW_LINK) as job:
        if payload:
            in_payload(network, job, victim)
        else:
            job.reach(20)
        os.kill(job.programs[victim].pid, signal.SIGKILL)
        found = [job.seconds_until(LOST.format(victim), worker) for worker in survivors]
        codes = job.wait()
    named = [one for one in found if one is not None]
    seconds = max(named) if len(named) == len(found) else None
    happened = f"named by {len(named)} of {len(found)}, exit codes {codes[:-1]}"
    return Outcome(happened, seconds, promised=seconds is not None and seconds <= 2.5)


@case("stopped for 15 s (SIGSTOP), 3 workers")
def stopped(folder: Path) -> Outcome:
    with Network(3) as network, in_network(folder, network, {}) as job:
        job.reach(20)
        os.kill(job.programs[2].pid, signal.SIGSTOP)
        said = job.seconds_until(r"waiting for worker 2")
        time.sleep(15 - min(15.0, said or 15.0))
        os.kill(job.programs[2].pid, signal.SIGCONT)
        codes = job.wait()
        told = job.line("worker 2 goes on")
    happened = f"said; {'went on' if not any(codes) else f'ended with {codes}'}; {told}"
    return Outcome(happened, said, 0, promised=said is not None and said <= 12 and not any(codes))


def on_switch(network: Network, command: str) -> None:
    run_command([*network.inside(network.switch), *command.split()])


def cut(network: Network, worker: int, *, closed: bool) -> None:
    """Drop all packets of a worker's link without a word, or let them pass again."""
    on_switch(network, f"ip link set {port_of(worker)} {'nomaster' if closed else 'master switch'}")


@case("link cut without a word for 15 s")
def silent_cut(folder: Path) -> Outcome:
    with Network(2) as network, in_network(folder, network, {}) as job:
        job.reach(20)
        cut(network, 1, closed=True)
        said = job.seconds_until(r"waiting for worker 1")
        time.sleep(15 - min(15.0, said or 15.0))
        cut(network, 1, closed=False)
        codes = job.wait()
    happened = f"said; {'went on' if codes == [0, 0] else f'ended with {codes}'}"
    return Outcome(happened, said, 0, promised=said is not None and said <= 12 and not any(codes))


@case("link down 1 s in every 4 s, 5 times", "flaps")
@case("30 % of packets lost for 20 s", "loss")
def bad_link(folder: Path, kind: str) -> Outcome:
    with Network(2) as network, in_network(folder, network, {}) as job:
        job.reach(20)
        before, started = job.step, time.monotonic()
        for _ in range(5):
            if kind == "flaps":
                cut(network, 1, closed=True)
                time.sleep(1)
                cut(network, 1, closed=False)
                time.sleep(3)
            else:
                on_switch(network, f"tc qdisc replace dev {port_of(1)} root netem loss 30%")
                time.sleep(4)
        steps, seconds = job.step - before, time.monotonic() - started
        network.set_rate(1, up=math.inf, down=math.inf)
        codes = job.wait()
    return Outcome(f"{steps} steps in {seconds:.0f} s, exit codes {codes}", promised=not any(codes))


@case("garbage at every port", 1, "")
@case("200 connections to every port, 1,024 descriptors", 200, "ulimit -Sn 1024; ")
def strangers(folder: Path, connections: int, limit: str) -> Outcome:
    with Network(1) as network:
        inside = network.inside(network.namespace(0))
        shell = [*inside, "sh", "-c", limit + 'exec "$@"', "sh"]
        with launched(folder, {}, inside=shell) as job:
            job.reach(20)
            call = f"from benchmarks.faults_run import scribble; scribble({connections})"
            done = subprocess.run(
                [*inside, sys.executable, "-c", call], capture_output=True, text=True, check=True
            )
            (code,) = job.wait()
    happened = f"{done.stdout.strip()}, exit code {code}"
    return Outcome(happened, steps_lost=0, promised=code == 0)


# --- checkpoints and restarts ---------------------------------------------------------------------

DIES_AT = 115
SAVING = {"checkpoint.every": "20", "checkpoint.keep_latest": "3"}


def checkpoints(job: Job) -> list[Path]:
    return sorted((job.folder / "run" / "checkpoints").glob("step-????????"))


@case("a worker killed, run.restarts = 1", 1)
@case("a worker killed, run.restarts = 0", 0)
def restarts(folder: Path, count: int) -> Outcome:
    settings = SAVING | {"run.restarts": str(count)}
    with launched(folder, settings, f"dies@{DIES_AT}:1") as job:
        died = folder / "run" / "died"
        wait_until(lambda: died.exists() or job.ended, "the death", job.log)
        seconds = job.seconds_until("resumed from")
        (code,) = job.wait()
        resumed = re.search(r"step (\d+)", job.line("resumed from"))
    if resumed is None:
        return Outcome(job.last_words(code), promised=count == 0 and code not in (0, 2))
    return Outcome(
        f"went on by itself, exit code {code}", seconds, DIES_AT - int(resumed[1]), not code
    )


def start_again(folder: Path, at: int) -> Outcome:
    """Start the run in the folder again, which was at step `at`."""
    started = time.monotonic()
    with launched(folder, SAVING | {"training.steps": "100"}) as again:
        (code,) = again.wait()
    found = re.search(r"step (\d+)", again.line("resumed from"))
    if found is None or code:
        return Outcome(again.last_words(code), promised=False)
    said = again.line("damaged|incomplete|manifest|unreadable").partition("warning: ")[2]
    seconds = time.monotonic() - started
    return Outcome(f"resumed; {said[:200] or 'nothing said'}", seconds, at - int(found[1]))


@case("newest checkpoint: a bit flipped", "bit")
@case("newest checkpoint: no manifest", "manifest")
@case("newest checkpoint: a file cut short", "short")
@case("metrics.jsonl damaged", "metrics")
def damaged(folder: Path, kind: str) -> Outcome:
    with launched(folder, SAVING | {"training.steps": "100", "training.stop_after": "80"}) as job:
        job.wait()
    newest = checkpoints(job)[-1]
    largest = max(
        (one for one in newest.rglob("*") if one.is_file()), key=lambda p: p.stat().st_size
    )
    if kind == "bit":
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)
    elif kind == "short":
        os.truncate(largest, largest.stat().st_size // 2)
    elif kind == "manifest":
        next(newest.glob("manifest*")).unlink()
    else:
        with (job.folder / "run" / "metrics.jsonl").open("r+b") as file:
            file.seek(200)
            file.write(b"\xff\0{" * 50)
    return start_again(folder, 80)


@case("all processes killed during a save, 5 times")
def killed_in_save(folder: Path) -> Outcome:
    generator, resumes = random.Random(0), 0
    for _ in range(5):
        with launched(folder, SAVING | {"checkpoint.every": "5", "training.steps": "2000"}) as job:
            job.seconds_until("resumed from" if resumes else "step ")
            start = job.step
            job.reach(start + 20)
            time.sleep(generator.random() / 2)
            for pid in [*job.ranks(), job.programs[0].pid]:
                os.kill(pid, signal.SIGKILL)
            (code,) = job.wait()
        resumes += "resumed from" in job.log()
    return Outcome(f"resumed {resumes} of 4 times, last exit code {code}", promised=resumes == 4)


@case("disk full at a save")
def full_disk(folder: Path) -> Outcome:
    mount = folder / "run"
    mount.mkdir(parents=True)
    script = f'mount -t tmpfs -o size=6m none "{mount}" && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = ["unshare", *user, "--mount", "sh", "-c", script, "sh"]
    with launched(folder, SAVING | {"training.steps": "100"}, inside=inside) as job:
        (code,) = job.wait()
    said = job.line("could not be saved|No space")
    trained_on = "step   100" in job.log() or "step 100" in job.log()
    return Outcome(f"exit code {code}; {said[:90]}", promised=bool(said) and trained_on)


# --- numbers --------------------------------------------------------------------------------------


@case("parameters of a worker become NaN", "nan-parameters")
@case("gradients of a worker are NaN in 15 steps", "nan-gradients")
@case("a matrix of a worker times 1e2", "times-1e2")
@case("a matrix of a worker times 1e6", "times-1e6")
def numbers(folder: Path, kind: str) -> Outcome:
    settings = {"training.steps": "200", "validation.every": "100", "validation.sequences": "32"}
    with launched(folder, settings, f"{kind}@110:1") as job:
        (code,) = job.wait()
    losses = [
        record["validation/loss_nats_per_token_global"]
        for record in job.records
        if "validation/loss_nats_per_token_global" in record
    ]
    said = job.line("error.*gradients") or job.line("worker 1").partition("warning: ")[2]
    if kind == "nan-gradients":
        return Outcome(f"exit code {code}; {said[:110]}", promised=code == 2 and bool(said))
    change = f"{losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "no loss"
    fine = code == 0 and len(losses) > 1 and losses[-1] < losses[0]
    return Outcome(f"shared loss {change}; {said[:150]}", promised=fine)


# --- people ---------------------------------------------------------------------------------------


@case("Ctrl-C while a worker is stopped")
def interrupted(folder: Path) -> Outcome:
    with launched(folder, {"training.steps": "4000"}) as job:
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


@case("Ctrl-C 0.05 to 5 s after the start")
def interrupted_early(folder: Path) -> Outcome:
    moments, tracebacks = (0.05, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0), 0
    for moment in moments:
        with launched(folder / f"{moment:g}", {}) as job:
            time.sleep(moment)
            os.kill(job.programs[0].pid, signal.SIGINT)
            job.wait()
        tracebacks += "Traceback" in job.log()
    return Outcome(f"{tracebacks} tracebacks in {len(moments)} tries", promised=not tracebacks)


INPUTS = [
    ("--training.steps", "9" * 400),
    ("--run.seed", str(2**70)),
    ("--training.batch_size", str(10**12)),
    ("--model.width", str(10**9)),
    ("--data.loader_processes", "1000000"),
    ("--diloco.outer_optimizer.lr", "1e30"),
    ("--diloco.sync_every", "-1"),
    ("--diloco.quantization.codec", "fp5"),
    ("--data.corpus", "/dev/null"),
    ("--config", "/nowhere.toml"),
    ("--training.stpes", "5"),
    ("--model.weights", "/nowhere"),
]


@case("wrong inputs")
def wrong_inputs(folder: Path) -> Outcome:
    wrong = []
    for number, (key, value) in enumerate(INPUTS):
        with launched(folder / str(number), {key.removeprefix("--"): value}) as job:
            (code,) = job.wait()
        if code != 2 or "Traceback" in job.log() or "error:" not in job.log():
            wrong.append(f"{key} {value[:12]}")
    happened = f"one line and exit code 2 for {len(INPUTS) - len(wrong)} of {len(INPUTS)}"
    return Outcome("; ".join([happened, *wrong]), promised=not wrong)


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
