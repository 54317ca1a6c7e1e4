"""Whole runs: their curve, what they write, and how they end."""

import gc
import logging
import math
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchtitan_diloco.trainer
from tests.processes import ProcessPool
from torchtitan_diloco.base.tensors import local_of
from torchtitan_diloco.components.checkpoint import Checkpointer, RunState
from torchtitan_diloco.components.checkpoint_folder import Manifest
from torchtitan_diloco.components.optimizer import gradient_norm
from torchtitan_diloco.components.records import read_records
from torchtitan_diloco.components.run_plan import AfterStep, RunPlan
from torchtitan_diloco.components.sampling import Prompt, Sampler
from torchtitan_diloco.components.telemetry import StepResult, Telemetry
from torchtitan_diloco.components.validation import Validator
from torchtitan_diloco.config import Config, load_config, to_toml
from torchtitan_diloco.config.schema import Checkpoint, Metrics
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diloco.data_parallel import DataParallel
from torchtitan_diloco.distributed.world import FSDP, World, join_world, leave_world, world_of_one
from torchtitan_diloco.report.run_records import open_runs
from torchtitan_diloco.train import main
from torchtitan_diloco.trainer import Trainer

LOSS = "loss/train"
VALIDATION = "loss/val"


def settings(text: Path, **changes: Any) -> dict[str, str]:
    base = {
        "data.corpus": text,
        "data.cache_folder": text.parent / "cache",
        "data.validation_fraction": 0.1,
        "run.folder": text.parent / "run",
        "model.layers": 2,
        "model.width": 32,
        "model.heads": 2,
        "model.head_dim": 16,
        "model.feed_forward": 48,
        "training.sequence_length": 32,
        "training.batch_size": 6,
        "training.global_batch_size": 12,
        "training.steps": 8,
        "lr_schedule.warmup": 2,
        "validation.every": 4,
        "validation.sequences": 7,
        "metrics.log_every": 1,
        "metrics.boards": "none",
        "checkpoint.at_end": "false",
        "checkpoint.every_minutes": 0,
        "diloco.workers": 1,
        "diloco.method": "none",
        "distributed.train_timeout_seconds": 300,
        "diloco.link.timeout_seconds": 300,
    }
    base |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: str(value) for key, value in base.items()}


def words(chosen: dict[str, str]) -> list[str]:
    return [word for key, value in chosen.items() for word in (f"--{key}", value)]


def train(chosen: dict[str, str]) -> list[dict[str, Any]]:
    """Train with the processes that call it; rank 0 returns the records of worker 0."""
    config = load_config("debug", chosen)
    world = join(config)
    folder = Trainer(config, world).run()
    return records(folder) if world.is_first else []


def join(config: Config) -> World:
    outer = config.diloco
    fsdp = config.parallel.fsdp
    facts = config.distributed, outer.link
    return join_world(*facts, device="cpu", workers=outer.workers, fsdp=fsdp)


def records(folder: Path, kind: str | None = None, worker: int = 0) -> list[dict[str, Any]]:
    """Return the records of a worker of logged steps and validations, or those of a kind."""
    found, _ = read_records(folder / f"worker-{worker}/metrics.jsonl")
    return [record for record in found if record.get("kind") == kind]


def curve(found: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in found if key in record]


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (4, 2), (3, 3)])
def test_any_number_of_processes_gives_the_same_curve(
    text: Path, processes: ProcessPool, size: int, workers: int
) -> None:
    """HSDP over workers x ranks with the same global batch, as 6, 3 or 2 micro-batches."""
    changes = {"training.batch_size": 1 if size == 4 else 2}
    alone = train(settings(text, **changes))
    many = settings(text, run__folder=text.parent / "many", diloco__workers=workers, **changes)
    together = processes.run(train, size, many)[0]
    assert len(curve(alone, LOSS)) == 8
    for key in (LOSS, VALIDATION, "train/gradient_norm"):
        assert curve(together, key) == pytest.approx(curve(alone, key), rel=2e-4), key
    for key in ("train/tokens", "train/lr"):
        assert curve(together, key) == curve(alone, key), key


def test_a_single_worker_hides_no_communication(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has an outer loop, but nobody to exchange with."""
    alone = {"diloco.method": "streaming", "diloco.sync_every": 2, "validation.every": 0}
    with caplog.at_level(logging.INFO, "torchtitan_diloco"):
        found = train(settings(text, **alone))
    assert sum(curve(found, "worker/fragments_applied")) > 0
    assert sum(curve(found, "worker/exchange_seconds")) > 0
    assert curve(found, "sync/hidden_percent") == []
    assert "hidden" not in caplog.text


def test_it_learns_and_the_seed_determines_the_run(text: Path) -> None:
    def losses(name: str, **changes: Any) -> list[float]:
        changes |= {"training.steps": 60, "optimizer.lr": "1e-2", "validation.every": 0}
        return curve(train(settings(text, run__folder=text.parent / name, **changes)), LOSS)

    first = losses("first")
    assert first[-1] < 0.6 * first[0]
    assert losses("again", training__stop_after=5) == first[:5]
    assert losses("other", training__stop_after=5, run__seed=1) != first[:5]


def test_the_saved_configuration_starts_the_same_run_again(text: Path) -> None:
    first = train(settings(text))
    saved = text.parent / "run" / "config.toml"
    assert load_config(str(saved)).run.folder == ""
    assert to_toml(load_config(str(saved))) == saved.read_text()
    config = load_config(str(saved), {"run.folder": str(text.parent / "again")})
    again = Trainer(config, join(config)).run()
    assert curve(records(again), LOSS) == curve(first, LOSS)
    assert (again / "config.toml").read_text() == saved.read_text()


def test_the_saved_configuration_is_that_of_the_latest_start(text: Path) -> None:
    """Those of earlier starts are kept beside it."""
    folder = text.parent / "run"
    first = {"training.stop_after": 4, "checkpoint.at_end": "true"}
    train(settings(text, **first))
    before = load_config(str(folder / "config.toml"))
    train(settings(text, **(first | {"training.stop_after": 6, "optimizer.lr": 0.02})))
    config = load_config(str(folder / "config.toml"))
    assert (config.optimizer.lr, config.training.stop_after) == (0.02, 6)
    assert load_config(str(folder / "config-from-step-0.toml")) == before
    assert load_config(str(folder / "config-from-step-4.toml")) == config
    assert open_runs([folder])[0].settings["optimizer.lr"] == 0.02, "as in the report"
    kept = {"config.toml", "config-from-step-0.toml", "config-from-step-4.toml", "worker-0"}
    assert {path.name for path in folder.iterdir()} == kept


def assert_means(folder: Path, expected: dict[int, dict[Path, float]]) -> None:
    """The loss and the bits per byte after each of these steps are means of those of the corpora,
    in these shares."""
    validations = {record["step"]: record for record in records(folder) if VALIDATION in record}
    assert list(validations) == list(expected)
    for step, shares in expected.items():
        for name in (VALIDATION, "loss/bits_per_byte"):
            parts = {path: validations[step][f"{name}/{path}"] for path in expected[3]}
            mean = sum(share * parts[path] for path, share in shares.items())
            assert validations[step][name] == pytest.approx(mean, rel=1e-12)
            assert len(set(parts.values())) == 2


def test_phases_of_the_data_are_recorded(text: Path) -> None:
    """Once each, also if the run is resumed, and boards show those after the start."""
    other = text.with_name("other.txt")
    other.write_text(text.read_text()[::-1])
    weights = {"data.corpus": "", "data.mixture": f"{text}=3 {other}=1"}
    phases = {"data.phases": f'[{{start = 0.5, mixture = {{"{other}" = 1}}}}]'}
    chosen = settings(text, metrics__boards="tensorboard", validation__every=3) | weights | phases
    for stop_after in ("3", "6", "0"):
        train(chosen | {"training.stop_after": stop_after})
    folder = Path(chosen["run.folder"])
    mixture = f"75 % {text}, 25 % {other}"

    def recorded(folder: Path) -> list[tuple[int, int, float, str]]:
        names = "step", "number", "share", "mixture"
        found = records(folder, "phase")
        return [(one[names[0]], one[names[1]], one[names[2]], one[names[3]]) for one in found]

    assert recorded(folder) == [(0, 0, 0.0, mixture), (4, 1, 0.5, f"100 % {other}")]
    assert curve(records(folder), "train/phase") == [0, 0, 0, 1, 1, 1, 1, 1]
    assert_means(folder, {3: {text: 0.75, other: 0.25}, 6: {other: 1.0}, 8: {other: 1.0}})
    board = EventAccumulator(str(folder / "worker-0")).Reload()
    (shown,) = board.Tensors("phases/text_summary")
    assert (shown.step, shown.tensor_proto.string_val) == (4, [f"100 % {other}".encode()])

    changed = chosen | {"run.folder": str(text.parent / "changed")}
    train(changed | {"training.stop_after": "2"})
    train(changed | {"data.mixture": f"{text}=1 {other}=1", "training.stop_after": "3"})
    even = f"50 % {text}, 50 % {other}"
    assert recorded(text.parent / "changed") == [(0, 0, 0.0, mixture), (2, 0, 0.25, even)]

    elsewhere = chosen | {"run.folder": str(text.parent / "elsewhere")}
    train(elsewhere | {"checkpoint.resume": str(folder), "training.stop_after": "7"})
    (only,) = recorded(text.parent / "elsewhere")
    assert only[:2] == (6, 1), "a folder says what it begins with"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (AfterStep(1), "log"),
        (AfterStep(2), ""),
        (AfterStep(3), "log"),
        (AfterStep(4), "validate"),
        (AfterStep(5), "save"),
        (AfterStep(7, asked_to_save=True), "save"),
        (AfterStep(7, asked_to_stop=True), "log save at end"),
        (AfterStep(8, asked_to_stop=True), "log save at end"),  # somebody is waiting
        (AfterStep(7, paused=True), "log save"),
        (AfterStep(11, finished=True), "log validate save at end"),
    ],
)
def test_each_part_knows_whether_it_is_due(tmp_path: Path, after: AfterStep, expected: str) -> None:
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    model = torch.nn.Linear(2, 2)
    outer = DataParallel(model)
    plan = RunPlan(6, 0, accumulation=1, tokens_per_step=1, total_steps=11)
    metrics = Metrics(log_every=3, boards=())
    telemetry = Telemetry(metrics, world, None, plan, outer, step=0, flops_per_token=1)
    validator = Validator(4, model, [], world, outer)

    def saves(every: int, at_end: bool) -> bool:
        settings = Checkpoint(every=every, at_end=at_end)
        optimizer = torch.optim.SGD(model.parameters())
        about = Manifest(step=0, tokens=0, workers=1, config="")
        state = RunState(model, optimizer, outer)
        saver = Checkpointer(settings, tmp_path, world, state, about=about)
        saver.close()
        return saver.is_due(after)

    assert telemetry.is_due(after) == ("log" in expected)
    assert validator.is_due(after) == ("validate" in expected)
    assert saves(5, at_end=True) == ("save" in expected)
    assert saves(5, at_end=False) == ("save" in expected and "at end" not in expected)
    never = Validator(0, model, [], world, outer)
    assert not never.is_due(after)
    for every in (4, 0):
        sampler = Sampler(every, Prompt([256], []), 8, build_tokenizer("bytes"), model, outer)
        assert sampler.is_due(after) == (every > 0 and "validate" in expected)
    assert saves(0, at_end=False) == (after.paused or after.asked_to_save)
    assert after.stops == (after.finished or after.paused or after.asked_to_stop)


# --- steps that are not finite --------------------------------------------------------------------


def around_steps(
    before: Callable[[Trainer], object] = id, after: Callable[[Trainer], object] = id
) -> Any:
    """Call functions before and after every training step."""
    plain = Trainer.train_step

    def train_step(self: Trainer, batches: Any) -> StepResult:
        before(self)
        result = plain(self, batches)
        after(self)
        return result

    return patch.object(Trainer, "train_step", train_step)


def test_steps_that_are_not_finite_are_skipped_until_there_are_too_many(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("debug", settings(text, training__max_skipped_steps=2))
    trainer = Trainer(config, join(config))
    spoiled = {2, 3, *range(6, 100)}

    def norm(*given: Any) -> torch.Tensor:
        return gradient_norm(*given) * (math.nan if trainer.step in spoiled else 1.0)

    before: dict[str, torch.Tensor] = {}

    def compare(_: Trainer) -> None:
        same = [torch.equal(one, before[name]) for name, one in trainer.model.state_dict().items()]
        assert all(same) == any(same) == (trainer.step in spoiled)

    def remember(_: Trainer) -> None:
        before.update({name: one.clone() for name, one in trainer.model.state_dict().items()})

    reason = r"more than .*max_skipped_steps = 2 steps up to step 8 .*optimizer\.lr"
    with (
        patch.object(torchtitan_diloco.trainer, "gradient_norm", norm),
        around_steps(remember, compare),
        pytest.raises(ValueError, match=reason),
    ):
        trainer.run()
    assert [one.message for one in caplog.records if "skip" in one.message] == [
        f"step {step}: gradient norm is nan; skip steps until it is finite" for step in (2, 6)
    ]


def spoiling_after(step: int, rank: int = 0) -> Any:
    """Make the first parameter of a rank NaN after a step."""

    def spoil(trainer: Trainer) -> None:
        if (trainer.step, trainer.world.rank) == (step, rank):
            local_of(next(trainer.model.parameters()))[0] = math.nan

    return around_steps(after=spoil)


def _spoiled_run(chosen: dict[str, str]) -> list[dict[str, Any]]:
    with spoiling_after(3, rank=2):
        return train(chosen)


def test_a_worker_that_is_not_finite_heals_before_its_turn(
    text: Path, processes: ProcessPool
) -> None:
    """No fragment is exchanged in this run, and two skipped steps would end it."""
    once = {"diloco.sync_every": 100, "training.max_skipped_steps": 1}
    chosen = streaming(text, **once, validation__every=0)
    found = processes.run(_spoiled_run, 4, chosen)[0]
    losses = curve(found, LOSS)
    assert len(losses) == 8
    assert all(map(math.isfinite, losses))
    other = records(Path(chosen["run.folder"]), worker=1)
    for key in ("worker/skipped_steps", "worker/healed_fragments"):
        assert curve(found, key) == [0] * 8
        assert curve(other, key) == [0, 0, 0, 1, 0, 0, 0, 0], key


def test_what_is_saved_is_finite(text: Path) -> None:
    """It is healed before; where there is no shared copy, it is not saved."""
    alone = streaming(text, diloco__workers=1, training__stop_after=3)
    with spoiling_after(3):
        train(alone)
        together = settings(text, training__stop_after=3, run__folder=text.parent / "together")
        with pytest.raises(ValueError, match=r"not be saved: model/.* is not finite"):
            train(together)
    found = train(alone | {"training.stop_after": "0"})
    assert sum(curve(found, "worker/skipped_steps")) == 0
    assert len(curve(found, LOSS)) == 8


def test_one_process_under_fsdp2_trains_and_resumes_as_one_without(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU there is only the former."""
    alone = streaming(text, diloco__workers=1)
    plain = curve(train(alone), LOSS)
    monkeypatch.setattr(World, "fsdp_mesh", lambda self, **_: self.mesh[FSDP])
    folder = text.parent / "sharded"
    for stop_after in ("4", "0"):
        chosen = alone | {"run.folder": str(folder), "training.stop_after": stop_after}
        world = world_of_one(torch.device("cpu"), "gloo")
        try:
            Trainer(load_config("debug", chosen), world).run()
        finally:
            leave_world(world)
    assert curve(records(folder), LOSS) == plain


# --- what a user sees -----------------------------------------------------------------------------

TOO_LARGE = {"training.batch_size": 10**15, "training.global_batch_size": 10**15}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.corpus": "nowhere/*.txt"}, "nowhere"),
        ({"training.sequence_length": 10**7}, "sequence"),
        ({"data.validation_fraction": 0}, "or set validation.every = 0"),
        ({"diloco.workers": 2}, "diloco.workers = 2"),
        (TOO_LARGE, "training.batch_size = 1000000000000000: the activations of 1 rank need"),
        (TOO_LARGE | {"compile.enable": "true"}, "out of memory"),  # activations are not known
        ({"model.width": 2**20, "model.layers": 99}, "GiB on this machine"),
        ({"diloco.method": "streaming", "diloco.outer_optimizer.lr": 1e30}, "100"),
    ],
)
def test_mistakes_are_errors_in_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], reason: str
) -> None:
    assert main(words(settings(text, **changes))) == 2
    message = capsys.readouterr().err
    assert "error:" in message
    assert reason in message
    assert "Traceback" not in message


def sending(number: int, step: int, worker: int | None = None) -> Any:
    """Send processes a signal in a step: those of one worker, or all that are patched."""

    def send(trainer: Trainer) -> None:
        if trainer.step == step and worker in (None, trainer.world.worker):
            os.kill(os.getpid(), number)

    return around_steps(before=send)


def test_garbage_is_collected_again_after_a_run_that_fails(text: Path) -> None:
    config = load_config("debug", settings(text))
    trainer = Trainer(config, join(config))
    with (
        patch.object(trainer, "train_step", side_effect=OSError("odd")),
        pytest.raises(OSError, match="odd"),
    ):
        trainer.run()
    assert gc.isenabled()


def test_a_run_that_ends_early_says_why_and_how_it_goes_on(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = {"profiling.start": 2, "profiling.steps": 1}
    pause = {"training.stop_after": 3, "lr_schedule.warmup": 9}
    assert main(words(settings(text, **pause, **profile))) == 0
    with sending(signal.SIGTERM, 2):
        assert main(words(settings(text, **{"run.folder": text.parent / "signalled"}))) == 0
    output = capsys.readouterr().out
    assert "lr_schedule.warmup = 9 is longer than the run of 8 steps" in output
    assert "stopped after step 3 of 8, as asked by training.stop_after = 3; with a" in output
    assert "stopped after step 3 of 8, as asked by a signal" in output
    folders = [path.parts[-3] for path in text.parent.glob("*/worker-0/step-00000003")]
    assert folders == ["run"], "the only one that saves"
    (trace,) = (text.parent / "run" / "traces").iterdir()
    assert trace.stat().st_size > 1000


# --- workers that train on their own --------------------------------------------------------------


def streaming(text: Path, **changes: Any) -> dict[str, str]:
    base = {
        "diloco.method": "streaming",
        "diloco.workers": 2,
        "diloco.sync_every": 4,
        "diloco.fragments.layers_per_fragment": 1,
        "training.batch_size": 4,
        "training.global_batch_size": 16,
    }
    return settings(text, **(base | changes))


def test_streaming_with_fsdp_inside_is_streaming(text: Path, processes: ProcessPool) -> None:
    """Workers of one and of two ranks read the same samples and exchange the same fragments, and
    the numbers of rounds are those of all ranks of a worker."""
    folders = [text.parent / "alone", text.parent / "sharded"]
    alone, sharded = (
        processes.run(
            train, 2 * ranks, streaming(text, run__folder=folder, diloco__measure_every=1)
        )[0]
        for ranks, folder in enumerate(folders, start=1)
    )
    for key in (LOSS, VALIDATION):
        assert len(curve(alone, key)) >= 2
        assert curve(sharded, key) == pytest.approx(curve(alone, key), rel=2e-4), key
    one, two = (sum(curve(run, "worker/sent_bytes")) for run in (alone, sharded))
    assert two == pytest.approx(one, rel=0.05)
    assert one > 0
    largest = "sync/largest_mean_delta"
    assert curve(sharded, largest) == pytest.approx(curve(alone, largest), rel=0.02)
    rounds = [records(folder, "round") for folder in folders]
    norms = ("round/delta_norm", "round/mean_norm", "round/drift_norm", "round/dot_with_mean")
    for one_rank, two_ranks in zip(*rounds, strict=True):
        for name in (*norms, "round/cosine_to_mean", largest):
            assert two_ranks["numbers"][name] == pytest.approx(one_rank["numbers"][name], rel=0.02)


def _lose_worker_1(chosen: dict[str, str]) -> tuple[int, str]:
    """Return the exit code of worker 0 and what it prints as errors."""
    with sending(signal.SIGKILL, 30, worker=1), redirect_stderr(StringIO()) as errors:
        return main(words(chosen)), errors.getvalue()


def test_a_lost_worker_is_named_in_a_line(text: Path, processes: ProcessPool) -> None:
    """With an exchange in flight, and without a launcher that ends the survivor."""
    chosen = streaming(text, training__steps=100_000, validation__every=0)
    (code, errors), _ = processes.run(_lose_worker_1, 2, chosen, dying={1})
    assert code == 3, errors
    (line,) = [line for line in errors.splitlines() if "error:" in line]
    for expected in ("worker 1", "left or did not answer in time", "step"):
        assert expected in line
    assert "Traceback" not in errors
