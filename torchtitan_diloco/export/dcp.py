"""Folders of torch.distributed.checkpoint (DCP): read one tensor at a time, and written.

DCP keeps the list of a folder's tensors as a pickle, which could run any code. It is read here with
a list of the classes that such a list consists of, so that a folder of a stranger can do no harm.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_diloco.export.dcp_folder import METADATA_NAME

DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
KNOWN = {
    "collections": {"OrderedDict"},
    "pathlib": PATHS,
    "pathlib._local": PATHS,  # Python 3.13
    "torch": {"Size", *DTYPES},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What the metadata of DCP consists of, by module. None of it does anything but hold values."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder, with the methods of an open safetensors file."""

    folder: Path
    name: str
    metadata: TensorStorageMetadata

    def get_slice(self, _: str) -> "Stored":
        return self

    def get_shape(self) -> list[int]:
        return list(self.metadata.size)

    def get_tensor(self, _: str) -> Tensor:
        """Read the whole tensor, on this rank alone. Raise OSError if it cannot be read."""
        value = torch.empty(self.metadata.size, dtype=self.metadata.properties.dtype)
        try:
            with _alone():
                load({self.name: value}, storage_reader=Reader(self.folder), no_dist=True)
        except CheckpointException as error:
            causes = [str(cause) for cause, _ in error.failures.values()]
            raise OSError(f"{self.name}: {causes[0]}") from error
        return value


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder by name. Raise OSError if its metadata cannot be read."""
    entries = Reader(folder).read_metadata().state_dict_metadata.items()
    return {
        name: Stored(folder, name, metadata)
        for name, metadata in entries
        if isinstance(metadata, TensorStorageMetadata)
    }


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    with _alone():
        save(dict(tensors), checkpoint_id=folder, no_dist=True)


class Reader(FileSystemReader):
    """Reader of a folder, which runs no code that the folder has."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / METADATA_NAME
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError) as e:
            raise OSError(f"{METADATA_NAME} is damaged, or of another program: {e}") from e
        if not isinstance(metadata, Metadata):
            raise OSError(f"{METADATA_NAME} is damaged, or of another program")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def _alone() -> Iterator[None]:
    """Leave out the warning of DCP that one process reads or writes, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
