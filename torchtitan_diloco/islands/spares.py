"""Memory for the contents of objects, which is used again."""

import mmap
import threading


class Spares:
    """Gives out memory. The system clears fresh pages, which takes longer than to read a content
    and to compare its checksum. Any thread may call this."""

    def __init__(self, most: int) -> None:
        """Keep nothing yet. `most`: number of contents whose memory is kept while nothing uses
        it."""
        self._most = most
        self._lock = threading.Lock()
        self._spares = list[memoryview]()

    def take(self, size: int) -> memoryview:
        """Return memory of at least this size, with any content: the smallest that is there."""
        with self._lock:
            sizes = enumerate(map(len, self._spares))
            fitting = [(length, index) for index, length in sizes if length >= size]
            if fitting:
                _, index = min(fitting)
                return self._spares.pop(index)
        return memoryview(mmap.mmap(-1, max(1, size)))

    def give(self, memory: memoryview) -> None:
        """Let what `take` has returned, all or a slice of it, be used again. The memory that was
        given last is kept."""
        assert isinstance(memory.obj, mmap.mmap)
        with self._lock:
            self._spares.append(memoryview(memory.obj))
            del self._spares[: max(0, len(self._spares) - self._most)]
