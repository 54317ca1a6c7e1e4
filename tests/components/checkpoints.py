"""Checkpoints that are written by hand, and what is done to their files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchtitan_diloco.components.checkpoint import Checkpointer, RunPart, RunState, write_tensors
from torchtitan_diloco.components.checkpoint_folder import (
    Manifest,
    begin,
    checkpoint_path,
    complete,
    complete_checkpoints,
    incomplete,
    step_of,
)
from torchtitan_diloco.config.schema import Checkpoint
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.distributed.world import World

TENSORS = "rank-0.safetensors"
EMPTY = Manifest(step=0, tokens=0, workers=1, config="")
ALONE = World(rank=0, size=1, workers=1, device=torch.device("cpu"))


def saved_steps(folder: Path) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(folder)]


def write_checkpoint(folder: Path, step: int, ranks: int = 1, **changes: Any) -> Path:
    """Write a checkpoint, in the folder of a worker, of five rows and a number."""
    path = checkpoint_path(folder, step)
    files = dict[str, tuple[int, int]]()
    begin(path)
    for rank in range(ranks):
        rows = {"rows": torch.arange(10.0).view(5, 2)[2 * rank :][: 2 if ranks > 1 else 5]}
        own = {} if rank else {"number": torch.tensor(45.0)}
        files |= write_tensors(incomplete(path), rows | own, rank)
    complete(path, replace(EMPTY, step=step, files=files, **changes).to_json())
    return path


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def toy_state(weight: float = 0.0, parts: Sequence[RunPart[Any]] = ()) -> RunState:
    """Return the state of a small model, all of whose weights are this number."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, weight)
    optimizer = torch.optim.AdamW(model.parameters())
    return RunState(model, optimizer, DataParallel(model), parts)


def alone(
    folder: Path, state: RunState | None = None, about: Manifest = EMPTY, **settings: Any
) -> Checkpointer:
    return Checkpointer(Checkpoint(**settings), folder, ALONE, state or toy_state(), about=about)
