"""Before the first step: workers agree on what they do, and start from worker 0's model."""

import hashlib
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_diloco.config.fields import flat_settings, section_mistakes
from torchtitan_diloco.diloco.codecs import kernels_name
from torchtitan_diloco.diloco.config import DiLoCo, Link, diloco_mistakes, quantization_mistakes
from torchtitan_diloco.diloco.fragments import Fragment
from torchtitan_diloco.diloco.transport import transports
from torchtitan_diloco.utils import code_fingerprint, find_differences

PER_WORKER = {"diloco.link.interface", "diloco.link.outer_state"}
"""Settings in which workers may differ."""


def check_settings(config: DiLoCo, group: dist.ProcessGroup | None) -> None:
    """What the TOML loader has checked for a run has to be checked for a config that was made in Python."""
    mistakes = section_mistakes(config, "diloco") or list(diloco_mistakes(config))
    workers = 1 if group is None else group.size()
    mistakes += quantization_mistakes(config.quantization, workers)
    if config.method == "none":
        mistakes.append(
            (
                "diloco.method",
                '"none" needs no StreamingDiLoCo: leave it out, and average gradients instead',
            )
        )
    if config.workers not in (1, workers):
        mistakes.append(
            ("diloco.workers", f"is {config.workers}, but the group joins {workers}: leave it out")
        )
    present = sorted(set(transports(group).values()))
    if workers > 1 and config.link.backend != "auto" and config.link.backend not in present:
        mistakes.append(
            (
                "diloco.link.backend",
                f'is "{config.link.backend}", but the group is of {" and ".join(present)}',
            )
        )
    if mistakes:
        raise ValueError("\n".join(f"{key}: {reason}" for key, reason in mistakes))


def agree_on_run(
    group: dist.ProcessGroup | None,
    config: DiLoCo,
    fragments: tuple[Fragment, ...],
    *,
    seed: int,
    run_id: str,
) -> int:
    """Refuses workers with other settings, code or model; returns a number that is this run's alone."""
    settings = {f"diloco.{key}": str(value) for key, value in flat_settings(config).items()}
    facts = {key: value for key, value in settings.items() if key not in PER_WORKER}
    facts |= {
        "code": code_fingerprint(),
        "seed": str(seed),
        "run id": run_id,
        "model": _layout(fragments),
    }
    on_gpu = any(part.parameter.is_cuda for fragment in fragments for part in fragment.parts)
    facts["codec kernels"] = kernels_name() if on_gpu else "torch"
    gathered: list[Any] = [(facts, secrets.token_hex(8))]
    if group is not None and group.size() > 1:
        gathered = gathered * group.size()
        dist.all_gather_object(gathered, gathered[0], group=group)
        differences = find_differences([theirs for theirs, _ in gathered], "worker")
        if differences:
            raise ValueError(
                "workers were started differently; give all of them the same:\n  "
                + "\n  ".join(differences)
            )
    name = "/".join(
        [*facts.values(), gathered[0][1]]
    )  # worker 0's random part keeps apart two runs of one configuration
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _layout(fragments: tuple[Fragment, ...]) -> str:
    """The parameters of each fragment with their shapes and types on this rank."""
    lines = [
        f"{fragment.index} {part} {tuple(part.parameter.shape)} {part.local().numel()} {part.parameter.dtype}"
        for fragment in fragments
        for part in fragment.parts
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@torch.no_grad()
def broadcast_from_first(group: dist.ProcessGroup, model: nn.Module, link: Link) -> None:
    """Worker 0's parameters (frozen ones included) and buffers, each rank the shard it keeps."""
    carriers = {} if link.backend == "gloo" else transports(group)
    for tensor in [*model.parameters(), *model.buffers()]:
        whole = tensor.detach()
        local = whole.to_local() if isinstance(whole, DTensor) else whole
        if not local.numel():
            continue
        sent: Tensor = local if carriers.get(local.device.type) == "nccl" else local.cpu()
        sent = sent.contiguous()
        dist.broadcast(sent, group_src=0, group=group)
        if sent is not local:
            local.copy_(sent)


def pick_state_device(
    group: dist.ProcessGroup | None, fragments: tuple[Fragment, ...], link: Link
) -> torch.device:
    """Where the outer state lives; what is exchanged has to lie where the group's transport can reach it."""
    device = fragments[0].parts[0].local().device
    if device.type == "cpu":
        return device
    if group is None or group.size() == 1:
        return torch.device("cpu") if link.outer_state == "cpu" else device
    carriers = transports(group)
    reaches_host = carriers.get("cpu") == "gloo" and link.backend != "nccl"
    reaches_device = carriers.get(device.type) == "nccl" and link.backend != "gloo"
    host = link.outer_state == "cpu" or (link.outer_state == "auto" and not reaches_device)
    if host and not reaches_host:
        raise ValueError(
            'diloco.link.outer_state = "cpu" needs a gloo group between workers, as NCCL only reaches the GPU: set '
            'diloco.link.backend = "gloo", or outer_state = "device"'
        )
    if not host and not reaches_device:
        raise ValueError(
            'diloco.link.outer_state = "device" needs an NCCL group between workers, as gloo only reaches host memory: '
            'set diloco.link.backend = "nccl", or outer_state = "cpu"'
        )
    return torch.device("cpu") if host else device
