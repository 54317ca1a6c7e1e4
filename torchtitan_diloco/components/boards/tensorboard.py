"""Curves in TensorBoard."""

from collections.abc import Mapping
from textwrap import indent

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import FileWriter
from torch.utils.tensorboard.summary import text as text_summary

from torchtitan_diloco.components.boards.base import Board, Shown
from torchtitan_diloco.components.metrics import described

CODE = "    "
"""Beginning of a line that TensorBoard, which reads Markdown, shows as it is."""


class TensorBoard(Board):
    """Event files in the folder of a worker."""

    def __init__(self, shown: Shown) -> None:
        self._files = FileWriter(str(shown.folder), flush_secs=10)
        self._workers = shown.workers
        restart = SessionLog(status=SessionLog.START)  # hides later steps of the run before
        self._files.add_event(Event(step=shown.step + 1, session_log=restart))
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

    def add_sample(self, step: int, text: str) -> None:
        self.add_text(step, "sample", indent(text, CODE, lambda _: True))

    def close(self) -> None:
        self._files.close()
