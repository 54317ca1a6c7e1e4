"""How a folder of DCP is recognized, without the imports that reading one takes.

`torch.distributed.checkpoint` sets up the logging of torch, which the launcher has to do first.
"""

from pathlib import Path

METADATA_NAME = ".metadata"
"""File that only a DCP folder has."""
DATA_NAMES = "*.distcp"


def is_dcp(folder: Path) -> bool:
    return (folder / METADATA_NAME).is_file()
