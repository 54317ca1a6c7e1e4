"""The trainer on islands in a folder: the command of the syncer, and those of two islands."""

import json
import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.components.test_resume import last
from tests.islands.by_hand import newest
from tests.islands.test_local_run import SETTINGS, train_words
from tests.islands.test_syncing import sync
from tests.metadata_server import GCP, metadata_server
from tests.programs import PATIENCE, Program
from tests.test_trainer import records
from torchtitan_diloco.base.user import USER_ERROR
from torchtitan_diloco.components.checkpoint import MODEL
from torchtitan_diloco.components.checkpoint_folder import read_manifest
from torchtitan_diloco.diloco.state_dict import SHARED


def island(folder: Path, name: str, **more: object) -> Program:
    """Start an island of the trainer. It is killed at the end of its context."""
    settings = {key: value for key, value in SETTINGS.items() if key != "islands.local"}
    settings |= {
        "islands.join": folder / "store",
        "islands.name": name,
        "islands.begin": 2,
        "run.folder": folder / name,
        "islands.grace_seconds": 1,
    }
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    return Program(folder / f"{name}.txt", train_words(settings))


def steps_of(folder: Path, name: str) -> int:
    """Return the last step in the records of an island."""
    files = list((folder / name).glob("worker-0/metrics.jsonl"))
    lines = files[0].read_text().splitlines() if files else []
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_islands_stop_are_killed_and_go_on(tmp_path: Path, ranks: int) -> None:
    """Both stop in order; then one is killed, and the other trains on, through a phase. It returns
    as an island of one rank, whose checkpoint may be of two."""
    texts = [tmp_path / f"{name}.jsonl" for name in ("web", "code")]
    for text in texts:
        lines = (json.dumps({"text": f"{text.stem} {number}" * 50}) for number in range(100))
        text.write_text("\n".join(lines))
    more = {
        "metrics__log_every": 1,
        "checkpoint__every": 10,
        "training__steps": 120,
        "parallel__fsdp": ranks,
        "data__mixture": f"{texts[0]}=3 {texts[1]}=1",
        "data__phases": f'[{{start = 0.3, mixture = {{"{texts[1]}" = 1}}}}]',
        "data__cache_folder": tmp_path / "cache",
    }
    with sync(tmp_path / "store", tmp_path / "scratch") as syncer, ExitStack() as started:

        def start(name: str, **changed: object) -> Program:
            return started.enter_context(island(tmp_path, name, **(more | changed)))

        for process in [start(name, training__stop_after=20) for name in "ab"]:
            assert "has slot" in process.end()
        decision = newest(tmp_path / "store")
        assert not decision.ended
        assert decision.owners() == [], "both have left"
        assert not any(ledger.lost for slot in decision.slots for ledger in slot.ledgers)
        first = start("a")
        second = start("b")
        until = time.monotonic() + PATIENCE
        while steps_of(tmp_path, "b") < 35:
            assert second.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        second.kill()
        again = start("b", parallel__fsdp=1)
        assert "run 100 %" in first.end()
        again.end()
        syncer.end()
    decision = newest(tmp_path / "store")
    assert decision.ended
    assert decision.stopped
    assert read_manifest(last(tmp_path / "a")).step >= 60
    assert [len(slot.entered) for slot in decision.slots] == [1, 1]
    (entered,) = (one for one in records(tmp_path / "a", "phase") if one["number"] == 1)
    # How much later depends on the machine: while the syncer waits for the killed island, nobody
    # decides that the phase has begun, and the estimated clock of the other one goes on.
    assert entered["share"] >= 0.3
    assert entered["mixture"] == f"100 % {texts[1]}"
    total = decision.settings.total_tokens
    for number, shared in enumerate(decision.fragments):
        samples = sum(slot.ledgers[number].taken for slot in decision.slots)
        lost = sum(slot.ledgers[number].lost for slot in decision.slots)
        assert shared.clock == (samples - lost) * decision.settings.tokens_per_sample >= total


def test_islands_leave_on_a_notice(tmp_path: Path) -> None:
    """They save, send their work and give their slots back before their machine goes away."""
    store = tmp_path / "store"
    with metadata_server() as server, sync(store, tmp_path / "scratch"), ExitStack() as started:
        server.answers[GCP] = "TRUE"
        more: dict[str, object] = {"run__preemption": "gcp", "training__steps": 20_000}
        more["run__preemption_address"] = server.address
        pair = [island(tmp_path, "a", parallel__fsdp=2, **more), island(tmp_path, "b", **more)]
        for process in pair:
            started.enter_context(process)
        for process in pair:
            output = process.end(128 + signal.SIGTERM)
            assert "notice: GCP will preempt this machine, 30 s left" in output
            assert "left the run after its own step" in output
        decision = newest(store)
    assert decision.owners() == []
    assert not decision.ended
    for slot in decision.slots:
        assert not any(ledger.lost for ledger in slot.ledgers)
        assert len({ledger.taken for ledger in slot.ledgers}) == 1, "all work is merged"
    for name in "ab":
        assert read_manifest(last(tmp_path / name)).step > 0


def test_the_syncer_beside_an_island_outlasts_it(tmp_path: Path) -> None:
    """An island ends early, and the launcher of its job goes on with the syncer until the end."""
    with ExitStack() as started:
        first = island(tmp_path, "a", islands__sync="true", training__stop_after=12)
        second = island(tmp_path, "b")
        for process in (first, second):
            started.enter_context(process)
        assert "run 100 %" in second.end()
        output = first.end()
    assert "left the run after its own step 12" in output
    assert f"the run in {tmp_path / 'store'} has not ended: its syncer goes on here" in output
    decision = newest(tmp_path / "store")
    assert decision.ended
    assert decision.stopped
    # Started again, the first one takes the final model, and saves it once.
    for step in (13, 13):
        with island(tmp_path, "a") as again:
            assert "nothing is left to train" in again.end()
        assert read_manifest(last(tmp_path / "a")).step == step
    models = [load_file(last(tmp_path / name) / "rank-0.safetensors") for name in "ab"]
    for name, value in models[1].items():
        if name.startswith(f"{SHARED}/"):
            assert torch.equal(models[0][name], value), name
            of_model = name.replace(f"{SHARED}/", MODEL, 1)
            assert torch.equal(models[0][of_model], value), "the model is the shared one"


def test_islands_continue_a_job_that_had_a_beginning(tmp_path: Path) -> None:
    """At its tokens and its place in the order of samples; a new machine does so from a mirror."""
    job = {key: value for key, value in SETTINGS.items() if not key.startswith("islands.")}
    job |= {"diloco.beginning.length": 8, "training.stop_after": 8, "training.steps": 40}
    job |= {"diloco.workers": 2, "run.folder": tmp_path / "job"}
    with Program(tmp_path / "job.txt", train_words(job)) as process:
        process.end()
    trained_tokens = read_manifest(last(tmp_path / "job")).tokens
    assert trained_tokens == 8 * 2 * 2 * 16
    more: dict[str, Any] = {
        "training__steps": 40,
        "checkpoint__resume": tmp_path / "job",
        "checkpoint__every": 4,
        "checkpoint__mirror": tmp_path / "store",
        "metrics__log_every": 1,
    }
    with sync(tmp_path / "store", tmp_path / "scratch"), ExitStack() as started:

        def start(**changed: object) -> dict[str, str]:
            """Return the outputs of both islands, by their names."""
            pair = {name: island(tmp_path, name, **(more | changed)) for name in "ab"}
            for process in pair.values():
                started.enter_context(process)
            return {name: process.end() for name, process in pair.items()}

        refused = started.enter_context(island(tmp_path, "a", **more))
        output = refused.end(USER_ERROR)
        assert "the location is empty, and the checkpoint is of a job" in output
        more["islands__found"] = "true"
        for output in start(training__stop_after=20).values():
            assert f"takes the newest shared copy, of {trained_tokens} tokens" in output
            assert "starts at its sample 16\n" in output
            assert "are now" not in output, "no worker is missing"
        assert {path.name for path in (tmp_path / "store/mirror").iterdir()} == {"a", "b"}
        before = newest(tmp_path / "store")
        shutil.rmtree(tmp_path / "b")  # a new machine has no checkpoint, and takes its mirror
        for name, output in start().items():
            assert "resumed from" in output
            assert ("was taken from" in output) is (name == "b"), output
    decision = newest(tmp_path / "store")
    assert decision.ended
    assert decision.run == before.run
    assert decision.settings.total_tokens == 40 * 2 * 2 * 16
    for number, shared in enumerate(decision.fragments):
        ledgers = [slot.ledgers[number] for slot in decision.slots]
        merged = sum(one.taken - 16 - one.lost for one in ledgers)
        assert shared.clock == trained_tokens + merged * decision.settings.tokens_per_sample
