"""State of a run: which islands train, what rounds wait for, and past events.

`overview` is a pure function of the newest decision, the notes and the history. Command line, page,
metrics and report show its numbers.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_diloco.diloco.vitals import ALL_WORKERS, VerdictKind
from torchtitan_diloco.islands.past import Past
from torchtitan_diloco.islands.rules.decision import (
    BARRED,
    ENDS,
    IS_IDLE,
    LEAVE,
    REPLACED,
    RUNNING,
    SICK,
    Decision,
    Seen,
    Slot,
)
from torchtitan_diloco.islands.rules.history import Sums
from torchtitan_diloco.islands.rules.names import name_of
from torchtitan_diloco.islands.rules.note import Note, NotedGauges, Part
from torchtitan_diloco.islands.seen import is_moving, is_silent, kind_of, reports_of

STALE_SECONDS = 5.0
"""Seconds after which a new decision is missing: there is one each second."""
QUIET_SECONDS = 30.0
"""Minimum seconds after which a new version is missing although islands train."""
QUIET_CYCLES = 3.0
"""Minimum number of cycles after which it is missing, each of H steps and a grace period."""
RUNNING_PHASE = "running"
REFUSED = {
    RUNNING: "refused: another process has its name",
    REPLACED: "refused: another process has taken its place",
    BARRED: "refused: evicted",
}


@dataclass
class View:
    """What was read of a run."""

    decision: Decision | None = None
    notes: Mapping[str, Note] = field(default_factory=dict)
    """Newest notes by incarnation: of owners of slots, and of others that were written lately."""
    past: Past = field(default_factory=Past)
    still: float = 0.0
    """Seconds since the decision was written."""
    opened: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which the round of a fragment is open, if it was seen closed before."""
    away_seconds: float | None = None
    """Seconds for which the store cannot be reached. None: it was read."""
    unreadable_because: str = ""
    """Why a decision could not be read that may be newer than `decision`. Empty: none is known."""

    @property
    def problem(self) -> str:
        """Return why newer numbers may be missing, in words for users."""
        if self.away_seconds is not None:
            return f"cannot be reached since {self.away_seconds:.0f} s"
        if self.unreadable_because:
            return f"a decision could not be read ({self.unreadable_because})"
        return ""


def overview(view: View) -> dict[str, Any]:
    """Return the numbers of a run, of its islands, fragments and slots."""
    decision = view.decision
    if decision is None:
        return _about(view) | dict.fromkeys(_NUMBERS) | _NOTHING
    if not decision.is_founded:
        total = decision.settings.total_tokens
        return _about(view) | dict.fromkeys(_NUMBERS) | _NOTHING | {"total_tokens": total}
    moment = _Moment(view, decision, [_waiting(view, slot) for slot in decision.slots])
    owned = {
        slot.owner: number for number, slot in enumerate(decision.slots) if slot.owner is not None
    }
    joining = sorted(view.notes.keys() - owned.keys())
    slots = [moment.slot(number) for number in range(len(decision.slots))]
    islands = [moment.owner(number) for number in owned.values()]
    islands += [moment.joiner(incarnation) for incarnation in joining]
    return {
        **_about(view),
        **moment.whole(islands, slots),
        "islands": islands,
        "fragments": [moment.fragment(number) for number in range(len(decision.fragments))],
        "slots": slots,
        "news": [{"time": at, "text": text} for at, text in view.past.news],
    }


_NUMBERS = (
    *("total_tokens", "tokens_merged", "tokens_per_second", "eta_seconds", "last_merged"),
    *("loss", "loss_at_tokens", "kept_samples"),
)
_NOTHING: dict[str, Any] = {
    "tokens_merged": 0,
    "tokens_per_second": 0,
    "verdicts": [],
    "islands": [],
    "fragments": [],
    "slots": [],
    "news": [],
}


def _about(view: View) -> dict[str, Any]:
    decision = view.decision
    return {
        "run": "" if decision is None else decision.run,
        "connection": view.problem or "ok",
        "phase": _phase(view),
    }


def _phase(view: View) -> str:
    decision = view.decision
    if decision is None:
        return "cannot be read" if view.problem else "nothing has been written yet"
    if decision.ended:
        return "ended"
    if decision.stopped:
        return "its syncer was stopped: islands train on, and nothing is merged"
    if view.still > STALE_SECONDS and view.away_seconds is None:
        return f"no syncer decides since {view.still:.0f} s: islands train on, nothing is merged"
    if not decision.is_founded:
        return f"waits for island {name_of(decision.founder)} to store the first copies"
    if not decision.begun:
        there = len(decision.owners())
        needed = decision.settings.start_with
        return f"waits for islands: {there} of {needed} are there"
    if all(seen is None or is_silent(seen) for seen in decision.seen):
        return "no island is connected"
    return RUNNING_PHASE


@dataclass(frozen=True)
class _Moment:
    view: View
    decision: Decision
    waiting: list[dict[int, Part]]
    """Parts of each slot that are stored and not decided yet, by fragment."""

    # --- islands ----------------------------------------------------------------------------------

    def owner(self, number: int) -> dict[str, Any]:
        """Return the numbers of the owner of a slot."""
        slot = self.decision.slots[number]
        seen = self._seen(number)
        assert slot.owner is not None
        doing, since = self._doing(slot.owner, seen)
        row = self._row(slot.owner, number, doing, since)
        return row | {
            "step": seen.step,
            "tokens": seen.tokens,
            "leaving": doing == "leaves",
            "part_in_rounds": self._share(name_of(slot.owner)),
            "late_parts": self.view.past.late_parts[name_of(slot.owner)],
            **self._left_out(slot),
            "heard_seconds_ago": round(seen.heard + self.view.still, 1),
        }

    def joiner(self, incarnation: str) -> dict[str, Any]:
        """Return the numbers of an island without a slot."""
        told = self.decision.told.get(incarnation, "")
        note = self.view.notes[incarnation]
        doing = REFUSED[told] if told in ENDS else "joins"
        if self.decision.ended:
            doing = "done"
        elif note.wish and not told and self._is_full():
            doing = "waits for a slot"
        return self._row(incarnation, None, doing, None)

    def _row(
        self, incarnation: str, slot: int | None, doing: str, since: float | None
    ) -> dict[str, Any]:
        """Return the columns of an island. `since`: for how many seconds it does this."""
        note = self.view.notes.get(incarnation)
        gauges = NotedGauges() if note is None else note.read_gauges()
        rate = gauges.tokens_per_second
        if note is not None and not rate and note.step and note.step_seconds:
            rate = note.tokens / (note.step * note.step_seconds)
        return {
            "island": name_of(incarnation),
            "slot": slot,
            "doing": doing,
            "for_seconds": since,
            "site": gauges.site or None,
            "process": gauges.process or None,
            "tokens_per_second": None if note is None or slot is None else round(rate),
            "waited": None if note is None or slot is None else gauges.waited,
            "loss": gauges.loss,
            "round_trip_seconds": gauges.round_trip or None,
            "upload_bytes_per_second": gauges.upload_rate or None,
            "step": None if note is None else note.step,
            "tokens": None if note is None else note.tokens,
            "leaving": False,
            "part_in_rounds": None,
            "late_parts": None,
            "left_out": None,
            "left_out_reason": None,
            "heard_seconds_ago": None,
            "incarnation": incarnation,
        }

    def _doing(self, owner: str, seen: Seen) -> tuple[str, float | None]:
        """Return the state of an owner, and for how many seconds if it is not the normal state."""
        decision = self.decision
        if decision.ended:
            return "done", None
        if is_silent(seen):
            return "gone", seen.heard
        if decision.told.get(owner) == LEAVE:
            return "leaves", None
        if seen.flags & IS_IDLE:
            newest = max(shared.clock for shared in decision.fragments)
            is_over = newest >= decision.settings.total_tokens
            return "sends its last work" if is_over else "leaves", None
        if not decision.begun:
            return "waits", None
        if not is_moving(seen):
            return "completes no step", seen.still
        return "trains", None

    def _seen(self, slot: int) -> Seen:
        seen = self.decision.seen[slot] if slot < len(self.decision.seen) else None
        return Seen() if seen is None else seen

    def _is_full(self) -> bool:
        return len(self.decision.owners()) >= self.decision.settings.slots

    def _share(self, name: str) -> float | None:
        """Return the share of the latest rounds that have a part of an island: the island with the
        most parts is in nearly all of them."""
        last = self.view.past.last
        most = max((sums.parts for sums in last.values()), default=0)
        return last[name].parts / most if most and name in last else None

    def _left_out(self, slot: Slot) -> dict[str, Any]:
        """Return how many parts of an owner were left out lately, and why the last one was if no
        later part was merged."""
        assert slot.owner is not None
        last = self.view.past.last.get(name_of(slot.owner), Sums())
        count = last.refused + last.lost
        fates = (ledger.fate for ledger in slot.ledgers)
        reason = next((fate.words for fate in fates if fate.is_left_out), None)
        return {"left_out": count or None, "left_out_reason": reason if count else None}

    # --- rounds and samples -----------------------------------------------------------------------

    def fragment(self, number: int) -> dict[str, Any]:
        decision = self.decision
        shared = decision.fragments[number]
        waits = [
            name_of(slot.owner)
            for slot, parts in zip(decision.slots, self.waiting, strict=True)
            if slot.owner is not None and slot.owner in self.view.notes
            if shared.is_open and slot.owner in decision.ready and number not in parts
        ]
        return {
            "fragment": number,
            "version": shared.version,
            "merged_seconds_ago": self._merged_ago(number),
            "open": shared.is_open,
            "open_seconds": self.view.opened.get(number) if shared.is_open else None,
            "waits_for": waits,
            "waiting": sum(number in parts for parts in self.waiting),
        }

    def _merged_ago(self, number: int) -> float | None:
        """Return the seconds since the newest version of a fragment was merged."""
        decision = self.decision
        version = decision.fragments[number].version
        ledgers = [slot.ledgers[number] for slot in decision.slots]
        merged = [ledger.since for ledger in ledgers if ledger.version == version > 0]
        if not merged:
            return None
        return round(max(0.0, decision.age - max(merged)) + self.view.still, 1)

    def slot(self, number: int) -> dict[str, Any]:
        """Count the samples of a slot by their fate, averaged over the fragments."""
        decision = self.decision
        slot = self.decision.slots[number]
        counts = Counter(merged=0, lost=0, waiting=0)
        behind = 0
        for fragment, ledger in enumerate(slot.ledgers):
            counts.update(merged=ledger.taken - ledger.lost, lost=ledger.lost)
            part = self.waiting[number].get(fragment)
            if part is not None:
                counts["waiting"] += part.end - part.start
            behind = max(behind, decision.fragments[fragment].version - ledger.version)
        means = {name: round(count / len(slot.ledgers)) for name, count in counts.items()}
        share = None if slot.owner is None else self._share(name_of(slot.owner))
        return {
            "slot": number,
            "owner": slot.owner,
            **means,
            "read_twice": slot.read_twice,
            "part_in_rounds": share,
            "rounds_since_last_part": None if slot.owner is None else behind,
        }

    # --- the run ----------------------------------------------------------------------------------

    def whole(self, islands: list[dict[str, Any]], slots: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the numbers of the run."""
        decision = self.decision
        total = decision.settings.total_tokens
        merged = max(shared.clock for shared in decision.fragments)
        trains = [row for row in islands if row["doing"] == "trains"]
        rate = sum(row["tokens_per_second"] or 0 for row in trains)
        validated = [*self.view.past.losses, *self._validated()]
        loss = max(validated, default=None)
        phase = _phase(self.view)
        if phase == RUNNING_PHASE and (quiet := self._quiet_seconds(islands)):
            phase = f"nothing was merged for {quiet:.0f} s, although islands train"
        moves = bool(rate) and phase == RUNNING_PHASE
        kept = sum(slot["merged"] for slot in slots)
        read = kept + sum(slot["lost"] + slot["read_twice"] for slot in slots)
        return {
            "phase": phase,
            "total_tokens": total,
            "tokens_merged": merged,
            "tokens_per_second": rate,
            "eta_seconds": max(0, total - merged) / rate if moves else None,
            "last_merged": self._last_merged(),
            "loss": None if loss is None else loss[1],
            "loss_at_tokens": None if loss is None else loss[0],
            "verdicts": self._verdicts(),
            "kept_samples": kept / read if read else None,
        }

    def _quiet_seconds(self, islands: list[dict[str, Any]]) -> float | None:
        """Return for how many seconds nothing was merged although islands train, or None if a new
        version is not late."""
        decision = self.decision
        past = self.view.past
        trains = {row["island"] for row in islands if row["doing"] == "trains"}
        if not trains:
            return None
        began = [stay.spans[-1][0] for stay in past.stays if stay.name in trains and not stay.ended]
        waited = decision.written + self.view.still - max(past.led, min(began, default=0.0))
        last = self._last_merged()
        seconds = waited if last is None else min(waited, last["seconds_ago"])
        usual = [seen.step_seconds for seen in decision.seen if seen is not None]
        step = min((seconds for seconds in usual if seconds), default=0.0)
        cycle = decision.settings.sync_every * step + decision.settings.grace
        return seconds if seconds > max(QUIET_SECONDS, QUIET_CYCLES * cycle) else None

    def _validated(self) -> list[tuple[int, float]]:
        """Return the losses of the shared model in the notes, which the history has later."""
        validated = [note.read_gauges().validated for note in self.view.notes.values()]
        return [pair for pair in validated if pair is not None and math.isfinite(pair[1])]

    def _last_merged(self) -> dict[str, Any] | None:
        ages = {
            number: ago
            for number in range(len(self.decision.fragments))
            if (ago := self._merged_ago(number)) is not None
        }
        if not ages:
            return None
        number = min(ages, key=ages.__getitem__)
        version = self.decision.fragments[number].version
        return {"fragment": number, "version": version, "seconds_ago": ages[number]}

    def _verdicts(self) -> list[str]:
        """Return what is wrong with islands, by what the syncer sees, and what they say."""
        decision = self.decision
        if decision.ended:
            return []
        verdicts = {
            f"{name}: {report.absent}"
            for name, report in reports_of(decision).items()
            if report.absent
        }
        for slot, seen in zip(decision.slots, decision.seen, strict=False):
            if slot.owner is None or seen is None or is_silent(seen):
                continue
            verdicts |= _own_verdict(slot, seen)
            if decision.told.get(slot.owner) == SICK:
                verdicts.add(f"{name_of(slot.owner)}: its numbers are repeatedly wrong")
        return sorted(verdicts)


def _waiting(view: View, slot: Slot) -> dict[int, Part]:
    note = view.notes.get(slot.owner or "")
    return {
        part.fragment: part
        for part in (() if note is None else note.read_parts())
        if isinstance(part, Part) and part.fragment < len(slot.ledgers)
        if part.number == slot.ledgers[part.fragment].number + 1
    }


def _own_verdict(slot: Slot, seen: Seen) -> set[str]:
    """Return the verdict of the owner of a slot about itself, or about all, if it has one."""
    kind = kind_of(seen.says)
    if not kind:
        return set()
    return {
        f"{ALL_WORKERS if kind == VerdictKind.EVERYBODY else name_of(slot.owner or '')}: {kind}"
    }
