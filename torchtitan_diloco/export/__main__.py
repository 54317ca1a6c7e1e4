"""Write a trained model as a folder of weights, for other programs or for another run.

.venv/bin/torchtitan-diloco export outputs/RUN --format hf
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_diloco import __version__
from torchtitan_diloco.config import to_toml
from torchtitan_diloco.export.hugging_face import TOKENIZER_NAME, save_hugging_face
from torchtitan_diloco.export.saved_model import CommandParser, SavedModel, run_command
from torchtitan_diloco.export.weights import WEIGHTS_NAME, new_folder
from torchtitan_diloco.log import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("export", "Write a trained model as a folder of weights.")
    add = parser.add_argument
    formats = "safetensors: for another run (default); hf: for transformers"
    add("--format", choices=("safetensors", "hf"), default="safetensors", help=formats)
    add("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    add("--out", type=Path, help="folder to write (default RUN/export/step-...-FORMAT)")
    return run_command(_export, parser, arguments)


def _export(saved: SavedModel, options: argparse.Namespace) -> None:
    folder = options.out.expanduser() if options.out else _default_folder(saved.path, options)
    dtype = DTYPES[options.dtype]
    try:
        if options.format == "hf":
            save_hugging_face(folder, saved.model, saved.tokenizer, dtype)
        else:
            save_for_another_run(folder, saved, dtype)
    except OSError as error:
        raise UserError(
            f"--out {folder} cannot be written ({error.strerror or error}): choose another folder"
        ) from error
    count = saved.model.parameter_counts()["total"]
    print(f"{saved}: {count:,} parameters in {options.dtype}, in {folder}")


def _default_folder(checkpoint: Path, options: argparse.Namespace) -> Path:
    """Return a folder in the run, or beside a checkpoint that was moved elsewhere."""
    parent = checkpoint.parent
    run = parent.parent if parent.name.startswith("worker-") else parent
    dtype = [] if options.dtype == "float32" else [options.dtype]
    return run / "export" / "-".join([checkpoint.name, options.format, *dtype])


def save_for_another_run(folder: Path, saved: SavedModel, dtype: torch.dtype) -> None:
    """Write the weights under our names, with their settings and tokenizer."""
    config, tokenizer = saved.config, saved.tokenizer
    config = replace(  # reset the settings that are specific to a run
        config,
        run=replace(config.run, folder=""),
        training=replace(config.training, stop_after=0),
        model=replace(config.model, weights=""),
        checkpoint=replace(config.checkpoint, resume="auto"),
    )
    metadata = {
        "format": "pt",  # transformers refuses a file that does not name its framework
        "producer": f"torchtitan_diloco {__version__}",
        "step": str(saved.step),
        "tokenizer": f"{tokenizer.name} {tokenizer.fingerprint}",
    }
    tensors = {name: value.to(dtype) for name, value in saved.model.state_dict().items()}
    with new_folder(folder) as incomplete:
        if tokenizer.file is not None:
            shutil.copyfile(tokenizer.file, incomplete / TOKENIZER_NAME)
            copied = str((folder / TOKENIZER_NAME).absolute())
            config = replace(config, data=replace(config.data, tokenizer=copied))
        (incomplete / "config.toml").write_text(to_toml(config), encoding="utf-8")
        save_file(tensors, incomplete / WEIGHTS_NAME, metadata)


if __name__ == "__main__":
    sys.exit(main())
