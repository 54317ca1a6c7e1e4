"""Set-up and clean-up of StreamingDiLoCo: checks, agreement of workers, and buffers."""

import hashlib
import secrets
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan_diloco.diloco.arithmetic import find_difference
from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.diloco.codecs import build_codec, describe
from torchtitan_diloco.diloco.config import DiLoCoConfig, diloco_mistakes
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.fields import check_class, flat_settings, raise_mistakes
from torchtitan_diloco.diloco.fragments import Fragment, describe_layout, local_of
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.diloco.meeting import agree
from torchtitan_diloco.diloco.object_collectives import broadcast_object
from torchtitan_diloco.diloco.outer_optimizer import slot_count
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.hardware import GIB
from torchtitan_diloco.log import UserError, logger

MAY_DIFFER = {"diloco.link.interface"}
"""Settings that may differ between workers."""
GPU_SHARE = 0.2
"""Share of a GPU's memory up to which `outer_state = "auto"` means "device"."""


def check_settings(
    model: nn.Module, group: dist.ProcessGroup | None, config: DiLoCoConfig, total_steps: int
) -> None:
    """Raise if settings are invalid, contradict each other, or do not fit the group or model."""
    check_group(group)
    check_class(config, "diloco", DiLoCoConfig)
    workers = 1 if group is None else group.size()
    mistakes = list(diloco_mistakes(config))
    if config.method == "none":
        mistakes.append(("diloco.method", '"none" needs no StreamingDiLoCo: leave it out'))
    needs_length = {
        "diloco.overlap.mixing_end": config.overlap.mixing_end is not None,
        "diloco.beginning.fraction": config.beginning.fraction > 0,
    }
    reason = "needs the length of the run: give StreamingDiLoCo total_steps, or leave it out"
    mistakes += [(key, reason) for key, given in needs_length.items() if given and not total_steps]
    if config.workers not in (1, workers):
        reason = f"must be {workers}, as the group joins so many: leave it out"
        mistakes.append(("diloco.workers", reason))
    if workers > 1 and "cpu:gloo" not in str(dist.get_backend_config(group)).split(","):
        reason = 'cannot send from host memory: hand in dist.new_group(ranks, backend="gloo")'
        mistakes.append(("group", reason))
    raise_mistakes(mistakes, diloco=config)
    check_model(model, group)


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise if torch.distributed cannot use a group."""
    try:
        if group is not None:
            dist.get_backend(group)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"group: torch.distributed does not know {group!r}, or this rank is not in it. Start "
            "all workers in one world (torchrun's --nnodes) and hand in dist.new_group(ranks), "
            "which all ranks call; jobs of their own are joined by islands.IslandPeers(...)"
        ) from error


def check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise if gradients would be averaged over workers; warn if buffers will differ."""
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
            f"running statistics such as {statistics[0]} are not exchanged: every worker keeps its "
            "own, and global_state_dict() returns this one's. Use a norm without them (LayerNorm, "
            "GroupNorm), or average them with dist.all_reduce before you save or evaluate"
        )


def _check_ranks(workers: set[int], ranks: list[int], what: str) -> None:
    if len(workers.intersection(ranks)) > 1:
        raise UserError(
            f"{what} joins the ranks {ranks}, which are of several workers ({sorted(workers)} are "
            "joined by the group between workers): gradients would be averaged over workers in "
            "every step. Make it over the ranks of this worker only, or leave it out if a worker "
            "has one rank"
        )


def agree_on_run(
    group: dist.ProcessGroup | None,
    config: DiLoCoConfig,
    fragments: tuple[Fragment, ...],
    device: torch.device,
    total_steps: int,
    *,
    seed: int,
) -> int:
    """Raise if workers differ in settings, code or model; return a number unique to this run."""
    layout = describe_layout(fragments)
    layout += [str(part.local().numel()) for fragment in fragments for part in fragment.parts]
    settings = flat_settings(config, "diloco.")
    coder = coding_device(device, fragments[0].parts[0].local().device, config)
    difference = group and (
        find_difference(coder, [config.quantization.codec])
        or find_difference(device, [config.outer_optimizer.name])
    )
    mine = {key: str(value) for key, value in settings.items() if key not in MAY_DIFFER}
    mine |= {
        "total_steps": str(total_steps),
        "seed": str(seed),
        "model": hashlib.sha256("\n".join(layout).encode()).hexdigest()[:16],
        # Determines the size of messages.
        "device that encodes (run.device, diloco.link.outer_state)": coder.type,
        "arithmetic": difference or "as known",
    }
    agree(mine, group, "worker")
    # Worker 0's random part distinguishes two runs of one configuration.
    name = "/".join([*mine.values(), broadcast_object(secrets.token_hex(8), str, group)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


@torch.no_grad()
def broadcast_from_first(group: dist.ProcessGroup | None, model: nn.Module) -> None:
    """Copy worker 0's parameters, frozen ones included, and buffers; each rank gets its shard."""
    if group is None or group.size() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        local = local_of(tensor)
        if not local.numel():
            continue
        sent = local.cpu().contiguous()
        dist.broadcast(sent, group_src=0, group=group)
        if sent is not local:
            local.copy_(sent)


def state_bytes(config: DiLoCoConfig) -> int:
    """Return the bytes per parameter in the buffers of an OuterState."""
    is_sparse = build_codec(config.quantization).is_sparse
    return 4 * (2 + slot_count(config.outer_optimizer) + is_sparse)


def pick_state_device(fragments: tuple[Fragment, ...], config: DiLoCoConfig) -> torch.device:
    """Return the device of the outer state."""
    locals_ = [part.local() for fragment in fragments for part in fragment.parts]
    return state_device(sum(local.numel() for local in locals_), locals_[0].device, config)


def state_device(values: float, device: torch.device, config: DiLoCoConfig) -> torch.device:
    """Return the device of the outer state of a rank with `values` parameters on `device`."""
    choice = config.link.outer_state
    if device.type == "cpu" or choice == "cpu":
        return torch.device("cpu")
    total = torch.cuda.get_device_properties(device).total_memory
    is_small = state_bytes(config) * values <= GPU_SHARE * total
    return device if choice == "device" or is_small else torch.device("cpu")


def coding_device(state: torch.device, model: torch.device, config: DiLoCoConfig) -> torch.device:
    """Return the device that encodes deltas: that of the model, but fp32 is sent as it is."""
    return state if build_codec(config.quantization).is_fp32 else model


def build_states(
    config: DiLoCoConfig, fragments: Sequence[Fragment], device: torch.device
) -> list[OuterState]:
    is_sparse = build_codec(config.quantization).is_sparse
    return [
        OuterState(fragment, config.outer_optimizer, device, is_sparse=is_sparse)
        for fragment in fragments
    ]


def build_exchange(
    group: dist.ProcessGroup | None,
    config: DiLoCoConfig,
    states: Sequence[OuterState],
) -> Exchange | None:
    """Return the exchange between the workers of `group`; None for one worker."""
    if group is None or group.size() == 1:
        return None
    sizes, codec = [state.values for state in states], build_codec(config.quantization)
    device = coding_device(states[0].outer.device, states[0].model_device, config)
    exchange = Exchange(
        group,
        codec,
        largest=max(sizes),
        device=device,
        timeout_seconds=config.link.timeout_seconds,
        streams=max(1, config.link.streams),
    )
    if device.type == "cuda":
        exchange.warm_up(sizes)
    return exchange


def start_background(count: int) -> BackgroundThread:
    """Start the thread of exchanges, with `count` torch threads."""
    background = BackgroundThread("diloco-exchange")
    # The first get_num_threads() in a thread resets its number. The last line restores ours.
    threads = torch.get_num_threads()
    background.submit(torch.get_num_threads).result()
    background.submit(partial(torch.set_num_threads, count)).result()
    torch.set_num_threads(threads)
    return background


def close(
    background: BackgroundThread, exchange: Exchange | None, liveness: Liveness, own: bool
) -> None:
    """End the threads of an outer loop. `own`: it has created `liveness` itself."""
    background.close(timeout=0.0 if liveness.is_lost else 5.0)
    if exchange is not None:
        exchange.close()
    if own:
        liveness.close()


def describe_settings(config: DiLoCoConfig, states: Sequence[OuterState]) -> list[str]:
    """Describe outer settings, wire format and memory in lines for the start of a run."""
    overlap, outer, wire = config.overlap, config.outer_optimizer, config.quantization
    memory = sum(state.bytes for state in states)
    place = "GPU" if states[0].outer.is_cuda else "host"
    end, first = overlap.mixing_end, config.beginning
    momentum = f" momentum {outer.momentum:g}" * (slot_count(outer) > 0)
    falling = "" if end is None else f", at the end {end:g}"
    beginning = (
        f"{'':<10} in the first {first.steps} steps every {first.sync_every} steps, averaged and "
        "waited for"
    )
    return [
        f"{'outer':<10} each fragment every {config.sync_every} steps, applied {overlap.delay} "
        f"steps later, local share {overlap.mixing:g}{falling}; {outer.name} lr {outer.lr:g}"
        f"{momentum}",
        *([beginning] if first.steps else []),
        f"{'wire':<10} {describe(wire)}; summed in fp32",
        f"{'':<10} {memory / GIB:.2f} GiB a rank on the {place} for shared parameters, the outer "
        f"optimizer, {'two deltas' if build_codec(wire).is_sparse else 'one delta'}",
    ]
