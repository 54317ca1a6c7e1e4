"""Writes what a run has saved as a folder for other programs, or for another run.

python -m torchtitan_diloco.export outputs/RUN --format hf
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_diloco.export.saved_run import DTYPES, FORMATS, export_run
from torchtitan_diloco.saved_model import add_saved_arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_diloco.export",
        description="Write what a run has saved as a folder of dense weights.",
    )
    add_saved_arguments(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="safetensors",
        help="safetensors: weights and config that another run can start from (default); hf: a folder for transformers",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights written (default float32)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write (default RUN/export/step-...-FORMAT)"
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        saved, folder = export_run(
            options.run, options.step, options.format, options.dtype, options.weights, options.out
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = sum(value.numel() for value in saved.tensors.values())
    print(f"{saved}: {count:,} parameters in {options.dtype}, in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
