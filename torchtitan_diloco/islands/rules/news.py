"""Messages of a machine for users."""

REMEMBERED = 8
"""Number of last messages that are not repeated."""


class News:
    """Messages, in their order. Rules say the same at each tick while it is so."""

    def __init__(self) -> None:
        self.lines = list[str]()
        self._read = 0

    def say(self, line: str) -> None:
        """Add a message, unless it is one of the last ones."""
        if line not in self.lines[-REMEMBERED:]:
            self.lines.append(line)

    def take(self) -> list[str]:
        """Return the messages since the last call, and keep only those that are not repeated."""
        unread = self.lines[self._read :]
        del self.lines[:-REMEMBERED]
        self._read = len(self.lines)
        return unread
