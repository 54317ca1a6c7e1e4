"""Which settings let the transfers of a cycle fit into its steps, at the measured rates."""

import math

from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import FEW_ROUNDS, DiLoCoConfig
from torchtitan_diloco.planner.ladder import LARGEST_SYNC_EVERY, rungs

MARGIN = 1.2
SPARSE = "topk"
"""It needs the outer sgd, and other formats momentum, which a run cannot change."""


def settings_that_fit(
    given: DiLoCoConfig, fragments: int, transfers: float, step: float
) -> dict[str, object]:
    """Return the settings to change: those of the first rung of the ladder that fits.

    Fragments take turns on a link, so each has tau steps for its own transfer. If no rung fits, H
    becomes as long as it has to be.

    Args:
        given: the settings in force.
        transfers: seconds of all transfers of a cycle, with these settings.
        step: seconds of a step.
    """
    found = None
    for one in rungs(given, LARGEST_SYNC_EVERY * FEW_ROUNDS):
        if given.quantization.codec == SPARSE != one.quantization.codec:
            continue
        seconds = MARGIN * transfers * _bits(one) / _bits(given)
        delay = max(given.overlap.delay, math.ceil(seconds / fragments / step))
        if seconds <= one.sync_every * step and delay < one.sync_every:
            found = one.sync_every, delay, one.quantization.codec
            break
    if found is None:
        every = math.ceil(MARGIN * transfers / step)
        found = every, given.overlap.delay, given.quantization.codec
    names = "diloco.sync_every", "diloco.overlap.delay", "diloco.quantization.codec"
    before = given.sync_every, given.overlap.delay, given.quantization.codec
    changed = zip(names, before, found, strict=True)  # H first, as tau stays below it
    return {name: value for name, old, value in changed if value != old}


def _bits(config: DiLoCoConfig) -> float:
    return bits_per_parameter(build_codec(config.quantization))
