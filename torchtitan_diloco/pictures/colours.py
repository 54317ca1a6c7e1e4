"""What is drawn has a role; a role has a colour on a light and one on a dark ground."""

from typing import NamedTuple


class Colours(NamedTuple):
    light: str
    dark: str


ROLES: dict[str, Colours] = {
    "surface": Colours("#ffffff", "#15181d"),
    "text": Colours("#1a1d21", "#e8eaed"),
    "muted": Colours("#565f6b", "#a8b0bb"),
    "grid": Colours("#e4e7eb", "#2b3038"),
    "axis": Colours("#9aa3ad", "#636c78"),
    "band": Colours("#dde4ec", "#2a313a"),
    "on-colour": Colours("#ffffff", "#15181d"),
    # Series, to be told apart side by side, also by most who see few colours.
    "series-1": Colours("#0b62b0", "#6cb2ff"),
    "series-2": Colours("#c24a17", "#ff9a66"),
    "series-3": Colours("#1b7f53", "#5cd1a0"),
    "series-4": Colours("#8d4fa8", "#cda0ea"),
    "series-5": Colours("#936500", "#ecc04f"),
    "series-6": Colours("#0f7796", "#63cfe8"),
    "series-7": Colours("#bd3470", "#ff8fb9"),
    "series-8": Colours("#66707c", "#a6adb8"),
}
SERIES = 8
"""After so many series the colours begin again."""


def series_role(number: int) -> str:
    return f"series-{number % SERIES + 1}"


def red_green_blue(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
