"""Resumed runs end as uninterrupted ones, on the same layout or on another one."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import write_text
from tests.processes import DIED, ProcessPool, counting_sent
from tests.test_trainer import LOSS, VALIDATION, curve, join, records, sending, settings
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components import run_folder
from torchtitan_diloco.components.checkpoint import RANDOM
from torchtitan_diloco.components.checkpoint_folder import (
    Manifest,
    checkpoint_path,
    complete_checkpoints,
    folder_of_worker,
    incomplete,
    read_manifest,
    step_of,
)
from torchtitan_diloco.components.saved_tensors import SavedTensors
from torchtitan_diloco.config import load_config
from torchtitan_diloco.export.weights import open_saved
from torchtitan_diloco.launching.rank import set_determinism
from torchtitan_diloco.trainer import Trainer

STEPS = 16
FP32 = {
    "validation.every": 13,
    "diloco.method": "streaming",
    "diloco.workers": 2,
    "diloco.sync_every": 6,
    "diloco.overlap.delay": 3,
    "diloco.fragments.layers_per_fragment": 1,
    "diloco.outer_optimizer.name": "adam",  # which has the most state
}
Train = Callable[..., Path]
SGD = {"diloco.outer_optimizer.name": "sgd"}
AVERAGE = SGD | {"diloco.outer_optimizer.lr": 1}
TOPK = FP32 | AVERAGE | {"optimizer.name": "muon", "diloco.quantization.codec": "topk"}
THREE = {"diloco.workers": 3, "training.batch_size": 2}
SCHEDULE = {"diloco.sync_every": 4, "diloco.overlap.delay": 1}
INT8 = {"diloco.quantization.codec": "int8"}
TWO = {"diloco.fragments.pattern": "sequential", "diloco.fragments.layers_per_fragment": 2}


def chosen(text: Path, folder: Path | str, **changes: Any) -> dict[str, str]:
    """Return the settings of a run that saves after steps 4, 8, 12 and 16."""
    base = {
        "training.steps": STEPS,
        "training.batch_size": 3,
        "run.folder": text.parent / folder,
        "validation.every": 8,
        "checkpoint.every": 4,
        "checkpoint.keep_latest": 9,
        "checkpoint.at_end": "true",
    }
    return settings(text, **(base | changes))


def run(wanted: dict[str, str]) -> str:
    config = load_config("debug", wanted)
    set_determinism(config.run)
    return str(Trainer(config, join(config)).run())


def run_and_send(number: int, step: int, wanted: dict[str, str]) -> None:
    try:
        with sending(number, step):
            run(wanted)
    finally:
        if number == signal.SIGKILL:  # this rank has noticed the death of another one first
            os.kill(os.getpid(), number)


def tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whole, by name."""
    saved = SavedTensors(path, read_manifest(path))
    found = {
        name: torch.zeros(shape, dtype=torch.uint8 if name.startswith(RANDOM) else torch.float32)
        for name, shape in saved.shapes.items()
    }
    saved.fill(found)
    return found


def checkpoint(folder: Path, step: int, worker: int = 0) -> Path:
    return checkpoint_path(folder_of_worker(folder, worker), step)


def position(manifest: Manifest) -> int:
    """Return the sample at which a checkpoint goes on."""
    assert manifest.position is not None
    return manifest.position.samples


def last(folder: Path, worker: int = 0) -> Path:
    return complete_checkpoints(folder_of_worker(folder, worker))[-1]


def assert_same_end(one: Path, other: Path) -> None:
    """The last checkpoints of all workers of two runs have the same bits."""
    workers = range(read_manifest(last(one)).workers)
    for left, right in [(last(one, worker), last(other, worker)) for worker in workers]:
        assert step_of(left) == step_of(right) == STEPS
        assert_same(tensors(left), tensors(right))


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def shared_part(path: Path) -> dict[str, Tensor]:
    """Return what all workers have."""
    kinds = ("outer/", "momentum/", "second_moment/", "next/")
    return {name: value for name, value in tensors(path).items() if name.startswith(kinds)}


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs have the same end, and the same records up to it."""
    assert_same_end(one, other)
    mine = records(one)
    theirs = records(other)
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    for key in (LOSS, "train/lr", "train/tokens", VALIDATION):
        assert curve(mine, key) == curve(theirs, key), key
    key = "worker/sent_bytes"
    assert sum(curve(mine, key)) >= sum(curve(theirs, key)) > 0, "less those in flight at a save"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: Path, processes: ProcessPool) -> Path:
    return Path(processes.run(run, 2, chosen(text, text.parent / "whole", **FP32))[0])


@pytest.fixture
def train(text: Path, tmp_path: Path, processes: ProcessPool) -> Train:
    """Train with so many processes in a folder, with these settings, and return the folder."""

    def train(size: int, name: str, **changes: Any) -> Path:
        return Path(processes.run(run, size, chosen(text, tmp_path / name, **changes))[0])

    return train


@pytest.fixture(scope="module")
def template(text: Path) -> Path:
    return Path(run(chosen(text, text.parent / "template")))


def test_a_run_that_is_stopped_killed_and_paused_ends_as_one_without_an_interruption(
    text: Path, whole: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    wanted = chosen(text, tmp_path, **FP32)
    processes.run(run_and_send, 2, signal.SIGTERM, 2, wanted | {"checkpoint.every": "0"})
    assert step_of(last(tmp_path)) == 5, "asked after step 3"
    assert processes.run(run_and_send, 2, signal.SIGKILL, 14, wanted, dying=range(2)) == [DIED] * 2
    assert step_of(last(tmp_path)) in (8, 12)
    for _ in range(2):  # the second start has nothing left to do, also no validation
        processes.run(run, 2, wanted | {"training.stop_after": "13"})
        assert step_of(last(tmp_path)) == 13
        assert [one["step"] for one in records(tmp_path) if VALIDATION in one] == [13]
    processes.run(run, 2, wanted)
    assert_same_run(whole, tmp_path)


def test_so_does_one_with_fsdp_muon_topk_and_fragments_in_flight(train: Train) -> None:
    """A save follows a validation, which leaves FSDP2's full parameters if they are not freed."""
    wanted = TOPK | {"parallel.reshard_after_forward": "never", "validation.every": 8}
    one = train(4, "one", **wanted)
    start = checkpoint(one, 8)
    assert any(name.startswith("next/") for name in tensors(start))
    assert_same(shared_part(start), shared_part(checkpoint(one, 8, worker=1)))
    other = train(4, "other", **wanted, **{"checkpoint.resume": start})
    assert_same_end(one, other)
    assert curve(records(one), LOSS)[8:] == curve(records(other), LOSS)
    more = train(3, "more", **(wanted | THREE | {"checkpoint.resume": start}))
    assert_same(shared_part(last(more)), shared_part(last(more, worker=2)))


def test_so_does_data_parallelism_and_it_becomes_diloco(train: Train) -> None:
    base = {"diloco.workers": 2, "checkpoint.every": 8}
    one = train(2, "one", **base)
    resume = {"checkpoint.resume": checkpoint(one, 8)}
    assert_same_end(one, train(2, "again", **base, **resume))
    diloco = train(2, "diloco", **FP32, **resume, **{"training.steps": 10})
    assert curve(records(diloco), LOSS)[0] < 1.2 * curve(records(one), LOSS)[7]


def run_and_count(wanted: dict[str, str]) -> int:
    """Return the bytes that this rank passes to the collectives with which ranks start."""
    sizes = list[int]()
    with counting_sent(sizes, dist.broadcast, dist.all_gather):
        run(wanted)
    return sum(sizes)


def test_a_resumed_run_does_not_send_the_model(
    text: Path, whole: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    """All workers start from the same first weights, before they read their checkpoints."""
    saved = tensors(last(whole))
    model = sum(value.nbytes for name, value in saved.items() if name.startswith("outer/"))
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    wanted = chosen(text, tmp_path, **FP32)
    assert max(processes.run(run_and_count, 2, wanted)) < 0.5 * model


def test_saving_changes_nothing(text: Path, template: Path, tmp_path: Path) -> None:
    run(chosen(text, tmp_path, **{"checkpoint.every": "0"}))
    assert_same_end(tmp_path, template)


# --- another layout -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        pytest.param(4, {}, id="more ranks"),
        pytest.param(3, THREE, id="3 workers"),
        pytest.param(1, {"diloco.workers": 1}, id="1 worker"),
        pytest.param(4, SCHEDULE | INT8 | TWO, id="H, codec, fragments, ranks"),
        pytest.param(2, {"diloco.method": "none"}, id="data parallel"),
        pytest.param(2, {"optimizer.name": "muon"}, id="Muon"),
    ],
)
def test_another_layout_goes_on_where_the_run_was(
    whole: Path, train: Train, size: int, changes: dict[str, Any]
) -> None:
    """No sample is lost or repeated, the loss goes on from where it was, and all workers start from
    the shared parameters and what is in flight: nothing is sent in step 9, after which they save.

    Data parallelism starts from the shared parameters alone, which have not moved before step 12.
    """
    step = 12 if "diloco.method" in changes else 8
    saved = tensors(start := checkpoint(whole, step))
    assert any(name.startswith("next/") for name in saved), "the test needs one in flight"
    resume = {"checkpoint.resume": start, "checkpoint.every": 9}
    folder = train(size, "run", **(FP32 | changes | resume))
    found = records(folder)
    first = read_manifest(start)
    assert [one["step"] for one in found if LOSS in one] == list(range(step + 1, STEPS + 1))
    assert position(read_manifest(last(folder))) == position(first) + (STEPS - step) * 12
    assert curve(found, "train/tokens")[0] == first.tokens + 12 * 32
    before = curve(records(whole), LOSS)
    assert curve(found, LOSS)[0] < (before[0] if step == 12 else 1.2 * before[7])
    if step == 8:
        assert_same(newest_shared(tensors(checkpoint(folder, 9))), newest_shared(saved))
    if size == 3:
        paths = [checkpoint(folder, 9, worker) for worker in (0, 2)]
        name = "embedding.weight"
        assert_same(*map(shared_part, paths))
        old, new = map(tensors, paths)
        assert not torch.equal(new[f"model/{name}"], old[f"model/{name}"])
        assert new[f"optimizer/step/{name}"] == old[f"optimizer/step/{name}"] == 9
        learned, copied = (one[f"optimizer/exp_avg/{name}"] for one in (old, new))
        assert (copied - learned).norm() < learned.norm(), "a copy of the other"


def newest_shared(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return moments and shared parameters, as if what is in flight were applied."""
    kinds = ("outer/", "momentum/", "second_moment/")
    names = [name for name in found if name.startswith(kinds)]
    return {name: found.get(name.replace("outer/", "next/"), found[name]) for name in names}


# --- what can go wrong ----------------------------------------------------------------------------


@pytest.fixture
def finished(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def test_damaged_checkpoints_are_set_aside_and_the_one_before_is_resumed(
    text: Path, whole: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    """Worker 1 finds what is wrong with its files; all take the same checkpoint."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (checkpoint(folder, 12) / "manifest.json").unlink()
    tensors_of_worker_1 = checkpoint(folder, 16, worker=1) / "rank-0.safetensors"
    tensors_of_worker_1.write_bytes(tensors_of_worker_1.read_bytes()[:-1] + b"?")
    wanted = chosen(text, folder, **FP32, **{"checkpoint.keep_latest": 2})
    processes.run(run, 2, wanted)
    assert_same_run(whole, folder)
    for worker in range(2):
        kept = {path.name for path in folder_of_worker(folder, worker).glob("step-*")}
        assert kept == {f"step-000000{step}{end}" for step in (12, 16) for end in ("", ".aside")}


def _run_on_a_node_of_its_own(wanted: dict[str, str], parent: Path) -> str:
    """Train in a relative folder, as on nodes that share no disk."""
    node = parent / f"node-{os.environ['RANK']}"
    node.mkdir(parents=True, exist_ok=True)
    with chdir(node), patch.object(run_folder, "SHARED_SECONDS", 0.0):
        try:
            return run(wanted)
        except ValueError as error:
            return str(error)


def test_workers_on_disks_of_their_own_go_on_as_on_one(
    text: Path, whole: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    """One is behind the other; then it has lost all it had, and gets a copy from the other."""

    def train(**more: Any) -> None:
        wanted = chosen(text, "", **FP32, **more) | {"run.folder": "run"}
        assert processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path) == ["run", "run"]

    nodes = [tmp_path / f"node-{rank}" / "run" for rank in range(2)]
    train(**{"training.stop_after": 12})
    shutil.rmtree(last(nodes[1], worker=1))  # this node was lost in its last save
    train()
    for worker, node in enumerate(nodes):
        assert_same(tensors(last(node, worker)), tensors(last(whole, worker)))
    assert checkpoint(nodes[0], 12).with_name("step-00000012.aside").is_dir()
    one, other = (open_saved(node).model.state_dict() for node in nodes)
    assert_same(one, other)
    shutil.rmtree(nodes[1])  # a new disk
    train(**{"training.steps": STEPS + 1})
    assert step_of(last(nodes[1], worker=1)) == STEPS + 1
    assert_same(shared_part(last(nodes[1], worker=1)), shared_part(last(nodes[0])))


def test_a_run_does_not_go_on_with_other_heads(text: Path, tmp_path: Path) -> None:
    """They have the same parameters."""
    wanted = chosen(text, tmp_path, **{"model.qk_norm": "false", "training.stop_after": 4})
    run(wanted)
    with pytest.raises(UserError, match=r"trained with model\.heads = 2 \(here 4\), .* as there"):
        run(wanted | {"model.heads": "4", "model.head_dim": "8"})


def test_a_run_that_is_lost_in_its_first_save_starts_over(
    text: Path, whole: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    folder = tmp_path / "run"
    processes.run(run, 2, chosen(text, folder, **FP32, **{"training.stop_after": 4}))
    unfinished = checkpoint(folder, 4, worker=1)
    unfinished.rename(incomplete(unfinished))
    processes.run(run, 2, chosen(text, folder, **FP32))
    assert_same_end(whole, folder)
    assert checkpoint(folder, 4).with_name("step-00000004.aside").is_dir()
    assert not list(folder.glob("*/*.incomplete"))


def test_nodes_of_one_worker_have_to_share_a_disk(
    text: Path, whole: Path, tmp_path: Path, processes: ProcessPool
) -> None:
    wanted = chosen(text, "", **(FP32 | {"diloco.workers": 1})) | {"run.folder": "run"}
    for error in processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path):
        assert re.search(r"worker-0 of .* lacks a file .*: the nodes of a worker must share", error)
    assert not (tmp_path / "node-0/run/worker-0/metrics.jsonl").exists(), "before it trains"
    path = checkpoint(tmp_path / "node-0/run", 16)
    shutil.copytree(checkpoint(whole, 16), path)
    for error in processes.run(_run_on_a_node_of_its_own, 2, wanted, tmp_path):
        assert "rank 1 does not see the checkpoints" in error


def test_a_new_run_does_not_show_the_validation_of_the_one_it_starts_from(
    text: Path, template: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "torchtitan_diloco")
    more = {"training.steps": STEPS + 1, "validation.every": 0}
    run(chosen(text, tmp_path / "new", **more, **{"checkpoint.resume": template}))
    assert "took" in caplog.text, "the summary"
    assert "nats per held-out token" not in caplog.text
    assert read_manifest(last(tmp_path / "new")).parts["validator"] == {"validated": None}


def test_schedules_follow_the_tokens_when_the_batch_changes(text: Path, tmp_path: Path) -> None:
    """Those of a run that is measured in tokens: they do not jump, and end at its end."""
    base = {"training.steps": 0, "training.tokens": STEPS * 12 * 32, "validation.every": 0}
    streaming = {"diloco.method": "streaming", "diloco.sync_every": 4, "lr_schedule.warmup": 10}
    stops = [
        {"training.stop_after": 8},
        {"training.global_batch_size": 24, "training.stop_after": 10},
        {"training.global_batch_size": 24},
    ]
    for changes in stops:
        run(chosen(text, tmp_path / "changed", **base, **streaming, **changes))
        saved = read_manifest(last(tmp_path / "changed"))
        assert saved.outer is not None
        share = saved.tokens / (STEPS * 12 * 32)
        assert saved.outer.progress == pytest.approx(share), "for alpha"
    assert (saved.step, share) == (12, 1.0)
    run(chosen(text, tmp_path / "whole", **base, **streaming))

    def rates(name: str) -> dict[float, float]:
        found = records(tmp_path / name)
        return dict(zip(curve(found, "train/tokens"), curve(found, "train/lr"), strict=True))

    changed = rates("changed")
    whole = rates("whole")
    assert len(changed) == 12
    assert changed == pytest.approx({tokens: whole[tokens] for tokens in changed})


@pytest.mark.parametrize(("length", "steps"), [(10, 10), (0.75, 16)])
def test_a_beginning_that_is_a_share_follows_the_tokens_when_the_batch_changes(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, length: float, steps: int
) -> None:
    """One of so many steps is in steps of the run. The outer learning rate is that after it."""
    base = {
        "training.steps": 0,
        "training.tokens": STEPS * 12 * 32,
        "validation.every": 0,
        "diloco.method": "streaming",
        "diloco.sync_every": 4,
        "diloco.beginning.length": length,
    }
    run(chosen(text, tmp_path / "run", **base, **{"training.stop_after": 8}))
    caplog.set_level("INFO", "torchtitan_diloco")
    caplog.clear()
    run(chosen(text, tmp_path / "run", **base, **{"training.global_batch_size": 6}))
    assert f"in the first {steps} steps every 2 steps" in caplog.text
    saved = read_manifest(last(tmp_path / "run"))
    assert saved.step == 24
    assert saved.tokens == STEPS * 12 * 32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training.steps": 15}, "the run has 15 steps .* its checkpoint is of step 16"),
        ({"model.feed_forward": 64}, r"of another model: .*gate.weight is \(64, 32\) here"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    text: Path, finished: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        run(chosen(text, finished, **({"training.steps": 20} | changes)))


def test_a_finished_run_has_nothing_left_and_goes_on_with_other_data_but_no_other_tokenizer(
    text: Path, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "torchtitan_diloco")
    before = records(finished)
    run(chosen(text, finished))
    assert records(finished) == before
    result = f"{curve(before, VALIDATION)[-1]:.4f} nats per held-out token"
    assert result in caplog.text, "the result, once more"
    other = {"run.seed": 1, "training.global_batch_size": "none", "training.batch_size": 12}
    run(chosen(text, finished, **other, **{"training.steps": 18}))
    for change in ("run.seed was 0, is 1", "training.global_batch_size was 12, is not set"):
        assert f"changed: {change}" in caplog.text
    assert records(finished)[-1]["step"] == 18
    manifest = read_manifest(last(finished))
    assert position(manifest) == 2 * 12, "from the beginning"
    (last(finished) / "manifest.json").write_text(replace(manifest, tokenizer="another").to_json())
    with pytest.raises(ValueError, match="was trained with another tokenizer"):
        run(chosen(text, finished, **{"training.steps": 20}))
