"""A run starts from the right checkpoint, and each of its parts loads what it should."""

import re
import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.components.checkpoints import (
    ALONE,
    EMPTY,
    TENSORS,
    alone,
    flip_a_bit,
    toy_state,
    write_checkpoint,
)
from tests.processes import ProcessPool
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import checkpoint_folder, resume
from torchtitan_diloco.components.checkpoint import Loads, RunPart, RunState
from torchtitan_diloco.components.checkpoint_folder import (
    MANIFEST,
    Manifest,
    checkpoint_path,
    complete_checkpoints,
    folder_of_worker,
    incomplete,
    read_manifest,
)
from torchtitan_diloco.components.resume import (
    CheckedStep,
    OtherRun,
    Start,
    ThisRun,
    find_start,
    judge,
)
from torchtitan_diloco.components.same_model import check_same_meaning
from torchtitan_diloco.components.saved_tensors import SavedTensors
from torchtitan_diloco.config import load_config, to_toml
from torchtitan_diloco.config.schema import Distributed
from torchtitan_diloco.diloco.config import Link
from torchtitan_diloco.distributed.world import World, join_world, leave_world


def find(folder: Path, resume: Path | str = "auto", world: World = ALONE) -> Start:
    """Return where a run in a folder starts."""
    other = OtherRun(world, str(resume), run_folder=str(folder))
    return find_start([ThisRun(world, str(folder)), other])


def make_a_folder(path: Path) -> None:
    """Let reads fail, as on a bad disk, also for root."""
    path.unlink()
    path.mkdir()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "damage", "wrong"),
    [
        (TENSORS, cut_off, r"/rank-0.safetensors has [\d,]+ bytes instead of [\d,]+"),
        (TENSORS, flip_a_bit, "/rank-0.safetensors has different content"),
        (TENSORS, Path.unlink, "/rank-0.safetensors is missing"),
        (TENSORS, make_a_folder, r"/rank-0.safetensors cannot be read \(.*directory"),
        (MANIFEST, Path.unlink, "/manifest.json is missing"),
        (MANIFEST, make_a_folder, r"/manifest.json cannot be read \(.*directory"),
        (MANIFEST, flip_a_bit, "/manifest.json cannot be used"),
        (MANIFEST, lambda path: path.write_text("[]"), "/manifest.json cannot be used"),
        (MANIFEST, lambda path: path.write_text("[" * 10_000), "/manifest.json cannot be used"),
    ],
)
def test_the_newest_checkpoint_that_is_not_damaged_is_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: Callable[[Path], Any],
    wrong: str,
) -> None:
    paths = [write_checkpoint(folder_of_worker(tmp_path, 0), step) for step in (1, 2, 10)]
    damage(paths[2] / file)
    for source, folder in (("auto", tmp_path), (str(tmp_path), tmp_path / "other")):
        caplog.clear()
        start = find(folder, source)
        assert (start.goes_on, start.checkpoint) == (source == "auto", paths[1])
        (line,) = caplog.messages
        assert re.search(f"step-00000010{wrong}.*: continuing from step-00000002", line)
    with pytest.raises(ValueError, match=f"no checkpoint can be resumed: .*10{wrong}"):
        find(tmp_path / "other", paths[2])
    assert find(tmp_path / "other", paths[0]).step == 1
    with chdir(paths[0].parent):  # "auto" is no folder in it, and a step has a relative path
        assert find(tmp_path).checkpoint == paths[1]
        assert find(tmp_path / "other", paths[0].name).checkpoint == paths[0]
    with pytest.raises(ValueError, match=r"is of the run in run\.folder"):
        find(tmp_path, paths[0])
    assert find(tmp_path, tmp_path / "other").checkpoint == paths[1]
    with pytest.raises(ValueError, match='"/nowhere" is not the folder of'):
        find(tmp_path / "other", "/nowhere")


def saved(workers: int, save: int = 1) -> CheckedStep:
    return CheckedStep(replace(EMPTY, workers=workers, save=save))


@pytest.mark.parametrize(
    ("answers", "holders", "problem"),
    [
        ([saved(2), saved(2)], [0, 1], ""),
        ([saved(2), CheckedStep()], [0], ""),  # worker 1 has lost its disk
        ([CheckedStep(), saved(2)], [1], ""),
        ([saved(3), saved(3)], [0, 1], ""),  # there is no worker 2 any more
        ([saved(2), saved(2), CheckedStep()], [0, 1], ""),  # worker 2 is new
        ([saved(2), saved(2), CheckedStep(problem="gone")], [0, 1], ""),  # or was there before
        ([saved(2), saved(2, save=2)], [0, 1], "several saves"),
        ([saved(2), saved(2), saved(3, save=2)], [0, 1], ""),  # left of a run of three
        ([saved(1), CheckedStep(problem="behind")], [0], ""),  # after data parallelism
        ([saved(2), CheckedStep(problem="behind")], [0], "behind"),
        ([CheckedStep(problem="damaged"), CheckedStep()], [], "damaged"),
    ],
)
def test_workers_that_have_saved_a_step_must_have_it(
    answers: list[CheckedStep], holders: list[int], problem: str
) -> None:
    found = judge(answers, ranks=1)
    assert found[0] == holders
    assert problem in found[1]
    assert bool(problem) == bool(found[1])


LLAMA = {"model.flavor": "llama-1b"}


@pytest.mark.parametrize(
    ("before", "now", "goes_on", "named"),
    [
        ({"model.heads": "6", "model.head_dim": "16"}, {}, False, "model.head_dim = 16 (here 32)"),
        ({"model.heads": "6"}, {}, True, "model.heads = 6 (here 3), model.kv_heads = 6 (here 3)"),
        ({}, {"model.kv_heads": "3"}, True, ""),  # as many as heads
        ({}, {"model.rotary_base": "100"}, True, "model.rotary_base = 10000.0 (here 100.0)"),
        ({}, {"model.rotary_base": "100"}, False, ""),
        (LLAMA, LLAMA | {"model.rotary_scaling": "8"}, True, "rotary_scaling = 32.0 (here 8.0)"),
        (LLAMA, LLAMA | {"model.rotary_scaling": "32"}, True, ""),
        ({}, {"model.norm_epsilon": "1e-5", "model.document_mask": "true"}, True, ""),
    ],
)
def test_settings_by_which_parameters_mean_something_else(
    before: dict[str, str], now: dict[str, str], goes_on: bool, named: str
) -> None:
    manifest = replace(EMPTY, config=to_toml(load_config("debug", before)))
    model = load_config("debug", now).model
    if not named:
        check_same_meaning(manifest, model, goes_on=goes_on)
        return
    with pytest.raises(UserError) as caught:
        check_same_meaning(manifest, model, goes_on=goes_on)
    assert named in str(caught.value)
    several = str(caught.value).count(" (here ") > 1
    assert f"set {'these' if several else 'this'} as there" in str(caught.value)


def test_a_run_without_a_checkpoint_that_it_can_read_is_not_started_over(tmp_path: Path) -> None:
    own = folder_of_worker(tmp_path, 0)
    paths = [write_checkpoint(own, step) for step in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError))
        with pytest.raises(ValueError, match=f"^{paths[1] / MANIFEST} cannot be read"):
            find(tmp_path)
    (paths[1] / MANIFEST).write_text(replace(read_manifest(paths[1]), version=1).to_json())
    with pytest.raises(ValueError, match="version 1 of the schema"):
        find(tmp_path)
    for path in paths:
        (path / MANIFEST).unlink()
    reason = r"no checkpoint can be resumed: .*0002/manifest.json is .*0001/manifest.json is"
    with pytest.raises(ValueError, match=reason):
        find(tmp_path)
    assert complete_checkpoints(own) == paths


def test_a_step_of_the_run_itself_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(folder_of_worker(tmp_path, 0), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "read_manifest", Mock(side_effect=AssertionError))
        with pytest.raises(UserError, match=r"is of the run in run\.folder, which goes on"):
            find(tmp_path, path)


def _find_after_an_unfinished_save(folder: Path) -> tuple[str, int, int, list[str], str]:
    """Return run and step from which this worker starts, the number of workers that have this
    step, its own checkpoints, and why another run cannot start from there."""
    world = join_world(Distributed(), Link(), device="cpu", workers=2, fsdp=0, outer_loop=True)
    start = find(folder, world=world)
    refused = ""
    try:
        find(folder / "other", folder, world=world)
    except UserError as error:
        refused = str(error)
    leave_world(world)
    own = [path.name for path in start.of_this_worker]
    return start.run, start.step, len(start.holders), own, refused


@pytest.mark.parametrize("steps", [(1,), (1, 2)])
def test_a_save_that_a_worker_has_not_completed_is_no_lost_disk(
    processes: ProcessPool, tmp_path: Path, steps: tuple[int, ...]
) -> None:
    """A first save starts the run over. One before it is taken, of which worker 1 has nothing."""
    paths = [
        write_checkpoint(folder_of_worker(tmp_path, 0), step, workers=2, run="this run")
        for step in steps
    ]
    unfinished = incomplete(checkpoint_path(folder_of_worker(tmp_path, 1), steps[-1]))
    unfinished.mkdir(parents=True)
    results = processes.run(_find_after_an_unfinished_save, 2, tmp_path)
    expected = [path.name for path in paths]
    for worker, (run, step, holders, own, refused) in enumerate(results):
        assert (run, step, holders) == ("this run", len(steps) - 1, len(steps) - 1)
        assert own == ([] if worker else expected)
        assert refused == "", "a new run loses nothing by a copy"
    unfinished.rmdir()
    for result in processes.run(_find_after_an_unfinished_save, 2, tmp_path):
        assert result[1:3] == (steps[-1], 1), "worker 1 has lost its disk"


# --- load -----------------------------------------------------------------------------------------


def _start_from_a_slow_disk(folder: Path) -> bool:
    """Return whether this worker gets the parameters of worker 1, the only one with a checkpoint,
    whose disk takes longer than workers wait for each other on a link."""
    world = join_world(
        Distributed(), Link(timeout_seconds=2), device="cpu", workers=2, fsdp=0, outer_loop=True
    )
    state = toy_state()
    check = checkpoint_folder.check_files
    fill = SavedTensors.fill

    def check_slowly(*given: Any) -> None:
        time.sleep(2.5)
        check(*given)

    def fill_slowly(*given: Any) -> None:
        time.sleep(2.5)
        fill(*given)

    with pytest.MonkeyPatch.context() as patch:
        if world.worker == 1:
            patch.setattr(resume, "check_files", check_slowly)
            patch.setattr(SavedTensors, "fill", fill_slowly)
        find(folder, world=world).load(state, world)
    leave_world(world)
    return bool((state.model.get_parameter("weight") == 45).all())


def test_a_disk_that_is_slower_than_the_limit_of_a_link_is_waited_for(
    processes: ProcessPool, tmp_path: Path
) -> None:
    about = replace(EMPTY, workers=2)
    saver = alone(folder_of_worker(tmp_path, 1), toy_state(45.0), about=about)
    saver.save(step=1, tokens=2, position=None)
    saver.wait()
    saver.close()
    assert processes.run(_start_from_a_slow_disk, 2, tmp_path) == [True, True]


@dataclass
class Count:
    """A number, which is the state of a part."""

    number: int = 0

    def saved_state(self) -> "Count":
        return self

    def load_state(self, saved: "Count", /) -> None:
        self.number = saved.number


def counts(number: int) -> list[RunPart[Count]]:
    return [RunPart(loads.name, Count(number), Count, loads) for loads in Loads]


@pytest.mark.parametrize(
    ("goes_on", "has_own", "loaded"),
    [
        (False, True, [Loads.ALWAYS]),
        (True, False, [Loads.ALWAYS, Loads.WITH_RUN]),
        (True, True, [Loads.ALWAYS, Loads.WITH_RUN, Loads.WITH_WORKER]),
    ],
)
def test_each_part_is_loaded_when_it_says_so(
    tmp_path: Path, goes_on: bool, has_own: bool, loaded: list[Loads]
) -> None:
    """`has_own`: whether the checkpoint is one of this worker."""
    save(tmp_path, toy_state(parts=counts(7)))
    start = find(tmp_path) if goes_on else find(tmp_path / "other", tmp_path)
    assert start.goes_on == goes_on
    parts = counts(0)
    with pytest.MonkeyPatch.context() as patch:
        if not has_own:
            start = replace(start, checkpoint=None, holders=[1])
            patch.setattr(resume, "_load_tensors", lambda *_, **__: [])
        start.load(toy_state(parts=parts), ALONE)
    assert [part.loads for part in parts if part.owner == Count(7)] == loaded


def test_a_part_that_the_checkpoint_does_not_have_or_has_otherwise(tmp_path: Path) -> None:
    save(tmp_path, toy_state(parts=[RunPart("old", Count(7), Count, Loads.ALWAYS)]))
    count = Count(3)
    find(tmp_path).load(toy_state(parts=[RunPart("new", count, Count, Loads.ALWAYS)]), ALONE)
    assert count.number == 3, "it is as it was"
    changed = RunPart("old", Mock(), Manifest, Loads.ALWAYS)
    with pytest.raises(UserError, match=r'a state of "old" that cannot be read \(.*`step`.*\)'):
        find(tmp_path).load(toy_state(parts=[changed]), ALONE)


def save(folder: Path, state: RunState) -> None:
    """Save a checkpoint of worker 0."""
    saver = alone(folder_of_worker(folder, 0), state)
    saver.save(step=1, tokens=2, position=None)
    saver.wait()
    saver.close()
