"""Climb from the given settings to the first that reach a wanted utilisation on a link.

Each rung changes one setting of the rung before: tau to 1, 2, 5 and 10, then the format to int8 and
fp4_e3m0, then H to its double, again and again (docs/report-and-plan.md).
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import FEW_ROUNDS, CodecName, DiLoCoConfig, Quantization
from torchtitan_diloco.log import clock, markdown_table
from torchtitan_diloco.planner.prediction import Conditions, Prediction, Workload

DELAYS = (1, 2, 5, 10)
CODECS: tuple[CodecName, ...] = ("int8", "fp4_e3m0")
LARGEST_SYNC_EVERY = 500
Tried = dict[DiLoCoConfig, Prediction]


def rungs(given: DiLoCoConfig, total_steps: int) -> Iterator[DiLoCoConfig]:
    """Yield the settings of each rung, without delays and formats that are no gain.

    A delay stays below H. H is doubled up to 500, and while the run has 100 rounds.
    """
    now = replace(given, method="streaming")
    yield now
    for delay in DELAYS:
        if now.overlap.delay < delay < now.sync_every:
            now = replace(now, overlap=replace(now.overlap, delay=delay))
            yield now
    for codec in CODECS:
        wire = replace(now.quantization, codec=codec)
        if _bits(wire) < _bits(now.quantization):
            now = replace(now, quantization=wire)
            yield now
    while 2 * now.sync_every <= min(LARGEST_SYNC_EVERY, total_steps // FEW_ROUNDS):
        now = replace(now, sync_every=2 * now.sync_every)
        yield now


def _bits(wire: Quantization) -> float:
    return bits_per_parameter(build_codec(wire))


def climb(
    load: Workload, conditions: Conditions, given: DiLoCoConfig, wanted: float
) -> tuple[Tried, DiLoCoConfig]:
    """Return the rungs up to the first that reaches `wanted`, and it or the first of the best."""
    tried: Tried = {}
    for diloco in rungs(given, load.plan.total_steps):
        tried[diloco] = load.predict(diloco, conditions)
        if tried[diloco].utilisation >= wanted:
            return tried, diloco
    return tried, max(tried, key=lambda one: float(f"{tried[one].utilisation:.2g}"))


def ladder_text(
    load: Workload, conditions: Conditions, tried: Tried, best: DiLoCoConfig, wanted: float
) -> str:
    """Return a table of data parallelism and the rungs, and the result."""
    rows = [_cells("data parallelism", load.predict(replace(best, method="none"), conditions))]
    for one, found in tried.items():
        mark = "* " if one is best else ""
        name = f"{mark}H {one.sync_every}, tau {one.overlap.delay}, {one.quantization.codec}"
        rows.append(_cells(name, found))
    table = markdown_table(["settings", "utilisation", "ms a step", "MB sent a step"], rows)
    duration = clock(load.plan.total_steps * tried[best].step_seconds)
    result = f"* is the first to reach {100 * wanted:g} %"
    if tried[best].utilisation < wanted:
        result = f"none reaches {100 * wanted:g} %; * comes closest"
    return f"{table}\n\n{result}; with it the run takes {duration}"


def _cells(name: str, found: Prediction) -> list[str]:
    utilisation = math.floor(1e3 * found.utilisation + 1e-8) / 10  # 94.99 % is not 95 %
    sent = found.sent_bytes_per_step / 1e6
    return [name, f"{utilisation:.1f} %", f"{1e3 * found.step_seconds:,.1f}", f"{sent:,.2f}"]
