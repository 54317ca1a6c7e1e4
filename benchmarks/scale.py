"""Compare streaming with data parallelism at sizes where seeds do not matter, in a given time.

    .venv/bin/python -m benchmarks.scale --minutes 9 --out DIR [--section.key value ...]
    .venv/bin/python -m benchmarks.scale --show

A *stage* is a size of the model and an optimizer: data parallelism, and streaming (fp4_e3m0, tau 1,
alpha falling to 0) with as many tokens, all at once on one GPU, whose workers share it, or on a
CPU. The first stage that no record has is begun: short runs measure the speed, and the plan gives
all runs of the stage as many tokens as fit into the minutes, at most 20 a parameter and four
epochs of the text. A later stage is begun if all its tokens fit. So the same command, given again
on any day, goes on where the records in benchmarks/records/ end: on a GPU with 15M and AdamW, 15M
and Muon, then 35M.

DIR gets a few small files: scale-DATE-DEVICE.jsonl, which one moves to benchmarks/records/, a
table, and pictures. Runs are kept in --work; the same command continues those that were cut.
`--show` prints the table of all records, and draws docs/images/sizes.svg.

The text is the source of Python and its installed packages: as bytes for models below 4M, else
with the 8,192 tokens of benchmarks/scale-tokenizer.json. --corpus: other text, or a folder of
token shards. Settings of the trainer hold for all runs, such as `--compile.enable false`.
"""

import argparse
import itertools
import json
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import core, records, scale_results
from benchmarks.parity import read_tables
from torchtitan_diloco.base.hardware import available_cores
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data import prepare
from torchtitan_diloco.data.shards import INDEX_NAME, read_index
from torchtitan_diloco.data.text import open_corpus, standard_library
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.models import vocabulary_rows

TOKENIZER = Path(__file__).with_name("scale-tokenizer.json")
BYTES_BELOW = 4_000_000
"""Parameters of a model from which on its embedding has room for the tokens of `TOKENIZER`."""
FULL_RATIO = 20
"""Tokens per parameter of a complete run."""
MOST_EPOCHS = 4
STEPS = 5_000
"""About the steps of a run of 20 tokens per parameter: with larger models, batches are larger."""
MOST_AT_ONCE = 2**15
"""Tokens of a forward pass."""
VALIDATIONS = 10
PROBE_SHARE = 0.35
"""Share of the time that the short runs of a stage may take, which compile the model, too."""
USED = 0.85
"""Share of the time that is planned for, as speeds vary."""
RESERVED_SECONDS = 25.0
"""At the end, for runs that have to be stopped, and for the results."""
COMMON = {
    "optimizer.lr": "4e-3",
    "lr_schedule.warmup": "0.2",
    "checkpoint.every_minutes": "2",
    "checkpoint.keep_latest": "1",
    "metrics.boards": "none",
    "run.restarts": "0",
    "run.device": "auto",
}
STREAMING = read_tables().parse_terms("tau 1, alpha falls, fp4_e3m0")
OPTIMIZERS: dict[str, core.Settings] = {"adamw": {}, "muon": read_tables().terms["Muon"]}


class Stage(NamedTuple):
    size: int
    """Parameters as asked for."""
    optimizer: str

    def __str__(self) -> str:
        return f"{self.size / 1e6:g}M, {self.optimizer}"


class Run(NamedTuple):
    stage: Stage
    workers: int = 1
    """1: data parallelism in one process, whose samples are those of any number of workers."""
    every: int = 0
    """Steps between two exchanges of a fragment; 0: data parallelism."""
    seed: int = 0
    beginning: float = 0.0
    """Share of the steps in which the workers average every two steps."""

    @property
    def names(self) -> core.Record:
        """What identifies this run in a record."""
        return {**self.stage._asdict(), **self._asdict()} | {"stage": str(self.stage)}

    def __str__(self) -> str:
        return f"{self.stage}, {scale_results.describe_kind(self.names)}, seed {self.seed}"


class Text(NamedTuple):
    settings: core.Settings
    about: core.Record
    """What a record says of the text: equal for equal tokens."""


# --- settings -------------------------------------------------------------------------------------


def write_sources(path: Path) -> None:
    """Write the source of Python and its packages, a file in a line, in random order."""
    files = standard_library(Path(sysconfig.get_path("stdlib")))
    for folder in {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}:
        files += sorted(Path(folder).rglob("*.py"))
    random.Random(0).shuffle(files)
    # Packages have copies of others, of which none may be held out.
    sources = dict.fromkeys(file.read_text("utf-8", errors="replace") for file in files)
    with path.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": source}) + "\n" for source in sources)


def prepare_text(work: Path, source: str, tokenizer: str) -> Text:
    """Return the token shards of a text, which are made in `work` unless `source` has some."""
    shards = Path(source)
    if not source or not (shards / INDEX_NAME).exists():
        shards = work / f"tokens-{Path(tokenizer).stem}"
        if not (shards / INDEX_NAME).exists():
            if not source:
                source = str(work / "sources.jsonl")
                write_sources(Path(source))
            open_corpus(source)  # raises an error of one line
            words = ["--source", source, "--tokenizer", tokenizer, "--out", str(shards)]
            prepare.main(words)
    index = read_index(shards / INDEX_NAME)
    tokenizer = str(index.settings["tokenizer"])
    about = {
        "tokenizer": Path(tokenizer).name,
        "text": index.settings["source_fingerprint"][:12],
        "text_tokens": index.splits["train"].tokens,
    }
    return Text({"data.corpus": str(shards), "data.tokenizer": tokenizer}, about)


def shape_of(size: int, tokenizer: str) -> core.Settings:
    """Return a decoder of about `size` parameters, whose width is about 64 times its depth."""
    rows = vocabulary_rows(Model(), build_tokenizer(tokenizer).vocab_size)

    def mismatch(shape: tuple[int, int]) -> float:
        layers, width = shape
        count = 12 * layers * width**2 + rows * width
        return 8 * abs(math.log(count / size)) + abs(math.log(width / (64 * layers)))

    widths = [*range(32, 512, 32), *range(512, 4096, 64)]
    layers, width = min(product(range(2, 33), widths), key=mismatch)
    head_dim = 32 if width < 512 else 64
    shape = {"layers": layers, "width": width, "heads": width // head_dim, "head_dim": head_dim}
    shape["feed_forward"] = -(-width // 48) * 128  # as in the presets
    return {f"model.{key}": str(value) for key, value in shape.items()}


def batch_of(size: int) -> tuple[int, int]:
    """Return the sequences of a step, and their length."""
    tokens: int = 2 ** round(math.log2(max(512, FULL_RATIO * size / STEPS)))
    length = min(1024, max(64, tokens // 16))
    return tokens // length, length


def settings_of(run: Run, text: core.Settings, extra: core.Settings, ratio: float) -> core.Settings:
    """Return the settings of a run of so many tokens per parameter."""
    size, optimizer = run.stage
    sequences, length = batch_of(size)
    at_once = max(1, min(sequences // run.workers, MOST_AT_ONCE // length))
    steps = ratio * size / (sequences * length)
    outer = STREAMING | {"diloco.sync_every": str(run.every)}
    if run.beginning:
        outer |= {"diloco.beginning.length": str(run.beginning)}
    return {
        **COMMON,
        **text,
        **shape_of(size, text["data.tokenizer"]),
        **OPTIMIZERS[optimizer],
        **(outer if run.every else {"diloco.method": "none"}),
        "diloco.workers": str(run.workers),
        "training.sequence_length": str(length),
        "training.global_batch_size": str(sequences),
        "training.batch_size": str(at_once),
        "training.steps": "0",
        "training.tokens_per_parameter": str(ratio),
        "run.seed": str(run.seed),
        "validation.every": str(max(1, round(steps / VALIDATIONS))),
        "validation.sequences": str(2**17 // length),
        **extra,
    }


def probe_settings(run: Run, text: core.Settings, extra: core.Settings) -> core.Settings:
    """Return the settings of a short run that measures the speed, and compiles what a run needs."""
    steps = "100" if torch.cuda.is_available() else "30"
    length = {"training.steps": steps, "training.tokens_per_parameter": "0"}
    whole = settings_of(run, text, extra, FULL_RATIO)
    return whole | length | {"metrics.log_every": "10", "validation.every": "1000000"}


# --- the plan -------------------------------------------------------------------------------------


def runs_of(
    stage: Stage,
    workers: Iterable[int],
    every: Iterable[int],
    seeds: Iterable[int],
    beginnings: Iterable[float] = (0.0,),
) -> list[Run]:
    """Return the runs of a stage, of each seed the control first."""
    return [
        run
        for seed in seeds
        for run in (
            Run(stage, seed=seed),
            *(
                Run(stage, count, steps, seed, beginning)
                for count, steps, beginning in product(workers, every, beginnings)
            ),
        )
    ]


def plan_ratio(
    size: int, probes: Sequence[core.Record], seconds: float, at_once: int, text_tokens: int
) -> int:
    """Return the tokens per parameter that fit into the seconds for all runs of a stage, or 0.

    Runs that share a device are assumed to take as long as one after the other, at the best speed
    that each had beside the others: they may be sooner done, but hardly later.
    """
    starts = [probe["seconds"] - probe["tokens"] / probe["tokens_per_second"] for probe in probes]
    starting = max(0.0, *starts) * math.ceil(len(probes) / at_once)
    seconds_per_ratio = sum(size / probe["peak_tokens_per_second"] for probe in probes)
    fitting = math.floor((seconds - starting) / seconds_per_ratio)
    in_text = MOST_EPOCHS * text_tokens // size
    fewest: int = min(FULL_RATIO, fitting, in_text)
    return max(0, fewest)


def session_settings(extra: core.Settings) -> str:
    """Return the settings that a call has given to all its runs, for their records."""
    return " ".join(f"{key}={value}" for key, value in sorted(extra.items()))


def matches(record: core.Record, run: Run, extra: core.Settings) -> bool:
    """Return whether a record is of this run to its end, with any text and number of tokens."""
    names = run.names | {"extra": session_settings(extra)}
    return bool(record["finished"]) and {key: record[key] for key in names} == names


def is_complete(runs: Sequence[Run], known: Sequence[core.Record], extra: core.Settings) -> bool:
    """Return whether the records have all runs of a stage, with one text and as many tokens."""
    groups: dict[tuple[object, ...], set[Run]] = {}
    for record, run in product(known, runs):
        if matches(record, run, extra):
            key = record["text"], record["tokenizer"], record["tokens_per_parameter"]
            groups.setdefault(key, set()).add(run)
    return any(len(group) == len(runs) for group in groups.values())


# --- a stage --------------------------------------------------------------------------------------


class Session(NamedTuple):
    """What all stages of one call of this command share."""

    work: Path
    corpus: str
    extra: core.Settings
    at_once: int
    ratio: int
    """Tokens per parameter of all stages; 0: as many as fit into the time."""
    end: float
    """Of all runs, by the monotonic clock."""

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def text_of(self, stage: Stage) -> Text:
        tokenizer = "bytes" if stage.size < BYTES_BELOW else str(TOKENIZER)
        return prepare_text(self.work, self.corpus, tokenizer)

    def ratio_of(self, stage: Stage, runs: Sequence[Run], text: Text, *, full: bool) -> int:
        """Return the tokens per parameter of a stage, which stay once its runs are begun."""
        if self.ratio:
            return self.ratio
        begun = self.work / "plan.json"
        plan: dict[str, int] = json.loads(begun.read_text()) if begun.exists() else {}
        if chosen := plan.get(str(stage)):
            return chosen
        print(f"{stage}: measuring speeds", flush=True)
        kinds = {run._replace(seed=0): run for run in runs}
        short = {run: probe_settings(run, text.settings, self.extra) for run in kinds}
        probes = core.train_all(
            self.work / "speed", short, self.at_once, PROBE_SHARE * self.seconds_left()
        )
        if len(probes) < len(short):
            return 0
        ratio = plan_ratio(
            stage.size,
            [probes[run._replace(seed=0)] for run in runs],
            USED * self.seconds_left(),
            self.at_once,
            text.about["text_tokens"],
        )
        if ratio < (FULL_RATIO if full else 1):
            return 0
        begun.write_text(json.dumps(plan | {str(stage): ratio}))
        return ratio

    def train(
        self, stage: Stage, runs: Sequence[Run], made_by: records.Provenance, *, full: bool
    ) -> list[core.Record]:
        """Train the runs of a stage, and return their records: of those that were cut, too."""
        text = self.text_of(stage)
        ratio = self.ratio_of(stage, runs, text, full=full)
        if not ratio:
            print(f"{stage}: not begun, as its tokens do not fit into the time that is left")
            return []
        tokens = ratio * stage.size
        print(
            f"{stage}: {ratio} tokens a parameter = {tokens / 1e6:,.1f}M tokens, "
            f"{tokens / text.about['text_tokens']:.1f} epochs of the text, in each of {len(runs)} "
            f"runs; logs: {self.work / 'runs'}/*/run.txt",
            flush=True,
        )
        settings = {run: settings_of(run, text.settings, self.extra, ratio) for run in runs}
        folder = self.work / "runs"
        finished = core.train_all(
            folder,
            settings,
            self.at_once,
            self.seconds_left(),
            keep_checkpoints=True,
            made_by=asdict(made_by),
        )
        results = {
            run: finished.get(run) or read_cut(core.run_folder(folder, run, settings[run]) / "run")
            for run in runs
        }
        return [
            {
                **run.names,
                "finished": run in finished,
                "extra": session_settings(self.extra),
                "tokens_per_parameter": ratio,
                **text.about,
                **result,
                "settings": {
                    key: value for key, value in settings[run].items() if key not in text.settings
                },
            }
            for run, result in results.items()
            if result is not None
        ]


def read_cut(folder: Path) -> core.Record | None:
    """Return what a run that was cut has measured, or None if it was cut before a validation."""
    records = core.read_records(folder)
    if not any("loss/val" in record for record in records):
        return None
    return core.summarize_run(records)


# --- command line ---------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    if not re.fullmatch(r"\d+(\.\d+)?M", text) or not 0.04 <= float(text[:-1]) <= 1000:
        raise argparse.ArgumentTypeError(f"unknown size {text!r}: give 0.04M to 1000M, such as 4M")
    return round(float(text[:-1]) * 1e6)


def build_parser() -> argparse.ArgumentParser:
    parser = core.build_parser(__doc__)
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    sizes = "15M,35M" if on_gpu else "0.1M,0.4M,1.6M"
    add("--out", type=Path, metavar="DIR", help="folder of the results")
    add("--minutes", type=core.positive, help="time for all of it")
    add("--show", action="store_true", help="print the table of the records, and draw the sizes")
    add("--work", type=Path, default=Path("outputs/scale"), help="folder of texts and runs")
    add("--corpus", default="", help="text files, or a folder of token shards")
    add("--sizes", type=core.list_of(parse_size), default=sizes, help=f"default here: {sizes}")
    workers = core.one_of(("2", "4", "8"))  # divide every batch
    add("--workers", type=workers, default="2,4", help="M: default 2,4")
    add("--every", type=core.list_of(core.positive), default=[30], help="H: default 30")
    beginnings = "shares of the steps in which the workers average every two: default 0"
    add("--beginnings", type=core.list_of(float), default=[0.0], help=beginnings)
    ratio = f"tokens per parameter: default as many as fit into the time, at most {FULL_RATIO}"
    add("--ratio", type=core.positive, default=0, help=ratio)
    add("--optimizers", type=core.one_of(OPTIMIZERS), default="", help="default: adamw,muon")
    add("--seeds", type=core.list_of(int), default=[0], help="default 0")
    jobs = max(1, available_cores() // 5) if on_gpu else 1
    add("--parallel", type=core.positive, default=jobs, help=f"runs at once: default here {jobs}")
    return parser


def open_session(parser: argparse.ArgumentParser, words: list[str], started: float) -> Session:
    """Check the command line, and return what its stages share."""
    options, pairs = parser.parse_known_args(words)
    example = settings_of(Run(Stage(10**6, "muon"), 2, 30), {"data.tokenizer": "bytes"}, {}, 1.0)
    set_here = {*example, "run.folder", "data.corpus", "diloco.method"} - COMMON.keys()
    extra = core.parse_settings(parser, pairs, set_here)
    if torch.cuda.is_available():
        extra = {"compile.enable": "true"} | extra
    core.load(extra)
    work = options.work.resolve()
    for name, folder in (("--out", options.out), ("--work", work)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            parser.error(f"{name} {folder} cannot be written ({error}): choose another folder")
    end = started + 60 * options.minutes - RESERVED_SECONDS
    return Session(work, options.corpus, extra, options.parallel, options.ratio, end)


def main() -> None:
    parser = build_parser()
    words = sys.argv[1:]
    started = time.monotonic()
    options, _ = parser.parse_known_args(words)
    if options.show:
        scale_results.show(records.read("scale"))
        return
    if options.out is None or options.minutes is None:
        parser.error("give --minutes and --out, or --show")
    session = open_session(parser, words, started)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made_by = records.provenance("benchmarks.scale", words, device)
    known = records.read("scale", (records.RECORDS, options.out))
    measured = list[core.Record]()
    # All optimizers of a size come before the next size.
    names = product(sorted(set(options.sizes)), options.optimizers)
    workers = sorted(map(int, options.workers))
    stages = {
        stage: runs_of(stage, workers, options.every, options.seeds, options.beginnings)
        for stage in itertools.starmap(Stage, names)
    }
    for stage, runs in stages.items():
        for run in runs:
            core.load(settings_of(run, {"data.tokenizer": "bytes"}, session.extra, 1.0))
        if is_complete(runs, known, session.extra):
            print(f"{stage}: the records have it already")
            continue
        try:
            results = session.train(stage, runs, made_by, full=bool(measured))
        except UserError as error:
            parser.error(f"--corpus: {error}")
        if not results:
            break
        measured += records.stamped(results, made_by)
        records.write(options.out / records.file_name("scale", made_by), measured)
        scale_results.write(options.out, [*known, *measured], measured)
    if all(is_complete(runs, [*known, *measured], session.extra) for runs in stages.values()):
        print("nothing is left to measure: add --sizes, --optimizers or --seeds, or see --show")
    elif not measured:
        sys.exit("nothing was measured: give more --minutes, fewer --seeds, or smaller --sizes")


if __name__ == "__main__":
    main()
