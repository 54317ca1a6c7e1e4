"""Opening a checkpoint as a whole model in fp32, with its tokenizer and settings.

The settings are those in the checkpoint's manifest, not in the run's config.toml: a resumed run may
have changed them, and the manifest stays with the folder of the checkpoint.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from torchtitan_diloco.components.checkpoint_schema import (
    MANIFEST,
    MODEL,
    SHARED,
    DamagedError,
    Manifest,
    TensorFolder,
    check_files,
    check_tokenizer,
    complete_checkpoints,
    is_checkpoint,
    read_manifest,
    step_of,
    worker_folder,
)
from torchtitan_diloco.components.run_plan import vocabulary_rows
from torchtitan_diloco.config import Config, parse_config
from torchtitan_diloco.data.corpus import open_tokenizer
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.models import MODELS
from torchtitan_diloco.models.chinchilla.model import Decoder


@dataclass(frozen=True)
class SavedModel:
    config: Config
    """Settings that the checkpoint was saved with."""
    model: Decoder
    tokenizer: Tokenizer
    step: int
    path: Path
    """Folder of the checkpoint."""
    weights: str
    """`shared` or `worker-K`."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def __str__(self) -> str:
        which = "shared parameters" if self.weights == SHARED else self.weights
        return f"{self.path}, step {self.step}, {which}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # which `run_command` prints


def saved_model_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Create a parser with the arguments of `open_saved`."""
    parser = _Parser(prog=f"python -m {module}", description=description)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the latest)")
    add(
        "--weights",
        default=SHARED,
        metavar="WHICH",
        help="shared: the parameters that all workers share (default); worker-K: worker K's own",
    )
    return parser


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    choices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", choices=choices, default="auto", help="default auto: a GPU")


def in_range(
    kind: Callable[[str], float], low: float, high: float = math.inf
) -> Callable[[str], float]:
    """Return the type of an argument from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            wanted = f"a number from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: give {wanted}")
        return value

    return parse


def run_command(
    command: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """Run a command and return its exit status. A mistake is a line on stderr and status 2."""
    try:
        command(parser.parse_args(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def open_saved(run: Path, step: int | None = None, weights: str = SHARED) -> SavedModel:
    """Open the checkpoint of a run at `step` (default: the latest), or a checkpoint's folder."""
    path = find_checkpoint(run, step)
    try:
        return _open(path, read_manifest(path), weights)
    except DamagedError as error:
        raise ValueError(f"{error}: choose another one with --step, or by its folder") from None


def _open(path: Path, manifest: Manifest, weights: str) -> SavedModel:
    workers = [worker_folder(worker) for worker in range(manifest.workers)]
    if weights not in (SHARED, *workers):
        known = ", ".join([SHARED, *workers])
        raise ValueError(f"--weights {weights}: {path} has no such parameters; it has {known}")
    config = parse_config(manifest.config, str(path / MANIFEST))
    tokenizer = open_tokenizer(config.data)
    check_tokenizer(path, manifest, tokenizer.name, tokenizer.fingerprint)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    with torch.device("meta"):
        model = MODELS[config.model.name].build(config.model, rows, config.training.sequence_length)
    model.to_empty(device="cpu").requires_grad_(False).eval()
    _load(model, path, manifest, weights)
    return SavedModel(config, model, tokenizer, manifest.step, path, weights)


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """Return the folder of a checkpoint: `run` itself, or the one of `run` at `step`."""
    path = run.expanduser().absolute()
    if (path / MANIFEST).exists():  # whatever the name of the folder is
        found = {read_manifest(path).step: path}
    else:
        candidates = [path] if is_checkpoint(path) else complete_checkpoints(path)
        found = {step_of(one): one for one in candidates if one.is_dir()}
    if not found:
        problem = "has no complete checkpoint" if path.is_dir() else "does not exist"
        raise ValueError(
            f"{run} {problem}: name the folder of a run or of a checkpoint; a run saves if "
            "checkpoint.every, checkpoint.every_minutes or checkpoint.at_end is set"
        )
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        raise ValueError(f"--step {step}: {run} has no checkpoint of that step; it has {steps}")
    return found[max(found) if step is None else step]


def _load(model: Decoder, path: Path, manifest: Manifest, weights: str) -> None:
    """Read the parameters from the folders of a checkpoint."""
    folders: dict[str, Callable[[str], str]] = {}
    if weights == SHARED and manifest.outer:
        folders[SHARED] = shared_parameter_name
    # Parameters that are frozen or have no outer loop are the same in all workers.
    folders[worker_folder(0) if weights == SHARED else weights] = lambda name: MODEL + name
    missing = {name: value.detach() for name, value in model.named_parameters()}
    for folder, key in folders.items():
        if not missing:
            break
        files = [name for name in sorted(manifest.files) if name.startswith(f"{folder}/")]
        check_files(path, manifest, files)
        saved = TensorFolder(path, manifest, folder)
        found = {name: value for name, value in missing.items() if key(name) in saved.tensors}
        for name, value in found.items():
            size = tuple(saved.tensors[key(name)].size)
            if size != value.shape:
                raise ValueError(
                    f"{path} is of another model: {name} is {size} there, "
                    f"and {tuple(value.shape)} with its settings and tokenizer. Put back the "
                    "tokenizer that the run was trained with"
                )
        saved.fill({key(name): value for name, value in found.items()})
        missing = {name: value for name, value in missing.items() if name not in found}
    assert not missing, f"{path} has no {', '.join(missing)}"
