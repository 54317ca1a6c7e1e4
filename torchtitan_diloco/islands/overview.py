"""State of a run: which islands train, what rounds wait for, and past events.

`overview` is a pure function of the log's state, the heartbeats, and a `History` of the records.
Command line, page, metrics and report show its numbers.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.diloco.vitals import STOPPED
from torchtitan_diloco.islands.ledger import Outcome
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Members, Numbers
from torchtitan_diloco.islands.records import (
    Change,
    Close,
    End,
    Evict,
    Give,
    Open,
    SlotRecord,
    Take,
    name_of,
)
from torchtitan_diloco.islands.stays import Stay

MOST_NEWS, MOST_STAYS = 50, 200
"""Number of news and ended incarnations to keep."""
NUMBERS = [key for key in Numbers.__struct_fields__ if key not in ("validated", "vitals", "says")]
"""Keys of a heartbeat that are columns."""

# --- history --------------------------------------------------------------------------------------


@dataclass
class History:
    """History of the run from its records. Pass the outcome of each to `note`, in order."""

    stays: dict[str, Stay] = field(default_factory=dict)
    """Stays by incarnation, in the order in which they joined."""
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_NEWS))
    merged: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Newest version of each fragment, and its time."""
    opened: dict[int, float] = field(default_factory=dict)
    losses: list[tuple[float, float]] = field(default_factory=list)
    """Tokens merged, and the loss of the shared model."""

    def note(self, outcome: Outcome, at: float) -> None:
        """`at`: when the record was stored."""
        record = outcome.record
        if record is None or outcome.void:
            return
        if isinstance(record, SlotRecord):
            new = Stay(name_of(record.incarnation), [[at, at]])
            self.stays.setdefault(record.incarnation, new).see(at)
        match record:
            case Take():
                name, before = name_of(record.incarnation), name_of(record.replaces or "")
                text = "is back" if before == name else f"replaces {before}" if before else "joins"
                self.news.append((at, f"{name} {text}"))
                self._end(record.replaces or "", "gone")
            case Open():
                self.opened[record.fragment] = at
            case Close() if outcome.entry is not None:
                self.merged[record.fragment] = record.version, at
                for part in outcome.entry.parts:
                    if stay := self.stays.get(part.incarnation):
                        stay.parts += 1
                        if part.base < record.version - 1:
                            stay.add_late(at)
                self.news += [(at, text) for text in outcome.entry.left_out()]
            case Evict():
                vote = f"votes to evict {name_of(record.target)}, because it {record.reason}"
                self.news.append((at, f"{name_of(record.incarnation)} {vote}"))
                if outcome.evicts:
                    self._end(record.target, "evicted")
                    self.news.append((at, f"{name_of(record.target)} is evicted"))
            case Give():
                self._end(record.incarnation, "left")
                self.news.append((at, f"{name_of(record.incarnation)} leaves"))
            case Change():
                self.news.append((at, f"the run continues with {record.key} = {record.value}"))
            case End():
                self.news.append((at, "the run has ended"))

    def _end(self, incarnation: str, how: str) -> None:
        if stay := self.stays.get(incarnation):
            stay.ended = how
        ended = [key for key, one in self.stays.items() if one.ended]
        for key in ended[:-MOST_STAYS]:
            del self.stays[key]


# --- the present ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moment:
    state: State
    members: Members
    history: History
    now: float
    at: float

    def island(self, name: str, slot: int | None, share: float | None) -> dict[str, Any]:
        doing, since = self._doing(name, slot)
        member, stay = self.members.heard.get(name), self.history.stays.get(name)
        row: dict[str, Any] = {"island": name_of(name), "slot": slot, "doing": doing}
        row["for_seconds"] = since
        row |= dict.fromkeys((*NUMBERS, "step", "tokens", "caught_up", "leaving"))
        if member is not None:
            hint = member.hint
            row |= {key: _finite(getattr(hint.numbers, key)) for key in NUMBERS}
            seconds, rate = hint.step * hint.step_seconds, row["tokens_per_second"]
            row["tokens_per_second"] = round(rate or (hint.tokens / seconds if seconds else 0))
            row |= {"step": hint.step, "tokens": hint.tokens}
            row |= {"caught_up": hint.caught_up, "leaving": hint.leaving}
        return row | {
            "part_in_rounds": share,
            "late_parts": None if stay is None else stay.late_parts,
            "heard_seconds_ago": None if member is None else _ago(self.now, member.heard),
            "incarnation": name,
        }

    def _doing(self, name: str, slot: int | None) -> tuple[str, float | None]:
        """Return the state of an island, and for how many seconds if it is not the normal state."""
        member, stay = self.members.heard.get(name), self.history.stays.get(name)
        if self.state.ended or (slot is not None and self.state.slots[slot].done):
            return "done", None
        if member is None:
            return "gone", None if stay is None else _ago(self.at, stay.spans[-1][1])
        if self.now - member.heard >= self.members.expiry:
            return "gone", _ago(self.now, member.heard)
        if slot is None:
            return "joins", None
        if member.hint.leaving:
            return "leaves", None
        if not self.state.begun:
            return "waits", None
        if not member.hint.caught_up:
            return "behind the log", None
        if not self.members.is_moving(name, self.now, member.hint.step_seconds):
            return "completes no step", _ago(self.now, member.moved)
        return "trains", None

    def fragment(self, number: int, islands: list[dict[str, Any]]) -> dict[str, Any]:
        fragment, opened = self.state.fragments[number], self.history.opened.get(number)
        merged, is_open = self.history.merged.get(number), fragment.open is not None
        there = [row for row in islands if is_open and row["doing"] in ("trains", "leaves")]
        waits = [row["island"] for row in there if fragment.waiting_of(row["slot"]) is None]
        return {
            "fragment": number,
            "version": fragment.version,
            "merged_seconds_ago": _ago(self.at, merged[1]) if merged else None,
            "open": is_open,
            "open_seconds": _ago(self.at, opened) if is_open and opened is not None else None,
            "waits_for": waits,
            "waiting": len(fragment.waiting),
        }

    def whole(self, islands: list[dict[str, Any]], slots: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the numbers of the run."""
        state, heard = self.state, self.members.heard.copy().values()
        present = [one for one in heard if self.now - one.heard < self.members.expiry]
        merged, total = max(state.clocks, default=0), state.facts.total_tokens if state.facts else 0
        rate = sum(row["tokens_per_second"] for row in islands if row["doing"] == "trains")
        loss = max((pair for one in heard if (pair := one.hint.numbers.validated)), default=None)
        versions = ((when, key, number) for key, (number, when) in self.history.merged.items())
        last = max(versions, default=None)
        kept = sum(slot["merged"] for slot in slots)
        read = kept + sum(slot["lost"] + slot["read_twice"] for slot in slots)
        phase = "ended" if state.ended else "running" if state.begun else "waits for islands"
        if phase == "running" and not present:
            phase = "no island is connected"
        # Others need some seconds to hear that an island is back.
        back = {f"{row['island']}: {STOPPED}" for row in islands if row["doing"] != "gone"}
        verdicts = {text for one in present for text in one.hint.numbers.says} - back
        return {
            "phase": phase if state.facts else "nothing has been written yet",
            "total_tokens": total or None,
            "tokens_merged": merged,
            "tokens_per_second": rate,
            "eta_seconds": max(0, total - merged) / rate if rate and not state.ended else None,
            "last_merged": last
            and {"fragment": last[1], "version": last[2], "seconds_ago": _ago(self.at, last[0])},
            "loss": _finite(loss[1]) if loss else None,
            "loss_at_tokens": loss[0] if loss else None,
            "verdicts": sorted(verdicts),
            "kept_samples": kept / read if read else None,
        }


def overview(
    state: State, members: Members, history: History, now: float, at: float
) -> dict[str, Any]:
    """Return the numbers of a run, of its islands, fragments and slots.

    `now`: on the clock of `members`. `at`: the same in seconds since 1970.
    """
    moment = _Moment(state, members, history, now, at)
    heard, owned = members.heard.copy(), {owner: slot for slot, owner in state.owners().items()}
    there = {name for name, one in heard.items() if now - one.heard < members.expiry}
    joining = there.difference(state.incarnations)
    names = sorted({*owned, *joining}, key=lambda name: (owned.get(name, len(state.slots)), name))
    slots = [_slot(state, number) for number in range(len(state.slots))]
    shares = {slot["owner"]: slot["part_in_rounds"] for slot in slots}
    islands = [moment.island(name, owned.get(name), shares.get(name)) for name in names]
    return {
        **moment.whole(islands, slots),
        "islands": islands,
        "fragments": [moment.fragment(number, islands) for number in range(len(state.fragments))],
        "slots": slots,
        "news": [{"time": when, "text": text} for when, text in history.news],
    }


def _slot(state: State, number: int) -> dict[str, Any]:
    """Count the samples of a slot by their fate, averaged over the fragments."""
    slot, counts = state.slots[number], Counter(merged=0, lost=0, waiting=0)
    rounds, entries, behind = 0, 0, 0
    for fragment, ledger in zip(state.fragments, slot.ledgers, strict=True):
        counts.update(merged=ledger.merged, lost=ledger.lost)
        if (part := fragment.waiting_of(number)) is not None:
            counts["waiting"] += part.end - part.start
        rounds, entries = rounds + fragment.version - ledger.since, entries + ledger.entries
        behind = max(behind, fragment.version - max(ledger.merged_in, ledger.since))
    means = {name: round(count / len(state.fragments)) for name, count in counts.items()}
    share = entries / rounds if slot.owner and rounds else None
    row = {"slot": number, "owner": slot.owner, **means, "read_twice": slot.read_twice}
    late = behind if share is not None else None
    return row | {"part_in_rounds": share, "rounds_since_last_part": late}


def _ago(now: float, before: float) -> float:
    return round(max(0.0, now - before), 1)  # clocks of sites differ a little


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
