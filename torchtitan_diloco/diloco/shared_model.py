"""The shared parameters in the shape of the model: as a state dict, or lent to the model for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_diloco.diloco.fragments import check_identity
from torchtitan_diloco.diloco.outer_state import OuterState


def shared_state_dict(model: nn.Module, states: Sequence[OuterState]) -> dict[str, Tensor]:
    drop_gathered(model)
    runs: dict[nn.Parameter, dict[int, Tensor]] = {}
    for state in states:
        check_identity(model, state.fragment)
        for part, view in zip(state.fragment.parts, state.views(state.outer), strict=True):
            runs.setdefault(part.parameter, {})[part.run] = view
    parameters = dict(model.named_parameters(remove_duplicate=False))
    result: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        parameter = parameters.get(name)
        if parameter is None or parameter not in runs:
            result[name] = value.detach().clone()
        else:
            rows = runs[parameter]
            result[name] = shaped_like(
                parameter, torch.cat([rows[run] for run in range(len(rows))])
            )
    return result


@contextmanager
def lend_shared_parameters(model: nn.Module, states: Sequence[OuterState]) -> Iterator[None]:
    drop_gathered(model)
    saved = [[part.local().clone() for part in state.fragment.parts] for state in states]
    for state in states:
        state.write_model()
    try:
        yield
    finally:
        drop_gathered(model)
        with torch.no_grad():
            for state, locals_before in zip(states, saved, strict=True):
                for part, before in zip(state.fragment.parts, locals_before, strict=True):
                    part.local().copy_(before)


def drop_gathered(model: nn.Module) -> None:
    """FSDP2 may keep full parameters after a forward pass without a backward pass: they hide the sharded ones, and must
    not outlive a change of those."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shaped_like(parameter: nn.Parameter, flat: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """A parameter's values on this rank, sharded as the parameter is; `mesh`: of the same ranks, on another device."""
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
