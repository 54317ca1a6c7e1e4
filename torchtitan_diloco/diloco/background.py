"""A thread that does one thing after the other and never keeps the process alive.

concurrent.futures' threads are joined when Python exits: one that waits for a dead worker would hold up the end of this one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundThread:
    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        """Tasks run in the order of submission; a failed one leaves its error in its future."""
        if self._closed:
            raise RuntimeError(
                f"{self._thread.name} has been closed, so nothing would ever be done: make a new object instead"
            )
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        return future

    def close(self, timeout: float) -> None:
        """Ends the thread when it has done what was submitted; waits for that so long at most."""
        self._closed = True
        self._tasks.put(None)
        if (
            threading.current_thread() is not self._thread
        ):  # which may drop the last reference to what it serves
            self._thread.join(timeout)

    def _serve(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task, item  # or the last result would live until the next task
