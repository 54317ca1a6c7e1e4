"""What an island knows of the others and of its own transfers, for the diagnosis of its trainer."""

from collections.abc import Iterator, Mapping, Sequence

from torchtitan_diloco.diloco.reports import Reports
from torchtitan_diloco.diloco.vitals import Action, Report, VerdictKind, Vitals
from torchtitan_diloco.islands.config import Islands, change_commands
from torchtitan_diloco.islands.gauges import Gauges
from torchtitan_diloco.islands.link import Link
from torchtitan_diloco.islands.rules import note as notes
from torchtitan_diloco.islands.rules.decision import IS_IDLE, ORDERS, SICK, Decision
from torchtitan_diloco.islands.rules.names import name_of
from torchtitan_diloco.islands.seen import code_of, is_moving, is_silent, reports_of

IN_A_ROW = 8
"""Number of versions of all fragments without rounds that wait for an island, after which this is
an action."""
NOT_WAITED_FOR = "not waited for"
LEFT_OUT = "left out"
EVICTED = "evicted"
EVIDENCE = {
    NOT_WAITED_FOR: (
        f"rounds have closed without it for {IN_A_ROW} versions; its late parts still count"
    ),
    LEFT_OUT: ORDERS[SICK],
    EVICTED: "the owner of the run has evicted it",
}


class IslandReports(Reports):
    """The reports of an island. They are empty before it has a slot."""

    def __init__(self, islands: Islands, gauges: Gauges) -> None:
        self.islands = islands
        self.link: Link | None = None
        self.flags = 0
        """Flags of the latest own delta."""
        self._gauges = gauges
        self._actions = Actions()

    @property
    def name(self) -> str:
        return f"island {self.islands.name}"

    def late(self) -> Mapping[str, Report]:
        return {name: report for name, report in self.latest().items() if report.absent}

    def latest(self) -> Mapping[str, Report]:
        """Return what the syncer has seen of each island, and what this one knows of itself."""
        link = self.link
        decision = self._decision()
        if link is None or decision is None or link.machine.slot is None:
            return {}
        reports = reports_of(decision)
        flags = self.flags | reports.get(self.islands.name, Report()).flags
        mine = Report(self.own_vitals(), flags)
        if stuck := link.stuck_seconds:
            text = f"its upload has made no progress for {stuck:.0f} s"
            absent = VerdictKind.NO_ROOM if link.run.is_full else VerdictKind.STUCK
            mine = Report(self.own_vitals(), absent=absent, evidence=text)
        return reports | {self.islands.name: mine}

    def own_vitals(self) -> Vitals:
        """Return the vitals of this island with its transfers."""
        if self.link is None:
            return self.vitals
        upload, download = self.link.transfers.cycle()
        return self.vitals._replace(upload=upload, download=download)

    def own_gauges(self) -> notes.NotedGauges:
        """Return the values of the next note. Any thread may call this."""
        rate = 0.0 if self.link is None else self.link.transfers.upload_rate
        return self._gauges.read(self.own_vitals(), rate)

    def say(self, verdicts: Sequence[str]) -> None:
        """Put the worst verdict about this island into its notes. Others find those about
        themselves."""
        self._gauges.says = code_of(verdicts, self.islands.name)

    def take_actions(self) -> list[Action]:
        decision = self._decision()
        return [] if decision is None else self._actions.update(decision, self.islands.name)

    def advise(self, settings: Mapping[str, object]) -> str:
        return change_commands(self.islands, settings)

    def describe(self) -> list[str]:
        chosen = self.islands
        line = f"{chosen.begin} start together; a round waits at least {chosen.grace_seconds:g} s"
        return [f"{'island':<10} {chosen.name}; {line}"]

    def _decision(self) -> Decision | None:
        return None if self.link is None else self.link.machine.decision


# --- actions --------------------------------------------------------------------------------------


class Actions:
    """Finds the actions about other islands that begin and end."""

    def __init__(self) -> None:
        self._standing = dict[tuple[str, str], Action]()
        self._unready = dict[str, int]()
        """Islands for which rounds do not wait, and the number of versions then."""

    def update(self, decision: Decision, own_name: str) -> list[Action]:
        """Return the actions that begin or end with a decision. `own_name`: of this island."""
        current = {
            (name, what): Action(name, what, EVIDENCE[what])
            for name, what in self._actions(decision)
            if name != own_name
        }
        begun = [action for key, action in current.items() if key not in self._standing]
        ended = [
            action._replace(over=True)
            for key, action in self._standing.items()
            if key not in current
        ]
        self._standing = current
        return begun + ended

    def _actions(self, decision: Decision) -> Iterator[tuple[str, str]]:
        for name in decision.barred:
            yield name, EVICTED
        for incarnation, told in decision.told.items():
            if told == SICK and incarnation in decision.owners():
                yield name_of(incarnation), LEFT_OUT
        versions = sum(shared.version for shared in decision.fragments)
        unready = set(self._late(decision))
        self._unready = {name: self._unready.get(name, versions) for name in sorted(unready)}
        enough = IN_A_ROW * len(decision.fragments)
        for name, since in self._unready.items():
            if versions - since >= enough:
                yield name, NOT_WAITED_FOR

    def _late(self, decision: Decision) -> Iterator[str]:
        """Yield the islands that train, and for which rounds do not wait."""
        if not decision.begun or decision.ended:
            return
        for slot, seen in zip(decision.slots, decision.seen, strict=False):
            owner = slot.owner
            if owner is None or seen is None or owner in decision.ready:
                continue
            trains = not is_silent(seen) and is_moving(seen) and not seen.flags & IS_IDLE
            if trains and decision.told.get(owner) != SICK:
                yield name_of(owner)
