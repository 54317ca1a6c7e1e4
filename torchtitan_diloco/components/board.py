"""TensorBoard: few curves first, each with its unit and scope, and the settings of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard.summary import hparams

from torchtitan_diloco.components.records import Record

FIRST = {
    "train/loss_nats_per_token_global": ("train/loss", "nats per token, mean over all workers"),
    "train/gradient_norm_mean_over_workers": (
        "train/gradient_norm",
        "before clipping, mean over workers",
    ),
    "train/lr": ("train/lr", "of the inner optimizer, all workers"),
    "validation/loss_nats_per_token_global": (
        "val/loss",
        "nats per held-out token, of the shared parameters",
    ),
    "speed/tokens_per_second_global": ("speed/tokens_per_s", "tokens per second, all workers"),
    "speed/seconds_per_step": ("speed/s_per_step", "seconds, without validations and saves"),
    "speed/mfu_percent": ("speed/mfu_pct", "percent of the bf16 peak, all GPUs"),
    "diloco/hidden_percent_mean_over_ranks": (
        "diloco/hidden_pct",
        "percent of the exchanges' time in which training did not wait, mean over ranks",
    ),
    "time/share_exposed_communication_percent_mean_over_ranks": (
        "diloco/exposed_pct",
        "percent of the wall time that communication took from training, mean over ranks",
    ),
    "diloco/bandwidth_used_mbit_per_second_mean_over_workers": (
        "diloco/mbit_per_s",
        "Mbit/s sent between workers, mean over workers and time",
    ),
    "memory/peak_gib_max_over_ranks": ("memory/peak_gib", "GiB, largest rank"),
}
"""Tag and description of the curves that are shown first. All others begin with REST."""
REST = "z_"
COMPARED = ("train/loss", "val/loss", "speed/tokens_per_s")
"""Curves whose last values stand beside the settings in the tab HPARAMS."""


class Board:
    """Event files of a run that was resumed after `step`."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        self._files, self._first_step = FileWriter(str(folder), flush_secs=10), step + 1
        restart = SessionLog(status=SessionLog.START)  # drops later steps of the run before
        self._files.add_event(Event(step=step + 1, session_log=restart))
        self._described = set[str]()
        known = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in settings.items()
        }
        for summary in hparams(known, dict.fromkeys(COMPARED, 0.0)):
            self._files.add_summary(summary)

    def add(self, step: int, record: Record) -> None:
        """Add the values that are known. The first step's speed would dwarf the others."""
        for name, value in record.items():
            slow = step == self._first_step and name.startswith("speed/")
            if value is not None and not slow:
                tag, text = FIRST.get(name, (f"{REST}{name}", ""))
                metadata = None
                if text and tag not in self._described:
                    metadata = SummaryMetadata(summary_description=text)
                    self._described.add(tag)
                scalar = Summary.Value(tag=tag, simple_value=value, metadata=metadata)
                self._files.add_summary(Summary(value=[scalar]), step)

    def close(self) -> None:
        self._files.close()
