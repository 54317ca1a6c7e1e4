"""What the ranks of a job leave for each other and for later starts, in the store of torchrun."""

import os
from contextlib import suppress
from datetime import timedelta

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from torchtitan_diloco.base.hardware import memory_kills
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.rendezvous import (
    TOKEN,
    Mistake,
    MistakeElsewhereError,
    leave_mistake,
    mistake_among,
    store_of_job,
)

START = "torchtitan_diloco/start/{}"
"""Key of what a rank notes for its next start."""


class Start(msgspec.Struct):
    """What a rank notes for its next start."""

    without_step: int
    """Consecutive starts, up to this one, whose ranks connected, but completed no step."""
    memory_kills: int
    """Processes that the system of this machine had killed for lack of memory before."""


class Job:
    """The job that torchrun starts, and starts again, this rank being one of its processes."""

    def __init__(self, store: Store | None, rank: int = 0, size: int = 1) -> None:
        """Describe a job. `store`: None for a process that torchrun has not started."""
        self._store = store
        self._rank = rank
        self._size = size
        self._has_stepped = False
        self._memory_kills = memory_kills()
        last = self._last_start()
        self.starts_without_step = last.without_step
        """Consecutive starts before this one whose ranks connected, but completed no step."""
        self.memory_had_run_out = last.memory_kills < self._memory_kills
        """Whether the system killed a process of this machine after the last start."""

    @staticmethod
    def of_torchrun(timeout: timedelta) -> "Job":
        """Return the job of this process, by the environment variables of torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return Job(None)
        rank = int(os.environ["RANK"])
        return Job(store_of_job(timeout), rank=rank, size=int(os.environ["WORLD_SIZE"]))

    def leave_mistake(self, error: UserError) -> None:
        """Tell the other ranks of the mistake of the user that ends this one."""
        if self._store is None or isinstance(error, MistakeElsewhereError):
            return
        mistake = Mistake(rank=self._rank, text=str(error), exit_code=error.exit_code)
        with suppress(RuntimeError):  # the first node has ended, and the others know of that
            leave_mistake(self._store, mistake)

    def mistake_of_others(self) -> MistakeElsewhereError | None:
        """Return the mistake for which another rank has left, if there is one."""
        if self._store is None:
            return None
        tokens = [TOKEN.format(rank) for rank in range(self._size) if rank != self._rank]
        with suppress(RuntimeError):
            known = self._store.multi_get(tokens) if self._store.check(tokens) else []
            if mistake := mistake_among(known):
                return MistakeElsewhereError(mistake)
        return None

    # --- starts -----------------------------------------------------------------------------------

    def memory_has_run_out(self) -> bool:
        """Return whether the system has killed a process of this machine after this start."""
        return self._memory_kills < memory_kills()

    def begin(self) -> None:
        """Note that the ranks are connected."""
        self._note(Start(self.starts_without_step + 1, self._memory_kills))

    def complete_step(self) -> None:
        """Note that this start has completed a step."""
        if not self._has_stepped:
            self._has_stepped = True
            self._note(Start(0, self._memory_kills))

    def _last_start(self) -> Start:
        key = START.format(self._rank)
        if self._store is None or not self._store.check([key]):
            return Start(0, self._memory_kills)
        return msgspec.json.decode(self._store.get(key), type=Start)

    def _note(self, start: Start) -> None:
        if self._store is not None:
            self._store.set(START.format(self._rank), msgspec.json.encode(start).decode())
