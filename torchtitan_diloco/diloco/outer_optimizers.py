"""Outer optimizers by name: what each keeps and reads, without PyTorch."""

from dataclasses import dataclass

from torchtitan_diloco.base.registry import Entry


@dataclass(frozen=True, kw_only=True)
class OuterRule(Entry):
    """Facts about an outer optimizer, of which `build` is its rule: a function that is called with
    a `Direction` (diloco/outer_step.py)."""

    slots: tuple[str, ...] = ()
    """Names of its states. A state has an fp32 value for each parameter, which starts from zero,
    and is saved under this name, which may not be `outer`, `next` or `sent`."""
    accumulates: bool = False
    """Whether a mean delta that does not change is applied 1 / (1 - momentum) times in the end."""


_RULES = "torchtitan_diloco.diloco.outer_step"

OUTER_OPTIMIZERS: dict[str, OuterRule] = {
    "nesterov": OuterRule(
        build=f"{_RULES}:nesterov", slots=("momentum",), reads=("momentum",), accumulates=True
    ),
    "momentum": OuterRule(
        build=f"{_RULES}:momentum", slots=("momentum",), reads=("momentum",), accumulates=True
    ),
    "sgd": OuterRule(build=f"{_RULES}:sgd"),
    "adam": OuterRule(
        build=f"{_RULES}:adam",
        slots=("momentum", "second_moment"),
        reads=("momentum", "beta2", "epsilon"),
    ),
}
"""Values of `diloco.outer_optimizer.name`. Add your own with a line such as
`OUTER_OPTIMIZERS["mine"] = OuterRule(build="mine:step")` (docs/algorithm.md)."""
