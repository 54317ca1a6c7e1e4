import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from tests.export.reading import read_weights
from tests.processes import ProcessPool
from tests.test_trainer import settings, train
from torchtitan_diloco.config import load_config
from torchtitan_diloco.export.weights import new_folder
from torchtitan_diloco.models import build_model

TENSORS = {
    "a": torch.arange(6.0).view(3, 2),
    "b": torch.arange(4).bfloat16(),
    "empty": torch.zeros(0, 3),
}


def save_sharded(folder: Path) -> None:
    with new_folder(folder) as incomplete:
        save_torch_state_dict(TENSORS, incomplete, max_shard_size=16)


def save_one_file(folder: Path) -> None:
    with new_folder(folder) as incomplete:
        save_file(TENSORS, incomplete / "model.safetensors")


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("save", [save_one_file, save_sharded])
def test_weights_are_read_as_written_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], None]
) -> None:
    folder = tmp_path / "new" / "folder"

    def crash(*_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            save(folder)
    assert not list(folder.parent.iterdir()), "nothing is left that looks complete"
    save(folder)
    assert_same(read_weights(folder), TENSORS)
    with pytest.raises(ValueError, match=r"folder is not empty; choose another folder"):
        save(folder)
    assert_same(read_weights(folder), TENSORS)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    save_one_file(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*: give a complete"):
        read_weights(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.safetensors cannot be read .*: give a complete"):
        read_weights(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"the folder has no \.safetensors file"):
        read_weights(tmp_path)


# --- model.weights --------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused(text: Path, tmp_path: Path) -> None:
    config, weights = load_config("debug", settings(text)), tmp_path / "weights"
    model = build_model(config.model, 320, config.training.sequence_length).to_empty(device="cpu")
    state = model.state_dict()
    weights.mkdir()
    save_file(state, weights / "model.safetensors")
    part = tmp_path / "part.safetensors"  # such as one file of several
    save_file({name: state[name] for name in list(state)[:2]}, part)
    for changes, message in (
        (
            {"model.weights": weights, "model.feed_forward": 64},
            r'model.weights = ".*" does not fit .* blocks.0.feed_forward.up.weight is 48x32 there',
        ),
        ({"model.weights": text.parent / "nowhere"}, r'model.weights = ".*nowhere cannot be read'),
        ({"model.weights": part}, r"is absent there and \d+x32 in this run"),
    ):
        with pytest.raises(ValueError, match=message):
            train(settings(text, **changes))


def train_from_own_weights(chosen: dict[str, str], folder: Path) -> None:
    train(chosen | {"model.weights": f"{folder}/{os.environ['RANK']}.safetensors"})


def test_workers_with_different_weights_are_refused(
    text: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    for rank in range(2):
        save_file({"a": torch.full((3,), float(rank))}, tmp_path / f"{rank}.safetensors")
    chosen = settings(text, diloco__workers=2)
    message = r"started differently.*\n  model.weights: \w{16} on rank 0"
    with pytest.raises(AssertionError, match=message):
        processes.run(train_from_own_weights, 2, chosen, tmp_path)
