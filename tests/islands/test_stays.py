"""When islands were there, and histories that do not grow without bound."""

from torchtitan_diloco.islands.stays import MOST_POINTS, Stay, append_thinned


def test_an_island_was_away_if_its_signs_of_life_stop_for_long() -> None:
    stay = Stay("a", [[0.0, 0.0]])
    for at in (*range(1, 100), 99.5, *range(110, 120)):
        stay.see(float(at))
    assert stay.spans == [[0.0, 99.5], [110.0, 119.0]]
    rare = Stay("a", [[0.0, 0.0]])
    for minute in range(1, 9):
        rare.see(60.0 * minute)
    assert rare.spans == [[0.0, 480.0]], "it has long cycles"


def test_long_histories_are_thinned() -> None:
    points = list[int]()
    for number in range(20 * MOST_POINTS):
        append_thinned(points, number)
    assert len(points) <= MOST_POINTS
    assert points == sorted(points)
    assert points[0] == 0
    assert points[-1] == 20 * MOST_POINTS - 1
