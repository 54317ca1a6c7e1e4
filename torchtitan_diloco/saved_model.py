"""Opens what a run has saved: one checkpoint as a whole model in fp32 on this process, with its tokenizer and config.

The config is the one in the checkpoint's manifest, not the run folder's config.toml: it is what this very checkpoint was
trained with, also where the run has been taken up again with other settings, and it goes along with a checkpoint's folder.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    SHARED,
    Manifest,
    check_tokenizer,
    checkpoint_path,
    complete_checkpoints,
    damage,
    read_manifest,
    step_of,
    worker_folder,
)
from torchtitan_diloco.components.inner_state import MODEL
from torchtitan_diloco.components.resume import read_tensors, saved_tensors
from torchtitan_diloco.components.run_plan import vocabulary_rows
from torchtitan_diloco.config.loader import config_from_text
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.data.corpus import open_tokenizer
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.models import MODELS
from torchtitan_diloco.models.chinchilla.model import Decoder

OUTER = "outer/"


@dataclass(frozen=True)
class SavedModel:
    config: Config
    """That the checkpoint was saved with."""
    model: Decoder
    tokenizer: Tokenizer
    step: int
    path: Path
    """Folder of the checkpoint."""
    weights: str
    """`shared` or `worker-K`."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def __str__(self) -> str:
        return f"{self.path}, step {self.step}, {'shared parameters' if self.weights == SHARED else self.weights}"


def add_saved_arguments(parser: argparse.ArgumentParser) -> None:
    """What all commands on a saved model are told alike: the arguments of `open_saved`."""
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="a checkpoint of the run (default: the latest)"
    )
    parser.add_argument(
        "--weights",
        default=SHARED,
        metavar="WHICH",
        help="shared: the parameters that the workers agree on (default); worker-K: those of worker K itself",
    )


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="(default auto: CUDA if there)",
    )


def open_saved(run: Path, step: int | None = None, weights: str = SHARED) -> SavedModel:
    """`run`: folder of a run, whose latest checkpoint is taken unless `step` names another, or folder of a checkpoint."""
    path = find_checkpoint(run, step)
    manifest = read_manifest(path)
    worker = _worker_of(weights, path, manifest)
    config = config_from_text(manifest.settings, str(path / MANIFEST))
    tokenizer = open_tokenizer(config.data)
    check_tokenizer(path, manifest, tokenizer.name, tokenizer.fingerprint)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    with torch.device("meta"):
        model = MODELS[config.model.name].build(config.model, rows, config.training.sequence_length)
    model.to_empty(device="cpu").requires_grad_(False).eval()
    _read_into(model, path, manifest, worker, tokenizer)
    return SavedModel(config, model, tokenizer, manifest.step, path, weights)


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    path = run.expanduser()
    if (path / MANIFEST).exists():
        saved = read_manifest(path).step
        if step not in (None, saved):
            raise ValueError(
                f"--step {step}: {run} is the checkpoint of step {saved}; leave --step out, or name the run's folder"
            )
        return path.absolute()
    if not path.is_dir():
        raise ValueError(
            f"{run} does not exist: name the folder of a run (outputs/...) or of one of its checkpoints"
        )
    found = complete_checkpoints(path)
    if not found:
        raise ValueError(
            f"{run} has no complete checkpoint: name the folder of a run that has folders checkpoints/step-...; a run saves "
            "as checkpoint.every, checkpoint.every_minutes and checkpoint.at_end say"
        )
    if step is None:
        return found[-1]
    if checkpoint_path(path, step) not in found:
        steps = ", ".join(str(step_of(other)) for other in found)
        raise ValueError(f"--step {step}: {run} has no checkpoint of that step; there are {steps}")
    return checkpoint_path(path, step)


def _worker_of(weights: str, path: Path, manifest: Manifest) -> int | None:
    """None for the shared parameters."""
    if weights == SHARED:
        return None
    number = re.fullmatch(r"worker-(\d+)", weights)
    if number is None or int(number[1]) >= manifest.workers:
        there = ", ".join([SHARED, *map(worker_folder, range(manifest.workers))])
        raise ValueError(f"--weights {weights}: {path} has no such parameters; there are {there}")
    return int(number[1])


def _read_into(
    model: Decoder, path: Path, manifest: Manifest, worker: int | None, tokenizer: Tokenizer
) -> None:
    """The shared parameters are those of the outer loop. What it does not hold, because it is frozen or because there is no
    outer loop, is the same in all workers."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    own_folder = worker_folder(worker or 0)
    shared = _sizes(path, manifest, SHARED, OUTER) if worker is None and manifest.outer else {}
    own = _sizes(path, manifest, own_folder, MODEL) if parameters.keys() - shared.keys() else {}
    for name, value in parameters.items():
        size = shared.get(name) or own.get(name)
        if size != tuple(value.shape):
            raise ValueError(
                f"{path} is of another model: {name} is {size or 'absent'} there, and {tuple(value.shape)} by its settings and "
                f"the tokenizer {tokenizer.name} of {tokenizer.vocab_size} tokens. Put back the tokenizer that the run was "
                "trained with"
            )
    read_tensors(
        path / SHARED, {OUTER + name: value for name, value in parameters.items() if name in shared}
    )
    read_tensors(
        path / own_folder,
        {MODEL + name: value for name, value in parameters.items() if name not in shared},
    )


def _sizes(path: Path, manifest: Manifest, folder: str, prefix: str) -> dict[str, tuple[int, ...]]:
    """Of the parameters in a folder, whose files are whole."""
    wrong = damage(
        path, manifest, [name for name in sorted(manifest.files) if name.split("/")[0] == folder]
    )
    if wrong:
        earlier = [
            step_of(other)
            for other in complete_checkpoints(path.parent.parent)
            if other.name < path.name
        ]
        raise ValueError(
            wrong + (f". Here, --step {earlier[-1]} takes that one" if earlier else "")
        )
    known = saved_tensors(path / folder).items()
    return {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in known
        if name.startswith(prefix)
    }
