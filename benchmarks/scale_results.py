"""Compare the runs that `benchmarks.scale` has recorded: a table, and two pictures."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks import core
from torchtitan_diloco.base.formatting import markdown_table
from torchtitan_diloco.base.user import REPOSITORY
from torchtitan_diloco.report.charts import AXIS, MUTED, STYLE, SVG, series_color, short_number

SIZES_PICTURE = REPOSITORY / "docs" / "images" / "sizes.svg"
HEADER = (
    "parameters | tokens | optimizer | workers | n | data parallel | streaming | "
    "against it, % | bits per byte | device, commit"
)
PAPER = {  # Streaming DiLoCo, C4, two workers: loss at parameters, printed with two decimals
    "data parallel": {35: 3.51, 100: 3.19, 200: 2.97, 300: 2.80, 500: 2.67, 1000: 2.49, 4000: 2.25},
    "H=30": {35: 3.53, 100: 3.21, 200: 2.98, 300: 2.81, 500: 2.67, 1000: 2.48},
    "H=100": {35: 3.56, 100: 3.22, 200: 3.00, 300: 2.83, 500: 2.69, 1000: 2.50, 4000: 2.26},
}


def describe_kind(run: Mapping[str, Any]) -> str:
    """Return the method of a run, from its record or its names."""
    if not run["every"]:
        return "data parallel"
    kind = f"M={run['workers']}, H={run['every']}"
    return f"{kind}, beginning {run['beginning']:g}" if run["beginning"] else kind


class Pair(NamedTuple):
    """Streaming and the data parallelism that it is compared with, after equal tokens."""

    row: core.Record
    control: core.Record
    tokens: int
    losses: tuple[float, float]
    """Of the control and of streaming."""

    @property
    def gap(self) -> float:
        """The loss of streaming against its control, in %."""
        control, streaming = self.losses
        return 100 * (streaming / control - 1)

    @property
    def is_whole(self) -> bool:
        return bool(self.row["finished"] and self.control["finished"])

    @property
    def group(self) -> tuple[object, ...]:
        """What runs of other seeds have in common with this one."""
        of_run = "size", "optimizer", "workers", "every", "beginning"
        of_call = "tokens_per_parameter", "text", "extra", "device"
        return (*(self.row[key] for key in (*of_run, *of_call)), self.is_whole)


def find_pairs(records: Sequence[core.Record]) -> list[Pair]:
    """Return the streaming runs whose control is there, in the order of their sizes.

    A run that was cut is compared at the last tokens after which both were validated.
    """
    same = "stage", "seed", "text", "tokenizer", "tokens_per_parameter", "extra", "device"
    controls = {
        tuple(record[key] for key in same): record for record in records if not record["every"]
    }
    pairs = list[Pair]()
    for row in records:
        control = controls.get(tuple(row[key] for key in same))
        if not row["every"] or control is None:
            continue
        of_control = dict(control["curve"])
        of_row = dict(row["curve"])
        if tokens_of_both := of_control.keys() & of_row.keys():
            tokens = max(tokens_of_both)
            pairs.append(Pair(row, control, tokens, (of_control[tokens], of_row[tokens])))
    order = "size", "optimizer", "workers", "every", "beginning", "seed"
    return sorted(pairs, key=lambda pair: tuple(pair.row[key] for key in order))


def group_seeds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs that differ only in their seeds together."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    return list(groups.values())


def table(records: Sequence[core.Record]) -> str:
    """Return a Markdown table of all streaming runs against their controls."""
    rows = list[list[str]]()
    for group in group_seeds(find_pairs(records)):
        first = group[0]
        gaps = [pair.gap for pair in group]
        controls = [pair.losses[0] for pair in group]
        streaming = [pair.losses[1] for pair in group]
        bits = [pair.row["bits_per_byte"] for pair in group]
        tokens = f"{first.tokens / 1e6:,.1f}M"
        if not first.is_whole:
            tokens += f" (cut, of {first.row['tokens_per_parameter']} a parameter)"
        rows.append(
            [
                f"{first.row['parameters'] / 1e6:.2f}M",
                tokens,
                str(first.row["optimizer"]),
                describe_kind(first.row),
                str(len(group)),
                core.summary(controls, ".4f", middle=statistics.mean),
                core.summary(streaming, ".4f", middle=statistics.mean),
                core.summary(gaps, "+.2f", middle=statistics.mean),
                core.summary(bits, ".4f", middle=statistics.mean),
                f"{first.row['device']}, {first.row['commit']}",
            ]
        )
    return markdown_table(HEADER.split(" | "), rows)


@rc_context(STYLE | SVG)
def draw_sizes(records: Sequence[core.Record], path: Path) -> None:
    """Draw what streaming loses over the size of the model, beside the points of the paper."""
    figure = Figure((9.2, 4.2), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="parameters")
    axes.set_ylabel("loss against data parallelism, %")
    axes.axhline(0, color=AXIS, lw=1)
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for group in group_seeds(find_pairs(records)):
        row = group[0].row
        gaps = [pair.gap for pair in group]
        if not group[0].is_whole:
            continue
        name = f"here: {row['optimizer']}, {describe_kind(row)}"
        mean = statistics.mean(gaps)
        point = row["parameters"], mean, mean - min(gaps), max(gaps) - mean
        curves.setdefault(name, []).append(point)
    for number, (name, points) in enumerate(sorted(curves.items())):
        sizes, means, below, above = zip(*sorted(points), strict=True)
        color = series_color(number)
        axes.errorbar(sizes, means, [below, above], fmt="o", color=color, capsize=4, label=name)
    for (name, losses), mark in zip(list(PAPER.items())[1:], "sD", strict=True):
        axes.plot(
            [1e6 * size for size in losses],
            [100 * (loss / PAPER["data parallel"][size] - 1) for size, loss in losses.items()],
            f"{mark}:",
            color=MUTED,
            markersize=4,
            label=f"the paper: M=2, {name}",
        )
    axes.xaxis.set_major_formatter(short_number)
    axes.legend(frameon=False, fontsize=9, ncols=2)
    figure.savefig(path, metadata={"Date": None})


@rc_context(STYLE | SVG)
def draw_curves(records: Sequence[core.Record], path: Path) -> None:
    """Draw the losses on held-out text of the runs of one call over their tokens."""
    figure = Figure((9.2, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens of all workers")
    axes.set_ylabel("loss on held-out text, nats per token")
    for number, record in enumerate(records):
        tokens, losses = zip(*record["curve"], strict=True)
        label = f"{record['stage']}, {describe_kind(record)}, seed {record['seed']}"
        axes.plot(tokens, losses, "o-", markersize=3, color=series_color(number), label=label)
    axes.xaxis.set_major_formatter(short_number)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def write(out: Path, records: Sequence[core.Record], measured: Sequence[core.Record]) -> None:
    """Write and print the table of what one call measured, and draw it beside all records."""
    stages = "; ".join(sorted({record["stage"] for record in measured}))
    made_by = measured[-1]
    cut = [
        f"- {record['stage']}, {describe_kind(record)}, seed {record['seed']}: cut by the time"
        for record in measured
        if not record["finished"]
    ]
    title = (
        f"{stages}: loss of the shared model on held-out text in nats per token after equal "
        f"tokens; streaming has fp4_e3m0, tau 1, alpha falling to 0. {made_by['device']}, "
        f"{made_by['versions']}, commit {made_by['commit']}, {made_by['date']} UTC: "
        f"{made_by['command']}"
    )
    text = "\n".join([title, "", table(measured), *cut, ""])
    (out / "scale.md").write_text(text, encoding="utf-8")
    draw_sizes(records, out / "sizes.svg")
    draw_curves(measured, out / "curves.svg")
    print(f"\n{text}\nwrote the records, scale.md, sizes.svg and curves.svg in {out}", flush=True)


def show(records: Sequence[core.Record]) -> None:
    """Print the table of all records, and draw the picture of the documentation."""
    print(table(records))
    draw_sizes(records, SIZES_PICTURE)
