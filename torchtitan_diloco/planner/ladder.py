"""Climb from the given settings to the first that reach a wanted utilization on a link.

Each rung changes one setting of the rung before: tau to 1, 2, 5 and 10, then the format to int8 and
fp4_e3m0, then H to its double, again and again (docs/report-and-plan.md).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchtitan_diloco.base.formatting import clock, few_digits, markdown_table
from torchtitan_diloco.components.metrics import HOUR
from torchtitan_diloco.components.traffic import Party, cost, gigabytes, is_priced
from torchtitan_diloco.config.schema import Price
from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import FEW_ROUNDS, DiLoCoConfig, Quantization
from torchtitan_diloco.planner.prediction import Conditions, Prediction, Workload

DELAYS = (1, 2, 5, 10)
CODECS = ("int8", "fp4_e3m0")
LARGEST_SYNC_EVERY = 500
MARGIN = 1.2
HALF = 0.52
"""Share of the bytes that counts as half: 4 bits and their scales are a little more than half of 8
bits with as many scales."""
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
    while _may_double(now, total_steps):
        now = replace(now, sync_every=2 * now.sync_every)
        yield now


def _may_double(now: DiLoCoConfig, total_steps: int) -> bool:
    """Return whether the ladder doubles H of these settings once more."""
    return 2 * now.sync_every <= min(LARGEST_SYNC_EVERY, total_steps // FEW_ROUNDS)


def halvings(now: DiLoCoConfig, total_steps: int) -> Iterator[DiLoCoConfig]:
    """Yield settings that send half of the bytes of others, or less, each with one change that the
    ladder would make, too."""
    bits = _bits(now.quantization)
    for codec in CODECS:
        wire = replace(now.quantization, codec=codec)
        if _bits(wire) <= HALF * bits:
            yield replace(now, quantization=wire)
            break
    if _may_double(now, total_steps):
        yield replace(now, sync_every=2 * now.sync_every)


def settings_that_fit(
    given: DiLoCoConfig, fragments: int, transfers: float, step: float
) -> dict[str, object]:
    """Return the settings to change so that the transfers of a cycle fit into its steps: those of
    the first rung that fits.

    Fragments take turns on a link, so each has tau steps for its own transfer. If no rung fits, H
    of the last one becomes as long as it has to be.

    Args:
        given: the settings in force.
        transfers: seconds of all transfers of a cycle, with these settings.
        step: seconds of a step.
    """
    before = _settings_of(given)
    fitting = before
    for rung in rungs(given, LARGEST_SYNC_EVERY * FEW_ROUNDS):
        codec = rung.quantization.codec
        if given.quantization.format.is_sparse and not rung.quantization.format.is_sparse:
            continue  # others need the outer momentum, which a run cannot change
        seconds = MARGIN * transfers * _bits(rung.quantization) / _bits(given.quantization)
        delay = max(given.overlap.delay, math.ceil(seconds / fragments / step))
        needed = max(math.ceil(seconds / step), delay + 1)
        fitting = _settings(max(needed, rung.sync_every), delay, codec)
        if needed <= rung.sync_every:
            break
    return {name: value for name, value in fitting.items() if value != before[name]}


def _settings_of(given: DiLoCoConfig) -> dict[str, object]:
    return _settings(given.sync_every, given.overlap.delay, given.quantization.codec)


def _settings(sync_every: int, delay: int, codec: str) -> dict[str, object]:
    """Return settings by their keys: H first, as tau stays below it."""
    return {
        "diloco.sync_every": sync_every,
        "diloco.overlap.delay": delay,
        "diloco.quantization.codec": codec,
    }


def _bits(wire: Quantization) -> float:
    return bits_per_parameter(build_codec(wire))


def climb(
    load: Workload, conditions: Conditions, given: DiLoCoConfig, wanted: float
) -> tuple[Tried, DiLoCoConfig]:
    """Return the rungs up to the first that reaches `wanted`, and it or the first of the best."""
    tried: Tried = {}
    for diloco in rungs(given, load.plan.total_steps):
        tried[diloco] = load.predict(diloco, conditions)
        if tried[diloco].utilization >= wanted:
            return tried, diloco
    # To two digits, so that of rungs that are about equal the first is taken.
    return tried, max(tried, key=lambda diloco: float(f"{tried[diloco].utilization:.2g}"))


def ladder_text(
    load: Workload, conditions: Conditions, tried: Tried, best: DiLoCoConfig, wanted: float
) -> str:
    """Return a table of data parallelism and the rungs, and the result."""
    rows = [_cells("data parallelism", load.predict(replace(best, method="none"), conditions))]
    for diloco, prediction in tried.items():
        name = f"H {diloco.sync_every}, tau {diloco.overlap.delay}, {diloco.quantization.codec}"
        rows.append(_cells(f"* {name}" if diloco is best else name, prediction))
    columns = ["settings", "utilization", "ms a step", "MB sent a step", "GB sent an hour"]
    table = markdown_table(columns, rows)
    duration = clock(load.plan.total_steps * tried[best].step_seconds)
    result = f"* is the first to reach {100 * wanted:g} %"
    if tried[best].utilization < wanted:
        result = f"none reaches {100 * wanted:g} %; * comes closest"
    return f"{table}\n\n{result}; with it the run takes {duration}"


def _cells(name: str, prediction: Prediction) -> list[str]:
    utilization = math.floor(1e3 * prediction.utilization + 1e-8) / 10  # 94.99 % is not 95 %
    milliseconds = 1e3 * prediction.step_seconds
    sent = prediction.sent_bytes_per_step / 1e6
    an_hour = gigabytes(prediction.sent_bytes_per_step * HOUR / prediction.step_seconds)
    return [name, f"{utilization:.1f} %", f"{milliseconds:,.1f}", f"{sent:,.2f}", an_hour]


def halvings_text(
    given: DiLoCoConfig, fewer: Mapping[DiLoCoConfig, Sequence[Party]], price: Price
) -> str:
    """Say which settings halve the traffic.

    `fewer`: the `halvings` of the settings `given`, and who then transfers what.
    """
    lines = list[str]()
    before = _settings_of(given)
    for diloco, parties in fewer.items():
        changed = {
            key: value for key, value in _settings_of(diloco).items() if value != before[key]
        }
        words = " ".join(f"--{key} {value}" for key, value in changed.items())
        first = parties[0]
        line = (
            f"- {words}: {gigabytes(first.hour.sent)} GB up an hour, "
            f"{gigabytes(first.run.sent)} in the run"
        )
        if is_priced(price):
            line += f", which costs {few_digits(cost(parties, price)[1], 2)}"
        lines.append(line)
    if not lines:
        return (
            "nothing in this ladder halves these bytes: no format of it has half of the bits, and "
            f"twice the H is above {LARGEST_SYNC_EVERY}, or leaves fewer than {FEW_ROUNDS} rounds"
        )
    return "\n".join(["half of these bytes, or less, at the same length of a step:", *lines])
