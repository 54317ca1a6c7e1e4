"""Bucket of one's own: SeaweedFS in a folder, and the syncer beside it, restarted when they end."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torchtitan_diloco.base.process import STOP_SIGNALS
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.islands.bucket_folder import (
    BUCKET,
    SYNCER,
    BucketFolder,
    check_cryptography,
    files_of,
    open_folder,
)
from torchtitan_diloco.islands.children import SYNCER_SECONDS, Child, syncer_of
from torchtitan_diloco.islands.console import Say
from torchtitan_diloco.islands.page import RunPages
from torchtitan_diloco.islands.page_server import Certificate, PageServer, page_address
from torchtitan_diloco.islands.rules.names import OWNER
from torchtitan_diloco.islands.seaweed import (
    FREE_PERCENT,
    VOLUME_MB,
    Seaweed,
    check_port,
    find_weed,
)
from torchtitan_diloco.store import Store, StoreError
from torchtitan_diloco.store.bucket import Bucket
from torchtitan_diloco.store.errors import PassingError
from torchtitan_diloco.store.join_file import read_join_file
from torchtitan_diloco.store.store import Sealed

LOOK_SECONDS = 0.5
"""Seconds between two looks at processes and logins."""
WAITING_SECONDS = 5.0
"""Seconds between two lines while a start is awaited."""
STOP_SECONDS = 3.0
"""SeaweedFS does not end on SIGTERM while it has connections."""
STARTS = 3
"""Attempts to start SeaweedFS, whose ports were free a moment before."""
FIRST = "test-first"
"""Name of the object that is stored to see whether SeaweedFS is ready."""
TEST_SECONDS = 60.0


class BucketServer:
    """SeaweedFS in a folder and the syncer of its run, started again whenever they end."""

    def __init__(
        self,
        folder: BucketFolder,
        weed: Seaweed,
        *,
        with_syncer: bool,
        check_signals: Callable[[], None],
        say: Say,
    ) -> None:
        """Prepare the processes, which `start` starts.

        `check_signals`: raises a SystemExit if a signal has come. `say`: receives a line about what
        happens.
        """
        self.folder = folder
        self._weed = weed
        self._check_signals = check_signals
        self._say = say
        self.syncer = self._build_syncer() if with_syncer else None
        self.seaweed = Child("SeaweedFS", self._launch, say, weed.why)
        self._logins = folder.identities.stat()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="serve")
        self._is_full = False

    def start(self) -> None:
        """Start SeaweedFS, and wait until it has stored an object."""
        self._check_disk()
        for _ in range(STARTS):
            self.seaweed.start()
            code = self._wait_until_ready()
            if code is None:
                break
            why = self._weed.why()
            if why and "in use" not in why:
                raise UserError(f"{self.folder.path}: SeaweedFS did not start: {why}")
        else:
            raise UserError(
                f"{self.folder.path}: SeaweedFS did not start in {STARTS} attempts: "
                f"{why or f'it ended with code {code}'}; look into {self.folder.server / 'log'}, "
                "and try again, as ports that were free may be taken"
            )
        self._weed.flush_contents()
        store = self._open(TEST_SECONDS)
        try:
            store.self_test("")
        finally:
            store.close()

    def keep_running(self) -> NoReturn:
        """Start what has ended again, and let SeaweedFS read the logins when they change."""
        is_ready = True
        while True:
            if self.syncer is not None:
                self.syncer.runs()
            self._check_signals()
            time.sleep(LOOK_SECONDS)
            if not self.seaweed.runs():
                is_ready = False
                continue
            if not is_ready and (is_ready := not self._problem()):
                self._say("SeaweedFS stores objects again")
            if is_ready:
                self._take_up_logins()
                self._weed.flush_names()
            self._watch_disk()

    def stop(self) -> None:
        if self.syncer is not None:
            self.syncer.stop(SYNCER_SECONDS)  # first, as it stores what it has merged
        self.seaweed.stop(STOP_SECONDS)
        self._weed.remove_sockets()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- processes --------------------------------------------------------------------------------

    def _launch(self) -> subprocess.Popen[bytes]:
        self._logins = self.folder.identities.stat()  # a later change is another one
        return self._weed.launch()

    def _build_syncer(self) -> Child:
        return syncer_of(
            self.folder.join_file(SYNCER),
            self.folder.path / "syncer",
            self._say,
            options=["--stay"],
            may_end=False,
        )

    def _wait_until_ready(self) -> int | None:
        """Wait until SeaweedFS has stored an object. If it has ended instead, return its code."""
        began = time.monotonic()
        said_at = began
        assert self.seaweed.process is not None
        while (code := self.seaweed.process.poll()) is None:
            self._check_signals()
            problem = self._problem()
            if not problem:
                break
            now = time.monotonic()
            if now - said_at >= WAITING_SECONDS:
                said_at = now
                self._say(
                    f"waiting for {now - began:.0f} s until SeaweedFS stores an object: {problem}"
                )
            time.sleep(0.2)
        return code

    def _problem(self) -> str:
        """Store an object, and return why this failed, or an empty string.

        A signal ends this process meanwhile, which it could not during the call itself.
        """
        return self._pool.submit(self._store_object).result()

    def _store_object(self) -> str:
        store = self._open(0.0)
        try:
            # As a large one, as SeaweedFS may take seconds for the first one.
            store.backend.replace(FIRST, Sealed(b"", b""), large=True, durable=True)
            store.backend.delete(FIRST)
        except (StoreError, PassingError) as error:
            return str(error)
        finally:
            store.close()
        return ""

    def _open(self, patience: float) -> Store:
        """Return the store of the owner, as reached from this machine."""
        join = read_join_file(self.folder.join_file(OWNER))
        near = read_join_file(self.folder.join_file(SYNCER))
        join = replace(join, endpoint=near.endpoint)
        return Store(Bucket(join.location, join), patience, quiet=True)

    def _take_up_logins(self) -> None:
        """Let SeaweedFS read the logins if `islands site` has changed them."""
        with suppress(OSError, UserError):  # they are being restored
            now = self.folder.identities.stat()
            if (now.st_ino, now.st_mtime_ns) != (self._logins.st_ino, self._logins.st_mtime_ns):
                sites = ", ".join(self.folder.sites()) or "none"
                self._logins = now
                assert self.seaweed.process is not None
                self.seaweed.process.send_signal(signal.SIGHUP)
                self._say(f"sites with a login: {sites}")

    # --- the disk ---------------------------------------------------------------------------------

    def _check_disk(self) -> None:
        free, percent = self._free()
        if percent < FREE_PERCENT or free < VOLUME_MB * 2**20:
            raise UserError(
                f"{self.folder.path}: its disk has {free / 1e9:.1f} GB left ({percent:.0f} %), and "
                f"SeaweedFS needs {VOLUME_MB / 1024:.0f} GB and {FREE_PERCENT} %: free some space"
            )

    def _watch_disk(self) -> None:
        _, percent = self._free()
        if not self._is_full and percent < FREE_PERCENT:
            self._is_full = True
            self._say(
                f"{self.folder.path}: less than {FREE_PERCENT} % of its disk are left, so nothing "
                "more is stored: free some space"
            )
        elif self._is_full and percent > FREE_PERCENT + 1:
            self._is_full = False
            self._say(f"{self.folder.path}: its disk has room again")

    def _free(self) -> tuple[float, float]:
        """Return the free bytes of the disk, and their share in percent."""
        with files_of(self.folder.path):
            disk = shutil.disk_usage(self.folder.path)
        return disk.free, 100 * disk.free / disk.total


def serve(
    path: Path,
    *,
    address: str | None,
    host: str | None,
    port: int | None,
    with_syncer: bool,
    http: str | None,
    check_signals: Callable[[], None],
    say: Say,
) -> NoReturn:
    """Serve the bucket of a folder until a signal comes.

    `with_syncer`: decide for the run in it, too. `http`: [HOST:]PORT of a page about the run.
    `check_signals`: raises a SystemExit if a signal has come.
    """
    page_at = None if http is None else page_address(http)
    check_cryptography()
    find_weed()  # before a folder is made
    folder = open_folder(path, address=address, host=host, port=port)
    with folder.serving():
        check_port(folder.settings.host, folder.settings.port)
        folder.save_settings()
        server = BucketServer(
            folder,
            Seaweed(folder),
            with_syncer=with_syncer,
            check_signals=check_signals,
            say=say,
        )
        page: PageServer | None = None
        try:
            say(f"starting SeaweedFS in {folder.path}")
            server.start()
            if page_at is not None:
                page = _serve_page(folder, *page_at)
            sites = ", ".join(folder.sites())
            advice = f"`{command_line('islands')} site {folder.path} NAME` adds one"
            say(
                f"the bucket {BUCKET} is at {folder.endpoint}; join files: "
                f"{folder.join_file(OWNER)} of its owner, who begins and changes a run, and those "
                f"of the sites: {sites or f'none; {advice}'}"
            )
            if with_syncer:
                say("the syncer waits for a run in this bucket, or continues it")
            if page is not None:
                say(
                    f"page of the run: {page.url}, for the logins of the join files "
                    "(access_key_id) and their secrets (secret_access_key)"
                )
            server.keep_running()
        finally:
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
            if page is not None:
                page.close()
            server.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _serve_page(folder: BucketFolder, host: str, port: int) -> PageServer:
    """Serve the page of the run in a bucket, with the logins of that bucket."""
    return PageServer(
        RunPages(folder.join_file(SYNCER)),
        host,
        port,
        logins=folder.logins,
        certificate=Certificate(folder.server / "s3.pem", folder.server / "s3-key.pem"),
    )
