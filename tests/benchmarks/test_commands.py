"""Wrong inputs of the benchmarks are answered before anything is measured, and what works beside training never hangs."""

import argparse
import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from benchmarks import slow_link
from benchmarks.arguments import config_of, further_settings, positive, positive_number
from benchmarks.contention import Work, a_thread, beside
from torchtitan_diloco.diloco.config import CodecName


@pytest.mark.parametrize(
    ("read", "text"),
    [(positive, "0"), (positive, "-3"), (positive, "1.5"), (positive_number, "-1")],
)
@pytest.mark.parametrize("word", [None, "many"])
def test_numbers(read: Callable[[str], float], text: str, word: str | None) -> None:
    assert read("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match=word or text):
        read(word or text)


def test_a_setting_of_the_table_is_not_for_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    assert further_settings(parser, ["--optimizer.lr", "1e-3"], {"run.seed"}) == {
        "optimizer.lr": "1e-3"
    }
    for words, message in (
        (["--run.seed", "3"], "--run.seed 3: the table sets this"),
        (["--run.seed"], "look like --section.key"),
    ):
        with pytest.raises(SystemExit):
            further_settings(parser, words, {"run.seed"})
        assert message in capsys.readouterr().err


def test_a_mistake_in_the_configuration_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config_of(argparse.ArgumentParser(), ["--config", "debgu"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "options", [["--workers", "1"], ["--cycles", "0"], ["--diloco.quantization.codec", "int8"]]
)
def test_a_table_of_slow_links_refuses(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["slow_link", *options])
    with pytest.raises(SystemExit) as ended:
        slow_link.main()
    assert ended.value.code == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_beside_training_ends_the_measurement() -> None:
    def fails() -> None:
        raise OSError("no room")

    with (
        pytest.raises(RuntimeError, match="has ended"),
        beside(threading.Thread(target=fails), threading.Event(), ctypes.c_long(-1)),
    ):
        pass


@pytest.mark.parametrize("codec", ["fp32", "fp4_e3m0"])
def test_a_thread_exchanges_beside_training(codec: CodecName) -> None:
    with a_thread(codec, 5000) as done:
        assert done() >= 0
    work = Work(codec, 5000)
    before = work.outer.global_state_dict()["weight"]
    with torch.no_grad():
        work.model.weight.add_(1.0)
    work.once()
    assert (work.outer.global_state_dict()["weight"] > before).float().mean() > 0.9, (
        "an outer step towards where the worker went"
    )
