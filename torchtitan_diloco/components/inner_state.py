"""A worker's own part of a checkpoint: its parameters, inner optimizer and random states, by name."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

MODEL, OPTIMIZER, RANDOM = "model/", "optimizer/", "random/"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = OPTIMIZER + "steps"


def on_host(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A copy in host memory, sharded as the value is over `mesh`, which is this worker's ranks on the CPU. With data
    parallelism a value is sharded inside each worker, the last dimension of its own mesh, and the workers hold the same."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.to("cpu", copy=True)
    assert mesh is not None
    local = value.to_local().to("cpu", copy=True)
    placements = value.placements[-mesh.ndim :]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def inner_state(
    model: nn.Module, optimizer: AdamW, mesh: DeviceMesh | None, rank: int
) -> dict[str, Tensor]:
    """Copies; `rank` is that within the worker."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    hidden = [
        name for name, one in model.named_parameters() if one.requires_grad and one not in trained
    ]
    assert not hidden, (
        f"FSDP2's full parameters hide the sharded ones, to which the moments belong: {hidden[:3]}"
    )
    state = {
        f"{MODEL}{name}": on_host(parameter, mesh) for name, parameter in model.named_parameters()
    }
    steps: list[Tensor] = []
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        steps.append(moments["step"].detach() if moments else torch.zeros(()))
        for moment in MOMENTS:
            state[f"{OPTIMIZER}{moment}/{name}"] = on_host(
                moments[moment] if moments else torch.zeros_like(parameter), mesh
            )
    state[STEPS] = torch.stack(
        [step.to(steps[0].device) for step in steps]
    ).cpu()  # one wait for a GPU, not one a parameter
    state |= {f"{RANDOM}cpu/{rank}": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        state[f"{RANDOM}cuda/{rank}"] = torch.cuda.get_rng_state()
    return state


def inner_template(
    model: nn.Module, optimizer: AdamW, *, parameters: bool = True
) -> dict[str, Tensor]:
    """What a load writes into: the parameters and moments themselves."""
    template: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameters:
            template[f"{MODEL}{name}"] = parameter.detach()
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter.detach())
            template[f"{OPTIMIZER}{moment}/{name}"] = state[moment]
    template[STEPS] = torch.zeros(len(list(model.parameters())))
    return template


def set_optimizer_steps(model: nn.Module, optimizer: AdamW, steps: Tensor) -> None:
    for parameter, step in zip(model.parameters(), steps, strict=True):
        device = (
            parameter.device
            if optimizer.defaults["fused"] or optimizer.defaults["capturable"]
            else "cpu"
        )
        optimizer.state[parameter]["step"] = step.clone().to(device)
