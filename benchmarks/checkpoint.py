"""Saving and loading a checkpoint beside a plain copy of the same files, in one process, taking turns.

    python -m benchmarks.checkpoint [--flavor 35m] [--rounds 5] [--folder FOLDER]

The checkpoint is that of one worker with an outer loop: parameters, two inner moments, shared parameters and momentum, 20 bytes
a parameter. Every file is brought to the disk (fsync) by both. "Held up": what training waits for, with asynchronous saving.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.arguments import positive
from benchmarks.table import print_table, summary
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_folder import Manifest, checkpoint_path, read_manifest
from torchtitan_diloco.components.optimizer import build_optimizer
from torchtitan_diloco.components.resume import Start, restore
from torchtitan_diloco.config.schema import Checkpoint, Model, Optimizer
from torchtitan_diloco.diloco import DiLoCoConfig, StreamingDiLoCo
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.models import MODELS


def copy_files(source: Path, target: Path) -> float:
    started = time.perf_counter()
    for path in source.rglob("*"):
        if path.is_file():
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            with copied.open("rb") as file:
                os.fsync(file.fileno())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flavor", default="35m")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="on the disk to measure (default: the temporary folder)",
    )
    own = parser.parse_args()
    model = MODELS["chinchilla"].build(Model(flavor=own.flavor), 32_000, 128)
    optimizer = build_optimizer(model, Optimizer(), 100)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    outer = StreamingDiLoCo(model, None, DiLoCoConfig())
    rows: dict[str, list[float]] = {"held up": [], "save": [], "load": [], "plain copy": []}
    with tempfile.TemporaryDirectory(dir=own.folder) as scratch:
        saver = Checkpointer(
            Checkpoint(keep_latest=1), Path(scratch), world, model, optimizer, outer
        )
        for step in range(own.rounds + 1):
            manifest = Manifest(
                step, 0, 0, workers=1, ranks_per_worker=1, data={}, run={}, settings={}
            )
            started = time.perf_counter()
            held_up = saver.save(manifest)
            saver.wait()
            saved = time.perf_counter() - started
            path = checkpoint_path(Path(scratch), step)
            started = time.perf_counter()
            restore(
                Start("", str(path), read_manifest(path)),
                Checkpoint(),
                world,
                model,
                optimizer,
                outer,
            )
            loaded = time.perf_counter() - started
            copied = copy_files(path, Path(scratch) / "copy")
            shutil.rmtree(Path(scratch) / "copy")
            size = sum(bytes_ for bytes_, _ in read_manifest(path).files.values())
            if step:  # the first one loads code
                for name, seconds in zip(rows, (held_up, saved, loaded, copied), strict=True):
                    rows[name].append(seconds)
    table = [
        [
            name,
            summary(found, 2),
            summary([size / 1e6 / seconds for seconds in found], 0),
            str(own.rounds),
        ]
        for name, found in rows.items()
    ]
    print_table(
        f"{own.flavor}, {size / 1e6:,.0f} MB, torch {torch.__version__}",
        ["what", "seconds", "MB/s", "n"],
        table,
    )


if __name__ == "__main__":
    main()
