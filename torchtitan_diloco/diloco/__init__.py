"""Streaming DiLoCo for any training loop."""

from torchtitan_diloco.config.diloco_schema import DiLoCo as DiLoCoConfig
from torchtitan_diloco.config.diloco_schema import (
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
)
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo

__all__ = [
    "DiLoCoConfig",
    "Fragments",
    "Link",
    "OuterOptimizer",
    "Overlap",
    "Quantization",
    "StreamingDiLoCo",
]
