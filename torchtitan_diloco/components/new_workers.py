"""Give state to workers that have no checkpoint of the step that the others go on from."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_diloco.base.broadcasts import broadcast_tensors
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.diloco.state_dict import SENT
from torchtitan_diloco.distributed.world import WORKER, World


def copy_to_others(tensors: Mapping[str, Tensor], world: World, readers: Sequence[int]) -> None:
    """Copy the state of the first worker that has read it to those that have not.

    All workers take part in each message, as none may wait longer than for one. Other readers drop
    what they get: their checkpoints may have other tensors, as a fragment that one of them started
    afresh has no optimizer state until the next step.
    """
    group = world.group(WORKER)
    assert group is not None, "there are several workers"
    source = readers[0]
    local = {
        name: local_of(tensor)
        for name, tensor in sorted(tensors.items())
        if not name.startswith(SENT)
    }
    sizes = gather_objects({name: part.nbytes for name, part in local.items()}, world.saving)
    of_source = sizes[source * world.ranks_per_worker + world.rank_in_worker]
    keeps = world.worker == source or world.worker not in readers
    received = (
        local[name] if keeps else torch.empty(size, dtype=torch.uint8)
        for name, size in of_source.items()
        if size > 0
    )
    broadcast_tensors(
        received,
        group,
        source=source,
        total=sum(of_source.values()),
        timeout_seconds=world.timeout_seconds,
        device=world.device if dist.get_backend(group) == "nccl" else None,
        label=f"state of worker {source}",
    )


def describe_changed_workers(before: int, now: int, readers: Sequence[int]) -> list[str]:
    """Return what a run loses or copies that has other workers than its checkpoint."""
    notes = list[str]()
    if before > now:
        notes.append(
            f"{before} workers are now {now}: what those from {now} on had not sent yet is left "
            "behind"
        )
    if new := [worker for worker in range(now) if worker not in readers]:
        notes.append(
            f"workers {new} have no checkpoint: they get a copy from worker {readers[0]}, with the "
            "shared parameters"
        )
    return notes
