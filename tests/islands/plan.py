"""Settings of simulated islands."""

from dataclasses import dataclass

from tests.islands import toy
from tests.islands.toy import Shared
from torchtitan_diloco.diloco.schedule import Schedule
from torchtitan_diloco.islands.records import Facts
from torchtitan_diloco.islands.rounds import Timing

RUN_ID = "r1"
NORM_LIMIT = 20.0


@dataclass
class Plan:
    """Settings that all islands of a simulation share."""

    sync_every: int = 6
    fragments: int = 2
    delay: int = 1
    alpha: float = 0.0
    batch: int = 2
    steps: int = 40
    """Length of the run if `begin` islands train in lockstep."""
    slots: int = 3
    begin: int = 3
    quorum: int = 1
    floor: float = 0.3
    expiry: float = 2.0
    patience: float = 2.0
    loss: float = 0.0
    """Probability that a message to the server is lost. All acknowledgements are lost."""
    doubled: float = 0.0
    latency: tuple[float, float] = (0.002, 0.02)
    action: str = "wait_less"

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.sync_every, self.fragments, self.delay)

    @property
    def timing(self) -> Timing:
        return Timing(self.schedule, self.floor, NORM_LIMIT, self.action)

    @property
    def facts(self) -> Facts:
        return Facts(
            run=RUN_ID,
            slots=self.slots,
            begin=self.begin,
            quorum=self.quorum,
            total_tokens=self.steps * self.begin * self.batch * toy.TOKENS,
            cycle=self.sync_every * self.begin * self.batch * toy.TOKENS,
            outer_lr=1.0,
            block=self.batch,
            checksums=(Shared().checksum,) * self.fragments,
            fingerprints={"diloco.sync_every": str(self.sync_every)},
        )


@dataclass
class Nature:
    """Properties of one island."""

    step: float = 0.1
    jitter: float = 0.0
    upload: float = 0.02
    download: float = 0.01
    bad: float = 0.0
    """Probability that a part is corrupt."""
    not_finite_at: int = -1
    """Step after which the parameters are not finite."""
    never_finite_from: int = -1
    """Step from which they are not finite after each step."""
    hangs_at: int = -1
    """Step after which it makes no other."""
    sick_at: int = -1
    """Step from which its deltas have a hundred times the norm of the others."""
    dies_at: float = -1.0
    """It dies before its n-th message or chunk, or after it for n + 0.5."""
