"""What a collective that failed says, in words for a user."""

import re

PLACE_IN_GLOO = re.compile(r"^\[[^]]*:\d+\]\s*")


def cause_of(error: Exception) -> str:
    """The first line. Gloo puts the place in its source before it, and greetings behind."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    words, found = PLACE_IN_GLOO.subn("", line)
    return words.partition(". ")[0] if found else line
