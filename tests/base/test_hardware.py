"""A run describes the machine, and what is installed on it."""

from pathlib import Path

import pytest
import torch

from tests.test_trainer import join, settings
from torchtitan_diloco.base import hardware
from torchtitan_diloco.base.hardware import NEWEST_TORCH, untested_torch
from torchtitan_diloco.config import load_config
from torchtitan_diloco.trainer import Trainer


@pytest.mark.parametrize("version", ["2.11.0", NEWEST_TORCH, f"{NEWEST_TORCH}+cu130", "2.9.1"])
def test_tested_versions_of_torch_are_not_mentioned(version: str) -> None:
    assert untested_torch(version) == ""


@pytest.mark.parametrize("version", ["2.100.0", "3.0.0a0+vendor", f"{NEWEST_TORCH}.1+cpu"])
def test_a_newer_torch_is_named_with_the_newest_tested_one(version: str) -> None:
    note = untested_torch(version)
    assert note.startswith(f"torch {version} is newer than {NEWEST_TORCH}, ")
    assert note.endswith(f"try torch {NEWEST_TORCH}")
    assert "\n" not in note


def test_a_run_begins_with_one_line_about_a_torch_that_was_not_tested(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("debug", settings(text))

    def lines() -> list[str]:
        caplog.clear()
        Trainer(config, join(config))
        return [one for one in caplog.messages if one.startswith("torch ")]

    monkeypatch.setattr(hardware, "NEWEST_TORCH", "2.0")
    (line,) = lines()
    assert line.startswith(f"torch {torch.__version__} is newer than 2.0, ")
    monkeypatch.setattr(hardware, "NEWEST_TORCH", "999.0")
    assert lines() == []
