"""Scene -> SVG. Colours are CSS variables, so that one picture follows the reader's light or dark ground."""

from html import escape

from torchtitan_diloco.pictures.colours import ROLES
from torchtitan_diloco.pictures.scene import HOVER, Box, Dot, Line, Scene, Shape, Text

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"


def to_svg(scene: Scene, *, standalone: bool = False) -> str:
    """For a page, which holds `stylesheet()` once; or, `standalone`, a whole .svg file with it. As wide as there is room."""
    size = f'viewBox="0 0 {_number(scene.width)} {_number(scene.height)}"'
    opening = f'<svg class="picture" {size} role="img" aria-label="{_escaped(scene.title)}" font-family="{escape(FONT)}"'
    if not standalone:
        return f"{opening}>{''.join(map(_drawn, scene.shapes))}</svg>"
    namespace = 'xmlns="http://www.w3.org/2000/svg"'
    ground = _drawn(Box(0, 0, scene.width, scene.height, "surface"))
    style = f"<style>{escape(stylesheet('svg'), quote=False)}</style>"
    measure = f'width="{_number(scene.width)}" height="{_number(scene.height)}"'
    shapes = "\n".join(map(_drawn, scene.shapes))
    return f"{opening} {namespace} {measure}><title>{_escaped(scene.title)}</title>{style}{ground}\n{shapes}\n</svg>\n"


def stylesheet(root: str = ":root") -> str:
    """The colours, as variables of the elements that `root` selects."""
    light = "".join(f"--{role}:{colours.light};" for role, colours in ROLES.items())
    dark = "".join(f"--{role}:{colours.dark};" for role, colours in ROLES.items())
    return (
        f"{root}{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{{root}{{{dark}}}}}"
        ".picture .hover{fill:var(--text);fill-opacity:0}.picture .hover:hover{fill-opacity:.07}"
    )


def _drawn(shape: Shape) -> str:
    match shape:
        case Line(points, role, width, dash, opacity):
            path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
            look = f'style="stroke:var(--{role})" fill="none" stroke-width="{_number(width)}" stroke-linejoin="round"'
            look += ' stroke-dasharray="5 4"' if dash else ' stroke-linecap="round"'
            look += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
            return f'<polyline points="{path}" {look}/>'
        case Box(x, y, width, height, role, tooltip):
            place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
            look = 'class="hover"' if role == HOVER else f'style="fill:var(--{role})"'
            return (
                f"<rect {place} {look}>{_tooltip(tooltip)}</rect>"
                if tooltip
                else f"<rect {place} {look}/>"
            )
        case Dot(x, y, radius, role):
            return f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}" style="fill:var(--{role})"/>'
        case Text(x, y, text, role, size, anchor, bold):
            look = f'style="fill:var(--{role})" font-size="{_number(size)}"'
            look += f' text-anchor="{anchor}"' if anchor != "start" else ""
            look += ' font-weight="600"' if bold else ""
            return f'<text x="{_number(x)}" y="{_number(y)}" {look} pointer-events="none">{_escaped(text)}</text>'


def _tooltip(text: str) -> str:
    return f"<title>{_escaped(text)}</title>"


def _escaped(text: str) -> str:
    """XML has no way to write most control characters."""
    return escape(
        "".join(
            character if character.isprintable() or character == "\n" else "�" for character in text
        )
    )


def _number(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")  # + 0.0: no "-0"
