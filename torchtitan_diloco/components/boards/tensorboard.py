"""Curves in TensorBoard."""

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text as text_summary

from torchtitan_diloco.components.boards.base import Board, Shown
from torchtitan_diloco.components.metrics import described

CODE = "    "
"""Beginning of a line that TensorBoard, which reads Markdown, shows as it is."""
_NUMBERS = itertools.count()
"""Numbers of the event files of this process, whose names differ."""


class TensorBoard(Board):
    """Event files in the folder of a worker.

    The writers of torch and TensorBoard write in a thread, which prints its errors and then never
    writes again. This one raises them, and the next call goes on in another file.
    """

    def __init__(self, shown: Shown) -> None:
        self._folder = shown.folder
        self._workers = shown.workers
        self._step = shown.step
        """Last step that is shown."""
        self._described = set[str]()
        self._file: BinaryIO | None = None

    def add(self, step: int, values: Mapping[str, float]) -> None:
        shown = []
        for name, value in values.items():
            metadata = None
            if name not in self._described:
                text = described(name, self._workers)
                metadata = SummaryMetadata(summary_description=text)
            shown.append(Summary.Value(tag=name, simple_value=value, metadata=metadata))
        self._write(step, [Summary(value=[value]) for value in shown])
        self._described.update(values)

    def add_text(self, step: int, name: str, text: str) -> None:
        self._write(step, [text_summary(name, text)])

    def add_sample(self, step: int, text: str) -> None:
        self.add_text(step, "sample", indent(text, CODE, lambda _: True))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, summaries: list[Summary]) -> None:
        """Write the summaries of a step, after the beginning of the file if it is new."""
        events = [Event(step=step, summary=summary) for summary in summaries]
        is_new = self._file is None
        try:
            if self._file is None:
                self._file = self._open()
                restart = SessionLog(status=SessionLog.START)  # hides later steps of the run before
                first = Event(file_version="brain.Event:2")
                events = [first, Event(step=self._step + 1, session_log=restart), *events]
            records = io.BytesIO()
            for event in events:
                event.wall_time = time.time()
                RecordWriter(records).write(event.SerializeToString())
            self._file.write(records.getbuffer())
            self._file.flush()
        except OSError:
            self._abandon_file(deletes=is_new)
            raise
        self._step = max(self._step, step)

    def _open(self) -> BinaryIO:
        """Open a new file. TensorBoard reads those of a folder in the order of their names."""
        self._folder.mkdir(parents=True, exist_ok=True)
        process = f"{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        return (self._folder / f"events.out.tfevents.{int(time.time()):010}.{process}").open("xb")

    def _abandon_file(self, *, deletes: bool) -> None:
        """Close a file that may end within a record, at which TensorBoard stops reading it.

        `deletes`: whether to delete it, because it has no step. Otherwise, each call would leave a
        file while a disk is full.
        """
        if self._file is None:
            return
        with suppress(OSError):  # it writes what is left
            self._file.close()
        if deletes:
            Path(self._file.name).unlink(missing_ok=True)
        self._file = None
