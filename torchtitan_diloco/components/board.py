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
        "hidden share of each round, percent": [
            "Multiline",
            [r"round_hidden_percent_mean_over_workers/.*"],
        ],
        "exposed seconds of each round": [
            "Multiline",
            [r"round_exposed_seconds_mean_over_workers/.*"],
        ],
    },
    "2. Does it learn?": {
        "loss, nats per token": ["Multiline", [r"train/loss.*", r"validation/loss.*"]],
        "tokens per second": ["Multiline", [r"speed/tokens_per_second_global"]],
    },
    "3. What goes over the links?": {
        "Mbit/s": ["Multiline", [r"diloco/bandwidth_.*"]],
        "transfer seconds of each round": [
            "Multiline",
            [r"round_transfer_seconds_mean_over_workers/.*"],
        ],
    },
    "4. Do the workers agree?": {
        "cosine of each worker's change to the mean": [
            "Multiline",
            [r"round_cosine_to_mean_mean_over_workers/.*"],
        ],
        "norm of the outer gradient": [
            "Multiline",
            [r"round_outer_gradient_norm_mean_over_workers/.*"],
        ],
        "drift from the shared parameters": [
            "Multiline",
            [r"round_drift_norm_mean_over_workers/.*"],
        ],
        "who came last, seconds": ["Multiline", [r"round_late_by_seconds/.*"]],
    },
}

MEANS = (
    "outer_gradient_norm",
    "cosine_to_mean",
    "drift_norm",
    "exposed_seconds",
    "transfer_seconds",
    "encoding_seconds",
    "decoding_seconds",
    "sent_bytes",
    "received_bytes",
    "sent_bits_per_parameter",
    "weight",
)
"""Keys of a worker's part of a round record, of which the mean over workers is shown."""
SHARED = ("update_norm", "late_by_seconds", "participants")
"""Keys of a round record that are of all workers together."""


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
                "timeline/last_rounds",
                to_pixels(timeline_chart(list(self._latest), last=DRAWN)),
                step,
                dataformats="HWC",
            )


def round_scalars(record: RoundRecord) -> dict[str, float]:
    """What is known of a round, one number each, by the group of its tag."""
    found = {f"round_{key}_mean_over_workers": mean_over_workers(record, key) for key in MEANS}
    waited, exchange = (
        mean_over_workers(record, "waited_seconds"),
        mean_over_workers(record, "exchange_seconds"),
    )
    if waited is not None and exchange:
        found["round_hidden_percent_mean_over_workers"] = 100 * max(0.0, 1 - waited / exchange)
    found |= {f"round_{key}": record[key] for key in SHARED}
    return {tag: value for tag, value in found.items() if value is not None}


def mean_over_workers(record: RoundRecord, key: str) -> float | None:
    known = [worker[key] for worker in record["workers"] if worker[key] is not None]
    return sum(known) / len(known) if known else None
