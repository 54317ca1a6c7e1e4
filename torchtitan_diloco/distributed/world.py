"""Who takes part: the rank grid (worker, fsdp), its process groups with a timeout each, and this process's device."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link

WORKER, FSDP = "worker", "fsdp"
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SAVING_TIMEOUT = 7200
"""Seconds that ranks wait for each other in a save."""


@dataclass(frozen=True)
class World:
    """This process among all. A single process has no process groups at all: `mesh` and `control` are None."""

    rank: int
    size: int
    workers: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """2-d (worker, fsdp): row m is worker m, whose ranks shard one copy of the model."""
    control: dist.ProcessGroup | None = None
    """All ranks, on the CPU, for bookkeeping: its collectives never queue behind those of the training."""
    roll_call: dist.ProcessGroup | None = None
    """All ranks, for the moment when `control` has failed and is of no use any more."""
    shards: dist.ProcessGroup | None = None
    """The ranks of this worker, on the CPU, for the outer loop's background thread alone."""
    saving: dist.ProcessGroup | None = None
    """All ranks, on the CPU, for the thread that writes checkpoints."""
    host_mesh: DeviceMesh | None = None
    """1-d, the ranks of this worker, on the CPU, for the same thread."""

    @property
    def ranks_per_worker(self) -> int:
        return self.size // self.workers

    @property
    def worker(self) -> int:
        return self.rank // self.ranks_per_worker

    @property
    def rank_in_worker(self) -> int:
        return self.rank % self.ranks_per_worker

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def group(self, dim: str) -> dist.ProcessGroup | None:
        """This rank's process group along a dimension of the grid; None in a single process."""
        return None if self.mesh is None else self.mesh.get_group(dim)


def split_world(size: int, workers: int, fsdp: int) -> int:
    """Ranks per worker, or an error that says how to make the numbers fit."""
    if size % workers:
        raise ValueError(
            f"{size} processes do not divide into diloco.workers = {workers}: "
            f"start a multiple of {workers} (NPROC, NNODES) or change diloco.workers"
        )
    if fsdp and workers * fsdp != size:
        raise ValueError(
            f"diloco.workers = {workers} x parallel.fsdp = {fsdp} is {workers * fsdp} processes, but {size} were "
            f"started: set NPROC or parallel.fsdp = {size // workers}, or 0 to take what is there"
        )
    return size // workers


def pick_device(wanted: str, local_rank: int, *, share: bool = False) -> torch.device:
    """`share`: several workers may use one GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            'run.device = "cuda", but torch sees no GPU here: use "auto" or "cpu", or check the driver'
        )
    if local_rank >= torch.cuda.device_count() and not share:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own, torch sees {torch.cuda.device_count()}: lower NPROC, or set "
            'diloco.link.backend = "gloo" to let several workers of one process each share a GPU'
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_world(
    distributed: Distributed,
    link: Link,
    *,
    device: str,
    workers: int,
    fsdp: int,
    outer_loop: bool = False,
) -> World:
    """Connects to the processes that the launcher started (torchrun's variables); one process stays alone. `outer_loop`: the
    group between workers is the outer loop's, which finds out by itself who is lost."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_per_worker = split_world(size, workers, fsdp)
    share = link.backend == "gloo" and ranks_per_worker == 1
    chosen = pick_device(device, local_rank, share=share)
    if size == 1:
        return World(rank, size, workers, chosen)

    on_gpu = chosen.type == "cuda"
    if link.backend == "nccl" and not on_gpu:
        raise ValueError(
            f'diloco.link.backend = "nccl" needs a GPU, and this run is on {chosen}: use "auto" or "gloo"'
        )
    if link.interface:
        present = [name for _, name in socket.if_nameindex()]
        if link.interface not in present:
            raise ValueError(
                f'diloco.link.interface = "{link.interface}" is no network interface of this machine: choose one of '
                f"{', '.join(present)}, or leave it empty"
            )
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = link.interface
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu and not share else "gloo",
        timeout=timedelta(seconds=distributed.init_timeout_seconds),
        device_id=chosen if on_gpu and not share else None,
    )
    inner_backend = "nccl" if on_gpu and not share else "gloo"
    mesh = build_mesh(
        chosen.type,
        workers,
        {
            WORKER: (
                inner_backend if link.backend == "auto" else link.backend,
                link.timeout_seconds,
            ),
            FSDP: (inner_backend, distributed.train_timeout_seconds),
        },
        outer_loop=outer_loop,
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=link.timeout_seconds))
    roll_call = dist.new_group(backend="gloo")
    shards = None
    if ranks_per_worker > 1:
        timeout = timedelta(seconds=link.timeout_seconds)
        shards, _ = dist.new_subgroups(ranks_per_worker, backend="gloo", timeout=timeout)
    saving, host_mesh = saving_groups(workers)
    return World(rank, size, workers, chosen, mesh, control, roll_call, shards, saving, host_mesh)


def saving_groups(workers: int) -> tuple[dist.ProcessGroup, DeviceMesh]:
    """What checkpoints are agreed on in, apart from all else that is under way. A slow disk is no reason to give up."""
    patience = timedelta(seconds=SAVING_TIMEOUT)
    saving = dist.new_group(backend="gloo", timeout=patience)
    grid = torch.arange(dist.get_world_size()).view(workers, -1)
    own, _ = dist.new_subgroups(grid.shape[1], backend="gloo", timeout=patience)
    ranks = grid[dist.get_rank() // grid.shape[1]]
    return saving, DeviceMesh.from_group(own, "cpu", mesh=ranks, mesh_dim_names=(FSDP,))


def build_mesh(
    device_type: str, workers: int, transports: dict[str, tuple[str, int]], *, outer_loop: bool
) -> DeviceMesh:
    """Process groups are the rows and columns of one grid of ranks: consecutive ranks form a worker. `transports` gives
    the backend and the timeout in seconds along each dimension."""
    grid = torch.arange(dist.get_world_size()).view(workers, -1)
    own = {}
    for dim, lines in ((WORKER, grid.t()), (FSDP, grid)):
        backend, seconds = transports[dim]
        with errors_left_to_us() if dim == WORKER and outer_loop else nullcontext():
            for line in lines.tolist():  # every rank takes part in the making of every group
                group = dist.new_group(line, backend=backend, timeout=timedelta(seconds=seconds))
                if dist.get_rank() in line:
                    own[dim] = group
    return DeviceMesh.from_group(
        [own[WORKER], own[FSDP]], device_type, mesh=grid, mesh_dim_names=(WORKER, FSDP)
    )


@contextmanager
def errors_left_to_us() -> Iterator[None]:
    """Around the making of groups for the outer loop. NCCL's watchdog would end the process over an error or a timeout, before
    the outer loop, which waits with a timeout of its own, has said who is lost and a save under way is finished."""
    decided = NCCL_ERRORS in os.environ
    os.environ.setdefault(NCCL_ERRORS, "0")
    try:
        yield
    finally:
        if not decided:
            del os.environ[NCCL_ERRORS]


def leave_world(world: World) -> None:
    if world.mesh is not None:
        dist.destroy_process_group()
