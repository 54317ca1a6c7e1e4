"""Files that show a run: metrics.jsonl, TensorBoard events, and a trace of the latest rounds."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from torchtitan_diloco.components.records import Record, RoundRecord, to_line
from torchtitan_diloco.components.timeline import phases, write_trace
from torchtitan_diloco.utils import logger, read_json_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SHOWN_ROUNDS = 8
"""Rounds in TensorBoard's image."""
OVERVIEW = {
    "1. Is the communication hidden?": {
        "share of time, percent": "time/share_.*_percent",
        "hidden share of each round, percent": "round_hidden_percent_.*",
        "exposed seconds of each round": "round_exposed_seconds_.*",
    },
    "2. Does it learn?": {
        "loss, nats per token": "(train|validation)/loss.*",
        "tokens per second": "speed/tokens_per_second_global",
    },
    "3. What goes over the links?": {
        "Mbit/s": "diloco/bandwidth_.*",
        "transfer seconds of each round": "round_transfer_seconds_.*",
    },
    "4. Do the workers agree?": {
        "cosine of each worker's change to the mean": "round_cosine_to_mean_.*",
        "norm of the outer gradient": "round_outer_gradient_norm_.*",
        "drift from the shared parameters": "round_drift_norm_.*",
        "who came last, seconds": "round_late_by_seconds/.*",
    },
}
"""Custom scalars of TensorBoard: sections, their charts, and the tags in each chart."""


class RecordFiles:
    """Writes records to the folder of a run; to nothing if it is None.

    A run that was resumed after `step` does not keep the records of later steps, which it repeats.
    A full disk loses records, but does not end the run.
    """

    def __init__(self, folder: Path | None, step: int, *, board: bool, workers: int) -> None:
        self._folder = folder
        self._lines: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._failed = False
        self._writing = threading.Lock()
        if folder is None:
            return
        path = folder / "metrics.jsonl"
        drop_records_after(path, step)
        self._lines = path.open("a", buffering=1, encoding="utf-8")
        if board:
            from torch.utils import tensorboard  # slow to import

            self._board = tensorboard.SummaryWriter(
                str(folder / "tensorboard"), purge_step=step + 1, flush_secs=10
            )
            if workers > 1:
                self._board.add_custom_scalars(
                    {
                        section: {chart: ["Multiline", [tag]] for chart, tag in charts.items()}
                        for section, charts in OVERVIEW.items()
                    }
                )

    def write(
        self, line: msgspec.Struct | Mapping[str, Any], step: int = 0, scalars: Record | None = None
    ) -> None:
        """Write a line of JSON and the TensorBoard scalars of a step, without those of None."""
        with self._tolerating_a_full_disk():
            if self._lines is not None:
                self._lines.write(to_line(line))
            if self._board is not None:
                for tag, value in (scalars or {}).items():
                    if value is not None:
                        self._board.add_scalar(tag, value, step)

    def draw(self, rounds: Sequence[RoundRecord], step: int) -> None:
        """Write the trace of these rounds, and an image of the last ones. This is slow."""
        if self._folder is None or not rounds:
            return
        with self._tolerating_a_full_disk():
            write_trace(self._folder / "traces" / "fragments.json", rounds)
            if self._board is not None:
                from torchtitan_diloco.components.timeline_figure import draw_timeline

                shown = phases(rounds[-SHOWN_ROUNDS:])
                figure, _ = draw_timeline(shown, title="The last exchanges")
                figure.set_dpi(144)
                self._board.add_figure("timeline/last_rounds", figure, step)

    def close(self) -> None:
        for opened in (self._lines, self._board):
            with suppress(OSError):
                if opened is not None:
                    opened.close()

    @contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            with self._writing:  # silence is recorded by a thread of its own
                yield
        except OSError as error:
            if not self._failed:
                reason = f"cannot write records to {self._folder} ({error.strerror})"
                logger.error(f"{reason}; they are lost until there is room again")
            self._failed = True


def drop_records_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run repeats. If it starts over, put them all aside."""
    if not path.exists():
        return
    if step == 0:
        names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        path.rename(aside)
        logger.warning(
            f"{path.parent} holds a run without a checkpoint, which starts over; its records are "
            f"kept in {aside.name}"
        )
        return
    records, unreadable = read_json_lines(path)
    known = [record for record in records if isinstance(record.get("step"), int)]
    unreadable += len(records) - len(known)
    if unreadable:
        logger.warning(f"{unreadable} lines of {path} cannot be read and are left out")
    kept = [to_line(record) for record in known if record["step"] <= step]
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    new.replace(path)
