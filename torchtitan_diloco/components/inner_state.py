"""The model, inner optimizer and random states of a worker as named tensors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from torchtitan_diloco.components.checkpoint_schema import MODEL, OPTIMIZER, RANDOM


def inner_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return the parameters and the optimizer's state by name: the tensors themselves.

    State that does not exist yet is created as AdamW does it in its first step.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"{MODEL}{name}": parameter.detach() for parameter, name in names.items()}
    on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter.detach())
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
        for key, value in state.items():
            tensors[f"{OPTIMIZER}{key}/{names[parameter]}"] = value
    return tensors


RandomState = tuple[Callable[[], Tensor], Callable[[Tensor], None]]


def random_states(device: torch.device, rank: int) -> dict[str, RandomState]:
    """Return the functions that get and set the random states of a rank in its worker, by name."""
    states: dict[str, RandomState] = {
        f"{RANDOM}cpu/{rank}": (torch.get_rng_state, torch.set_rng_state)
    }
    if device.type == "cuda":
        states[f"{RANDOM}cuda/{rank}"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return states


def copy_to_host(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a copy in host memory, sharded over `mesh`, which holds the ranks of this worker.

    With data parallelism, a value is sharded along the last dimension of its own mesh.
    """
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    assert mesh is not None
    local, placements = value.to_local().to("cpu", copy=True), value.placements[-mesh.ndim :]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
    )
