"""Values of an island for users, which its notes contain."""

import math
import time
from collections import deque

from torchtitan_diloco.diloco.witness import Witness
from torchtitan_diloco.islands_store import note as notes

STEP_TIMES = 16
"""Number of latest steps that determine the usual time of a step, and the current speed."""


class Gauges:
    """Measures an island for its notes. The training thread writes it."""

    def __init__(self) -> None:
        self.loss: float | None = None
        self.validated: tuple[int, float] | None = None
        self.waited = 0.0
        """Seconds for which training has waited since the start."""
        self.sent = 0
        self.received = 0
        self._steps = deque[tuple[float, int, float]](maxlen=STEP_TIMES)

    def finish_step(self, tokens: int) -> None:
        """`tokens`: those on which this island has trained so far."""
        self._steps.append((time.monotonic(), tokens, self.waited))

    def read(self, witness: Witness) -> notes.Gauges:
        steps = list(self._steps) or [(0.0, 0, 0.0)]
        began, tokens, waited = steps[0]
        now, tokens_now, waited_now = steps[-1]
        seconds = now - began or math.inf
        vitals = witness.vitals
        return notes.Gauges(
            vitals=notes.Vitals(
                vitals.compute,
                vitals.data,
                vitals.save,
                vitals.queued,
                vitals.upload,
                vitals.download,
            ),
            loss=self.loss,
            validated=self.validated,
            tokens_per_second=(tokens_now - tokens) / seconds,
            waited=min(1.0, (waited_now - waited) / seconds),
            sent=self.sent,
            received=self.received,
        )
