"""Measure the tokens per second of `generate`, with and without a cache of keys and values.

    .venv/bin/python -m benchmarks.generation [--rounds 5] [--prompts 1,8] [--length 64]
        [--section.key value ...]

Each prompt has --length random tokens and is continued with as many. The weights are random: they
make no difference to the speed. Both ways take turns in one process, and ratios are computed for
each round. CPU time does not depend on other programs, as the time of the wall does.
"""

from functools import partial

import torch
from torch import nn

from benchmarks import core
from torchtitan_diloco.base.hardware import describe_device
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.distributed.world import pick_device
from torchtitan_diloco.models import build_model, vocabulary_rows
from torchtitan_diloco.models.generation import generate
from torchtitan_diloco.models.parallelize import materialize

WAYS = {"whole context": False, "cache": True}
HEADER = "prompts | reads | tokens/s | speedup | CPU ms a token | speedup in CPU time"


def measure(model: nn.Module, prompts: int, length: int, rounds: int) -> list[list[str]]:
    """Return a row for each way to read the context."""
    device = next(model.parameters()).device
    tokens = torch.randint(0, 256, (prompts, length), generator=torch.Generator().manual_seed(0))
    tasks = {
        way: partial(
            generate,
            model,
            tokens.tolist(),
            vocab_size=256,
            sequence_length=2 * length,
            max_new_tokens=length,
            use_cache=use_cache,
        )
        for way, use_cache in WAYS.items()
    }
    timed = {way: partial(core.timed, task, device) for way, task in tasks.items()}
    times_of_way = core.take_turns(timed, rounds)
    new_tokens = prompts * length
    rows = []
    for way, times in times_of_way.items():
        pairs = list(zip(times_of_way["whole context"], times, strict=True))
        rows.append(
            [
                str(prompts),
                way,
                core.summary([new_tokens / duration.wall for duration in times], ",.1f"),
                core.summary([whole.wall / duration.wall for whole, duration in pairs], ".1f"),
                core.summary([duration.cpu / new_tokens for duration in times], ",.2f", 1e3),
                core.summary([whole.cpu / duration.cpu for whole, duration in pairs], ".1f"),
            ]
        )
    return rows


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--rounds", type=core.positive, default=5)
    parser.add_argument("--prompts", type=core.list_of(int), default=[1, 8], help="1,8")
    parser.add_argument("--length", type=core.positive, default=64, help="of a prompt")
    options, words = parser.parse_known_args()
    config = core.load(core.parse_settings(parser, words))
    device = pick_device(config.run.device, 0)
    tokenizer = build_tokenizer(config.data.tokenizer)
    rows = vocabulary_rows(config.model, tokenizer.vocab_size)
    model = build_model(config.model, rows, 2 * options.length)
    materialize(model, device, config.run.seed)
    title = (
        f"{config.model.flavor}, prompts of {options.length} tokens, as many new tokens, fp32; "
        f"{describe_device(device)}; torch "
        f"{torch.__version__}; n = {options.rounds}; median (min ... max)"
    )
    table = [
        row
        for prompts in options.prompts
        for row in measure(model, prompts, options.length, options.rounds)
    ]
    core.print_table(title, HEADER, table)


if __name__ == "__main__":
    main()
