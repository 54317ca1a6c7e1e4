"""What a checkpoint of an island holds, beside the model and the inner optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.state_dict import SHARED, SLOT, SavedState, named
from torchtitan_diloco.islands.copies import SavedCopy


@dataclass
class Saved:
    """What a checkpoint knows of the log. Its copies are loaded already."""

    run: str
    sequence: int
    digest: str
    versions: list[int]
    heads: list[str]
    rounds: list[int] = field(default_factory=list)


def saved_state(
    copies: Sequence[SavedCopy],
    states: Sequence[OuterState],
    facts: dict[str, Any],
    mesh: DeviceMesh | None,
) -> SavedState:
    """Return the newest shared copies, with nothing in flight."""
    facts["fragments"] = [
        {"rounds": one.rounds, "weight": 0.0, "delta_norms": list(state.norms.latest)}
        for one, state in zip(copies, states, strict=True)
    ]
    shared = named(SHARED, states, [one.theta for one in copies], mesh)
    for number in range(len(copies[0].slots)):
        slots = [one.slots[number] for one in copies]
        shared |= named(f"{SLOT}{number}", states, slots, mesh)
    return SavedState(facts, shared)
