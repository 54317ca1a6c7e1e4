"""Agreement of all ranks before they train: groups, settings, code and arithmetic."""

import hashlib
import math
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan_diloco.base.hardware import describe_machine, release_of
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.messages import gather_objects
from torchtitan_diloco.base.user import UserError

DILOCO = Path(__file__).parent
PLACES = (DILOCO, DILOCO.with_name("base"))
"""Code that decides the bits of the outer loop."""

# --- groups and models that cannot work -----------------------------------------------------------


def check_group(group: dist.ProcessGroup | None) -> None:
    try:
        if group is not None:
            dist.get_backend(group)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"group: {group!r} is not a group of torch.distributed that contains "
            "this rank. Start all workers in one job (torchrun's --nnodes), call "
            "dist.new_group(ranks) on all ranks, and pass its result; to join "
            "separate jobs, pass islands.IslandPeers(...)"
        ) from error


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise an error if gradients would be averaged over workers; warn if buffers will differ."""
    if group is None or group.size() == 1:
        return
    workers = set(dist.get_process_group_ranks(group))
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            _check_ranks(workers, ranks, f'DistributedDataParallel "{name}"')
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh.mesh.flatten().tolist()
            _check_ranks(workers, ranks, f"the mesh of {name}")
    statistics = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
    if statistics and group.rank() == 0:
        logger.warning(
            f"running statistics such as {statistics[0]} are not exchanged: each "
            "worker keeps its own, and global_state_dict() returns those of this "
            "worker. Use a norm without them (LayerNorm, GroupNorm), or average them "
            "with dist.all_reduce before you save or evaluate"
        )


def check_shards(model: nn.Module, group: dist.ProcessGroup | None, argument: str) -> None:
    """Raise an error if the model is sharded, and there is no group over which the ranks that have
    its shards can agree. `argument`: where to pass it."""
    if group is not None:
        return
    for name, parameter in model.named_parameters():
        if (ranks := ranks_with_shards(parameter)) > 1:
            raise UserError(
                f"{name} is sharded over {ranks} ranks of this worker, which judge and reset "
                f"fragments together: pass {argument}, a gloo group of these ranks that nothing "
                "else uses"
            )


def ranks_with_shards(parameter: Tensor) -> int:
    """Return the number of ranks over which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = parameter.device_mesh.shape
    pairs = zip(sizes, parameter.placements, strict=True)
    return math.prod(size for size, placement in pairs if placement.is_shard())


def _check_ranks(workers: set[int], ranks: list[int], what: str) -> None:
    if len(workers.intersection(ranks)) > 1:
        raise UserError(
            f"{what} joins the ranks {ranks}, which belong to several workers "
            f"(the group between workers joins {sorted(workers)}): gradients would "
            "be averaged over workers in every step. Create it with the ranks of "
            "this worker only, or remove it if a worker has one rank"
        )


# --- facts ----------------------------------------------------------------------------------------


class Started(msgspec.Struct):
    """Facts about how a rank was started."""

    facts: dict[str, str]
    results: dict[str, str]
    """Digests of its results, by operation."""
    machine: str


def agree(
    facts: Mapping[str, str],
    group: dist.ProcessGroup | None,
    member: str,
    *,
    results: Mapping[str, str] | None = None,
) -> None:
    """Raise an error on every rank of `group` if a fact, the release of torch or the code of this
    package differs from the first rank. Callers add `code_facts` for the code with which they
    compute. Builds of torch may differ, such as those for two versions of CUDA: `results` show
    whether they compute the same.

    Args:
        member: name of a rank of the group in the message, such as "worker".
        results: digests of the results of this rank, by operation.
    """
    mine = Started(
        facts={**facts, **code_facts(*PLACES), "torch version": release_of(torch.__version__)},
        results=dict(results or {}),
        machine=describe_machine(),
    )
    ranks = [*enumerate(gather_objects(mine, group))]
    if differences := find_differences({f"on {member} {n}": rank.facts for n, rank in ranks}):
        raise UserError(
            f"{member}s were started differently; start all of them with the same:\n  "
            + "\n  ".join(differences)
        )
    machines = {f"on {member} {n} ({rank.machine})": rank.results for n, rank in ranks}
    if differences := find_differences(machines):
        raise UserError(
            f"{member}s compute different bits, so their shared copies would differ; use machines "
            "that compute the same:\n  " + "\n  ".join(differences)
        )


def code_facts(*places: Path) -> dict[str, str]:
    """Return a fact for each folder or file of code that must be the same on all machines."""
    return {
        f"code of {place.name} (install the same commit on all machines)": code_fingerprint(place)
        for place in places
    }


def module_facts(name: str) -> dict[str, str]:
    """Return a fact for an imported module of others: its file, or the folder of a package. One of
    an interactive session has none."""
    module = sys.modules[name]
    places = [*getattr(module, "__path__", [])] or [getattr(module, "__file__", None)]
    files = [Path(place) for place in places if place]
    return {f"code of {name} (use the same on all machines)": code_fingerprint(*files)}


@cache
def code_fingerprint(*places: Path) -> str:
    """Return a hash of source files, each given or below a folder that is given."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            name = str(path.relative_to(place.parent))
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_differences(gathered: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Describe up to eight differences from the first facts. A key such as "on rank 0" says whose
    facts they are."""
    (first, reference), *others = gathered.items()
    differences = [
        f"{key}: {_shorten(reference.get(key))} {first}, {_shorten(theirs.get(key))} {where}"
        for where, theirs in others
        for key in sorted({*reference, *theirs})
        if theirs.get(key) != reference.get(key)
    ]
    if len(differences) > 8:
        return [*differences[:8], f"and {len(differences) - 8} more"]
    return differences


def _shorten(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= 60 else f"{value[:57]}..."
