"""A worker without a checkpoint gets the state of the first one that has it."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.diloco.toy import join
from tests.processes import ProcessPool
from torchtitan_diloco.components.new_workers import copy_to_others
from torchtitan_diloco.diloco.state_dict import SENT

NAMES = ("model.weight", "model.zero", "optimizer.weight.step", f"{SENT}weight")


def state(worker: int, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return tensors of several types, sizes and strides, full of the number of a worker."""
    tensors = {
        "model.weight": torch.full((40, 70), worker, dtype=torch.bfloat16).t(),
        "model.zero": torch.empty(0),
        "optimizer.weight.step": torch.tensor(float(worker)),
        "optimizer.other.exp_avg": torch.full((3,), float(worker), dtype=torch.float64),
        f"{SENT}weight": torch.full((5,), float(worker)),
    }
    return {name: tensors[name] for name in names}


def _copy(readers: list[int], more: list[int]) -> dict[str, Tensor]:
    """Copy between three workers, of which those in `more` have one more tensor."""
    world = replace(join(3, 1), timeout_seconds=0.1)  # messages of 1,250 bytes
    names = (*NAMES, "optimizer.other.exp_avg") if world.worker in more else NAMES
    tensors = state(world.worker, names)
    copy_to_others(tensors, world, readers)
    return tensors


def test_only_workers_without_a_checkpoint_take_the_state_of_the_first(
    processes: ProcessPool,
) -> None:
    """Readers keep what they have read, also if it has other names than that of the first."""
    cases = [([0, 1], [1]), ([0, 1], [0, 2]), ([1], []), ([2, 1], [0, 2]), ([0, 2], [2])]
    for readers, more in cases:
        results = processes.run(_copy, 3, readers, more)
        for worker, tensors in enumerate(results):
            source = worker if worker in readers else readers[0]
            expected = state(source, tuple(tensors)) | {
                name: value for name, value in state(worker, NAMES).items() if name.startswith(SENT)
            }
            for name, value in tensors.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)
