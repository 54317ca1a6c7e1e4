"""Saved state of the outer loop by names of parameters.

Because it is keyed by names, a state fits other fragments, ranks and schedules. A save applies
nothing: a fragment in flight is saved with the shared copy that results from its exchange, which is
applied when it is due.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.tensors import copy_to_host, local_of
from torchtitan_diloco.base.user import UserError, cause_of
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import local_rows
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_optimizers import OUTER_OPTIMIZERS
from torchtitan_diloco.diloco.outer_state import OuterState, mode_after, state_bytes, take_back
from torchtitan_diloco.diloco.round import Round

Named = dict[str, Tensor]

SHARED = "outer"
NEXT = "next"
SENT = "sent"
BEGINNING_SETTING = "diloco.beginning"
OPTIMIZER = "diloco.outer_optimizer.name"
SPARSE = "sparse"


def kinds() -> set[str]:
    """Return the kinds of tensors that may be saved. Their names are KIND/PARAMETER."""
    return {
        SHARED,
        NEXT,
        SENT,
        *(slot for rule in OUTER_OPTIMIZERS.values() for slot in rule.slots),
    }


def shared_parameter_name(name: str) -> str:
    """Return the key of a parameter in `SavedState.tensors`."""
    return f"{SHARED}/{name}"


def resume_settings(config: DiLoCoConfig) -> dict[str, Any]:
    """Return the settings that a saved state depends on."""
    first = config.beginning
    return {
        "diloco.sync_every": config.sync_every,
        "diloco.overlap.delay": config.overlap.delay,
        BEGINNING_SETTING: [first.length, first.sync_every] if first.length else None,
        OPTIMIZER: config.outer_optimizer.name,
        SPARSE: config.quantization.format.is_sparse,  # how a copy is applied
    }


@dataclass
class FragmentFacts:
    """Saved facts of a fragment, in addition to its tensors."""

    optimizer_steps: int
    """Number of steps of its outer optimizer with its state, which is less than that of outer
    rounds after plain averages. On an island, whose syncer has the optimizer: the version."""
    weight: float = 0.0
    """Weight of the inner steps whose delta was not sent yet."""
    delta_norms: list[float] = field(default_factory=list)
    sent_step: int = 0
    """This and the following fields describe the round in flight, if there is one."""
    participants: int = 0
    flags: int = 0
    is_in_model: bool = True
    """Whether the parameters contain the work that was sent."""


@dataclass
class OuterFacts:
    """Saved facts of the outer loop of a worker, in addition to its tensors. Can be stored as
    JSON."""

    step: int
    """Inner steps so far."""
    progress: float
    """Completed share of the run, 0 if its length is unknown."""
    settings: dict[str, Any]
    """Settings on which the state depends."""
    layout: list[list[str]]
    """Names of the parameters of each fragment."""
    fragments: list[FragmentFacts] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    """Indices of fragments, in the order in which they were sent."""
    healed: int = 0
    """Number of fragments that were reset to the shared parameters so far."""
    island: str = ""
    """What an island knows of its run."""

    @property
    def ended_beginning(self) -> int:
        """Last step of `diloco.beginning`. 0: there was none, or it was not over."""
        beginning = self.settings.get(BEGINNING_SETTING)
        return int(beginning[0]) if beginning and beginning[0] <= self.step else 0

    def for_new_worker(self) -> "OuterFacts":
        """Return the facts for a worker that the saved run did not have.

        It has nothing to send, and has sent nothing of what is in flight.
        """
        fragments = [
            replace(fragment, weight=0.0, delta_norms=[], is_in_model=False)
            for fragment in self.fragments
        ]
        return replace(self, healed=0, fragments=fragments)


@dataclass
class SavedState:
    """State of the outer loop to resume from, beside the model and the inner optimizer."""

    facts: OuterFacts
    """Facts of this worker."""
    tensors: Named
    """Equal on all workers: outer/NAME, next/NAME (fragments in flight), and the states of the
    outer optimizer, such as momentum/NAME. This worker's: sent/NAME (of a sparse codec, in
    flight)."""

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "SavedState":
        """Return the state from a dictionary that `to_dict` has returned."""
        try:
            facts = msgspec.convert(state["facts"], OuterFacts)
            tensors = msgspec.convert(state["tensors"], Named)
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise UserError(
                "the saved outer state must be what StreamingDiLoCo.state_dict() has returned, a "
                f"dictionary with facts and tensors ({cause_of(error)}): pass that of a checkpoint"
            ) from error
        return cls(facts, tensors)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of tensors and JSON values, which any checkpoint can contain."""
        return {"facts": asdict(self.facts), "tensors": self.tensors}

    def drop_unsent(self, fragments: Iterable[int]) -> None:
        """Leave nothing to send of fragments, such as those that were reset."""
        for index in fragments:
            self.facts.fragments[index].weight = 0.0

    @staticmethod
    def of_model(states: Sequence[OuterState], config: DiLoCoConfig, step: int) -> "SavedState":
        """Return the state of a run that begins at a step with the parameters of the model, and has
        sent nothing yet. It has the memory of the model."""
        facts = OuterFacts(
            step=step,
            progress=0.0,
            settings=resume_settings(config),
            layout=layout_of(states),
            fragments=[FragmentFacts(optimizer_steps=0) for _ in states],
        )
        parts = [part for state in states for part in state.fragment.parts]
        shared = {shared_parameter_name(part.name): part.parameter.detach() for part in parts}
        return SavedState(facts, shared)

    @staticmethod
    def template(
        model: nn.Module, facts: OuterFacts, names: Iterable[str], mesh: DeviceMesh | None
    ) -> "SavedState":
        """Return zeros in host memory for the names of a checkpoint, which are then filled in
        place."""
        parameters = dict(model.named_parameters())
        saved = SavedState(facts, {})
        known = kinds()
        for key in names:
            kind, _, name = key.partition("/")
            if kind in known:
                size = local_rows(name, parameters[name].detach()).numel()
                room = torch.zeros(size, dtype=torch.float32)
                saved.tensors[key] = shaped_like(parameters[name], room, mesh)
        return saved

    def kind(self, kind: str) -> Named:
        """Return the tensors of one kind by the name of their parameter."""
        prefix = f"{kind}/"
        return {
            key.removeprefix(prefix): value
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }


def shaped_like(parameter: Tensor, flat: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Shape this rank's values like a parameter, sharded on its mesh or on another one.

    `mesh`: the values move to its devices. None: they stay where they are, such as those of a model
    on GPUs that FSDP2 offloads to the host.
    """
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return flat.view(value.shape)
    local = flat.view(value.to_local().shape)
    if mesh is None and flat.device.type != value.device_mesh.device_type:
        shaped = torch.empty_like(value, dtype=flat.dtype, device=flat.device)
        local_of(shaped).copy_(local)  # `from_local` would move them to the devices of the mesh
        return shaped
    return DTensor.from_local(
        local,
        mesh or value.device_mesh,
        value.placements if mesh is None else value.placements[-mesh.ndim :],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


# --- save -----------------------------------------------------------------------------------------


@torch.no_grad()
def save(
    states: Sequence[OuterState],
    weights: Sequence[float],
    in_flight: Mapping[int, Round],
    facts: OuterFacts,
    mesh: DeviceMesh | None,
) -> SavedState:
    """Copy a state to host memory, after the exchanges of its fragments in flight."""
    saved = SavedState(replace(facts, fragments=[], in_flight=list(in_flight)), {})
    for index, (state, weight) in enumerate(zip(states, weights, strict=True)):
        fragment = FragmentFacts(
            optimizer_steps=state.optimizer_steps,
            weight=weight,
            delta_norms=list(state.norms.latest),
        )
        if (round_ := in_flight.get(index)) is not None:
            fragment.sent_step = round_.sent_step
            fragment.participants = round_.participants
            fragment.flags = round_.flags
            fragment.is_in_model = round_.is_in_model
        buffers = buffers_of(state, in_flight=round_ is not None).items()
        copies = {kind: copy_to_host(buffer) for kind, buffer in buffers}
        if state.outer.is_cuda:
            torch.cuda.current_stream(state.outer.device).synchronize()
        for kind, copied in copies.items():
            saved.tensors |= named(kind, state, copied, mesh=mesh)
        saved.facts.fragments.append(fragment)
    return saved


def saved_bytes(config: DiLoCoConfig) -> int:
    """Return the most bytes per parameter that a save copies to host memory: `buffers_of`, if all
    fragments are in flight."""
    if config.overlap.delay == 0:  # nothing is in flight between two steps
        return 4 * (1 + len(config.outer_optimizer.rule.slots))
    return state_bytes(config)


def buffers_of(state: OuterState, *, in_flight: bool) -> Named:
    """Return the buffers of a fragment that are saved, by their kind."""
    buffers = {SHARED: state.outer, **state.slots}
    if in_flight:
        buffers[NEXT] = state.delta
    if in_flight and state.sent is not None:
        buffers[SENT] = state.sent
    return buffers


def named(kind: str, state: OuterState, buffer: Tensor, mesh: DeviceMesh | None = None) -> Named:
    """Return views of a fragment's flat buffer as tensors of a saved state."""
    parts = zip(state.fragment.parts, state.views(buffer), strict=True)
    return {f"{kind}/{part.name}": shaped_like(part.parameter, view, mesh) for part, view in parts}


# --- load -----------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """Describes what peers have to know of a loaded state, beside the buffers that were filled."""

    fragments: list[FragmentFacts]
    """Facts of each fragment."""
    in_flight: list[int]
    """Fragments in flight, in the order in which they were sent."""
    reset: set[str]
    """Names of the parameters that were reset to the shared ones, because the delta in flight of
    their fragment was unusable."""
    notes: list[str]
    """A line for each thing that could not be kept."""


@torch.no_grad()
def load(
    states: Sequence[OuterState], saved: SavedState, config: DiLoCoConfig, mixing: float
) -> Loaded:
    """Fill the buffers.

    `mixing`: usual share of the local parameters, for fragments in flight that are applied now.
    """
    facts = saved.facts
    notes = list[str]()
    reset = set[str]()
    settings = resume_settings(config)
    before = facts.settings
    in_flight = list(facts.in_flight)
    fragments = list(facts.fragments)
    changed = {key for key in settings if settings[key] != before.get(key)}
    layout = layout_of(states)
    has_new_layout = facts.layout != layout
    if has_new_layout:
        # A new fragment takes the facts of the saved one that had its first parameter. The norms
        # are those of other parameters, so they start anew.
        pairs = zip(facts.layout, fragments, strict=True)
        holders = {name: fragment for names, fragment in pairs for name in names}
        fragments = [replace(holders[names[0]], delta_norms=[]) for names in layout]
    if "diloco.sync_every" in changed:  # deltas of more steps are larger
        fragments = [replace(fragment, delta_norms=[]) for fragment in fragments]
    # What is in flight is due by the saved schedule, for the saved layout and codec. The outer
    # optimizer has already taken its step, so a change of it does not matter.
    if in_flight and (has_new_layout or changed - {OPTIMIZER}):
        what = "turns have" if has_new_layout or changed - {OPTIMIZER, SPARSE} else "the codec has"
        notes.append(f"{len(in_flight)} fragments in flight are applied now: {what} changed")
        reset = apply_early(states, saved, mixing)
        in_flight = []
    values = {kind: saved.kind(kind) for kind in kinds()}
    if OPTIMIZER in changed:
        old = before[OPTIMIZER]
        new = settings[OPTIMIZER]
        notes.append(f"{OPTIMIZER} was {old} and is {new}: its state starts from zero")
        values |= {slot: {} for slot in config.outer_optimizer.rule.slots}
        fragments = [replace(fragment, optimizer_steps=0) for fragment in fragments]
    elif any(
        fragment.optimizer_steps and not values[slot]
        for slot in states[0].slots
        for fragment in fragments
    ):
        notes.append("the checkpoint has no state of the outer optimizer: it starts from zero")
        fragments = [replace(fragment, optimizer_steps=0) for fragment in fragments]
    for index, (state, fragment) in enumerate(zip(states, fragments, strict=True)):
        for kind, buffer in buffers_of(state, in_flight=index in in_flight).items():
            if not values[kind]:  # what was not saved starts from zero
                buffer.zero_()
                continue
            for part, view in zip(state.fragment.parts, state.views(buffer), strict=True):
                view.copy_(local_rows(part.name, values[kind][part.name]))
        state.resume(fragment.delta_norms, fragment.optimizer_steps, in_flight=index in in_flight)
    return Loaded(fragments, in_flight, reset, notes)


def layout_of(states: Sequence[OuterState]) -> list[list[str]]:
    return [[part.name for part in state.fragment.parts] for state in states]


def check_same_model(states: Sequence[OuterState], saved: SavedState) -> None:
    parts = [part for state in states for part in state.fragment.parts]
    mine = {part.name: tuple(part.parameter.shape) for part in parts}
    theirs = {name: tuple(value.shape) for name, value in saved.kind(SHARED).items()}
    if differing := differences(mine, theirs):
        raise UserError(
            f"the saved outer state belongs to another model ({len(differing)} parameters differ): "
            + "; ".join(differing[:3])
        )


def differences(
    mine: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Describe the parameters whose shapes differ."""
    return [
        f"{name} is {mine.get(name, 'absent')} here and {theirs.get(name, 'absent')} there"
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    ]


@torch.no_grad()
def write_shared(model: nn.Module, saved: SavedState, *, ends_rounds: bool = False) -> None:
    """Copy the shared parameters of a saved state to a model. `ends_rounds`: also those of the
    rounds in flight, which had arrived when the state was saved."""
    shared = saved.kind(SHARED)
    if ends_rounds:
        shared |= saved.kind(NEXT)
    for name, parameter in model.named_parameters():
        if name in shared:  # else it is frozen
            local_rows(name, parameter.detach()).copy_(local_rows(name, shared[name]))


@torch.no_grad()
def apply_early(states: Sequence[OuterState], saved: SavedState, mixing: float) -> set[str]:
    """Apply saved fragments in flight to the model and to the tensors of the saved state.

    Return the names of the parameters that were reset. `mixing`: usual share of the local
    parameters.
    """
    reset = set[str]()
    facts = saved.facts
    shared = saved.kind(SHARED)
    arrived = saved.kind(NEXT)
    sent = saved.kind(SENT)
    parts = [part for state in states for part in state.fragment.parts]
    locals_ = {part.name: part.local() for part in parts}
    for index in facts.in_flight:
        fragment = facts.fragments[index]
        mode, share = mode_after(
            fragment.flags,
            participants=fragment.participants,
            mixing=mixing,
            is_sparse=bool(facts.settings.get(SPARSE)),
            is_in_model=fragment.is_in_model,
        )
        for name in facts.layout[index]:
            local = locals_[name]
            following = local_rows(name, arrived[name])
            before = local_rows(name, shared[name])
            if mode in (Mode.ADD, Mode.TAKE_BACK):
                change = following - before
                if mode is Mode.TAKE_BACK:
                    take_back(change, local_rows(name, sent[name]))
                local.copy_(local.float() + change.to(local.device))
            elif mode is Mode.RESET:  # 0 * NaN is NaN
                local.copy_(following)
                reset.add(name)
            else:
                local.copy_(share * local.float() + (1 - share) * following.to(local.device))
            before.copy_(following)
    facts.in_flight = []
    return reset
