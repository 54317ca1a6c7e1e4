"""The rounds of an island, for its metrics."""

import time
from collections.abc import Collection

from torchtitan_diloco.diloco.flags import OUTLIER
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.round import Round
from torchtitan_diloco.islands.followers import Prepared
from torchtitan_diloco.islands.gauges import Gauges
from torchtitan_diloco.islands.rules.fragment import Apply
from torchtitan_diloco.islands.rules.note import Part


class OwnRounds:
    """Measures the rounds with a part of this island, from its send on, and those without one, from
    the time at which they are applied."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges
        self._sent = dict[int, Round]()
        """Rounds of the latest parts, by fragment."""

    @property
    def in_flight(self) -> Collection[int]:
        """Fragments that were sent and not applied yet, as a view of them."""
        return self._sent.keys()

    def begin(self, part: Part, step: int) -> Round:
        """Return the round of a part that is sent now."""
        round_ = Round(part.fragment, part.base + 1, step, due=time.perf_counter())
        round_.weight = part.weight
        self._sent[part.fragment] = round_
        return round_

    def end(self, apply: Apply, step: int, *, waited: float, prepared: Prepared | None) -> Round:
        """Return the round whose version is applied now.

        `waited`: seconds for which training has waited for it. `prepared`: its download, on the
        rank that has made it.
        """
        now = time.perf_counter()
        round_ = self._sent.pop(apply.fragment, None) if apply.mode is Mode.MIX else None
        if round_ is None:
            round_ = Round(apply.fragment, apply.version, step)
            round_.due = now
            round_.taken = now
            round_.begun = now
            round_.ready = now
        round_.outer_round = apply.version
        round_.asked = now - waited
        round_.fetched = now
        if prepared is not None:
            round_.ready = max(prepared.at, round_.begun)
            round_.traffic.bytes_received = prepared.size
            self._gauges.received += prepared.size
            if apply.mode is Mode.MIX:
                self._gauges.round_trip = max(0.0, prepared.at - round_.due)
        if apply.mode is Mode.RESET:
            round_.flags = round_.flags or OUTLIER
        return round_
