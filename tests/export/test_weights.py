"""Files of weights: what does not fit a run is refused."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.export.reading import read_weights
from tests.processes import ProcessPool
from tests.test_trainer import settings, train


def test_a_file_that_is_truncated_or_missing_is_named(tmp_path: Path) -> None:
    message = r"model\.safetensors cannot be read .*: give a complete"
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=message):
        read_weights(path)
    with pytest.raises(ValueError, match=r"the folder has no model\*\.safetensors: give "):
        read_weights(tmp_path)
    save_file({"a": torch.zeros(9)}, path)
    content = path.read_bytes()
    for keep in (0, 5, 60, len(content) - 1):
        path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=message):
            read_weights(path)


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
