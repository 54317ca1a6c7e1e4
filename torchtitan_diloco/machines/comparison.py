"""Compare what two machines can do on their link, and what one of them does alone.

The rows are in the order of what they cost in loss: one machine alone and data parallelism nothing,
then DiLoCo, streaming, streaming in few bits, and the rung of the ladder that the link needs. The
first that is almost as fast as the fastest is the best.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torchtitan_diloco.base.formatting import few_digits, markdown_table
from torchtitan_diloco.components.traffic import cost, gigabytes, is_priced
from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig, Overlap, Quantization
from torchtitan_diloco.planner.ladder import climb
from torchtitan_diloco.planner.prediction import Conditions, Workload

ALMOST = 0.95
"""Share of the fastest that is as good."""
FEW_BITS = Quantization(codec="fp4_e3m0")
AT_ONCE = Overlap(delay=0, mixing=0.0)


@dataclass(frozen=True)
class Row:
    name: str
    diloco: DiLoCoConfig
    machine: int | None
    """Number of the machine that trains alone; None for both together."""
    tokens_per_second: float
    least_and_most: tuple[float, float]
    """Tokens per second if the steps of both machines take as long, or as short, as they may."""


def compare(
    load: Workload,
    conditions: Conditions,
    given: DiLoCoConfig,
    names: Sequence[str],
    ranges: Sequence[tuple[float, float]] = (),
) -> list[Row]:
    """Predict each method with these settings, at equal tokens a step.

    `names`: of the machines. `ranges`: of each machine, the least and the most mean seconds of a
    step that a run may have. Empty: those of the conditions.
    """
    tokens = load.plan.tokens_per_step
    slow_and_fast = (conditions, conditions)
    if ranges:
        shortest, longest = zip(*ranges, strict=True)
        slow_and_fast = (
            replace(conditions, step_seconds=longest),
            replace(conditions, step_seconds=shortest),
        )
    rows = []
    for machine, name in enumerate(names):
        share = tokens / load.workers
        least, most = (share / ends.step_seconds[machine] for ends in slow_and_fast)
        rows.append(
            Row(
                name=f"{name} alone",
                diloco=replace(given, method="none", workers=1),
                machine=machine,
                tokens_per_second=share / conditions.step_seconds[machine],
                least_and_most=(least, most),
            )
        )
    for name, diloco in methods(load, conditions, given).items():
        prediction = load.predict(diloco, conditions)
        least, most = (tokens / load.predict(diloco, ends).step_seconds for ends in slow_and_fast)
        rows.append(
            Row(
                name=name,
                diloco=diloco,
                machine=None,
                tokens_per_second=tokens / prediction.step_seconds,
                least_and_most=(least, most),
            )
        )
    return rows


def methods(load: Workload, conditions: Conditions, given: DiLoCoConfig) -> dict[str, DiLoCoConfig]:
    """Return the settings of each method that two machines can train with."""
    plain = replace(given, method="streaming", quantization=Quantization())
    wire = given.quantization
    whole = replace(given.fragments, layers_per_fragment=0)
    if bits(wire) > bits(FEW_BITS):
        wire = FEW_BITS
    few = replace(plain, quantization=wire)
    by_name = {
        "data parallelism": replace(plain, method="none"),
        f"DiLoCo, H {given.sync_every}": replace(plain, fragments=whole, overlap=AT_ONCE),
        f"streaming, {steps_of(plain)}": plain,
        f"streaming, {bits(wire):.1g} bits, {steps_of(few)}": few,
    }
    # Machines of different speed never reach the utilization of equal ones.
    evenness = fmean(conditions.step_seconds) / max(conditions.step_seconds)
    _, tuned = climb(load, conditions, given=few, wanted=ALMOST * evenness)
    by_name.setdefault(f"streaming, {bits(tuned.quantization):.1g} bits, {steps_of(tuned)}", tuned)
    return by_name


def bits(wire: Quantization) -> float:
    return bits_per_parameter(build_codec(wire))


def steps_of(diloco: DiLoCoConfig) -> str:
    return f"H {diloco.sync_every}, tau {diloco.overlap.delay}"


def best_of(rows: Sequence[Row]) -> Row:
    """Return the first row that is almost as fast as the fastest, one machine before two."""
    fastest_alone = _fastest_alone(rows)
    enough = ALMOST * max(row.tokens_per_second for row in rows)
    candidates = [fastest_alone, *(row for row in rows if row.machine is None)]
    return next(row for row in candidates if row.tokens_per_second >= enough)


def table(load: Workload, rows: Sequence[Row], best: Row | None) -> str:
    """Return the table of all rows, in which the best, if there is one, is marked."""
    tokens = load.plan.total_steps * load.plan.tokens_per_step
    alone = _fastest_alone(rows)
    price = load.config.price
    cells = []
    for row in rows:
        speeds = row.least_and_most
        parties = load.traffic(row.diloco).parties(
            load.plan.tokens_per_step / row.tokens_per_second
        )
        sent = [gigabytes(size) for party in parties for size in (party.hour.sent, party.run.sent)]
        row_cells = [
            f"* {row.name}" if row is best else row.name,
            _range(f"{speed:,.{0 if speed >= 100 else 2}f}" for speed in speeds),
            _range(hours(tokens / speed) for speed in reversed(speeds)),
            _gain(row, alone),
            *(sent or ["", ""]),
        ]
        if is_priced(price):
            row_cells.append(few_digits(cost(parties, price)[1], 2) if parties else "")
        cells.append(row_cells)
    columns = ["", "tokens/s", "hours", "of one machine", "GB up an hour", "GB up a run"]
    return markdown_table(columns + ["cost of a run"] * is_priced(price), cells)


def _fastest_alone(rows: Sequence[Row]) -> Row:
    alone = [row for row in rows if row.machine is not None]
    return max(alone, key=lambda row: row.tokens_per_second)


def _gain(row: Row, alone: Row) -> str:
    """Return how many times as fast a row is as one machine alone, under the same conditions."""
    pairs = zip(row.least_and_most, alone.least_and_most, strict=True)
    return _range(
        times(gain) for gain in sorted(speed / speed_alone for speed, speed_alone in pairs)
    )


def _range(ends: Iterable[str]) -> str:
    """Return both ends of a range, or the only text if they are the same."""
    return " ... ".join(dict.fromkeys(ends))


def hours(seconds: float) -> str:
    """Return hours with enough digits, also of a run of minutes."""
    length = seconds / 3600
    digits = max(0, 1 - math.floor(math.log10(length))) if 0 < length < 100 else 0
    return f"{length:,.{min(digits, 4)}f}"


def times(factor: float) -> str:
    return f"{factor:.2f} x" if factor >= 0.095 else f"{factor:.1g} x"


def verdict(rows: Sequence[Row], best: Row) -> str:
    """Say in a line what the machines should do."""
    alone = _fastest_alone(rows)
    if best.machine is not None:
        return f"* {best.name} is about as fast as both together: a second machine gains nothing"
    data_parallel = next(row for row in rows if row.machine is None)
    named = {"the row with *": best}
    if best is not data_parallel:
        named[data_parallel.name] = data_parallel
    gains = []
    for name, row in named.items():
        gains.append(f"{name} makes two machines {_gain(row, alone)} as fast as {alone.name}")
    return "; ".join(gains)
