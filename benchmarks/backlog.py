"""Measure what is still to be measured on CPUs, one after the other, in so many minutes.

    .venv/bin/python -m benchmarks.backlog --minutes 120 [--text 'prose=docs/*.txt'] [--only 2,3]

The entries of benchmarks/backlog.toml run in their order, at low priority, each until it is done or
the time is over. Finished runs are kept in --out, and the same command continues it: it is safe
to stop it with Ctrl-C while something else is timed. An entry whose text was not given is left out.
"""

import os
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Formatter

import msgspec

from benchmarks import core

LOW_PRIORITY = 15
"""Where the kernel groups processes by session, it counts only inside a session."""


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    module: str
    words: str
    """Command line, with {names} of folders and texts."""

    @property
    def needs(self) -> set[str]:
        """The names in the command line."""
        return {name for _, name, _, _ in Formatter().parse(self.words) if name}

    def command(self, values: Mapping[str, str], minutes: int) -> list[str]:
        quoted = {name: shlex.quote(value) for name, value in values.items()}
        words = shlex.split(self.words.format(**quoted))
        return ["-m", self.module, *words, "--minutes", str(minutes)]


def read_entries() -> list[Entry]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return msgspec.convert(content["entry"], list[Entry])


def run_entries(
    entries: Mapping[int, Entry], values: Mapping[str, str], seconds: float
) -> list[str]:
    """Run the entries, by their numbers, until the time is over. Return a line about each."""
    end = time.monotonic() + seconds
    lines = list[str]()
    for number, entry in entries.items():
        minutes = int((end - time.monotonic()) / 60)
        missing = sorted(entry.needs - values.keys())
        if missing:
            lines.append(f"{number}. {entry.name}: left out, give --text '{missing[0]}=PATHS'")
        elif minutes < 1:
            lines.append(f"{number}. {entry.name}: not begun, the time is over")
        else:
            command = entry.command(values, minutes)
            print(f"{number}. {entry.name}: {shlex.join(['python', *command])}", flush=True)
            code = subprocess.call([sys.executable, *command])
            lines.append(
                f"{number}. {entry.name}: " + ("done" if code == 0 else f"exit code {code}")
            )
    return lines


def main() -> None:
    parser = core.build_parser(__doc__)
    entries = read_entries()
    parser.add_argument("--minutes", type=core.positive, required=True)
    parser.add_argument("--out", type=Path, default=Path("outputs/backlog"))
    parser.add_argument("--text", action="append", default=[], metavar="NAME=PATHS")
    numbers = [str(number) for number in range(1, len(entries) + 1)]
    only = "; ".join(f"{number} {entry.name}" for number, entry in enumerate(entries, start=1))
    parser.add_argument("--only", type=core.one_of(numbers), default="", help=only)
    options = parser.parse_args()
    pairs = [text.partition("=") for text in options.text]
    for name, equals, paths in pairs:
        if not equals or not paths or not any(name in entry.needs for entry in entries):
            known = sorted({need for entry in entries for need in entry.needs} - {"out"})
            parser.error(f"--text {name}{equals}{paths}: give NAME=PATHS; there are {known}")
    values = {"out": str(options.out.resolve())} | {name: paths for name, _, paths in pairs}
    os.nice(LOW_PRIORITY)
    chosen = {int(number): entries[int(number) - 1] for number in options.only}
    print("\n".join(run_entries(chosen, values, 60.0 * options.minutes)))


if __name__ == "__main__":
    main()
