"""Curves and settings in TensorBoard and Weights & Biases, with the most important curves first."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard.summary import hparams

from torchtitan_diloco.components.records import Record
from torchtitan_diloco.log import UserError, install_command

FIRST = {
    "train/loss_nats_per_token_global": ("loss/train", "nats per token, mean over all workers"),
    "train/gradient_norm_mean_over_workers": (
        "train/gradient_norm",
        "before clipping, mean over workers",
    ),
    "train/lr": ("train/lr", "of the inner optimizer, all workers"),
    "validation/loss_nats_per_token_global": (
        "loss/val",
        "nats per held-out token, of the shared parameters",
    ),
    "speed/tokens_per_second_global": ("speed/tokens_per_s", "tokens per second, all workers"),
    "speed/seconds_per_step": ("speed/s_per_step", "seconds, without validations and saves"),
    "speed/mfu_percent": ("speed/mfu_pct", "percent of the bf16 peak, all GPUs"),
    "diloco/hidden_percent_mean_over_ranks": (
        "sync/hidden_pct",
        "percent of the exchanges' time in which training did not wait, mean over ranks",
    ),
    "time/share_exposed_communication_percent_mean_over_ranks": (
        "sync/exposed_pct",
        "percent of the wall time that communication took from training, mean over ranks",
    ),
    "diloco/bandwidth_used_mbit_per_second_mean_over_workers": (
        "sync/mbit_per_s",
        "Mbit/s sent between workers, mean over workers and time",
    ),
    "memory/peak_gib_max_over_ranks": ("train/memory_gib", "GiB at the peak, largest rank"),
}
"""Tags and descriptions of the curves that come first."""
REST = "z_"
"""Prefix of all other tags. TensorBoard sorts tags, so they come last."""
COMPARED = ("loss/train", "loss/val", "speed/tokens_per_s")
"""Curves whose last values are shown beside the settings in the tab HPARAMS."""


def curves(record: Record, first_step: int) -> Iterator[tuple[str, str, float]]:
    """Yield tag, description and value of each curve of a step.

    The speed of the first step is left out, as it is an outlier.
    """
    for name, value in record.items():
        slow = record["step"] == first_step and name.startswith("speed/")
        if value is not None and not slow and name != "step":
            yield *FIRST.get(name, (f"{REST}{name}", "")), value


class TensorBoard:
    """Event files of a run that starts or resumes after `step`."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        self._files = FileWriter(str(folder / "tensorboard"), flush_secs=10)
        self._first_step = step + 1
        restart = SessionLog(status=SessionLog.START)  # hides later steps of the run before
        self._files.add_event(Event(step=step + 1, session_log=restart))
        self._described = set[str]()
        known = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in settings.items()
        }
        for summary in hparams(known, dict.fromkeys(COMPARED, 0.0)):
            self._files.add_summary(summary)

    def add(self, record: Record) -> None:
        for tag, text, value in curves(record, self._first_step):
            metadata = None
            if text and tag not in self._described:
                metadata = SummaryMetadata(summary_description=text)
                self._described.add(tag)
            scalar = Summary.Value(tag=tag, simple_value=value, metadata=metadata)
            self._files.add_summary(Summary(value=[scalar]), record["step"])

    def close(self) -> None:
        self._files.close()


class WeightsAndBiases:
    """Run in a project of Weights & Biases, which a resumed run continues."""

    def __init__(self, project: str, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            reason = f'metrics.wandb = "{project}" needs the package wandb'
            raise UserError(f"{reason}: {install_command('wandb')}") from error
        self._first_step, named = step + 1, folder / "wandb" / "run-id"
        known = named.read_text() if step and named.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=known,
                resume="allow" if known else None,
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise UserError(
                f'metrics.wandb = "{project}": {error} (`wandb login` logs in, WANDB_MODE=offline '
                "needs no login, WANDB_ENTITY is the owner of the project)"
            ) from error
        named.parent.mkdir(exist_ok=True)  # WANDB_MODE=disabled makes none
        named.write_text(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # values of a step come in several calls

    def add(self, record: Record) -> None:
        values = {tag: value for tag, _, value in curves(record, self._first_step)}
        self._run.log({"step": record["step"]} | values)

    def close(self) -> None:
        self._run.finish()


Board = TensorBoard | WeightsAndBiases
