"""A daemon thread that runs tasks in order, and a guard against concurrent calls.

Executors of concurrent.futures are joined at exit: one that waits for a dead worker would hang.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from queue import SimpleQueue
from typing import Any, TypeVar, cast

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def alone(lock: "threading.RLock", name: str) -> Iterator[None]:
    """Hold the lock, or raise if another thread holds it. `name`: the method that is called."""
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"{name}() was called from thread {threading.current_thread().name} while another "
            "thread is inside a method of the same object: call them from one thread at a time"
        )
    try:
        yield
    finally:
        lock.release()


def one_at_a_time(method: Method) -> Method:
    """Raise if another thread is inside a method of the same object."""

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with alone(self.in_use, method.__qualname__):
            return method(self, *args, **kwargs)

    return cast("Method", guarded)


class BackgroundThread:
    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        """Queue a task and return a future for its result or error."""
        if self._closed:
            raise RuntimeError(f"{self._thread.name} has been closed: make a new object instead")
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
