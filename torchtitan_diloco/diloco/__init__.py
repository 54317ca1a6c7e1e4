"""Streaming DiLoCo for any training loop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchtitan_diloco.diloco.config import (
    Beginning,
    DiLoCoConfig,
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
)

if TYPE_CHECKING:
    from torchtitan_diloco.diloco.gloo_peers import GlooPeers
    from torchtitan_diloco.diloco.rendezvous import join_workers
    from torchtitan_diloco.diloco.streaming import StreamingDiLoCo
    from torchtitan_diloco.diloco.transport import WorkerLostError

__all__ = [
    "Beginning",
    "DiLoCoConfig",
    "Fragments",
    "GlooPeers",
    "Link",
    "OuterOptimizer",
    "Overlap",
    "Quantization",
    "StreamingDiLoCo",
    "WorkerLostError",
    "join_workers",
]

_NEED_TORCH = {
    "GlooPeers": "gloo_peers",
    "StreamingDiLoCo": "streaming",
    "WorkerLostError": "transport",
    "join_workers": "rendezvous",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: reading a configuration must not import torch."""
    if name in _NEED_TORCH:
        return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
