"""torch.profiler traces of a few steps, in Chrome / Perfetto format."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan_diloco.config.schema import Profiling
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.log import UserError, logger


def build_profiler(
    config: Profiling, folder: Path, world: World
) -> AbstractContextManager[profile | None]:
    """Return a profiler that writes traces into folder/traces, or a context that yields None."""
    absent = [rank for rank in config.ranks if rank >= world.size]
    if config.enable and absent:
        raise UserError(
            f"profiling.ranks has {absent[0]}, and the run's ranks are 0 to {world.size - 1}: "
            "choose among them"
        )
    if not config.enable or world.rank not in config.ranks:
        return nullcontext()
    traces = folder / "traces"
    traces.mkdir(parents=True, exist_ok=True)

    def save(profiler: profile) -> None:
        path = traces / f"rank{world.rank}-step{profiler.step_num}.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info(f"profile of {config.steps} steps: {path}")

    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    cycle = schedule(
        skip_first=max(0, config.start - 1),
        warmup=1,
        active=config.steps,
        wait=max(0, config.every - config.steps - 1) if config.every else 0,
        repeat=0 if config.every else 1,
        skip_first_wait=1,
    )
    return profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=cycle,
        on_trace_ready=save,
        record_shapes=True,
    )
