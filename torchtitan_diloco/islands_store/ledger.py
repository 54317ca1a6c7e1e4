"""Which parts count: the rules by which the syncer judges the parts in a note."""

from torchtitan_diloco.islands_store.decision import VERSIONS_LATE, Decision, Fate, Ledger
from torchtitan_diloco.islands_store.note import Part

SLACK_SAMPLES_SECONDS = 1.0
"""Factor by which an island may exceed `fastest`, because clocks and notes are not exact."""
BYTES_PER_ELEMENT, HEADER_BYTES = 8, 2**20
"""Maximum size of a part: no codec needs more."""


def judge(decision: Decision, slot: int, part: Part, age: float) -> Fate:
    """Return why the next part of a slot is refused, LOSS if it is one, or NONE if it may count.

    Norm and finiteness are judged once the bytes are available.

    The range starts where the ledger ends, so that no sample is merged twice or left out. The base
    is at least the version that holds the slot's last part: before that, the delta would contain
    the work of the last part again.
    """
    fragment = decision.fragments[part.fragment]
    ledgers = decision.slots[slot].ledgers
    ledger, settings = ledgers[part.fragment], decision.settings
    samples = part.end - part.start
    allowed = settings.fastest * (age - ledger.since + SLACK_SAMPLES_SECONDS)
    if part.start != ledger.taken or samples <= 0:
        return Fate.WRONG_START
    if part.is_loss:
        furthest = max(one.taken for one in ledgers)
        is_bounded = samples <= allowed or part.end <= furthest
        return Fate.LOSS if is_bounded else Fate.TOO_LONG
    if fragment.clock >= settings.total_tokens:
        return Fate.OVER
    if samples > allowed:
        return Fate.TOO_LONG
    most = BYTES_PER_ELEMENT * fragment.elements + HEADER_BYTES
    if part.weight > samples * settings.tokens_per_sample or not 0 < part.size <= most:
        return Fate.TOO_HEAVY
    if part.base < max(ledger.version, fragment.version - VERSIONS_LATE):
        return Fate.STALE
    if fragment.checksum(part.base) != part.checksum:
        return Fate.WRONG_BASE
    return Fate.NONE


def decide(ledger: Ledger, fate: Fate, number: int, end: int = 0) -> None:
    """Record the fate of a part. `end`: end of its range, which counts if it is merged or lost."""
    ledger.number, ledger.fate = number, fate
    if fate is Fate.MERGED:
        ledger.taken = end
    elif fate is Fate.LOSS or fate.is_lost:
        ledger.lost += end - ledger.taken
        ledger.taken = end
