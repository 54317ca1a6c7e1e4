"""A new run that starts from given weights: the way back from an export."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_diloco.export.dense import load_safetensors


@torch.no_grad()
def load_initial_weights(model: nn.Module, path: str) -> None:
    """Every rank reads the file and keeps its part of it. All parameters have to be there, and nothing else."""
    try:
        given = load_safetensors(Path(path).expanduser())
    except ValueError as error:
        raise ValueError(f'model.weights = "{path}": {error}') from error
    wanted = dict(model.named_parameters())
    differing = [
        name for name in {**wanted, **given} if _shape(wanted.get(name)) != _shape(given.get(name))
    ]
    if differing:
        name = differing[0]
        raise ValueError(
            f'model.weights = "{path}" does not fit the model: {name} is {_shape(given.get(name))} there and '
            f"{_shape(wanted.get(name))} in this run, and {len(differing) - 1} more differ. Set the [model] section, the "
            "tokenizer and training.sequence_length as in the run that was exported"
        )
    for name, parameter in wanted.items():
        value: Tensor = given[name].to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(value)


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape))
