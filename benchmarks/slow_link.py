"""Data parallelism, DiLoCo and streaming variants over links from far too slow to plenty: what is left of the compute.

    python -m benchmarks.slow_link [--workers 2] [--sync-every 100] [--cycles 1] [--delay 5] [--repeats 1]
                                   [--rates inf,1x,0.05x] [--methods 'NAME;...'] [--out outputs/slow-link]
                                   [--plot FILE.png] [--section.key value ...]

Every run is a real one (`python -m torchtitan_diloco.launch`, a node for each worker) with one thread a worker, in a network of
its own (benchmarks/network.py): same model, data and tokens a step, nothing but the method and the links differ. Rates are of
each worker's link, each way: Mbit/s, `inf` for no limit, or `0.1x` for a multiple of the rate at which data parallelism is
expected to have a tenth of its compute left, from its bytes and the step's seconds without a limit. Where torchft is installed
(`pip install -e .[bench]`), its DiLoCo trains the same model (benchmarks/torchft_train.py): same fragments, tau and alpha.

The short form above takes about a quarter of an hour on 2 quiet cores; the full one more than an hour a repeat. Finished runs
are kept in --out and not repeated, so a table that was interrupted can be continued:

    python -m benchmarks.slow_link --cycles 2 --repeats 3 --rates inf,10x,3x,1x,0.3x,0.1x,0.03x,0.01x --plot slow-link.png
"""

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arguments import further_settings, positive
from benchmarks.link import NoNetworkError
from benchmarks.slow_link_runs import (
    DATA_PARALLEL,
    METHODS,
    OURS,
    SET_BY_THE_TABLE,
    TORCHFT,
    Experiment,
    Measured,
    Window,
    is_installed,
    length_of_data_parallel,
    measure,
)
from benchmarks.table import print_table, summary
from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import Quantization
from torchtitan_diloco.pictures.files import write_picture
from torchtitan_diloco.pictures.line_chart import Series, line_chart

HEADER = [
    "Mbit/s",
    "method",
    "tokens/s",
    "utilisation %",
    "of own start %",
    "not exposed %",
    "exposed ms a step",
    "sent kB a step",
    "peak Mbit/s",
    "n (steps)",
]
LEGEND = """\
utilisation: tokens/s against the fastest method without a limit, in the same repeat; own start: the same run before anything
is sent; exposed: of the training thread, by its own clock (data parallelism: its step less the reference's); not exposed: the
rest of a step, which a machine whose speed changes between two runs leaves alone; sent: by one worker, counted by its
interface; peak: the most in half a second, of the worker that sent most. Median (min ... max) of n windows."""


@dataclass
class Row:
    """One method at one rate: a Measured for each repeat."""

    method: str
    rate: float
    repeats: list[Measured]

    @property
    def windows(self) -> list[Window]:
        return [window for measured in self.repeats for window in measured.windows]

    @property
    def sent(self) -> float:
        return statistics.median(measured.sent_per_step for measured in self.repeats)

    def utilisations(self, references: Sequence[float]) -> list[float]:
        """In percent; `references`: tokens/s of each repeat."""
        pairs = zip(self.repeats, references, strict=True)
        return [
            100 * window.tokens_per_second / reference
            for measured, reference in pairs
            for window in measured.windows
        ]


@dataclass
class Table:
    experiment: Experiment
    rows: list[Row]

    def row(self, method: str, rate: float) -> Row:
        return next(row for row in self.rows if (row.method, row.rate) == (method, rate))

    @property
    def rates(self) -> list[float]:
        return sorted({row.rate for row in self.rows}, reverse=True)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.method for row in self.rows))

    def references(self) -> list[float]:
        """Tokens/s of each repeat's fastest method without a limit."""
        found = []
        for number in range(len(self.row(DATA_PARALLEL, math.inf).repeats)):
            free = [
                row.repeats[number].windows
                for row in self.rows
                if row.rate == math.inf and number < len(row.repeats)
            ]
            found.append(
                max(
                    statistics.median(window.tokens_per_second for window in windows)
                    for windows in free
                )
            )
        return found

    def utilisation(self, method: str, rate: float) -> float:
        return statistics.median(self.row(method, rate).utilisations(self.references()))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_table(
    experiment: Experiment, rates: list[str], methods: list[str], repeats: int, out: Path
) -> Table:
    """All methods take turns at a rate, and all rates in a repeat, so that a machine whose speed drifts treats them alike."""
    table = Table(experiment, [])
    for repeat in range(repeats):
        for word in dict.fromkeys(["inf", *rates]):
            rate = rate_of(word, table)
            for method in methods:
                length = None
                if method == DATA_PARALLEL:
                    length = length_of_data_parallel(
                        expected_seconds(rate, table) if table.rows else 0.0
                    )
                name = "".join(c if c.isalnum() else "-" for c in method)
                measured = measure(
                    method, rate, experiment, length, out / f"{name}-{rate:g}-{repeat}"
                )
                if repeat == 0:
                    table.rows.append(Row(method, rate, []))
                table.row(method, rate).repeats.append(measured)
                speeds = [window.tokens_per_second for window in measured.windows]
                print(
                    f"repeat {repeat}, {_named(rate)}, {method}: {statistics.median(speeds):,.0f} tokens/s",
                    flush=True,
                )
    return table


def rate_of(word: str, table: Table) -> float:
    """Mbit/s of a rate as it is given on the command line; multiples are rounded, as they name folders."""
    if not word.endswith("x"):
        return float(word)
    return float(f"{float(word.removesuffix('x')) * rate_of_a_tenth(table):.2g}")


def rate_of_a_tenth(table: Table) -> float:
    """At which data parallelism is expected to spend nine times as long with sending as with computing."""
    seconds, sent = _free_step(table)
    return sent * 8e-6 / (9 * seconds)


def expected_seconds(rate: float, table: Table) -> float:
    """Of a step of data parallelism."""
    seconds, sent = _free_step(table)
    return seconds + sent * 8e-6 / rate


def _free_step(table: Table) -> tuple[float, float]:
    """Seconds of a step without a limit, and the bytes that a worker sends in one with data parallelism: of the first repeat,
    so that a table which is continued has the same rates."""
    free = [row.repeats[0].windows for row in table.rows if row.rate == math.inf]
    seconds = min(
        statistics.median(window.seconds_per_step for window in windows) for windows in free
    )
    return seconds, table.row(DATA_PARALLEL, math.inf).repeats[0].sent_per_step


# --- telling ----------------------------------------------------------------------------------------------------------


def cells(row: Row, references: list[float]) -> list[str]:
    windows = row.windows
    if row.method == DATA_PARALLEL:
        shares = [used / 100 for used in row.utilisations(references)]
        exposed = [
            max(0.0, 1 - share) * window.seconds_per_step
            for share, window in zip(shares, windows, strict=True)
        ]
    else:
        exposed = [window.exposed_seconds or 0.0 for window in windows]
    starts = [
        100 * window.tokens_per_second / measured.alone
        for measured in row.repeats
        for window in measured.windows
        if measured.alone
    ]
    steps = sorted({window.steps for window in windows})
    return [
        "no limit" if row.rate == math.inf else f"{row.rate:.3g}",
        row.method,
        _summary([window.tokens_per_second for window in windows], 0),
        _summary(row.utilisations(references), 1),
        _summary(starts, 1) if starts else "-",
        _summary(
            [
                100 * (1 - lost / window.seconds_per_step)
                for lost, window in zip(exposed, windows, strict=True)
            ],
            1,
        ),
        _summary([1e3 * seconds for seconds in exposed], 1),
        _summary([measured.sent_per_step / 1e3 for measured in row.repeats], 1),
        _summary([measured.peak_mbit for measured in row.repeats], 1),
        f"{len(windows)} ({' or '.join(map(str, steps))})",
    ]


def conclusions(table: Table) -> list[str]:
    """What the table says to the aims."""
    found = []
    if (tenth := _rate_at(table, 10)) is not None:
        found.append(f"data parallelism has 10 % utilisation left at about {_named(tenth)}")
    if OURS in table.methods:
        slow = [rate for rate in table.rates if table.utilisation(DATA_PARALLEL, rate) <= 12.5]
        if slow:
            rate, ours = slow[0], table.row(OURS, slow[0])
            used = table.utilisation(DATA_PARALLEL, rate)
            found.append(
                f"at {_named(rate)}, where it has {used:.1f} %, {OURS} has "
                f"{_summary(ours.utilisations(table.references()), 1)} %"
            )
        sent = table.row(OURS, math.inf).sent
        full = table.row(DATA_PARALLEL, math.inf).sent
        codec = build_codec(Quantization(codec="fp4_e3m0"))
        bits, every = bits_per_parameter(codec), table.experiment.sync_every
        found.append(
            f"{OURS} sends 1/{full / sent:.0f} of its bytes by the interfaces' counters, and 1/{full / sent / 2:.0f} "
            f"of what it would with bf16 gradients; of the payload alone it is 4 bits of 16 every {every} steps, "
            f"1/{16 * every / 4:.0f}, and 1/{16 * every / bits:.0f} with the scales of its blocks"
        )
    for method in table.methods if TORCHFT in table.methods else ():
        if method not in (TORCHFT, DATA_PARALLEL):
            found.append(
                f"{method} beside torchft, at {len(table.rates)} rates: {_beside_torchft(table, method)}"
            )
    return found


def _beside_torchft(table: Table, method: str) -> str:
    """Ahead or behind only where the spreads do not touch."""
    ahead = behind = 0
    for rate in table.rates:
        own, other = (
            table.row(name, rate).utilisations(table.references()) for name in (method, TORCHFT)
        )
        ahead += min(own) > max(other)
        behind += max(own) < min(other)
    return f"ahead at {ahead}, behind at {behind}, no difference beyond the spread at {len(table.rates) - ahead - behind}"


def _rate_at(table: Table, wanted: float) -> float | None:
    """Where data parallelism's utilisation crosses a value, between two measured rates on logarithmic scales."""
    points = [
        (rate, table.utilisation(DATA_PARALLEL, rate)) for rate in table.rates if rate < math.inf
    ]
    for (fast, more), (slow, less) in itertools.pairwise(points):
        if less <= wanted <= more and more > less:
            share = math.log(wanted / less) / math.log(more / less)
            return math.exp(math.log(slow) + share * math.log(fast / slow))
    return None


def plot(table: Table, path: Path) -> None:
    limited = [rate for rate in reversed(table.rates) if rate < math.inf]
    series = [
        Series(
            method,
            [(rate, table.utilisation(method, rate)) for rate in limited],
            dash=method == TORCHFT,
            markers=True,
        )
        for method in table.methods
    ]
    title = f"{table.experiment.workers} workers, H = {table.experiment.sync_every}"
    x_label, y_label = "link of each worker, Mbit/s", "compute utilisation, %"
    chart = line_chart(
        series, title=title, x_label=x_label, y_label=y_label, x_log=True, y_range=(0.0, None)
    )
    write_picture(chart, path)


def _named(rate: float) -> str:
    return "no limit" if rate == math.inf else f"{rate:.3g} Mbit/s"


def _summary(values: Sequence[float], digits: int) -> str:
    """Without a spread where there is but one value."""
    return summary(values, digits) if len(values) > 1 else f"{values[0]:,.{digits}f}"


# --- the command line -------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--sync-every", type=positive, default=100, help="H")
    parser.add_argument(
        "--cycles",
        type=positive,
        default=1,
        help="whole cycles of H steps that are measured, after the first",
    )
    parser.add_argument("--delay", type=int, default=5, help="tau, where communication overlaps")
    parser.add_argument(
        "--rates", type=lambda text: text.split(","), default=["inf", "1x", "0.05x"]
    )
    parser.add_argument(
        "--methods",
        default="",
        help="names, separated by ';' (default: all): " + "; ".join(METHODS),
    )
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/slow-link"))
    parser.add_argument("--plot", type=Path, help="a PNG of utilisation over rate")
    own, words = parser.parse_known_args()
    if own.workers == 1:
        parser.error("--workers 1 sends nothing: give 2 or more")
    if own.sync_every % 2:
        parser.error(
            f"--sync-every {own.sync_every} is odd, and half a cycle is measured before anything is sent: make it even"
        )
    for rate in own.rates:
        if not _is_rate(rate):
            parser.error(
                f"--rates {rate}: a rate is a number of Mbit/s above 0, inf, or a multiple such as 0.1x"
            )
    extra = further_settings(parser, words, SET_BY_THE_TABLE)
    asked = [name.strip() for name in own.methods.split(";") if name.strip()]
    for name in asked:
        if name not in METHODS or not is_installed(name):
            parser.error(
                f"no method {name!r} here; there are: {'; '.join(filter(is_installed, METHODS))}"
            )
    methods = [
        name
        for name in METHODS
        if name == DATA_PARALLEL or name in asked or (not asked and is_installed(name))
    ]
    if not is_installed(TORCHFT):
        print("torchft is not installed, so it has no rows: pip install -e .[bench]")

    experiment = Experiment(own.workers, own.sync_every, own.cycles, own.delay, extra)
    try:
        table = measure_table(experiment, own.rates, methods, own.repeats, own.out)
    except NoNetworkError as error:
        parser.exit(1, f"slow links need network namespaces: {error}\n")
    references = table.references()
    title = (
        f"{own.workers} workers of 1 thread, {os.cpu_count()} cores, H = {own.sync_every}, tau = {own.delay}; torch "
        f"{torch.__version__}; reference {_summary(references, 0)} tokens/s\n\n{LEGEND}"
    )
    order = [table.row(method, rate) for rate in table.rates for method in table.methods]
    print_table(title, HEADER, [cells(row, references) for row in order])
    print("\n" + "\n".join(f"- {line}" for line in conclusions(table)))
    if own.plot:
        plot(table, own.plot)
        print(f"\nplot: {own.plot}")


def _is_rate(word: str) -> bool:
    try:
        return float(word.removesuffix("x")) > 0
    except ValueError:
        return False


if __name__ == "__main__":
    main()
