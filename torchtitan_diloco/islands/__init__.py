"""Workers as separate jobs, which join and leave while the others continue."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchtitan_diloco.base.user import PeersLostError
from torchtitan_diloco.islands.config import Islands

if TYPE_CHECKING:
    from torchtitan_diloco.islands.instructions import IslandFencedError
    from torchtitan_diloco.islands.peers import IslandPeers

__all__ = ["IslandFencedError", "IslandPeers", "Islands", "PeersLostError"]

_NEED_TORCH = {
    "IslandPeers": "peers",
    "IslandFencedError": "instructions",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: reading a configuration must not import torch."""
    if name in _NEED_TORCH:
        return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
