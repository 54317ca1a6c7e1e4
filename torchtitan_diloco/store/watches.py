"""Long polls: clients that wait for changes in a folder, with one thread for each prefix."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from torchtitan_diloco.store.errors import PassingError, StoreError
from torchtitan_diloco.store.folder import Folder

MOST_WATCHES = 16
"""Maximum number of watched prefixes. Clients of other prefixes sleep."""
TURN_SECONDS = 1.0
"""Seconds after which a watch checks whether a client still waits."""


class Watches:
    """Watches of a folder, in an event loop."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(MOST_WATCHES, thread_name_prefix="watch")
        self._watches: dict[str, _Watch] = {}

    async def wait(self, prefix: str, mark: str, seconds: float) -> str:
        """Return the mark of a prefix once it differs from `mark`, or after a given time."""
        if prefix not in self._watches:
            if len(self._watches) >= MOST_WATCHES:
                await asyncio.sleep(min(seconds, TURN_SECONDS))
                return ""  # as if something had changed
            self._watches[prefix] = _Watch(asyncio.create_task(self._keep(prefix)))
        watch = self._watches[prefix]
        watch.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while watch.mark in ("", mark):
                    await watch.next_change()
        except TimeoutError:
            pass
        finally:
            watch.waiting -= 1
        return watch.mark or mark

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _keep(self, prefix: str) -> None:
        """Watch a prefix as long as a client waits."""
        watch = self._watches[prefix]
        loop = asyncio.get_running_loop()
        try:
            idle = 0
            while idle < 3:  # clients wait again and again
                try:
                    mark = await loop.run_in_executor(
                        self._pool, self._folder.wait, prefix, watch.mark, TURN_SECONDS
                    )
                except (PassingError, StoreError):
                    await asyncio.sleep(TURN_SECONDS)
                    continue
                watch.tell(mark)
                idle = 0 if watch.waiting else idle + 1
        finally:
            del self._watches[prefix]
            watch.tell("")


class _Watch:
    """Mark of a prefix, and the clients that wait for a new one."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task  # a loop keeps no reference to its tasks
        self.mark = ""
        self.waiting = 0
        self._changed = asyncio.Event()

    async def next_change(self) -> None:
        await self._changed.wait()

    def tell(self, mark: str) -> None:
        if mark != self.mark:
            self.mark = mark
            self._changed.set()
            self._changed = asyncio.Event()
