"""Compare one sync of StreamingDiLoCo with one flat all-reduce in plain torch, on two gloo
processes of one thread each.

    python -m benchmarks.sync [--megabytes 33.6] [--fragments 1,2] [--delays 0] [--rounds 9]
                              [--codecs fp32,int8] [--measured fp32]
                              [--rate 200mbit] [--inner-seconds 0.4]

Both take turns in one run, so that a machine whose speed drifts treats them alike, and the ratio is
taken for each sync. Rows are without norms, cosines and drift, as most rounds of a run are (see
`diloco.measure_every`). `--measured` adds rows that measure them in every round.

If torchft is installed (`pip install -e .[bench]`), its DiLoCo syncs the same model in a row of its
own. If the system allows it, everything runs in a network namespace: its interface counter then
counts nothing else, and `--rate` limits it. With a delay, the training thread sleeps
`--inner-seconds` a step, as if it waited for an accelerator.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch

from benchmarks import core, torchft_loop
from benchmarks.network import NoNetworkError, enter_own_network
from benchmarks.sync_loop import SMALLEST, TIMEOUT, WORKERS, Case, Measured, block_count, measure
from tests.processes import ProcessPool

HEADER = (
    "loop | MB fp32 | tau | exposed ms | all-reduce ms | ratio | CPU ms | all-reduce CPU ms | "
    "sent MB, one worker | on lo MB, both | memory MB | n"
)
LEGEND = """\
exposed: of the training thread; all-reduce: one flat fp32 all-reduce of as many values; ratio:
exposed / all-reduce; CPU: all threads of one process; memory: peak above that of the same loop
without syncs. Numbers are worker 0's: median (min ... max) of n syncs."""


def run(measured_by: Callable[..., Measured], case: Case, *arguments: str) -> Measured:
    """Measure in new processes: memory that others have freed would hide what this needs."""
    pool = ProcessPool()
    measured: Measured = pool.run(measured_by, WORKERS, case, *arguments, timeout=TIMEOUT)[0]
    pool.close()
    return measured


def run_torchft(case: Case) -> Measured:
    os.environ.setdefault("RUST_LOG", "warn")  # otherwise it logs every quorum
    lighthouse = torchft_loop.serve_lighthouse("127.0.0.1:0", WORKERS)
    port = lighthouse.address().rpartition(":")[2]
    measured = run(torchft_loop.measure, case, f"http://localhost:{port}")
    lighthouse.shutdown()
    return measured


def build_row(name: str, case: Case, measured: Measured) -> list[str]:
    syncs, memory = measured
    sent = statistics.median(sync.sent for sync in syncs)
    wire = statistics.median(sync.on_the_wire for sync in syncs)
    return [
        name,
        f"{case.megabytes / case.fragments:.1f}",
        str(case.delay),
        core.summary([sync.exposed for sync in syncs], 1, 1e3),
        core.summary([sync.all_reduce for sync in syncs], 1, 1e3),
        core.summary([sync.exposed / sync.all_reduce for sync in syncs], 2),
        core.summary([sync.cpu for sync in syncs], 0, 1e3),
        core.summary([sync.all_reduce_cpu for sync in syncs], 0, 1e3),
        f"{sent / 1e6:.3f}" if sent else "-",
        f"{wire / 1e6:.3f}" if wire else "-",
        f"{memory:+.0f}",
        str(len(syncs)),
    ]


def build_rows(options: argparse.Namespace) -> list[list[str]]:
    rows = []
    for fragments, delay in product(options.fragments, options.delays):
        plain = Case(
            options.megabytes, fragments, delay, "fp32", options.rounds, options.inner_seconds
        )
        cases = {codec: replace(plain, codec=codec) for codec in options.codecs}
        for codec in options.measured:
            cases[f"{codec}, measured"] = replace(plain, codec=codec, measured=True)
        rows += [build_row(name, case, run(measure, case)) for name, case in cases.items()]
        if torchft_loop.is_installed():
            rows.append(build_row("torchft, fp32", plain, run_torchft(plain)))
        else:
            rows.append(["torchft: not installed", *["-"] * HEADER.count("|")])
    return rows


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=33.6, help="parameters in fp32")
    parser.add_argument("--fragments", type=core.list_of(core.positive), default=[1, 2])
    parser.add_argument("--delays", type=core.list_of(int), default=[0], help="tau")
    codecs = ["fp32", "bf16", "int8", "fp4_e3m0"]
    parser.add_argument("--codecs", type=core.list_of(core.codec_name), default=codecs)
    parser.add_argument("--measured", type=core.list_of(core.codec_name), default=["fp32"])
    parser.add_argument("--rounds", type=core.positive, default=9, help="syncs of each fragment")
    rate_help = "as tc writes it (200mbit), of both directions together"
    parser.add_argument("--rate", default="", help=rate_help)
    parser.add_argument("--inner-seconds", type=float, default=0.4, help="with delays above 0")
    options = parser.parse_args()
    if options.megabytes < SMALLEST:
        parser.error(
            f"--megabytes {options.megabytes:g} is less than one block, an embedding and a head "
            f"take: give {SMALLEST} or more"
        )
    blocks = block_count(options.megabytes)
    for fragments in options.fragments:
        if fragments > 1 and blocks % (fragments - 1):
            parser.error(
                f"--fragments {fragments}: all but the last must share the {blocks} blocks of this "
                "model evenly"
            )
    try:
        enter_own_network("benchmarks.sync", options.rate)
    except NoNetworkError as error:
        if options.rate:
            parser.error(f"--rate {options.rate} needs a network namespace: {error}")
        print(f"no network namespace, so no bytes from the interface's counter: {error}")
    speed = f" at {options.rate} for both directions together" if options.rate else ""
    sleep = f", inner steps of {options.inner_seconds:g} s" if any(options.delays) else ""
    title = (
        f"{options.megabytes:g} MB of fp32 parameters, {WORKERS} gloo processes of 1 thread, "
        f"{os.cpu_count()} cores, loopback{speed}{sleep}; torch {torch.__version__}\n\n{LEGEND}"
    )
    core.print_table(title, HEADER, build_rows(options))


if __name__ == "__main__":
    main()
