"""A thread that runs one task after the other and never keeps the process alive.

Python joins the threads of concurrent.futures at exit: one that waits for a dead worker would hang
the process.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class _HasLock(Protocol):
    in_use: "threading.RLock"


Owner = TypeVar("Owner", bound=_HasLock)
Method = Callable[Concatenate[Owner, Arguments], Result]


@contextmanager
def alone(lock: "threading.RLock", name: str) -> Iterator[None]:
    """Hold the lock, or refuse the call of `name` while another thread holds it."""
    if not lock.acquire(blocking=False):
        raise RuntimeError(
            f"{name}() was called from thread {threading.current_thread().name} while another "
            "thread is inside a method of the same object: call them from one thread at a time"
        )
    try:
        yield
    finally:
        lock.release()


def one_at_a_time(method: "Method[Owner, Arguments, Result]") -> "Method[Owner, Arguments, Result]":
    """Refuse a call while another thread is inside a method of the same object."""

    @wraps(method)
    def guarded(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with alone(self.in_use, method.__qualname__):
            return method(self, *args, **kwargs)

    return guarded


class BackgroundThread:
    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Result]) -> "Future[Result]":
        """Run the task after those submitted before it. An error is raised by the future."""
        if self._closed:
            raise RuntimeError(f"{self._thread.name} has been closed: make a new object instead")
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        return future

    def close(self, timeout: float) -> None:
        """End the thread after its last task; wait at most `timeout` seconds for that."""
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
            del future, task, item  # otherwise the last result lives until the next task
