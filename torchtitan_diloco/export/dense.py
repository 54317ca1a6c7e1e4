"""Named tensors in safetensors files: one file, or several with an index, under the names that transformers expects."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_diloco.data.files import aside_path, force_to_disk, write_whole

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 2**30


def save_safetensors(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    metadata: dict[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes the tensors and returns the files, an index last. A folder that holds weights already is refused."""
    if max_shard_bytes < 1:
        raise ValueError(
            f"max_shard_bytes = {max_shard_bytes} is no size of a file; give at least 1 byte"
        )
    check_holds_no_weights(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = split_into_shards(
        {name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes
    )
    described = {
        **metadata,
        "format": "pt",
    }  # transformers refuses a file that does not name its framework
    if len(shards) == 1:
        return [_write_shard(folder / WEIGHTS_NAME, tensors, described)]
    written, weight_map = [], {}
    for number, names in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written.append(_write_shard(path, {name: tensors[name] for name in names}, described))
        weight_map.update(dict.fromkeys(names, path.name))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    # The index makes the shards a model, so it comes last: without it, what an interrupted export left is none.
    write_whole(folder / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())
    return [*written, folder / INDEX_NAME]


def check_holds_no_weights(folder: Path) -> None:
    """Of two sets of weights in one folder, readers would take one at random."""
    for name in (WEIGHTS_NAME, INDEX_NAME):
        if (folder / name).exists():
            raise ValueError(f"{folder / name} exists; choose another folder, or delete this one")


def split_into_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut where the next one would not fit any more. A larger tensor has a shard to itself."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder with one file or with shards and their index."""
    if path.is_file():
        return _read(path)
    if (path / WEIGHTS_NAME).is_file():
        return _read(path / WEIGHTS_NAME)
    if (path / INDEX_NAME).is_file():
        return _read_shards(path)
    if path.is_dir():
        raise ValueError(
            f"{path} has neither {WEIGHTS_NAME} nor {INDEX_NAME}: name the folder of a finished export, or a .safetensors file"
        )
    raise ValueError(
        f"{path} does not exist: name a .safetensors file, or a folder with {WEIGHTS_NAME} or {INDEX_NAME}"
    )


def _write_shard(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Path:
    aside = aside_path(path)
    save_file(_apart(tensors), aside, metadata=metadata)
    with aside.open("rb+") as file:
        force_to_disk(file.fileno())
    aside.replace(path)
    return path


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous and each in memory of its own, as the format wants them; copied only where they are not."""
    apart, seen = {}, set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.nbytes() != value.nbytes or (value.nbytes and storage.data_ptr() in seen):
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        apart[name] = value
    return apart


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX_NAME
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        names_of: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            names_of.setdefault(shard, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of shards ({type(error).__name__}: {error}): copy it again"
        ) from error
    missing = [shard for shard in names_of if not (folder / shard).is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(names_of)} files that {INDEX_NAME} lists, the first of them "
            f"{missing[0]}: copy the folder again, completely"
        )
    found: dict[str, Tensor] = {}
    for shard, names in names_of.items():
        content = _read(folder / shard)
        for name in names:
            if name not in content:
                raise ValueError(
                    f"{folder / shard} has no tensor {name}, which {INDEX_NAME} says is there: copy the folder again"
                )
            found[name] = content[name]
    return {name: found[name] for name in weight_map}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}): copy or export it again"
        ) from error
