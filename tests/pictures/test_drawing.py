"""One scene as SVG and as pixels."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.pictures.contrast import contrast
from tests.report.synthetic import round_records
from torchtitan_diloco.pictures.colours import ROLES
from torchtitan_diloco.pictures.line_chart import Series, line_chart
from torchtitan_diloco.pictures.png import to_pixels, write_png
from torchtitan_diloco.pictures.scene import Box, Line, Scene, Text
from torchtitan_diloco.pictures.stacked_bars import Bar, Part, stacked_bars
from torchtitan_diloco.pictures.svg import stylesheet, to_svg
from torchtitan_diloco.pictures.timeline_chart import timeline_chart

CHART = line_chart(
    [
        Series("a <b> & c", [(1.0, 2.0), (2.0, 4.0), (3.0, 1.0)], dash=True),
        Series("d", [(1.0, 3.0)]),
    ],
    title="title",
    x_label="x",
    y_label="y",
)
SCENES = {
    "lines": CHART,
    "bars": stacked_bars(
        [Bar("one", [Part("p", 3, "series-1"), Part("q", 1, "series-2")])], title="bars"
    ),
    "timeline": timeline_chart(round_records(100, workers=3)),
    "empty timeline": timeline_chart([]),
    "empty bars": stacked_bars([], title="bars"),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
@pytest.mark.parametrize("standalone", [False, True])
def test_svg_is_xml_with_its_colours(scene: Scene, standalone: bool) -> None:
    text = to_svg(scene, standalone=standalone)
    root = ElementTree.fromstring(text)
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    assert used <= ROLES.keys()
    style = text if standalone else stylesheet()
    assert all(style.count(f"--{role}:") == 2 for role in used), "a light and a dark colour"
    assert "prefers-color-scheme:dark" in style
    assert root.get("aria-label") == scene.title
    assert not re.search(r'(href|src)=|url\(|@import|NaN|"nan|inf"', text)


@given(st.text(max_size=60))
def test_any_text_is_written_as_it_is(text: str) -> None:
    scene = Scene(100, 100, text, (Text(1, 1, text), Box(0, 0, 9, 9, "grid", tooltip=f"- {text}")))
    root = ElementTree.fromstring(to_svg(scene))
    shown = "".join(root[0].itertext())
    if text.isprintable():
        assert shown == text
    assert len(shown) <= len(text)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_pixels_show_something_on_the_ground(scene: Scene) -> None:
    for dark in (False, True):
        pixels = to_pixels(scene, scale=1, dark=dark)
        assert pixels.dtype == np.uint8
        assert pixels.shape == (round(scene.height), round(scene.width), 3)
        ground = int(ROLES["surface"][dark][1:3], 16)
        assert pixels[0, 0, 0] == ground
        assert (pixels != pixels[0, 0]).any(axis=2).mean() > 0.005


def test_a_png_holds_the_pixels(tmp_path: Path) -> None:
    write_png(CHART, tmp_path / "chart.png")
    assert (np.asarray(Image.open(tmp_path / "chart.png")) == to_pixels(CHART)).all()


def test_a_box_has_the_colour_of_its_role_and_dashes_have_gaps() -> None:
    scene = Scene(
        100,
        20,
        "",
        (Box(0, 10, 100, 10, "series-2"), Line(((0, 5), (100, 5)), "text", 2, dash=True)),
    )
    pixels = to_pixels(scene, scale=1)
    assert "#{:02x}{:02x}{:02x}".format(*pixels[15, 50]) == ROLES["series-2"].light
    drawn = (pixels[4:6] < 128).all(axis=(0, 2))
    assert 0.4 < drawn.mean() < 0.7
    assert abs(np.diff(drawn.astype(int))).sum() > 15


@pytest.mark.parametrize("text", ["–µ×−…", "温度", "", "a\nb"])  # noqa: RUF001
def test_text_beyond_the_font_is_no_obstacle(text: str) -> None:
    to_pixels(Scene(50, 50, "", (Text(1, 20, text.replace("\n", " ")),)), scale=1)


@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_the_ground(ground: int) -> None:
    surface = ROLES["surface"][ground]
    assert contrast(surface, ROLES["text"][ground]) > 7
    assert contrast(surface, ROLES["muted"][ground]) > 4.5
    for role in (role for role in ROLES if role.startswith("series")):
        assert contrast(surface, ROLES[role][ground]) > 4.5, role
        assert contrast(ROLES["on-colour"][ground], ROLES[role][ground]) > 4.5, role


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_a_bar_is_cut_in_the_ratio_of_its_parts(values: list[float]) -> None:
    parts = [Part(f"part {number}", value, "series-1") for number, value in enumerate(values)]
    boxes = [
        shape
        for shape in stacked_bars([Bar("bar", parts)], title="").shapes
        if isinstance(shape, Box) and shape.tooltip
    ]
    total = sum(values)
    expected = [value / total for value in values if value > 0]
    whole = sum(box.width for box in boxes)
    assert [box.width / whole for box in boxes] == pytest.approx(expected)


def test_a_timeline_shows_the_last_rounds_of_the_first_workers() -> None:
    rounds = round_records(300, workers=5)
    scene = timeline_chart(rounds, last=2, workers=3)
    tooltips = " ".join(shape.tooltip for shape in scene.shapes if isinstance(shape, Box))
    fragments = {f"fragment {record['fragment']} " for record in rounds[-2:]}
    assert all(fragment in tooltips for fragment in fragments)
    assert set(re.findall(r"worker (\d)", tooltips)) == {"0", "1", "2"}
    assert "and 2 more workers, not drawn" in [
        shape.text for shape in scene.shapes if isinstance(shape, Text)
    ]
