"""Records of metrics.jsonl: their fields, and how they are written and read.

docs/report.md says what each field means. A number that is not known is NaN in memory and null in
the file. Records of steps are dictionaries, because their keys depend on the run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

NAN = math.nan
Record = dict[str, Any]
"""Record of a step: values by name and unit. None is not known."""
Kind = TypeVar("Kind", bound=msgspec.Struct)


class WorkerRound(msgspec.Struct):
    """One worker's part of a round. Moments are on worker 0's clock."""

    weight: float = NAN
    left_out: list[str] = []
    # Of its first rank.
    due_at_seconds: float = NAN
    taken_at_seconds: float = NAN
    begun_at_seconds: float = NAN
    encoded_at_seconds: float = NAN
    heard_at_seconds: float = NAN
    received_at_seconds: float = NAN
    ready_at_seconds: float = NAN
    asked_at_seconds: float = NAN
    arrived_at_seconds: float = NAN
    applied_at_seconds: float = NAN
    stopped_seconds: float = NAN
    encoding_seconds: float = NAN
    decoding_seconds: float = NAN
    transfer_seconds: float = NAN
    exchange_seconds: float = NAN
    waited_seconds: float = NAN
    exposed_seconds: float = NAN
    ahead_of_last_seconds: float = NAN
    # Of all its ranks.
    sent_bytes: float = NAN
    received_bytes: float = NAN
    sent_bits_per_parameter: float = NAN
    outer_gradient_norm: float = NAN
    cosine_to_mean: float = NAN
    drift_norm: float = NAN
    # By sender. The worker's own entry is NaN.
    heard_after_seconds: list[float] = []
    received_bits_per_second_from: list[float] = []


class RoundRecord(msgspec.Struct, tag_field="kind", tag="round"):
    """One exchange of one fragment."""

    step: int
    fragment: int
    fragment_name: str
    outer_round: int
    sent_step: int
    applied_step: int
    parameters: int
    participants: int = 0
    update_norm: float = NAN
    last_worker: int | None = None
    late_by_seconds: float = NAN
    workers: list[WorkerRound] = []


@dataclass(frozen=True)
class Conditions:
    """Link and speeds of a run: all that its settings do not decide."""

    bits_per_second: float
    """Slowest rate at which a worker sends to, or receives from, all others together. Links are
    full duplex. All workers send equally much, so the slowest rate decides for all."""
    step_seconds: tuple[float, ...]
    """Compute of one inner step of each worker, without any exchange."""
    latency_seconds: float = 0.0
    """One-way latency between any two workers: half of what ping shows."""
    jitter: float = 0.0
    """Standard deviation of a step's time as a share of it, drawn for every step and worker."""
    coding_bytes_per_second: float = math.inf
    """fp32 bytes that all ranks of a worker together encode or decode in a second."""
    outer_bytes_per_second: float = math.inf
    """fp32 bytes of a fragment that the outer step of a worker processes in a second."""
    codec: str = ""
    """Codec with which a run measured the coding speed; empty where none was measured."""

    def __post_init__(self) -> None:
        steps = all(0 < seconds < math.inf for seconds in self.step_seconds)
        latency = 0 <= self.latency_seconds < math.inf
        if not (self.bits_per_second > 0 and steps and latency and 0 <= self.jitter <= 1):
            raise ValueError(
                f"{self}: give a bandwidth above 0, step times above 0, a latency of 0 or more, "
                "and a jitter from 0 to 1"
            )

    @property
    def workers(self) -> int:
        return len(self.step_seconds)


class Summary(
    msgspec.Struct,
    tag_field="kind",
    tag="summary",
    rename={
        "validation_step": "validation/step",
        "validation_loss": "validation/loss_nats_per_token_global",
    },
):
    """The end of a run. Bytes, seconds and shares are of the steps after `counted_after_step`."""

    step: int
    counted_after_step: int = 0
    validation_step: int | None = None
    validation_loss: float = NAN
    sent_bytes_mean_over_workers: float = NAN
    data_parallel_bytes_per_worker: float = NAN
    exchange_seconds_mean_over_ranks: float = NAN
    exposed_waiting_seconds_mean_over_ranks: float = NAN
    hidden_percent: float = NAN
    measured_utilisation_percent: float = NAN
    predicted_utilisation_percent: float = NAN
    observed: Conditions | None = None


def to_line(record: msgspec.Struct | Mapping[str, Any]) -> str:
    """Return a record as a line of JSON. A step's NaN and infinity, which JSON lacks, are text."""
    if not isinstance(record, msgspec.Struct):
        record = {key: _finite_or_text(value) for key, value in record.items()}
    return msgspec.json.encode(record).decode() + "\n"


def _finite_or_text(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_record(kind: type[Kind], record: Mapping[str, Any]) -> Kind:
    """Return what was read from a line. Raise msgspec.ValidationError if it is damaged."""
    return msgspec.convert(_null_to_nan(record), kind, strict=False)


def _null_to_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _null_to_nan(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [NAN if item is None else _null_to_nan(item) for item in value]
    return value
