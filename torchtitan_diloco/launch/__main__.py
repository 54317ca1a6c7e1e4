"""Start a run: `python -m torchtitan_diloco.launch [--config NAME_OR_PATH] [--section.key value ...]`."""

import importlib
import os
import sys

from torchtitan_diloco.config import Config, ConfigError, from_command_line
from torchtitan_diloco.launch.gpus import count_gpus
from torchtitan_diloco.launch.mistakes import LaunchError
from torchtitan_diloco.launch.place import Place, read_place
from torchtitan_diloco.launch.processes import local_processes
from torchtitan_diloco.launch.stop import StopSignals, exit_code_of, grace_seconds
from torchtitan_diloco.launch.torchrun import run_processes


def main(arguments: list[str], training_module: str = "torchtitan_diloco.train") -> int:
    """Run `training_module.main(arguments)` in as many processes as the run takes; the exit code."""
    try:
        config = from_command_line(arguments)
        if config is None:  # --help and --print-config are answered
            return 0
        place = read_place(os.environ)
        processes = _processes_here(config, place)
        stop = StopSignals(grace_seconds(os.environ.get("SHUTDOWN_SECONDS", "")))
    except BrokenPipeError:  # `--help | head`: its reader has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, LaunchError) as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2

    with stop:
        if processes == 1 and place.nodes == 1:
            result: int = importlib.import_module(training_module).main(arguments)
        else:
            wait_seconds = config.distributed.init_timeout_seconds
            result = run_processes(place, processes, wait_seconds, training_module, arguments, stop)
    return exit_code_of(stop.first) if stop.first else result


def _processes_here(config: Config, place: Place) -> int:
    gpus = 0 if config.run.device == "cpu" else count_gpus(os.environ)
    return local_processes(
        workers=config.diloco.workers,
        fsdp=config.parallel.fsdp,
        nodes=place.nodes,
        gpus=gpus,
        asked=place.processes,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
