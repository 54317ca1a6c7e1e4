"""Whatever the numbers are: thinning keeps what is seen, gaps stay gaps, and nothing is drawn outside the picture."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.pictures.line_chart import Series, line_chart, stretches, thinned
from torchtitan_diloco.pictures.scene import HOVER, Box, Dot, LegendEntry, Line, Scene, Text, legend

COORDINATES = st.floats(0, 400, allow_subnormal=False)
POINTS = st.lists(st.tuples(COORDINATES, COORDINATES), max_size=300).map(
    lambda points: sorted(points, key=lambda point: point[0])
)
ANY_NUMBER = st.one_of(
    st.floats(-1e30, 1e30), st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf])
)
CURVES = st.lists(st.tuples(st.floats(-1e12, 1e12), ANY_NUMBER), max_size=40).map(sorted)


def bounds(scene: Scene) -> list[tuple[float, float]]:
    """Corners of all shapes but texts, whose ends depend on the font."""
    found: list[tuple[float, float]] = []
    for shape in scene.shapes:
        match shape:
            case Line(points=points):
                found += points
            case Box(x, y, width, height):
                found += [(x, y), (x + width, y + height)]
            case Dot(x, y) | Text(x, y):
                found.append((x, y))
    return found


@given(POINTS)
def test_thinning_keeps_the_ends_and_the_extremes_of_every_column(
    points: list[tuple[float, float]],
) -> None:
    kept = thinned(points)
    rest = iter(points)
    assert all(point in rest for point in kept), "a selection in the same order"
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(math.floor(point[0]), []).append(point)
    for column, inside in columns.items():
        left = [point for point in kept if math.floor(point[0]) == column]
        assert len(left) <= 4
        assert {min(y for _, y in inside), max(y for _, y in inside)} <= {y for _, y in left}
        assert (left[0], left[-1]) == (inside[0], inside[-1])


def test_thousands_of_points_become_a_few_for_each_pixel() -> None:
    points = [(float(step), math.sin(step)) for step in range(50_000)]
    (curve,) = curves_of(line_chart([Series("", points)], title="", x_label="", y_label=""))
    assert len(curve.points) <= 4 * 430


def curves_of(scene: Scene) -> list[Line]:
    return [
        shape
        for shape in scene.shapes
        if isinstance(shape, Line) and shape.role.startswith("series")
    ]


@given(POINTS, COORDINATES, COORDINATES)
def test_stretches_lie_between_their_limits(
    points: list[tuple[float, float]], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    for stretch in stretches(points, low, high):
        assert all(low <= y <= high for _, y in stretch)


@given(POINTS)
def test_with_room_for_all_there_is_one_stretch(points: list[tuple[float, float]]) -> None:
    found = list(stretches(points, 0, 400))
    assert found == ([points] if points else [])


@given(st.lists(CURVES, max_size=3), st.booleans(), st.booleans(), st.booleans())
def test_nothing_lies_outside_the_picture(
    curves: list[list[tuple[float, float]]], x_log: bool, y_log: bool, limited: bool
) -> None:
    series = [
        Series(f"curve {number}", points, markers=True) for number, points in enumerate(curves)
    ]
    limits = (1.0, 2.0) if limited else None
    scene = line_chart(
        series, title="t", x_label="x", y_label="y", x_log=x_log, y_log=y_log, y_range=limits
    )
    for x, y in bounds(scene):
        assert -1 <= x <= scene.width + 1
        assert -1 <= y <= scene.height + 1


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_a_gap(hole: float) -> None:
    points = [(float(step), hole if step == 5 else 1.0 + step) for step in range(10)]
    assert len(curves_of(line_chart([Series("", points)], title="", x_label="", y_label=""))) == 2


def test_a_logarithmic_axis_leaves_out_what_it_has_no_place_for() -> None:
    points = [(1.0, 1.0), (2.0, 0.0), (3.0, -1.0), (4.0, 10.0), (5.0, 100.0)]
    scene = line_chart([Series("", points)], title="", x_label="", y_label="", y_log=True)
    assert [len(curve.points) for curve in curves_of(scene)] == [2]


@pytest.mark.parametrize("series", [[], [Series("a", [])], [Series("a", [(1.0, math.nan)])]])
def test_no_data_is_said(series: list[Series]) -> None:
    scene = line_chart(series, title="t", x_label="x", y_label="y")
    assert "nothing recorded" in [shape.text for shape in scene.shapes if isinstance(shape, Text)]


def test_the_values_are_told_under_the_pointer() -> None:
    series = [Series("one", [(0.0, 1.0), (10.0, 2.5)]), Series("other", [(10.0, 7.0)])]
    scene = line_chart(series, title="", x_label="steps", y_label="")
    tooltips = [
        shape.tooltip for shape in scene.shapes if isinstance(shape, Box) and shape.role == HOVER
    ]
    assert tooltips == ["0 steps\none: 1", "10 steps\none: 2.5\nother: 7"]


@given(st.lists(st.text(min_size=1, max_size=80), max_size=12), st.floats(150, 900))
def test_a_legend_has_room_for_every_entry(names: list[str], width: float) -> None:
    shapes, height = legend(
        [LegendEntry(name, "series-1") for name in names], x=2, y=20, width=width
    )
    texts = [shape for shape in shapes if isinstance(shape, Text)]
    assert len(texts) == len(names)
    assert all(20 < text.y < 20 + height and text.x < width for text in texts)
    places = [(text.y, text.x) for text in texts]
    assert places == sorted(places)
