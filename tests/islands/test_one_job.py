"""Islands in fp32 that start together have the versions of one job, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import config, inner_step, parameters, start
from tests.islands.by_hand import HandIsland, newest, open_run, syncer, train
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import DiLoCoConfig

STEPS = 100
VERSIONS = 11
"""Of each fragment: the first one after H steps and its offset."""

FRAGMENTS = {0: 1, 8: 2, 2: 5}
"""Number of fragments by layers per fragment."""
Versions = dict[tuple[int, int], Tensor]


def one_job(chosen: DiLoCoConfig, tokens: list[int]) -> tuple[Versions, dict[str, Tensor]]:
    """Return all versions of the shared copies, and the parameters of this worker at the end."""
    outer, model, optimizer = start(chosen, 2, adam=True)
    versions: Versions = {}
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, outer.worker, step)
        outer.step(tokens[outer.worker])
        for round_ in outer.rounds():
            state = outer.peers.states[round_.fragment]
            versions[round_.fragment, round_.outer_round] = state.outer.clone()
    return versions, parameters(model)


def islands(
    chosen: DiLoCoConfig, tokens: list[int], folder: Path
) -> tuple[list[Versions], dict[int, dict[str, Tensor]]]:
    """Return the same of two islands, the parameters by slot."""
    store = folder / "store"
    with syncer(store, folder / "scratch"), open_run(store) as run:
        pair = [HandIsland(run, name, chosen, adam=True) for name in ("a", "b")]
        train(pair, STEPS, tokens)
    ends = {one.machine.slot or 0: parameters(one.model) for one in pair}
    return [one.versions for one in pair], ends


@pytest.mark.parametrize(
    ("layers", "outer", "delay", "tokens"),
    [
        (2, {"name": "nesterov"}, 1, [100, 100]),
        (8, {"name": "adam", "lr": 0.05, "beta2": 0.9}, 5, [100, 170]),
        (0, {"name": "sgd", "lr": 1.0}, 0, [130, 170]),
    ],
    ids=["nesterov", "adam", "average"],
)
def test_islands_have_the_versions_of_one_job(
    processes: ProcessPool,
    tmp_path: Path,
    layers: int,
    outer: dict[str, Any],
    delay: int,
    tokens: list[int],
) -> None:
    chosen = config(layers, delay=delay, **outer)
    results = processes.run(one_job, 2, chosen, tokens)
    found, ends = islands(chosen, tokens, tmp_path)
    expected = results[0][0]
    assert {fragment for fragment, version in expected if version == VERSIONS} == set(
        range(FRAGMENTS[layers])
    )
    for versions in found:
        for key, value in expected.items():
            assert torch.equal(versions[key], value), f"fragment and version {key}"
    for worker, (_, end) in enumerate(results):
        for name, value in end.items():
            assert torch.equal(ends[worker][name], value), f"{name} of worker {worker}"
    decision = newest(tmp_path / "store")
    assert decision.stopped
    assert [sum(ledger.lost for ledger in slot.ledgers) for slot in decision.slots] == [0, 0]
