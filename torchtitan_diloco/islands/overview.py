"""State of a run: which islands train, what rounds wait for, and past events.

`overview` is a pure function of the log's state, the heartbeats, and a `History` of the records.
Command line, page, metrics and report show its numbers.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.base.formatting import brief, clock, markdown_table
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

MOST_NEWS, MOST_POINTS, MOST_STAYS = 50, 1000, 200
"""Number of news, points of a curve, and ended incarnations to keep."""
LEAST_GAP, GAP_FACTOR = 5.0, 5.0
"""An island was away if it sent nothing for these seconds, and for this multiple of the usual
time."""
TABLES = {"islands": "islands", "rounds of fragments": "fragments", "samples of slots": "slots"}
FORMS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "heard_seconds_ago": ("heard", "{:.0f} s ago".format),
    "loss": ("loss", "{:.4f}".format),
    "merged_seconds_ago": ("merged", "{:.1f} s ago".format),
    "open_seconds": ("open for", brief),
    "part_in_rounds": ("in rounds", "{:.0%}".format),
    "round_trip_seconds": ("round trip", brief),
    "tokens_per_second": ("tokens/s", "{:,}".format),
    "upload_bytes_per_second": ("upload", lambda rate: f"{8e-6 * rate:.3g} Mbit/s"),
    "waited": ("waited", "{:.0%}".format),
}
"""Heading and format of the columns that are not shown unchanged."""
HIDDEN = {"for_seconds", "incarnation", "tokens", "caught_up", "leaving"}
"""Keys for programs, which users see elsewhere."""
NUMBERS = [key for key in Numbers.__struct_fields__ if key not in ("validated", "vitals", "says")]
"""Keys of a heartbeat that are columns."""

# --- history --------------------------------------------------------------------------------------


@dataclass
class Stay:
    """One incarnation of an island, from its records. Times are in seconds since 1970."""

    name: str
    spans: list[list[float]]  # beginnings and ends of the times in which it gave signs of life
    ended: str = ""  # how, empty while it takes part
    parts: int = 0  # in entries
    late: list[float] = field(default_factory=list)
    """Times of the entries that merged a part one or more versions late."""
    _usual: float = math.inf

    def see(self, at: float) -> None:
        """Record a sign of life. Call this in the order of time."""
        gap, last = at - self.spans[-1][1], self.spans[-1]
        if gap > max(LEAST_GAP, GAP_FACTOR * self._usual):
            self.spans.append([at, at])
            return
        last[1] = max(last[1], at)
        self._usual = gap if math.isinf(self._usual) else 0.9 * self._usual + 0.1 * gap


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
                            append_thinned(stay.late, at)
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


def append_thinned(points: list[Any], point: Any) -> None:
    """Append a point. If there are too many, drop every other one."""
    points.append(point)
    if len(points) > MOST_POINTS:
        del points[1::2]


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
            "late_parts": None if stay is None else len(stay.late),
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


# --- text -----------------------------------------------------------------------------------------


def headline(found: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of the whole run by name."""
    merged, total, last = found["tokens_merged"], found["total_tokens"], found["last_merged"]
    lines = {}
    if total:
        lines["tokens merged"] = f"{merged:,} of {total:,} ({merged / total:.1%})"
    if rate := found["tokens_per_second"]:
        left = found["eta_seconds"]
        lines["speed"] = f"{rate:,} tokens/s" + ("" if left is None else f", ETA {clock(left)}")
    if last:
        version = f"version {last['version']} of fragment {last['fragment']}"
        lines["last merged"] = f"{version}, {clock(last['seconds_ago'])} ago"
    if found["loss"] is not None:
        place = f"at {found['loss_at_tokens']:,} tokens"
        lines["loss of the shared model"] = f"{found['loss']:.4f} {place}"
    if found["verdicts"]:
        lines["verdicts"] = ", ".join(found["verdicts"])
    if found["kept_samples"] is not None:
        lines["kept samples"] = f"{found['kept_samples']:.1%} of those merged, lost or read twice"
    return lines


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that have a value, in the order of the rows' keys, and the
    cells."""
    keys = [name for name in (rows[0] if rows else ()) if name not in HIDDEN]
    names = [name for name in keys if any(row[name] is not None for row in rows)]
    cells = [[_cell(name, row) for name in names] for row in rows]
    return [FORMS[name][0] if name in FORMS else name.replace("_", " ") for name in names], cells


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row.get(name)
    if name == "doing" and row["for_seconds"] is not None:
        return f"{value} for {clock(row['for_seconds'])}"
    match value:
        case None | []:
            return "-"
        case _ if name in FORMS:
            return FORMS[name][1](value)
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(value)
        case int():
            return f"{value:,}"
    return str(value)


def render(found: dict[str, Any]) -> str:
    """Return the numbers as text for a terminal."""
    lines = [f"run {found['run']}: {found['phase']}; server: {found['connection']}"]
    lines += [f"{name}: {text}" for name, text in headline(found).items()]
    for title, key in TABLES.items():
        names, cells = table(found[key])
        lines += ["", title, markdown_table(names, cells) if cells else "none"]
    return "\n".join(lines)
