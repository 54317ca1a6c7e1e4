import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

from tests.components.test_resume import run, tensors
from tests.processes import ProcessPool
from tests.test_trainer import records, settings
from torchtitan_diloco.components.checkpoint_schema import checkpoint_path
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.export import weights
from torchtitan_diloco.export.weights import read_weights, write_weights

SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
TENSORS = {
    "a": torch.arange(6.0).view(3, 2),
    "b": torch.arange(4).bfloat16(),
    "empty": torch.zeros(0, 3),
    "integers": torch.arange(5),
}


def three() -> dict[str, Tensor]:
    return {name: torch.arange(4.0) + number for number, name in enumerate(("a", "b", "c"))}


def save_sharded(tensors: dict[str, Tensor], folder: Path, metadata: dict[str, str]) -> None:
    save_torch_state_dict(tensors, folder, metadata=metadata, max_shard_size=16)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert torch.equal(value, second[name]), name


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_weights(tmp_path / "sharded", three(), {}, save=save_sharded)
    return tmp_path / "sharded"


def test_one_file_is_read_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_weights(folder, TENSORS, {"step": "7"})
    path = folder / "model.safetensors"
    assert list(folder.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"step": "7", "format": "pt"}
    assert_same(read_weights(folder), TENSORS)
    assert_same(read_weights(path), TENSORS)


def test_shards_are_read_by_their_index(sharded: Path) -> None:
    assert {path.name for path in sharded.iterdir()} == {*SHARDS, INDEX}
    assert_same(read_weights(sharded), three())
    assert_same(read_weights(sharded / SHARDS[1]), {"b": three()["b"]})


@pytest.mark.parametrize("save", [weights.save_one_file, save_sharded])
def test_a_crash_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: weights.Save
) -> None:
    def crash(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(weights, "force_to_disk", crash)
        with pytest.raises(KeyboardInterrupt):
            write_weights(tmp_path, three(), {}, save=save)
    assert not list(tmp_path.glob("[!.]*"))
    write_weights(tmp_path, three(), {}, save=save)
    assert_same(read_weights(tmp_path), three())


def test_weights_are_never_overwritten(sharded: Path) -> None:
    with pytest.raises(ValueError, match=r"index\.json exists; choose another folder"):
        write_weights(sharded, three(), {})


def test_a_missing_file_is_named(tmp_path: Path, sharded: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.safetensors cannot be read .*: name a complete"):
        read_weights(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"/model\.safetensors cannot be read .*No such file"):
        read_weights(tmp_path)
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=rf"{SHARDS[1]} cannot be read .*No such file"):
        read_weights(sharded)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write_weights(tmp_path, three(), {})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*: name a complete"):
        read_weights(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', "\xff"])
def test_a_damaged_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"index\.json cannot be read"):
        read_weights(sharded)


# --- model.weights --------------------------------------------------------------------------------

STREAMING = {
    "diloco.method": "streaming",
    "diloco.sync_every": 6,
    "diloco.overlap.delay": 3,
    "diloco.fragments.layers_per_fragment": 1,
    "training.batch_size": 1,
    "checkpoint.at_end": "true",
}


def shared_parameters(folder: Path, step: int) -> dict[str, Tensor]:
    prefix = f"shared/{shared_parameter_name('')}"
    found = tensors(checkpoint_path(folder, step)).items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


@pytest.fixture
def trained(text: Path) -> dict[str, Tensor]:
    """Write the shared parameters of a run to `weights/`."""
    folder = text.parent / "first"
    run(settings(text, **STREAMING, run__folder=folder, training__steps=4))
    parameters = shared_parameters(folder, 4)
    write_weights(text.parent / "weights", parameters, {})
    return parameters


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (4, 2)])
def test_a_run_starts_from_given_weights(
    text: Path, trained: dict[str, Tensor], processes: ProcessPool, size: int, workers: int
) -> None:
    folder = text.parent / "second"
    changes = {
        "run.folder": folder,
        "diloco.workers": workers,
        "model.weights": text.parent / "weights",
        "optimizer.lr": 1e-9,
        "training.steps": 1,
    }
    wanted = settings(text, **STREAMING | changes)
    if size == 1:
        run(wanted)
    else:
        processes.run(run, size, wanted)
    started = shared_parameters(folder, 1)
    for name, value in trained.items():
        torch.testing.assert_close(started[name], value, rtol=0, atol=1e-7)
    assert records(folder)[0]["train/tokens_global"] == 12 * 32  # a new run, from its first token


@pytest.mark.usefixtures("trained")
def test_weights_that_do_not_fit_are_refused(text: Path, sharded: Path) -> None:
    folder = text.parent / "weights"
    message = r'model.weights = ".*" does not fit .* blocks.0.feed_forward.up.weight is 48x32 there'
    with pytest.raises(ValueError, match=message):
        run(settings(text, model__weights=folder, model__feed_forward=64))
    with pytest.raises(ValueError, match=r'model.weights = ".*nowhere cannot be read'):
        run(settings(text, model__weights=text.parent / "nowhere"))
    # An index that names the file of another tensor
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["b"] = SHARDS[0]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r'model.weights = ".*" does not fit the model'):
        run(settings(text, model__weights=sharded))
