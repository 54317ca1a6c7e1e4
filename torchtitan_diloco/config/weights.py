"""Weights of the corpora of a mixture: their mistakes, and the turns of the corpora."""

import math
from collections.abc import Mapping
from fractions import Fraction

Weights = Mapping[str, float]
"""Weights of corpora by name, of any sum."""

MOST_TURNS = 20_000
"""Maximum number of samples after which the turns of a mixture repeat. Weights that would need more
are rounded to multiples of one divided by this."""


def weight_mistake(weights: Weights) -> str:
    """Return the mistake in the weights with its remedy, or an empty string."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            return f'the weight of "{name}" is {weight}: give a number of at least 0'
    if not any(weights.values()):
        return "all weights are 0: give at least one corpus a weight above 0"
    lost = [name for name, turn in turns_of(weights).items() if weights[name] and not turn]
    if lost:
        least = f"1/{MOST_TURNS:,} of the sum"
        return f'the weight of "{lost[0]}" is below {least}: raise it, or remove the corpus'
    return ""


def is_rounded(weights: Weights) -> bool:
    """Return whether the turns give other shares than the weights, which must be valid."""
    return _period_of(_shares_of(weights)) > MOST_TURNS


def turns_of(weights: Weights) -> dict[str, int]:
    """Return the samples of each corpus in a period, after which the turns repeat.

    They are exact if the weights, as decimal numbers, have a period of at most MOST_TURNS samples.
    """
    shares = _shares_of(weights)
    period = _period_of(shares)
    if period <= MOST_TURNS:
        return {name: int(share * period) for name, share in shares.items()}
    # All shares are rounded down. The turns that are left over go to those that lost the most.
    turns = {name: int(share * MOST_TURNS) for name, share in shares.items()}
    by_loss = sorted(shares, key=lambda name: turns[name] - shares[name] * MOST_TURNS)
    for name in by_loss[: MOST_TURNS - sum(turns.values())]:
        turns[name] += 1
    return turns


def _shares_of(weights: Weights) -> dict[str, Fraction]:
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}
    total = sum(exact.values())
    return {name: weight / total for name, weight in exact.items()}


def _period_of(shares: Mapping[str, Fraction]) -> int:
    return math.lcm(*(share.denominator for share in shares.values()))
