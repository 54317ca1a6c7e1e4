"""StreamingDiLoCo in real processes computes what the single-process reference computes."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.diloco.toy import Net, config, full, inner_step, join, parameters, sharded
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import (
    Beginning,
    DiLoCoConfig,
    Fragments,
    Link,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.reference import ReferenceDiLoCo, Values
from torchtitan_diloco.diloco.schedule import is_dropped
from torchtitan_diloco.distributed.world import WORKER

STEPS = 26
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    workers: int
    config: DiLoCoConfig
    ranks: int = 1
    weights: tuple[float, ...] = ()
    """Weights of every step; empty: 1 for all workers."""
    spoiled_step: int = 0
    """Step after which a parameter of worker 1 is NaN."""


def run_case(case: Case) -> tuple[Parameters, Parameters]:
    """Return one worker's local and shared parameters at the end."""
    world = join(case.workers, case.ranks)
    model = sharded(world)
    outer = StreamingDiLoCo(
        model,
        world.group(WORKER),
        case.config,
        shard_group=world.shards,
        total_steps=STEPS,
        seed=3,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, world.worker, step)
        if step == case.spoiled_step and world.worker == 1:
            next(model.parameters()).data.view(-1)[0] = float("nan")
        outer.step(case.weights[world.worker] if case.weights else 1.0)
    outer.drain()
    return parameters(model), {n: full(value) for n, value in outer.global_state_dict().items()}


class Wire:
    """Transmits for the reference: codes each rank's rows of a fragment as one flat vector."""

    def __init__(self, case: Case) -> None:
        self.case, self.codec = case, build_codec(case.config.quantization)

    def transmit(self, delta: Values) -> Values:
        return delta if self.case.workers == 1 else self._coded(delta)

    def gather(self, mean: Values) -> Values:
        at_once = self.case.workers <= 2 or self.codec.is_sparse
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
    models, chosen, wire = [Net() for _ in range(case.workers)], case.config, Wire(case)
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
    chance, workers = chosen.link.drop_probability, range(case.workers)
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


def check(case: Case, processes: ProcessPool) -> None:
    reference_locals, reference_shared = run_reference(case)
    size = case.workers * case.ranks
    results = processes.run(run_case, size, case) if size > 1 else [run_case(case)]
    for rank, (local, shared) in enumerate(results):
        expected = reference_locals[rank // case.ranks]
        torch.testing.assert_close(local, expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(shared, reference_shared, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(shared, results[0][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("workers", "layers", "delay"),
    [
        *[(2 + (layers + delay) % 2, layers, delay) for layers in (0, 8, 2) for delay in (0, 1, 5)],
        (1, 0, 0),
        (1, 2, 5),
    ],
)
def test_fragments_and_delays(
    processes: ProcessPool, workers: int, layers: int, delay: int
) -> None:
    check(Case(workers, config(layers, delay)), processes)


@pytest.mark.parametrize(("mixing", "delay"), [(0.0, 0), (0.0, 3), (1.0, 3)])
def test_mixing(processes: ProcessPool, mixing: float, delay: int) -> None:
    check(Case(2, config(2, delay, mixing)), processes)


@pytest.mark.parametrize(("delay", "every", "workers"), [(3, 2, 2), (0, 1, 3)])
def test_a_beginning_a_falling_share_and_an_average_at_the_end(
    processes: ProcessPool, delay: int, every: int, workers: int
) -> None:
    """The beginning ends within a cycle, and has more fragments than steps between two sends. When
    the last step comes, fragments are in flight."""
    chosen = replace(
        config(2),
        overlap=Overlap(delay=delay, mixing=0.6, mixing_end=0.1),
        beginning=Beginning(steps=11, sync_every=every),
        average_at_end=True,
        quantization=Quantization(codec="fp4_e3m0"),
    )
    check(Case(workers, chosen), processes)


@pytest.mark.parametrize("name", ["momentum", "sgd"])
def test_outer_optimizers(processes: ProcessPool, name: str) -> None:
    check(Case(2, config(2, 3, name=name)), processes)


LISTED = (
    ("embedding", "blocks.3"),
    ("blocks.0", "blocks.1", "gain"),
    tuple(f"blocks.{number}" for number in (2, 5, 4, 6, 7)),
)


@pytest.mark.parametrize(
    "fragments",
    [
        Fragments(pattern="sequential", layers_per_fragment=2),
        Fragments(pattern="explicit", modules=LISTED),
    ],
    ids=lambda fragments: fragments.pattern,
)
def test_patterns(processes: ProcessPool, fragments: Fragments) -> None:
    check(Case(2, replace(config(2, 3), fragments=fragments)), processes)


@pytest.mark.parametrize(
    ("workers", "ranks", "layers", "delay", "mixing"),
    [(2, 2, 0, 0, 0.0), (1, 2, 8, 1, 0.5), (3, 2, 2, 5, 0.5), (4, 1, 2, 5, 0.0)],
)
def test_with_fsdp_inside_and_more_workers(
    processes: ProcessPool, workers: int, ranks: int, layers: int, delay: int, mixing: float
) -> None:
    check(Case(workers, config(layers, delay, mixing), ranks), processes)


TOPK = Quantization(codec="topk", top_values=6)
CODED = [
    Quantization(codec="bf16"),
    Quantization(codec="fp8_e4m3", block_size=16),
    Quantization(codec="fp8_e5m2"),
    Quantization(codec="int8", block_size=32),
    Quantization(codec="fp4_e2m1"),
    Quantization(codec="fp4_e3m0", block_size=128),
    Quantization(codec="ternary", block_size=16),
    TOPK,
]


@pytest.mark.parametrize(
    ("wire", "workers", "ranks"),
    [*((wire, 3, 1) for wire in CODED), (CODED[5], 2, 1), (CODED[5], 2, 2), (TOPK, 2, 2)],
    ids=lambda value: value.codec if isinstance(value, Quantization) else str(value),
)
def test_codecs(processes: ProcessPool, wire: Quantization, workers: int, ranks: int) -> None:
    """With three workers means are encoded, too; with two ranks, shards divide nothing evenly."""
    check(Case(workers, replace(config(2, delay=5), quantization=wire), ranks), processes)


WIRES = pytest.mark.parametrize(
    "wire",
    [
        Quantization(),
        Quantization(codec="int8"),
        Quantization(codec="topk"),
    ],
    ids=lambda wire: wire.codec,
)


@WIRES
def test_means_are_weighted(processes: ProcessPool, wire: Quantization) -> None:
    chosen = replace(config(0, delay=0), quantization=wire)
    check(Case(3, chosen, weights=(3.0, 1.0, 2.0)), processes)


@WIRES
def test_dropped_workers_keep_their_own_parameters(
    processes: ProcessPool, wire: Quantization
) -> None:
    chance = 0.6
    kept = {sum(not is_dropped(chance, 3, worker, 0, r) for worker in range(3)) for r in (1, 2, 3)}
    assert kept & {1, 2}, "the seed drops somebody, not everybody"
    chosen = replace(config(0, delay=0), link=Link(drop_probability=chance), quantization=wire)
    check(Case(3, chosen), processes)


@pytest.mark.parametrize(
    ("workers", "wire"),
    [(2, Quantization()), (3, Quantization(codec="topk"))],
    ids=["fp32", "topk"],
)
def test_a_worker_that_is_not_finite_is_left_out_and_recovers(
    processes: ProcessPool, workers: int, wire: Quantization
) -> None:
    chosen = replace(config(0, delay=0), quantization=wire)
    (spoiled, *_), (clean, *_) = (
        processes.run(run_case, workers, Case(workers, chosen, spoiled_step=step))
        for step in (8, 0)
    )
    assert all(value.isfinite().all() for values in spoiled for value in values.values())
    assert not torch.equal(spoiled[1]["embedding.weight"], clean[1]["embedding.weight"])
