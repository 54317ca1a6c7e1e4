"""Values of an island for users, which its notes contain."""

import math
import os
import socket
import time
from collections import deque

from torchtitan_diloco.diloco.vitals import Vitals
from torchtitan_diloco.islands.rules import note as notes

STEP_TIMES = 16
"""Number of latest steps that determine the usual time of a step, and the current speed."""


class Gauges:
    """Measures an island for its notes. The training thread writes it."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.validated: tuple[int, float] | None = None
        self.waited = 0.0
        """Seconds for which training has waited since the start."""
        self.round_trip = 0.0
        """Seconds from the latest send to the version with the part."""
        self.sent = 0
        self.received = 0
        self.says = 0
        """Code of what this island says of itself."""
        self.site = ""
        self._steps = deque[tuple[float, int, float]](maxlen=STEP_TIMES)

    def finish_step(self, tokens: int) -> None:
        """Count a step. `tokens`: those on which this island has trained so far."""
        self._steps.append((time.monotonic(), tokens, self.waited))

    def read(self, vitals: Vitals, upload_rate: float = 0.0) -> notes.NotedGauges:
        """Return the gauges for a note. `upload_rate`: bytes per second of the latest part."""
        steps = list(self._steps) or [(0.0, 0, 0.0)]
        began, tokens, waited = steps[0]
        now, tokens_now, waited_now = steps[-1]
        seconds = now - began or math.inf
        return notes.NotedGauges(
            vitals=notes.NotedVitals(
                vitals.compute,
                vitals.data,
                vitals.save,
                vitals.queued,
                vitals.upload,
                vitals.download,
            ),
            loss=_known(self.loss),
            validated=None if self.validated is None else _validated(*self.validated),
            tokens_per_second=(tokens_now - tokens) / seconds,
            waited=min(1.0, (waited_now - waited) / seconds),
            round_trip=self.round_trip,
            upload_rate=upload_rate,
            sent=self.sent,
            received=self.received,
            says=self.says,
            site=self.site,
            process=f"{os.getpid()} on {socket.gethostname()}"[: notes.MOST_OF_PROCESS],
        )


def _validated(tokens: int, loss: float) -> tuple[int, float] | None:
    return (tokens, loss) if math.isfinite(loss) else None


def _known(value: float | None) -> float | None:
    """Return None for a number that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
