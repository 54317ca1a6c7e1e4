"""Commands on a trained model: its text, and its weights for other programs.

.venv/bin/torchtitan-diloco generate outputs/RUN --prompt "def main("
.venv/bin/torchtitan-diloco export outputs/RUN --format hf
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan_diloco import __version__
from torchtitan_diloco.base.process import run_and_exit
from torchtitan_diloco.base.registry import add_imports_option
from torchtitan_diloco.base.user import USER_ERROR, Parser, UserError, command_line
from torchtitan_diloco.config import to_toml
from torchtitan_diloco.data.text import whole_number
from torchtitan_diloco.distributed.world import pick_device
from torchtitan_diloco.export.hugging_face import TOKENIZER_NAME, WEIGHTS_NAME, save_hugging_face
from torchtitan_diloco.export.torchtitan import save_torchtitan
from torchtitan_diloco.export.weights import SavedModel, open_saved
from torchtitan_diloco.models.interface import parameter_counts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        add("--prompt", default="", help="text to continue (default: the beginning of a document)")
        tokens_help = "maximum number of tokens to generate (default 100)"
        add("--tokens", type=whole_number, default=100, metavar="N", help=tokens_help)
        add("--temperature", type=float, default=0.8, help="default 0.8; 0: the most likely token")
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


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    vocab_size: int,
    sequence_length: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    document_mask: bool = False,
) -> Iterator[int]:
    """Yield the tokens that follow `tokens`, until `stop`, which is excluded.

    Ids from `vocab_size` on only pad the embedding and are never drawn. `sequence_length` and
    `document_mask`: as in training.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    context = list(tokens)
    for _ in range(max_new_tokens):
        context = context[-sequence_length:]
        logits: Tensor = model(
            torch.tensor([context], device=device),
            head=lambda hidden, matrix: F.linear(hidden[0, -1], matrix[:vocab_size]),
        )
        # Draw on the CPU, so that a seed gives the same text on all devices.
        token = draw(logits.float().cpu(), temperature, generator)
        if token == stop:
            return
        yield token
        if document_mask and context[-1] == stop:
            context = []  # the token begins a document, which has not seen the end of another
        context.append(token)


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token, given the logits [vocabulary]; with temperature 0, the most likely one."""
    if not bool(logits.isfinite().all()):
        raise UserError("the logits are not finite: the training diverged; use an earlier --step")
    if temperature == 0:
        return int(logits.argmax())
    # Shift the largest logit to 0, so that a temperature near 0 does not make it infinite.
    scaled = (logits.double() - logits.max()) / temperature
    return int(torch.multinomial(scaled.softmax(dim=0), 1, generator=generator))


def print_text(saved: SavedModel, options: argparse.Namespace) -> None:
    """Print the text that a model writes after the prompt."""
    tokenizer = saved.tokenizer
    model = saved.model.to(pick_device(options.device, local_rank=0))
    if not options.temperature >= 0:  # NaN, too
        raise UserError(f"--temperature {options.temperature}: give a number of at least 0")
    prompt = tokenizer.encode(os.fsencode(options.prompt).decode(errors="replace")).tolist()
    tokens = generate(
        model,
        prompt or [tokenizer.end_of_document],
        vocab_size=tokenizer.vocab_size,
        sequence_length=saved.config.training.sequence_length,
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        stop=tokenizer.end_of_document,
        document_mask=saved.config.model.document_mask,
    )
    text = tokenizer.decode([*prompt, *tokens])
    print(saved, file=sys.stderr)
    print(text)


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
        checkpoint=replace(config.checkpoint, resume="auto"),
    )
    metadata = {
        "format": "pt",  # transformers refuses a file that does not name its framework
        "producer": f"torchtitan_diloco {__version__}",
        "step": str(saved.step),
        "tokenizer": f"{tokenizer.name} {tokenizer.fingerprint}",
    }
    tensors = {name: value.to(dtype) for name, value in saved.model.state_dict().items()}
    if tokenizer.file is not None:
        shutil.copyfile(tokenizer.file, folder / TOKENIZER_NAME)
        copied = str((folder / TOKENIZER_NAME).absolute())
        config = replace(config, data=replace(config.data, tokenizer=copied))
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_NAME, metadata)


COMMANDS = {
    "generate": ("Write text with a trained model.", print_text),
    "export": ("Write a trained model as a folder of weights.", export),
}


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
