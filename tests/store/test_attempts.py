"""Attempts are repeated for a while, and the log says so."""

import logging
import threading
import time

import pytest

from torchtitan_diloco.store import AwayError, ClosedError, RefusedError
from torchtitan_diloco.store import attempts as module
from torchtitan_diloco.store.attempts import Attempts
from torchtitan_diloco.store.errors import PassingError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 1e-4)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 1e-3)
    monkeypatch.setattr(module, "LONGEST_LARGE_PAUSE", 1e-3)


class Flaky:
    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise PassingError("it is busy")
        return "done"


def test_a_call_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    call = Flaky(6)
    assert Attempts("place", 60.0).run("get", "a", call) == "done"
    assert call.calls == 7
    assert caplog.messages == ["place: could not get a (it is busy); trying again"]


@pytest.mark.parametrize(("large", "longest"), [(False, 0.3), (True, 3.0)])
def test_pauses_grow_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, large: bool, longest: float
) -> None:
    """Decisions and notes are tried again soon, and a busy server gets few large contents."""
    monkeypatch.undo()
    pauses = list[float]()
    attempts = Attempts("place", 60.0)
    monkeypatch.setattr(attempts._closed, "wait", pauses.append)
    attempts.run("get", "a", Flaky(12), large=large)
    assert 0.1 <= pauses[0] <= 0.15
    assert longest / 1.5 <= max(pauses) <= longest


def test_a_thread_may_have_less_patience(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts("place", 1e9)
    hasty = attempts.with_patience(0.0)
    with pytest.raises(AwayError, match="for 0 s"):
        hasty.run("get", "a", Flaky(10**6))
    assert attempts.run("get", "a", Flaky(3)) == "done"
    assert len(caplog.messages) == 1, "both log the same"
    attempts.close()
    with pytest.raises(ClosedError):
        hasty.run("get", "a", Flaky(0))


def test_a_call_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        AwayError, match=r"place: could not list all for 0.05 s \(it is busy\); check"
    ):
        Attempts("place", 0.05).run("list", "", Flaky(10**6))
    assert len(caplog.messages) == 1


def test_what_another_attempt_would_meet_is_raised_at_once() -> None:
    def refuse() -> None:
        raise RefusedError("no")

    with pytest.raises(RefusedError):
        Attempts("place", 1e9).run("get", "a", refuse)


def test_a_line_when_it_works_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "torchtitan_diloco")
    seconds = iter([0.0, 0.0, 1.0, 1.0, 20.0, 20.0, 25.0, 25.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds, 30.0))
    attempts = Attempts("place", 100.0)
    assert attempts.run("get", "a", Flaky(3)) == "done"
    assert caplog.messages[-1].startswith("place: can get again, after ")
    assert all("trying again" in one for one in caplog.messages[:-1])
    assert attempts.run("get", "a", Flaky(0)) == "done"


def test_an_end_while_it_tries_again() -> None:
    attempts = Attempts("place", 1e9)
    call = Flaky(10**9)
    timer = threading.Timer(0.05, attempts.close)
    timer.start()
    with pytest.raises(ClosedError, match="place was closed"):
        attempts.run("get", "a", call)
    timer.join()
    assert call.calls
