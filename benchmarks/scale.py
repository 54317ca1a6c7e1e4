"""Compare streaming with data parallelism for models of several sizes, in a given time.

    .venv/bin/python -m benchmarks.scale --out DIR --minutes 40 [--section.key value ...]

On one GPU, whose workers share it, or in miniature on a CPU. A short run of each size measures its
speed. Then the plan chooses the tokens per parameter of each size, up to 20, so that its runs fit
into the minutes: the control of each optimizer with data parallelism, and streaming (fp4_e3m0,
tau 1, alpha falling to 0) with as many tokens. DIR holds everything: the same command skips what is
finished, continues what was cut, and plans the other sizes anew.

The text is the source of Python and its installed packages, as bytes. --corpus: other text, or a
folder of token shards, also of another tokenizer. Settings of the trainer hold for all runs, such
as `--compile.enable true`.
"""

import argparse
import json
import math
import random
import re
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import core
from benchmarks.parity import read_tables
from torchtitan_diloco.config.schema import Model
from torchtitan_diloco.data import corpus
from torchtitan_diloco.data.shards import INDEX_NAME, read_index
from torchtitan_diloco.data.text import open_corpus, standard_library
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.hardware import available_cores, describe_device
from torchtitan_diloco.log import UserError, markdown_table
from torchtitan_diloco.models import vocabulary_rows
from torchtitan_diloco.report.charts import LIGHT, STYLE, series_colour, short_number

RATIOS = 20.0, 10.0, 5.0, 2.0, 1.0
"""Tokens per parameter, of which the plan takes the most that fit."""
STEPS = 5_000
"""About the steps of a run of 20 tokens per parameter: with larger models, batches are larger."""
MOST_AT_ONCE = 2**15
"""Tokens of a forward pass."""
PROBE_STEPS, PROBE_SHARE = 30, 0.25
"""Steps that measure the speed, and the share of the time that all such runs may take."""
USED = 0.9
"""Share of the time that is planned for, as speeds vary."""
COMMON = {
    "optimizer.lr": "4e-3",
    "lr_schedule.warmup_fraction": "0.2",
    "validation.every": "1000000",  # at the end
    "checkpoint.every_minutes": "2",
    "checkpoint.keep_latest": "1",
    "metrics.tensorboard": "false",
    "run.restarts": "0",
    "run.device": "auto",
}
STREAMING = read_tables().parse_terms("tau 1, alpha falls, fp4_e3m0")
OPTIMIZERS: dict[str, core.Settings] = {"adamw": {}, "muon": read_tables().terms["Muon"]}
HEADER = "size | tokens | M | H | optimizer | data parallel | streaming | gap, % | bits per byte"
PAPERS = {"DiLoCo, M=2, H=30": "x", "streaming, M=2, H=30": "o", "streaming, M=2, H=100": "s"}
"""Runs of the papers at 35M in the tables of benchmarks.parity, and how they are drawn."""


def name_of(size: int) -> str:
    return f"{size / 1e6:g}M"


class Run(NamedTuple):
    size: int
    """Parameters as asked for."""
    optimizer: str
    workers: int = 1
    """1: data parallelism in one process, whose samples are those of any number of workers."""
    every: int = 0

    @property
    def control(self) -> "Run":
        return Run(self.size, self.optimizer)

    def __str__(self) -> str:
        kind = f"M={self.workers}, H={self.every}" if self.every else "data parallel"
        return f"{name_of(self.size)}, {self.optimizer}, {kind}"


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


def prepare_text(out: Path, source: str) -> core.Settings:
    """Return the settings of token shards, which are made in `out` unless `source` has some."""
    if (Path(source) / INDEX_NAME).exists():
        tokenizer = str(read_index(Path(source) / INDEX_NAME).settings["tokenizer"])
        return {"data.corpus": source, "data.tokenizer": tokenizer}
    shards = out / "tokens"
    if not (shards / INDEX_NAME).exists():
        if not source:
            source = str(out / "sources.jsonl")
            write_sources(Path(source))
        open_corpus(source)  # raises an error of one line
        corpus.main(["--source", source, "--tokenizer", "bytes", "--out", str(shards)])
    return {"data.corpus": str(shards), "data.tokenizer": "bytes"}


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
    tokens: int = 2 ** round(math.log2(max(512, RATIOS[0] * size / STEPS)))
    length = min(1024, max(64, tokens // 16))
    return tokens // length, length


def settings_of(run: Run, text: core.Settings, extra: core.Settings, ratio: float) -> core.Settings:
    """Return the settings of a run of so many tokens per parameter."""
    sequences, length = batch_of(run.size)
    at_once = max(1, min(sequences // run.workers, MOST_AT_ONCE // length))
    outer = STREAMING | {"diloco.sync_every": str(run.every)}
    return {
        **COMMON,
        **text,
        **shape_of(run.size, text["data.tokenizer"]),
        **OPTIMIZERS[run.optimizer],
        **(outer if run.every else {"diloco.method": "none"}),
        "diloco.workers": str(run.workers),
        "training.sequence_length": str(length),
        "training.global_batch_size": str(sequences),
        "training.batch_size": str(at_once),
        "training.steps": "0",
        "training.tokens_per_parameter": str(ratio),
        "validation.sequences": str(2**17 // length),
        **extra,
    }


# --- the plan -------------------------------------------------------------------------------------

Cost = Callable[[Run, float], float]
"""Seconds of a run of so many tokens per parameter, 0 if it is finished."""


def runs_of(size: int, rows: Sequence[Run]) -> list[Run]:
    """Return the rows of a size, each after its control."""
    pairs = ((row.control, row) for row in rows if row.size == size)
    return list(dict.fromkeys(run for pair in pairs for run in pair))


def plan(
    rows: Sequence[Run], cost: Cost, seconds: float, begun: Mapping[int, float], jobs: int = 1
) -> dict[int, float]:
    """Choose the tokens per parameter of each size whose runs fit. Those of `begun` are known.

    The smallest size comes first. It may take an equal share of the time, and leaves the rest to
    the others.
    """
    chosen = dict[int, float]()
    sizes = sorted({row.size for row in rows})
    for number, size in enumerate(sizes):
        share = seconds / (len(sizes) - number)
        for ratio in [begun[size]] if size in begun else RATIOS:
            costs = [cost(run, ratio) for run in runs_of(size, rows)]
            taken = max(*costs, sum(costs) / jobs)
            if taken <= share or size in begun:
                chosen[size], seconds = ratio, seconds - taken
                break
    return chosen


def seconds_of(run: Run, ratio: float, probes: Mapping[Run, core.Record]) -> float:
    """Return the seconds of a run by the speed of short ones, with the start and the validation."""
    alike = (one for one in probes if one.size == run.size and bool(one.every) == bool(run.every))
    if (probe := probes.get(next(alike, run))) is None:
        return math.inf
    speed, tokens = probe["tokens_per_second"], ratio * run.size
    return float(max(0.0, probe["seconds"] - probe["tokens"] / speed) + tokens / speed)


def describe_cuts(
    rows: Sequence[Run], chosen: Mapping[int, float], results: Mapping[Run, core.Record]
) -> list[str]:
    """Return a line for each thing that the time did not allow."""
    lines = []
    for size in sorted({row.size for row in rows}):
        if size not in chosen:
            lines.append(f"{name_of(size)}: not begun")
            continue
        if chosen[size] < RATIOS[0]:
            lines.append(f"{name_of(size)}: {chosen[size]:g} tokens a parameter instead of 20")
        lines += [f"{run}: not finished" for run in runs_of(size, rows) if run not in results]
    return lines


# --- results --------------------------------------------------------------------------------------


def gaps(rows: Sequence[Run], results: Mapping[Run, core.Record]) -> dict[Run, float]:
    """Return the loss of rows against that of their controls, in %, if both are finished."""
    return {
        row: 100 * (results[row]["loss"] / results[row.control]["loss"] - 1)
        for row in rows
        if row in results and row.control in results
    }


@rc_context(STYLE)
def draw(rows: Sequence[Run], results: Mapping[Run, core.Record], path: Path) -> None:
    """Draw the gaps over the size, with those of the papers."""
    figure = Figure((9.2, 4.2), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="parameters")
    axes.set_ylabel("loss against data parallelism, %")
    axes.axhline(0, color=LIGHT["axis"], lw=1)
    curves: dict[str, list[tuple[float, float]]] = {}
    for row, gap in gaps(rows, results).items():
        name = str(row).partition(", ")[2]
        curves.setdefault(name, []).append((results[row]["parameters"], gap))
    for number, (name, points) in enumerate(curves.items()):
        colour = LIGHT[series_colour(number)]
        axes.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=name)
    for name, text in read_tables().tables["parity"].papers.items():
        value, mark = float(text.removesuffix("%")), PAPERS[name]
        axes.plot(35e6, value, mark, color=LIGHT["muted"], ls="", label=f"papers: {name}")
    axes.xaxis.set_major_formatter(short_number)
    axes.legend(frameon=False, fontsize=9, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def write_results(
    out: Path, title: str, rows: Sequence[Run], results: Mapping[Run, core.Record], cuts: list[str]
) -> None:
    """Write and print the table, and write the results and the picture."""
    found = gaps(rows, results)
    lines = [
        [
            f"{results[row]['parameters'] / 1e6:.2f}M",
            f"{results[row]['tokens'] / 1e6:,.1f}M",
            str(row.workers),
            str(row.every),
            row.optimizer,
            f"{results[row.control]['loss']:.4f}",
            f"{results[row]['loss']:.4f}",
            f"{gap:+.2f}",
            f"{results[row]['bits_per_byte']:.4f}",
        ]
        for row, gap in found.items()
    ]
    table = markdown_table(HEADER.split(" | "), lines)
    listed = "".join(f"\n- {line}" for line in cuts)
    text = f"{title}\n\n{table}\n" + (f"\nCut to fit the time:\n{listed}\n" if cuts else "")
    (out / "table.md").write_text(text)
    with (out / "results.jsonl").open("w") as file:
        for run, result in results.items():
            more = {"gap_percent": found[run]} if run in found else {}
            file.write(json.dumps({**run._asdict(), **result, **more}) + "\n")
    draw(rows, results, out / "gap.svg")
    print(f"\n{text}\nwrote {out}/table.md, results.jsonl and gap.svg")


# --- command line ---------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    if not re.fullmatch(r"\d+(\.\d+)?M", text) or not 0.04 <= float(text[:-1]) <= 1000:
        raise argparse.ArgumentTypeError(f"unknown size {text!r}: give 0.04M to 1000M, such as 4M")
    return round(float(text[:-1]) * 1e6)


def build_parser() -> argparse.ArgumentParser:
    parser, on_gpu = core.build_parser(__doc__), torch.cuda.is_available()
    add, sizes = parser.add_argument, "1M,4M,15M,35M" if on_gpu else "0.1M,0.4M,1M"
    add("--out", type=Path, required=True, metavar="DIR")
    add("--minutes", type=core.positive, required=True)
    add("--corpus", default="", help="text files, or a folder of token shards")
    add("--sizes", type=core.list_of(parse_size), default=sizes, help=f"default here: {sizes}")
    workers = core.one_of(("2", "4", "8"))  # divide every batch
    add("--workers", type=workers, default="2,4", help="M: default 2,4")
    add("--every", type=core.list_of(core.positive), default=[30, 100], help="H: default 30,100")
    add("--optimizers", type=core.one_of(OPTIMIZERS), default="", help="default: adamw,muon")
    jobs = max(1, available_cores() // 4) if on_gpu else 1
    add("--parallel", type=core.positive, default=jobs, help=f"runs at once: default here {jobs}")
    return parser


def main() -> None:
    parser, started = build_parser(), time.monotonic()
    options, words = parser.parse_known_args()
    example = settings_of(Run(10**6, "muon", 2, 30), {"data.tokenizer": "bytes"}, {}, 1.0)
    own = {*example, "run.folder", "data.corpus", "diloco.method"} - COMMON.keys()
    extra = core.parse_settings(parser, words, own)
    core.load(extra)
    out = options.out.resolve()
    known = out / "plan.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        known.touch()
        text = prepare_text(out, options.corpus)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be written ({error}): choose another folder")
    except UserError as error:
        parser.error(f"--corpus: {error}")

    def left() -> float:
        return float(60 * options.minutes - (time.monotonic() - started))

    def settings(run: Run, ratio: float) -> core.Settings:
        return settings_of(run, text, extra, ratio)

    def cost(run: Run, ratio: float) -> float:
        done = core.run_folder(out / "runs", run, settings(run, ratio)) / core.FINISHED
        return 0.0 if done.exists() else seconds_of(run, ratio, probes)

    def probe(run: Run) -> core.Settings:
        return settings(run, 0.0) | {"training.steps": str(PROBE_STEPS), "metrics.log_every": "10"}

    sizes, workers = sorted(set(options.sizes)), sorted(map(int, options.workers))
    rows = [Run(*one) for one in product(sizes, options.optimizers, workers, options.every)]
    slowest = [Run(size, options.optimizers[0], workers[-1], options.every[0]) for size in sizes]
    for run in rows:
        core.load(settings(run, 1.0))
    print("measuring speeds", flush=True)
    measured = {run: probe(run) for row in slowest for run in (row.control, row)}
    probes = core.train_all(out / "speed", measured, options.parallel, PROBE_SHARE * left())
    begun = {int(size): ratio for size, ratio in json.loads(known.read_text() or "{}").items()}
    chosen = plan(rows, cost, USED * left(), begun, options.parallel)
    known.write_text(json.dumps(begun | chosen))
    tokens = read_index(Path(text["data.corpus"]) / INDEX_NAME).splits["train"].tokens
    print(f"\nplan, for a text of {tokens / 1e6:,.1f}M tokens")
    for size, ratio in chosen.items():
        minutes = sum(cost(run, ratio) for run in runs_of(size, rows)) / 60
        print(f"{name_of(size)}: {ratio:g} tokens a parameter, {minutes:.1f} minutes for all runs")
    runs = {
        run: settings(run, ratio) for size, ratio in chosen.items() for run in runs_of(size, rows)
    }
    results = core.train_all(out / "runs", runs, options.parallel, left())
    where = describe_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    title = (
        "loss of the shared model on held-out text in nats per token, n = 1; streaming has "
        f"fp4_e3m0, tau 1, alpha falling to 0; {where}; torch {torch.__version__}"
    )
    write_results(out, title, rows, results, describe_cuts(rows, chosen, results))


if __name__ == "__main__":
    main()
