"""Trace of a few steps for chrome://tracing and Perfetto."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan_diloco.base.formatting import counted
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.config.schema import Profiling
from torchtitan_diloco.distributed.world import World


def build_profiler(
    config: Profiling, folder: Path, world: World
) -> AbstractContextManager[profile | None]:
    """Return a profiler that writes a trace into folder/traces, or a context that yields None."""
    if config.start == 0 or world.rank_in_worker:
        return nullcontext()

    def save(profiler: profile) -> None:
        path = folder / "traces" / f"rank{world.rank}-step{profiler.step_num}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.error(f"the profile {path} could not be written ({error}); training continues")
            return
        profiled = profiler.step_num - config.start
        text = counted(profiled, "step")
        if profiled < config.steps:
            text = f"{text}, as training ends before profiling.steps = {config.steps}"
        logger.info(f"profile of {text}: {path}")

    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    skip = config.start - 1
    return profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=schedule(skip_first=skip, wait=0, warmup=1, active=config.steps, repeat=1),
        on_trace_ready=save,
        record_shapes=True,
    )
