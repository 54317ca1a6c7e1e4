"""Streaming DiLoCo for any training loop."""

from typing import TYPE_CHECKING, Any

from torchtitan_diloco.diloco.config import DiLoCo as DiLoCoConfig
from torchtitan_diloco.diloco.config import (
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
)

if TYPE_CHECKING:
    from torchtitan_diloco.diloco.messages import WorkerLostError
    from torchtitan_diloco.diloco.streaming import StreamingDiLoCo

__all__ = [
    "DiLoCoConfig",
    "Fragments",
    "Link",
    "OuterOptimizer",
    "Overlap",
    "Quantization",
    "StreamingDiLoCo",
    "WorkerLostError",
]


def __getattr__(name: str) -> Any:
    """Import StreamingDiLoCo on first use: reading a configuration must not import torch."""
    if name == "WorkerLostError":
        from torchtitan_diloco.diloco.messages import WorkerLostError

        return WorkerLostError
    if name == "StreamingDiLoCo":
        from torchtitan_diloco.diloco.streaming import StreamingDiLoCo

        return StreamingDiLoCo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
