"""Other islands, as far as one has heard of them."""

from dataclasses import dataclass

from torchtitan_diloco.islands.log import State


class IslandFencedError(ValueError):
    """Another start of this island, or another island, has taken its slot."""


class IslandFailedError(RuntimeError):
    """This island cannot go on. Started again, it begins with what the log says."""


@dataclass
class Member:
    """What another island last told, and when, by this island's clock."""

    heard: float
    moved: float
    """When its step last changed."""
    step: int
    caught_up: bool


class Members:
    """What is heard of other islands: hints for waiting, never for what is valid.

    After a connection, and after a pause of this process, nobody counts as gone for the first
    `expiry` seconds: an outage takes all keys, and a paused process has heard of nobody.
    """

    def __init__(self, expiry: float) -> None:
        self.expiry = expiry
        self.connected = False
        self._by_name: dict[str, Member] = {}
        self._since = self._last_tick = 0.0

    def connect(self, now: float) -> None:
        self.connected, self._since, self._last_tick = True, now, now

    def tick(self, now: float) -> None:
        """Notice a pause. Call this more often than every half of `expiry`, and first of all."""
        if now - self._last_tick > self.expiry / 2:
            self._since = now
        self._last_tick = now

    def hear(self, incarnation: str, step: int, caught_up: bool, now: float) -> None:
        known = self._by_name.get(incarnation)
        moved = now if known is None or known.step != step else known.moved
        self._by_name[incarnation] = Member(now, moved, step, caught_up)

    def has_caught_up(self, incarnation: str) -> bool:
        """Return whether it was heard, and has told that it had caught up with the log."""
        member = self._by_name.get(incarnation)
        return member is not None and member.caught_up

    def is_new(self, now: float) -> bool:
        return not self.connected or now - self._since < self.expiry

    def is_gone(self, incarnation: str, now: float) -> bool:
        """Return whether its slot may be taken."""
        member = self._by_name.get(incarnation)
        return not self.is_new(now) and (member is None or now - member.heard >= self.expiry)

    def is_ready(self, incarnation: str, now: float, step_seconds: float) -> bool:
        """Return whether a round waits for it. `step_seconds`: of this island's steps."""
        if self.is_new(now):
            return True
        member = self._by_name.get(incarnation)
        if member is None or self.is_gone(incarnation, now) or not member.caught_up:
            return False
        return now - member.moved < max(self.expiry, 3 * step_seconds)

    def slot_to_take(self, state: State, own: str, now: float) -> tuple[int, str | None] | None:
        """Return a slot for the incarnation `own` to take, and the owner that this replaces.

        That of an earlier start of the same island comes first. Raises a ValueError if that one is
        running.
        """
        owners = [(slot, found.owner) for slot, found in enumerate(state.slots)]
        for slot, owner in owners:
            if owner is not None and name_of(owner) == name_of(own):
                if self.is_gone(owner, now):
                    return slot, owner
                if self.is_new(now):
                    return None
                raise ValueError(
                    f"an island with the name {name_of(own)} is running already: give this one "
                    "another islands.name, or end the other one"
                )
        for slot, owner in sorted(owners, key=lambda pair: pair[1] is not None):
            if owner is None or self.is_gone(owner, now):
                return slot, owner
        return None


def name_of(incarnation: str) -> str:
    """Return the name of the island that this is a start of."""
    return incarnation.partition("/")[0]
