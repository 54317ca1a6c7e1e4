"""The ranks of a run: the (worker, fsdp) grid, its process groups, and the device of a rank."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.liveness import Liveness

WORKER, FSDP = "worker", "fsdp"
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SAVING_TIMEOUT_SECONDS = 7200
"""Seconds that ranks wait for each other in a save. Disks may be slow."""


@dataclass(frozen=True)
class World:
    """This rank among all ranks. A single process has no process groups: they are all None."""

    rank: int
    size: int
    workers: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """2-d (worker, fsdp): row m is worker m, whose ranks shard one copy of the model."""
    control: dist.ProcessGroup | None = None
    """All ranks, on the CPU: bookkeeping must not queue behind the collectives of training."""
    liveness: Liveness = field(default_factory=partial(Liveness, None))
    """Watches the ranks of this worker, and this rank's counterparts in the other workers."""
    shards: dist.ProcessGroup | None = None
    """The ranks of this worker, on the CPU, only for the background thread of the outer loop."""
    saving: dist.ProcessGroup | None = None
    """All ranks, on the CPU, only for the thread that writes checkpoints."""
    host_mesh: DeviceMesh | None = None
    """1-d, the ranks of this worker on the CPU, for the same thread."""

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
        """Return the process group of this rank along a dimension of the grid."""
        return None if self.mesh is None else self.mesh.get_group(dim)

    def fsdp_mesh(self, *, all_workers: bool) -> DeviceMesh | None:
        """Return the ranks that average gradients: those of all workers, or of this one."""
        if self.mesh is None or (all_workers and self.workers > 1):
            return self.mesh
        return self.mesh[FSDP] if self.ranks_per_worker > 1 else None


def split_world(size: int, workers: int, fsdp: int) -> int:
    """Return the number of ranks per worker."""
    if size % workers:
        raise ValueError(
            f"{size} processes do not divide into diloco.workers = {workers}: "
            f"start a multiple of {workers} (NPROC, NNODES) or change diloco.workers"
        )
    if fsdp and workers * fsdp != size:
        raise ValueError(
            f"diloco.workers = {workers} x parallel.fsdp = {fsdp} is {workers * fsdp} processes, "
            f"but {size} were started: set NPROC or parallel.fsdp = {size // workers}, or 0 for "
            "all processes there are"
        )
    return size // workers


def pick_device(wanted: str, local_rank: int, *, share: bool = False) -> torch.device:
    """Return the device of this process; with `share`, several workers may use one GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            'run.device = "cuda", but torch sees no GPU here: use "auto" or "cpu", or check the '
            "driver"
        )
    count = torch.cuda.device_count()
    if local_rank >= count and not share:
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own, torch sees {count}: lower NPROC, or "
            'set diloco.link.backend = "gloo" to let workers of one process each share a GPU'
        )
    device = torch.device("cuda", local_rank % count)
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
    """Connect to the processes that the launcher started (torchrun's environment variables).

    With `outer_loop`, the group between workers belongs to the outer loop, which finds lost workers
    by itself.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_per_worker = split_world(size, workers, fsdp)
    share = link.backend == "gloo" and ranks_per_worker == 1
    chosen = pick_device(device, local_rank, share=share)
    if size == 1:
        return World(rank, size, workers, chosen)

    use_nccl = chosen.type == "cuda" and not share
    _check_link(link, chosen)
    if link.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = link.interface
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_nccl else "gloo",
        timeout=timedelta(seconds=distributed.init_timeout_seconds),
        device_id=chosen if use_nccl else None,
    )
    grid = torch.arange(size).view(workers, ranks_per_worker)
    inner_backend = "nccl" if use_nccl else "gloo"
    outer_backend = inner_backend if link.backend == "auto" else link.backend
    with nccl_watchdog_disabled() if outer_loop else nullcontext():
        across = _own_group(grid.t(), outer_backend, link.timeout_seconds)
    inside = _own_group(grid, inner_backend, distributed.train_timeout_seconds)
    link_timeout = timedelta(seconds=link.timeout_seconds)
    saving_timeout = timedelta(seconds=SAVING_TIMEOUT_SECONDS)
    own_ranks = _own_group(grid, "gloo", SAVING_TIMEOUT_SECONDS)
    return World(
        rank,
        size,
        workers,
        chosen,
        mesh=DeviceMesh.from_group(
            [across, inside], chosen.type, mesh=grid, mesh_dim_names=(WORKER, FSDP)
        ),
        control=dist.new_group(backend="gloo", timeout=link_timeout),
        liveness=_watch(grid, rank),
        shards=_own_group(grid, "gloo", link.timeout_seconds) if ranks_per_worker > 1 else None,
        saving=dist.new_group(backend="gloo", timeout=saving_timeout),
        host_mesh=DeviceMesh.from_group(
            own_ranks, "cpu", mesh=grid[rank // ranks_per_worker], mesh_dim_names=(FSDP,)
        ),
    )


def _check_link(link: Link, device: torch.device) -> None:
    if link.backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f'diloco.link.backend = "nccl" needs a GPU, and this run is on {device}: use "auto" or '
            '"gloo"'
        )
    present = [name for _, name in socket.if_nameindex()]
    if link.interface and link.interface not in present:
        raise ValueError(
            f'diloco.link.interface = "{link.interface}" is no network interface of this machine: '
            f"choose one of {', '.join(present)}, or leave it empty"
        )


def _own_group(lines: torch.Tensor, backend: str, seconds: int) -> dist.ProcessGroup:
    """Create one process group for each row of `lines` and return the one of this rank."""
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(
        lines.tolist(), timeout=timedelta(seconds=seconds), backend=backend
    )
    return own


def _watch(grid: torch.Tensor, rank: int) -> Liveness:
    """Watch a row and a column of the grid: who loses a rank tells both, so that all hear of it."""
    worker, index = divmod(rank, grid.size(1))
    peers = {*grid[worker].tolist(), *grid[:, index].tolist()} - {rank}
    workers = [one // grid.size(1) for one in range(grid.numel())]
    return Liveness(dist.new_group(backend="gloo"), workers=workers, peers=sorted(peers))


@contextmanager
def nccl_watchdog_disabled() -> Iterator[None]:
    """Create groups inside that NCCL's watchdog does not watch.

    The watchdog ends the process after an error or a timeout, before the outer loop, which has a
    timeout of its own, can name the lost worker and let a save finish. A value that the user has
    set stays.
    """
    set_by_user = NCCL_ERROR_HANDLING in os.environ
    os.environ.setdefault(NCCL_ERROR_HANDLING, "0")
    try:
        yield
    finally:
        if not set_by_user:
            del os.environ[NCCL_ERROR_HANDLING]


def leave_world(world: World) -> None:
    world.liveness.close()
    if world.mesh is not None:
        dist.destroy_process_group()
