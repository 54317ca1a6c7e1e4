"""A new run that starts from given weights: `model.weights`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.processes import ProcessPool
from tests.test_checkpoint import FP32, chosen, last, run, tensors
from tests.test_trainer import records
from torchtitan_diloco.export.dense import save_safetensors


def written_weights(text: Path) -> tuple[Path, dict[str, Tensor]]:
    """The shared parameters of a run, as a safetensors file."""
    run(chosen(text, "first", **FP32 | {"diloco.workers": 1}, checkpoint__every=0))
    weights = {
        name.removeprefix("shared/outer/"): value
        for name, value in tensors(last(text.parent / "first")).items()
        if name.startswith("shared/outer/")
    }
    folder = text.parent / "weights"
    save_safetensors(folder, weights, metadata={})
    return folder, weights


@pytest.mark.parametrize("size", [1, 4])
def test_a_run_starts_from_given_weights(text: Path, processes: ProcessPool, size: int) -> None:
    folder, weights = written_weights(text)
    workers = {
        "diloco.workers": 1 if size == 1 else 2,
        "model.weights": folder,
        "optimizer.lr": 1e-9,
        "training.steps": 1,
    }
    wanted = chosen(text, "second", **FP32 | workers)
    if size == 1:
        run(wanted)
    else:
        processes.run(run, size, wanted)
    started = tensors(last(text.parent / "second"))
    for name, value in weights.items():
        torch.testing.assert_close(started[f"shared/outer/{name}"], value, rtol=0, atol=1e-7)
    assert records(text.parent / "second")[0]["train/tokens_global"] == 12 * 32, (
        "a new run, from its first token"
    )


def test_weights_that_do_not_fit(text: Path) -> None:
    folder, _ = written_weights(text)
    with pytest.raises(
        ValueError,
        match=r'model.weights = ".*" does not fit .* blocks.0.feed_forward.up.weight is 48x32 there',
    ):
        run(chosen(text, "second", model__weights=folder, model__feed_forward=64))
    with pytest.raises(ValueError, match="nowhere"):
        run(chosen(text, "third", model__weights=text.parent / "nowhere"))
