"""What TensorBoard shows of the outer loop: tags for each fragment, an overview in custom scalars, the timeline as an image."""

from collections import deque
from typing import TYPE_CHECKING, Any

from torchtitan_diloco.components.round_records import RoundRecord
from torchtitan_diloco.pictures.png import to_pixels
from torchtitan_diloco.pictures.timeline_chart import timeline_chart

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DRAWN = 12
"""Rounds in the picture."""

OVERVIEW: dict[str, dict[str, list[Any]]] = {
    "1. Is the communication hidden?": {
        "share of time, percent": ["Multiline", [r"time/share_.*_percent"]],
        "hidden share of each round, percent": ["Multiline", [r"round_hidden_percent/.*"]],
        "exposed seconds of each round": ["Multiline", [r"round_exposed_seconds/.*"]],
    },
    "2. Does it learn?": {
        "loss, nats per token": ["Multiline", [r"train/loss.*", r"validation/loss.*"]],
        "tokens per second": ["Multiline", [r"speed/tokens_per_second_global"]],
    },
    "3. What goes over the links?": {
        "Mbit/s": ["Multiline", [r"diloco/bandwidth_.*"]],
        "transfer seconds of each round": ["Multiline", [r"round_transfer_seconds/.*"]],
    },
    "4. Do the workers agree?": {
        "cosine of each worker's change to the mean": ["Multiline", [r"round_cosine_to_mean/.*"]],
        "norm of the outer gradient": ["Multiline", [r"round_outer_gradient_norm/.*"]],
        "drift from the shared parameters": ["Multiline", [r"round_drift_norm/.*"]],
        "who came last, seconds": ["Multiline", [r"round_late_by_seconds/.*"]],
    },
}

MEANS = {
    "round_outer_gradient_norm": "outer_gradient_norm",
    "round_cosine_to_mean": "cosine_to_mean",
    "round_drift_norm": "drift_norm",
    "round_exposed_seconds": "exposed_seconds",
    "round_transfer_seconds": "transfer_seconds",
}
"""Tag -> key of a worker's part of a round record, of which the mean over workers is shown."""


class RoundBoard:
    def __init__(self, board: "SummaryWriter", workers: int) -> None:
        self._board, self._latest = board, deque[RoundRecord](maxlen=DRAWN)
        if workers > 1:
            board.add_custom_scalars(OVERVIEW)

    def add(self, record: RoundRecord) -> None:
        self._latest.append(record)
        for tag, value in round_scalars(record).items():
            self._board.add_scalar(f"{tag}/fragment_{record['fragment']}", value, record["step"])

    def draw(self, step: int) -> None:
        """The picture of the last rounds, as they are now."""
        if self._latest:
            self._board.add_image(
                "timeline/last_rounds", to_pixels(timeline_chart(list(self._latest), last=DRAWN)), step, dataformats="HWC"
            )


def round_scalars(record: RoundRecord) -> dict[str, float]:
    """What is known of a round, one number each: means over workers."""
    found = {tag: mean_over_workers(record, key) for tag, key in MEANS.items()}
    waited, exchange = mean_over_workers(record, "waited_seconds"), mean_over_workers(record, "exchange_seconds")
    if waited is not None and exchange:
        found["round_hidden_percent"] = 100 * max(0.0, 1 - waited / exchange)
    found["round_update_norm"], found["round_late_by_seconds"] = record["update_norm"], record["late_by_seconds"]
    return {tag: value for tag, value in found.items() if value is not None}


def mean_over_workers(record: RoundRecord, key: str) -> float | None:
    known = [worker[key] for worker in record["workers"] if worker[key] is not None]
    return sum(known) / len(known) if known else None
