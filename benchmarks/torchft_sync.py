"""The same syncs with torchft's DiLoCo (optional: `pip install -e .[bench]`), measured in the same way."""

import logging
import os
from datetime import timedelta

import torch
from torch import nn

from benchmarks.sync_measure import (
    TIMEOUT,
    WORKERS,
    Case,
    Measured,
    fragment_names,
    measure_syncs,
    peak_megabytes,
    start,
)
from benchmarks.torchft_manager import serve_lighthouse, start_manager
from tests.processes import ProcessPool


def run(case: Case) -> Measured:
    os.environ.setdefault("RUST_LOG", "warn")  # it logs every quorum
    lighthouse = serve_lighthouse("127.0.0.1:0", WORKERS, join_seconds=10)
    port = lighthouse.address().rpartition(":")[2]
    pool = ProcessPool()
    measured: Measured = pool.run(
        measure_torchft, WORKERS, case, f"http://localhost:{port}", timeout=TIMEOUT
    )[0]
    pool.close()
    lighthouse.shutdown()
    return measured


def measure_torchft(case: Case, lighthouse: str) -> Measured:
    """DiLoCo hangs itself into the inner optimizer's step: one that has no gradients does nothing else."""
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.INFO)
    world, model, plain = start(case)
    fragments: list[nn.Module] = [
        nn.ModuleList(model.get_submodule(name) for name in names) for names in fragment_names(case)
    ]
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for part in fragments
    ]
    timeout = timedelta(seconds=TIMEOUT)
    manager = start_manager(
        model, world.worker, WORKERS, lighthouse=lighthouse, address="localhost", timeout=timeout
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
