"""Parts of `benchmarks.gpu`. Each runs in a process of its own."""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import util
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks import checkpoint, codecs, core, train_step
from torchtitan_diloco.components.checkpoint_folders import checkpoint_path
from torchtitan_diloco.components.checkpoint_schema import read_manifest
from torchtitan_diloco.components.metrics import hidden_percent, totals_of, utilisation_percent
from torchtitan_diloco.components.records import read_json_lines
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, Link, OuterOptimizer, StreamingDiLoCo
from torchtitan_diloco.diloco.codecs import CODECS, UNIT, build_codec
from torchtitan_diloco.diloco.config import BLOCK_SIZES, Quantization
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState, background_stream
from torchtitan_diloco.distributed.world import FSDP, world_of_one
from torchtitan_diloco.hardware import GIB
from torchtitan_diloco.log import REPOSITORY
from torchtitan_diloco.models.decoder import Decoder


@dataclass
class Check:
    what: str
    expected: str
    measured: str
    passed: bool | None = None
    """None if the value is only for information."""


@dataclass(frozen=True)
class Scale:
    device: torch.device
    flavor: str
    step: core.Settings
    """Settings of the measured step."""
    run: core.Settings
    """Settings of whole runs."""
    blocks: tuple[int, ...]
    megabytes: tuple[float, ...]
    rounds: int


RUN = {
    "checkpoint.every_minutes": "0",
    "lr_schedule.warmup_steps": "5",
    "metrics.log_every": "1",
    "run.restarts": "0",
    "metrics.tensorboard": "false",
    "run.deterministic": "true",
    "validation.every": "0",
}
GPU = Scale(
    torch.device("cuda", 0),
    flavor="paper-1b",
    step={
        "model.flavor": "paper-1b",
        "model.vocab_size": "32000",
        "training.sequence_length": "2048",
        "run.device": "cuda",
    },
    run=RUN
    | {"model.flavor": "paper-35m", "training.sequence_length": "512", "run.device": "cuda"},
    blocks=BLOCK_SIZES,
    megabytes=(2, 64, 604),
    rounds=5,
)
SMALL = {
    "training.sequence_length": "32",
    "run.device": "cpu",
    "data.corpus": str(REPOSITORY / "README.md"),
}
MINIATURE = Scale(
    core.CPU,
    flavor="debug",
    step=SMALL,
    run=RUN | SMALL,
    blocks=(64,),
    megabytes=(0.1,),
    rounds=1,
)


# --- parts ----------------------------------------------------------------------------------------


def bits(scale: Scale, _: Path) -> list[Check]:
    """Compare wire formats and an outer round with those of the CPU."""
    wrong, values = list[str](), 1e-3 * torch.randn(3 * UNIT + 77)
    cases = list(product(CODECS, scale.blocks))
    for name, block in cases:
        found = []
        for device in (core.CPU, scale.device):
            codec = build_codec(Quantization(name, block_size=block))
            given = values.to(device, copy=True)
            payload = torch.zeros(codec.wire_bytes(len(given)), dtype=torch.uint8, device=device)
            codec.encode(given, payload)
            codec.decode(payload, given)
            found.append(torch.cat([payload.cpu(), given.cpu().view(torch.uint8)]))
        if not torch.equal(*found):
            wrong.append(f"{name} {block}")
    formats = ", ".join(wrong) or "the same bits"
    checks = [Check(f"{len(cases)} formats", "the same bits as the CPU", formats, not wrong)]
    shared, local = outer_round(core.CPU, core.CPU)
    for place in (scale.device, core.CPU):
        apart = [
            float((one - other).abs().max())
            for one, other in zip(outer_round(scale.device, place), (shared, local), strict=True)
        ]
        what = f"take, outer step, apply with the state on {place.type}"
        measured = f"shared {apart[0]:.1e}, local {apart[1]:.1e} apart"
        checks.append(Check(what, "at most 1e-6 from the CPU", measured, max(apart) <= 1e-6))
    return checks


def outer_round(model_device: torch.device, state_device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the shared and local parameters after a round of one worker."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 301)
    noise = [1e-2 * torch.randn_like(parameter) for parameter in model.parameters()]
    model.to(model_device)
    (fragment,) = build_fragments(model, Fragments(layers_per_fragment=0))
    state = OuterState(fragment, OuterOptimizer(), state_device)
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), noise, strict=True):
            parameter.add_(change.to(model_device))
    state.take_delta()
    with state.background():
        state.finish_delta()
        state.advance()
    state.apply(0.5)
    local = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    return state.outer.cpu(), local


def codec(scale: Scale, _: Path) -> list[Check]:
    """Compare encode + decode with a copy, on the stream of an exchange."""
    on_gpu, checks = scale.device.type == "cuda", []
    for megabytes, name in product(scale.megabytes, ("fp32", "bf16", "int8", "fp4_e3m0")):
        values = torch.randn(round(megabytes * 1e6 / 4), device=scale.device)
        made = build_codec(Quantization(name))  # type: ignore[arg-type]
        with torch.cuda.stream(background_stream(scale.device)) if on_gpu else nullcontext():
            found = codecs.measure_codec(made, values, scale.rounds)
        share = statistics.median(codecs.share_of_copy(found))
        # With 2 MB, kernel launches take longer than the kernels.
        passed = share >= 0.5 if on_gpu and megabytes >= 64 else None
        what = f"{name}, {megabytes:g} MB"
        checks.append(Check(what, "50 % of the speed of a copy", f"{share:.0%}", passed))
    return checks


def step(scale: Scale, _: Path) -> list[Check]:
    """Measure training steps, each loop in a process of its own."""
    titan = [train_step.TITAN] * (util.find_spec("torchtitan") is not None)
    on_gpu, checks = scale.device.type == "cuda", []
    for compiled, batch in ((False, 4), (True, 8)) if on_gpu else ((False, 1),):
        changes = {"compile.enable": str(compiled).lower(), "training.batch_size": str(batch)}
        words = core.command_line(scale.step | changes)
        kind, ours = f"batch {batch}, {'compiled' if compiled else 'eager'}", 0.0
        # torchtitan's model takes longest to compile, so it runs only once.
        for name in [train_step.OURS, train_step.BARE, *(titan if compiled or not on_gpu else [])]:
            result = train_step.measure_alone(name, words, scale.rounds, 2)
            seconds = statistics.median(result.wall)
            ours = ours or seconds
            measured = (
                f"{result.tokens / seconds:,.0f} tokens/s, MFU {result.mfu_percent:.1f} %, "
                f"{result.peak_bytes / GIB:.1f} GiB, ratio {ours / seconds:.3f}"
            )
            expected, passed = "", None
            if name == train_step.OURS and compiled:
                expected, passed = "MFU 38 %", result.mfu_percent >= 38
            elif name == train_step.TITAN and compiled:
                expected, passed = "ratio at most 1 / 0.95", ours / seconds <= 1 / 0.95
            checks.append(Check(f"{name}, {kind}", expected, measured, passed))
    return checks


def outer(scale: Scale, _: Path) -> list[Check]:
    """Measure taking and applying the fragments of one worker."""
    checks = []
    with scale.device:
        model = Decoder(Model(flavor=scale.flavor), 32_000, 2048)  # type: ignore[arg-type]
    model.init_weights(0)
    memories: tuple[Literal["cpu", "device"], ...] = "device", "cpu"
    for memory in memories:
        config = DiLoCoConfig(sync_every=8, measure_every=0, link=Link(outer_state=memory))
        loop = StreamingDiLoCo(model, None, config)
        for _step in range(3 * 8):
            loop.step()
            core.timed(lambda: None, scale.device)  # waits for the GPU, as a step does
        loop.drain()
        core.timed(lambda: None, scale.device)
        found = loop.metrics()
        loop.close()
        own = found["worker/exposed_seconds"] - found["worker/exposed_waiting_seconds"]
        each = 1e3 * own / (2 * found["worker/fragments_applied"])
        passed = each < 5 if scale.device.type == "cuda" else None
        what = f"take and apply, mean of both, {scale.flavor}, state: {memory}"
        checks.append(Check(what, "under 5 ms", f"{each:.2f} ms", passed))
    return checks


def train(scale: Scale, folder: Path, **changes: str) -> list[dict[str, Any]]:
    """Run the trainer in `folder` and return its records."""
    own = {key.replace("__", "."): value for key, value in changes.items()}
    words = core.command_line(scale.run | own | {"run.folder": str(folder)})
    command = [sys.executable, "-m", "torchtitan_diloco.launch", *words]
    environment = os.environ | {"NPROC": own["diloco.workers"]}
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
    return read_json_lines(folder / "worker-0/metrics.jsonl")[0]


def workers(scale: Scale, folder: Path) -> list[Check]:
    """Train several workers on one GPU. Every exchange compares their checksums."""
    cases, checks = ((2, 1), (4, 3)) if scale.device.type == "cuda" else ((2, 1),), []
    for count, delay in cases:
        records = train(
            scale,
            folder / f"workers-{count}",
            diloco__workers=str(count),
            diloco__overlap__delay=str(delay),
            diloco__quantization__codec="fp4_e3m0",
            diloco__sync_every="5",
            training__steps="40" if scale.device.type == "cuda" else "11",
            training__batch_size="4",
            checkpoint__at_end="false",
        )
        key = "loss/train"
        losses = [record[key] for record in records if key in record]
        totals = totals_of(records, streaming=True)
        measured = (
            f"{losses[0]:.2f} -> {losses[-1]:.2f}; {hidden_percent(totals):.0f} % hidden, "
            f"utilisation {utilisation_percent(totals):.0f} %"
        )
        what = f"{count} workers, fp4, tau {delay}"
        expected = "no mismatch, the loss falls"
        checks.append(Check(what, expected, measured, losses[-1] < losses[0]))
    return checks


def save(scale: Scale, folder: Path) -> list[Check]:
    """Resume from a checkpoint that was saved in the background, and measure a save."""
    length = {"training__steps": "8", "diloco__workers": "1", "training__batch_size": "2"}
    length |= {"checkpoint__every": "4", "diloco__sync_every": "3"}
    one, other = folder / "saved", folder / "resumed"
    train(scale, one, **length)
    train(scale, other, **length, checkpoint__resume=str(checkpoint_path(one, 4)))
    first, second = (read_manifest(checkpoint_path(run, 8)).files for run in (one, other))
    differing = [name for name in first if first[name] != second.get(name)]
    same = ", ".join(differing) or "the same bits"
    flavor = "paper-100m" if scale.device.type == "cuda" else "debug"
    found, size = checkpoint.measure(flavor, scale.rounds, folder, scale.device)
    held = f"{statistics.median(found['held up']):.3f} s for {size / GIB:.2f} GiB"
    return [
        Check("8 steps, resumed after 4", "the same bits", same, not differing),
        Check(f"training held up by a save, {flavor}", "0.1 s a GiB", held),
    ]


def nccl(scale: Scale, _: Path) -> list[Check]:
    """Run FSDP2 on one rank, and destroy its process group."""
    mesh = world_of_one(scale.device, "nccl" if scale.device.type == "cuda" else "gloo").mesh
    assert mesh is not None
    model = nn.Linear(64, 64, device=scale.device)
    fully_shard(model, mesh=mesh[FSDP])
    model(torch.ones(2, 64, device=scale.device)).sum().backward()
    total = torch.ones(1, device=scale.device)
    dist.all_reduce(total, group=mesh.get_group(FSDP))
    measured = f"all_reduce of 1 is {total.item():g}"
    dist.destroy_process_group()
    return [Check("FSDP2 of one rank", "a clean end", measured, total.item() == 1)]


Part = Callable[[Scale, Path], list[Check]]
PARTS: dict[str, tuple[Part, int]] = {
    "bits": (bits, 120),
    "nccl": (nccl, 40),
    "workers": (workers, 120),
    "outer": (outer, 60),
    "codec": (codec, 60),
    "save": (save, 100),
    "step": (step, 260),
}
"""Function and time limit in seconds of each part."""
