"""What a restart needs of the outer loop: by the names of parameters, so that it fits other fragments, ranks and schedules.

Nothing is drained. A fragment under way is saved with what comes back for it, which is applied when its time has come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.fragments import Part, local_rows
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.shared_model import shaped_like

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Frozen:
    """The buffers of one fragment at a moment, and facts. `next`: what comes back for it, if it is under way."""

    outer: Tensor
    next: Tensor | None
    slots: list[Tensor]
    residual: Tensor | None
    record: dict[str, Any]


def freeze(state: OuterState, record: dict[str, Any], *, in_flight: bool) -> Frozen:
    """In the training thread. Of a fragment under way the present shared copy is taken at once, as its buffer is put to other
    use by its apply. All other buffers keep their content until the next exchange of this fragment, which stands behind
    copy_out() in the background."""
    outer = state.outer.clone() if in_flight else state.outer
    return Frozen(outer, state.delta if in_flight else None, state.slots, state.residual, record)


def copy_out(frozen: Frozen, facts: dict[str, Any]) -> Frozen:
    """In the background, behind the exchanges that were under way: copies of everything in host memory."""

    def host(buffer: Tensor | None) -> Any:
        return None if buffer is None else buffer.to("cpu", copy=True)

    with torch.no_grad():
        slots = [host(slot) for slot in frozen.slots]
        return Frozen(host(frozen.outer), host(frozen.next), slots, host(frozen.residual), frozen.record | facts)


def by_name(states: Sequence[OuterState], buffers: Sequence[Tensor | None], mesh: DeviceMesh | None) -> Named:
    """Flat buffers, one for each fragment, in the shape of the parameters. Parameters of a fragment without one are left
    out; of a parameter whose rows are in several fragments the missing ones are zeros."""
    rows: dict[str, dict[int, Tensor]] = {}
    parts: dict[str, Part] = {}
    for state, buffer in zip(states, buffers, strict=True):
        if buffer is not None:
            for part, view in zip(state.fragment.parts, state.views(buffer), strict=True):
                parts[part.name] = part
                rows.setdefault(part.name, {})[part.run] = view
    named = {}
    for name, part in parts.items():
        runs = [replace(part, run=run) for run in range(part.runs)]
        flat = [rows[name][one.run] if one.run in rows[name] else torch.zeros(one.local().shape) for one in runs]
        named[name] = shaped_like(part.parameter, torch.cat(flat), mesh)
    return named


def fill(states: Sequence[OuterState], buffers: Sequence[Tensor], values: Named) -> None:
    """The way back: values by name into flat buffers, one for each fragment."""
    with torch.no_grad():
        for state, buffer in zip(states, buffers, strict=True):
            for part, view in zip(state.fragment.parts, state.views(buffer), strict=True):
                view.copy_(local_rows(part.name, values[part.name], part.run, part.runs))


def layout_of(states: Sequence[OuterState]) -> list[list[list[Any]]]:
    """For each fragment the name, run and number of runs of its parts."""
    return [[[part.name, part.run, part.runs] for part in state.fragment.parts] for state in states]


def saved_records(states: Sequence[OuterState], saved: dict[str, Any]) -> list[dict[str, Any]]:
    """For each fragment as it is now the facts of the saved one that held its first parameter."""
    records = {name: record for parts, record in zip(saved["layout"], saved["fragments"], strict=True) for name, *_ in parts}
    return [records[state.fragment.parts[0].name] for state in states]


def check_same_model(states: Sequence[OuterState], outer: Named) -> None:
    mine = {part.name: tuple(part.parameter.shape) for state in states for part in state.fragment.parts}
    theirs = {name: tuple(value.shape) for name, value in outer.items()}
    found = [
        f"{name} is {mine.get(name, 'absent')} here and {theirs.get(name, 'absent')} there"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(f"the saved outer state is that of another model: {'; '.join(found[:3])}{more}")


@torch.no_grad()
def apply_early(states: Sequence[OuterState], saved: dict[str, Any], mixing: Callable[[dict[str, Any]], float]) -> None:
    """What had come back for fragments that no longer exist, or whose turn has changed, becomes the shared copy now, and is
    merged into the local parameters. Changes saved["outer"]."""
    parameters = {part.name: part.parameter.detach() for state in states for part in state.fragment.parts}
    for index in saved["in_flight_order"]:
        alpha = mixing(saved["fragments"][index]["in_flight"])
        for name, run, runs in saved["layout"][index]:
            arrived = local_rows(name, saved["next"][name], run, runs)
            local_rows(name, saved["outer"][name], run, runs).copy_(arrived)
            local = local_rows(name, parameters[name], run, runs)
            local.copy_(alpha * local.float() + (1 - alpha) * arrived.to(local.device))
