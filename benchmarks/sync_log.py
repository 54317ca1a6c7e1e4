"""Islands with a log in NATS as a row of `benchmarks.sync`, until they go: delete this file, and
what `benchmarks.sync` imports from it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_diloco.islands import IslandPeers as LogPeers
from torchtitan_diloco.islands.server import local_server

__all__ = ["LogPeers", "serve_log"]


@contextmanager
def serve_log() -> Iterator[tuple[str, int]]:
    """Start a server, and yield its join string and process id."""
    with tempfile.TemporaryDirectory() as folder, local_server(Path(folder, "it")) as server:
        assert server.process is not None
        yield str(server.join), server.process.pid
