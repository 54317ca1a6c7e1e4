"""The numbers of a run: what they say of any log and heartbeats."""

import json
import math
import random
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.islands.plan import Nature, Plan
from tests.islands.simulation import World
from tests.islands.test_simulation import FAULTS, inject
from tests.islands.written import Log
from torchtitan_diloco.islands.log import State
from torchtitan_diloco.islands.members import Gauges, Hint, Members, Numbers
from torchtitan_diloco.islands.overview import History, overview
from torchtitan_diloco.islands.page_server import html_page, metrics
from torchtitan_diloco.islands.records import Give, name_of
from torchtitan_diloco.islands.stays import MOST_POINTS, Stay, append_thinned
from torchtitan_diloco.islands.tables import render

SAMPLE = re.compile(
    r'[a-z_]+(?:\{(?:island|fragment)="(?:[^"\\]|\\.)*"\})? -?\d+(\.\d+)?(e[-+]\d+)?'
)


def read_log(log: list[bytes]) -> tuple[State, History, Counter[str]]:
    """Read a log with a second between two records. Count the merged parts by island."""
    state, history, parts = State(verifies=False), History(), Counter[str]()
    for sequence, raw in enumerate(log, start=1):
        outcome = state.read(sequence, raw)
        history.note(outcome, float(sequence))
        for part in outcome.entry.parts if outcome.entry else ():
            parts[part.incarnation] += 1
    return state, history, parts


@settings(max_examples=15, deadline=None)
@given(
    faults=st.lists(st.tuples(st.floats(0, 12), st.sampled_from(FAULTS)), max_size=5),
    seed=st.integers(0, 999),
)
def test_any_run_adds_up(faults: list[tuple[float, str]], seed: int) -> None:
    world, rng = World(Plan(steps=40), seed), random.Random(seed)
    for number in range(3):
        world.start(f"i{number}", Nature(upload=rng.choice([0.02, 0.5])), at=rng.uniform(0, 1))
    for at, fault in faults:
        world.after(at, lambda fault=fault: inject(world, fault, rng))  # type: ignore[misc]
    world.run()
    end = rng.choice([len(world.log), rng.randrange(1, len(world.log))])
    state, history, parts = read_log(world.log[:end])
    members = Members(5.0, 60.0)
    members.connect(0.0)
    for owner in list(state.owners().values())[:2]:
        numbers = Numbers("x", 10.0, math.nan, math.inf, (7, math.nan))
        members.hear(Hint(owner, 5, 50, 0.5, caught_up=True, numbers=numbers), 7.0)

    found = overview(state, members, history, 8.0, float(end))
    again = overview(State.decode(state.encode()), members, history, 8.0, float(end))
    assert found == again, "it follows from the state"
    json.loads(json.dumps(found), parse_constant=pytest.fail)
    render({"run": "r", "connection": "ok"} | found, "server")

    assert {key: stay.parts for key, stay in history.stays.items() if stay.parts} == parts
    late = sum(stay.late_parts for stay in history.stays.values())
    assert end < len(world.log) or late == sum(versions > 0 for versions in world.late)
    for stay in history.stays.values():
        assert all(before[1] < after[0] for before, after in pairwise(stay.spans))
    assert found["tokens_merged"] == max(state.clocks, default=0)
    assert len({tuple(row) for row in found["islands"]}) <= 1, "columns keep their order"
    owners = {slot: name_of(owner) for slot, owner in state.owners().items()}
    assert {row["slot"]: row["island"] for row in found["islands"]} == owners
    trains = [row for row in found["islands"] if row["doing"] == "trains"]
    assert found["tokens_per_second"] == 10 * len(trains)
    assert len(trains) in (0, 2) or len(owners) < 2 or any(slot.done for slot in state.slots)
    for row, fragment in zip(found["fragments"], state.fragments, strict=True):
        present = {owners.get(part.slot) for part in fragment.waiting.values()}
        assert not present & set(row["waits_for"])
        assert set(row["waits_for"]) <= {row["island"] for row in trains}
        assert fragment.open or not row["waits_for"]


def island(name: str = "a", **numbers: Any) -> Hint:
    return Hint(name, 5, 500, 0.25, caught_up=True, numbers=Numbers(**numbers))


def test_what_islands_do_and_whom_rounds_wait_for() -> None:
    log, history, members = Log(), History(), Members(5.0, 60.0)
    members.connect(0.0)
    says = ("b: hung outside communication", "c: stopped")
    stopped = "b: stopped"
    for name in ("a", "b", "new"):
        members.hear(
            island(name, site="oslo", loss=2.5, round_trip_seconds=0.01, says=(*says, stopped)),
            10.0,
        )
    log.open()
    log.part(0, 10)
    found = overview(log.state, members, history, 10.5, 100.0)
    assert [row["doing"] for row in found["islands"]] == ["trains", "trains", "joins"]
    assert found["islands"][0]["tokens_per_second"] == 400, "by its steps, before it knows more"
    assert found["fragments"][0]["waits_for"] == ["b"]
    assert found["fragments"][1]["waits_for"] == []
    assert found["eta_seconds"] == 100 / 800
    assert found["verdicts"] == [*says], "not that one that is heard has stopped"
    soon = Members(5.0, 60.0)
    soon.connect(10.0)
    soon.hear(island("a"), 10.0)
    found = overview(log.state, soon, history, 10.5, 100.0)
    assert found["fragments"][1]["waits_for"] == found["fragments"][0]["waits_for"] == []
    still = overview(log.state, members, history, 14.9, 100.0)
    assert still["fragments"][0]["waits_for"] == ["b"]
    members.hear(msgspec.structs.replace(island(), leaving=True), 15.0)
    members.hear(msgspec.structs.replace(island("b"), step=6), 9.0)
    gone = overview(log.state, members, history, 15.5, 100.0)
    assert gone["verdicts"] == [], "of islands that are heard"
    nobody = overview(log.state, members, history, 60.0, 100.0)
    assert (found["phase"], nobody["phase"]) == ("running", "no island is connected")
    assert [(row["doing"], row["for_seconds"]) for row in gone["islands"]] == [
        ("leaves", None),
        ("gone", 6.5),
    ]
    assert gone["fragments"][0]["waits_for"] == []
    members.hear(island("b"), 15.5)
    members.hear(island("b"), 25.5)
    stuck = overview(log.state, members, history, 25.5, 100.0)["islands"][1]
    assert (stuck["doing"], stuck["for_seconds"]) == ("completes no step", 10.0)
    log.take(1, "b/2", "b")
    members.hear(msgspec.structs.replace(island("b/2"), step=7), 25.6)
    rows = overview(log.state, members, history, 25.7, 100.0)["islands"]
    assert [row["incarnation"] for row in rows] == ["a", "b/2"], "its first start has ended"
    log.state.slots[1].done = True
    done = overview(log.state, members, history, 25.7, 100.0)
    assert [row["doing"] for row in done["islands"]] == ["gone", "done"]
    assert done["fragments"][0]["waits_for"] == []


def test_news_and_stays_of_a_log() -> None:
    log = Log()
    log.round(10, 20)
    log.take(1, "b/2", "b")
    log.write(Give(**log.owner(0)))
    _, history, _ = read_log(log.raw)
    assert [text for _, text in history.news] == ["a joins", "b joins", "b is back", "a leaves"]
    ends = {key: (stay.name, stay.ended) for key, stay in history.stays.items()}
    assert ends == {"a": ("a", "left"), "b": ("b", "gone"), "b/2": ("b", "")}
    assert history.merged == {0: (1, 7.0)}


def test_a_console_says_who_comes_and_goes_and_when_a_slot_is_free() -> None:
    world = World(Plan(steps=300, slots=2, begin=2, expiry=2.0, patience=12.0))
    stays, dies = (world.start(f"i{number}") for number in range(2))
    late, waits = world.start("late", at=3.0), list[str]()
    world.after(6.0, lambda: waits.append(late.waits_for()))
    world.after(7.0, lambda: setattr(dies, "alive", False))
    world.after(11.0, lambda: waits.append(late.waits_for()))
    world.run()
    ask = (
        "`islands leave NAME` asks one to leave (i0, i1), and `islands change slots 3` adds a slot"
    )
    assert waits[0] == f"waiting for a free slot. All 2 have an owner: {ask}"
    free = "waiting for a free slot; that of i1, which is silent, in 8 s. "
    assert waits[1].startswith(free)
    assert stays.machine.notices == ["island i1 is silent: rounds do not wait for it"]
    assert stays.machine.news == ["island late joins"]


def test_an_island_that_restarts_does_not_ask_for_a_slot() -> None:
    """It takes that of its earlier start, also while its record is on the way."""
    world, said = World(Plan(steps=200, slots=2, begin=2, expiry=2.0)), set[str]()
    dies = [world.start(f"i{number}") for number in range(2)][1]
    world.after(5.0, lambda: setattr(dies, "alive", False))
    again = world.start("i1", at=6.0)
    for tick in range(300):
        world.after(6.0 + tick / 100, lambda: said.add(again.waits_for()))
    world.run()
    assert said == {""}


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


def test_metrics_can_be_parsed_and_names_are_escaped() -> None:
    name = 'a"<b>\\'
    log = Log()
    log.take(1, f"{name}/1", "b")
    log.round(10, 20)
    members = Members(5.0, 60.0)
    members.connect(0.0)
    for number in range(50):
        members.hear(island(f"joiner{number}"), 9.0)
    members.hear(island("a", loss=math.nan, validated=(7, 2.5)), 9.0)
    history = read_log(log.raw)[1]
    found = {"run": "r", "connection": "ok"} | overview(log.state, members, history, 9.5, 100.0)
    lines = metrics(found).splitlines()
    samples = [line for line in lines if not line.startswith("# TYPE ")]
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    names = [line.rpartition(" ")[0] for line in samples]
    assert len(names) == len(set(names))
    assert 'islands_island_trains{island="a"} 1.0' in samples
    assert r'islands_island_trains{island="a\"<b>\\"} 0.0' in samples
    assert "islands_run_loss 2.5" in samples
    assert "joiner" not in "".join(samples), "labels are bounded"
    page = html_page(found, list(history.stays.values()), history.losses, at=100.0)
    assert "<b>\\" not in page.replace("<b>a</b>", "")
    assert "a&#34;&lt;b&gt;\\" in page
    assert "joiner49" in page


def test_gauges_measure_the_latest_steps() -> None:
    gauges = Gauges()
    assert gauges.read("oslo", None) == Numbers("oslo")
    for step in range(100):
        gauges.waited = 0.5 * step
        gauges.finish_step(100 * step, 2.0 * step)
    found = gauges.read("oslo", 0.1)
    assert (found.tokens_per_second, found.waited, found.round_trip_seconds) == (50, 0.25, 0.1)
