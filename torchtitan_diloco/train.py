"""Entry of a training process: config -> world -> Trainer -> run. Started by launch/, alone or under torchrun."""

import os
import sys
import time
import traceback
from pathlib import Path

import torch

from torchtitan_diloco.config import ConfigError, from_command_line
from torchtitan_diloco.config.schema import Run
from torchtitan_diloco.diloco.transport import WorkerLostError
from torchtitan_diloco.distributed.roll_call import RanksLostError
from torchtitan_diloco.distributed.world import join_world, leave_world
from torchtitan_diloco.trainer import Trainer
from torchtitan_diloco.utils import start_logging

USER_ERROR = 2
"""Exit code of a mistake in the configuration or the data."""
WORKER_LOST = 3
"""Exit code where another worker died or was silent for too long."""


def main(words: list[str]) -> int:
    try:
        config = from_command_line(words)
    except ConfigError as error:
        return _report(error)
    if config is None:
        return 0
    start_logging(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    set_determinism(config.run)
    try:
        world = join_world(
            config.distributed,
            config.diloco.link,
            device=config.run.device,
            workers=config.diloco.workers,
            fsdp=config.parallel.fsdp,
            outer_loop=config.diloco.method != "none",
        )
        Trainer(config, world).run()
    except ValueError as error:
        return _report(error)
    except (WorkerLostError, RanksLostError) as error:
        print(f"{_rank()}error: {error}", file=sys.stderr, flush=True)
        return WORKER_LOST
    leave_world(world)
    return 0


def set_determinism(run: Run) -> None:
    torch.manual_seed(run.seed)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _report(error: ValueError) -> int:
    """Tells a mistake of the user's in words. What all ranks run into is told by the first one of each machine: the
    launcher ends the others as soon as that one has left; a rank that still lives then has met something of its own."""
    if not _is_ours(error):
        raise error
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    print(f"{_rank()}error: {error}", file=sys.stderr, flush=True)
    return USER_ERROR


def _rank() -> str:
    return f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised the error, whose message is then meant for the user; torch's own keep their trace."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised_in).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
