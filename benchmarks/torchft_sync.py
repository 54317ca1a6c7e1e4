"""The same syncs with torchft's DiLoCo (optional: `pip install -e .[bench]`), measured in the same way."""

import importlib.util
import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.sync_measure import TIMEOUT, WORKERS, Case, Measured, fragment_names, measure_syncs, peak_megabytes, start
from tests.processes import ProcessPool


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


def run(case: Case) -> Measured:
    os.environ.setdefault("RUST_LOG", "warn")  # it logs every quorum
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=WORKERS, join_timeout_ms=10_000, quorum_tick_ms=100)
    port = lighthouse.address().rpartition(":")[2]
    pool = ProcessPool()
    measured: Measured = pool.run(measure_torchft, WORKERS, case, f"http://localhost:{port}", timeout=TIMEOUT)[0]
    pool.close()
    lighthouse.shutdown()
    return measured


def measure_torchft(case: Case, lighthouse: str) -> Measured:
    """DiLoCo hangs itself into the inner optimizer's step: one that has no gradients does nothing else."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.INFO)
    world, model, plain = start(case)
    fragments: list[nn.Module] = [nn.ModuleList(model.get_submodule(name) for name in names) for names in fragment_names(case)]
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=TIMEOUT)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=WORKERS,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        replica_id=f"replica_{world.worker}",
        timeout=timeout,
        init_sync=False,
    )
    loop = DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=case.sync_every,
        fragment_sync_delay=case.delay,
        fragment_update_alpha=case.mixing,
    )
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in fragments]
    with loop:
        syncs = measure_syncs(case, world, model, sizes, lambda: inner.step(), lambda: 0)
    peak = peak_megabytes()
    manager.shutdown(wait=False)
    return syncs, peak - plain
