"""Snapshots of the shared copies for islands that join."""

import time

import msgspec
from torch import Tensor

from torchtitan_diloco.diloco.background import BackgroundThread
from torchtitan_diloco.islands.connection import Connection, GivenUpError
from torchtitan_diloco.islands.inbox import Snapshot, SnapshotWanted
from torchtitan_diloco.islands.members import name_of
from torchtitan_diloco.islands.replay import as_buffer
from torchtitan_diloco.log import logger


class Giver:
    """Stores snapshots in the background, and answers the islands that have asked for them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answers: dict[SnapshotWanted, Snapshot | None] = {}
        """Answer to each question of an island that is alive, None until it is known."""
        self._thread = BackgroundThread("islands-snapshots")

    def is_new(self, wanted: SnapshotWanted) -> bool:
        """Return whether this is a new question. If not, repeat the answer: it may be lost."""
        if answer := self._answers.get(wanted):
            self._connection.ask(wanted.sender, answer)
        return wanted not in self._answers

    def give(self, wanted: SnapshotWanted, snapshot: Snapshot, content: Tensor) -> None:
        """Store the content and answer. `snapshot`: the answer, without chunks."""
        members, now = self._connection.members, time.monotonic()
        for known in self._answers.copy():
            if members.is_gone(known.sender, now):
                del self._answers[known]
        self._answers[wanted] = None

        def store() -> None:
            try:
                chunks = self._connection.store(as_buffer(content), "snapshots")
                answer = msgspec.structs.replace(snapshot, chunks=chunks)
            except GivenUpError as error:
                logger.warning(
                    f"island {name_of(wanted.sender)} gets no shared copy of fragment "
                    f"{wanted.fragment} from this one: {error}"
                )
                answer = msgspec.structs.replace(snapshot, problem=str(error))
            self._answers[wanted] = answer
            self._connection.ask(wanted.sender, answer)

        self._thread.submit(store)

    def close(self) -> None:
        self._thread.close(timeout=1.0)
