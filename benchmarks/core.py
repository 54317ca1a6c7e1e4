"""Shared parts of the benchmarks: command lines, measuring in turns, kept results, tables."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from torchtitan_diloco.config import Config, ConfigError, from_command_line
from torchtitan_diloco.log import markdown_table

Settings = dict[str, str]
"""Settings of the trainer: dotted key -> value."""
CPU = torch.device("cpu")
Result = TypeVar("Result")
Item = TypeVar("Item")


# --- command line ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def build_parser(description: str | None) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    return _Parser(description=description, formatter_class=form, allow_abbrev=False)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1 up")
    return int(text)


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def folder(text: str) -> Path:
    """Create the folder of an option, so that a bad one is refused before anything is measured."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}: give a folder") from error
    return path


def list_of(kind: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """Return an argparse type for comma-separated values."""

    def parse(text: str) -> list[Item]:
        try:
            return [kind(word) for word in text.split(",") if word]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: give numbers, such as 1,5") from None

    return parse


def parse_names(
    parser: argparse.ArgumentParser,
    flag: str,
    text: str,
    known: Collection[str],
    separator: str = ";",
) -> list[str]:
    """Return the names listed in `text`, or all known names if it is empty."""
    names = [name.strip() for name in text.split(separator) if name.strip()]
    for name in names:
        if name not in known:
            parser.error(f"{flag} {name!r}: there are {f'{separator} '.join(known)}")
    return names or list(known)


def parse_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> Config:
    """Return the configuration of the trainer, or exit with its error message."""
    try:
        config = from_command_line(list(words))
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    if config is None:  # --print-config has printed it
        parser.exit(0)
    return config


def parse_settings(
    parser: argparse.ArgumentParser, words: Sequence[str], reserved: Collection[str]
) -> Settings:
    """Parse `--section.key value` pairs for all runs. The benchmark sets `reserved` keys itself."""
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        parser.error("settings of the trainer look like --section.key value")
    settings = {
        key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }
    for key in settings.keys() & set(reserved):
        parser.error(f"--{key} {settings[key]}: the table sets this itself; see --help")
    return settings


def command_line(settings: Mapping[str, str]) -> list[str]:
    """Return command-line arguments for these settings on top of debug.toml."""
    pairs = {"config": "debug", **settings}
    return [word for key, value in pairs.items() for word in (f"--{key}", value)]


# --- measuring ------------------------------------------------------------------------------------


def take_turns(
    tasks: Mapping[str, Callable[[], Result]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[Result]]:
    """Call the tasks in turns and return their results by name, without warm-up rounds.

    With turns, a drift in the speed of the machine affects all tasks alike.
    """
    found: dict[str, list[Result]] = {name: [] for name in tasks}
    for number in range(warm_up + rounds):
        for name, task in tasks.items():
            result = task()
            if number >= warm_up:
                found[name].append(result)
    return found


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """CPU time of all threads of this process, which does not depend on other programs."""


def timed(task: Callable[[], object], device: torch.device = CPU) -> Seconds:
    """Time a task, including its work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started, cpu = time.perf_counter(), time.process_time()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Seconds(time.perf_counter() - started, time.process_time() - cpu)


def kept(
    folder: Path, settings: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of `measure`, or the one that a finished run has saved in `folder`."""
    path = folder / "finished.json"
    if not path.exists():
        result = measure()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings, "result": result}, indent=2))
    found: dict[str, Any] = json.loads(path.read_text())
    if found["settings"] != settings:
        raise SystemExit(
            f"{folder} holds a run with other settings: choose another --out, or remove it"
        )
    result = found["result"]
    assert isinstance(result, dict)
    return result


# --- tables ---------------------------------------------------------------------------------------


def summary(values: Sequence[float], digits: int = 3, factor: float = 1.0) -> str:
    """Return "median (min ... max)", or only the value if there is just one."""
    scaled = [factor * value for value in values]
    middle = f"{statistics.median(scaled):,.{digits}f}"
    if len(scaled) == 1:
        return middle
    return f"{middle} ({min(scaled):,.{digits}f} ... {max(scaled):,.{digits}f})"


def mean(values: Sequence[float], form: str) -> str:
    """Return "mean (min ... max)"."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} ... {max(values):{form}})"


def print_table(title: str, header: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table. `header` has the column names, separated by " | "."""
    print(f"\n{title}\n\n{markdown_table(header.split(' | '), rows)}", flush=True)
