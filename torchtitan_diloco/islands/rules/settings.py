"""Settings of a run."""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from torchtitan_diloco.islands.rules.fields import (
    MOST_PHASES,
    MOST_SLOTS,
    MOST_TOKENS,
    Count,
    Name,
    Ordinal,
    Seconds,
    Share,
)


class Rates(NamedTuple):
    """Settings that follow the kind of the store. Each can be set separately."""

    poll_seconds: float
    commit_seconds: float
    copies_every: int
    grace: float


RATES = {
    "folder": Rates(poll_seconds=0.02, commit_seconds=0.05, copies_every=8, grace=1.0),
    "near": Rates(poll_seconds=0.1, commit_seconds=0.05, copies_every=8, grace=1.0),
    "cloud": Rates(poll_seconds=1.0, commit_seconds=1.0, copies_every=64, grace=4.0),
}
"""By the kind of the store: a folder, a server of one's own, and a bucket of a provider, where each
call takes longer and costs money."""
NOTE_PAUSES = {"folder": 0.1, "near": 0.1, "cloud": 1.0}
"""Minimum seconds between two notes of an island, unless the next one has a new part and the store
is no cloud: a bucket of a provider takes one write a second of a name."""


MOST_PAUSE = 3.0
"""Maximum seconds between two decisions, and between two looks at the store. With longer ones,
islands that leave, commands and other syncers would take one that waits for one that is gone."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a run, set by the island that founds it."""

    sync_every: Ordinal
    """H."""
    delay: Count
    """tau."""
    total_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    """Maximum number of islands that train at a time, each on a separate stream of samples."""
    start_with: Ordinal
    streams: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    """Number of streams that take turns in one order of samples. It never changes: the stream of a
    slot with a higher number, which was added later, reads other epochs."""
    block: Ordinal
    """Consecutive samples of a stream in this order: those of a step of the founder."""
    tokens_per_sample: Ordinal = 1
    phases: Annotated[tuple[Share, ...], Meta(max_length=MOST_PHASES)] = ()
    """Shares of `total_tokens` at which streams enter the next phase of the data."""
    mixing: Share = 0.0
    """alpha."""
    mixing_end: Share | None = None
    """alpha at the end of the run. It changes linearly. None: it is constant."""
    outer_optimizer: Name = "nesterov"
    outer_lr: Annotated[float, Meta(gt=0, le=100)] = 1.0
    outer_numbers: dict[Name, float] = {}
    """Other numbers of the outer optimizer, by the names of their settings, such as `momentum`.
    Its `warmup` is in tokens."""
    codec: Name = "fp32"
    block_size: Ordinal = 64
    """Values that share a scale in the codec."""
    grace: Seconds = 1.0
    slot_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 60.0
    fastest: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Maximum number of samples per second of an island. 0: unknown, until the syncer has measured
    how fast the islands are."""
    norm_limit: Annotated[float, Meta(ge=0, le=1e9)] = 20.0
    """Multiple of the usual norm above which a part is an outlier. 0: no part is."""
    copies_every: Ordinal = 8
    """Number of versions between two copies if no island requests one."""
    commit_seconds: Annotated[float, Meta(ge=0.01, le=MOST_PAUSE)] = 0.05
    """Minimum average of the seconds between two decisions."""
    poll_seconds: Annotated[float, Meta(ge=0.001, le=MOST_PAUSE)] = 0.02
    """Seconds after which islands look for the next decision."""
    store_kind: Name = "folder"
    """Kind of the store in which the run was last founded."""
    facts: dict[Name, Name] = {}
    """Fingerprints of all other facts on which islands must agree."""

    def founded_again(self, of_founder: "Settings") -> "Settings":
        """Return these settings of a run whose store is lost for another store.

        `of_founder`: settings that its founder would give a new run. From them come the number of
        islands that start together, and the rates if the store is of another kind; but a grace
        period stays if it is longer, as a slow link may need it.
        """
        begun = msgspec.structs.replace(
            self,
            start_with=min(of_founder.start_with, self.slots),
            store_kind=of_founder.store_kind,
        )
        if of_founder.store_kind == self.store_kind:
            return begun
        rates = {name: getattr(of_founder, name) for name in Rates._fields}
        rates["grace"] = max(of_founder.grace, self.grace)
        return msgspec.structs.replace(begun, **rates)

    def mixing_at(self, tokens: int) -> float:
        """Return alpha once the run has this number of tokens."""
        if self.mixing_end is None:
            return self.mixing
        progress = min(1.0, tokens / self.total_tokens)
        return self.mixing + (self.mixing_end - self.mixing) * progress

    def phases_at(self, tokens: int) -> int:
        """Return the number of phases that have begun once the run has this number of tokens."""
        return sum(share * self.total_tokens <= tokens for share in self.phases)
