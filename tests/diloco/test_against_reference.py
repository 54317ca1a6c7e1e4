"""StreamingDiLoCo in real processes computes what the plain single-process reference computes."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.processes import ProcessPool
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco import (
    DiLoCoConfig,
    Fragments,
    OuterOptimizer,
    Overlap,
    Quantization,
    StreamingDiLoCo,
)
from torchtitan_diloco.diloco.codecs import Codec, Position, build_codec, build_gather_codec
from torchtitan_diloco.diloco.codecs.stochastic import random_key
from torchtitan_diloco.diloco.config import CodecName, Link
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.reference import ReferenceDiLoCo, Sender, Values
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.distributed.world import FSDP, WORKER, join_world

STEPS = 26


class Net(nn.Module):
    """Sizes that divide nothing evenly: with two ranks a worker the gain has an empty shard on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7, bias=index % 2 == 0) for index in range(8))
        self.gain = nn.Parameter(torch.ones(1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: Tensor = (self.gain * x) @ self.embedding.weight.t()
        return logits


@dataclass(frozen=True)
class Case:
    workers: int
    config: DiLoCoConfig
    ranks: int = 1


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randint(0, 11, (6,), generator=generator), torch.randint(
        0, 11, (6,), generator=generator
    )


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    tokens, targets = batch(worker, step)
    nn.functional.cross_entropy(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_case(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One worker's local and shared parameters at the end."""
    world = join_world(Distributed(), Link(), device="cpu", workers=case.workers, fsdp=case.ranks)
    model = Net()
    if world.worker:
        nn.init.zeros_(model.gain)  # start-up gives everybody worker 0's weights
    if case.ranks > 1:
        assert world.mesh is not None
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh[FSDP])
        fully_shard(model, mesh=world.mesh[FSDP])
    outer = StreamingDiLoCo(model, world.group(WORKER), case.config, shard_group=world.shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, world.worker, step)
        outer.step()
    outer.drain()
    local = {name: full(parameter) for name, parameter in model.named_parameters()}
    shared = {name: full(value) for name, value in outer.global_state_dict().items()}
    return local, shared


class Wire:
    """What the reference sends and takes, by the codecs of a case: each rank's rows of a fragment as one flat vector."""

    def __init__(self, case: Case) -> None:
        chosen = case.config.quantization
        self.case, self.single = case, case.workers == 1
        self.codec, self.gather_codec = build_codec(chosen), build_gather_codec(chosen)

    def transmit(self, sender: Sender, delta: Values) -> Values:
        return delta if self.single else self._through(self.codec, sender, delta)

    def gather(self, sender: Sender, mean: Values) -> Values:
        return mean if self.case.workers <= 2 else self._through(self.gather_codec, sender, mean)

    def _through(self, codec: Codec, sender: Sender, values: Values) -> Values:
        arrived: dict[str, list[Tensor]] = {name: [] for name in values}
        for rank in range(self.case.ranks):
            shards = {name: self._rows(value, rank) for name, value in values.items()}
            flat = torch.cat([shard.flatten() for shard in shards.values()])
            payload = torch.empty(codec.wire_bytes(flat.numel()), dtype=torch.uint8)
            name = "mean" if sender.worker < 0 else sender.worker
            key = random_key(0, rank, sender.fragment, self._round(sender), name)
            codec.encode(flat, payload, Position(key))
            codec.decode(payload, flat)
            for name, part in zip(
                shards, flat.split([shard.numel() for shard in shards.values()]), strict=True
            ):
                arrived[name].append(part.view(shards[name].shape))
        return {name: torch.cat(parts) for name, parts in arrived.items()}

    def _rows(self, value: Tensor, rank: int) -> Tensor:
        """As FSDP2 shards: equal runs of rows, the last ones short or empty."""
        size = -(-value.shape[0] // self.case.ranks)
        return value[rank * size : (rank + 1) * size]

    def _round(self, sender: Sender) -> int:
        chosen = self.case.config
        fragments = len(build_fragments(Net(), chosen.fragments))
        return Schedule(chosen.sync_every, fragments, chosen.overlap.delay).outer_round(
            sender.fragment, sender.t
        )


def run_reference(case: Case) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    models = [Net() for _ in range(case.workers)]
    fragments = build_fragments(models[0], case.config.fragments)
    names = [list(dict.fromkeys(part.name for part in fragment.parts)) for fragment in fragments]
    wire = Wire(case)
    reference = ReferenceDiLoCo(
        models,
        names,
        sync_every=case.config.sync_every,
        delay=case.config.overlap.delay,
        mixing=case.config.overlap.mixing,
        outer=case.config.outer_optimizer,
        transmit=wire.transmit,
        gather=wire.gather,
        feedback=case.config.quantization.error_feedback and case.workers > 1,
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    for step in range(1, STEPS + 1):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, worker, step)
        reference.step()
    reference.drain()
    locals_ = [
        {name: full(parameter) for name, parameter in model.named_parameters()} for model in models
    ]
    return locals_, reference.Theta


def config(layers: int = 2, delay: int = 1, mixing: float = 0.5, **outer: object) -> DiLoCoConfig:
    """layers_per_fragment 0, 8 and 2 make 1, 2 and 5 fragments of the eight blocks and the rest."""
    return DiLoCoConfig(
        sync_every=8,
        fragments=Fragments(layers_per_fragment=layers),
        overlap=Overlap(delay=delay, mixing=mixing),
        outer_optimizer=OuterOptimizer(**{"lr": 0.7, **outer}),  # type: ignore[arg-type]
    )


def check(case: Case, processes: ProcessPool) -> None:
    reference_locals, reference_shared = run_reference(case)
    size = case.workers * case.ranks
    results = processes.run(run_case, size, case) if size > 1 else [run_case(case)]
    first_shared = results[0][1]
    for rank, (local, shared) in enumerate(results):
        for name, value in reference_locals[rank // case.ranks].items():
            torch.testing.assert_close(local[name], value, rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(shared[name], reference_shared[name], rtol=2e-4, atol=2e-5)
            assert torch.equal(shared[name], first_shared[name]), (
                f"{name}: the shared bits differ between workers"
            )


@pytest.mark.parametrize(
    ("workers", "layers", "delay"), list(product([1, 2, 3], [0, 8, 2], [0, 1, 5]))
)
def test_fragments_and_delays(
    processes: ProcessPool, workers: int, layers: int, delay: int
) -> None:
    check(Case(workers, config(layers, delay)), processes)


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 3])
def test_mixing(processes: ProcessPool, mixing: float, delay: int) -> None:
    check(Case(2, config(2, delay, mixing)), processes)


@pytest.mark.parametrize("name", ["nesterov", "momentum", "sgd", "adam", "sign_momentum"])
def test_outer_optimizers(processes: ProcessPool, name: str) -> None:
    lr = {"adam": 0.05, "sign_momentum": 0.02}.get(name, 0.7)
    check(Case(2, config(2, 3, name=name, lr=lr)), processes)


@pytest.mark.parametrize("pattern", ["sequential", "balanced", "explicit"])
def test_patterns(processes: ProcessPool, pattern: str) -> None:
    chosen = config(2, 3)
    modules = (
        ("embedding", "blocks.3"),
        ("blocks.0", "blocks.1", "gain"),
        ("blocks.2", "blocks.5"),
        ("blocks.4", "blocks.6"),
        ("blocks.7",),
    )
    fragments = Fragments(
        pattern=pattern, layers_per_fragment=2, modules=modules if pattern == "explicit" else ()
    )  # type: ignore[arg-type]
    if (
        pattern == "balanced"
    ):  # rows of the embedding in several fragments: the reference takes whole parameters
        fragments = replace(fragments, layers_per_fragment=4)
    check(Case(2, replace(chosen, fragments=fragments)), processes)


@pytest.mark.parametrize(
    ("workers", "layers", "delay", "mixing"),
    [(2, 2, 5, 0.5), (2, 0, 0, 0.0), (1, 8, 1, 0.5), (3, 2, 5, 0.5)],
)
def test_with_fsdp_inside(
    processes: ProcessPool, workers: int, layers: int, delay: int, mixing: float
) -> None:
    check(Case(workers, config(layers, delay, mixing), ranks=2), processes)


@pytest.mark.parametrize(("layers", "delay", "mixing"), [(2, 5, 0.0), (0, 0, 0.5)])
def test_four_workers(processes: ProcessPool, layers: int, delay: int, mixing: float) -> None:
    check(Case(4, config(layers, delay, mixing)), processes)


CODED = [
    Quantization(codec="bf16"),
    Quantization(codec="fp8_e4m3", block_size=16),
    Quantization(codec="fp8_e5m2"),
    Quantization(codec="int8", block_size=32),
    Quantization(codec="fp4_e2m1"),
    Quantization(codec="fp4_e3m0", block_size=128),
    Quantization(codec="fp4_e3m0", rounding="stochastic"),
    Quantization(codec="fp4_e2m1", error_feedback=True),
    Quantization(codec="ternary", block_size=16, error_feedback=True),
]


def coded_name(chosen: Quantization) -> str:
    feedback = "-feedback" if chosen.error_feedback else ""
    return f"{chosen.codec}-{chosen.block_size}-{chosen.rounding}{feedback}"


@pytest.mark.parametrize("chosen", CODED, ids=coded_name)
def test_codecs(processes: ProcessPool, chosen: Quantization) -> None:
    check(Case(2, replace(config(2, delay=5, mixing=0.5), quantization=chosen)), processes)


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (0, 0.5), (5, 0.0)])
def test_delay_and_mixing_act_with_four_bits(
    processes: ProcessPool, delay: int, mixing: float
) -> None:
    check(
        Case(2, replace(config(2, delay, mixing), quantization=Quantization(codec="fp4_e3m0"))),
        processes,
    )


@pytest.mark.parametrize("chosen", CODED, ids=coded_name)
def test_codecs_with_a_second_hop_and_odd_shards(
    processes: ProcessPool, chosen: Quantization
) -> None:
    """With three workers the owner of a slice encodes its mean; with two ranks a worker the shards divide nothing evenly."""
    check(Case(3, replace(config(2, 5, 0.5), quantization=chosen)), processes)
    check(Case(2, replace(config(2, 1, 0.5), quantization=chosen), ranks=2), processes)


@pytest.mark.parametrize("gather", ["fp32", "bf16", "int8"])
def test_the_means_have_a_codec_of_their_own(processes: ProcessPool, gather: CodecName) -> None:
    chosen = Quantization(codec="fp4_e3m0", gather_codec=gather)
    check(Case(3, replace(config(0, 3, 0.5), quantization=chosen)), processes)
