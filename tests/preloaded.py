"""Modules that the server of `tests.processes` imports once, for all processes that it forks."""

import atexit
import gc
import os

import pytest  # noqa: F401
import torch
import torch.distributed.launcher.api

import torchtitan_diloco.island_course
import torchtitan_diloco.islands.syncing
import torchtitan_diloco.launching.rank  # noqa: F401

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()  # the first step imports more
gc.collect()
gc.freeze()  # the forks neither collect nor copy these objects
SERVER = os.getpid()


@atexit.register
def end() -> None:
    """End the server without freeing what is frozen: Triton would list it as leaked."""
    if os.getpid() == SERVER:
        os._exit(0)
