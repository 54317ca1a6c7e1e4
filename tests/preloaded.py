"""Modules that the server of `tests.processes` imports once, for all processes that it forks."""

import gc

import torch

import torchtitan_diloco.train  # noqa: F401

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()  # the first step imports more
gc.collect()
gc.freeze()  # the forks neither collect nor copy these objects
