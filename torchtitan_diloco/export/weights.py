"""Read weights: of a checkpoint as a whole model in fp32, and the initial ones of a run.

The settings of a checkpoint come from its manifest, not from the run's config.toml, which a resumed
run may have changed.
"""

import hashlib
import json
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError, no_run
from torchtitan_diloco.components.checkpoint import MODEL
from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    DamagedError,
    check_files,
    complete_checkpoints,
    read_manifest,
    step_of,
)
from torchtitan_diloco.components.copies import is_mirror
from torchtitan_diloco.components.resume import check_tokenizer
from torchtitan_diloco.components.same_model import settings_of_section
from torchtitan_diloco.components.saved_tensors import SavedTensors
from torchtitan_diloco.config import Config, parse_config
from torchtitan_diloco.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.export.dcp_folder import DATA_NAMES, is_dcp
from torchtitan_diloco.export.hugging_face import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    differing_settings,
    settings_of_model,
    transformers_names,
)
from torchtitan_diloco.export.torchtitan import (
    EMBEDDING,
    HEAD,
    from_torchtitan,
    open_checkpoint,
    settings_of_checkpoint,
    torchtitan_names,
)
from torchtitan_diloco.models import build_model, vocabulary_rows
from torchtitan_diloco.models.decoder import (
    Shape,
    shape_of,
)
from torchtitan_diloco.models.interface import copy_shard

EXAMPLE = "def f(x):\n    return 3.14159 * x  # Größe, 模型, été\nThe quick brown fox isn't lazy."
"""Text that nearly all different tokenizers encode differently."""
ADJUSTABLE = ("rotary_base", "rotary_scaling", "norm_epsilon")
"""Settings of [model] that a run may change when it continues trained weights."""
PRODUCER = "torchtitan_diloco"
"""Name with which our exports say in their metadata who has written them."""
SETTINGS_NAME = "config.toml"
"""Settings of the run beside an export for another run."""
PART_BYTES = 1 << 20
"""Part of each file that is read for its fingerprint."""


@dataclass(frozen=True)
class SavedModel:
    config: Config
    """Settings that the checkpoint was saved with."""
    model: nn.Module
    tokenizer: Tokenizer
    begins_documents: bool
    """Whether documents begin with the begin token of the tokenizer."""
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
    """Build the model of a checkpoint, and fill it with the shared parameters."""
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
    return SavedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        begins_documents=manifest.begins_documents,
        step=manifest.step,
        path=path,
    )


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """Return the folder of a checkpoint: `run` itself, or the one of its first worker at `step`."""
    path = run.expanduser().absolute()
    if (path / MANIFEST).exists():  # whatever the name of the folder is
        checkpoints = {read_manifest(path).step: path}
    else:
        # By number, as worker-10 comes after worker-9. The first one that has any counts.
        workers = sorted(path.glob("worker-*"), key=lambda folder: (len(folder.name), folder.name))
        islands = sorted(path.glob("island-*/worker-0"))  # of `islands.local`
        lists = (complete_checkpoints(folder) for folder in [path, *workers, *islands])
        checkpoints = {step_of(folder): folder for folder in next(filter(None, lists), [])}
    if not checkpoints:
        if not islands and (runs := _runs_in(path)):
            count = counted(len(runs), "run")
            raise UserError(f"{run} has {count} in it: name one, such as {run / runs[-1]}")
        if is_mirror(path):
            raise UserError(
                f"{run} is a checkpoint.mirror, which has checkpoints in parts: give the "
                "run.folder of its run; if that is lost, start the run again with this mirror, "
                "which fetches the newest one"
            )
        if not (workers or islands):
            raise no_run(path, f"worker-0, and no {MANIFEST} of a checkpoint")
        raise UserError(
            f"{run} has no complete checkpoint yet: wait for its first save, or set "
            "checkpoint.every, checkpoint.every_minutes or checkpoint.at_end"
        )
    if step is None:
        return checkpoints[max(checkpoints)]
    if step not in checkpoints:
        steps = ", ".join(map(str, checkpoints))
        raise UserError(f"--step {step}: {run} has no checkpoint of that step; it has {steps}")
    return checkpoints[step]


def _runs_in(folder: Path) -> list[str]:
    """Return the names of the runs in a folder, such as `outputs`, the latest last."""
    workers = [*folder.glob("*/worker-0"), *folder.glob("*/island-*/worker-0")]
    names = {worker.relative_to(folder).parts[0] for worker in workers}
    return sorted(names, key=lambda name: (folder / name).stat().st_mtime)


# --- initial weights ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightNames:
    """How a program names, and orders, the parameters of a model."""

    names: Callable[[nn.Module], dict[str, dict[str, int]]]
    """Maps each parameter of ours to its parts there, with their numbers of rows."""
    read: Callable[[nn.Module, str, Tensor], Tensor] = lambda _model, _name, value: value
    """Returns a part as ours has it."""
    unused: tuple[str, ...] = ()
    """Ends of names of what may be there and is not needed: a tied head, stored frequencies."""


def _our_names(model: nn.Module) -> dict[str, dict[str, int]]:
    return {name: {name: len(parameter)} for name, parameter in model.named_parameters()}


OWN = WeightNames(_our_names)
TRANSFORMERS = WeightNames(transformers_names, unused=(".inv_freq", "lm_head.weight"))
TORCHTITAN = WeightNames(torchtitan_names, read=from_torchtitan, unused=(HEAD,))


@torch.no_grad()
def load_initial_weights(model: nn.Module, path: str, tokenizer: Tokenizer) -> None:
    """Load this rank's shards of the initial parameters from `model.weights`.

    Reads one parameter at a time, so that no rank holds the whole model.
    """
    parameters = dict(model.named_parameters())
    weight_names = check_weights(model, path, tokenizer)
    parts = weight_names.names(model)
    with open_weights(path) as stored:
        stored_shapes = {name: file.get_slice(name).get_shape() for name, file in stored.items()}
        expected_shapes = {
            part: [rows, *parameters[name].shape[1:]]
            for name, names in parts.items()
            for part, rows in names.items()
        }
        for name in stored_shapes.keys() - expected_shapes.keys():
            if name.endswith(weight_names.unused):
                del stored_shapes[name]
        for name in {**expected_shapes, **stored_shapes}:
            if expected_shapes.get(name) != stored_shapes.get(name):
                there = stored_shapes.get(name, "absent")
                here = expected_shapes.get(name, "absent")
                shapes = f"{there} there and {here} here"
                raise UserError(f'model.weights = "{path}": {name} is {shapes}: set [model] to fit')
        for name, parameter in parameters.items():
            values = [
                weight_names.read(model, part, _read(path, stored[part], part))
                for part in parts[name]
            ]
            value = torch.cat(values)
            copy_shard(parameter, value.to(parameter.device, parameter.dtype))
    logger.info(f"{'weights':<10} {path}: {len(parameters)} tensors")


def _read(path: str, file: Any, name: str) -> Tensor:
    try:
        value: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, Path(path), error) from error
    return value


def check_weights(model: nn.Module, path: str, tokenizer: Tokenizer) -> WeightNames:
    """Return how weights are named. Raise an error if they say that they are of another model or
    tokenizer, or if there are none."""
    weight_files(path)
    given = Path(path).expanduser()
    folder = given if given.is_dir() else given.parent
    file = folder / CONFIG_NAME
    if is_dcp(given):
        weight_names = TORCHTITAN
        with open_weights(path) as stored:
            shapes = {name: tensor.get_shape() for name, tensor in stored.items()}
            differing = _differing_checkpoint(model, path, shapes)
            _check_tied_head(model, path, stored)
    elif file.is_file():
        weight_names = TRANSFORMERS
        differing = _differing_folder(model, path, file)
        _check_tokenizer_file(folder / TOKENIZER_NAME, path, tokenizer)
    else:
        weight_names = OWN
        differing = _differing_export(model, path, folder / SETTINGS_NAME, tokenizer)
    if differing:
        settings = " ".join(
            f"--model.{key} {json.dumps(value)}" for key, value in differing.items()
        )
        raise UserError(f'model.weights = "{path}" is of another model: for it, set {settings}')
    return weight_names


def _differing_folder(model: nn.Module, path: str, file: Path) -> dict[str, Any]:
    """Return the settings of [model] that differ in a folder of transformers."""
    try:
        return differing_settings(model, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f'model.weights = "{path}": {file.name} does not fit: {missing}') from error


def _differing_checkpoint(
    model: nn.Module, path: str, shapes: dict[str, list[int]]
) -> dict[str, Any]:
    """Return the settings of [model] that differ in a checkpoint of torchtitan."""
    try:
        saved = settings_of_checkpoint(shapes, model)
    except UserError as error:
        raise UserError(f'model.weights = "{path}": {error}') from None
    of_model = settings_of_model(model)
    return {key: value for key, value in saved.items() if value != of_model[key]}


def _differing_export(
    model: nn.Module, path: str, settings: Path, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the settings of [model] that differ in our own export, if this is one."""
    metadata = _read_metadata(path)
    if not metadata.get("producer", "").startswith(PRODUCER):
        return {}
    name, _, fingerprint = metadata.get("tokenizer", "").rpartition(" ")
    file = settings.with_name(TOKENIZER_NAME)
    if file.is_file():
        _check_tokenizer_file(file, path, tokenizer)
    elif name and (name, fingerprint) != (tokenizer.name, tokenizer.fingerprint):
        raise UserError(
            f'model.weights = "{path}" is of the tokenizer {name} ({fingerprint}), and '
            f'data.tokenizer = "{tokenizer.name}" ({tokenizer.fingerprint}): set that one'
        )
    if not isinstance(getattr(model, "shape", None), Shape):
        return {}
    saved = _read_model_section(settings)
    of_model = settings_of_model(model)
    differing = {
        key: value for key, value in saved.items() if value not in (None, of_model.get(key))
    }
    if changed := {key: differing.pop(key) for key in ADJUSTABLE if key in differing}:
        listed = ", ".join(f"model.{key} = {value}" for key, value in changed.items())
        logger.warning(
            f'model.weights = "{path}" was trained with {listed}, and this run has other values: '
            "set these, unless you mean to change them, as to lengthen the context"
        )
    return {key: value for key, value in differing.items() if key in of_model}


def _read_model_section(settings: Path) -> dict[str, Any]:
    """Return the settings of [model] of an export, with what its flavor sets. Other sections may be
    of another version, or need modules that this run does without."""
    try:
        section = tomllib.loads(settings.read_text(encoding="utf-8")).get("model", {})
        return settings_of_section(section)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        logger.warning(f"{settings} cannot be compared with [model]: {error}")
        return {}


def _read_metadata(path: str) -> dict[str, str]:
    first = weight_files(path)[0]
    try:
        with safe_open(first, framework="pt") as opened:
            return opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, first, error) from error


def _check_tokenizer_file(file: Path, path: str, tokenizer: Tokenizer) -> None:
    """Raise an error if a tokenizer.json beside weights encodes text otherwise. Files of one
    tokenizer differ, and this may be one of tiktoken, so an example is compared."""
    if not file.is_file():
        return
    try:
        ids_there = build_tokenizer(str(file)).encode(EXAMPLE).tolist()
    except Exception as error:  # the library has no class of its own errors
        logger.warning(f"{file} cannot be compared with data.tokenizer: {error}")
        return
    if ids_there != tokenizer.encode(EXAMPLE).tolist():
        raise UserError(
            f'model.weights = "{path}" has another tokenizer than data.tokenizer = '
            f'"{tokenizer.name}": set --data.tokenizer {shlex.quote(str(file))}'
        )


def _check_tied_head(model: nn.Module, path: str, stored: Mapping[str, Any]) -> None:
    """Raise an error if a checkpoint has a head of its own, and this model has none."""
    if not shape_of(model).tied_head or HEAD not in stored:
        return
    head = _read(path, stored[HEAD], HEAD)
    embedding = _read(path, stored[EMBEDDING], EMBEDDING)
    if not torch.equal(head, embedding):
        reason = "is of another model, whose head is not its embedding: for it, set"
        raise UserError(f'model.weights = "{path}" {reason} --model.tied_head false')


# --- files ----------------------------------------------------------------------------------------


@contextmanager
def open_weights(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the name of each tensor in a safetensors file, in the files of a folder, or in a DCP
    checkpoint, with the open file that has it."""
    folder = Path(path).expanduser()
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        if is_dcp(folder):
            try:
                stored |= open_checkpoint(folder)
            except OSError as error:
                raise _unreadable(path, folder, error) from error
        else:
            for file in weight_files(path):
                try:
                    opened = stack.enter_context(safe_open(file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise _unreadable(path, file, error) from error
                stored |= dict.fromkeys(opened.keys(), opened)
        yield stored


def weight_files(path: str | Path) -> list[Path]:
    """Return the file itself, or all files of a folder that are named as in transformers or DCP."""
    given = Path(path).expanduser()
    pattern = DATA_NAMES if is_dcp(given) else "model*.safetensors"
    files = sorted(given.glob(pattern)) if given.is_dir() else [given]
    if not files:
        raise UserError(
            f'model.weights = "{path}": the folder has no {pattern}: give a complete export or '
            "checkpoint"
        )
    return files


def weights_fingerprint(path: str) -> str:
    """Return a hash of a part of each file, to detect different weights of the same model."""
    digest = hashlib.sha256()
    files = weight_files(path) if path else []
    for file in files:
        try:
            with file.open("rb") as opened:
                opened.seek(file.stat().st_size // 2)
                digest.update(opened.read(PART_BYTES))
        except OSError as error:
            raise _unreadable(path, file, error) from error
    return digest.hexdigest()[:16]


def _unreadable(path: str | Path, file: Path, error: Exception) -> ValueError:
    remedy = "give a complete .safetensors file, or the folder of a complete export or checkpoint"
    return UserError(f'model.weights = "{path}": {file} cannot be read ({error}): {remedy}')
