"""The model, inner optimizer and random states of a worker as named tensors."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_schema import (
    MODEL,
    OPTIMIZER,
    OPTIMIZER_STEPS,
    RANDOM,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


def inner_state(
    model: nn.Module, optimizer: AdamW, mesh: DeviceMesh | None, rank: int
) -> dict[str, Tensor]:
    """Return copies in host memory. `mesh` holds this worker's ranks, `rank` is the one in it."""
    state: dict[str, Tensor] = {}
    steps: list[Tensor] = []
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert parameter in trained or not parameter.requires_grad, f"{name} is not resharded"
        state[f"{MODEL}{name}"] = _on_host(parameter, mesh)
        moments = optimizer.state.get(parameter, {})
        steps.append(moments["step"].detach() if moments else torch.zeros(()))
        for moment in MOMENTS:
            value = moments[moment] if moments else torch.zeros_like(parameter)
            state[f"{OPTIMIZER}{moment}/{name}"] = _on_host(value, mesh)
    # Stacked first: one wait for a GPU, not one for each parameter.
    state[OPTIMIZER_STEPS] = torch.stack([step.to(steps[0].device) for step in steps]).cpu()
    state[f"{RANDOM}cpu/{rank}"] = torch.get_rng_state()
    if next(model.parameters()).is_cuda:
        state[f"{RANDOM}cuda/{rank}"] = torch.cuda.get_rng_state()
    return state


def _on_host(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a copy in host memory, sharded over `mesh`.

    With data parallelism, a value is sharded along the last dimension of its own mesh.
    """
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.to("cpu", copy=True)
    assert mesh is not None
    local, placements = value.to_local().to("cpu", copy=True), value.placements[-mesh.ndim :]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def inner_template(
    model: nn.Module, optimizer: AdamW, *, parameters: bool = True
) -> dict[str, Tensor]:
    """Return the tensors that a load fills: the parameters and moments themselves."""
    template = {OPTIMIZER_STEPS: torch.zeros(len(list(model.parameters())))}
    for name, parameter in model.named_parameters():
        if parameters:
            template[f"{MODEL}{name}"] = parameter.detach()
        moments = optimizer.state[parameter]
        for moment in MOMENTS:
            moments.setdefault(moment, torch.zeros_like(parameter.detach()))
            template[f"{OPTIMIZER}{moment}/{name}"] = moments[moment]
    return template


def set_optimizer_steps(model: nn.Module, optimizer: AdamW, steps: Tensor) -> None:
    on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
    for parameter, step in zip(model.parameters(), steps, strict=True):
        device = parameter.device if on_device else "cpu"
        optimizer.state[parameter]["step"] = step.clone().to(device)
