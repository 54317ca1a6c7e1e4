"""What the location of a run of islands allows and how fast it is, for `doctor`."""

import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from torchtitan_diloco.base.formatting import brief, counted
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.codecs import build_codec
from torchtitan_diloco.diloco.config import Quantization
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.rules.names import ISLAND, PART
from torchtitan_diloco.islands.runs import Run, explain_unreadable
from torchtitan_diloco.store import Kind, LargeObjects, RefusedError, Store, open_store
from torchtitan_diloco.store.join_file import JoinFile, read_join_file
from torchtitan_diloco.store.location import is_bucket
from torchtitan_diloco.store.store import MOST_BYTES

Hop: TypeAlias = tuple[str, Callable[[], str]]
"""Name of a check, and a function that returns its result or raises an error with a remedy."""
STORE_PATIENCE = 10.0
CALLS = 10
"""Number of calls whose median counts."""
MOST_APART = 60.0
"""Seconds between two clocks above which one of them is wrong."""
LEAST_BYTES = 2**18
"""Bytes to measure a rate with, at first."""
MOST_BYTES_MEASURED = 2**26
"""Bytes to measure a rate with, at most."""
MEASURED_SECONDS = 1.0
OPERATIONS = 10
"""Calls between a send and the version that contains it, beside the transfers."""
POLLS = 2
"""Polls between a send and the version that contains it."""


@dataclass
class Rate:
    """Bytes per second to a store and back."""

    up: float
    down: float

    def __str__(self) -> str:
        return f"{self.up / 1e6:.3g} MB/s up and {self.down / 1e6:.3g} down"


class Location:
    """A location, which is opened by the first check that is called."""

    def __init__(self, location: str, streams: int) -> None:
        """Name the location, which is opened later. `streams`: connections of an island."""
        self._location = location
        self._streams = streams
        self._join: JoinFile | None = None
        self._name = "doctor"
        self._store: Store | None = None
        self._round_trip = math.nan
        self._rates = dict[int, Rate]()

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    def server(self) -> tuple[str, int] | None:
        """Return host and port of the server in a join file, if it is one."""
        if "://" in self._location or not is_bucket(self._location):
            return None
        self._join = read_join_file(Path(self._location).expanduser())
        self._name = self._join.name or self._name
        parts = urlsplit(self._join.server)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def checks(self) -> Iterator[Hop]:
        """Yield the checks, each of which needs those before it."""
        yield "location", self._open
        yield "rights", self._try_rights
        yield "clock", self._compare_clocks
        yield "round trip", self._measure_calls
        yield "rate", self._measure_rates
        yield "run", self._examine_run

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    # --- each check -------------------------------------------------------------------------------

    def _open(self) -> str:
        open_store(self._location, writes=None, patience=STORE_PATIENCE).close()  # makes no folder
        writes = f"{PART}{self._name}/" if self._join else ""
        self._store = open_store(self._location, writes=writes, patience=STORE_PATIENCE)
        kinds = {
            Kind.FOLDER: "a folder",
            Kind.NEAR: "a bucket of a server of one's own",
            Kind.CLOUD: "a bucket of a provider",
        }
        return f"{kinds[self.store.kind]}, in which one of two writers at once wins"

    def _try_rights(self) -> str:
        """Use all verbs below the names of this island, and one below those of another."""
        mark = f"test-{secrets.token_hex(8)}"
        note = f"{ISLAND}{self._name}/{mark}"
        try:
            self.store.replace(note, b"one")
            self.store.replace(note, b"two")
            read_back = self.store.get(note)
            if read_back is None or read_back.content != b"two":
                raise UserError(
                    f"{note} was replaced, and what is read is older: use a store that returns "
                    "what was last written"
                )
            if [entry.name for entry in self.store.list(note)] != [note]:
                raise UserError(f"{note} is not listed: use a store that lists what was written")
        finally:
            self.store.delete(note)
        if self.store.kind is Kind.FOLDER:
            return "create, replace, get, list and delete; all who may write it may write all names"
        foreign = f"{PART}{self._name}-{secrets.token_hex(4)}/{mark}"
        try:
            self.store.create(foreign, b"x")
        except RefusedError:
            return f"create, replace, get, list and delete, below the names of {self._name} only"
        self.store.delete(foreign)
        return (
            "create, replace, get, list and delete, below all names: give the login of a site "
            "rights by prefix, as `islands site` does"
        )

    def _compare_clocks(self) -> str:
        apart = -self.store.ahead
        if abs(apart) > MOST_APART:
            raise UserError(
                f"{apart:+.0f} s from the store's clock: set it, or start an NTP client"
            )
        return f"{apart:+.1f} s from the store's clock"

    def _measure_calls(self) -> str:
        names = [f"{PART}{self._name}/test-{secrets.token_hex(8)}" for _ in range(CALLS)]
        get = list[float]()
        create = list[float]()
        listed = list[float]()
        for name in names:
            get.append(_seconds(lambda: self.store.get(name)))  # noqa: B023
            create.append(_seconds(lambda: self.store.create(name, b"x")))  # noqa: B023
            listed.append(_seconds(lambda: self.store.list(f"{PART}{self._name}/")))
        for name in names:
            self.store.delete(name)
        calls = {"get": get, "create": create, "list": listed}
        medians = {verb: statistics.median(seconds) for verb, seconds in calls.items()}
        self._round_trip = max(medians["get"], medians["create"])
        return ", ".join(f"{verb} {brief(seconds)}" for verb, seconds in medians.items())

    def _measure_rates(self) -> str:
        size = LEAST_BYTES
        for streams in sorted({1, self._streams}):
            while True:  # long enough to measure, and not longer
                rate, seconds = self._measure(size, streams)
                if seconds > MEASURED_SECONDS / 2 or size == MOST_BYTES_MEASURED:
                    break
                size = min(MOST_BYTES_MEASURED, 4 * size)
            self._rates[streams] = rate
        lines = [
            f"{rate} with {counted(streams, 'connection')}" for streams, rate in self._rates.items()
        ]
        return ", ".join(lines)

    def _measure(self, size: int, streams: int) -> tuple[Rate, float]:
        """Return the rates of an object, and the time that it has taken."""
        name = f"{PART}{self._name}/test-{secrets.token_hex(8)}"
        content = os.urandom(size)
        chunk = min(MOST_BYTES, -(-size // streams))
        with LargeObjects(self.store, streams, chunk) as large:
            try:
                up = _seconds(lambda: large.create(name, content))
                down = _seconds(lambda: large.get(name, most=size))
            finally:
                large.delete(name)
        return Rate(size / up, size / down), up + down

    def _examine_run(self) -> str:
        """Check whether parts of the run come in time over this way to the store."""
        try:
            decision = Run(self.store).newest()
        except MalformedError as error:
            raise UserError(explain_unreadable(self.store.location, error)) from None
        if decision is None:
            return "no island has founded one here"
        summary = f"{decision.run}, {_phase(decision)}"
        if not decision.fragments or decision.ended:
            return summary
        settings = decision.settings
        steps = [seen.step_seconds for seen in decision.seen if seen and seen.step_seconds]
        step = statistics.median(steps) if steps else 0.0
        waits = max(settings.grace, settings.delay * step)
        codec = build_codec(Quantization(codec=settings.codec, block_size=settings.block_size))
        size = max(codec.wire_bytes(shared.elements) for shared in decision.fragments)
        rate = self._rates[self._streams]
        needed = size / rate.up + size / rate.down
        needed += POLLS * settings.poll_seconds + OPERATIONS * self._round_trip
        part = f"a part of {size / 1e6:.3g} MB and its version take {brief(needed)}"
        if needed <= waits:
            return f"{summary}; {part}, and islands wait {brief(waits)} for them"
        delay = math.ceil(needed / step) if step else 0
        remedy = f"islands change grace {math.ceil(needed)}"
        if 0 < delay < settings.sync_every:
            remedy = f"islands change delay {delay}, or {remedy}"
        raise UserError(
            f"{summary}: {part} over this link, and islands wait {brief(waits)} for them, so that "
            f"parts of this island come late: {remedy}, or fewer bits"
        )


def _phase(decision: Decision) -> str:
    merged = max((shared.clock for shared in decision.fragments), default=0)
    if decision.ended:
        return f"which has ended after {merged:,} tokens"
    owners = len(decision.owners())
    if not decision.begun:
        joined = f"{owners} of {counted(decision.settings.start_with, 'island')} have joined"
        return f"which has not begun: {joined}"
    total = decision.settings.total_tokens
    return f"{counted(owners, 'island')}, {merged:,} of {total:,} tokens merged"


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(1e-6, time.perf_counter() - began)
