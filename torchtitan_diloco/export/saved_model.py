"""Load a checkpoint as a whole model in fp32, for commands.

The settings come from the checkpoint's manifest, not from the run's config.toml, which a resumed
run may have changed.
"""

from dataclasses import dataclass
from pathlib import Path

from torchtitan_diloco.components.checkpoint import (
    MANIFEST,
    MODEL,
    DamagedError,
    check_files,
    complete_checkpoints,
    read_manifest,
    step_of,
)
from torchtitan_diloco.components.resume import SavedTensors, check_tokenizer
from torchtitan_diloco.config import Config, parse_config
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.log import UserError
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

    def __str__(self) -> str:
        return f"{self.path}, step {self.step}, shared parameters"


def open_saved(run: Path, step: int | None = None) -> SavedModel:
    """Open the checkpoint of a run at `step` (default: the latest), or a checkpoint's folder."""
    path = find_checkpoint(run, step)
    try:
        return _open(path)
    except DamagedError as error:
        raise UserError(f"{error}: choose another one with --step, or by its folder") from None


def _open(path: Path) -> SavedModel:
    manifest = read_manifest(path)
    config = parse_config(manifest.config, str(path / MANIFEST))
    tokenizer = build_tokenizer(config.data.tokenizer)
    check_tokenizer(manifest, tokenizer.name, tokenizer.fingerprint)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    model = build_model(config.model, rows, config.training.sequence_length)
    model.to_empty(device="cpu").requires_grad_(False).eval()
    check_files(path, manifest, manifest.files)
    saved = SavedTensors(path, manifest)
    tensors = {}
    for name, parameter in model.named_parameters():
        shared = shared_parameter_name(name)  # absent with data parallelism, or if it is frozen
        tensors[shared if shared in saved.shapes else MODEL + name] = parameter.detach()
    saved.fill(tensors)
    return SavedModel(config, model, tokenizer, manifest.step, path)


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """Return the folder of a checkpoint: `run` itself, or the one of its first worker at `step`."""
    path = run.expanduser().absolute()
    if (path / MANIFEST).exists():  # whatever the name of the folder is
        found = {read_manifest(path).step: path}
    else:
        workers = sorted(path.glob("worker-*"), key=lambda one: (len(one.name), one.name))
        islands = sorted(path.glob("*/worker-0"))
        lists = (complete_checkpoints(folder) for folder in [path, *workers, *islands])
        found = {step_of(one): one for one in next(filter(None, lists), [])}
    if not found:
        problem = "is a file" if path.is_file() else "does not exist"
        problem = "has no complete checkpoint" if path.is_dir() else problem
        raise UserError(
            f"{run} {problem}: name the folder of a run or of a checkpoint; a run saves if "
            "checkpoint.every, checkpoint.every_minutes or checkpoint.at_end is set"
        )
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        raise UserError(f"--step {step}: {run} has no checkpoint of that step; it has {steps}")
    return found[max(found) if step is None else step]
