"""Hosts of a run of islands: the process or processes beside its store, and ways to harm them.

with NoNetwork() as network:
    host = FolderHost(folder, network)  # or BucketHost(folder, network, worker=0, islands=2)
    host.start()
    location = host.join(worker)  # for `islands.join`
"""

import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from benchmarks.network import Network, Program
from tests.ports import free_port
from tests.waiting import wait_until
from torchtitan_diloco.islands.__main__ import main as islands_main
from torchtitan_diloco.islands.rules import presence

StoreKind = Literal["folder", "serve"]
HASTY_SECONDS = 2.0
"""Seconds of silence after which a hasty syncer misses an island."""


class Host(ABC):
    location: str
    """Location of the run for processes beside the store, which may write everything."""

    @abstractmethod
    def start(self) -> None:
        """Start the host, and wait until its store accepts objects."""

    @abstractmethod
    def join(self, worker: int) -> str:
        """Return the location of the run for a worker. The run is founded by worker 0."""

    @property
    @abstractmethod
    def syncer(self) -> int:
        """Process id of the syncer. There may be none for some seconds after `kill_syncer`."""

    @property
    @abstractmethod
    def processes(self) -> list[int]:
        """Process ids of the syncer and of the server of the store."""

    @abstractmethod
    def kill_syncer(self) -> None:
        """Kill the syncer, after which another one is started."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes at once."""


class FolderHost(Host):
    """A folder, and `islands sync` for it."""

    def __init__(
        self, folder: Path, network: Network, *, hasty: bool = False, threads: int = 1
    ) -> None:
        """Prepare the host.

        `folder`: for the store and the files of the syncer. `hasty`: miss islands sooner than by
        default. `threads`: cores of the syncer.
        """
        self.location = str(folder / "store")
        self._folder = folder
        self._network = network
        self._is_hasty = hasty
        self._threads = threads
        self._process: BaseProcess | None = None

    def start(self) -> None:
        Path(self.location).mkdir(parents=True, exist_ok=True)
        words = ["sync", self.location, "--scratch", str(self._folder / "scratch")]
        words += ["--threads", str(self._threads)]
        log = self._folder / "syncer.txt"
        self._process = self._network.fork(0, run_islands, log, words, self._is_hasty)

    def join(self, worker: int) -> str:  # noqa: ARG002
        return self.location

    @property
    def syncer(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def processes(self) -> list[int]:
        return [self.syncer]

    def kill_syncer(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def run_islands(words: Sequence[str], is_hasty: bool) -> None:
    """Run a command of `islands` in this process."""
    if is_hasty:
        presence.SILENT = HASTY_SECONDS
    sys.exit(islands_main(words))


class BucketHost(Host):
    """Host of a bucket by `islands serve`, with a login for each worker."""

    def __init__(self, folder: Path, network: Network, worker: int, islands: int) -> None:
        """Prepare the host. `worker`: place in the network. `islands`: number of other workers."""
        self._bucket = folder / "bucket"
        self._network = network
        self._worker = worker
        self._islands = islands
        self._program: Program | None = None
        self.location = str(self._bucket / "join-syncer.toml")

    def start(self) -> None:
        words = ["islands", "serve", str(self._bucket)]
        words += ["--address", self._network.address(self._worker), "--port", str(free_port())]
        log = self._bucket.with_name("serve.txt")
        command = [sys.executable, "-m", "torchtitan_diloco", *words]
        self._program = self._network.launch(self._worker, command, log)
        self._wait_for_line("^the bucket islands is at ")
        for site in [site_of(worker) for worker in range(1, self._islands)]:
            with redirect_stdout(StringIO()) as printed:
                code = islands_main(["site", str(self._bucket), site])
            if code:
                raise SystemExit(f"`islands site` failed: {printed.getvalue()}")
        if self._islands > 1:
            self._wait_for_line(f"^sites with a login: .*{site_of(self._islands - 1)}$")

    def _wait_for_line(self, pattern: str) -> None:
        program = self._program
        assert program is not None
        wait_until(
            lambda: program.line(pattern) != "" or not program.running,
            "the bucket",
            program.log,
        )
        if not program.running:
            raise SystemExit(program.printed()[-2000:])

    def join(self, worker: int) -> str:
        login = site_of(worker) if worker else "owner"  # only the owner may found a run
        return str(self._bucket / f"join-{login}.toml")

    @property
    def syncer(self) -> int:
        return self._child("torchtitan_diloco.islands\0sync\0")

    @property
    def weed(self) -> int:
        """Process id of SeaweedFS."""
        return self._child("-s3.config=")

    @property
    def processes(self) -> list[int]:
        return [self.weed, self.syncer]

    def kill_syncer(self) -> None:
        os.kill(self.syncer, signal.SIGKILL)  # `serve` starts another one

    def stop(self) -> None:
        if self._program is None:
            return
        children = self._children()
        self._program.kill()
        for pid in children:
            with suppress(ProcessLookupError):  # only a syncer without its store remains
                os.kill(pid, signal.SIGKILL)

    def _child(self, word: str) -> int:
        """Return the child of `serve` that was started with a word."""
        for child in self._children():
            with suppress(OSError):  # it has just ended
                if word in Path(f"/proc/{child}/cmdline").read_text():
                    return child
        raise ProcessLookupError(f"`islands serve` has no child with {word!r}")

    def _children(self) -> list[int]:
        assert self._program is not None
        pid = self._program.pid
        with suppress(OSError):  # it has ended
            return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        return []


def build_host(
    kind: StoreKind, folder: Path, network: Network, islands: int, *, hasty: bool = False
) -> Host:
    """Return a host of a run. A bucket is served in the last place of the network."""
    if kind == "folder":
        return FolderHost(folder, network, hasty=hasty)
    return BucketHost(folder, network, worker=islands, islands=islands)


def site_of(worker: int) -> str:
    """Return the login of a worker that is not the owner, which is also the name of its island."""
    return f"worker-{worker}"
