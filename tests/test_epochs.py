"""The start of a run says how often it reads its text, and warns of repeated text."""

import logging
import re
from pathlib import Path

import pytest

from tests.test_trainer import join, settings, train
from torchtitan_diloco.config import load_config
from torchtitan_diloco.trainer import Trainer

HEADER = re.compile(
    r": ([\d,]+) tokens, tokenizer bytes(?s:.*) steps .* = ([\d,]+) tokens .*, (.*) epochs"
)


def header(chosen: dict[str, str], caplog: pytest.LogCaptureFixture) -> tuple[list[float], str]:
    """Build a run. Return tokens of its text, tokens that it reads, and epochs; and warnings."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Trainer(config := load_config("debug", chosen), join(config))
    (found,) = HEADER.findall("\n".join(one.message for one in caplog.records))
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    return [float(number.replace(",", "")) for number in found], "\n".join(warnings)


def test_the_header_says_how_often_the_text_is_read(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(text, training__steps=5000)
    (tokens, read, epochs), warning = header(chosen, caplog)
    assert read == 5000 * 12 * 32
    assert epochs == pytest.approx(read / tokens, abs=0.005)
    assert f'reads all of data.corpus = "{text}" {epochs:.1f} times. After 4 epochs' in warning
    most = int(re.findall(r"--training\.steps (\d+)\)", warning)[0])
    for steps, warns in ((most, False), (most + 1, True)):
        (_, _, epochs), warning = header(chosen | {"training.steps": str(steps)}, caplog)
        assert epochs == pytest.approx(4, abs=0.01)
        assert ("epochs" in warning) == warns


def test_several_corpora_have_one_warning_with_all_names(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(text.parent / f"{name}.txt") for name in "abc"]
    for name in names:
        Path(name).write_text(f"{name} has few words\n" * 200)
    mixture = " ".join(f"{name}=1" for name in names)
    changes = {"data__mixture": mixture, "model__document_mask": "true", "validation__every": 0}
    chosen = settings(text, training__steps=5000, **changes)
    del chosen["data.corpus"]
    config = load_config("debug", chosen)
    Trainer(config, join(config))
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    for words in ("After 4 epochs, repeated text", "model.document_mask changes little"):
        (warning,) = (one for one in warnings if words in one)
        assert all(name in warning for name in names)


def test_epochs_of_a_run_that_goes_on(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text that was read before the corpus changed does not count, as it was other text."""
    chosen = settings(text, training__stop_after=6)
    train(chosen)
    (tokens, read, epochs), _ = header(chosen, caplog)
    assert epochs == pytest.approx(read / tokens, abs=0.005)
    (text.parent / "other.txt").write_text("a few other words\n" * 40)
    changed = chosen | {"data.corpus": f"{text.parent}/other.txt", "data.validation_fraction": "0"}
    (tokens, read, epochs), _ = header(changed | {"validation.every": "0"}, caplog)
    assert read == 8 * 12 * 32
    assert epochs == pytest.approx(2 * 12 * 32 / tokens, abs=0.005)
