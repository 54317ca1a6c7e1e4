"""Compare the loss of data parallelism, DiLoCo and streaming variants at equal tokens.

    .venv/bin/python -m benchmarks.parity --table parity [--corpus 'text/*.txt'] [--section.key ...]

The tables are in benchmarks/parity.toml. On 2 CPU cores, `parity` takes hours at full length and
the others about an hour each. Every run starts the trainer on the CPU, with one thread for each
process. Finished runs are kept in --out, so that the same command continues an interrupted table.
Without --corpus, the text is the source of the Python standard library. --out also gets a file
parity-TABLE-TEXT-DATE-DEVICE.jsonl of all finished runs of the table, for benchmarks/records/.
"""

import math
import os
import re
import statistics
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks import core, records
from torchtitan_diloco.data.prepare import main as prepare_main

CONTROL = "data parallel"
RESERVED = {
    "run.folder",
    *("run.seed", "data.corpus", "diloco.method", "diloco.workers", "diloco.sync_every"),
    *(f"training.{key}" for key in ("steps", "batch_size", "global_batch_size", "sequence_length")),
}
"""Settings that the tables set themselves."""


@dataclass(frozen=True)
class Table:
    shape: str
    """Model and batch."""
    groups: list[list[str]]
    """Names of runs, with braces; the first of each group is its control."""
    steps: int = 0
    """Length of a run."""
    tokens: int = 0
    """Length of a run where batches differ, instead of `steps`."""
    common: str = ""
    """Terms of all runs."""
    papers: dict[str, str] = field(default_factory=dict)
    """Numbers of the papers for the same comparison, by run."""

    @property
    def controls(self) -> dict[str, str]:
        """The control of each run, in the order of the table."""
        groups = [[name for entry in group for name in expand(entry)] for group in self.groups]
        return {name: group[0] for group in groups for name in group}

    def settings(self, name: str) -> core.Settings:
        """Return all settings of a run."""
        file = read_tables()
        shape = read_tables().shapes[self.shape]
        run = file.defaults | shape | file.parse_terms(self.common) | file.parse_terms(name)
        if run["diloco.method"] == "none":  # runs that differ in other settings are the same
            run = {key: value for key, value in run.items() if not key.startswith("diloco.")}
            run |= file.terms[CONTROL]
        batch = int(run["training.global_batch_size"])
        steps = self.steps or self.tokens // (batch * int(run["training.sequence_length"]))
        sequences = batch // int(run["diloco.workers"])
        return run | {"training.steps": str(steps), "training.batch_size": str(sequences)}

    @property
    def length(self) -> str:
        """The length of a run, in words."""
        if not self.steps:
            return f"{self.tokens / 1e6:.1f}M tokens"
        shape = read_tables().shapes[self.shape]
        batch = int(shape["training.global_batch_size"])
        tokens = self.steps * batch * int(shape["training.sequence_length"])
        return f"{self.steps:,} steps = {tokens / 1e6:.1f}M tokens"


@dataclass(frozen=True)
class Tables:
    """Contents of parity.toml."""

    defaults: core.Settings
    shapes: dict[str, core.Settings]
    terms: dict[str, core.Settings]
    numbers: dict[str, str]
    tables: dict[str, Table]

    def parse_terms(self, terms: str) -> core.Settings:
        """Return the settings of comma-separated terms. Later ones override earlier ones."""
        settings: core.Settings = {}
        for term in filter(None, terms.split(", ")):
            if term in self.terms:
                settings |= self.terms[term]
            else:
                prefix = next(prefix for prefix in self.numbers if term.startswith(prefix))
                settings[self.numbers[prefix]] = term.removeprefix(prefix)
        return settings


@cache
def read_tables() -> Tables:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Tables)


def expand(name: str) -> list[str]:
    """Return the names that braces stand for: "H={10|30}" is "H=10" and "H=30"."""
    begin, brace, after_brace = name.partition("{")
    if not brace:
        return [name]
    choices, _, end = after_brace.partition("}")
    return [begin + choice + ending for choice in choices.split("|") for ending in expand(end)]


# --- the table ------------------------------------------------------------------------------------


class Run(NamedTuple):
    seed: int
    name: str

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.name}"


def print_losses(table: Table, results: Mapping[Run, core.Record]) -> None:
    """Compare each run with its own control and with the first run of the table."""
    losses: dict[str, dict[int, float]] = {}
    savings: dict[str, float] = {}
    for (seed, name), result in results.items():
        losses.setdefault(name, {})[seed] = result["loss"]
        savings[name] = result["saving"]
    controls = {name: control for name, control in table.controls.items() if name in losses}
    first = next(iter(controls))
    rows = [
        [
            name,
            f"1/{savings[name]:,.0f}" if savings[name] else "-",
            str(len(losses[name])),
            core.summary(list(losses[name].values()), ".4f", middle=statistics.mean),
            "" if name == control else core.against(losses[name], losses.get(control, {})),
            "" if first in (name, control) else core.against(losses[name], losses[first]),
            table.papers.get(name, ""),
        ]
        for name, control in controls.items()
    ]
    title = (
        f"validation loss of the shared model after {table.length}; n seeds, mean (min ... max); "
        "bytes against those of bf16 gradients at every step"
    )
    columns = f"run | bytes | n | loss | against its control | against {first} | papers"
    core.print_table(title, columns, rows)


def record_runs(
    table: str, text: str, seeded: Mapping[Run, core.Settings], results: Mapping[Run, core.Record]
) -> list[core.Record]:
    """Return a record of each finished run."""
    return [
        {
            "table": table,
            "run": run.name,
            "seed": run.seed,
            "text": text,
            **result,
            "settings": {
                key: value for key, value in seeded[run].items() if key not in records.TEXT_SETTINGS
            },
        }
        for run, result in results.items()
    ]


def text_of(run: core.Settings, corpus: str, out: Path) -> core.Settings:
    """Return the settings of the text of a run. With corpora of the workers' own, these are made of
    the documents that are alike."""
    if run.get("data.shard_by") != "own":
        return {"data.corpus": corpus}
    chosen = core.load(run | {"data.corpus": "{worker}"})
    shards = out / f"clusters-{chosen.diloco.workers}"
    tokenizer = chosen.data.tokenizer
    prepare_main(
        [
            *("--source", corpus, "--tokenizer", tokenizer, "--out", str(shards)),
            *("--validation-fraction", str(chosen.data.validation_fraction)),
            *("--clusters", str(chosen.diloco.workers)),
        ]
    )
    return {"data.corpus": f"{shards}-{{worker}}", "data.validation_corpus": str(shards)}


def main() -> None:
    tables = read_tables().tables
    parser = core.build_parser(__doc__)
    parser.add_argument("--table", choices=tables, default="parity")
    parser.add_argument("--corpus", default="stdlib")
    text = "name of the text in records (default: that of --corpus)"
    parser.add_argument("--text", default="", help=text)
    parser.add_argument("--seeds", type=core.list_of(int), default=[0, 1, 2])
    parser.add_argument("--runs", default="", help="names, separated by ';' (default: all)")
    parser.add_argument("--jobs", type=core.positive, default=1, help="runs at once")
    parser.add_argument("--minutes", type=core.positive, help="stop then (default: no limit)")
    parser.add_argument("--out", type=Path, default=Path("outputs/parity"))
    options, words = parser.parse_known_args()
    table = tables[options.table]
    extra = core.parse_settings(parser, words, RESERVED)
    controls = table.controls
    names = [name.strip() for name in options.runs.split(";") if name.strip()] or list(controls)
    if unknown := set(names) - controls.keys():
        parser.error(f"--runs {unknown.pop()!r}: there are {'; '.join(controls)}")
    names = [name for name in controls if name in {*names, *(controls[name] for name in names)}]
    runs = {name: table.settings(name) | extra for name in names}
    texts = {name: text_of(run, options.corpus, options.out) for name, run in runs.items()}
    for name, run in runs.items():
        core.load(run | texts[name])
    seeded = {
        Run(seed, name): run | texts[name] | {"run.seed": str(seed)}
        for seed in options.seeds
        for name, run in runs.items()
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    made_by = records.provenance("benchmarks.parity", sys.argv[1:], core.CPU)
    seconds = 60.0 * options.minutes if options.minutes else math.inf
    results = core.train_all(options.out, seeded, options.jobs, seconds, made_by=asdict(made_by))
    if not results:
        sys.exit("no run was finished: the same command continues those that were begun")
    print_losses(table, results)
    text = options.text or re.sub(r"\W+", "-", Path(options.corpus).name).strip("-")
    path = options.out / records.file_name(f"parity-{options.table}-{text}", made_by)
    run_records = record_runs(options.table, text, seeded, results)
    records.write(path, records.stamped(run_records, made_by))
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
