from pathlib import Path

from torch import Tensor

from torchtitan_diloco.export.weights import open_weights


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, or of the files in a folder."""
    with open_weights(path) as stored:
        return {name: file.get_tensor(name) for name, file in stored.items()}
