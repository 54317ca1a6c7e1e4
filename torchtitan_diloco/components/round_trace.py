"""The last rounds of all workers as a file that https://ui.perfetto.dev and chrome://tracing open."""

import json
from collections import deque
from pathlib import Path

from torchtitan_diloco.components.round_records import RoundRecord
from torchtitan_diloco.pictures.phases import phases
from torchtitan_diloco.pictures.trace_events import chrome_trace_events
from torchtitan_diloco.utils import logger

KEPT = 1000
"""Rounds in the file; metrics.jsonl has all of them."""


class RoundTrace:
    def __init__(self, path: Path) -> None:
        self._path, self._rounds = path, deque[RoundRecord](maxlen=KEPT)

    def add(self, record: RoundRecord) -> None:
        self._rounds.append(record)

    def save(self) -> None:
        """Written beside and renamed: whoever looks while a run goes on finds a whole file."""
        if not self._rounds:
            return
        events = chrome_trace_events(phases(list(self._rounds)))
        aside = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(
                json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8"
            )
            aside.replace(self._path)
        except OSError as error:
            logger.error(
                f"{self._path} cannot be written ({error.strerror}); the run goes on without it"
            )
