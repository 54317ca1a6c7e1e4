"""Islands on this machine, with a stand-in for training, and the syncer beside them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.islands.by_hand import newest
from tests.programs import Program
from tests.waiting import wait_until
from torchtitan_diloco.islands.children import NICE, Child
from torchtitan_diloco.islands.local import run_islands

ISLAND = """
import os, signal, sys, time
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
name = flags["--islands.name"]
def end(number, _):
    Path(flags["--run.folder"], "told").touch()
    sys.exit(3 if name == "island-2" else 0)
signal.signal(signal.SIGTERM, end)
print(name, flags["--islands.join"], flush=True)
Path(flags["--run.folder"], "ready").write_text(str(os.getpid()))
time.sleep(200)
"""


def start_two(words: list[str]) -> int:
    """Run two stand-ins of islands in a folder."""
    return run_islands([sys.executable, "-c", ISLAND], 2, Path(words[0]))


@contextmanager
def local_islands(folder: Path) -> Iterator[Program]:
    """Start two stand-ins of islands, and wait until they and the syncer run."""
    with Program(folder.with_suffix(".txt"), [folder], main=start_two) as process:
        ready = [folder / f"island-{number}/ready" for number in (1, 2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in ready), "islands")
        wait_until(lambda: len(syncers(folder, process)) == leads(folder) == 1, "a syncer")
        yield process


def children_of(process: Program) -> set[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return {int(pid) for pid in found.split()}


def syncers(folder: Path, process: Program) -> set[int]:
    """Return the process ids of the syncers that this process has started beside the islands."""
    return children_of(process) - {int(path.read_text()) for path in folder.glob("*/ready")}


def leads(folder: Path) -> int:
    """Return how often a syncer has begun to lead."""
    output = folder / "syncer/output.txt"
    return output.read_text().count("leads, in session") if output.exists() else 0


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, whether or not its parent has noticed."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_a_signal_ends_all_islands_and_then_the_syncer(tmp_path: Path) -> None:
    with local_islands(tmp_path) as process:
        (syncer,) = syncers(tmp_path, process)
        lowest = 19
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, syncer) == min(lowest, priority + NICE)
        process.terminate()
        output = process.end(3)
        assert is_gone(syncer)
    first, own, where, last = sorted(output.splitlines())
    store = tmp_path / "store"
    assert own == f"island-1 {store}"
    assert where == f"island-2, syncer: output.txt in the folders of these names in {tmp_path}"
    assert first.startswith("all islands: ")
    assert first.endswith(f"islands watch --join {store}")
    assert last.startswith(f"the islands and their store are in {tmp_path}; to continue a run")
    assert (tmp_path / "island-2/output.txt").read_text() == f"island-2 {store}\n"
    assert all((tmp_path / name / "told").exists() for name in ("island-1", "island-2"))
    said = (tmp_path / "syncer/output.txt").read_text()
    assert said.endswith("is stopped: publishes what is merged, and ends\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)], ids=["killed", "stopped"]
)
def test_a_syncer_that_dies_is_started_again(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Also if somebody stops it in order: nobody would merge what the islands send."""
    with local_islands(tmp_path) as process:
        (ended,) = syncers(tmp_path, process)
        os.kill(ended, number)
        wait_until(lambda: leads(tmp_path) == 2, "another syncer")
        (started_again,) = syncers(tmp_path, process)
        assert started_again != ended
        process.terminate()
        output = process.end(3)
    assert f"the syncer ended with code {code}" in output
    assert "; starting it again in 1 s" in output


def test_nothing_is_left_of_killed_islands(tmp_path: Path) -> None:
    with local_islands(tmp_path) as process:
        children = children_of(process)
        assert len(children) == 3
        process.kill()
        wait_until(lambda: all(map(is_gone, children)), "the end of the children")
    assert not list((tmp_path / "store").glob("run/*")), "nobody has founded a run"
    with pytest.raises(AssertionError):
        newest(tmp_path / "store")


# --- children -------------------------------------------------------------------------------------


def ending(code: int) -> Callable[[], "subprocess.Popen[bytes]"]:
    def start() -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        process.wait()
        return process

    return start


def test_a_child_is_started_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    now = [0.0]
    monkeypatch.setattr("torchtitan_diloco.islands.children.time.monotonic", lambda: now[0])
    child = Child("the syncer", ending(2), said.append, why=lambda: "error: no disk")
    for _ in range(700):
        child.runs()
        now[0] += 0.1
    pauses = [line.rpartition(" in ")[2] for line in said]
    assert pauses == ["1 s", "2 s", "4 s", "8 s", "16 s", "30 s", "30 s"]
    assert said[0].startswith("the syncer ended with code 2 (error: no disk); starting it again")


def test_a_child_that_has_done_its_work_is_not_started_again() -> None:
    said = list[str]()
    child = Child("the syncer", ending(0), said.append, may_end=True)
    child.start()
    assert [child.runs() for _ in range(3)] == [False] * 3
    assert child.is_done
    assert said == []
    child = Child("SeaweedFS", ending(0), said.append)
    child.start()
    assert not child.runs()
    assert said == ["SeaweedFS ended with code 0; starting it again in 1 s"]
