"""A proxy that cuts connections."""

import socket
import threading
from contextlib import suppress

PIECE = 2**16


class Proxy:
    """Passes on bytes between clients and a port, and cuts all connections when it is told to."""

    def __init__(self, port: int) -> None:
        """`port`: of this machine, to which it connects."""
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._open = set[socket.socket]()
        self._silent = set[socket.socket]()
        self.silences = 0
        self._cuts: list[int] = []
        self.passed = 0
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, *sizes: int) -> None:
        """Cut all connections once so many more bytes were passed on, counted one after another."""
        with self._lock:
            self.passed = 0
            self._cuts = list(sizes)

    def silence_next(self) -> None:
        """Pass on nothing on the next connection, and do not close it."""
        with self._lock:
            self.silences += 1

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._open |= {near, far}
                    if self.silences:
                        self.silences -= 1
                        self._silent |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                if source in self._silent:
                    continue
                sink.sendall(data)
                if self._counts(len(data)):
                    self.cut()
        self._end(source, sink)

    def _counts(self, size: int) -> bool:
        """Count bytes, and return whether to cut now."""
        with self._lock:
            self.passed += size
            if not self._cuts or self.passed < self._cuts[0]:
                return False
            self.passed = 0
            del self._cuts[0]
            self.cuts += 1
            return True

    def cut(self) -> None:
        """Cut all connections."""
        with self._lock:
            victims = list(self._open)
        self._end(*victims)

    def _end(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._open -= set(sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
