"""The syncer of a run beside one of its islands, as a child of the launcher of that job."""

import signal
import threading
from types import FrameType

from torchtitan_diloco.base.process import STOP_SIGNALS
from torchtitan_diloco.islands.children import SCRATCH, SYNCER_SECONDS, syncer_of
from torchtitan_diloco.islands.console import Say
from torchtitan_diloco.islands.rules.commit import CallFailedError
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.fields import MalformedError
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import AwayError, StoreError, open_store

LOOK_SECONDS = 0.2


class SyncerBeside:
    """A syncer that runs while the body does: until the run has ended, or `stop`."""

    def __init__(self, location: str, say: Say) -> None:
        self._location = location
        self._say = say
        self._child = syncer_of(location, SCRATCH, say)
        self._stopping = threading.Event()
        # The child ends with the thread that has started it, so one thread does all of it.
        self._thread = threading.Thread(target=self._keep_running, name="syncer", daemon=True)

    def __enter__(self) -> "SyncerBeside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _keep_running(self) -> None:
        while not (self._child.is_done or self._stopping.is_set()):
            self._child.runs()
            self._stopping.wait(LOOK_SECONDS)
        self._child.stop(SYNCER_SECONDS)

    def outlast(self, code: int) -> None:
        """Wait until the run has ended, because other islands need the syncer, or for a signal.

        Return at once if the island has failed before there was a run.

        `code`: exit code of the island of this job.
        """
        decision = None
        is_known = True
        try:
            decision = self._newest()
        except (AwayError, CallFailedError, MalformedError):
            is_known = False  # there may be a run, whose islands need the syncer
        except StoreError:
            pass
        if decision is None and is_known and code:
            return
        if decision is None or not decision.ended:
            state = "has not ended" if is_known else "cannot be read, and may not have ended"
            self._say(
                f"the run in {self._location} {state}: its syncer goes on here until it has; "
                "Ctrl-C ends it, and then another one is needed to merge what islands send"
            )

        def stop(_: int, __: FrameType | None) -> None:
            self._stopping.set()

        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, stop)
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)

    def _newest(self) -> Decision | None:
        """Return the newest decision, or None if there is none. Raise if it cannot be read."""
        run = Run(open_store(self._location, writes=None, patience=0.0, quiet=True))
        try:
            return run.newest()
        finally:
            run.close()
