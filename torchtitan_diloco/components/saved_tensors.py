"""Reading the tensors of a checkpoint, on any number of ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_diloco.base.tensors import local_of, shard_rows
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import rank_file
from torchtitan_diloco.components.checkpoint_folder import Manifest

TensorShapes = dict[str, tuple[int, ...]]


class SavedTensors:
    """The tensors of a checkpoint, of any number of ranks, by name.

    Each rank has saved consecutive rows of a sharded tensor in a file of its own. This class joins
    them: the rows of a file follow those of the file of the rank before. It reads only files in the
    manifest, whose checksums have been compared before.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self.shapes: TensorShapes = {}
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        """First row, last row + 1 and file of each rank's rows, by name."""
        for file in (path / rank_file(rank) for rank in range(len(manifest.files))):
            try:
                opened: Any = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file} does not hold tensors ({error})") from None
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                shape = tuple(opened.get_slice(name).get_shape())
                if not shape:  # a number, which one rank has saved
                    self._parts[name] = [(0, 1, opened)]
                    self.shapes[name] = ()
                    continue
                start = self.shapes[name][0] if name in self.shapes else 0
                end = start + shape[0]
                self._parts.setdefault(name, []).append((start, end, opened))
                self.shapes[name] = (end, *shape[1:])

    def fill(self, template: Mapping[str, Tensor]) -> None:
        """Fill the tensors of the template, or this rank's rows of them if they are sharded."""
        for name, tensor in template.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise UserError(f"{self._path} has no {name} of shape {tuple(tensor.shape)}")
            local = local_of(tensor)
            first = 0  # row of the whole tensor that is the first one here
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                dim = mesh.ndim - 1
                rank = mesh.get_local_rank(dim)
                first = shard_rows(len(tensor), rank, mesh.size(dim)).start
            for start, end, file in self._parts[name]:
                if not tensor.dim():
                    local.copy_(file.get_tensor(name))
                    continue
                # This file has the rows from `low` to `high` of those that are needed here.
                low = max(start, first)
                high = min(end, first + len(local))
                if low < high:
                    rows = file.get_slice(name)[low - start : high - start]
                    local[low - first : high - first].copy_(rows)
