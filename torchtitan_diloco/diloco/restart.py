"""What a restart needs of the outer loop: by the names of parameters, so that it fits other fragments, ranks and schedules.

Nothing is drained. A fragment under way is saved with what comes back for it, which is applied when its time has come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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
    taken: torch.cuda.Event | None = None
    """The moment of freezing, on a GPU."""


def freeze(state: OuterState, record: dict[str, Any], *, in_flight: bool) -> Frozen:
    """In the training thread. Of a fragment under way the present shared copy is taken at once, as its buffer is put to other
    use by its apply. All other buffers keep their content until the next exchange of this fragment, which stands behind
    copy_out() in the background."""
    outer = state.outer.clone() if in_flight else state.outer
    return Frozen(
        outer,
        state.delta if in_flight else None,
        state.slots,
        state.residual,
        record,
        state.moment(),
    )


def copy_out(state: OuterState, frozen: Frozen) -> Frozen:
    """In the background, behind the exchanges that were under way: copies of everything in host memory. On a GPU they are the
    background's own work: in the training thread's stream its next step would wait for them."""

    def host(buffer: Tensor | None) -> Any:
        return None if buffer is None else buffer.to("cpu", copy=True)

    with torch.no_grad(), state.background(frozen.taken):
        slots = [host(slot) for slot in frozen.slots]
        record = frozen.record | {"rounds": state.rounds}
        return Frozen(host(frozen.outer), host(frozen.next), slots, host(frozen.residual), record)


def by_name(
    states: Sequence[OuterState],
    buffers: Sequence[Tensor | None],
    mesh: DeviceMesh | None,
    otherwise: Sequence[Tensor] | None = None,
) -> Named:
    """Flat buffers, one for each fragment, in the shape of the parameters. Parameters of a fragment without a buffer are left
    out; where a parameter's rows are in several fragments, the missing rows are taken from the buffers of `otherwise`."""
    rows: dict[str, dict[int, Tensor]] = {}
    wanted: dict[str, Part] = {}
    for index, (state, buffer) in enumerate(zip(states, buffers, strict=True)):
        source = buffer if buffer is not None else None if otherwise is None else otherwise[index]
        if source is not None:
            for part, view in zip(state.fragment.parts, state.views(source), strict=True):
                rows.setdefault(part.name, {})[part.run] = view
                if buffer is not None:
                    wanted[part.name] = part
    return {
        name: shaped_like(
            part.parameter, torch.cat([rows[name][run] for run in range(part.runs)]), mesh
        )
        for name, part in wanted.items()
    }


def fill(states: Sequence[OuterState], buffers: Sequence[Tensor], values: Named) -> None:
    """The way back: values by name into flat buffers, one for each fragment."""
    with torch.no_grad():
        for state, buffer in zip(states, buffers, strict=True):
            for part, view in zip(state.fragment.parts, state.views(buffer), strict=True):
                view.copy_(local_rows(part.name, values[part.name], part.run, part.runs))


def layout_of(states: Sequence[OuterState]) -> list[list[list[Any]]]:
    """For each fragment its parts: name, run, number of runs, and over how many ranks those are cut: a run is one of the rows
    on each rank, so with other ranks it is other rows."""
    return [
        [
            [part.name, part.run, part.runs, _ranks(part) if part.runs > 1 else 0]
            for part in state.fragment.parts
        ]
        for state in states
    ]


def _ranks(part: Part) -> int:
    return part.parameter.device_mesh.size(-1) if isinstance(part.parameter, DTensor) else 1


def saved_records(states: Sequence[OuterState], saved: dict[str, Any]) -> list[dict[str, Any]]:
    """For each fragment its saved facts; of fragments that did not exist, those of the one that held their first parameter."""
    records: list[dict[str, Any]] = saved["fragments"]
    if saved["layout"] == layout_of(states):
        return records
    holders: dict[str, dict[str, Any]] = {}
    for parts, record in zip(saved["layout"], records, strict=True):
        for name, *_ in parts:
            holders.setdefault(name, record)
    return [holders[state.fragment.parts[0].name] for state in states]


def check_same_model(states: Sequence[OuterState], outer: Named) -> None:
    mine = {
        part.name: tuple(part.parameter.shape) for state in states for part in state.fragment.parts
    }
    theirs = {name: tuple(value.shape) for name, value in outer.items()}
    found = [
        f"{name} is {mine.get(name, 'absent')} here and {theirs.get(name, 'absent')} there"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"the saved outer state is that of another model: {'; '.join(found[:3])}{more}"
        )


@torch.no_grad()
def apply_early(
    states: Sequence[OuterState], saved: dict[str, Any], mixing: Callable[[dict[str, Any]], float]
) -> None:
    """What had come back for fragments that no longer exist, or whose turn has changed, becomes the shared copy now, and is
    merged into the local parameters where it is another. Changes saved["outer"]."""
    flying = {
        name: saved["fragments"][index]["in_flight"]
        for index in saved["in_flight_order"]
        for name, *_ in saved["layout"][index]
    }
    parameters = {
        part.name: part.parameter.detach() for state in states for part in state.fragment.parts
    }
    for name, arrived in saved["next"].items():
        alpha = mixing(flying[name])
        values = parameters[name], saved["outer"][name], arrived
        local, shared, following = (local_rows(name, value, 0, 1) for value in values)
        mixed = alpha * local.float() + (1 - alpha) * following.to(local.device)
        local.copy_(torch.where((shared != following).to(local.device), mixed, local.float()))
        shared.copy_(following)
