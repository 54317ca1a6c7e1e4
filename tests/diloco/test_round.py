"""The outer step is torch's optimizer, and records of rounds say what it did to the parameters."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.diloco.reference import build_optimizer
from tests.diloco.toy import AVERAGE_EVERY_STEP, config, full, inner_step, join, start
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Quantization, StreamingDiLoCo
from torchtitan_diloco.diloco.checksums import checksum
from torchtitan_diloco.diloco.config import Fragments, OuterOptimizer
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.metrics import OUTER_METRICS, merge_parts
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.diloco.outer_step import STEP_VALUES
from torchtitan_diloco.diloco.round import Round, Traffic
from torchtitan_diloco.distributed.world import WORKER

PLAIN_MEAN = replace(config(0, delay=0, name="sgd", lr=1.0), sync_every=4)
"""The outer step is the mean, so that each norm can be read off the parameters."""


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([full(value).double().flatten() for value in values.values()])


def _rounds(
    workers: int, ranks: int, codec: str, measure_every: int
) -> list[tuple[Round, dict[str, float]]]:
    """Return every round, and its numbers from the parameters."""
    wire = Quantization(codec=codec)
    found = []
    chosen = replace(PLAIN_MEAN, quantization=wire, measure_every=measure_every)
    outer, model, optimizer = start(chosen, workers, ranks)
    for step in range(1, 13):
        inner_step(model, optimizer, outer.worker, step)
        before = flat(outer.global_state_dict())
        local = flat(dict(model.named_parameters()))
        outer.step(weight=2.0)
        after = flat(outer.global_state_dict())
        rounds = outer.rounds()
        assert len(rounds) == (step % 4 == 0)
        delta = before - local
        update = after - before
        expected = {
            "round/delta_norm": float(delta.norm()),
            "round/mean_norm": float(update.norm()),
            "round/drift_norm": float((local - after).norm()),
            "round/dot_with_mean": -float(torch.dot(delta, update)),
            "sync/largest_mean_delta": float(update.abs().max()),
        }
        found += [(one, expected) for one in rounds]
    return found


def measured(round_: Round, names: Iterable[str]) -> dict[str, float]:
    return {name: float(round_.numbers.get(name, math.nan)) for name in names}


@pytest.mark.parametrize(
    ("workers", "ranks", "codec"),
    [(1, 1, "fp32"), (2, 1, "fp4_e3m0"), (3, 1, "fp32"), (3, 1, "int8"), (2, 2, "fp32")],
)
def test_numbers_are_those_of_the_parameters(
    processes: ProcessPool, workers: int, ranks: int, codec: str
) -> None:
    """Ranks of a worker have a part each, which merge as they are declared."""
    results = processes.run(_rounds, workers * ranks, workers, ranks, codec, 1)
    for worker in range(workers):
        for shards in zip(*results[worker * ranks :][:ranks], strict=True):
            expected = shards[0][1]
            found = merge_parts([measured(one, expected) for one, _ in shards], OUTER_METRICS)
            if workers == 1:  # its delta is the mean, and there is no exchange that measures it
                found["round/dot_with_mean"] = found["round/delta_norm"] ** 2
            assert found == pytest.approx(expected, rel=1e-3)
            round_ = shards[0][0]
            assert (round_.participants, round_.weight) == (workers, 8.0)
            assert (round_.fragment, round_.applied_step) == (0, round_.sent_step)
            if workers > 1:
                traffic = round_.traffic
                moments = [round_.due, round_.taken, round_.begun, max(traffic.heard.values())]
                moments += [traffic.received, round_.ready, round_.fetched, round_.applied]
                assert moments == sorted(moments)
                assert min(traffic.bytes_sent, traffic.bytes_received) > 0


def test_nothing_is_measured_in_other_rounds(processes: ProcessPool) -> None:
    for found in processes.run(_rounds, 2, 2, 1, "fp32", 3):
        for round_, expected in found:
            record = measured(round_, expected)
            norm = record.pop("round/delta_norm")
            assert norm == pytest.approx(expected["round/delta_norm"], rel=1e-3)
            assert all(map(math.isnan, record.values())) == (round_.outer_round == 2)


def _transfers(codec: str) -> list[tuple[tuple[float, ...], float, list[float]]]:
    """Return what this worker says of its transfers in each round but the first, with the bytes
    that it got in the round before, and the rates from the others then."""
    world = join(3)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(1_000_000))})
    chosen = replace(AVERAGE_EVERY_STEP, quantization=Quantization(codec=codec))
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    found = []
    before = Traffic()
    for step in range(4):
        with torch.no_grad():
            model["weight"] += torch.randn(1_000_000)
        outer.step()
        (round_,) = outer.rounds()
        if step:
            vitals = outer.peers.reports.latest()[f"worker {outer.worker}"].vitals
            rates = [before.rate(other) for other in range(3) if other != outer.worker]
            found.append((vitals.transfers, before.bytes_received, rates))
        before = round_.traffic
    outer.close()
    return found


@pytest.mark.parametrize("codec", ["fp4_e3m0", "topk"])
def test_transfers_of_a_cycle_take_its_bytes_at_the_measured_rate(
    processes: ProcessPool, codec: str
) -> None:
    """One fragment makes a cycle. Of `topk`, each worker sends its whole delta to all others."""
    for worker, rounds in enumerate(processes.run(_transfers, 3, codec)):
        for transfers, received, rates in rounds:
            others = [took for other, took in enumerate(transfers) if other != worker]
            expected = [received / 2 / rate for rate in rates]
            assert others == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["nesterov", "momentum", "sgd", "adam"])
@pytest.mark.parametrize("size", [0, 1, STEP_VALUES + 17])
def test_steps_are_torchs(name: str, size: int) -> None:
    torch.manual_seed(0)
    config = OuterOptimizer(name=name, lr=0.3, beta2=0.95, epsilon=1e-3)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(size))})
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state = OuterState(fragment, config, torch.device("cpu"))
    expected = model["weight"].detach().clone()
    optimizer = build_optimizer(config, [expected])
    for _ in range(5):
        expected.grad = torch.randn(size)
        state.delta.copy_(expected.grad)
        optimizer.step()
        before = state.outer.clone()
        state.advance(config.lr)
        assert torch.equal(state.outer, before), "whole until the fragment is applied"
        assert state.checksum == checksum(state.delta)
        state.apply(state.delta, Mode.TAKE)
        torch.testing.assert_close(state.outer, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(model["weight"], state.outer)


@given(st.integers(1, 3000), st.integers(0, 10**6))
def test_checksum_sees_a_flipped_bit_and_a_swap(size: int, place: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    flipped = values.clone()
    flipped.view(torch.int32)[place % size] ^= 1
    assert checksum(values) == checksum(values.clone()) != checksum(flipped)
    if size >= 2048:
        swapped = torch.cat([values[size - 1024 :], values[1024 : size - 1024], values[:1024]])
        assert checksum(values) != checksum(swapped)
