"""The last exchanges as bars: what the training thread and the exchange in the background of every worker did when."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_diloco.pictures.axis import Axis, short
from torchtitan_diloco.pictures.phases import LANES, PHASE_NAMES, Phase, phases
from torchtitan_diloco.pictures.scene import (
    TITLE_SIZE,
    Box,
    LegendEntry,
    Line,
    Scene,
    Shape,
    Text,
    legend,
    text_width,
)
from torchtitan_diloco.utils import brief

WIDTH = 980.0
PHASE_ROLES = {
    "taking": "series-5",
    "waiting": "series-2",
    "merging": "series-4",
    "encoding": "series-1",
    "waiting for others": "series-8",
    "transfer": "series-3",
    "outer step": "series-6",
}
assert tuple(PHASE_ROLES) == PHASE_NAMES
LANE_HEIGHT, LANE_GAP, WORKER_GAP = 17.0, 3.0, 12.0
LEAST_LENGTH = 1.0
"""Of a bar: what is too short to be seen is drawn as a line."""


def timeline_chart(
    rounds: Sequence[Mapping[str, Any]],
    *,
    last: int = 8,
    workers: int = 8,
    width: float = WIDTH,
    title: str = "",
) -> Scene:
    """The `last` rounds of the records, of the first `workers` workers; the rest of them is said, not drawn."""
    found = phases(rounds[-last:] if last else [])
    count = len({phase.worker for phase in found})
    shown = [phase for phase in found if phase.worker < workers and phase.seconds > 0]
    title = title or f"The last {min(last, len(rounds))} exchanges"
    shapes: list[Shape] = [Text(2, 18, title, size=TITLE_SIZE, bold=True)]
    entries = [LegendEntry("computing", "band", box=True)]
    entries += [
        LegendEntry(name, role, box=True)
        for name, role in PHASE_ROLES.items()
        if name in {one.name for one in shown}
    ]
    if not shown:
        return Scene(
            width,
            90,
            title,
            (*shapes, Text(width / 2, 60, "nothing recorded", "muted", anchor="middle")),
        )
    names, names_height = legend(entries, x=2, y=26, width=width - 4)
    shapes += names

    start = min(phase.start_seconds for phase in shown)
    end = max(max(phase.end_seconds for phase in shown), start + 1e-6)
    time = Axis(0.0, end - start, 86.0, width - 12)
    top = 26 + names_height + 12
    for worker in sorted({phase.worker for phase in shown}):
        shapes.append(Text(2, top + LANE_HEIGHT - 4, f"worker {worker}", bold=True))
        for lane in LANES:
            own = [phase for phase in shown if (phase.worker, phase.lane) == (worker, lane)]
            shapes += _lane(own, lane, top, time, start)
            top += LANE_HEIGHT + LANE_GAP
        top += WORKER_GAP
    if count > workers:
        shapes.append(Text(2, top + 6, f"and {count - workers} more workers, not drawn", "muted"))
        top += 20
    shapes += _time_axis(time, top)
    origin = f"seconds, from {start:,.2f} s on worker 0's clock"
    shapes.append(Text(width - 12, top + 36, origin, "muted", anchor="end"))
    return Scene(width, top + 44, title, tuple(shapes))


def _lane(found: Sequence[Phase], lane: str, top: float, time: Axis, start: float) -> list[Shape]:
    shapes: list[Shape] = []
    if lane == "training":
        shapes.append(Box(time.start, top, time.end - time.start, LANE_HEIGHT, "band"))
    else:
        middle = top + LANE_HEIGHT / 2
        shapes += [Text(2, top + LANE_HEIGHT - 4, "exchange", "muted")]
        shapes += [Line(((time.start, middle), (time.end, middle)), "grid")]
    for phase in found:
        left, right = time.place(phase.start_seconds - start), time.place(phase.end_seconds - start)
        length = max(right - left, LEAST_LENGTH)
        shapes.append(Box(left, top, length, LANE_HEIGHT, PHASE_ROLES[phase.name], _told(phase)))
        number = str(phase.fragment)
        if text_width(number) + 4 < length:
            shapes.append(
                Text(left + length / 2, top + LANE_HEIGHT - 4, number, "on-colour", anchor="middle")
            )
    return shapes


def _told(phase: Phase) -> str:
    fragment = f"fragment {phase.fragment}" + (
        f" ({phase.fragment_name})" if phase.fragment_name else ""
    )
    sent = "" if phase.sent_bytes is None else f", {short(phase.sent_bytes)}B sent"
    told = f"worker {phase.worker}: {phase.name} {brief(phase.seconds)}"
    return f"{told}\n{fragment}, round {phase.outer_round}{sent}"


def _time_axis(time: Axis, top: float) -> list[Shape]:
    shapes: list[Shape] = [Line(((time.start, top), (time.end, top)), "axis")]
    for value, text in time.marks(8 if time.end > 600 else 4):
        at = time.place(value)
        shapes.append(Line(((at, top), (at, top + 4)), "axis"))
        shapes.append(
            Text(
                min(at, time.end + 10 - text_width(text) / 2),
                top + 17,
                text,
                "muted",
                anchor="middle",
            )
        )
    return shapes
