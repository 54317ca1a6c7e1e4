"""Load a checkpoint as a whole model in fp32, for commands.

The settings come from the checkpoint's manifest, not from the run's config.toml, which a resumed
run may have changed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco.components.checkpoint_folders import (
    MANIFEST,
    complete_checkpoints,
    is_checkpoint,
    step_of,
)
from torchtitan_diloco.components.checkpoint_schema import (
    MODEL,
    SHARED,
    DamagedError,
    TensorFolder,
    check_files,
    check_tokenizer,
    read_manifest,
    worker_folder,
)
from torchtitan_diloco.config import Config, parse_config
from torchtitan_diloco.config.loader import OptionParser
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.log import UserError, command_line
from torchtitan_diloco.models import LanguageModel, build_model, vocabulary_rows


@dataclass(frozen=True)
class SavedModel:
    config: Config
    """Settings that the checkpoint was saved with."""
    model: LanguageModel
    tokenizer: Tokenizer
    step: int
    path: Path
    """Folder of the checkpoint."""
    weights: str
    """`shared` or `worker-K`."""

    def __str__(self) -> str:
        which = "shared parameters" if self.weights == SHARED else self.weights
        return f"{self.path}, step {self.step}, {which}"


def open_saved(run: Path, step: int | None = None, weights: str = SHARED) -> SavedModel:
    """Open the checkpoint of a run at `step` (default: the latest), or a checkpoint's folder."""
    path = find_checkpoint(run, step)
    try:
        return _open(path, weights)
    except DamagedError as error:
        raise UserError(f"{error}: choose another one with --step, or by its folder") from None


def _open(path: Path, weights: str) -> SavedModel:
    manifest = read_manifest(path)
    workers = [worker_folder(worker) for worker in manifest.present]
    if weights not in (SHARED, *workers):
        known = ", ".join([SHARED, *workers])
        raise UserError(f"--weights {weights}: {path} has no such parameters; it has {known}")
    config = parse_config(manifest.config, str(path / MANIFEST))
    tokenizer = build_tokenizer(config.data.tokenizer)
    check_tokenizer(path, manifest, tokenizer.name, tokenizer.fingerprint)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    model = build_model(config.model, rows, config.training.sequence_length)
    model.to_empty(device="cpu").requires_grad_(False).eval()
    # Without an outer loop all workers have the same parameters.
    folder = worker_folder(0) if weights == SHARED and not manifest.outer else weights
    check_files(path, manifest, [file for file in manifest.files if file.startswith(f"{folder}/")])
    tensors = {}
    for name, parameter in model.named_parameters():
        saved_name = shared_parameter_name(name) if folder == SHARED else MODEL + name
        tensors[saved_name] = parameter.detach()
    TensorFolder(path, manifest, folder).fill(tensors)
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
        raise UserError(
            f"{run} {problem}: name the folder of a run or of a checkpoint; a run saves if "
            "checkpoint.every, checkpoint.every_minutes or checkpoint.at_end is set"
        )
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        raise UserError(f"--step {step}: {run} has no checkpoint of that step; it has {steps}")
    return found[max(found) if step is None else step]


# --- commands -------------------------------------------------------------------------------------


class CommandParser(OptionParser):
    """Parser with the arguments that choose a model."""

    takes_settings = False

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=command_line(name), description=description)
        add = self.add_argument
        add("run", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
        add("--step", type=int, metavar="N", help="step of the checkpoint (default: the latest)")
        which = "shared: the parameters that all workers share (default); worker-K: worker K's own"
        add("--weights", default=SHARED, metavar="WHICH", help=which)


def run_command(
    command: Callable[[SavedModel, argparse.Namespace], None],
    parser: CommandParser,
    arguments: Sequence[str] | None,
) -> int:
    """Run a command on a model. Return its exit status, which is 2 after a mistake of the user."""
    try:
        options = parser.parse_args(arguments)
        command(open_saved(options.run, options.step, options.weights), options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
