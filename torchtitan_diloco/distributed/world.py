"""The ranks of a run: the (worker, fsdp) grid, its process groups and links, and the devices."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_diloco.base.hardware import GLOO_INTERFACE, check_device, interfaces, is_loopback
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.rendezvous import store_of_attempt, store_of_job
from torchtitan_diloco.diloco.reports import GlooReports

WORKER = "worker"
"""Dimension of the grid: this rank and its counterparts in the other workers."""
FSDP = "fsdp"
"""Dimension of the grid: the ranks of this worker."""
LONGER_THAN_LINK_SECONDS = 60
"""Seconds by which ranks of a worker wait longer for each other than for another worker. Otherwise,
they would time out first, and the error would not name the lost worker."""
SAVING_TIMEOUT_SECONDS = 7200
"""Seconds for which ranks wait for each other while they write or read checkpoints, because disks
may be slow."""
LOOPBACK = "127."


@dataclass(frozen=True)
class World:
    """Position and process groups of this rank. A single process has groups only for FSDP2 on a
    GPU."""

    rank: int
    size: int
    workers: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """2-d (worker, fsdp): row m is worker m, whose ranks shard one copy of the model."""
    control: dist.ProcessGroup | None = None
    """All ranks, on the CPU: bookkeeping must not queue behind the collectives of training."""
    reports: GlooReports = field(default_factory=lambda: GlooReports(Liveness(None)))
    """Say for whom this rank waits."""
    in_worker: dist.ProcessGroup | None = None
    """The ranks of this worker, on the CPU, for bookkeeping, if they are several."""
    shards: dist.ProcessGroup | None = None
    """The ranks of this worker, on the CPU, only for the outer loop's background thread."""
    saving: dist.ProcessGroup | None = None
    """All ranks, on the CPU, to wait for disks: while a run starts from a checkpoint, and then only
    for the thread that writes checkpoints."""
    host_mesh: DeviceMesh | None = None
    """1-d, the ranks of this worker on the CPU, which describes how saved tensors are sharded. It
    is not used for communication."""
    streams: int = 1
    """TCP streams of the group between workers, from this rank to each other worker."""
    timeout_seconds: float = Link.timeout_seconds
    """Time within which a message of another worker must arrive."""

    @property
    def liveness(self) -> Liveness:
        """Watches the ranks of this worker, and this rank's counterparts in the other workers."""
        return self.reports.liveness

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
        """Return the ranks that average gradients: of all workers, or of this one."""
        if self.mesh is None or (all_workers and self.workers > 1):
            return self.mesh
        # Also on a single GPU, so that there is only one kind of mixed precision.
        if self.ranks_per_worker > 1 or self.device.type == "cuda":
            return self.mesh[FSDP]
        return None


def split_world(size: int, workers: int, fsdp: int) -> int:
    """Return the number of ranks per worker."""
    if size % workers:
        raise UserError(
            f"{size} processes do not divide into diloco.workers = {workers}: "
            f"start a multiple of {workers} (NPROC, NNODES) or change diloco.workers"
        )
    if fsdp and workers * fsdp != size:
        raise UserError(
            f"diloco.workers = {workers} x parallel.fsdp = {fsdp} is "
            f"{workers * fsdp} processes, but {size} were started: set NPROC, or "
            f"parallel.fsdp = {size // workers} (0 uses all processes)"
        )
    return size // workers


def pick_device(wanted: str, local_rank: int, *, share: bool = False) -> torch.device:
    """Return the device of this process; with `share`, several workers may use one GPU."""
    check_device(wanted)
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count and not share:
        raise UserError(
            f"there is no GPU for local rank {local_rank}, because torch sees "
            f"{count}: lower NPROC (a GPU can only be shared by workers of one "
            "process each)"
        )
    device = torch.device("cuda", local_rank % count)
    if local_rank >= count:
        logger.warning(
            f"this worker shares {device} with another one, because there are {count} GPUs"
        )
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

    With `outer_loop`, the group between workers uses gloo also on GPUs: NCCL needs one order of
    operations on all streams, which the outer loop's thread and FSDP2 do not have.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_per_worker = split_world(size, workers, fsdp)
    chosen = pick_device(device, local_rank, share=outer_loop and ranks_per_worker == 1)
    limit = timedelta(seconds=distributed.init_timeout_seconds)
    on_gpu = chosen.type == "cuda"
    if size == 1:
        if on_gpu:
            return world_of_one(chosen, "nccl")
        return World(rank=rank, size=size, workers=workers, device=chosen)

    grid = torch.arange(size).view(workers, ranks_per_worker)
    inner_timeout = distributed.train_timeout_seconds
    exchanges = outer_loop and workers > 1
    if exchanges:
        inner_timeout = max(inner_timeout, link.timeout_seconds + LONGER_THAN_LINK_SECONDS)
    inner_backend = "nccl" if on_gpu else "gloo"
    outer_backend = "gloo" if outer_loop else inner_backend
    if link.interface and not outer_loop:  # NCCL uses one for all groups of a process
        os.environ["NCCL_SOCKET_IFNAME"] = link.interface
    with gloo_over(link.interface):
        # Eager communicators of NCCL are made below, and none for all ranks, over slow links.
        store = store_of_attempt(store_of_job(limit), rank, size, limit)
        dist.init_process_group("gloo", timeout=limit, store=store, rank=rank, world_size=size)
        streams, names = pick_streams(link, rank, ranks_per_worker) if exchanges else (1, "")
        with gloo_over(names):
            across = _own_group(grid.t(), outer_backend, link.timeout_seconds, device=chosen)
        control = _own_group(grid.view(1, size), "gloo", link.timeout_seconds)
        saving = _own_group(grid.view(1, size), "gloo", SAVING_TIMEOUT_SECONDS)
        liveness = _watch_peers(grid, rank)
    in_worker = control
    if workers > 1 and ranks_per_worker > 1:
        in_worker = _own_group(grid, "gloo", link.timeout_seconds)
    inside = _own_group(grid, inner_backend, inner_timeout, device=chosen)
    shards = _own_group(grid, "gloo", link.timeout_seconds)
    row = grid[rank // ranks_per_worker]
    return World(
        rank=rank,
        size=size,
        workers=workers,
        device=chosen,
        mesh=DeviceMesh.from_group(
            [across, inside], chosen.type, mesh=grid, mesh_dim_names=(WORKER, FSDP)
        ),
        control=control,
        reports=GlooReports(liveness),
        in_worker=in_worker if ranks_per_worker > 1 else None,
        shards=shards if ranks_per_worker > 1 else None,
        saving=saving,
        host_mesh=DeviceMesh.from_group(shards, "cpu", mesh=row, mesh_dim_names=(FSDP,)),
        streams=streams,
        timeout_seconds=link.timeout_seconds,
    )


def _watch_peers(grid: torch.Tensor, rank: int) -> Liveness:
    """Watch a row and a column of the grid of workers and their ranks. Collective.

    A rank that loses another reports it to both groups, so that all ranks learn of it.
    """
    worker, column = divmod(rank, grid.shape[1])
    peers = {*grid[worker].tolist(), *grid[:, column].tolist()} - {rank}
    worker_of = [other // grid.shape[1] for other in range(grid.numel())]
    return Liveness(dist.new_group(backend="gloo"), workers=worker_of, peers=peers)


def world_of_one(device: torch.device, backend: str) -> World:
    """Return the world of a single process that computes under FSDP2."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    grid = torch.zeros(1, 1, dtype=torch.int)
    across = _own_group(grid, "gloo", SAVING_TIMEOUT_SECONDS)
    inside = _own_group(grid, backend, SAVING_TIMEOUT_SECONDS, device=device)
    host = _own_group(grid, "gloo", SAVING_TIMEOUT_SECONDS)
    names = (WORKER, FSDP)
    mesh = DeviceMesh.from_group([across, inside], device.type, mesh=grid, mesh_dim_names=names)
    host_mesh = DeviceMesh.from_group(host, "cpu", mesh_dim_names=(FSDP,))
    return World(rank=0, size=1, workers=1, device=device, mesh=mesh, host_mesh=host_mesh)


@contextmanager
def gloo_over(interfaces: str) -> Iterator[None]:
    """Make gloo groups that are created in the body use these network interfaces, if any."""
    before = os.environ.get(GLOO_INTERFACE)
    if interfaces:
        os.environ[GLOO_INTERFACE] = interfaces
    try:
        yield
    finally:
        os.environ.pop(GLOO_INTERFACE, None)
        if before is not None:
            os.environ[GLOO_INTERFACE] = before


def _own_group(
    lines: torch.Tensor, backend: str, seconds: int, device: torch.device | None = None
) -> dist.ProcessGroup:
    """Create one process group for each row of `lines` and return the one of this rank."""
    group_of_rank: dist.ProcessGroup | None = None
    for ranks in lines.tolist():
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=seconds),
            backend=backend,
            device_id=device if backend == "nccl" else None,  # NCCL connects at once then
        )
        if dist.get_rank() in ranks:
            group_of_rank = group
    assert group_of_rank is not None
    return group_of_rank


def leave_world(world: World) -> None:
    world.liveness.close()
    if world.mesh is not None:
        dist.destroy_process_group()


# --- TCP streams between workers ------------------------------------------------------------------


@dataclass(frozen=True)
class _Attachment:
    """Connection of a rank to the network between workers."""

    streams: int
    ranks_here: int
    """Number of ranks of its worker on its machine, which share the streams."""
    is_loopback: bool = False
    problem: str = ""


def pick_streams(link: Link, rank: int, ranks_per_worker: int) -> tuple[int, str]:
    """Return the streams from this rank to each other worker, and the interfaces for gloo.

    Collective over all ranks. Gloo opens a connection for each entry in its list of interfaces. If
    the list is empty, gloo chooses one.
    """
    name = ""
    ranks_here = min(ranks_per_worker, int(os.environ.get("LOCAL_WORLD_SIZE", ranks_per_worker)))
    own_attachment = _Attachment(link.streams, ranks_here)
    try:
        name, address = interface_and_address(link.interface)
        own_attachment = replace(own_attachment, is_loopback=is_loopback(address))
    except OSError as error:
        own_attachment = replace(own_attachment, problem=f"rank {rank}: {error}")
    all_ranks = gather_objects(own_attachment, dist.group.WORLD)
    if len({place.streams for place in all_ranks}) > 1:
        shown = ", ".join(f"{place.streams} on rank {n}" for n, place in enumerate(all_ranks))
        raise UserError(f"diloco.link.streams = {shown}: set the same value on all ranks")
    if all(place.is_loopback for place in all_ranks):
        return 1, ""
    problem = next((place.problem for place in all_ranks if place.problem), "")
    if problem:
        if rank == 0 and link.streams > 1:
            logger.warning(
                f"the network interface between workers is unknown ({problem}): each rank uses 1 "
                "TCP stream instead of diloco.link.streams; set diloco.link.interface"
            )
        return 1, ""
    streams = link.streams_of_rank(min(place.ranks_here for place in all_ranks))
    if streams == 1:
        return 1, ""
    return streams, ",".join([name] * streams)


def interface_and_address(name: str) -> tuple[str, str]:
    """Return the network interface that gloo uses if its setting is `name`, and its address."""
    addresses = interfaces()
    if name := name or os.environ.get(GLOO_INTERFACE, "").partition(",")[0]:
        if name not in addresses:
            raise OSError(f"{name} has no IPv4 address")
        return name, addresses[name]
    address = "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    # Some systems give the name of the machine an address such as 127.0.1.1, which is reached over
    # loopback without being the address of that interface.
    for interface, known in addresses.items():
        if known == address or known[:4] == address[:4] == LOOPBACK:
            return interface, address
    raise OSError(f"no network interface has the address {address} of this machine's name")
