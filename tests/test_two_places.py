"""The notebook of two places: it runs twice, in processes that share nothing but a bucket."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from tests.components.test_resume import last
from tests.programs import Program, run_program
from tests.store.seaweed import BUCKET, SECRETS, SeaweedServer
from tests.test_notebook import EXAMPLES, read_cells
from tests.waiting import wait_until
from torchtitan_diloco.components.checkpoint_folder import read_manifest, step_of
from torchtitan_diloco.islands.founding import read_saved
from torchtitan_diloco.islands.rules.checkpoint import Saved
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import open_store

NOTEBOOK = EXAMPLES / "two_places_one_bucket.ipynb"
SMALL: dict[str, object] = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "training.steps": 1_000_000,  # until the test makes the run shorter
    "training.batch_size": 2,
    "training.sequence_length": 16,
    "lr_schedule.warmup": 2,
    "diloco.sync_every": 8,
    "diloco.overlap.delay": 2,
    "validation.every": 0,
    "metrics.boards": "none",
    "metrics.log_every": 5,
    "checkpoint.every": 50,
}
MORE_TOKENS = 15_000
"""Tokens that the run still has once both islands train again: more than they train on while its
length is changed."""


def run_cells(words: list[str]) -> int:
    """Run the cells from top to bottom, as Jupyter does, in the current folder.

    The arguments are the name of the island and the location of the run.
    """
    display = ModuleType("IPython.display")
    display.clear_output = lambda **_: None  # type: ignore[attr-defined]
    sys.modules |= {"IPython": ModuleType("IPython"), display.__name__: display}
    namespace: dict[str, Any] = {}
    for cell in read_cells(NOTEBOOK):
        if cell["cell_type"] == "code":
            try:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
            except SystemExit as end:
                print(end)
                return 1
        if cell["id"] == "settings":
            assert {"NAME", "LOCATION", "SETTINGS"} <= namespace.keys()
            namespace |= {"NAME": words[0], "LOCATION": words[1]}
            namespace["SETTINGS"] |= SMALL
    code: int = namespace["island"].returncode
    return code


class Machine:
    """A machine with an empty disk, on which the notebook runs."""

    def __init__(self, folder: Path, name: str, location: str) -> None:
        folder.mkdir()
        self.name = name
        self.folder = folder / f"island-{name}"
        self._console = folder / f"island-{name}.txt"
        self.notebook = Program(
            folder / "notebook.txt", [name, location], main=run_cells, folder=folder
        )

    def printed(self) -> str:
        """Return what the island and its syncer have printed."""
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    def wait_for(self, text: str) -> None:
        def is_there() -> bool:
            has_ended = self.notebook.poll() is not None
            if text in self.printed():
                return True
            assert not has_ended, self.notebook.printed() + self.printed()
            return False

        wait_until(is_there, f"{text!r} in {self._console}")

    def leads(self, session: str) -> bool:
        """Return whether its syncer leads in a session."""
        return f"leads, in session {session}" in self.printed()

    def copied(self) -> int:
        """Return the last step that its island has copied to the bucket, or 0."""
        return max(map(int, re.findall(r"mirror: step (\d+),", self.printed())), default=0)

    def lose(self) -> None:
        """Kill all its processes, the youngest first: none can do anything at its end."""
        if self.notebook.poll() is not None:
            return  # and its island has ended with it
        for pid in reversed([*_processes(self.notebook.pid)]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.notebook.kill()

    def finish(self) -> None:
        """Wait for the end of the run."""
        assert ": ended;" in self.notebook.end(), self.notebook.printed()


def _processes(pid: int) -> Iterator[int]:
    """Yield a process and those that it has started, the oldest first."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread has just ended
            for child in path.read_text().split():
                yield from _processes(int(child))


@contextmanager
def machine(folder: Path, name: str, location: str) -> Iterator[Machine]:
    found = Machine(folder, name, location)
    try:
        yield found
    finally:
        found.lose()


@pytest.fixture
def login(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables with which the notebook finds the server, and its login there."""
    for key, value in {
        "AWS_ENDPOINT_URL": f"https://127.0.0.1:{seaweed.port}",
        "AWS_ACCESS_KEY_ID": "owner",
        "AWS_SECRET_ACCESS_KEY": SECRETS["owner"],
        "SSL_CERT_FILE": str(seaweed.certificate),
    }.items():
        monkeypatch.setenv(key, value)


@pytest.mark.long
@pytest.mark.usefixtures("login")
def test_the_notebook_runs_twice_and_once_more_on_a_new_machine(tmp_path: Path) -> None:
    """The machine that is lost has the syncer that decides: another one takes over."""
    location = f"s3://{BUCKET}/two-places"
    with ExitStack() as stack:
        run = stack.enter_context(closing(Run(open_store(location, writes=None))))

        def newest() -> Decision:
            decision = run.newest()
            assert decision is not None
            return decision

        def have_sent_more() -> bool:
            return all(now > then for now, then in zip(taken_in(newest()), before, strict=True))

        def start(folder: str, name: str) -> Machine:
            return stack.enter_context(machine(tmp_path / folder, name, location))

        pair = [start(name, name) for name in "ab"]
        for one in pair:
            one.wait_for("mirror: step ")
        session = newest().session
        (lost,) = (one for one in pair if one.leads(session))
        (other,) = (one for one in pair if one is not lost)
        lost.lose()
        again = start("again", lost.name)
        wait_until(lambda: newest().session != session, "another syncer")
        again.wait_for("resumed from")
        resumed = re.search(r"step (\d+) was taken from", again.printed())
        assert resumed is not None, again.printed()
        assert int(resumed[1]) >= lost.copied()
        before = taken_in(newest())
        assert len(before) == 2
        wait_until(have_sent_more, "work of both islands")

        merged = max(shared.clock for shared in newest().fragments)
        words = ["islands", "change", "total_tokens", merged + MORE_TOKENS, "--join", location]
        changed = run_program(tmp_path / "change.txt", words)
        assert changed.returncode == 0, changed.stderr
        other.finish()
        again.finish()
        assert newest().ended
    assert step_of(last(again.folder)) > int(resumed[1])
    saved = [saved_by(machine) for machine in (other, again)]
    assert saved[0] == saved[1]


@pytest.mark.usefixtures("login")
@pytest.mark.parametrize(
    ("bucket", "changed", "says"),
    [
        ("no-such-bucket", {}, "there is no such bucket .* create it, or check its name"),
        (BUCKET, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "refused .* set AWS_ACCESS_KEY_ID, AWS_SEC"),
    ],
)
def test_a_line_says_what_is_wrong_before_anything_starts(
    tmp_path: Path, bucket: str, changed: dict[str, str], says: str
) -> None:
    location = f"s3://{bucket}/two-places"
    program = Program(
        tmp_path / "notebook.txt",
        ["a", location],
        main=run_cells,
        folder=tmp_path,
        variables=os.environ | changed,
    )
    with program:
        (line,) = program.end(1).strip().splitlines()
    assert re.match(f"error: {re.escape(location)}: .*{says}", line), line
    assert not list(tmp_path.glob("island-*"))


def saved_by(machine: Machine) -> Saved:
    """Return what the last checkpoint of an island says about its run, but for its own slot."""
    outer = read_manifest(last(machine.folder)).outer
    assert outer is not None
    saved = read_saved(outer.island)
    assert saved is not None
    return replace(saved, slot=None, position=0)


def taken_in(decision: Decision) -> list[int]:
    """Return for each slot of an island the samples that are merged."""
    return [sum(ledger.taken for ledger in slot.ledgers) for slot in decision.slots]
