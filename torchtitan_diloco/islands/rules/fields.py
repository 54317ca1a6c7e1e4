"""Types of the values in decisions and notes, and what is wrong if a value does not fit."""

from typing import Annotated

from msgspec import Meta

from torchtitan_diloco.islands.rules.names import LARGEST

MOST_SLOTS = 1024
MOST_FRAGMENTS = 4096
MOST_PARAMETERS = 65_536
MOST_PHASES = 64
MOST_TOKENS = 10**15
"""Maximum number of tokens of a run."""
FURTHEST: int = LARGEST // 2
"""Largest position of a sample that counts, so that no slot reaches the largest number."""

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Ordinal = Annotated[int, Meta(ge=1, le=LARGEST)]
"""A whole number of at least 1, up to the largest one in a name."""
Tokens = Annotated[int, Meta(ge=0, le=10**18)]
"""More than `MOST_TOKENS`, and what the last round adds."""
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,16}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
Shape = tuple[Ordinal, Ordinal]
"""Rows and width of a parameter. Ranks share its rows."""
Shapes = Annotated[list[Shape], Meta(min_length=1, max_length=MOST_PARAMETERS)]
Entered = Annotated[list[Count], Meta(max_length=MOST_PHASES)]


class MalformedError(ValueError):
    """An object differs from what its writer has written, or its writer wrote nonsense."""
