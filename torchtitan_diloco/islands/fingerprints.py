"""What all islands of a run must have equal."""

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch

from torchtitan_diloco.diloco.codecs import UNIT, build_codec
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.diloco.fields import flat_settings
from torchtitan_diloco.diloco.outer_optimizer import STATE_BUFFERS, UPDATES, OuterStep
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.islands.layout import Layout
from torchtitan_diloco.utils import code_fingerprint

MAY_DIFFER = re.compile(r"diloco\.(link\.|workers|measure_every|quantization\.threads)")
"""Settings in which islands may differ."""


def fingerprints(
    config: DiLoCoConfig, states: Sequence[OuterState], ranks: int, facts: Mapping[str, str]
) -> dict[str, str]:
    settings = flat_settings(config, "diloco.")
    found = {key: str(value) for key, value in settings.items() if not MAY_DIFFER.match(key)}
    found |= {"code": code_fingerprint(), "model": _model(states, ranks)}
    found |= {"arithmetic": arithmetic(config, states[0].outer.device), **facts}
    return {key.replace(" ", "-"): _name(value) for key, value in found.items()}


def _name(value: str) -> str:
    """Return the value, or its hash if a record cannot hold it."""
    fits = re.fullmatch(r"[\x21-\x7e]{1,100}", value)
    return value if fits else hashlib.sha256(value.encode()).hexdigest()[:16]


def _model(states: Sequence[OuterState], ranks: int) -> str:
    """Return a hash of the parameters of each fragment."""
    lines = [
        f"{state.fragment.index} {part} {tuple(part.parameter.shape)} {part.parameter.dtype}"
        for state in states
        for part in state.fragment.parts
    ]
    if any(Layout(state.fragment).depends_on_ranks for state in states):
        lines.append(f"cut on {ranks} ranks")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@torch.no_grad()
def arithmetic(config: DiLoCoConfig, device: torch.device) -> str:
    """Return a hash of a decode, a mean and an outer step on fixed numbers.

    Processors, and versions of torch, may round them differently. Then shared copies would differ.
    """
    codec, optimizer = build_codec(config.quantization), config.outer_optimizer
    values = 5 * UNIT + 7
    whole = torch.arange(values, dtype=torch.int64, device=device)
    numbers = [
        (whole * factor % 10_007 - 5003).to(torch.float32) / 3001 for factor in (7919, 104_729, 31)
    ]
    theta, *deltas = numbers
    decoded = []
    for delta in deltas:
        payload = torch.empty(codec.wire_bytes(values), dtype=torch.uint8, device=device)
        codec.encode(delta, payload)
        decoded.append(torch.empty_like(delta))
        codec.decode(payload, decoded[-1])
    mean = decoded[0].lerp_(decoded[1], 3 / 7)
    slots = [theta.square() * 0.01 for _ in range(STATE_BUFFERS[optimizer.name])]
    UPDATES[optimizer.name](theta, mean, slots, OuterStep(optimizer, 3, optimizer.lr))
    digest = hashlib.sha256()
    for result in (mean, *slots):
        digest.update(result.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
