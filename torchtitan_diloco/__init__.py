"""Pretraining across slow links: Streaming DiLoCo between workers, FSDP2 inside them."""

__version__ = "0.2.0"
