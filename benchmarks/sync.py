"""One sync of StreamingDiLoCo beside one flat all-reduce in plain torch, on two gloo processes of one thread each.

    python -m benchmarks.sync [--megabytes 33.6] [--fragments 1,2] [--delays 0] [--codecs fp32,int8] [--rounds 9]
                              [--rate 200mbit] [--inner-seconds 0.4]

Both take turns within one run, so that a machine whose speed drifts treats them alike; the ratio is taken per sync. Where
torchft is installed (`pip install -e .[bench]`), its DiLoCo syncs the same model in a row of its own. Where the system
allows it, everything runs in a network of its own: its interface counter then counts nothing else, and `--rate` makes it
slow. With a delay the training thread sleeps `--inner-seconds` a step, as it would wait for an accelerator.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from itertools import product

import torch

from benchmarks import link, torchft_manager, torchft_sync
from benchmarks.arguments import codec_names, positive
from benchmarks.sync_measure import TIMEOUT, WORKERS, Case, Measured, measure
from benchmarks.table import print_table, summary
from tests.processes import ProcessPool

HEADER = [
    "loop",
    "MB fp32",
    "tau",
    "exposed ms",
    "all-reduce ms",
    "ratio",
    "CPU ms",
    "all-reduce CPU ms",
    "sent MB, one worker",
    "on lo MB, both",
    "memory MB",
    "n",
]
SMALLEST = 8
LEGEND = """\
exposed: of the training thread; all-reduce: one flat fp32 all-reduce of as many values; ratio: exposed / all-reduce; CPU: of
all threads of one process; memory: peak above the same loop without syncs. Worker 0's; median (min ... max) of n syncs."""


def run_ours(case: Case) -> Measured:
    pool = ProcessPool()  # new processes: memory that others have freed would hide what this needs
    measured: Measured = pool.run(measure, WORKERS, case, timeout=TIMEOUT)[0]
    pool.close()
    return measured


def row(name: str, case: Case, measured: Measured) -> list[str]:
    syncs, memory = measured
    sent = statistics.median(sync.sent for sync in syncs)
    wire = statistics.median(sync.on_the_wire for sync in syncs)
    return [
        name,
        f"{case.megabytes / case.fragments:.1f}",
        str(case.delay),
        summary([1e3 * sync.exposed for sync in syncs], 1),
        summary([1e3 * sync.floor for sync in syncs], 1),
        summary([sync.exposed / sync.floor for sync in syncs], 2),
        summary([1e3 * sync.cpu for sync in syncs], 0),
        summary([1e3 * sync.floor_cpu for sync in syncs], 0),
        f"{sent / 1e6:.3f}" if sent else "-",
        f"{wire / 1e6:.3f}" if wire else "-",
        f"{memory:+.0f}",
        str(len(syncs)),
    ]


def rows(own: argparse.Namespace) -> list[Sequence[str]]:
    found: list[Sequence[str]] = []
    for fragments, delay in product(own.fragments, own.delays):
        cases = [
            Case(own.megabytes, fragments, delay, codec, own.rounds, own.inner_seconds)
            for codec in own.codecs
        ]
        found += [row(case.codec, case, run_ours(case)) for case in cases]
        if torchft_manager.is_installed():
            found.append(row("torchft, fp32", cases[0], torchft_sync.run(cases[0])))
        else:
            found.append(["torchft: not installed", *("-" for _ in HEADER[1:])])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=33.6, help="parameters in fp32")
    parser.add_argument("--fragments", type=_numbers, default=[1, 2])
    parser.add_argument("--delays", type=_numbers, default=[0])
    parser.add_argument("--codecs", type=codec_names, default=["fp32", "bf16", "int8", "fp4_e3m0"])
    parser.add_argument("--rounds", type=positive, default=9, help="syncs of every fragment")
    parser.add_argument(
        "--rate",
        default="",
        help="of the link, as tc writes it (200mbit); both directions share it",
    )
    parser.add_argument(
        "--inner-seconds", type=float, default=0.4, help="of one inner step, with delays above 0"
    )
    own = parser.parse_args()
    if own.megabytes < SMALLEST:
        parser.error(
            f"--megabytes {own.megabytes:g} is less than one block, an embedding and a head take: give {SMALLEST}"
        )
    try:
        link.enter_own_network("benchmarks.sync", own.rate)
    except link.NoNetworkError as error:
        if own.rate:
            parser.error(f"--rate {own.rate} needs a network namespace. {error}")
        print(f"no network namespace, so no bytes from the interface's counter: {error}")
    speed = f" at {own.rate} for both directions together" if own.rate else ""
    sleep = f", inner steps of {own.inner_seconds:g} s" if any(own.delays) else ""
    title = (
        f"{own.megabytes:g} MB of fp32 parameters, {WORKERS} gloo processes of 1 thread, {os.cpu_count()} cores, "
        f"loopback{speed}{sleep}; torch {torch.__version__}\n\n{LEGEND}"
    )
    print_table(title, HEADER, rows(own))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
