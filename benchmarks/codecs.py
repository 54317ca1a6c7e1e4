"""Encode and decode of every wire format beside a memory copy of as many fp32 values, in one process, taking turns; then what
the background does with the mean that came back.

    python -m benchmarks.codecs [--codecs fp32,...] [--rounding nearest] [--block-size 64] [--megabytes 4.2,33.6]
                                [--threads 1] [--rounds 15] [--device cpu]

GB/s are of fp32 values: 33.6 MB in 10 ms are 3.36. The copy reads and writes all of them, and so is what memory allows to a
format that would read them and write nothing less. Outer step: norm of the mean, Nesterov, norm of the update, checksum.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.arguments import codec_names, positive
from benchmarks.table import print_table, summary
from torchtitan_diloco.diloco.codecs import CODECS, Codec, build_codec
from torchtitan_diloco.diloco.config import Fragments, OuterOptimizer, Quantization
from torchtitan_diloco.diloco.exchange import PIECE
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.utils import describe_device

HEADER = [
    "format",
    "bits",
    "MB fp32",
    "encode GB/s",
    "decode GB/s",
    "copy GB/s",
    "encode + decode ms",
    "share of copy",
    "n",
]


def timed(task: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure(codec: Codec, values: Tensor, rounds: int) -> list[tuple[float, float, float]]:
    """Seconds of encode, decode and copy, in pieces as an exchange has them."""
    piece = values.numel() if values.device.type == "cuda" else PIECE
    payload = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    arrived, copied = torch.empty_like(values), torch.empty_like(values)
    pieces, encoded = values.split(piece), payload.split(codec.wire_bytes(piece))

    def encode() -> None:
        for part, room in zip(pieces, encoded, strict=True):
            codec.encode(part, room)

    def decode() -> None:
        for room, part in zip(encoded, arrived.split(piece), strict=True):
            codec.decode(room, part)

    def copy() -> None:
        copied.copy_(values)

    tasks = [partial(timed, task, values.device) for task in (encode, decode, copy)]
    for task in tasks:
        task()
    return [(tasks[0](), tasks[1](), tasks[2]()) for _ in range(rounds)]


def row(codec: Codec, values: Tensor, rounds: int) -> list[str]:
    found, gigabytes = measure(codec, values, rounds), values.nbytes / 1e9
    rates = [[gigabytes / seconds for seconds in column] for column in zip(*found, strict=True)]
    both = [encode + decode for encode, decode, _ in found]
    share = [
        2 * copy / time_of_both for time_of_both, (_, _, copy) in zip(both, found, strict=True)
    ]
    bits = 8 * codec.wire_bytes(values.numel()) / values.numel()
    return [
        codec.name,
        f"{bits:.3f}",
        f"{values.nbytes / 1e6:.1f}",
        *(summary(column, 2) for column in rates),
        summary([1e3 * seconds for seconds in both], 2),
        summary([100 * part for part in share], 0) + " %",
        str(rounds),
    ]


def outer_step_row(values: int, device: torch.device, rounds: int) -> list[str]:
    model = nn.Linear(values, 1, bias=False, device=device)
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state = OuterState(fragment, OuterOptimizer(), device)

    def turn() -> float:
        state.delta.normal_(std=1e-3)
        return timed(state.advance, device)

    turn()
    seconds = [turn() for _ in range(rounds)]
    gigabytes = 4e-9 * values
    rates, milliseconds = [gigabytes / one for one in seconds], [1e3 * one for one in seconds]
    return [f"{1e3 * gigabytes:.1f}", summary(milliseconds, 1), summary(rates, 2), str(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", type=codec_names, default=list(CODECS))
    parser.add_argument("--rounding", choices=["nearest", "stochastic"], default="nearest")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument(
        "--megabytes",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[4.2, 33.6],
    )
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    own = parser.parse_args()
    torch.set_num_threads(own.threads)
    device, rows, steps = torch.device(own.device), [], []
    for megabytes in own.megabytes:
        values = 1e-3 * torch.randn(round(megabytes * 1e6 / 4), device=device)
        for name in own.codecs:
            chosen = Quantization(codec=name, rounding=own.rounding, block_size=own.block_size)
            rows.append(row(build_codec(chosen), values, own.rounds))
        steps.append(outer_step_row(values.numel(), device, own.rounds))
    settings = f"{own.threads} CPU threads, {own.rounding}, blocks of {own.block_size}"
    title = f"{describe_device(device)}; {settings}; torch {torch.__version__}"
    print_table(title, HEADER, rows)
    print(
        "\nShare of copy: twice the time of the copy / time of encode + decode. Median (min ... max) of n turns.\n"
    )
    print_table("outer step", ["MB fp32", "ms", "GB/s", "n"], steps)


if __name__ == "__main__":
    main()
