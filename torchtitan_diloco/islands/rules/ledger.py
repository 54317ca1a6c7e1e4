"""Which parts count: the rules by which the syncer judges the parts in a note."""

from torchtitan_diloco.islands.rules.decision import VERSIONS_LATE, Decision, Fate, Ledger
from torchtitan_diloco.islands.rules.fields import FURTHEST
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.settings import Settings

SLACK_SECONDS = 1.0
"""Seconds by which clocks and notes are not exact."""
UNKNOWN_CYCLES = 100
"""Number of cycles of the founder that a part may contain while `fastest` is unknown. The batches
of others may be far larger than those of the founder."""
UNKNOWN_SHARE = 0.01
"""Share of the run that a part may contain while `fastest` is unknown, if that is more."""
MOST_BYTES_PER_ELEMENT = 8
"""Maximum number of bytes of a part per element: no codec needs more."""
MOST_HEADER_BYTES = 2**20
"""Allowance for all else in a part, such as its header, which is far smaller."""


def most_samples(settings: Settings, ledger: Ledger, age: float) -> float:
    """Return the number of samples that a slot can have read since `ledger.taken`."""
    if not settings.fastest:
        samples = settings.total_tokens / settings.tokens_per_sample
        cycle = settings.sync_every * settings.block
        return max(UNKNOWN_CYCLES * cycle, UNKNOWN_SHARE * samples)
    return settings.fastest * (age - ledger.since + SLACK_SECONDS)


def judge(decision: Decision, slot: int, part: Part, age: float) -> Fate:
    """Return why the next part of a slot is refused, LOSS if it is one, or NONE if it may count.

    Norm and finiteness are judged once the bytes are available.

    The range starts where the ledger ends, so that no sample is merged twice or left out. The base
    is at least the version that holds the slot's last part: before that, the delta would contain
    the work of the last part again.
    """
    fragment = decision.fragments[part.fragment]
    ledger = decision.slots[slot].ledgers[part.fragment]
    settings = decision.settings
    samples = part.end - part.start
    allowed = most_samples(settings, ledger, age)
    if part.start != ledger.taken or samples <= 0:
        return Fate.WRONG_START
    if part.end > FURTHEST:
        return Fate.TOO_LONG
    if part.is_loss:
        is_bounded = samples <= allowed or part.end <= decision.slots[slot].furthest
        return Fate.LOSS if is_bounded else Fate.TOO_LONG
    if fragment.clock >= settings.total_tokens:
        return Fate.OVER
    if samples > allowed:
        return Fate.TOO_LONG
    most = MOST_BYTES_PER_ELEMENT * fragment.elements + MOST_HEADER_BYTES
    if part.weight > samples * settings.tokens_per_sample or not 0 < part.size <= most:
        return Fate.TOO_HEAVY
    if part.base < max(ledger.version, fragment.version - VERSIONS_LATE):
        return Fate.STALE
    if fragment.checksum(part.base) != part.checksum:
        return Fate.WRONG_BASE
    return Fate.NONE


def decide(
    ledger: Ledger, fate: Fate, number: int, *, settings: Settings, age: float, end: int = 0
) -> None:
    """Record the fate of a part. `end`: end of its range, which counts if it is merged or lost."""
    ledger.number = number
    ledger.fate = fate
    is_lost = fate is Fate.LOSS or fate.is_lost
    if fate is not Fate.MERGED and not is_lost:
        return
    samples = end - ledger.taken
    ledger.lost += samples * is_lost
    ledger.taken = end
    # What a part has taken of the slack is missing for the next one: otherwise, many small parts
    # would take it many times. Half of the time until this decision counts for the next part, too:
    # its samples were read since this one was sent, which may be long before it is decided, as
    # after an outage of the syncer.
    used = samples / settings.fastest if settings.fastest else 0.0
    least = (ledger.since + age) / 2
    ledger.since = round(min(max(least, ledger.since + used), age + SLACK_SECONDS), 2)
