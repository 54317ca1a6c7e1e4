"""Compare saving and loading a checkpoint with a plain copy of the same files, in one process.

    .venv/bin/python -m benchmarks.checkpoint [--flavor paper-35m] [--rounds 5] [--folder FOLDER]

The checkpoint has the parameters, two inner moments, shared parameters and outer momentum of one
worker, 20 bytes a parameter. Both flush their files to the disk (fsync). "Held up" is the time that
training waits for an asynchronous save.
"""

import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import core
from torchtitan_diloco.components.checkpoint import (
    Checkpointer,
    Manifest,
    RunState,
    checkpoint_path,
)
from torchtitan_diloco.components.optimizer import build_optimizer
from torchtitan_diloco.components.resume import find_start, read_manifest, restore
from torchtitan_diloco.config.schema import Checkpoint, Model, Optimizer
from torchtitan_diloco.diloco import DiLoCoConfig, StreamingDiLoCo
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.models.decoder import FLAVORS, Decoder


def copy_and_flush(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    with Path(target).open("rb") as file:
        os.fsync(file.fileno())


def load(path: Path, world: World, *parts: Any) -> None:
    """Verify and load a checkpoint, as at the start of a run."""
    restore(find_start(world, str(path), ""), world, *parts)


def measure(
    flavor: str, rounds: int, folder: Path, device: torch.device = core.CPU
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each operation, and the bytes of a checkpoint."""
    shape = Model(flavor=flavor)  # type: ignore[arg-type]
    model = Decoder(shape, 32_000, 128).to(device)
    optimizer = build_optimizer(model, Optimizer(), 100)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    world = World(rank=0, size=1, workers=1, device=device)
    outer = StreamingDiLoCo(model, None, DiLoCoConfig())
    parts = model, optimizer, outer
    saver = Checkpointer(Checkpoint(keep_latest=1), folder, world, *parts)
    found: dict[str, list[float]] = {"held up": [], "save": [], "load": [], "plain copy": []}
    for step in range(rounds + 1):
        manifest = Manifest(RunState(step), workers=1, data={}, config="")
        started = time.perf_counter()
        held_up = saver.save(manifest)
        saver.wait()
        saved = time.perf_counter() - started
        path = checkpoint_path(folder, step)
        loaded = core.timed(partial(load, path, world, *parts)).wall
        copy = partial(shutil.copytree, path, folder / "copy", copy_function=copy_and_flush)
        copied = core.timed(copy).wall
        shutil.rmtree(folder / "copy")
        if step:  # the first round is a warm-up
            for name, seconds in zip(found, (held_up, saved, loaded, copied), strict=True):
                found[name].append(seconds)
    saver.close()
    return found, sum(size for size, _ in read_manifest(path).files.values())


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--flavor", choices=FLAVORS, default="paper-35m")
    parser.add_argument("--rounds", type=core.positive, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        found, size = measure(options.flavor, options.rounds, Path(scratch))
    rows = []
    for name, seconds in found.items():
        speeds = [size / 1e6 / one for one in seconds]
        rows.append([name, core.summary(seconds, 2), core.summary(speeds, 0), str(len(seconds))])
    title = f"{options.flavor}, {size / 1e6:,.0f} MB, torch {torch.__version__}"
    core.print_table(title, "what | seconds | MB/s | n", rows)


if __name__ == "__main__":
    main()
