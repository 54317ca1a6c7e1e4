"""A sharded, checkpointed or compiled decoder is the single-device decoder."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.diloco.toy import full
from tests.distributed.test_world import join
from tests.processes import ProcessPool
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.optimizer import gradient_norm
from torchtitan_diloco.config.schema import ActivationCheckpoint, Compile, Model, Parallel
from torchtitan_diloco.distributed.world import FSDP, World
from torchtitan_diloco.models import build_model
from torchtitan_diloco.models.interface import blocks_of
from torchtitan_diloco.models.parallelize import materialize, parallelize

# Shapes that divide nothing evenly: 3 or 4 ranks get odd shards, rows of 7 leave some none.
TINY = Model(layers=3, width=36, heads=3, head_dim=12, feed_forward=50)
LLAMA = replace(TINY, kv_heads=1, rotary_scaling=2.0, qk_norm=False, tied_head=False)
MASKED = replace(LLAMA, document_mask=True)
VOCABULARY = 67
LENGTH = 24
BATCH = 12


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float
    hidden: torch.dtype
    """Type of what enters the first block."""


def build(
    workers: int = 1,
    *,
    checkpoint: Any = "none",
    every: int = 2,
    reshard: Any = "auto",
    compile: bool = False,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: Any = "float32",
    model: Model = TINY,
) -> tuple[nn.Module, World]:
    world = join(workers)
    decoder = build_model(model, VOCABULARY, LENGTH, end_of_document=3)
    parallelize(
        decoder,
        world.mesh if world.mesh is None or workers > 1 else world.mesh[FSDP],
        parallel=Parallel(reshard_after_forward=reshard, reduce_dtype=reduce_dtype),
        activation_checkpoint=ActivationCheckpoint(mode=checkpoint, every=every),
        compile=Compile(enable=compile),
        compute_dtype=dtype,
    )
    materialize(decoder, world.device, seed=5)
    return decoder, world


def backward(decoder: nn.Module, world: World) -> None:
    """Compute the gradient of the mean loss over one global batch, of which ranks have parts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    part = tokens.chunk(world.size)[world.rank]
    head = loss_head(part[:, 1:], z_loss=1e-3, chunk_tokens=17)
    objective = decoder(part[:, :-1], head=head).objective
    assert objective.dtype == torch.float32
    (objective * world.size / (BATCH * LENGTH)).backward()


def step(workers: int = 1, **options: Any) -> Outcome:
    """Return the initial weights, the gradients and their norm."""
    decoder, world = build(workers, **options)
    hidden: list[torch.dtype] = []
    blocks_of(decoder)[0].register_forward_pre_hook(
        lambda _, inputs: hidden.append(inputs[0].dtype)
    )
    weights = {name: full(parameter) for name, parameter in decoder.named_parameters()}
    backward(decoder, world)
    norm = gradient_norm(decoder.parameters(), world.group(FSDP)).item()
    trained = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    gradients = {name: full(one) for name, one in trained.items() if one is not None}
    return Outcome(weights, gradients, norm, hidden[0])


@pytest.fixture(scope="module")
def single() -> Outcome:
    return step()


def assert_same(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert list(found.weights) == list(expected.weights), "parameters keep their names"
    for name, value in expected.weights.items():
        assert torch.equal(value, found.weights[name]), f"{name} starts from other values"
    assert_close(found.gradients, expected.gradients, rtol=tolerance, atol=tolerance)
    assert found.norm == pytest.approx(expected.norm, rel=tolerance), "of the whole gradient"


@pytest.mark.parametrize(
    ("size", "workers", "options"),
    [
        (3, 1, {"reshard": "always", "checkpoint": "every_nth"}),
        (2, 2, {}),
        (4, 2, {"reshard": "never"}),
        (3, 1, {"checkpoint": "full", "model": LLAMA}),
        (2, 1, {"checkpoint": "selective", "reshard": "always", "model": LLAMA}),
        (3, 1, {"checkpoint": "every_nth", "model": MASKED}),
    ],
)
def test_sharded_decoder_is_the_single_device_one(
    processes: ProcessPool, size: int, workers: int, options: dict[str, Any]
) -> None:
    expected = step(model=options.get("model", TINY))
    for found in processes.run(partial(step, workers, **options), size):
        assert_same(found, expected)


@pytest.mark.parametrize(("mode", "calls"), [("full", [2, 2, 2]), ("every_nth", [2, 1, 2])])
def test_checkpointing_recomputes_the_chosen_blocks(
    single: Outcome, mode: str, calls: list[int]
) -> None:
    decoder, world = build(checkpoint=mode)
    counted = [0, 0, 0]

    def count(index: int, *_: Any) -> None:
        counted[index] += 1

    for index, block in enumerate(blocks_of(decoder)):
        block.get_submodule("attention").register_forward_pre_hook(partial(count, index))
    backward(decoder, world)
    assert counted == calls
    assert_same(step(checkpoint=mode), single, 1e-6)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("model", [TINY, LLAMA, MASKED])
def test_selective_checkpointing_gives_the_same_bits(model: Model, every: int) -> None:
    expected = step(model=model)
    found = step(checkpoint="selective", every=every, model=model)
    assert found.norm == expected.norm
    for name, value in expected.gradients.items():
        assert torch.equal(found.gradients[name], value), name


def test_bf16_compute_keeps_fp32_parameters_and_gradients(
    processes: ProcessPool, single: Outcome
) -> None:
    for found in processes.run(partial(step, dtype=torch.bfloat16), 2):
        assert found.hidden == torch.bfloat16
        values = [*found.weights.values(), *found.gradients.values()]
        assert {value.dtype for value in values} == {torch.float32}
        for name, value in single.gradients.items():  # near, but not the fp32 result
            assert (value - found.gradients[name]).norm() < 0.1 * value.norm(), name
        name = "embedding.weight"
        assert not torch.equal(found.gradients[name], single.gradients[name])


def test_data_parallelism_averages_gradients_in_bf16_if_it_is_told(
    processes: ProcessPool, single: Outcome
) -> None:
    """Between two workers of two ranks. A value that was sent in 16 bits has no others."""
    for found in processes.run(partial(step, 2, reduce_dtype="bfloat16"), 4):
        for name, gradient in found.gradients.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, gradient.bfloat16().float()), name
        assert_close(found.gradients, single.gradients, rtol=0.05, atol=1e-3)
    (fp32, _) = processes.run(partial(step, 2), 2)
    assert not all(torch.equal(one, one.bfloat16().float()) for one in fp32.gradients.values())


@pytest.mark.parametrize(
    ("checkpoint", "model"),
    [
        ("none", TINY),
        ("every_nth", TINY),
        ("selective", TINY),
        ("none", LLAMA),
        ("none", MASKED),
        ("selective", MASKED),
    ],
)
def test_compiled_decoder_gives_the_same_gradients_from_few_compilations(
    monkeypatch: pytest.MonkeyPatch, checkpoint: str, model: Model
) -> None:
    """Run the traced graph as it is: what a compiler makes of it is tested by torch."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    expected = step(model=model)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    assert_same(step(compile=True, checkpoint=checkpoint, model=model), expected, 1e-6)
    assert len(graphs) == (2 if checkpoint == "every_nth" else 1), (
        "one for all blocks that are alike"
    )
