"""Command lines of the benchmarks: what is no sensible number, or no setting, is said before anything is measured."""

import argparse
from collections.abc import Collection, Sequence

from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.schema import Config
from torchtitan_diloco.diloco.codecs import CODECS


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 up")
    return int(text)


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def codec_names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in CODECS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{','.join(unknown)} is no format: choose from {', '.join(CODECS)}"
        )
    return text.split(",")


def config_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> Config:
    try:
        config = from_command_line(list(words))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    if config is None:  # --print-config, which is answered
        parser.exit(0)
    return config


def further_settings(
    parser: argparse.ArgumentParser, words: Sequence[str], of_the_table: Collection[str]
) -> dict[str, str]:
    """`--section.key value` for all runs of a table, but for what the table is about."""
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        parser.error("further settings look like --section.key value")
    settings = {
        key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }
    for key in settings:
        if key in of_the_table:
            parser.error(
                f"--{key} {settings[key]}: the table sets this itself, and would print what is not so; see --help"
            )
    return settings
