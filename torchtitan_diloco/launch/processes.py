"""How many training processes a node starts: a pure function of the config, the nodes and the devices."""

from torchtitan_diloco.launch.mistakes import LaunchError


def local_processes(*, workers: int, fsdp: int, nodes: int, gpus: int, asked: int | None) -> int:
    """Processes on each node.

    `asked` is NPROC; without it, every GPU of the node gets a process, and without GPUs (`gpus` = 0: there are none, or
    the run is on the CPU) each worker gets `fsdp` processes, at least one. A config that fixes `fsdp` fixes the world:
    `workers` x `fsdp`, whatever the devices.
    """
    if fsdp:
        return _processes_of_a_fixed_world(workers, fsdp, nodes, gpus, asked)
    if asked is not None:
        _check_divisible(asked * nodes, f"NPROC={asked} x NNODES={nodes}", workers, "change NPROC")
        return asked
    if gpus:
        _check_divisible(
            gpus * nodes,
            f"{gpus} GPUs x NNODES={nodes}",
            workers,
            "set NPROC, or run on the CPU with --run.device cpu",
        )
        return gpus
    if workers % nodes:
        raise LaunchError(
            f"diloco.workers={workers} cannot be divided over NNODES={nodes}; set NPROC (processes on each node), "
            f"or --diloco.workers to a multiple of {nodes}"
        )
    return workers // nodes


def _processes_of_a_fixed_world(
    workers: int, fsdp: int, nodes: int, gpus: int, asked: int | None
) -> int:
    world = workers * fsdp
    described = f"diloco.workers={workers} x parallel.fsdp={fsdp} = {world} processes"
    if asked is not None and asked * nodes != world:
        raise LaunchError(
            f"NPROC={asked} x NNODES={nodes} = {asked * nodes} processes, but {described}; unset NPROC, or set "
            "--parallel.fsdp 0 to take whatever there is"
        )
    if world % nodes:
        raise LaunchError(
            f"{described}, which cannot be divided over NNODES={nodes}; change one of the three"
        )
    if asked is None and gpus and world // nodes > gpus:
        raise LaunchError(
            f"{described}, {world // nodes} on each of NNODES={nodes}, but this node has {gpus} GPUs; lower "
            "--parallel.fsdp or --diloco.workers, add nodes, or run on the CPU with --run.device cpu"
        )
    return world // nodes


def _check_divisible(world: int, described: str, workers: int, otherwise: str) -> None:
    if world % workers:
        raise LaunchError(
            f"{described} = {world} processes cannot be divided among diloco.workers={workers}; "
            f"set --diloco.workers to a divisor of {world}, or {otherwise}"
        )
