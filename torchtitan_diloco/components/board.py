"""Curves in TensorBoard, and curves and settings in Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard.summary import text as text_summary

from torchtitan_diloco.components.metrics import described
from torchtitan_diloco.log import UserError


class TensorBoard:
    """Event files of a worker that starts or resumes after `step`."""

    def __init__(self, folder: Path, step: int, workers: int) -> None:
        self._files, self._workers = FileWriter(str(folder), flush_secs=10), workers
        restart = SessionLog(status=SessionLog.START)  # hides later steps of the run before
        self._files.add_event(Event(step=step + 1, session_log=restart))
        self._described = set[str]()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            metadata = None
            if name not in self._described:
                text = described(name, self._workers)
                metadata = SummaryMetadata(summary_description=text)
                self._described.add(name)
            scalar = Summary.Value(tag=name, simple_value=value, metadata=metadata)
            self._files.add_summary(Summary(value=[scalar]), step)

    def add_text(self, step: int, name: str, text: str) -> None:
        self._files.add_summary(text_summary(name, text), step)

    def close(self) -> None:
        self._files.close()


class WeightsAndBiases:
    """Run in a project of Weights & Biases, which a resumed run continues."""

    def __init__(self, project: str, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        import wandb

        named = folder / "wandb" / "run-id"
        known = named.read_text() if step and named.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=folder.parent.name,
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

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def add_text(self, step: int, name: str, text: str) -> None:
        self._run.alert(title=name, text=f"step {step}: {text}")

    def close(self) -> None:
        self._run.finish()


Board = TensorBoard | WeightsAndBiases
