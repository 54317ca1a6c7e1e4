"""A syncer hears islands although reads fail, notes are too large, or there are too many."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.islands.by_hand import open_run
from tests.islands.rules.desk import A, B, C, founded
from torchtitan_diloco.islands import heard as module
from torchtitan_diloco.islands.heard import Heard
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.founding import Founding, encode_founding
from torchtitan_diloco.islands.rules.names import ISLAND, founding_name
from torchtitan_diloco.islands.rules.note import MOST_NOTE, Note, encode_note
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import AwayError


class Listening:
    """A syncer in a folder, whose reads can fail."""

    def __init__(self, run: Run, state: Decision | None) -> None:
        self.machine = Syncer(state, "session", 0.0, 0.0)
        self.run = run
        self.fails = set[str]()
        """Names of objects that cannot be read."""
        self._get = run.brief.get
        run.brief.get = self.get  # type: ignore[method-assign]
        self.heard = Heard(run, self._call, self._call)

    def _call(self, call: Callable[[Syncer], Any], /) -> Any:
        return call(self.machine)

    def get(self, name: str, **options: Any) -> Any:
        if name in self.fails:
            raise AwayError(f"{name} cannot be read")
        return self._get(name, **options)

    def write(self, incarnation: str, counter: int = 1, **fields: Any) -> None:
        note = encode_note(Note(counter=counter, **fields))
        self.run.store.replace(ISLAND + incarnation, note)

    @property
    def heard_of(self) -> set[str]:
        return set(self.machine.presence.members)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with open_run(tmp_path) as opened:
        yield opened


def test_a_founding_that_could_not_be_read_is_read_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the run would never begin."""
    passed = list[str]()

    def note(_: Syncer, incarnation: str, raw: bytes) -> None:
        assert raw
        passed.append(incarnation)

    monkeypatch.setattr(Syncer, "on_founding", note)
    listening = Listening(run, None)
    founding = Founding(run="r", settings=founded().settings, shapes=[[(1, 1)]], checksums=["0"])
    name = founding_name(A)
    run.store.create(name, encode_founding(founding))
    listening.fails = {name}
    with pytest.raises(AwayError):
        listening.heard.look()
    assert passed == []
    listening.fails.clear()
    listening.heard.look()
    listening.heard.look()
    assert passed == [A], "and once"


def test_a_note_that_cannot_be_read_hides_no_other_one(run: Run) -> None:
    """But the time does not count as silence of its island."""
    listening = Listening(run, founded((A, B, C)))
    for incarnation in (A, B, C):
        listening.write(incarnation)
    listening.fails = {ISLAND + B}
    for _ in range(3):
        with pytest.raises(AwayError):
            listening.heard.read_owners()
    assert listening.heard_of == {A, C}
    assert listening.machine.presence.listened == 0
    listening.fails.clear()
    listening.heard.read_owners()
    listening.heard.read_owners()
    assert listening.heard_of == {A, B, C}
    assert listening.machine.presence.listened > 0


def test_time_without_owners_counts_only_if_others_could_be_heard(run: Run) -> None:
    listening = Listening(run, founded(()))
    listening.write(A)
    listening.heard.read_owners()
    listening.heard.look()
    assert listening.heard_of == {A}
    before = listening.machine.presence.listened
    listening.write(B)
    listening.fails = {ISLAND + B}
    for _ in range(3):
        listening.heard.read_owners()
        with pytest.raises(AwayError):
            listening.heard.look()
    assert listening.machine.presence.listened == before
    listening.fails.clear()
    listening.heard.look()
    assert listening.heard_of == {A, B}
    assert listening.machine.presence.listened > before


def test_a_note_that_is_too_large_is_not_read(run: Run) -> None:
    listening = Listening(run, founded((A,)))
    listening.run.store.replace(ISLAND + A, bytes(MOST_NOTE + 1))
    listening.heard.read_owners()
    assert listening.heard_of == set()
    listening.write(A)
    listening.heard.read_owners()
    assert listening.heard_of == {A}


def test_all_notes_are_listed_although_they_are_too_many(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of a login whose names sort first."""
    monkeypatch.setattr(module, "MOST_LISTED", 4)
    listening = Listening(run, founded(()))
    for number in range(10):
        listening.write(f"a.{number}/0000")
    listening.write("z/0000")
    for _ in range(3):
        listening.heard.look()
    assert "z/0000" in listening.heard_of
