"""Attempts are repeated for a while, and the log says so."""

import logging
import threading
import time

import pytest

from torchtitan_diloco.store import AwayError, ClosedError, RefusedError
from torchtitan_diloco.store import attempts as module
from torchtitan_diloco.store.attempts import ATTEMPT_SECONDS, Attempts
from torchtitan_diloco.store.errors import PassingError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 1e-4)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 1e-3)


class Flaky:
    def __init__(self, failures: int) -> None:
        self.failures, self.seconds = failures, list[float]()

    def __call__(self, seconds: float) -> str:
        self.seconds.append(seconds)
        if len(self.seconds) <= self.failures:
            raise PassingError("it is busy")
        return "done"


def test_later_attempts_wait_for_longer(caplog: pytest.LogCaptureFixture) -> None:
    call = Flaky(6)
    assert Attempts("place", 60.0).run("get", "a", call) == "done"
    assert call.seconds == [*ATTEMPT_SECONDS, *ATTEMPT_SECONDS[-1:] * 3]
    assert caplog.messages == ["place: could not get a (it is busy); trying again"]


def test_a_call_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        AwayError, match=r"place: could not list all for 0.05 s \(it is busy\); check"
    ):
        Attempts("place", 0.05).run("list", "", Flaky(10**6))
    assert len(caplog.messages) == 1


def test_what_another_attempt_would_meet_is_raised_at_once() -> None:
    def refuse(_: float) -> None:
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
    assert call.seconds
