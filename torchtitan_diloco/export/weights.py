"""Safetensors files: writing, reading, and the initial weights of a new run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_diloco.data.files import force_to_disk

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
Save = Callable[..., None]
"""Save tensors in a folder, with `metadata`, as files that `read_weights` reads."""


def save_one_file(tensors: dict[str, Tensor], folder: Path, metadata: dict[str, str]) -> None:
    # transformers refuses a file that does not name its framework
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt", **metadata})


def write_weights(
    folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str], save: Save = save_one_file
) -> None:
    """Write the weights of a model into a folder that has none yet.

    The files get their names once all of them are complete.
    """
    check_has_no_weights(folder)
    incomplete = folder / ".incomplete"
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    save(tensors, incomplete, metadata=metadata)
    # An index makes its files a model, so it comes last.
    for path in sorted(incomplete.iterdir(), key=lambda path: (path.name == INDEX_NAME, path.name)):
        with path.open("rb") as file:
            force_to_disk(file.fileno())
        path.replace(folder / path.name)
    incomplete.rmdir()


def check_has_no_weights(folder: Path) -> None:
    for name in (WEIGHTS_NAME, INDEX_NAME):
        if (folder / name).exists():
            raise ValueError(f"{folder / name} exists; choose another folder, or delete this one")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a folder with one file or with an index."""
    tensors: dict[str, Tensor] = {}
    reading, files = path, [path]
    try:
        if path.is_dir():
            files = [path / WEIGHTS_NAME]
            if (path / INDEX_NAME).exists():
                reading = path / INDEX_NAME
                names = set(json.loads(reading.read_bytes())["weight_map"].values())
                files = [path / name for name in sorted(names)]
        for reading in files:
            tensors |= load_file(reading)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{reading} cannot be read ({type(error).__name__}: {error}): name a complete "
            ".safetensors file, or the folder of a complete export"
        ) from error
    return tensors


@torch.no_grad()
def load_initial_weights(model: nn.Module, path: str) -> None:
    """Fill the parameters of a new run from `model.weights`. Every rank keeps its own shard."""
    try:
        weights = read_weights(Path(path).expanduser())
    except ValueError as error:
        raise ValueError(f'model.weights = "{path}": {error}') from error
    parameters = dict(model.named_parameters())
    there = {name: "x".join(map(str, tensor.shape)) for name, tensor in weights.items()}
    here = {name: "x".join(map(str, tensor.shape)) for name, tensor in parameters.items()}
    differing = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f'model.weights = "{path}" does not fit the model: {name} is '
            f"{there.get(name, 'absent')} there and {here.get(name, 'absent')} in this run, and "
            f"{len(differing) - 1} more differ. Set the [model] section, the tokenizer and "
            "training.sequence_length as in the run that was exported"
        )
    for name, parameter in parameters.items():
        value: Tensor = weights[name].to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        parameter.copy_(value)
