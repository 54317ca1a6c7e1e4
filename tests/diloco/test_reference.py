"""StreamingDiLoCo in real processes computes what the single-process reference computes."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.diloco.reference import ReferenceDiLoCo, Values
from tests.diloco.toy import Net, config, full, inner_step, parameters, start
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import (
    Beginning,
    DiLoCoConfig,
    Fragments,
    Link,
    OuterOptimizer,
    Overlap,
    Quantization,
)
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.schedule import is_dropped

STEPS = 26
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    workers: int
    config: DiLoCoConfig
    ranks: int = 1
    weights: tuple[float, ...] = ()
    """Weights of every step; empty: 1 for all workers."""


def run_case(case: Case) -> tuple[Parameters, Parameters]:
    """Return one worker's local and shared parameters at the end."""
    sizes = case.workers, case.ranks
    outer, model, optimizer = start(case.config, *sizes, adam=True, total_steps=STEPS, seed=3)
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, outer.worker, step)
        outer.step(case.weights[outer.worker] if case.weights else 1.0)
    outer.drain()
    return parameters(model), {n: full(value) for n, value in outer.global_state_dict().items()}


class Wire:
    """Transmits for the reference: codes each rank's rows of a fragment as one flat vector."""

    def __init__(self, case: Case) -> None:
        self.codec = build_codec(case.config.quantization)
        self.case = case

    def transmit(self, delta: Values) -> Values:
        return delta if self.case.workers == 1 else self._coded(delta)

    def gather(self, mean: Values) -> Values:
        at_once = self.case.workers <= 2 or self.codec.format.is_sparse
        return mean if at_once else self._coded(mean)

    def _coded(self, values: Values) -> Values:
        arrived = dict[str, list[Tensor]]()
        for rank in range(self.case.ranks):
            shards = [self._rows(value, rank) for value in values.values()]
            flat = torch.cat([shard.flatten() for shard in shards])
            payload = torch.empty(self.codec.wire_bytes(flat.numel()), dtype=torch.uint8)
            self.codec.encode(flat, payload)
            self.codec.decode(payload, flat)
            parts = flat.split([shard.numel() for shard in shards])
            for name, part, shard in zip(values, parts, shards, strict=True):
                arrived.setdefault(name, []).append(part.view(shard.shape))
        return {name: torch.cat(parts) for name, parts in arrived.items()}

    def _rows(self, value: Tensor, rank: int) -> Tensor:
        """As FSDP2 shards: equal runs of rows, the last ones short or empty."""
        size = -(-value.shape[0] // self.case.ranks)
        return value[rank * size : (rank + 1) * size]


def run_reference(case: Case) -> tuple[list[Parameters], Parameters]:
    models = [Net() for _ in range(case.workers)]
    chosen = case.config
    wire = Wire(case)
    fragments = build_fragments(models[0], chosen.fragments)
    reference = ReferenceDiLoCo(
        models,
        [[part.name for part in fragment.parts] for fragment in fragments],
        chosen,
        total_steps=STEPS,
        transmit=wire.transmit,
        gather=wire.gather,
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    chance = chosen.link.drop_probability
    workers = range(case.workers)
    for step in range(1, STEPS + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, worker, step)
        kept = [parameters(model) for model in models]
        rounds = step // chosen.sync_every
        dropped = [is_dropped(chance, 3, worker, 0, rounds) for worker in workers]
        weights = case.weights or (1.0,) * case.workers
        reference.step([0.0 if dropped[worker] else weights[worker] for worker in workers])
        for worker in workers:
            if dropped[worker] and step % chosen.sync_every == 0:  # it keeps its own parameters
                models[worker].load_state_dict(kept[worker])
    reference.drain()
    return [parameters(model) for model in models], reference.Theta


PATTERNS = [
    Fragments(pattern="sequential", layers_per_fragment=2),
    Fragments(pattern="strided", layers_per_fragment=5),
]
TOPK = Quantization(codec="topk", top_values=6)
FP4 = Quantization(codec="fp4_e3m0", block_size=128)
CODED = [
    Quantization(codec="bf16"),
    Quantization(codec="fp8_e4m3", block_size=16),
    Quantization(codec="fp8_e5m2"),
    Quantization(codec="int8", block_size=32),
    Quantization(codec="fp4_e2m1"),
    Quantization(codec="fp4_e2m1", block_size=16),
    FP4,
    TOPK,
]
WIRES = [Quantization(), Quantization(codec="int8"), TOPK]
CHANCE = 0.6
"""With the seed of `run_case` it drops somebody in some rounds, and not everybody."""


def with_wire(wire: Quantization, delay: int = 5, layers: int = 2, **changes: Any) -> DiLoCoConfig:
    outer: dict[str, Any] = {"name": "sgd", "lr": 1.0} if wire is TOPK else {}
    return replace(config(layers, delay, **outer), quantization=wire, **changes)


def with_turns(delay: int, every: int) -> DiLoCoConfig:
    """A beginning that ends within a cycle, and has more fragments than steps between two sends;
    a falling share."""
    overlap = Overlap(delay, mixing=0.6, mixing_end=0.1)
    beginning = Beginning(length=11, sync_every=every)
    return with_wire(Quantization("fp4_e3m0"), overlap=overlap, beginning=beginning)


CASES = {
    "fragments and delays": [
        *(Case(2 + (p + tau) % 2, config(p, tau)) for p in (0, 8, 2) for tau in (0, 1, 5)),
        *(Case(1, config(layers, delay)) for layers, delay in [(0, 0), (2, 5)]),
    ],
    "mixing": [Case(2, config(2, tau, alpha)) for alpha, tau in [(0.0, 0), (0.0, 3), (1.0, 3)]],
    "turns": [Case(2, with_turns(3, 2)), Case(3, with_turns(0, 1))],
    "outer optimizers": [Case(2, config(2, 3, name=name)) for name in ("momentum", "sgd", "adam")],
    "warm-up": [
        Case(2, config(2, 3, warmup=19)),
        Case(2, replace(with_turns(3, 2), outer_optimizer=OuterOptimizer("adam", warmup=0.5))),
    ],
    "patterns": [Case(2, replace(config(2, 3), fragments=pattern)) for pattern in PATTERNS],
    "FSDP inside": [
        Case(2, config(0, 0, 0.0), ranks=2),
        Case(1, config(8, 1), ranks=2),
        Case(3, config(2, 5), ranks=2),
    ],
    "four workers": [Case(4, config(2, 5, 0.0))],
    # With three workers means are encoded, too; with two ranks, shards divide nothing evenly.
    "codecs": [
        *(Case(3, with_wire(wire)) for wire in CODED),
        Case(2, with_wire(FP4)),
        *(Case(2, with_wire(wire), ranks=2) for wire in (FP4, TOPK)),
    ],
    "weights": [Case(3, with_wire(wire, 0, 0), weights=(3.0, 1.0, 2.0)) for wire in WIRES],
    "dropped workers": [
        Case(3, with_wire(wire, 0, 0, link=Link(drop_probability=CHANCE))) for wire in WIRES
    ],
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{what} {number}")
        for what, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_processes_compute_what_the_reference_computes(processes: ProcessPool, case: Case) -> None:
    reference_locals, reference_shared = run_reference(case)
    size = case.workers * case.ranks
    results = processes.run(run_case, size, case) if size > 1 else [run_case(case)]
    for rank, (local, shared) in enumerate(results):
        expected = reference_locals[rank // case.ranks]
        torch.testing.assert_close(local, expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(shared, reference_shared, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(shared, results[0][1], rtol=0, atol=0)


def test_the_seed_drops_somebody_and_not_everybody() -> None:
    kept = {sum(not is_dropped(CHANCE, 3, worker, 0, r) for worker in range(3)) for r in (1, 2, 3)}
    assert kept & {1, 2}
