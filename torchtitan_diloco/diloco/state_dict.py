"""The outer loop's part of a checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.diloco.shared_model import shaped_like


@dataclass
class SavedState:
    facts: dict[str, Any]
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    exchanged: dict[str, float]

    @staticmethod
    def template(
        model: nn.Module,
        facts: dict[str, Any],
        shared_names: Iterable[str],
        own_names: Iterable[str],
        mesh: DeviceMesh | None,
    ) -> "SavedState":
        parameters = dict(model.named_parameters())

        def zeros(key: str) -> Tensor:
            parameter = parameters[key.partition("/")[2]]
            local = parameter.detach()
            size = (local.to_local() if hasattr(local, "to_local") else local).numel()
            return shaped_like(parameter, torch.zeros(size), mesh)

        shared = {name: zeros(name) for name in shared_names}
        return SavedState(facts, shared, {name: zeros(name) for name in own_names}, {})


def facts_for_new_worker(facts: dict[str, Any]) -> dict[str, Any]:
    return facts | {"fragments": [record | {"weight": 0.0} for record in facts["fragments"]]}


def shared_parameter_name(name: str) -> str:
    return f"outer/{name}"


def from_dict(state: dict[str, Any]) -> SavedState:
    state = dict(state)
    shared = {f"outer/{name}": value for name, value in state.pop("outer").items()}
    shared |= {f"next/{name}": value for name, value in state.pop("next").items()}
    for number, slot in enumerate(state.pop("slots")):
        shared |= {f"slot-{number}/{name}": value for name, value in slot.items()}
    own = {f"residual/{name}": value for name, value in state.pop("residual").items()}
    return SavedState(state, shared, own, state.pop("exchanged", {}))


def to_dict(saved: SavedState) -> dict[str, Any]:
    kinds: dict[str, dict[str, Tensor]] = {"outer": {}, "next": {}, "residual": {}}
    for key, value in (saved.shared | saved.own).items():
        kind, _, name = key.partition("/")
        kinds.setdefault(kind, {})[name] = value
    slots = sorted(
        (kind for kind in kinds if kind.startswith("slot-")), key=lambda kind: int(kind[5:])
    )
    return saved.facts | {
        "outer": kinds["outer"],
        "next": kinds["next"],
        "residual": kinds["residual"],
        "slots": [kinds[kind] for kind in slots],
    }
