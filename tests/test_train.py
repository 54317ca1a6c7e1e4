"""Mistakes of a user are a line; errors of the program keep their traceback."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_diloco.trainer
from tests.test_trainer import settings, words
from torchtitan_diloco.config import load_config
from torchtitan_diloco.train import main
from torchtitan_diloco.utils import clock, is_user_error


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (lambda: load_config("debug", {"run.sead": "1"}), True),
        (lambda: clock(math.nan), False),  # raised by round() in a function of the package
        (lambda: torch.optim.AdamW([]), False),
    ],
)
def test_only_errors_that_the_package_raises_itself_are_a_users(fail: Any, expected: bool) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        fail()
    assert is_user_error(caught.value) == expected


def test_an_error_of_the_program_on_the_first_rank_keeps_its_traceback(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchtitan_diloco.trainer, "find_start", lambda *_: clock(math.nan))
    with pytest.raises(ValueError, match="cannot convert float NaN") as caught:
        main(words(settings(text)))
    assert caught.traceback[-1].name == "clock"
