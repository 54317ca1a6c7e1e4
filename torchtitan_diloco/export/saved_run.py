"""From what a run has saved to a folder that leaves the project."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from torchtitan_diloco import __version__
from torchtitan_diloco.config.loader import to_toml
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.data.files import write_whole
from torchtitan_diloco.export.dense import check_holds_no_weights, save_safetensors
from torchtitan_diloco.export.hugging_face import save_hugging_face
from torchtitan_diloco.saved_model import SavedModel, find_checkpoint, open_saved

FORMATS = ("safetensors", "hf")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG_NAME = "config.toml"
TOKENIZER_NAME = "tokenizer-info.json"
RANKS_NAME = "tokenizer.tiktoken"


def export_run(
    run: Path, step: int | None, format: str, dtype: str, weights: str, out: Path | None
) -> tuple[SavedModel, Path]:
    """Returns what was exported, and the folder."""
    path = find_checkpoint(run, step)
    folder = default_folder(path, format, dtype, weights) if out is None else out.expanduser()
    check_holds_no_weights(folder)
    saved = open_saved(path, weights=weights)
    try:
        if format == "hf":
            save_hugging_face(
                folder,
                saved.tensors,
                saved.config.model,
                vocab_size=saved.model.vocab_size,
                sequence_length=saved.model.sequence_length,
                tokenizer=saved.tokenizer,
                dtype=DTYPES[dtype],
            )
        else:
            save_dense(folder, saved, DTYPES[dtype])
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written ({error.strerror or error}): choose another folder"
        ) from error
    return saved, folder


def default_folder(checkpoint: Path, format: str, dtype: str, weights: str) -> Path:
    """Below the run, or beside a checkpoint that lies elsewhere. What is not the default is in the name."""
    place = (
        checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    )
    unusual = [word for word, usual in ((dtype, "float32"), (weights, "shared")) if word != usual]
    return place / "export" / "-".join([checkpoint.name, format, *unusual])


def save_dense(folder: Path, saved: SavedModel, dtype: torch.dtype) -> None:
    """The weights under our names, and what a run needs beside them to go on from there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = for_another_run(saved.config)
    spec = config.data.tokenizer
    is_file = spec.endswith(".tiktoken")
    if is_file:
        shutil.copyfile(Path(spec).expanduser(), folder / RANKS_NAME)
        config = replace(
            config, data=replace(config.data, tokenizer=str((folder / RANKS_NAME).absolute()))
        )
    write_whole(folder / CONFIG_NAME, to_toml(config).encode())
    facts = {
        "tokenizer": spec,
        "file": RANKS_NAME if is_file else None,
        "vocab_size": saved.tokenizer.vocab_size,
        "fingerprint": saved.tokenizer.fingerprint,
        "end_of_document": saved.tokenizer.end_of_document,
    }
    write_whole(folder / TOKENIZER_NAME, (json.dumps(facts, indent=2) + "\n").encode())
    metadata = {
        "producer": f"torchtitan_diloco {__version__}",
        "step": str(saved.step),
        "weights": saved.weights,
    }
    tensors = {name: value.to(dtype) for name, value in saved.tensors.items()}
    save_safetensors(
        folder, tensors, metadata=metadata
    )  # last: a folder that has weights is complete


def for_another_run(config: Config) -> Config:
    """The settings without what belongs to the one run that had them."""
    return replace(
        config,
        run=replace(config.run, folder=""),
        training=replace(config.training, stop_after=0),
        model=replace(config.model, weights=""),
        checkpoint=replace(config.checkpoint, resume="auto"),
    )
