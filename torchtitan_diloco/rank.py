"""A training process: its settings, its connections, its trainer, and its exit code."""

import os
import signal
import sys
import time
from dataclasses import replace

import torch

from torchtitan_diloco.config import Config, ConfigError, from_command_line
from torchtitan_diloco.config.schema import Run
from torchtitan_diloco.distributed.collectives import RanksLostError
from torchtitan_diloco.distributed.world import World, join_world, leave_world
from torchtitan_diloco.hardware import GLOO_INTERFACE, raise_open_files_limit
from torchtitan_diloco.launch import end_run, folder_of_run
from torchtitan_diloco.log import logger, start_logging
from torchtitan_diloco.preflight import check_inputs
from torchtitan_diloco.trainer import Trainer
from torchtitan_diloco.user import USER_ERROR, WORKER_LOST, PeersLostError, UserError, cause_of


def train(arguments: list[str]) -> int:
    """Train with the settings of a command line, and return the exit code."""
    try:
        config = from_command_line(arguments)
    except ConfigError as error:
        return _report(error)
    raise_open_files_limit()
    start_logging()
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        logger.warning(f"started again after a crash: restart {restarts} of {limit}")
    set_determinism(config.run)
    try:
        check_inputs(config)  # the launcher has done so, but not torchrun
        config = replace(config, run=replace(config.run, folder=folder_of_run(config)))
        world = join(config)
        trainer = Trainer(config, world)
        trainer.run()
    except UserError as error:
        return _report(error)
    except PeersLostError as error:
        _print_error(error)
        return WORKER_LOST
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _print_error(
            f"out of memory ({cause_of(error)}): lower training.batch_size, "
            "training.sequence_length or the size of the model, or use more ranks per worker"
        )
        return USER_ERROR
    leave_world(world)
    if not trainer.only_noticed:
        return 0
    code = 128 + signal.SIGTERM  # the run is not finished, and its machine goes away
    end_run(code)
    return code


def join(config: Config) -> World:
    """Connect to the other processes of the run."""
    started = time.monotonic()
    try:
        return join_world(
            config.distributed,
            config.diloco.link,
            device=config.run.device,
            workers=config.workers_of_job,
            fsdp=config.parallel.fsdp,
            outer_loop=config.diloco.method != "none",
        )
    except torch.AcceleratorError:  # for example, a GPU that is in use
        raise
    except RuntimeError as error:
        key = "diloco.link.interface"
        interface = config.diloco.link.interface
        if not interface and (interface := os.environ.get(GLOO_INTERFACE, "")):
            key = GLOO_INTERFACE
        interface = interface or "default"
        raise RanksLostError(
            f"could not connect to all other processes over the {interface} interface "
            f"(failed after {time.monotonic() - started:.0f} s, distributed.init_timeout_seconds = "
            f"{config.distributed.init_timeout_seconds}): if no other console has an earlier "
            f"error, set {key} to one that leads to the other nodes, and open its "
            f"ports (docs/troubleshooting.md) ({cause_of(error)})"
        ) from error


def set_determinism(run: Run) -> None:
    torch.manual_seed(run.seed)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _report(error: UserError) -> int:
    """Print a mistake of the user.

    If all ranks have the same error, the first rank of each machine prints it, and the launcher
    ends the others. A rank that is still alive after ten seconds has an error of its own.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    _print_error(error)
    end_run(error.exit_code)
    return error.exit_code


def is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error)  # torch has no type for it on the CPU


def _print_error(error: Exception | str) -> None:
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    print(f"{rank}error: {text}", file=sys.stderr, flush=True)
