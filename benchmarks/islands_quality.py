"""Loss of islands at equal tokens: `benchmarks.islands --quality`.

The trainer trains the decoder of 0.12M parameters of `benchmarks.parity` on the source of the
Python standard library. Islands share a folder, and a syncer decides. A slow island sleeps in
multiples of its usual step. Except in lockstep, rounds wait for 0.1 s. "one job" has two workers in
place of islands: their mean is exact, where islands get 4 bits of it. Finished runs are kept.
"""

import re
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks import core
from benchmarks.islands_run import LENGTH, IslandsRun, island_settings
from benchmarks.workers import Job

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
    sync_every: int = 10
    is_job: bool = False
    """Whether its workers are one job instead."""
    control: str = "lockstep"
    """Case with which it is compared."""


CONTROL = "lockstep"
RARE = "lockstep, H = 30"
QUALITY = {
    CONTROL: Case(grace=60.0),
    "one job": Case(is_job=True),
    RARE: Case(grace=60.0, sync_every=30),
    "one job, H = 30": Case(is_job=True, sync_every=30, control=RARE),
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
    died = 0
    clock = run.job.clock
    while not any(process.exitcode == 0 for process in run.living.values()):
        now = clock.value
        phases = zip(case.ends, case.islands, strict=True)
        wanted = next((n for end, n in phases if now < end * tokens), case.islands[-1])
        for worker in range(max(case.islands)):
            if worker < wanted and worker not in run.living and now < tokens:
                last = worker == case.islands[0] - 1
                handicaps = {"slow": case.slow, "late": UPLOAD_STEPS * case.late} if last else {}
                run.start(worker, **handicaps)
            elif worker >= wanted and worker in run.living:
                run.leave(worker)
        if case.dies and LIFE * (died + 1) < now < 0.9 * tokens:
            died += 1
            run.kill(1)
        for worker, process in run.living.items():
            if process.exitcode:
                raise SystemExit(run.log(worker).read_text()[-2000:])
        time.sleep(0.01)


def train_case(case: Case, tokens: int, seed: int, folder: Path) -> core.Record:
    begin = case.islands[0]
    most = max(case.islands)
    settings = island_settings(SAMPLES) | {
        "training.tokens": str(tokens),
        "lr_schedule.warmup": str(3 * tokens // (10 * begin * SAMPLES * LENGTH)),
        "run.seed": str(seed),
        "diloco.sync_every": str(case.sync_every),
    }
    folder /= f"{time.time():.0f}"
    if case.is_job:
        settings["diloco.workers"] = str(begin)
        records = core.train(folder / "run", settings, NPROC=str(begin), OMP_NUM_THREADS="1")
        losses = [record["loss/val"] for record in records if "loss/val" in record]
        return {"loss": losses[-1], "merged": 1.0, "problems": []}
    settings |= {
        "islands.begin": str(begin),
        "islands.slots": str(most),
        "islands.grace_seconds": str(case.grace),
    }
    with IslandsRun(folder, most, Job(settings, hasty=True), "folder") as run:
        come_and_go(run, case, tokens)
        audit = run.finish()
        losses = [run.final_loss(worker) for worker in run.living]
    trained = run.trained()
    return {
        "loss": losses[0],
        "merged": min(audit["merged_samples"][slot] / SAMPLES / trained[slot] for slot in trained),
        "problems": audit["problems"],
    }


def measure_quality(names: list[str], seeds: int, tokens: int, out: Path) -> None:
    controls = [QUALITY[name].control for name in names]
    results: dict[str, dict[int, core.Record]] = {
        name: {} for name in QUALITY if name in (CONTROL, *names, *controls)
    }
    for seed, name in product(range(seeds), results):
        folder = out.absolute() / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{tokens}-{seed}"
        train = partial(train_case, QUALITY[name], tokens, seed, folder)
        results[name][seed] = core.kept(folder, {"tokens": tokens}, train)
        print(f"{name}, seed {seed}: {results[name][seed]}", flush=True)
    losses = {
        name: {seed: result["loss"] for seed, result in results[name].items()} for name in results
    }
    rows = []
    for name, runs in results.items():
        control = QUALITY[name].control
        rows.append(
            [
                name,
                core.summary(list(losses[name].values()), ".4f", middle=statistics.mean),
                "" if name == control else core.against(losses[name], losses[control]),
                "" if name == control else control,
                f"{100 * min(run['merged'] for run in runs.values()):.1f} %",
                str(sum(len(run["problems"]) for run in runs.values())),
                str(len(runs)),
            ]
        )
    title = f"validation loss of the shared copy after {tokens:,} tokens, mean (min ... max)"
    columns = "case | loss | more | than | merged | problems | n"
    core.print_table(title, columns, rows)
