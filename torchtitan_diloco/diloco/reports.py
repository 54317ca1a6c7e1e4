"""What is known of the workers: who is late and why, and what all of them say of themselves.

Reports answer queries. They make no decisions: an exchange waits, fails or continues without them.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torchtitan_diloco.base.log import logger
from torchtitan_diloco.diloco.liveness import LATE_SECONDS, Answer, Liveness
from torchtitan_diloco.diloco.round import LEAST_LINK_BYTES, Traffic
from torchtitan_diloco.diloco.transport import Header, Transport
from torchtitan_diloco.diloco.vitals import Action, Report, VerdictKind, Vitals, absence

HANG_STEPS = 10
"""A step hangs if it takes this multiple of the usual time, and at least `LATE_SECONDS`."""
HANG_SECONDS = 60.0
"""The first step, and any step while the usual time is unknown, hangs if it takes these seconds."""
STILL_SECONDS = 5.0
"""Seconds for which nothing arrives, after which a payload may be stuck."""
STILL_RATIO = 10.0
"""It is stuck if nothing arrives for this multiple of the usual time of a message, too."""


class NotCome(NamedTuple):
    """Describes a worker for which an exchange waits."""

    cause: str
    """Why it may be absent, before it was asked. Empty if that is unknown."""
    evidence: str
    """Says what has not arrived from it."""


class Reports:
    """What the peers of an outer loop know of the workers, for diagnosis, telemetry and
    descriptions. The peers set its values. This base class knows nothing."""

    workers = 1
    """Number of workers in each exchange."""
    worker = 0
    """Index of this worker."""
    progress = 0.0
    """Completed share of the run, 0 if its length is unknown."""
    in_flight: Collection[int] = ()
    """Fragments that every worker has sent and not applied yet."""
    vitals = Vitals()
    """Vitals of this worker. Set after each step by the code that measures the steps."""
    watcher: Callable[[Mapping[str, Report]], None] | None = None
    """Receives the reports of absent workers, by name, while training waits long. The waiting
    thread calls this without a lock, and waits until it returns."""

    @property
    def name(self) -> str:
        """Name of this worker in messages."""
        return f"worker {self.worker}"

    def latest(self) -> Mapping[str, Report]:
        """Return the reports of all workers in the last round, by name."""
        return {}

    def late(self) -> Mapping[str, Report]:
        """Return the workers for which training waits, by name, with what has not arrived from
        them.

        Workers that are not absent may only be slow.
        """
        return {}

    def say(self, verdicts: Sequence[str]) -> None:
        """Tell the others what this worker has found wrong, unless one worker judges for all."""

    def take_actions(self) -> list[Action]:
        """Return the actions about other workers that began or ended since the last call."""
        return []

    def advise(self, settings: Mapping[str, object]) -> str:
        """Return the command with which users change settings."""
        return " ".join(f"--{key} {value}" for key, value in settings.items())

    def describe(self) -> list[str]:
        """Return lines about the workers for the start of a run."""
        return []


class GlooReports(Reports):
    """The reports of the workers of one job, which it collects while `Liveness` waits."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self._transport: Transport | None = None
        self._cycle_bytes = 0.0
        self._reports = dict[str, Report]()
        self._rates = dict[int, float]()
        """Latest known bytes per second from each worker."""
        self._transfers: tuple[float, ...] = ()

    def observe(self, transport: Transport, *, cycle_bytes: float) -> None:
        """Observe a transport from now on. `cycle_bytes`: bytes from each other worker in a
        cycle."""
        self._transport = transport
        self._cycle_bytes = cycle_bytes

    def note_round(self, headers: Sequence[Header], traffic: Traffic) -> None:
        """Record the reports of all workers in a round, and the rates of the transfers."""
        self._reports = {
            f"worker {worker}": Report(vitals=header.vitals, flags=header.flags)
            for worker, header in enumerate(headers)
        }
        rates = {worker: traffic.rate(worker) for worker in range(len(headers))}
        known = {worker: rate for worker, rate in rates.items() if math.isfinite(rate)}
        self._transfers = tuple(
            self._cycle_bytes / known[worker] if worker in known else 0.0 for worker in rates
        )
        self._rates |= known

    def measured_vitals(self) -> Vitals:
        """Return the vitals of this worker, with its transfers at the rates of the last round."""
        return self.vitals._replace(transfers=self._transfers)

    def latest(self) -> Mapping[str, Report]:
        return self._reports

    def waiting(self, seconds: float) -> None:
        """Log the workers for which training waits, on one rank of each worker."""
        if not self.liveness.speaks:
            return
        late = self.late()
        if self.watcher is not None:
            absent = {name: report for name, report in late.items() if report.absent}
            self.watcher(absent)
        whom = " and for ".join(_describe(name, report) for name, report in late.items())
        logger.warning(f"waiting since {seconds:.0f} s for {whom or self._others()}")

    def _others(self) -> str:
        others = self.liveness.others
        return f"worker {' or '.join(map(str, others))}" if others else "a rank of this worker"

    def late(self) -> dict[str, Report]:
        not_come = self._not_come()
        absent_for_now = [worker for worker, (cause, _) in not_come.items() if cause]
        answers = self.liveness.ask(absent_for_now)
        late = dict[str, Report]()
        for worker, (cause, evidence) in not_come.items():
            name = f"worker {worker}"
            report = self._reports.get(name, Report())
            answer = answers.get(worker)
            usual = report.vitals.step or self.vitals.step
            absent = cause and why_absent(answer, usual, is_stuck=cause == VerdictKind.STUCK)
            answered = cause and f", and {_describe_answer(answer)}"
            late[name] = report._replace(absent=absent, evidence=f"{evidence}{answered}")
        return late

    def _not_come(self) -> dict[int, NotCome]:
        """Return the workers for which an exchange waits, with what has not arrived from them."""
        if self._transport is None:
            return {}
        arrivals = self._transport.arrivals
        now = time.perf_counter()
        size = max(arrivals.sizes.values(), default=0)
        pending = arrivals.pending.copy()
        # Who has sent its mean has all that it needs, so the last one may well be the culprit.
        others_came = len(arrivals.sizes) > 1 and len(pending) == 1
        not_come = dict[int, NotCome]()
        for worker, receives in sorted(pending.items()):
            latest = arrivals.latest.get(worker)
            cause = ""
            if latest is None:
                waited = now - self._transport.traffic.header_sent
                cause = VerdictKind.STOPPED
                evidence = f"its header has not arrived for {waited:.0f} s"
            elif not receives:
                evidence = "it has not received what was sent to it"
            elif arrivals.are_means and not others_came:
                evidence = "its mean has not arrived, and it may be waiting for another worker"
            elif now - latest < self._still_seconds(worker, size):
                missing = "mean" if arrivals.are_means else "payload"
                evidence = f"its header has arrived, but its {missing} has not arrived yet"
            else:
                cause = VerdictKind.STUCK
                evidence = "its header has arrived, but none of its payload has"
                if arrivals.are_means:
                    evidence = "the means of the others have arrived, but its mean has not"
                evidence += f" for {now - latest:.0f} s"
            not_come[worker] = NotCome(cause, evidence)
        return not_come

    def _still_seconds(self, worker: int, size: int) -> float:
        """Return the seconds without a message of this size after which a payload is stuck."""
        unknown = 0.0 if size >= LEAST_LINK_BYTES else math.inf
        rate = self._rates.get(worker, unknown)
        usual = size / rate if rate else math.inf
        return max(STILL_SECONDS, STILL_RATIO * usual)


def why_absent(answer: Answer | None, usual: float, *, is_stuck: bool) -> str:
    """Return why a worker that was asked is absent, or an empty string if it is not.

    `usual`: usual seconds of a step, 0 if unknown. `is_stuck`: whether only its payload is missing.
    """
    if answer is None:  # its process or its machine has stopped, or all of its link
        return absence(answers=False)
    longest = HANG_SECONDS
    if answer.steps and usual:  # its first step may compile
        longest = max(LATE_SECONDS, HANG_STEPS * usual)
    return absence(
        answers=True,
        still=answer.seconds,
        longest=longest,
        may_wait=answer.waits,
        is_stuck=is_stuck,
    )


def _describe_answer(answer: Answer | None) -> str:
    if answer is None:
        return "it does not answer"
    if answer.waits:
        return "it answers (it is waiting for others)"
    return f"it answers (its last step, {answer.steps}, was {answer.seconds:.0f} s ago)"


def _describe(name: str, report: Report) -> str:
    step = report.vitals.step
    usual = f", whose steps took {step:.3g} s" if step else ""
    return f"{name}{usual}: {report.evidence}"
