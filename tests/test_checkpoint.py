"""Nothing is lost: a run that was killed ends as one that was not, on the same layout or on another."""

import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.processes import DIED, ProcessPool
from tests.test_trainer import curve, join, records, settings
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.checkpoint_folder import (
    complete_checkpoints,
    read_manifest,
    step_of,
)
from torchtitan_diloco.config import load_config
from torchtitan_diloco.train import set_determinism
from torchtitan_diloco.trainer import Trainer

LOSS = "train/loss_nats_per_token_global"
SENT = "sent_bytes_mean_over_workers"
STEPS = 24
FP32 = {
    "diloco.method": "streaming",
    "diloco.workers": 2,
    "diloco.sync_every": 6,
    "diloco.overlap.delay": 3,
    "diloco.fragments.layers_per_fragment": 1,
}
FP4 = FP32 | {
    "diloco.quantization.codec": "fp4_e3m0",
    "diloco.quantization.error_feedback": "true",
    "diloco.quantization.rounding": "stochastic",
}


def chosen(text: Path, folder: str, **changes: Any) -> dict[str, str]:
    base = {
        "training__steps": STEPS,
        "run__folder": text.parent / folder,
        "checkpoint__every": 5,
        "validation__every": 8,
    }
    base |= {"training__batch_size": 1, "checkpoint__keep_latest": 9, "checkpoint__at_end": "true"}
    return settings(
        text, **(base | {key.replace(".", "__"): value for key, value in changes.items()})
    )


def run(wanted: dict[str, str]) -> str:
    """Trains with the processes that call it."""
    config = load_config("debug", wanted)
    set_determinism(config.run)
    return str(Trainer(config, join(config)).run())


def run_until_killed(wanted: dict[str, str], step: int) -> None:
    """All processes die within a step, as with kill -9: nothing is flushed, nobody says goodbye."""
    original = Trainer.train_step

    def train_step(self: Trainer, batches: Any) -> Any:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, batches)

    Trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        run(wanted)
    finally:  # one that notices the death of another before its own
        os.kill(os.getpid(), signal.SIGKILL)


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, by folder and name."""
    found: dict[str, Tensor] = {}
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        reader = FileSystemReader(folder)
        known = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for name, entry in known.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, storage_reader=reader, no_dist=True)
        found |= {f"{folder.name}/{name}": value for name, value in state.items()}
    return found


def last(folder: Path) -> Path:
    return complete_checkpoints(folder)[-1]


def same_end(one: Path, other: Path) -> None:
    left, right = tensors(last(one)), tensors(last(other))
    assert step_of(last(one)) == step_of(last(other)) == STEPS
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
    assert any(name.startswith("shared/outer/") for name in left)
    mine, theirs = records(one), records(other)
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    for key in (LOSS, "train/lr", "train/tokens_global", "validation/loss_nats_per_token_global"):
        assert curve(mine, key) == curve(theirs, key), key
    sent = [
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])[SENT]
        for folder in (one, other)
    ]
    assert sent[0] == sent[1] > 0


def test_a_run_that_stops_in_between_ends_as_one_that_does_not(
    text: Path, processes: ProcessPool
) -> None:
    whole = Path(processes.run(run, 2, chosen(text, "whole", **FP32))[0])
    first = chosen(text, "parts", **FP32, **{"training.stop_after": 10, "validation.every": 10})
    begun = Path(processes.run(run, 2, first)[0])
    assert step_of(last(begun)) == 10
    assert [
        record["step"]
        for record in records(begun)
        if "validation/loss_nats_per_token_global" in record
    ] == [10]
    assert Path(processes.run(run, 2, first)[0]) == begun  # it has stopped: there is nothing to do
    assert step_of(last(begun)) == 10
    processes.run(run, 2, chosen(text, "parts", **FP32))
    left, right = tensors(last(whole)), tensors(last(begun))
    assert step_of(last(begun)) == STEPS
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(
    ("base", "size", "kills"),
    [(FP32, 2, (7, 16)), (FP4, 4, (13,))],
    ids=["fp32", "fp4-fsdp"],
)
def test_killed_and_started_again_is_uninterrupted(
    text: Path, processes: ProcessPool, base: dict[str, Any], size: int, kills: tuple[int, ...]
) -> None:
    """Bit for bit, with fragments in flight at the saves, error feedback, random rounding and asynchronous saving."""
    whole, broken = chosen(text, "whole", **base), chosen(text, "broken", **base)
    processes.run(run, size, whole)
    for kill in kills:
        assert (
            processes.run(run_until_killed, size, broken, kill, dying=range(size)) == [DIED] * size
        )
    assert 5 <= read_manifest(last(text.parent / "broken")).step <= kills[-1]
    flying = [
        read_manifest(path).outer[0]["in_flight_order"]
        for path in complete_checkpoints(text.parent / "whole")
    ]
    assert any(flying), "the test is to save with fragments in flight"
    processes.run(run, size, broken)
    same_end(text.parent / "whole", text.parent / "broken")


def stopped_by_a_signal(wanted: dict[str, str]) -> None:
    original = Trainer.train_step

    def train_step(self: Trainer, batches: Any) -> Any:
        if self.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batches)

    Trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        run(wanted)
    finally:
        Trainer.train_step = original  # type: ignore[method-assign]


def test_stopped_by_a_signal_and_started_again_is_uninterrupted(
    text: Path, processes: ProcessPool
) -> None:
    whole, broken = (chosen(text, name, **FP4, checkpoint__every=0) for name in ("whole", "broken"))
    processes.run(run, 2, whole)
    processes.run(stopped_by_a_signal, 2, broken)
    assert 9 < read_manifest(last(text.parent / "broken")).step < STEPS
    processes.run(run, 2, broken)
    left, right = tensors(last(text.parent / "whole")), tensors(last(text.parent / "broken"))
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


NEVER_RESHARDED = {"validation.local": "true", "parallel.reshard_after_forward": "never"}


@pytest.mark.parametrize(
    ("base", "size"),
    [({"diloco.workers": 2}, 2), (FP32 | NEVER_RESHARDED, 4)],
    ids=["data parallel", "streaming, never resharded"],
)
def test_a_save_right_after_a_validation_is_whole(
    text: Path, processes: ProcessPool, base: dict[str, Any], size: int
) -> None:
    """A forward pass without a backward pass leaves FSDP2's full parameters behind, which have no moments."""
    every = {"checkpoint.every": 8, "validation.every": 8}
    processes.run(run, size, chosen(text, "whole", **base, **every))
    middle = complete_checkpoints(text.parent / "whole")[0]
    assert step_of(middle) == 8
    assert all(
        value.any() for name, value in tensors(middle).items() if "/optimizer/exp_avg" in name
    )
    processes.run(
        run, size, chosen(text, "again", **base, **every, **{"checkpoint.resume": middle})
    )
    left, right = tensors(last(text.parent / "whole")), tensors(last(text.parent / "again"))
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_what_is_counted_is_that_of_the_saved_step(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the manifest is written later, when the run has gone on."""
    finish = Checkpointer._finish

    def late(self: Checkpointer, *given: Any) -> None:
        time.sleep(0.3)
        finish(self, *given)

    monkeypatch.setattr(Checkpointer, "_finish", late)
    run(chosen(text, "run", **{"metrics.log_every": 1}))
    counted = {
        step_of(path): read_manifest(path).run["totals"]
        for path in complete_checkpoints(text.parent / "run")
    }
    assert {step: totals["worker_0/steps"] for step, totals in counted.items()} == {
        step: step for step in counted
    }


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_saving_changes_nothing(text: Path, asynchronous: str) -> None:
    run(chosen(text, "with", checkpoint__asynchronous=asynchronous))
    run(chosen(text, "without", checkpoint__every=0))
    left, right = tensors(last(text.parent / "with")), tensors(last(text.parent / "without"))
    assert all(torch.equal(value, right[name]) for name, value in left.items())


# --- another layout --------------------------------------------------------------------------------------------------


def taken_up(text: Path, processes: ProcessPool, size: int, **changes: Any) -> tuple[Path, Path]:
    """A run of two workers that was saved after step 12 goes on in a new folder with other settings: both folders."""
    processes.run(run, 2, chosen(text, "first", **FP32, training__steps=12, checkpoint__every=0))
    start = last(text.parent / "first")
    base = (
        FP32
        | {"checkpoint.resume": start}
        | {key.replace("__", "."): value for key, value in changes.items()}
    )
    processes.run(run, size, chosen(text, "second", **base))
    return start, text.parent / "second"


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (4, {}),
        (3, {"diloco__workers": 3}),
        (3, {"diloco__workers": 3, "checkpoint__new_workers": "copy"}),
        (1, {"diloco__workers": 1}),
        (
            2,
            {
                "diloco__sync_every": 4,
                "diloco__overlap__delay": 1,
                "diloco__quantization__codec": "int8",
            },
        ),
        (
            2,
            {"diloco__fragments__pattern": "balanced", "diloco__fragments__layers_per_fragment": 2},
        ),
        (2, {"diloco__method": "none"}),
    ],
    ids=[
        "more ranks",
        "three workers",
        "three, copied",
        "one worker",
        "schedule and codec",
        "fragments",
        "data parallel",
    ],
)
def test_another_layout(
    text: Path, processes: ProcessPool, size: int, changes: dict[str, Any]
) -> None:
    """No sample is lost or repeated, the shared parameters go over, and training goes on from where it was."""
    start, folder = taken_up(text, processes, size, **changes)
    found = records(folder)
    assert [record["step"] for record in found if LOSS in record] == list(range(13, STEPS + 1))
    first, second = read_manifest(start), read_manifest(last(folder))
    assert second.position - first.position == 12 * (STEPS - 12), "12 sequences a step"
    assert curve(found, "train/tokens_global")[0] == first.tokens + 12 * 32
    assert curve(found, LOSS)[0] < 1.2 * curve(records(text.parent / "first"), LOSS)[-1]


def test_the_shared_parameters_are_those_that_were_saved(
    text: Path, processes: ProcessPool
) -> None:
    """Taken up as three workers and saved at once: the first save holds what the last one held."""
    processes.run(run, 2, chosen(text, "first", **FP32, training__steps=12, checkpoint__every=0))
    start = last(text.parent / "first")
    three = FP32 | {
        "diloco.workers": 3,
        "checkpoint.resume": start,
        "training.steps": 13,
        "diloco.sync_every": 12,
    }
    processes.run(run, 3, chosen(text, "second", **three))
    before, after = tensors(start), tensors(last(text.parent / "second"))
    for name, value in before.items():
        if name.startswith(("shared/outer/", "shared/slot-")):
            assert torch.equal(value, after[name]), name
    assert not torch.equal(
        after["worker-0/model/embedding.weight"], after["worker-2/model/embedding.weight"]
    )


def test_rows_under_way_survive_another_sharding(text: Path, processes: ProcessPool) -> None:
    """The embedding's rows are in several fragments, cut on each rank; some of them are under way at the save."""
    split = FP32 | {
        "diloco.fragments.pattern": "balanced",
        "diloco.fragments.layers_per_fragment": 1,
        "model.vocab_size": 900,
    }
    processes.run(run, 2, chosen(text, "first", **split, training__steps=13, checkpoint__every=9))
    start = complete_checkpoints(text.parent / "first")[0]
    saved = tensors(start)
    assert "shared/next/embedding.weight" in saved, "the test is to save with these rows under way"
    taken_up = split | {
        "checkpoint.resume": start,
        "training.steps": 11,
        "checkpoint.every": 10,
        "checkpoint.at_end": "false",
    }
    processes.run(run, 4, chosen(text, "second", **taken_up))
    after = tensors(last(text.parent / "second"))
    for name, value in saved.items():
        if name.startswith("shared/outer/"):
            expected = saved.get(name.replace("/outer/", "/next/"), value)
            assert torch.equal(after[name], expected), name


def test_data_parallelism_becomes_diloco(text: Path, processes: ProcessPool) -> None:
    processes.run(run, 2, chosen(text, "first", diloco__workers=2, training__steps=12))
    processes.run(
        run, 2, chosen(text, "second", **FP32, checkpoint__resume=last(text.parent / "first"))
    )
    assert (
        curve(records(text.parent / "second"), LOSS)[0]
        < 1.2 * curve(records(text.parent / "first"), LOSS)[-1]
    )


# --- what can go wrong -----------------------------------------------------------------------------------------------


@pytest.fixture
def finished(text: Path) -> Path:
    """The folder of a run of one process with checkpoints after steps 5, 10, 15, 20 and 24."""
    run(chosen(text, "run"))
    return text.parent / "run"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, r"has [\d,]+ bytes instead of [\d,]+"),
        (flip, "has other content"),
        (Path.unlink, "cannot be read"),
    ],
)
def test_a_damaged_file_is_named_and_the_one_before_offered(
    text: Path, finished: Path, harm: Callable[[Path], None], words: str
) -> None:
    harm(last(finished) / "worker-0" / "__0_0.distcp")
    with pytest.raises(
        ValueError,
        match=rf"step-00000024/worker-0/__0_0.distcp {words}.*one before it is .*step-00000020",
    ):
        run(chosen(text, "run", training__steps=30))
    earlier = complete_checkpoints(finished)[-2]
    run(chosen(text, "other", training__steps=30, checkpoint__resume=earlier))
    assert records(text.parent / "other")[0]["step"] == 21


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda _: "{", "Expecting"),
        (lambda _: "[]", "no table"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "of version 7"),
        (lambda text: text.replace('"step": 24', '"step": 23'), "CRC-32 differs"),
    ],
)
def test_a_damaged_manifest(
    text: Path, finished: Path, harm: Callable[[str], str], words: str
) -> None:
    path = last(finished) / "manifest.json"
    path.write_text(harm(path.read_text()))
    with pytest.raises(
        ValueError, match=rf"manifest.json cannot be used \(.*{words}.*\).*one before it is"
    ):
        run(chosen(text, "run", training__steps=30))


def test_what_was_not_finished_is_no_checkpoint(text: Path, finished: Path) -> None:
    path = last(finished)
    path.rename(path.with_name(path.name + ".incomplete"))
    assert step_of(last(finished)) == 20
    run(chosen(text, "run"))
    assert records(finished)[-1]["step"] == STEPS
    assert not list((finished / "checkpoints").glob("*.incomplete"))


def test_another_model_is_refused(text: Path, finished: Path) -> None:
    assert finished.exists()
    with pytest.raises(
        ValueError,
        match=r"is of another model: blocks.0.feed_forward.up.weight is \(48, 32\) there and \(64, 32\)",
    ):
        run(chosen(text, "run", model__feed_forward=64, training__steps=30))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [("nowhere", "does not exist"), ("text.txt", 'is neither "auto" nor "never", and no folder')],
)
def test_nothing_to_start_from(text: Path, wanted: str, told: str) -> None:
    with pytest.raises(ValueError, match=f'checkpoint.resume = ".*" {told}'):
        run(chosen(text, "run", checkpoint__resume=text.parent / wanted))


def test_a_run_without_a_checkpoint_starts_over(text: Path) -> None:
    folder = text.parent / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/lr": 1.0}\n{"step": 2, "tr')
    run(chosen(text, "run"))
    assert [record["step"] for record in records(folder) if LOSS in record] == list(
        range(1, STEPS + 1)
    )
    with pytest.raises(ValueError, match="already holds a run"):
        run(chosen(text, "run", checkpoint__resume="never"))


def test_a_finished_run_has_nothing_left_to_do(text: Path, finished: Path) -> None:
    before = records(finished)
    run(chosen(text, "run"))
    assert records(finished) == before


def test_a_checkpoint_moves_with_its_folder(text: Path, finished: Path) -> None:
    moved = text.parent / "elsewhere"
    shutil.move(finished, moved)
    run(chosen(text, "elsewhere", training__steps=26))
    assert records(moved)[-1]["step"] == 26
