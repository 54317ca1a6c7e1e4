"""What every process of torchft needs, for its syncs (torchft_sync.py) and its training (torchft_train.py) alike."""

import importlib.util
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


def serve_lighthouse(bind: str, workers: int, *, join_seconds: int) -> Any:
    """Where the workers meet."""
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=bind, min_replicas=workers, join_timeout_ms=1000 * join_seconds, quorum_tick_ms=100
    )


def start_manager(
    model: nn.Module,
    worker: int,
    workers: int,
    *,
    lighthouse: str,
    address: str,
    timeout: timedelta,
) -> Any:
    """`address`: of this worker. All start from the same seed."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])

    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=workers,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname=address,
        replica_id=f"replica_{worker}",
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timedelta(seconds=60),
        init_sync=False,
    )
