"""A daemon thread that runs tasks in order.

An executor of concurrent.futures is joined at exit, and would hang while it waits for a dead
worker.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

ENCODING_THREADS = 1
"""Number of torch threads that encode and decode on the CPU: more would slow down training."""

Result = TypeVar("Result")


class BackgroundThread:
    def __init__(self, name: str, *, torch_threads: int = 0) -> None:
        """Start the thread. `torch_threads`: those of torch for the tasks. 0: the default."""
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if torch_threads:
            # The first get_num_threads() in a thread resets its number.
            threads_here = torch.get_num_threads()
            self.submit(torch.get_num_threads).result()
            self.submit(partial(torch.set_num_threads, torch_threads)).result()
            torch.set_num_threads(threads_here)

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        if self._closed:
            raise RuntimeError(f"{self._thread.name} was closed: create a new object")
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        return future

    def close(self, timeout: float) -> None:
        """End the thread after the queued tasks, and wait up to `timeout` seconds for it."""
        self._closed = True
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:  # a task may drop the last reference
            self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task, item  # or the result would live until the next task
