"""A table of the presets: what they need, by the formulas that a run uses."""

import math

from torchtitan_diloco.config.loader import load_config, shipped_configs
from torchtitan_diloco.diloco.outer_state import state_bytes
from torchtitan_diloco.hardware import GIB, PEAK_BF16_FLOPS
from torchtitan_diloco.log import clock, markdown_table
from torchtitan_diloco.planner.prediction import Conditions, Workload

GPU = "H100"
SMALL_TOKENS = 2**16
"""Vocabulary up to which a token takes two bytes of a shard."""


def presets_table(gpus: int, mfu: float) -> str:
    """Return the table for workers of so many GPUs, at a share `mfu` of the peak."""
    columns = "preset, parameters, tokens, GPUs, GiB a GPU, time, GB on disk, GB sent by a worker"
    rows = []
    for name in shipped_configs():
        config = load_config(name)
        if config.run.device == "cpu" or config.diloco.method == "none":
            continue
        vocabulary = config.model.vocab_size or 0
        load = Workload.of(config, vocabulary)
        plan, workers = load.plan, load.workers
        each = plan.inner_bytes + state_bytes(config.diloco)
        tokens = plan.total_steps * plan.tokens_per_step
        flops = load.model.flops_per_token(config.training.sequence_length) * tokens
        seconds = flops / (workers * gpus * PEAK_BF16_FLOPS[GPU] * mfu)
        sent = load.predict(config.diloco, Conditions(math.inf, (1.0,) * workers))
        cells = (
            name,
            f"{plan.parameters / 1e6:,.0f}M",
            f"{tokens / 1e9:,.1f}B",
            f"{workers} x {gpus}",
            f"{each * plan.parameters / gpus / GIB:.1f}",
            clock(seconds),
            f"{tokens * (2 if vocabulary <= SMALL_TOKENS else 4) / 1e9:,.1f}",
            f"{sent.sent_bytes_per_step * plan.total_steps / 1e9:,.0f}",
        )
        rows.append((plan.parameters, cells))
    return (
        f"{markdown_table(columns.split(', '), [cells for _, cells in sorted(rows)])}\n\n"
        f"{gpus} GPUs a worker, time at {mfu:.0%} of an {GPU}'s peak; GiB without activations, "
        "with outer state (on the host if it is large); 1 GB = 10^9 bytes"
    )
