"""Compare encoding and decoding in each wire format with a copy of as many fp32 values.

    .venv/bin/python -m benchmarks.codecs [--codecs fp32,int8] [--megabytes 4.2,33.6]

All run in turns in one process. A second table has the outer step, which the background thread
computes from the mean that it receives. GB/s count fp32 values: 33.6 MB in 10 ms are 3.36 GB/s. A
format can be faster than the copy, as it writes fewer bytes.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import core
from torchtitan_diloco.diloco.codecs import CODECS, Codec, build_codec
from torchtitan_diloco.diloco.config import Fragments, OuterOptimizer, Quantization
from torchtitan_diloco.diloco.exchange import GPU_CHUNK, PIECE
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.hardware import describe_device

HEADER = (
    "format | bits | MB fp32 | encode GB/s | decode GB/s | copy GB/s | encode + decode ms | "
    "share of copy | n"
)
STEP_HEADER = "MB fp32 | ms | GB/s | n"
LEGEND = """
Share of copy: twice the time of the copy / time of encode + decode. Median (min ... max) of n
turns. Outer step, in a measured round: norm of the mean, Nesterov, norm of the change, checksum."""


def measure_codec(codec: Codec, values: Tensor, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of encoding and decoding, in pieces as in an exchange, and of a copy."""
    piece = GPU_CHUNK if values.device.type == "cuda" else PIECE
    payload = torch.empty(codec.wire_bytes(len(values)), dtype=torch.uint8, device=values.device)
    decoded = torch.empty_like(values)
    encoded = payload.split(codec.wire_bytes(piece))

    def encode() -> None:
        for part, target in zip(values.split(piece), encoded, strict=True):
            codec.encode(part, target)

    def decode() -> None:
        for source, part in zip(encoded, decoded.split(piece), strict=True):
            codec.decode(source, part)

    tasks: dict[str, Callable[[], object]]
    tasks = {"encode": encode, "decode": decode, "copy": lambda: decoded.copy_(values)}
    turns = {name: partial(core.timed, task, values.device) for name, task in tasks.items()}
    found = core.take_turns(turns, rounds)
    return {name: [one.wall for one in times] for name, times in found.items()}


def share_of_copy(found: dict[str, list[float]]) -> list[float]:
    turns = zip(found["encode"], found["decode"], found["copy"], strict=True)
    return [2 * copy / (encode + decode) for encode, decode, copy in turns]


def codec_row(codec: Codec, values: Tensor, rounds: int) -> list[str]:
    found = measure_codec(codec, values, rounds)
    both = [sum(pair) for pair in zip(found["encode"], found["decode"], strict=True)]
    speeds = [[values.nbytes / 1e9 / one for one in column] for column in found.values()]
    return [
        codec.name,
        f"{8 * codec.wire_bytes(values.numel()) / values.numel():.3f}",
        f"{values.nbytes / 1e6:.1f}",
        *(core.summary(column, 2) for column in speeds),
        core.summary(both, 2, 1e3),
        core.summary(share_of_copy(found), 0, 100) + " %",
        str(rounds),
    ]


def outer_step_row(values: int, device: torch.device, rounds: int) -> list[str]:
    model = nn.Linear(values, 1, bias=False, device=device)
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state = OuterState(fragment, OuterOptimizer(), device)

    def step() -> float:
        state.delta.normal_(std=1e-3)
        return core.timed(lambda: state.advance(measured=True), device).wall

    (seconds,) = core.take_turns({"step": step}, rounds).values()
    speed = core.summary([4e-9 * values / one for one in seconds], 2)
    return [f"{4e-6 * values:.1f}", core.summary(seconds, 1, 1e3), speed, str(rounds)]


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--codecs", default="", help="default: all")
    parser.add_argument("--megabytes", type=core.list_of(core.positive_number), default=[4.2, 33.6])
    parser.add_argument("--threads", type=core.positive, default=1)
    parser.add_argument("--rounds", type=core.positive, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    names = core.parse_names(parser, "--codecs", options.codecs, CODECS, ",")
    torch.set_num_threads(options.threads)
    device, rows, steps = torch.device(options.device), [], []
    for megabytes in options.megabytes:
        values = 1e-3 * torch.randn(round(megabytes * 1e6 / 4), device=device)
        for name in names:
            codec = build_codec(Quantization(codec=name))  # type: ignore[arg-type]
            rows.append(codec_row(codec, values, options.rounds))
        steps.append(outer_step_row(values.numel(), device, options.rounds))
    title = f"{describe_device(device)}; {options.threads} CPU threads; torch {torch.__version__}"
    core.print_table(title, HEADER, rows)
    print(LEGEND)
    core.print_table("outer step", STEP_HEADER, steps)


if __name__ == "__main__":
    main()
