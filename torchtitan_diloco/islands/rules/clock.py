"""The tokens of a run, as an island estimates them."""


class Clock:
    """Merged tokens, plus those expected since. It never decreases while the island trains:
    learning rates follow it. A restart drops what is not merged, and counts merged tokens only.

    Its own tokens count times the islands that were ready when the last version was applied, or
    once while nobody decides, as the others may be gone, too. If they are not, the clock jumps
    forward when their work is merged. One that is too high would stay so: the island would stop
    early, or train the rest of the run at its last learning rate.
    """

    def __init__(self) -> None:
        self.expected_tokens = 0
        """Tokens that all islands should have trained while this one has trained its own."""
        self._floor = 0
        """Value below which the clock does not go: one that it has had."""
        self._merged = 0
        """Merged tokens of the version that was applied last."""
        self._expected_before = 0
        """Value of `expected_tokens` from which on tokens count in addition to the merged ones."""
        self._training_islands = 1
        """Number of islands that train as this one does, while decisions are heard."""

    @property
    def tokens(self) -> int:
        return max(self._floor, self._merged + self.expected_tokens - self._expected_before)

    def stand_at(self, merged: int) -> None:
        """Show the merged tokens of the run. Call this only before the island trains."""
        self._floor = merged

    def begin(self, islands: int) -> None:
        """Continue from what it shows once the island trains, together with the others."""
        self._merged = self._floor
        self._expected_before = self.expected_tokens
        self._training_islands = max(1, islands)

    def advance(self, tokens: int, *, is_decided: bool) -> None:
        """Count tokens of this island. `is_decided`: whether decisions are heard."""
        self.expected_tokens += tokens * (self._training_islands if is_decided else 1)

    def apply(self, merged: int, expected: int, islands: int) -> None:
        """Continue from the merged tokens of a version.

        `expected`: value of `expected_tokens` from which on tokens count in addition. `islands`:
        number of those for which rounds wait.
        """
        self._floor = self.tokens
        self._merged = merged
        self._expected_before = expected
        self._training_islands = max(1, islands)
