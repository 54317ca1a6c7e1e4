"""The commands of docs/launching.md for torchrun, of two nodes, run on this machine."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.launching.running import PATIENCE_SECONDS, Running, start
from tests.ports import free_port

TORCHRUN = "torch.distributed.run"
SMALL = """
    --run.device cpu --config debug --training.steps 40 --training.global_batch_size 16
    --training.batch_size 8 --training.sequence_length 32 --model.layers 2 --model.width 32
    --model.heads 2 --diloco.sync_every 4 --lr_schedule.warmup 2
    --validation.sequences 8 --metrics.boards none --metrics.log_every 5
    --checkpoint.every 10 --checkpoint.every_minutes 0 --data.validation_fraction 0.5
    --data.cache_folder cache"""


def commands(place: str) -> list[str]:
    """Return the commands that the page has for a place, such as `node0$`, without the settings."""
    page = (REPOSITORY / "docs/launching.md").read_text().replace("\\\n", " ")
    found = re.findall(rf"^{re.escape(place)} (\.venv/bin/torchrun .*)$", page, re.M)
    assert found, place
    return found


def options(command: str, port: int, text: Path) -> list[str]:
    """Return the words after torchrun, with small settings, two processes, and nodes here."""
    command = command.replace("node0", "localhost").replace("29500", str(port))
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1")
    words = command.split()[1:]
    end = words.index("-m") + 2
    folder = words[words.index("--run.folder") :] if "--run.folder" in words else []
    folder = [word.replace("/runs/", "runs/") for word in folder]
    return [*words[:end], *SMALL.split(), "--data.corpus", str(text), *folder]


@pytest.fixture
def started() -> Iterator[list[Running]]:
    runs: list[Running] = []
    yield runs
    for run in runs:
        run.kill()


@pytest.mark.parametrize("way", ["static", "c10d", "variables"])
def test_two_nodes(text: Path, tmp_path: Path, started: list[Running], way: str) -> None:
    """A worker that is killed is started again on both, from the checkpoint of step 10."""
    port = free_port()
    for node in range(2):
        place = {"static": f"node{node}$", "c10d": "any$", "variables": "pod$"}[way]
        (command,) = commands(place)
        variables = {"GLOO_SOCKET_IFNAME": "lo"}
        if way == "variables":
            variables |= {
                "PET_NNODES": "2",
                "PET_NODE_RANK": str(node),
                "PET_NPROC_PER_NODE": "1",
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": str(port),
            }
        started.append(
            start(
                tmp_path / f"console-{node}",
                options(command, port, text),
                main=TORCHRUN,
                folder=tmp_path,
                OMP_NUM_THREADS="1",
                **variables,
            )
        )
    if way == "static":
        started[0].wait_for("checkpoint of step 10")
        agent = started[1].pid
        (rank,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)
    for run in started:
        assert run.wait(PATIENCE_SECONDS) == 0, run.printed()
        assert run.printed().count("resumed from") == (way == "static"), run.printed()
        assert "step 40/40" in run.printed()
    (folder,) = (tmp_path / ("outputs" if way == "c10d" else "runs")).iterdir()
    assert sorted(path.name for path in folder.glob("worker-*")) == ["worker-0", "worker-1"]
    assert folder.name == ("debug-my-1b" if way == "c10d" else "1b")
