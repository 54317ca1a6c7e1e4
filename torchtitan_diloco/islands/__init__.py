"""Workers as separate jobs, which join and leave while the others continue."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchtitan_diloco.base.user import PeersLostError
from torchtitan_diloco.islands.config import Islands

if TYPE_CHECKING:
    from torchtitan_diloco.islands.members import IslandFencedError
    from torchtitan_diloco.islands.peers import IslandPeers
    from torchtitan_diloco.islands.store_peers import StorePeers

__all__ = ["IslandFencedError", "IslandPeers", "Islands", "PeersLostError", "StorePeers"]

_NEED_TORCH = {
    "IslandPeers": "peers",
    "IslandFencedError": "members",
    "StorePeers": "store_peers",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use: reading a configuration must not import torch."""
    if name in _NEED_TORCH:
        return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
