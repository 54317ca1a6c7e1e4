"""Folders of safetensors files: writing, reading, and the initial weights of a new run."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from torchtitan_diloco.models.base import copy_shard

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into. Its files are moved to `folder` once all are complete.

    The weights are moved last, and their index after them: a folder that has them is complete.
    """
    for name in (WEIGHTS_NAME, INDEX_NAME):
        if (folder / name).exists():
            raise ValueError(f"{folder / name} exists; choose another folder, or delete this one")
    incomplete = folder / ".incomplete"
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        yield incomplete
    except BaseException:
        shutil.rmtree(incomplete, ignore_errors=True)
        with suppress(OSError):  # it has other files
            folder.rmdir()
        raise
    readable = incomplete.stat().st_mode & 0o666  # safetensors ignores the umask
    names = sorted(path.name for path in incomplete.iterdir())
    for name in sorted(names, key=lambda name: (name == INDEX_NAME, name.endswith(".safetensors"))):
        with (incomplete / name).open("rb") as file:
            os.fsync(file.fileno())
        (incomplete / name).chmod(readable)
        (incomplete / name).replace(folder / name)
    incomplete.rmdir()


@torch.no_grad()
def load_initial_weights(model: nn.Module, path: str) -> None:
    """Fill the parameters of a new run from `model.weights`. Every rank keeps its own shard."""
    weights = read_weights(path)
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
        copy_shard(parameter, weights[name].to(parameter.device, parameter.dtype))


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of all safetensors files in a folder."""
    given = Path(path).expanduser()
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            tensors |= load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f'model.weights = "{path}": {file} cannot be read ({error}): give a complete '
            ".safetensors file, or the folder of a complete export"
        ) from error
    if not files:
        raise ValueError(f'model.weights = "{path}": the folder has no .safetensors file')
    return tensors
