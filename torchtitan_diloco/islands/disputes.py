"""Islands whose shared copies have other bits, and who of them is right."""

from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import IslandFailedError, Members
from torchtitan_diloco.islands.records import name_of


class Disputes:
    """Compares this island's checksums with those in records and heartbeats of the others.

    Their records with other checksums are void here, and this island's are void there. An island
    that differs from most others fails, and takes their copies when it is started again. If half of
    them differ, nobody knows who is right: all are silent, fail, and replay the log.
    """

    def __init__(self, state: State, members: Members, incarnation: str) -> None:
        self._state, self._members, self._incarnation = state, members, incarnation
        self._same: dict[tuple[int, str], bool] = {}
        """Whether an island had the same bits of a fragment when they were compared last."""
        self._undecided: dict[int, float] = {}
        """Fragments of which half of the islands have other bits, and since when."""
        self._warned = set[tuple[int, str]]()

    def note(self, fragment: int, incarnation: str, *, same: bool) -> None:
        self._same[fragment, incarnation] = same

    def is_undecided(self, fragment: int) -> bool:
        return fragment in self._undecided

    def differs(self, incarnation: str) -> bool:
        """Return whether an island has other bits of a fragment than most others."""
        votes = map(self._votes, self._fragments)
        return any(incarnation in others and len(others) <= same for same, others in votes)

    def is_outvoted(self, now: float) -> bool:
        """Return whether more islands have other bits of a fragment than have the same."""
        self._hear(now)
        votes = map(self._votes, self._fragments)
        return any(len(others) > same + 1 for same, others in votes)

    def settle(self, now: float) -> list[str]:
        """Return a warning for each island that begins to differ from most others.

        Raises an IslandFailedError if this island has to begin again from the log.
        """
        self._hear(now)
        found = list[str]()
        for fragment in self._fragments:
            same, others = self._votes(fragment)
            names = ", ".join(sorted(map(name_of, others)))
            what = f"fragment {fragment} has other bits on island {names} than on this one"
            cause = "one of them has a memory fault, or computes differently"
            cause += self._hashes(fragment, others)
            if len(others) <= same:
                self._undecided.pop(fragment, None)
                news = {(fragment, other) for other in others} - self._warned
                found += [f"{what} and {same} more, which go on: {cause}"] if news else []
                self._warned |= news
            elif len(others) > same + 1:
                raise IslandFailedError(
                    f"{what}; {same} have the same, so this one ends: {cause}. Started again, it "
                    "takes the shared copies of the others"
                )
            elif now > self._undecided.setdefault(fragment, now) + self._members.expiry:
                raise IslandFailedError(
                    f"{what}, and nobody knows who is right, so both end: {cause}. Started again, "
                    "they replay the log"
                )
        return found

    @property
    def _fragments(self) -> range:
        return range(len(self._state.fragments))

    def _votes(self, fragment: int) -> tuple[int, set[str]]:
        """Return how many other islands have the same bits, and which have others."""
        owners = set(self._state.owners().values()) - {self._incarnation}
        known = {owner: self._same.get((fragment, owner)) for owner in owners}
        return sum(one is True for one in known.values()), {
            owner for owner, one in known.items() if one is False
        }

    def _hashes(self, fragment: int, others: set[str]) -> str:
        """Name both hashes of a version on which heartbeats differ."""
        known = self._state.fragments[fragment].checksums
        for other in sorted(others & self._members.heard.keys()):
            for version, theirs in self._members.heard[other].hint.copies[fragment : fragment + 1]:
                if known.get(version, theirs) != theirs:
                    where = f"version {version} is {known[version][:16]} here"
                    return f" ({where}, and {theirs[:16]} on {name_of(other)})"
        return ""

    def _hear(self, now: float) -> None:
        """Compare the checksums in the latest heartbeats, and forget islands that are silent."""
        for incarnation, member in self._members.heard.copy().items():
            silent = self._members.is_silent(incarnation, now)
            for fragment, (version, checksum) in enumerate(
                member.hint.copies[: len(self._fragments)]
            ):
                own = self._state.fragments[fragment].checksums.get(version)
                if silent:
                    self._same.pop((fragment, incarnation), None)
                elif own is not None:
                    self.note(fragment, incarnation, same=checksum == own)
