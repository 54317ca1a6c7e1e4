"""Modules that the server of `tests.processes` imports once, for all processes that it forks."""

import gc

import torch._dynamo  # noqa: F401  (torch imports it in an optimizer's first step)

import torchtitan_diloco.train  # noqa: F401

gc.collect()
gc.freeze()  # the forks neither collect nor copy these objects
