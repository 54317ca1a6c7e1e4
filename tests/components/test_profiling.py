"""The trace of a few steps."""

import errno
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.profiler import profile

from tests.components.checkpoints import ALONE
from torchtitan_diloco.components.profiling import build_profiler
from torchtitan_diloco.config.schema import Profiling


@pytest.mark.parametrize(
    "error", [None, OSError(errno.ENOSPC, "No space left on device"), RuntimeError("it is empty")]
)
def test_a_trace_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    """Otherwise each restart would write it again, and fail again."""
    settings = Profiling(start=2, steps=1)
    with (
        patch.object(profile, "export_chrome_trace", side_effect=error) as export,
        build_profiler(settings, tmp_path, ALONE) as profiler,
    ):
        assert profiler is not None
        for _ in range(4):
            profiler.step()
    export.assert_called_once()
    failures = [line for line in caplog.messages if "could not be written" in line]
    assert len(failures) == (error is not None)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(2, "profile of 2 steps: "), (9, "3 steps, as training ends before profiling.steps = 9: ")],
)
def test_a_profile_says_how_many_steps_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, expected: str
) -> None:
    caplog.set_level("INFO")
    settings = Profiling(start=2, steps=steps)
    with build_profiler(settings, tmp_path, ALONE) as profiler:
        assert profiler is not None
        for _ in range(5):
            profiler.step()
    (line,) = caplog.messages
    assert expected in line
