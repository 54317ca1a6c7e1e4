"""Follow the calls of a run, and list the files that a batch, a delta, ... pass through.

    .venv/bin/python -m tests.trips [--write]

CONTRIBUTING.md prints these lists, tests/test_trips.py compares them, and --write renews them.
"""

import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.conftest import REPOSITORY, write_text
from tests.processes import ProcessPool
from torchtitan_diloco.components.checkpoint import Checkpointer
from torchtitan_diloco.components.resume import Start, find_start
from torchtitan_diloco.components.summary import log_summary
from torchtitan_diloco.components.telemetry import Telemetry
from torchtitan_diloco.components.traffic import RunTraffic, traffic_rows
from torchtitan_diloco.config import load_config
from torchtitan_diloco.data.loader import SequenceReader, TrainLoader
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.streaming import StreamingDiLoCo
from torchtitan_diloco.trainer import Trainer

PACKAGE = REPOSITORY / "torchtitan_diloco"
PAGE = REPOSITORY / "CONTRIBUTING.md"
BEGIN = "<!-- trips: .venv/bin/python -m tests.trips --write -->\n"
END = "\n<!-- end of trips -->"
TOOLS = ("log", "user", "process", "formatting", "hardware")
EVERYWHERE = {"__init__.py", *(f"base/{name}.py" for name in TOOLS)}
"""Files that all others use. They are no stop of a trip."""
SMALL = {
    "data.validation_fraction": "0.1",
    "model.layers": "2",
    "model.width": "32",
    "model.heads": "2",
    "model.head_dim": "16",
    "model.feed_forward": "48",
    "training.sequence_length": "32",
    "training.batch_size": "2",
    "training.steps": "8",
    "lr_schedule.warmup": "2",
    "validation.every": "0",
    "metrics.log_every": "2",
    "metrics.boards": "none",
    "checkpoint.every": "4",
    "checkpoint.at_end": "false",
    "diloco.workers": "2",
    "diloco.method": "streaming",
    "diloco.sync_every": "2",
    "diloco.fragments.layers_per_fragment": "1",
    "diloco.overlap.delay": "1",
    "diloco.quantization.codec": "fp4_e3m0",
}


@dataclass
class Trip:
    """A way through the code, from the functions that begin it, without those that are left out."""

    begins: tuple[Callable[..., Any], ...]
    leaves_out: tuple[Callable[..., Any], ...] = ()
    files: list[str] = field(default_factory=list)
    """In the order in which they are entered."""


def trips() -> dict[str, Trip]:
    outer = StreamingDiLoCo.step, StreamingDiLoCo.drain
    return {
        "A batch": Trip(
            (TrainLoader.__iter__, SequenceReader.__getitem__, Trainer.train_step), outer
        ),
        "A delta": Trip((StreamingDiLoCo.step, GlooPeers._exchange)),
        "A checkpoint": Trip((Checkpointer.save, Checkpointer._write)),
        "A checkpoint that is loaded": Trip((find_start, Start.load)),
        "A setting": Trip((load_config,)),
        "A metric": Trip(
            (Telemetry.measure, Telemetry.open_record, Telemetry.publish, log_summary),
            (Trainer.train_step, RunTraffic.counted, traffic_rows),  # settings give the traffic
        ),
    }


class _Follower:
    """Notes the files that a thread enters while a trip is under way in it."""

    def __init__(self, followed: dict[str, Trip]) -> None:
        self._trips = list(followed.values())
        self._begins = [{code_of(begin) for begin in trip.begins} for trip in self._trips]
        self._left_out = [
            {code_of(function) for function in trip.leaves_out} for trip in self._trips
        ]
        self._depth = [[0, 0] for _ in self._trips]
        """Nested calls of functions that begin each trip, and of functions that it leaves out."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        change = 1 if event == "call" else -1
        for number, trip in enumerate(self._trips):
            depth = self._depth[number]
            if code in self._begins[number]:
                depth[0] += change
            if code in self._left_out[number]:
                depth[1] += change
            if event == "call" and depth[0] > 0 and depth[1] == 0:
                _note(trip, code)


def _note(trip: Trip, code: CodeType) -> None:
    path = Path(code.co_filename)
    if PACKAGE in path.parents and path.name not in EVERYWHERE:
        name = path.relative_to(PACKAGE).as_posix()
        if name not in trip.files:
            trip.files.append(name)


def code_of(function: Any) -> CodeType:
    code: CodeType = function.__code__
    return code


@contextmanager
def following(followed: dict[str, Trip]) -> Iterator[None]:
    """Follow the calls of the body, in this thread and in those that it starts."""

    def start_thread(frame: FrameType, event: str, argument: object) -> None:
        follower = _Follower(followed)
        sys.setprofile(follower)
        follower(frame, event, argument)

    threading.setprofile(start_thread)
    sys.setprofile(_Follower(followed))
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def follow_a_run(folder: str) -> dict[str, list[str]]:
    """Train and resume on this rank. Return the files of each trip."""
    from torchtitan_diloco.launching.rank import join

    settings = SMALL | {
        "data.corpus": f"{folder}/text.txt",
        "data.cache_folder": f"{folder}/cache",
        "run.folder": f"{folder}/run",
    }
    world = join(load_config("debug", settings))
    followed = trips()
    with following(followed):
        for stop_after in ("4", "0"):
            config = load_config("debug", settings | {"training.stop_after": stop_after})
            Trainer(config, world).run()
    return {name: trip.files for name, trip in followed.items()}


def follow() -> dict[str, list[str]]:
    """Return the files of each trip in a run of two workers."""
    pool = ProcessPool()
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder))
        files, _ = pool.run(follow_a_run, 2, folder)
    pool.close()
    result: dict[str, list[str]] = files
    return result


def printed(name: str, files: list[str]) -> str:
    """Return the item of a list in Markdown."""
    return f"- **{name}** ({len(files)}): {', '.join(f'`{file}`' for file in files)}"


def main() -> None:
    lines = [printed(name, files) for name, files in follow().items()]
    print("\n".join(lines))
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text()
        before, _, after = text.partition(BEGIN)
        _, _, after = after.partition(END)
        PAGE.write_text("\n".join([before + BEGIN, *map(_wrapped, lines), END + after]))


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 150, subsequent_indent="  ", break_on_hyphens=False)


if __name__ == "__main__":
    main()
