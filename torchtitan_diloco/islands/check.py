"""Check of a log: all records are there, can be read, and make a chain of versions."""

from dataclasses import dataclass, field

from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.records import Close
from torchtitan_diloco.islands.server import LOG_BYTES
from torchtitan_diloco.islands.session import open_session
from torchtitan_diloco.log import command_line


@dataclass
class Findings:
    first: int
    last: int
    trimmed: bool
    """Whether the first records may have been deleted because the log was large."""
    state: State
    missing: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)
    """No records. All islands skip them."""
    broken: int = 0
    """First record that does not continue the chain of versions of its fragment."""
    begun_at: int = 0
    """Record after which the chain of versions was checked."""
    stored_at: int = 0
    """Record after which an island has stored a state."""

    @property
    def problems(self) -> list[str]:
        found = []
        if self.first > 1 and not self.trimmed:
            found.append(f"records 1 to {self.first - 1} are missing")
        if self.missing:
            found.append(f"records are missing: {_ranges(self.missing)}")
        if self.stored_at > self.last:
            found.append(f"an island has read {self.stored_at} records")
        if self.broken:
            found.append(f"record {self.broken} continues a version that the log does not make")
        return found

    def lines(self) -> list[str]:
        state, count = self.state, max(0, self.last - self.first + 1) - len(self.missing)
        place = f"from {self.first} to {self.last}" if count else "it is empty"
        found = [f"log: {count:,} records, {place}"]
        if state.facts is not None:
            versions = ", ".join(str(fragment.version) for fragment in state.fragments)
            found.append(
                f"chain of versions after record {self.begun_at}, to record {state.sequence}: "
                f"versions {versions}; tokens merged: {max(state.clocks, default=0):,} of "
                f"{state.facts.total_tokens:,}"
            )
        if self.void:
            found.append(f"damaged or foreign, and skipped by all islands: {_ranges(self.void)}")
        found += [f"PROBLEM: {problem}" for problem in self.problems]
        if self.problems:
            found.append(
                "The run cannot be continued from this log: start `serve` on a newer copy of the "
                f"folder, or `{command_line('islands')} serve` in an empty folder, where islands "
                "begin with the model in their checkpoints"
            )
        return found


def check_log(admin: Join) -> Findings:
    """Read the whole log of a running server."""
    with open_session(admin, "check") as session:
        info = session.state_of("log")
        first, last = max(1, info["first_seq"]), info["last_seq"]
        stored = State.decode(session.newest_state() or b"{}")
        state = stored if first > 1 else State()
        state.verifies = False
        found = Findings(first, last, info["bytes"] > LOG_BYTES / 2, state)
        found.begun_at, found.stored_at, read = state.sequence, stored.sequence, first - 1
        for sequence, raw in session.read_log(first - 1, last):
            found.missing += range(read + 1, sequence)
            if sequence == state.sequence + 1:
                _note(found, sequence, raw)
            read = sequence
        first = session.state_of("log")["first_seq"]  # others may be deleted meanwhile
        found.missing += range(read + 1, last + 1)
        found.missing = [one for one in found.missing if one >= first]
    return found


def _note(found: Findings, sequence: int, raw: bytes) -> None:
    outcome = found.state.read(sequence, raw)
    record = outcome.record
    if record is None:
        found.void.append(sequence)
    elif isinstance(record, Close) and outcome.void and not found.broken:
        fragment = found.state.fragments[record.fragment]
        if record.version > fragment.version and record.previous != fragment.head:
            found.broken = sequence


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges, such as "3, 5 to 9"."""
    found = list[list[int]]()
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)
