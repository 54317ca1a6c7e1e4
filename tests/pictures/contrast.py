"""How well two colours are told apart."""

from torchtitan_diloco.pictures.colours import red_green_blue


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines define it: 1 (none) to 21; text asks for 4.5, lines for 3."""
    brighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear(channel / 255) for channel in red_green_blue(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)
