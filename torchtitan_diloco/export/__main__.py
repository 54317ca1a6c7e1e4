"""Commands on a trained model: its text, and its weights for other programs.

.venv/bin/torchtitan-diloco generate outputs/RUN --prompt "def main("
.venv/bin/torchtitan-diloco export outputs/RUN --format hf
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_diloco import __version__
from torchtitan_diloco.base.process import run_and_exit
from torchtitan_diloco.base.registry import add_imports_option
from torchtitan_diloco.base.user import USER_ERROR, Parser, UserError, command_line
from torchtitan_diloco.components.sampling import TEMPERATURE, encode_prompt
from torchtitan_diloco.config import Config, to_toml
from torchtitan_diloco.config.schema import format_value
from torchtitan_diloco.data.text import whole_number
from torchtitan_diloco.distributed.world import pick_device
from torchtitan_diloco.export.hugging_face import TOKENIZER_NAME, WEIGHTS_NAME, save_hugging_face
from torchtitan_diloco.export.torchtitan import save_torchtitan
from torchtitan_diloco.export.weights import PRODUCER, SETTINGS_NAME, SavedModel, open_saved
from torchtitan_diloco.models.generation import generate
from torchtitan_diloco.models.interface import parameter_counts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONGEST_SHOWN = 40
"""Characters of a prompt that an error shows."""


def main(arguments: Sequence[str]) -> int:
    """Run `generate ...` or `export ...`, and return the exit status."""
    name, *words = arguments or [""]
    if name not in COMMANDS:
        problem = f"{name} is no command" if name else "a command is missing"
        print(f"error: {problem}: begin with one of {', '.join(COMMANDS)}", file=sys.stderr)
        return USER_ERROR
    description, command = COMMANDS[name]
    parser = Parser(prog=command_line(name), description=description, allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, or of one of its checkpoints")
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the latest)")
    add_imports_option(parser)
    if name == "generate":
        _add_prompts(parser)
        tokens_help = "maximum number of tokens to generate (default 100)"
        add("--tokens", type=whole_number, default=100, metavar="N", help=tokens_help)
        temperature_help = f"default {TEMPERATURE}; 0: the most likely token"
        add("--temperature", type=float, default=TEMPERATURE, help=temperature_help)
        add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
        device_help = "default: a GPU if there is one"
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device_help)
    else:
        formats = "safetensors: for another run (default); hf: transformers; torchtitan: its DCP"
        add(
            "--format",
            choices=("safetensors", "hf", "torchtitan"),
            default="safetensors",
            help=formats,
        )
        add("--dtype", choices=DTYPES, default="float32", help="of the weights (float32)")
        add("--out", type=Path, help="folder to write (default RUN/export/step-...-FORMAT)")
    options = parser.parse_args(words)
    try:
        command(open_saved(options.run, options.step), options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


# --- generate -------------------------------------------------------------------------------------


def _add_prompts(parser: Parser) -> None:
    add = parser.add_argument
    prompt = "text to continue, once or several times (default: the beginning of a document)"
    add("--prompt", action="append", default=[], metavar="TEXT", help=prompt)
    prompts = "file with a prompt on each line; empty lines are skipped"
    add("--prompt-file", type=Path, metavar="FILE", help=prompts)
    batch = "prompts to continue at once, less for less memory (default 8)"
    add("--batch-size", type=whole_number, default=8, metavar="N", help=batch)


def print_texts(saved: SavedModel, options: argparse.Namespace) -> None:
    """Print the texts that a model writes after the prompts."""
    if not options.temperature >= 0:  # NaN, too
        raise UserError(f"--temperature {options.temperature}: give a number of at least 0")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed {options.seed}: give a whole number from 0 to 2^63 - 1")
    tokenizer = saved.tokenizer
    length = saved.config.training.sequence_length
    prompts = [
        encode_prompt(
            text,
            tokenizer,
            begins_documents=saved.begins_documents,
            sequence_length=length,
            source=source,
        )
        for source, text in read_prompts(options)
    ]
    model = saved.model.to(pick_device(options.device, local_rank=0))
    print(saved, file=sys.stderr)
    end = tokenizer.end_of_document
    for first in range(0, len(prompts), options.batch_size):
        batch = prompts[first : first + options.batch_size]
        continuations = generate(
            model,
            [prompt.tokens for prompt in batch],
            vocab_size=tokenizer.vocab_size,
            sequence_length=length,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
            stop=end,
            document_mask=saved.config.model.document_mask,
        )
        pairs = zip(batch, continuations, strict=True)
        for number, (prompt, tokens) in enumerate(pairs, start=first + 1):
            if len(prompts) > 1:
                print(f"==> {number} of {len(prompts)} <==")
            print(tokenizer.decode([*prompt.text, *tokens]), flush=True)


def read_prompts(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return each prompt with its source, which an error names."""
    given = [os.fsencode(text).decode(errors="replace") for text in options.prompt]
    prompts = [(f"--prompt {format_value(text[:LONGEST_SHOWN])}", text) for text in given]
    path = options.prompt_file
    if path is None:
        return prompts or [("--prompt", "")]
    name = f"--prompt-file {path}"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{name} cannot be read ({reason}): give a text file") from error
    numbered = [(f"{name}, line {number}", line) for number, line in enumerate(lines, start=1)]
    of_file = [(source, line) for source, line in numbered if line.strip()]
    if not of_file:
        raise UserError(f"{name} has no prompt: write one on each line")
    return [*prompts, *of_file]


# --- export ---------------------------------------------------------------------------------------


def export(saved: SavedModel, options: argparse.Namespace) -> None:
    """Write the folder of a model in the chosen format."""
    folder = options.out.expanduser() if options.out else _default_folder(saved.path, options)
    dtype = DTYPES[options.dtype]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; choose another folder, or delete this one")
        if options.format == "hf":
            length = saved.config.training.sequence_length
            save_hugging_face(
                folder,
                model=saved.model,
                tokenizer=saved.tokenizer,
                dtype=dtype,
                sequence_length=length,
                begins_documents=saved.begins_documents,
            )
        elif options.format == "torchtitan":
            save_torchtitan(folder, saved.model, dtype)
        else:
            save_for_another_run(folder, saved, dtype)
        if (weights := folder / WEIGHTS_NAME).exists():
            weights.chmod(folder.stat().st_mode & 0o666)  # safetensors ignores the umask
    except OSError as error:
        raise UserError(
            f"--out {folder} cannot be written ({error.strerror or error}): choose another folder"
        ) from error
    count = parameter_counts(saved.model)["total"]
    print(f"{saved}: {count:,} parameters in {options.dtype}, in {folder}")


def _default_folder(checkpoint: Path, options: argparse.Namespace) -> Path:
    """Return a folder in the run, or beside a checkpoint that was moved elsewhere."""
    parent = checkpoint.parent
    run = parent.parent if parent.name.startswith("worker-") else parent
    dtype = [] if options.dtype == "float32" else [options.dtype]
    return run / "export" / "-".join([checkpoint.name, options.format, *dtype])


def save_for_another_run(folder: Path, saved: SavedModel, dtype: torch.dtype) -> None:
    """Write the weights under our names, with settings and tokenizer."""
    tokenizer = saved.tokenizer
    config = saved.config
    config = replace(  # reset the settings that are specific to a run
        config,
        run=replace(config.run, folder=""),
        training=replace(config.training, stop_after=0),
        model=replace(config.model, weights=""),
        islands=Config().islands,
        checkpoint=replace(config.checkpoint, resume="auto"),
    )
    metadata = {
        "format": "pt",  # transformers refuses a file that does not name its framework
        "producer": f"{PRODUCER} {__version__}",
        "step": str(saved.step),
        "tokenizer": f"{tokenizer.name} {tokenizer.fingerprint}",
    }
    tensors = {name: value.to(dtype) for name, value in saved.model.state_dict().items()}
    if tokenizer.file is not None:
        shutil.copyfile(tokenizer.file, folder / TOKENIZER_NAME)
        copied = str((folder / TOKENIZER_NAME).absolute())
        config = replace(config, data=replace(config.data, tokenizer=copied))
    (folder / SETTINGS_NAME).write_text(to_toml(config), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_NAME, metadata)


COMMANDS = {
    "generate": ("Write text with a trained model.", print_texts),
    "export": ("Write a trained model as a folder of weights.", export),
}


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
