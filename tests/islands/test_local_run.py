"""The trainer on islands: the command that starts a syncer and islands on one machine."""

import json
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli
from matplotlib.ticker import EngFormatter

from tests.components.test_resume import last
from tests.conftest import REPOSITORY
from tests.islands.by_hand import newest
from tests.metadata_server import GCP, metadata_server
from tests.programs import run_program
from torchtitan_diloco.components.checkpoint_folder import read_manifest
from torchtitan_diloco.components.metrics import baseline_bytes
from torchtitan_diloco.islands.founding import read_saved
from torchtitan_diloco.report.page import describe, facts_table
from torchtitan_diloco.report.run_records import open_runs

SETTINGS: dict[str, Any] = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "training.steps": 60,  # so that neither island ends the run before the other has started again
    "training.batch_size": 2,
    "training.sequence_length": 16,
    "lr_schedule.warmup": 2,
    "diloco.sync_every": 4,
    "validation.sequences": 8,
    "metrics.boards": "none",
    "checkpoint.every_minutes": 0,
    "islands.local": 2,
    "islands.grace_seconds": 5,
}


def train_words(settings: Mapping[str, object]) -> list[str]:
    """Return the words of a training with these settings on top of those of debug.toml."""
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["train", "--config", "debug", *words]


def run(
    folder: Path, *, here: Path = REPOSITORY, **more: object
) -> subprocess.CompletedProcess[str]:
    """Run two islands. `here`: the current folder."""
    settings = SETTINGS | {"diloco.workers": 5}  # not the number of islands
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    words = train_words({"run.folder": folder} | settings)
    return run_program(folder / "console.txt", words, folder=here)


def test_islands_and_their_syncer_import_an_outer_optimizer(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/algorithm.md").read_text()
    (program,) = re.findall(r"^```python\n([^`]*^OUTER_OPTIMIZERS\[.*?)^```", page, re.M | re.S)
    (tmp_path / "my_outer.py").write_text(program)
    done = run(
        tmp_path / "run",
        here=tmp_path,
        run__imports="my_outer",
        diloco__outer_optimizer__name="signum",
        diloco__outer_optimizer__lr=0.01,
        diloco__outer_optimizer__warmup=0.5,
        training__steps=20,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "signum lr 0.01 after a warm-up of 50% of the run momentum" in done.stdout
    decision = newest(tmp_path / "run/store")
    assert decision.ended
    assert decision.settings.outer_optimizer == "signum"
    assert min(shared.version for shared in decision.fragments) >= 3


def test_islands_stop_and_go_on_where_their_store_ends(tmp_path: Path) -> None:
    first = run(tmp_path, training__stop_after=10)
    assert first.returncode == 0, first.stderr
    assert "island island-1 has slot" in first.stdout
    assert re.search(r"step +\d+  run \d+ %  loss ", first.stdout)
    again = run(tmp_path, training__batch_size=1)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from" in again.stdout
    assert re.search(
        r"slot \d of 2 in run \S+, takes the newest shared copy, of [1-9]", again.stdout
    )
    manifests = []
    for name in ("island-1", "island-2"):
        folder = tmp_path / name
        manifests.append(read_manifest(last(folder)))
        saved = tomli.loads((folder / "config.toml").read_text())
        assert saved["islands"]["join"] == ""  # it may contain a password
    one, other = (read_saved(manifest.outer.island) for manifest in manifests if manifest.outer)
    assert one is not None
    assert other is not None
    alike = (msgspec.structs.replace(saved, slot=None, position=0) for saved in (one, other))
    assert next(alike) == next(alike), "but for their slots"
    decision = newest(tmp_path / "store")
    assert decision.ended
    assert decision.stopped, "the syncer has ended in order"
    assert not any(ledger.lost for slot in decision.slots for ledger in slot.ledgers)
    assert [saved.version for saved in one.fragments] == [
        shared.version for shared in decision.fragments
    ]
    over = run(tmp_path, training__batch_size=1)
    assert over.returncode == 0, over.stderr
    assert "so nothing is left to train, " in over.stdout
    for name, manifest in zip(("island-1", "island-2"), manifests, strict=True):
        assert read_manifest(last(tmp_path / name)).step == manifest.step, "it has the final model"
    assert "error" not in over.stderr
    assert newest(tmp_path / "store").fragments == decision.fragments
    check_report(tmp_path / "island-1")
    (both,) = open_runs([tmp_path])
    assert describe(both).endswith("; 2 of 2 islands, Streaming DiLoCo")
    (apart,) = open_runs([tmp_path / "island-1", tmp_path / "island-2"])
    assert [one.run_id for one in apart.workers] == [apart.name] * 2


def test_each_island_reads_corpora_of_its_own(tmp_path: Path) -> None:
    """Beside one of all islands. Nothing has to be the same but what they share."""
    for name, words in (("island-1", "one"), ("island-2", "two"), ("common", "all")):
        document = json.dumps({"text": f"{words} of these words\n" * 9}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(document * 60)
    mixture = f"{tmp_path}/{{worker}}.jsonl=3 {tmp_path}/common.jsonl=1"
    settings: dict[str, Any] = {"data__mixture": mixture, "data__shard_by": "own"}
    settings |= {"data__cache_folder": tmp_path / "cache", "data__validation_fraction": 0.2}
    ended = run(tmp_path / "run", training__steps=12, **settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    corpora = []
    for name in ("island-1", "island-2"):
        assert f"loss/val/{tmp_path}/{name}.jsonl" in set(last_record(tmp_path / "run" / name))
        position = read_manifest(last(tmp_path / "run" / name)).position
        assert position is not None
        corpora.append(position.corpora)
    own, common = corpora[0]
    assert corpora[0][own] != corpora[1][own]
    assert corpora[0][common] == corpora[1][common]
    (tmp_path / "island-2.jsonl").unlink()
    refused = run(tmp_path / "again", training__steps=12, **settings)
    assert refused.returncode == 2
    assert f"{tmp_path}/island-2.jsonl" in refused.stderr


def last_record(folder: Path) -> dict[str, Any]:
    """Return the newest record of a validation."""
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "worker-0" / "metrics.jsonl").open()
    ]
    return [record for record in records if any("loss/val" in key for key in record)][-1]


def check_report(folder: Path) -> None:
    """Its counts are those of two islands, and of the run's tokens."""
    (island,) = open_runs([folder])
    facts = {name.text: cell.text for name, cell in facts_table([island]).rows}
    tokens = 60 * 2 * SETTINGS["training.batch_size"] * SETTINGS["training.sequence_length"]
    assert facts["tokens"] == f"{tokens:,}"
    assert read_manifest(last(folder)).tokens == tokens
    assert describe(island).endswith("; 1 of 2 islands, Streaming DiLoCo")
    sent = island.totals["worker/sent_bytes"]
    assert facts["sent by each worker"] == EngFormatter("B", places=1)(sent)
    expected = baseline_bytes(island.workers[0].starts[0].parameters, 2) * island.last_step
    assert island.baseline_bytes(island.totals["worker/steps"]) == expected


def test_islands_leave_on_a_notice_and_each_has_a_place_in_the_mirror(tmp_path: Path) -> None:
    """They send their work and give their slots back, as after a signal."""
    location = tmp_path / "mirror"
    folder = tmp_path / "run"
    with metadata_server() as server:
        server.answers[GCP] = "TRUE"
        notices: dict[str, Any] = {
            "run__preemption": "gcp",
            "run__preemption_address": server.address,
        }
        more: dict[str, Any] = {"training__steps": 20_000, "checkpoint__mirror": location}
        done = run(folder, **notices, **more)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert "notice: GCP will preempt this machine, 30 s left" in done.stdout
    assert "left the run after its own step" in done.stdout
    for name in ("island-1", "island-2"):
        saved = last(folder / name)
        (copy,) = (location / f"mirror/{name}/copy").iterdir()
        assert copy.name.startswith(saved.name)
