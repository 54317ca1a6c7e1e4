"""Which islands repeatedly send wrong parts."""

from collections.abc import Collection

WRONG_IN_A_ROW = 16
"""Number of wrong parts of an island in a fragment, without a good one, after which rounds do not
wait for it."""


class WrongParts:
    """Counts the wrong parts of each incarnation in each fragment since the last good one."""

    def __init__(self) -> None:
        self._counts = dict[tuple[str, int], int]()

    def count(self, incarnation: str, fragment: int) -> bool:
        """Count a wrong part, and return whether rounds should not wait for its island."""
        key = incarnation, fragment
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] >= WRONG_IN_A_ROW

    def note_merged(self, incarnation: str, fragment: int) -> None:
        """Begin to count again, because a part was good."""
        self._counts.pop((incarnation, fragment), None)

    def forget(self, gone: Collection[str]) -> None:
        """Forget incarnations that are gone."""
        self._counts = {key: count for key, count in self._counts.items() if key[0] not in gone}
