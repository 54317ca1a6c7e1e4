"""Saved state of the outer loop by the names of parameters, and the shared model's state dict.

Names make a state fit other fragments, ranks and schedules. Nothing is drained for a save: a
fragment in flight is saved with the shared copy that its exchange ends with, to be applied when
its turn comes.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import Part, check_identity, drop_gathered, local_rows
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.round import InFlight, total

Facts = dict[str, Any]
Named = dict[str, Tensor]

KINDS = SHARED, NEXT, SLOT, RESIDUAL = "outer", "next", "slot-", "residual"
"""Kinds of tensors; their names are KIND/PARAMETER."""
OPTIMIZER = "diloco.outer_optimizer.name"


def shared_parameter_name(name: str) -> str:
    """Return the key of a parameter in `SavedState.shared`."""
    return f"{SHARED}/{name}"


def resume_settings(config: DiLoCoConfig) -> dict[str, Any]:
    """Return the settings that a saved state depends on."""
    first = config.beginning
    return {
        "diloco.sync_every": config.sync_every,
        "diloco.overlap.delay": config.overlap.delay,
        "diloco.beginning": [first.steps, first.sync_every] if first.steps else None,
        OPTIMIZER: config.outer_optimizer.name,
    }


def known_facts(
    config: DiLoCoConfig, states: Sequence[OuterState], in_flight: Iterable[int]
) -> Facts:
    """Return what `SavedState.facts` says of settings and fragments."""
    settings, layout = resume_settings(config), layout_of(states)
    return {"settings": settings, "layout": layout, "in_flight": list(in_flight)}


def facts_for_new_worker(facts: Facts) -> Facts:
    """Return the facts for a worker that the saved run did not have: nothing of its own to send."""
    own = {"weight": 0.0, "delta_norms": []}
    return facts | {"healed": 0, "fragments": [one | own for one in facts["fragments"]]}


def copy_to_host(value: Tensor) -> Tensor:
    """Return a copy in host memory. From a GPU it is only queued on the current stream."""
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return copy.copy_(value, non_blocking=True)


@dataclass
class SavedState:
    """State of the outer loop to resume from, beside the model and the inner optimizer."""

    facts: Facts
    """This worker's, fit for JSON: `step`, `progress`, `settings`, `layout` (for each fragment its
    parts), `in_flight` (fragments in the order they were sent), `healed` (fragments so far), and
    `fragments`: for each its `rounds`, the `weight` of steps not sent yet, its `delta_norms`, and
    if in flight `sent_step`, `participants`, `flags`."""
    shared: Named
    """Equal on all workers: outer/NAME, next/NAME (fragments in flight), slot-0/NAME ..."""
    own: Named = field(default_factory=dict)
    """This worker's: residual/NAME."""
    exchanged: dict[str, float] = field(default_factory=dict)
    """Totals of exchanges in flight that are not in the metrics yet. Not read by a load."""

    @staticmethod
    def template(
        model: nn.Module,
        facts: Facts,
        shared_names: Iterable[str],
        own_names: Iterable[str],
        mesh: DeviceMesh | None,
    ) -> "SavedState":
        """Return zeros in host memory for the names of a checkpoint, to be filled in place."""
        parameters = dict(model.named_parameters())

        def zeros(names: Iterable[str]) -> Named:
            found = {}
            for name in filter(lambda name: name.startswith(KINDS), names):
                parameter = parameters[name.partition("/")[2]]
                size = local_rows(name, parameter.detach()).numel()
                found[name] = shaped_like(parameter, torch.zeros(size, dtype=torch.float32), mesh)
            return found

        return SavedState(facts, zeros(shared_names), zeros(own_names))

    def kind(self, kind: str) -> Named:
        """Return the tensors of one kind by the name of their parameter."""
        pairs = [(name.partition("/"), value) for name, value in (self.shared | self.own).items()]
        return {name: value for (found, _, name), value in pairs if found == kind}


def shaped_like(parameter: Tensor, flat: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Shape values on this rank as a parameter is, sharded on the parameter's mesh or another."""
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return flat.view(value.shape)
    return DTensor.from_local(
        flat.view(value.to_local().shape).to(value.device if mesh is None else mesh.device_type),
        mesh or value.device_mesh,
        value.placements if mesh is None else value.placements[-mesh.ndim :],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def shared_state_dict(model: nn.Module, states: Sequence[OuterState]) -> Named:
    """Return the model's state dict with the shared parameters in fp32 in the place of its own."""
    drop_gathered(model)
    for state in states:
        check_identity(model, state.fragment)
    shared = named(SHARED, states, [state.outer for state in states])
    first = {one: shared_parameter_name(name) for name, one in model.named_parameters()}
    keys = {name: first[one] for name, one in model.named_parameters(remove_duplicate=False)}
    return {
        name: shared[keys[name]] if keys.get(name) in shared else value.detach().clone()
        for name, value in model.state_dict().items()
    }


@contextmanager
def holding_shared(model: nn.Module, states: Sequence[OuterState]) -> Iterator[None]:
    """Let the model hold the shared parameters in the body of a with statement."""
    drop_gathered(model)
    parts = [part for state in states for part in state.fragment.parts]
    saved = [part.local().clone() for part in parts]
    for state in states:
        state.write_model()
    try:
        yield
    finally:
        drop_gathered(model)
        with torch.no_grad():
            for part, before in zip(parts, saved, strict=True):
                part.local().copy_(before)


# --- save -----------------------------------------------------------------------------------------


class Snapshot:
    """Buffers of one fragment at the time of a save, to be copied out in the background.

    They keep their content until the next exchange of the fragment, which is queued behind the
    copy. Only the shared copy of a fragment in flight is copied at once: its apply may come first.
    A fragment that is given up has an exchange that never ends: what it was to send is part of the
    next delta, and its encoding error is forgotten.
    """

    def __init__(
        self,
        state: OuterState,
        weight: float,
        in_flight: InFlight | None,
        given_up: bool,
        *,
        shared: bool,
    ) -> None:
        """`shared`: copy also what all workers share, not only this worker's own."""
        self.state, self._weight = state, weight
        self._in_flight, self._given_up = in_flight, given_up
        self.residual = state.residual
        self.outer: Tensor | None = None
        self.next: Tensor | None = None
        self.slots = state.slots if shared else []
        if shared:
            self.outer = state.outer if in_flight is None else state.outer.clone()
            self.next = None if in_flight is None else state.delta
        self._moment = state.moment()

    def copy_out(self) -> tuple[Facts, dict[str, float]]:
        """Copy to host memory; return the fragment's facts and what its exchange adds to totals."""
        buffers = self.outer, self.next, self.residual, *self.slots
        with torch.no_grad(), self.state.background(self._moment):
            copies: list[Any] = [one if one is None else copy_to_host(one) for one in buffers]
        self.outer, self.next, self.residual, *self.slots = copies  # only now others may be freed
        if self._given_up and self.residual is not None:
            self.residual.zero_()
        facts: Facts = {"weight": self._weight, "rounds": self.state.rounds}
        facts["delta_norms"] = list(self.state.norms.latest)
        if self._in_flight is None:
            return facts, {}
        round_, exchanged = self._in_flight
        exchanged.result()
        facts |= {name: getattr(round_, name) for name in ("sent_step", "participants", "flags")}
        return facts, round_.exchange_sums()


def save(snapshots: Sequence[Snapshot], facts: Facts, mesh: DeviceMesh | None) -> SavedState:
    """Complete a save in the background thread, behind the exchanges that were in flight."""
    copied = [snapshot.copy_out() for snapshot in snapshots]
    states = [snapshot.state for snapshot in snapshots]
    shared: Named = {}
    if outer := [one.outer for one in snapshots if one.outer is not None]:
        pairs = zip(outer, (one.next for one in snapshots), strict=True)
        following = [now if new is None else new for now, new in pairs]
        in_flight = [one.state.fragment for one in snapshots if one.next is not None]
        names = {part.name for fragment in in_flight for part in fragment.parts}
        shared = named(SHARED, states, outer, mesh) | named(NEXT, states, following, mesh, names)
    for number, slots in enumerate(zip(*(one.slots for one in snapshots), strict=True)):
        shared |= named(f"{SLOT}{number}", states, slots, mesh)
    residuals = [one.residual for one in snapshots if one.residual is not None]
    own = named(RESIDUAL, states, residuals, mesh) if residuals else {}
    facts = facts | {"fragments": [fragment for fragment, _ in copied]}
    return SavedState(facts, shared, own, total(sums for _, sums in copied))


def named(
    kind: str,
    states: Sequence[OuterState],
    buffers: Sequence[Tensor],
    mesh: DeviceMesh | None = None,
    names: Container[str] | None = None,
) -> Named:
    """Return copies of flat buffers, one for each fragment, as tensors of a saved state.

    The rows of a parameter may be in several fragments. `names`: only of these parameters.
    """
    rows: dict[str, dict[int, Tensor]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for state, buffer in zip(states, buffers, strict=True):
        for part, view in zip(state.fragment.parts, state.views(buffer), strict=True):
            if names is None or part.name in names:
                rows.setdefault(part.name, {})[part.run] = view
                parameters[part.name] = part.parameter
    return {
        f"{kind}/{name}": shaped_like(
            parameters[name], torch.cat([runs[run] for run in sorted(runs)]), mesh
        )
        for name, runs in rows.items()
    }


# --- load -----------------------------------------------------------------------------------------


def load(
    states: Sequence[OuterState],
    saved: SavedState,
    config: DiLoCoConfig,
    mixing: Callable[[int, int], float],
) -> tuple[list[Facts], list[int], list[str]]:
    """Fill the buffers. Return the facts of each fragment, those in flight, and notes.

    `mixing` returns the local share for flags and participants.
    """
    facts, notes = saved.facts, list[str]()
    settings, before = resume_settings(config), facts["settings"]
    in_flight, fragments = list(facts["in_flight"]), list(facts["fragments"])
    changed = {key for key in settings if settings[key] != before.get(key)}
    is_split_anew = facts["layout"] != layout_of(states)
    if is_split_anew:  # each takes the facts of the one that had its first parameter, but no norms
        holders: dict[str, Facts] = {}
        for parts, record in zip(facts["layout"], fragments, strict=True):
            for name, *_ in parts:
                holders.setdefault(name, record | {"delta_norms": []})
        fragments = [holders[state.fragment.parts[0].name] for state in states]
    if in_flight and (is_split_anew or changed - {OPTIMIZER}):
        notes.append(f"{len(in_flight)} fragments in flight are applied now: turns have changed")
        apply_early(states, saved, mixing)
        in_flight = []
    fill(states, [state.outer for state in states], saved.kind(SHARED))
    if OPTIMIZER in changed:
        old, new = before[OPTIMIZER], settings[OPTIMIZER]
        notes.append(f"{OPTIMIZER} was {old} and is {new}: its state starts from zero")
    else:
        for number in range(len(states[0].slots)):
            slots = [state.slots[number] for state in states]
            fill(states, slots, saved.kind(f"{SLOT}{number}"))
    residuals = [state.residual for state in states if state.residual is not None]
    lost = saved.kind(RESIDUAL)
    if residuals and lost:
        fill(states, residuals, lost)
    elif residuals or lost:
        end = "is given up" if lost else "starts from zero"
        notes.append(f"diloco.quantization.error_feedback has changed: what encoding lost {end}")
    for index, (state, record) in enumerate(zip(states, fragments, strict=True)):
        if index in in_flight:
            fill([state], [state.delta], saved.kind(NEXT))
        state.resume(record["rounds"], record["delta_norms"], in_flight=index in in_flight)
    return fragments, in_flight, notes


def fill(states: Sequence[OuterState], buffers: Sequence[Tensor], values: Named) -> None:
    """Copy values by name into flat buffers, one for each fragment."""
    with torch.no_grad():
        for state, buffer in zip(states, buffers, strict=True):
            for part, view in zip(state.fragment.parts, state.views(buffer), strict=True):
                view.copy_(local_rows(part.name, values[part.name], part.run, part.runs))


def layout_of(states: Sequence[OuterState]) -> list[list[list[Any]]]:
    """Return name, run, runs and ranks of each part of each fragment.

    A run is one of the rows on each rank, so with other ranks it has other rows.
    """

    def ranks(part: Part) -> int:
        if part.runs == 1:
            return 0
        return part.parameter.device_mesh.size(-1) if isinstance(part.parameter, DTensor) else 1

    return [
        [[part.name, part.run, part.runs, ranks(part)] for part in state.fragment.parts]
        for state in states
    ]


def check_same_model(states: Sequence[OuterState], saved: SavedState) -> None:
    parts = [part for state in states for part in state.fragment.parts]
    mine = {part.name: tuple(part.parameter.shape) for part in parts}
    theirs = {name: tuple(value.shape) for name, value in saved.kind(SHARED).items()}
    found = [
        f"{name} is {mine.get(name, 'absent')} here and {theirs.get(name, 'absent')} there"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]
    if found:
        raise ValueError(
            f"the saved outer state is that of another model ({len(found)} parameters differ): "
            + "; ".join(found[:3])
        )


@torch.no_grad()
def apply_early(
    states: Sequence[OuterState], saved: SavedState, mixing: Callable[[int, int], float]
) -> None:
    """Apply saved fragments in flight to the model and to the tensors of the saved state."""
    facts, outer = saved.facts, saved.kind(SHARED)
    alphas, whole = {}, set()
    for index in facts["in_flight"]:
        record = facts["fragments"][index]
        for name, _, runs, _ in facts["layout"][index]:
            alphas[name] = mixing(record["flags"], record["participants"])
            whole |= {name} if runs == 1 else set()
    parts = [part for state in states for part in state.fragment.parts]
    parameters = {part.name: part.parameter.detach() for part in parts}
    for name, arrived in saved.kind(NEXT).items():
        alpha, tensors = alphas[name], (parameters[name], outer[name], arrived)
        local, shared, following = (local_rows(name, tensor) for tensor in tensors)
        mixed = alpha * local.float() + (1 - alpha) * following.to(local.device)
        if name not in whole:  # rows of other fragments are not in flight: they are the same
            mixed = torch.where((shared != following).to(local.device), mixed, local.float())
        local.copy_(mixed)
        shared.copy_(following)
