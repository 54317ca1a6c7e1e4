"""Check the results of the CUDA paths on one GPU, and measure them, in so many minutes.

    .venv/bin/python -m benchmarks.gpu --minutes 5 --out DIR [--only bits,save]

The parts run by importance, each in a process with a time limit of its own, until the time is over.
If one fails or is cut, the table says so, keeps what it has shown until then, and the others still
run. DIR gets gpu-DATE-DEVICE.jsonl, which one moves to benchmarks/records/, gpu.md with the
expected and measured values, and the output of all parts in gpu.txt. With `--miniature` every part
runs on the CPU with small sizes, to show that the command works. Its figures mean nothing.
"""

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks import core, records, sync, torchft_loop, train_step
from benchmarks.gpu_scales import GPU, MINIATURE, SMALL, Scale
from benchmarks.hosts import FolderHost
from benchmarks.network import NoNetwork
from torchtitan_diloco.base.formatting import markdown_table
from torchtitan_diloco.base.hardware import GIB
from torchtitan_diloco.components.metrics import compute_percent, hidden_percent, totals_of
from torchtitan_diloco.diloco import DiLoCoConfig, Fragments, Link, OuterOptimizer, StreamingDiLoCo
from torchtitan_diloco.diloco.codecs import UNIT, build_codec
from torchtitan_diloco.diloco.config import Quantization
from torchtitan_diloco.diloco.formats import FORMATS
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState, background_stream
from torchtitan_diloco.distributed.world import FSDP, world_of_one
from torchtitan_diloco.models.decoder import SHAPES, Decoder
from torchtitan_diloco.models.interface import init_weights

RESERVED_SECONDS = 10.0
"""At the end, for a part that has to be stopped."""
SHORTEST_SECONDS = 5.0
"""Time with which a part is still begun."""
NOT_PROVEN = """
Not proven by one GPU: FSDP2 and NCCL over several GPUs, workers on several machines, the speed of
a real link, and losses of workers in the middle of an exchange on GPUs."""


@dataclass
class Check:
    what: str
    expected: str
    measured: str
    passed: bool | None = None
    """None if the value is only for information."""


# --- parts ----------------------------------------------------------------------------------------


def bits(scale: Scale, _: Path) -> Iterator[Check]:
    """Compare wire formats and an outer round with those of the CPU."""
    wrong = list[str]()
    values = 1e-3 * torch.randn(3 * UNIT + 77)
    cases = list(product(FORMATS, scale.blocks))
    for name, block in cases:
        encoded = []
        for device in (core.CPU, scale.device):
            codec = build_codec(Quantization(name, block_size=block))
            given = values.to(device, copy=True)
            payload = torch.zeros(codec.wire_bytes(len(given)), dtype=torch.uint8, device=device)
            codec.encode(given, payload)
            codec.decode(payload, given)
            encoded.append(torch.cat([payload.cpu(), given.cpu().view(torch.uint8)]))
        if not torch.equal(*encoded):
            wrong.append(f"{name} {block}")
    formats = ", ".join(wrong) or "the same bits"
    yield Check(f"{len(cases)} formats", "the same bits as the CPU", formats, not wrong)
    shared, local = outer_round(core.CPU, core.CPU)
    for place in (scale.device, core.CPU):
        apart = [
            float((here - on_cpu).abs().max())
            for here, on_cpu in zip(outer_round(scale.device, place), (shared, local), strict=True)
        ]
        what = f"take, outer step, apply with the state on {place.type}"
        measured = f"shared {apart[0]:.1e}, local {apart[1]:.1e} apart"
        yield Check(what, "at most 1e-6 from the CPU", measured, max(apart) <= 1e-6)


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
        state.advance(OuterOptimizer.lr)
    state.apply(state.delta, Mode.MIX, 0.5)
    local = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    return state.outer.cpu(), local


def codec(scale: Scale, _: Path) -> Iterator[Check]:
    """Compare encode + decode with a copy, on the stream of an exchange."""
    for megabytes, name in product(scale.megabytes, ("fp32", "bf16", "int8", "fp4_e3m0")):
        values = torch.randn(round(megabytes * 1e6 / 4), device=scale.device)
        made = build_codec(Quantization(name))
        with torch.cuda.stream(background_stream(scale.device)) if scale.on_gpu else nullcontext():
            seconds_of_codec = sync.measure_codec(made, values, scale.rounds)
        share = statistics.median(sync.share_of_copy(seconds_of_codec))
        # With 2 MB, kernel launches take longer than the kernels.
        passed = share >= 0.5 if scale.on_gpu and megabytes >= 64 else None
        what = f"{name}, {megabytes:g} MB"
        yield Check(what, "50 % of the speed of a copy", f"{share:.0%}", passed)


def step(scale: Scale, _: Path) -> Iterator[Check]:
    """Measure training steps, each loop in a process of its own."""
    titan = train_step.titan_loops()
    for compiled, batch in ((False, 4), (True, 8)) if scale.on_gpu else ((False, 1),):
        changes = {"compile.enable": str(compiled).lower(), "training.batch_size": str(batch)}
        kind = f"batch {batch}, {'compiled' if compiled else 'eager'}"
        our_seconds = 0.0
        # torchtitan's model takes longest to compile, so it runs only once.
        others = titan if compiled or not scale.on_gpu else []
        for name in [train_step.OURS, train_step.BARE, *others]:
            result = train_step.measure_alone(name, scale.step | changes, scale.rounds, 2)
            seconds = statistics.median(result.wall)
            our_seconds = our_seconds or seconds
            measured = (
                f"{result.tokens / seconds:,.0f} tokens/s, MFU {result.mfu_percent:.1f} %, "
                f"{result.peak_bytes / GIB:.1f} GiB, ratio {our_seconds / seconds:.3f}"
            )
            expected = ""
            passed = None
            if name == train_step.OURS and compiled:
                expected = "MFU 38 %"
                passed = result.mfu_percent >= 38
            elif name == train_step.TITAN and compiled:
                expected = "ratio at most 1 / 0.95"
                passed = our_seconds / seconds <= 1 / 0.95
            yield Check(f"{name}, {kind}", expected, measured, passed)


def outer(scale: Scale, _: Path) -> Iterator[Check]:
    """Measure taking and applying the fragments of one worker."""
    with scale.device:
        model = Decoder(SHAPES[scale.flavor], vocab_size=32_000)
    init_weights(model, seed=0)
    memories: tuple[Literal["cpu", "device"], ...] = "device", "cpu"
    for memory in memories:
        config = DiLoCoConfig(sync_every=8, measure_every=0, link=Link(outer_state=memory))
        loop = StreamingDiLoCo(model, None, config)
        for _step in range(3 * 8):
            loop.step()
            core.timed(lambda: None, scale.device)  # waits for the GPU, as a step does
        loop.drain()
        core.timed(lambda: None, scale.device)
        metrics = loop.metrics()
        loop.close()
        busy_seconds = metrics["worker/exposed_seconds"] - metrics["worker/exposed_waiting_seconds"]
        milliseconds = 1e3 * busy_seconds / (2 * metrics["worker/fragments_applied"])
        what = f"take and apply, mean of both, {scale.flavor}, state: {memory}"
        yield Check(
            what, "under 5 ms", f"{milliseconds:.2f} ms", milliseconds < 5 if scale.on_gpu else None
        )


def workers(scale: Scale, folder: Path) -> Iterator[Check]:
    """Train several workers on one GPU. Every exchange compares their checksums."""
    cases = [(2, 1, "device"), (2, 1, "cpu"), (4, 3, "device")]
    for count, delay, memory in cases if scale.on_gpu else cases[:1]:
        settings = {
            "diloco.link.outer_state": memory,
            "diloco.workers": str(count),
            "diloco.overlap.delay": str(delay),
            "diloco.quantization.codec": "fp4_e3m0",
            "diloco.sync_every": "5",
            "training.steps": "40" if scale.on_gpu else "11",
            "training.batch_size": "4",
            "checkpoint.at_end": "false",
        }
        place = folder / f"workers-{count}-{memory}"
        lines = core.train(place, scale.run | settings, NPROC=str(count))
        losses = [step["loss/train"] for step in core.steps_of(lines) if "loss/train" in step]
        measured = f"{losses[0]:.2f} -> {losses[-1]:.2f}; {describe_workers(lines)}"
        what = f"{count} workers, fp4, tau {delay}, state: {memory}"
        yield Check(what, "no mismatch, the loss falls", measured, losses[-1] < losses[0])


def host(scale: Scale, folder: Path) -> Iterator[Check]:
    """Compare workers whose outer state is in GPU memory with those that keep it on the host."""
    memories: tuple[str, ...] = ("device", "cpu") if scale.on_gpu else ("cpu",)
    for memory in memories:
        settings = scale.run | scale.host
        settings |= {
            "diloco.link.outer_state": memory,
            "diloco.workers": "2",
            "diloco.overlap.delay": "1",
            "diloco.quantization.codec": "fp4_e3m0",
            "diloco.sync_every": "12",
            "training.steps": "40" if scale.on_gpu else "13",
            "training.batch_size": "4",
            "checkpoint.at_end": "false",
            "run.deterministic": "false",
        }
        lines = core.train(folder / f"host-{memory}", settings, NPROC="2")
        yield Check(
            f"2 workers, {scale.host.get('model.flavor', scale.flavor)}, state: {memory}",
            "",
            describe_workers(lines),
        )


def describe_workers(lines: list[core.Record]) -> str:
    """Return what the records of a run of several workers show of its speed."""
    totals = totals_of(lines, streaming=True)
    steps = core.steps_of(lines)
    seconds = [step["speed/seconds_per_step"] for step in steps if "speed/seconds_per_step" in step]
    memory = max(step["train/memory_gib"] for step in steps if "train/memory_gib" in step)
    return (
        f"{hidden_percent(totals):.0f} % hidden, compute share {compute_percent(totals):.0f} %, "
        f"a step {1e3 * statistics.median(seconds):.0f} ms, peak {memory:.1f} GiB"
    )


def syncs(scale: Scale, _: Path) -> Iterator[Check]:
    """Measure a sync of two workers that wait for it, beside torchft's if it is installed."""
    cases = {codec: sync.Case(scale.rounds, codec) for codec in ("fp32", "fp4_e3m0")}
    if torchft_loop.is_installed():
        cases["torchft, fp32"] = sync.Case(scale.rounds, through="torchft")
    for name, case in cases.items():
        measured_syncs, _memory = sync.measure_in_processes(replace(case, device=scale.device.type))
        exposed, cpu, *_others = zip(*measured_syncs, strict=True)
        measured = f"exposed {core.summary(exposed, '.1f')} ms, CPU {core.summary(cpu, '.0f')} ms"
        yield Check(f"sync of {sync.MEGABYTES} MB, {name}", "", measured)
    if "torchft, fp32" not in cases:
        yield Check("sync, torchft", "", "not run: torchft is not installed (extra bench)")


def islands(scale: Scale, folder: Path) -> Iterator[Check]:
    """Let an island on this device train beside one on the CPU, with a folder between them. Both
    compare the checksums of their copies with those of the syncer."""
    settings = scale.run | SMALL
    settings |= {
        "model.flavor": "debug",
        "data.corpus": "stdlib",  # a part of it is held out
        "training.tokens": "40960" if scale.on_gpu else "5120",
        "training.batch_size": "4",
        "diloco.workers": "2",
        "diloco.sync_every": "5",
        "diloco.quantization.codec": "fp4_e3m0",
        "islands.grace_seconds": "60",  # in lockstep, whichever is slower
        "validation.every": "1000000",
        "validation.sequences": "16",
    }
    with NoNetwork() as network, ThreadPoolExecutor(2) as pool:
        host = FolderHost(folder / "host", network)
        host.start()
        runs = [
            pool.submit(
                core.train,
                folder / f"island-{number}",
                settings
                | {
                    "run.device": place,
                    "islands.join": host.join(number),
                    "islands.name": f"island-{number}",
                },
                NPROC="1",
            )
            for number, place in enumerate((scale.device.type, "cpu"))
        ]
        try:
            losses = [
                [step["loss/val"] for step in run.result() if "loss/val" in step][-1]
                for run in runs
            ]
        finally:
            host.stop()
    apart = abs(losses[0] - losses[1])
    yield Check(
        f"an island on {scale.device.type} beside one on the CPU",
        "equal shared copies, losses within 0.01",
        f"losses {losses[0]:.4f} and {losses[1]:.4f}",
        apart < 0.01,
    )


def save(scale: Scale, folder: Path) -> Iterator[Check]:
    """Resume from a checkpoint that was saved in the background."""
    settings = scale.run | {
        "training.steps": "8",
        "training.batch_size": "2",
        "diloco.workers": "1",
        "diloco.sync_every": "3",
        "checkpoint.every": "4",
    }
    saved = folder / "saved"
    resumed = folder / "resumed"
    core.train(saved, settings, NPROC="1")
    core.train(resumed, settings | {"training.stop_after": "4"}, NPROC="1")
    core.train(resumed, settings, NPROC="1")
    first, second = (
        {path.name: path.read_bytes() for path in run.rglob("*step-00000008/**/*.safetensors")}
        for run in (saved, resumed)
    )
    differing = [name for name in first if first[name] != second.get(name)]
    same = ", ".join(differing) or "the same bits"
    passed = bool(first) and not differing
    yield Check("8 steps, resumed after 4", "the same bits", same, passed)


def nccl(scale: Scale, _: Path) -> Iterator[Check]:
    """Run FSDP2 on one rank, and destroy its process group."""
    mesh = world_of_one(scale.device, "nccl" if scale.on_gpu else "gloo").mesh
    assert mesh is not None
    model = nn.Linear(64, 64, device=scale.device)
    fully_shard(model, mesh=mesh[FSDP])
    model(torch.ones(2, 64, device=scale.device)).sum().backward()
    total = torch.ones(1, device=scale.device)
    dist.all_reduce(total, group=mesh.get_group(FSDP))
    measured = f"all_reduce of 1 is {total.item():g}"
    dist.destroy_process_group()
    yield Check("FSDP2 of one rank", "a clean end", measured, total.item() == 1)


PARTS: dict[str, tuple[Callable[[Scale, Path], Iterator[Check]], int]] = {
    "bits": (bits, 60),
    "syncs": (syncs, 60),
    "host": (host, 110),
    "islands": (islands, 60),
    "step": (step, 260),
    "nccl": (nccl, 40),
    "workers": (workers, 120),
    "outer": (outer, 60),
    "codec": (codec, 60),
    "save": (save, 100),
}
"""Function and time limit in seconds of each part, by importance."""


# --- the table ------------------------------------------------------------------------------------


def run_part(name: str, seconds: float, work: Path, extra_words: list[str]) -> list[Check]:
    """Run a part in a process of its own. Return its checks, and one that says how it failed."""
    words = ["-m", "benchmarks.gpu", "--out", str(work), "--part", name, *extra_words]
    printed = work / f"{name}.txt"
    checks = work / f"{name}.jsonl"
    checks.unlink(missing_ok=True)
    try:
        code = core.run_program(words, printed, seconds)
        end = f"exit code {code}"
    except core.CutError:
        code = 1
        end = f"not done in {seconds:.0f} s"
    lines = checks.read_text().splitlines() if checks.exists() else []
    shown = [Check(**json.loads(line)) for line in lines]
    if code == 0:
        return shown
    last = printed.read_text(errors="replace").strip().splitlines()[-1:]
    what = "the rest of the part" if shown else "the whole part"
    return [*shown, Check(what, "exit code 0", ": ".join([end, *last]), passed=False)]


def show_part(name: str, scale: Scale, work: Path) -> None:
    """Run a part in this process, and write each of its checks once it is known."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends its trainers
    with (work / f"{name}.jsonl").open("w") as file:
        for check in PARTS[name][0](scale, work):
            file.write(json.dumps(asdict(check)) + "\n")
            file.flush()


def run_parts(names: list[str], seconds: float, out: Path, extra_words: list[str]) -> bool:
    """Run parts until the time is over, and write what they show. Return whether none failed."""
    scale = MINIATURE if extra_words else GPU
    end = time.monotonic() + seconds
    made_by = records.provenance("benchmarks.gpu", sys.argv[1:], scale.device)
    shown = list[tuple[str, Check]]()
    log = out / "gpu.txt"
    log.write_text("")
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            seconds_left = min(PARTS[name][1], end - time.monotonic())
            if seconds_left < SHORTEST_SECONDS:
                shown.append((name, Check("the whole part", "", "not run: the time was over")))
                continue
            print(f"{name}: at most {seconds_left:.0f} s", flush=True)
            shown += [
                (name, check) for check in run_part(name, seconds_left, Path(work), extra_words)
            ]
            with log.open("a") as file:
                file.write(f"== {name}\n{Path(work, f'{name}.txt').read_text(errors='replace')}\n")
    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [
        [name, check.what, check.expected, check.measured, words[check.passed]]
        for name, check in shown
    ]
    table = markdown_table(["part", "what", "expected", "measured", ""], rows)
    title = f"{made_by.device}; {made_by.versions}; commit {made_by.commit}; {made_by.date} UTC"
    (out / "gpu.md").write_text(f"{title}\n\n{table}\n")
    checks = [{"part": name} | asdict(check) for name, check in shown]
    records.write(out / records.file_name("gpu", made_by), records.stamped(checks, made_by))
    return all(check.passed is not False for _, check in shown)


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=core.positive, default=9, help="default 9")
    only_help = "default: " + ",".join(PARTS)
    parser.add_argument("--only", type=core.one_of(PARTS), default="", help=only_help)
    parser.add_argument("--miniature", action="store_true", help="on the CPU, small sizes")
    parser.add_argument("--part", choices=PARTS, help="run this part in this process")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.part:
        show_part(options.part, MINIATURE if options.miniature else GPU, out)
        return
    if not options.miniature and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: --miniature shows on a CPU that the command works")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be written ({error}): choose another folder")
    seconds = 60 * options.minutes - RESERVED_SECONDS
    passed = run_parts(options.only, seconds, out, ["--miniature"] * options.miniature)
    print((out / "gpu.md").read_text() + NOT_PROVEN)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
