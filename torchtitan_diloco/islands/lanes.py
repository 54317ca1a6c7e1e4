"""Threads that run tasks, of which those of one lane run in order."""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

Task: TypeAlias = Callable[[], None]


class Lanes:
    def __init__(self, name: str, threads: int, on_error: Callable[[BaseException], None]) -> None:
        """Start no thread yet. `on_error`: called in the thread of a task that fails, while others
        go on."""
        self._pool = ThreadPoolExecutor(threads, name, initializer=_use_one_core)
        self._on_error = on_error
        self._lock = threading.Lock()
        self._waiting = dict[Hashable, deque[Task]]()
        """Tasks of the lanes that have one: the first of each runs."""
        self._is_closed = False

    def submit(self, lane: Hashable, task: Task) -> None:
        """Run a task after those before it in its lane."""
        with self._lock:
            if self._is_closed:
                return
            if lane in self._waiting:
                self._waiting[lane].append(task)
                return
            self._waiting[lane] = deque([task])
            self._pool.submit(self._run, lane, task)

    def stop(self) -> None:
        """Drop the tasks that wait, also those of later calls. Others run on."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Drop the tasks that wait, and wait for those that run."""
        self.stop()
        self._pool.shutdown(wait=True)

    def _run(self, lane: Hashable, task: Task) -> None:
        try:
            task()
        except BaseException as error:
            self._on_error(error)
        with self._lock:
            tasks = self._waiting[lane]
            tasks.popleft()
            if self._is_closed or not tasks:
                del self._waiting[lane]
            else:
                self._pool.submit(self._run, lane, tasks[0])


def _use_one_core() -> None:
    torch.get_num_threads()  # the first call in a thread resets the number
    torch.set_num_threads(1)
