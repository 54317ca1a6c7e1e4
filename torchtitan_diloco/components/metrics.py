"""What a run reports: one record a logged step, written to metrics.jsonl, TensorBoard and the console."""

import itertools
import json
import math
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torchtitan_diloco.components.round_records import RoundRecord
from torchtitan_diloco.components.round_trace import RoundTrace
from torchtitan_diloco.config.schema import Metrics
from torchtitan_diloco.utils import clock, logger

Record = dict[str, float | None]


class MetricsWriter:
    """Writes records on the rank that owns the run folder; everywhere else it does nothing."""

    def __init__(
        self,
        folder: Path | None,
        config: Metrics,
        start_step: int = 0,
        workers: int = 1,
        held: TextIO | None = None,
    ) -> None:
        """`start_step`: records of later steps, by a run that was killed after its last checkpoint, are taken back. `held`:
        what keeps the folder for this run, if it has been taken already; closed with the rest."""
        self._held = held
        self._told = False
        if folder is not None:
            drop_records_after(folder / "metrics.jsonl", start_step)
        self._file = (
            None
            if folder is None
            else (folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        )
        self._board, self._rounds_board = None, None
        self._trace = None if folder is None else RoundTrace(folder / "traces" / "fragments.json")
        if folder is not None and config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            from torchtitan_diloco.components.board import RoundBoard

            self._board = SummaryWriter(
                str(folder / "tensorboard"), purge_step=start_step + 1, flush_secs=10
            )
            self._rounds_board = RoundBoard(self._board, workers)

    def write(self, step: int, record: Record) -> None:
        """A value of None is "not known": null in the file, absent in TensorBoard."""
        self._append({"step": step, **record})
        if self._board is not None:
            for key, value in record.items():
                if value is not None:
                    self._board.add_scalar(key, value, step)

    def write_round(self, record: RoundRecord) -> None:
        self._append(record)
        if self._trace is not None:
            self._trace.add(record)
        if self._rounds_board is not None:
            self._rounds_board.add(record)

    def write_summary(self, record: dict[str, Any]) -> None:
        self._append({"kind": "summary", **record})

    def draw(self, step: int) -> None:
        """What is costly to write: the timeline, as a file and as an image."""
        if self._trace is not None:
            self._trace.save()
        if self._rounds_board is not None:
            self._rounds_board.draw(step)

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_jsonable(record)) + "\n")
        except (
            OSError
        ) as error:  # a full disk ends no run: what was saved is there, and space may come back
            if not self._told:
                logger.error(
                    f"metrics.jsonl cannot be written ({error.strerror}); records are lost until it can"
                )
            self._told = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        if self._held is not None:
            self._held.close()
        if self._board is not None:
            self._board.close()


def drop_records_after(path: Path, step: int) -> None:
    """A last line that was cut off goes, too. What a run leaves that starts over is put aside whole."""
    if not path.exists():
        return
    if step == 0:
        number = next(
            number
            for number in itertools.count(1)
            if not path.with_stem(f"metrics-{number}").exists()
        )
        path.rename(path.with_stem(f"metrics-{number}"))
        logger.warning(
            f"{path.parent} holds a run without a checkpoint: starts over, its records are kept in metrics-{number}.jsonl"
        )
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    aside = path.with_suffix(".new")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)


def _jsonable(value: Any) -> Any:
    """JSON knows no NaN and no infinity; as text they stay readable for every parser."""
    if isinstance(value, dict):
        return {key: _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class StepTimer:
    """Rates over the steps since the last report, without those in which the run did something else."""

    def __init__(self, elapsed_seconds: float = 0.0) -> None:
        """`elapsed_seconds`: what the run took before it was taken up again."""
        self._before, self._start = elapsed_seconds, time.perf_counter()
        self._interval_start, self._interval_steps, self._paused = self._start, 0, 0.0

    @property
    def elapsed_seconds(self) -> float:
        return self._before + time.perf_counter() - self._start

    def step_done(self) -> None:
        self._interval_steps += 1

    def pause(self, seconds: float) -> None:
        """Time that was not spent on training steps (validation)."""
        self._paused += seconds

    def seconds_per_step(self) -> float:
        """Mean since the last call, which starts a new interval."""
        now = time.perf_counter()
        seconds = (now - self._interval_start - self._paused) / max(1, self._interval_steps)
        self._interval_start, self._interval_steps, self._paused = now, 0, 0.0
        return seconds


def log_step(step: int, total_steps: int, record: Record) -> None:
    """The console's line of a logged step."""
    seconds = record["speed/seconds_per_step"] or 0.0
    mfu = record["speed/mfu_percent"]
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record['train/loss_nats_per_token_global']:.4f}",
        f"gradient norm {record['train/gradient_norm_mean_over_workers']:.3f}",
        f"lr {record['train/lr']:.2e}",
        f"{record['speed/tokens_per_second_global']:,.0f} tokens/s",
        f"MFU {'n/a' if mfu is None else f'{mfu:.1f} %'}",
        f"memory {record['memory/peak_gib_max_over_ranks']:.2f} GiB",
        f"ETA {clock((total_steps - step) * seconds)}",
    ]
    logger.info("  ".join(parts))
