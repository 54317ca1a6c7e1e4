"""A sharded, checkpointed or compiled decoder is the single-device decoder."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.processes import ProcessPool
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.optimizer import clip_gradients
from torchtitan_diloco.config.schema import (
    ActivationCheckpoint,
    Compile,
    Distributed,
    Model,
    Parallel,
)
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.distributed.world import FSDP, join_world
from torchtitan_diloco.models.chinchilla.model import Decoder
from torchtitan_diloco.models.parallelize import materialize, parallelize

# Shapes that divide nothing evenly: 3 or 4 ranks get odd shards, rows of 7 leave some none.
TINY = Model(layers=3, width=36, heads=3, head_dim=12, feed_forward=50)
VOCABULARY, LENGTH, BATCH = 67, 24, 12
OFF = ActivationCheckpoint()


def build(
    workers: int = 1,
    model: Model = TINY,
    checkpoint: ActivationCheckpoint = OFF,
    compile: Compile | None = None,
    dtype: torch.dtype = torch.float32,
    reshard: str = "auto",
) -> tuple[Decoder, object]:
    world = join_world(Distributed(), Link(), device="cpu", workers=workers, fsdp=0)
    with torch.device("meta"):
        decoder = Decoder(model, VOCABULARY, LENGTH)
    mesh = world.mesh if world.mesh is None or workers > 1 else world.mesh[FSDP]
    parallelize(
        decoder,
        mesh,
        parallel=Parallel(reshard_after_forward=reshard),  # type: ignore[arg-type]
        activation_checkpoint=checkpoint,
        compile=compile or Compile(),
        compute_dtype=dtype,
    )
    materialize(decoder, world.device, seed=5)
    return decoder, world


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(
        0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1], tokens[:, 1:]


def weights_and_gradients(
    workers: int, **options: object
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return initial weights and the gradient of the mean loss over one global batch."""
    decoder, world = build(workers, **options)  # type: ignore[arg-type]
    weights = {name: full(parameter) for name, parameter in decoder.named_parameters()}
    inputs, targets = batch()
    share = BATCH // world.size  # type: ignore[attr-defined]
    part = slice(world.rank * share, (world.rank + 1) * share)  # type: ignore[attr-defined]
    sums = decoder(inputs[part], head=loss_head(targets[part], z_loss=1e-3, chunk_tokens=17))
    (sums.objective * world.size / targets.numel()).backward()  # type: ignore[attr-defined]
    gradients = {name: full(parameter.grad) for name, parameter in decoder.named_parameters()}  # type: ignore[arg-type]
    return weights, gradients


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    torch.testing.assert_close(
        left, right, rtol=tolerance, atol=tolerance
    )  # names the key that differs


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (3, 1), (2, 2), (4, 2)])
def test_sharded_decoder_is_the_single_device_one(
    processes: ProcessPool, size: int, workers: int
) -> None:
    weights, gradients = weights_and_gradients(1)
    for sharded_weights, sharded_gradients in processes.run(weights_and_gradients, size, workers):
        for name, value in weights.items():
            assert torch.equal(value, sharded_weights[name]), (
                f"{name} starts from other values on {size} processes"
            )
        close(gradients, sharded_gradients, 1e-5)


@pytest.mark.parametrize("reshard", ["always", "never"])
def test_resharding_policy_changes_nothing(processes: ProcessPool, reshard: str) -> None:
    _, gradients = weights_and_gradients(1)
    for _, sharded in processes.run(_gradients_with_reshard, 2, reshard):
        close(gradients, sharded, 1e-5)


def _gradients_with_reshard(
    reshard: str,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return weights_and_gradients(1, reshard=reshard)


def _checkpointed(mode: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return weights_and_gradients(1, checkpoint=ActivationCheckpoint(mode=mode, every=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["full", "every_nth"])
def test_checkpointing_changes_no_gradient(processes: ProcessPool, mode: str) -> None:
    _, gradients = weights_and_gradients(1)
    close(gradients, _checkpointed(mode)[1], 1e-6)
    for _, sharded in processes.run(_checkpointed, 2, mode):
        close(gradients, sharded, 1e-5)


def test_checkpointing_recomputes_the_chosen_blocks() -> None:
    decoder, _ = build(checkpoint=ActivationCheckpoint(mode="every_nth", every=2))
    calls = dict.fromkeys(range(3), 0)

    def count(index: int) -> None:
        calls[index] += 1

    for index, block in enumerate(decoder.blocks):
        attention = block.attention
        assert isinstance(attention, torch.nn.Module)
        attention.register_forward_pre_hook(lambda *_, index=index: count(index))
    inputs, targets = batch()
    decoder(inputs, head=loss_head(targets, z_loss=0.0, chunk_tokens=64)).objective.backward()
    assert calls == {0: 2, 1: 1, 2: 2}


def _bf16_gradients() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    decoder, _ = build(dtype=torch.bfloat16)
    dtypes: list[str] = []
    decoder.blocks[0].register_forward_pre_hook(
        lambda _, inputs: dtypes.append(str(inputs[0].dtype))
    )
    inputs, targets = batch()
    sums = decoder(inputs, head=loss_head(targets, z_loss=0.0, chunk_tokens=64))
    assert sums.objective.dtype == torch.float32
    (sums.objective / targets.numel()).backward()
    gradients = {name: full(parameter.grad) for name, parameter in decoder.named_parameters()}  # type: ignore[arg-type]
    return (
        {name: full(parameter) for name, parameter in decoder.named_parameters()},
        gradients,
        dtypes[0],
    )


def test_bf16_compute_keeps_fp32_parameters_and_gradients(processes: ProcessPool) -> None:
    _, exact = weights_and_gradients_without_z_loss()
    for weights, gradients, hidden_dtype in processes.run(_bf16_gradients, 2):
        assert hidden_dtype == "torch.bfloat16"
        assert {value.dtype for value in [*weights.values(), *gradients.values()]} == {
            torch.float32
        }
        for name, value in exact.items():  # near, but not the fp32 result
            assert (value - gradients[name]).norm() < 0.1 * value.norm(), name
        assert not torch.equal(gradients["embedding.weight"], exact["embedding.weight"])


def weights_and_gradients_without_z_loss() -> tuple[None, dict[str, torch.Tensor]]:
    decoder, _ = build()
    inputs, targets = batch()
    (
        decoder(inputs, head=loss_head(targets, z_loss=0.0, chunk_tokens=64)).objective
        / targets.numel()
    ).backward()
    return None, {name: full(parameter.grad) for name, parameter in decoder.named_parameters()}  # type: ignore[arg-type]


def _clipped(workers: int, max_norm: float) -> tuple[float, dict[str, torch.Tensor]]:
    decoder, world = build(workers)
    inputs, targets = batch()
    share = BATCH // world.size  # type: ignore[attr-defined]
    part = slice(world.rank * share, (world.rank + 1) * share)  # type: ignore[attr-defined]
    sums = decoder(inputs[part], head=loss_head(targets[part], z_loss=0.0, chunk_tokens=64))
    (sums.objective * world.size / targets.numel()).backward()  # type: ignore[attr-defined]
    norm = clip_gradients(decoder.parameters(), max_norm, world.group(FSDP))  # type: ignore[attr-defined]
    return norm, {name: full(parameter.grad) for name, parameter in decoder.named_parameters()}  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "workers"), [(3, 1), (4, 2)])
def test_clipping_sees_the_whole_gradient(processes: ProcessPool, size: int, workers: int) -> None:
    decoder, _ = build()
    inputs, targets = batch()
    (
        decoder(inputs, head=loss_head(targets, z_loss=0.0, chunk_tokens=64)).objective
        / targets.numel()
    ).backward()
    expected = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 0.25).item()
    assert expected > 0.25
    clipped = {name: full(parameter.grad) for name, parameter in decoder.named_parameters()}  # type: ignore[arg-type]
    for norm, gradients in processes.run(_clipped, size, workers, 0.25):
        assert norm == pytest.approx(expected, rel=1e-5)
        close(clipped, gradients, 1e-5)


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)
@pytest.mark.timeout(240)
def test_compiled_decoder_gives_the_same_gradients_from_one_compilation() -> None:
    torch.compiler.reset()
    _, gradients = weights_and_gradients(1)
    with torch.compiler.set_stance("default"):
        compiled, _ = build(compile=Compile(enable=True), checkpoint=replace(OFF, mode="every_nth"))
        names = [name for name, _ in compiled.named_parameters()]
        _, compiled_gradients = weights_and_gradients(1, compile=Compile(enable=True))
    assert names == list(gradients), "compilation must not rename parameters"
    close(gradients, compiled_gradients, 1e-4)
