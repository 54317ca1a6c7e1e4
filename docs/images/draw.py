"""Draw the pictures of the documentation: python docs/images/draw.py [OUTPUT]

The pictures of losses read their numbers from benchmarks/records/loss.md. OUTPUT: what
`./run_train.sh` has printed, for the picture of a terminal.
"""

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
LOSSES = HERE.parents[1] / "benchmarks/records/loss.md"
INK = "#1f2933"
FAINT = "#616e7c"
GREY = "#9aa5b1"
PAPER = "#ffffff"
TRAIN = "#dde4ec"
FRAGMENTS = ("#2f6fb3", "#d9822b", "#2e8b6f")
MODEL = "0.12M parameters"
"""Size of all models in benchmarks/records/loss.md that do not name another."""
plt.rcParams.update(
    {
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "torchtitan_diloco",
        "text.color": INK,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
    }
)


def bar(axes: Axes, x: float, y: float, width: float, color: str, text: str = "") -> None:
    style = "round,pad=0,rounding_size=0.04"
    box = FancyBboxPatch((x, y), width, 0.5, style, mutation_aspect=0.3, color=color, lw=0)
    axes.add_patch(box)
    light = color == TRAIN
    axes.text(
        x + width / 2, y + 0.24, text, ha="center", va="center", color=INK if light else PAPER
    )


def bare_axes(width: float, height: float) -> Axes:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.set_yticks([])
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)
    figure.set_constrained_layout_pads(w_pad=0.1, h_pad=0.08)
    return axes


def save(axes: Axes, name: str) -> None:
    figure = axes.figure
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close("all")


def draw_turns() -> None:
    """Draw two cycles of H steps in which three fragments take turns."""
    axes = bare_axes(9.2, 3.1)
    cycle = 6.0
    delay = 1.4
    for worker, base in ((0, 2.6), (1, 0.2)):
        axes.text(-0.15, base + 1.02, f"worker {worker}", ha="right", weight="bold")
        axes.text(-0.15, base + 0.75, "trains (FSDP2)", ha="right", color=FAINT)
        axes.text(-0.15, base + 0.12, "exchanges", ha="right", color=FAINT)
        bar(axes, 0, base + 0.75, 2.2 * cycle, TRAIN, "inner steps, never stopped")
        for turn in range(6):
            sent = 0.6 + turn * cycle / 3
            fragment = turn % 3
            bar(axes, sent, base, delay, FRAGMENTS[fragment], f"{fragment + 1}")
            for x, start, end in (
                (sent, base + 0.73, base + 0.5),
                (sent + delay, base + 0.5, base + 0.73),
            ):
                arrow = {"arrowstyle": "-|>", "color": FRAGMENTS[fragment], "lw": 1.4}
                axes.annotate("", (x, end), (x, start), arrowprops=arrow)
            if worker == 0:
                axes.plot(
                    [sent + delay / 2] * 2, [1.47, 2.58], ":", color=FRAGMENTS[fragment], lw=1.2
                )
    link = "slow link: one fragment at a time, 4 bits a parameter"
    axes.text(6.6, 2.02, link, ha="center", va="center", backgroundcolor=PAPER)
    span = {"arrowstyle": "<->", "color": INK, "lw": 0.9}
    axes.annotate("", (0.6, 4.05), (0.6 + cycle, 4.05), arrowprops=span)
    axes.text(0.6 + cycle / 2, 4.12, "H steps between two exchanges of a fragment", ha="center")
    axes.annotate("", (0.6 + cycle, 4.05), (0.6 + cycle + delay, 4.05), arrowprops=span)
    axes.text(0.6 + cycle + delay / 2, 4.12, "τ", ha="center")
    axes.set(xlim=(-2.3, 13.3), ylim=(0, 4.45), xticks=[])
    save(axes, "turns")


def draw_exchange() -> None:
    """Draw one exchange of a fragment in four chunks, between two workers."""
    axes = bare_axes(9.2, 2.9)
    lanes = {
        "training thread": 3,
        "exchange: encode": 2.25,
        "on the wire": 1.5,
        "decode, mean in fp32": 0.75,
        "outer step": 0,
    }
    for name, y in lanes.items():
        axes.text(-0.15, y + 0.17, name, ha="right")
    blue, orange, green = FRAGMENTS
    bar(axes, 0, 3, 0.9, blue, "its change")
    bar(axes, 0.9, 3, 9.0, TRAIN, "τ inner steps")
    bar(axes, 9.9, 3, 0.9, blue, "apply")
    bar(axes, 10.8, 3, 1.0, TRAIN)
    bar(axes, 0.95, 1.5, 0.5, GREY)
    axes.annotate(
        "header: 64 bytes", (1.2, 1.5), (0.3, 0.55), color=INK, arrowprops={"arrowstyle": "-"}
    )
    for chunk in range(4):
        bar(axes, 1.5 + 0.8 * chunk, 2.25, 0.7, orange, f"{chunk + 1}")
        bar(axes, 2.3 + 1.4 * chunk, 1.5, 1.3, green, f"chunk {chunk + 1}")
        bar(axes, 3.7 + 1.4 * chunk, 0.75, 0.6, orange, f"{chunk + 1}")
    bar(axes, 8.55, 0, 1.2, blue, "Nesterov")
    axes.set(xlim=(-2.6, 11.9), ylim=(-0.1, 3.6), xticks=[])
    save(axes, "exchange")


def draw_fragment() -> None:
    """Draw the life of a fragment between two exchanges, on two workers and between them."""
    axes = bare_axes(9.2, 3.4)
    blue, orange, green = FRAGMENTS
    for worker, y in ((0, 2.7), (1, 0.0)):
        axes.text(-0.2, y + 0.24, f"worker {worker}", ha="right", va="center", weight="bold")
        bar(axes, 0, y, 2.7, TRAIN, "trains, H steps")
        bar(axes, 2.75, y, 1.65, blue, "its change")
        bar(axes, 4.45, y, 2.5, TRAIN, "trains on, τ steps")
        bar(axes, 7.0, y, 2.05, blue, "mixes it in")
        bar(axes, 9.1, y, 1.9, TRAIN, "trains on")
    bar(axes, 2.4, 1.35, 1.6, orange, "in 4 bits")
    bar(axes, 4.25, 1.35, 1.5, green, "average")
    bar(axes, 6.0, 1.35, 1.9, green, "outer optimizer")
    bar(axes, 8.15, 1.35, 2.3, green, "shared parameters")
    arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.2}
    for y, end in ((2.68, 1.87), (0.52, 1.33)):
        axes.annotate("", (3.2, end), (3.4, y), arrowprops=arrow)
        axes.annotate("", (8.1, y), (8.9, end), arrowprops=arrow)
    for begin, end in ((4.0, 4.25), (5.75, 6.0), (7.9, 8.15)):
        axes.annotate("", (end + 0.04, 1.59), (begin - 0.04, 1.59), arrowprops=arrow)
    axes.text(-0.2, 1.59, "slow link,\nin the background", ha="right", va="center", color=FAINT)
    axes.text(
        3.6,
        3.32,
        "of one fragment, since\nits last exchange",
        ha="center",
        color=FAINT,
        size=9,
    )
    axes.text(
        8.05,
        3.32,
        "a share of its own values,\nthe rest of the shared ones",
        ha="center",
        color=FAINT,
        size=9,
    )
    axes.set(xlim=(-1.7, 11.1), ylim=(-0.1, 3.9), xticks=[])
    save(axes, "fragment")


def draw_run_folder() -> None:
    """Draw the files of a run, and the command or program that reads each."""
    axes = bare_axes(9.2, 3.9)
    blue, orange, green = FRAGMENTS
    rows = [
        (0, "config.toml", "all settings", "./run_train.sh --config: the same run again", blue),
        (0, "worker-0/ ...", "", "", INK),
        (1, "metrics.jsonl", "steps, rounds", "report, plan --run", orange),
        (1, "events.out.tfevents...", "curves", ".venv/bin/tensorboard --logdir", orange),
        (1, "step-00001000/ ...", "", "", green),
        (2, "manifest.json", "step, position, checksums", "resume", green),
        (2, "rank-0.safetensors", "shared, own parameters", "export, generate", green),
    ]
    axes.text(0, 7.5, "run.folder", weight="bold", va="center")
    for row, (level, name, holds, reader, color) in enumerate(rows):
        y = 6.5 - row
        inside = 0.7 * level
        above = y + (0.9 if row in (0, 2, 5) else 1.24)
        axes.plot(
            [0.15 + inside, 0.15 + inside, 0.5 + inside],
            [above, y + 0.24, y + 0.24],
            color=GREY,
            lw=1,
        )
        axes.text(0.6 + inside, y + 0.24, name, va="center", family="DejaVu Sans Mono", color=color)
        axes.text(4.7, y + 0.24, holds, va="center")
        if reader:
            axes.annotate(
                "",
                (8.3, y + 0.24),
                (7.7, y + 0.24),
                arrowprops={"arrowstyle": "-|>", "color": GREY},
            )
            axes.text(8.4, y + 0.24, reader, va="center", color=INK)
    axes.set(xlim=(-0.1, 13.2), ylim=(0.2, 8), xticks=[])
    save(axes, "run-folder")


def draw_losses() -> None:
    """Draw the table of 9,000 steps in benchmarks/records/loss.md."""
    page = LOSSES.read_text(encoding="utf-8")
    table = page[page.index("| run | rounds | loss, % |") :]
    pattern = r"^\| ([^|]+?) \| \d+ \| ([+-][\d.]+) \(([+-][\d.]+) \.\.\. ([+-][\d.]+)\)"
    rows = re.findall(pattern, table[: table.index("\n\n")], re.M)[::-1]
    figure, axes = plt.subplots(figsize=(9.2, 3.2), layout="constrained")
    for y, (name, mean, least, greatest) in enumerate(rows):
        middle = float(mean)
        low = float(least)
        high = float(greatest)
        axes.plot([low, high], [y, y], color=FRAGMENTS[0], lw=5, alpha=0.35, solid_capstyle="round")
        axes.plot(middle, y, "o", color=FRAGMENTS[0])
        axes.text(high + 0.12, y, f"{middle:+.2f} %", va="center")
        axes.text(-0.75, y, name, ha="right", va="center")
    axes.axvline(0, color=GREY, lw=1)
    axes.set(yticks=[], xlim=(-0.7, 4.9), ylim=(-0.6, len(rows) - 0.4))
    label = f"loss against data parallelism, % (mean, range of three seeds; {MODEL}, 4.6M tokens)"
    axes.set_xlabel(label, x=0.35)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    figure.savefig(HERE / "losses.svg", metadata={"Date": None})
    plt.close("all")


def draw_bytes() -> None:
    """Draw the runs of 3,000 steps in benchmarks/records/loss.md, by method."""
    page = LOSSES.read_text(encoding="utf-8")
    dense = page[page.index("| 3,000 |") : page.index("| 9,000 |")]
    sparse = page[page.index("**Sparse deltas**") : page.index("**Other settings.**")]
    # The last column is against AdamW's data parallelism.
    share = r"(1|1/[\d,]+)"
    last = r"(?:.*\|)? ([+-][\d.]+)[^|]*"
    pattern = rf"^\|.*?((?:AdamW|Muon), [^|:]+?) \| {share} \|{last}\|[ |]*$"
    rows = re.findall(pattern, dense, re.M)
    run = r"(AdamW, topk \d+, H = \d+|Muon, topk \d+, H = \d+), against AdamW's"
    rows += re.findall(rf"^\| {run} \| {share} \| ([+-][\d.]+)", sparse, re.M)
    curves: dict[str, list[tuple[float, float]]] = {}
    figure, axes = plt.subplots(figsize=(9.2, 4.2), layout="constrained")
    controls = {"AdamW, data parallel": 0.0}
    for name, ratio, loss in rows:
        if name.endswith("data parallel"):
            controls[name] = float(loss)
        else:
            method = re.sub(r", H = \d+|(?<=topk) \d+", "", name)
            part = 1 / float(ratio[2:].replace(",", ""))
            curves.setdefault(method, []).append((part, float(loss)))
    for name, gap in controls.items():
        axes.axhline(gap, color=GREY, lw=1, ls="--")
        axes.text(1 / 1100, gap, name, ha="left", va="bottom")
    for method, points in curves.items():
        if len(points) > 1 or "topk" in method:
            axes.plot(*zip(*sorted(points), strict=True), "o-", lw=1.4, label=method)
    axes.set(xscale="log", ylabel="loss against AdamW's data parallelism, %")
    axes.set_xlabel(f"bytes a step, as a share of bf16 gradients ({MODEL}, 1.5M tokens)", x=0.5)
    ticks = [1 / 30, 1 / 100, 1 / 300, 1 / 1000]
    axes.set_xticks(ticks, [f"1/{round(1 / tick):,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(top=7)
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    for side in ("right", "top"):
        axes.spines[side].set_visible(False)
    figure.savefig(HERE / "bytes.svg", metadata={"Date": None})
    plt.close("all")


def draw_islands() -> None:
    """Draw three islands, a store and the syncer: one comes late, one is cut off, one dies."""
    axes = bare_axes(9.2, 4.3)
    blue, orange, green = FRAGMENTS
    versions = [1.6, 3.6, 5.6, 7.6, 9.6]
    lives = {  # rows, times in which the island trains, times in which it can reach the store
        "amsterdam": (3.7, [(0, 11)], [(0, 11)]),
        "berlin": (2.9, [(0, 11)], [(0, 4.2), (6.4, 11)]),
        "chicago": (2.1, [(2.4, 6.9), (8.6, 11)], [(2.4, 6.9), (8.6, 11)]),
    }
    for name, (y, trains, reaches) in lives.items():
        axes.text(-0.15, y + 0.2, name, ha="right", weight="bold")
        for begin, end in trains:
            bar(axes, begin, y, end - begin, TRAIN)
        for at in versions:
            if any(begin + 0.7 < at < end - 0.5 for begin, end in reaches):
                # Behind the bars of the other islands, so that they cross no label.
                up = {"arrowstyle": "-|>", "color": blue, "lw": 1.2, "alpha": 0.7}
                axes.annotate("", (at - 0.3, 1.52), (at - 0.55, y), arrowprops=up, zorder=0.5)
                down = {"arrowstyle": "-|>", "color": green, "lw": 1.2, "alpha": 0.7}
                axes.annotate("", (at + 0.55, y), (at + 0.3, 1.52), arrowprops=down, zorder=0.5)
    axes.text(5.3, 3.14, "no connection: it trains on", ha="center", va="center", color=orange)
    axes.text(6.85, 2.34, "killed", ha="right", va="center", color=orange)
    axes.text(8.65, 2.34, "again", va="center", color=green)
    axes.text(2.45, 2.34, "joins", va="center", color=green)
    axes.text(-0.15, 1.2, "store", ha="right", weight="bold")
    axes.plot([0, 11, 11, 0, 0], [1.0, 1.0, 1.5, 1.5, 1.0], color=GREY, lw=1, zorder=0)
    axes.text(-0.15, 0.2, "syncer", ha="right", weight="bold")
    for number, at in enumerate(versions, start=1):
        axes.text(at, 1.24, f"parts, version {number}", ha="center", va="center", size=9)
        bar(axes, at - 0.45, 0.0, 0.9, green, "merges")
        for x, start, end, color in (
            (at - 0.25, 0.98, 0.52, blue),
            (at + 0.25, 0.52, 0.98, green),
        ):
            arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.2}
            axes.annotate("", (x, end), (x, start), arrowprops=arrow)
    axes.text(
        5.5,
        -0.42,
        "the parts of all islands that are there make the next version, which every island adds "
        "to its copy",
        ha="center",
        color=INK,
    )
    axes.set(xlim=(-1.6, 11.2), ylim=(-0.6, 4.3), xticks=[])
    save(axes, "islands")


def draw_two_sites() -> None:
    """Draw two sites of eight GPUs: as one world over a tunnel, and as islands with a bucket."""
    axes = bare_axes(9.2, 3.9)
    blue, orange, green = FRAGMENTS
    for site, x in (("site A: 203.0.113.10", 0.0), ("site B: 198.51.100.20", 7.0)):
        worker = 0 if x == 0 else 1
        axes.text(x + 2, 4.25, site, ha="center", weight="bold")
        axes.add_patch(FancyBboxPatch((x, 0.3), 4, 3.7, "round,pad=0", fill=False, edgecolor=GREY))
        axes.text(x + 2, 3.62, f"worker {worker}: eight ranks", ha="center")
        for number in range(8):
            column = number % 4
            row = number // 4
            bar(axes, x + 0.3 + 0.88 * column, 2.9 - 0.65 * row, 0.76, TRAIN, f"GPU {number}")
        axes.text(x + 2, 1.88, "FSDP2 inside: NCCL, NVLink", ha="center", color=FAINT)
        bar(axes, x + 0.3, 1.2, 3.4, green, "run.folder of this site")
        axes.text(x + 2, 0.62, "the same corpus, a copy", ha="center", color=FAINT)
    arrow_of_both = {"arrowstyle": "<|-|>", "color": blue, "lw": 1.6}
    axes.annotate("", (4.05, 2.7), (6.95, 2.7), arrowprops=arrow_of_both)
    axes.text(5.5, 2.85, "one world: wg0 (UDP 51820)", ha="center", color=blue, size=9)
    axes.text(5.5, 2.32, "rank r with rank r + 8", ha="center", color=blue, size=9)
    bar(axes, 4.6, 0.75, 1.8, orange, "bucket")
    for begin, end in (((4.05, 1.6), (4.9, 1.3)), ((6.95, 1.6), (6.1, 1.3))):
        arrow = {"arrowstyle": "-|>", "color": orange, "lw": 1.6}
        axes.annotate("", end, begin, arrowprops=arrow)
    axes.text(5.5, 1.72, "or islands: each connects", ha="center", color=orange, size=9)
    axes.text(5.5, 0.42, "one port, TLS", ha="center", color=orange, size=9)
    axes.set(xlim=(-0.1, 11.1), ylim=(0.2, 4.6), xticks=[])
    save(axes, "two-sites")


def draw_terminal(output: Path) -> None:
    """Draw the beginning and the end of a run, with its result in green."""
    known = ("setting up", "data: ", "step       ", "step    1/")
    lines = [line for line in output.read_text().splitlines() if not line.startswith(known)]
    steps = [number for number, line in enumerate(lines) if re.match(r"step +\d", line)]
    result = next(number for number, line in enumerate(lines) if line.startswith("loss of the"))
    shown = [f"$ ./run_train.sh\n{lines[0]}", *lines[1 : steps[2]], "..."]
    shown = "\n".join([*shown, *lines[steps[-4] :]]).splitlines()
    green = len(shown) - (len(lines) - result)
    rows = []
    for number, line in enumerate(shown):
        color = "#9fe0a8" if green <= number < len(shown) - 1 else "#e5e9ee"
        color = color if number else "#7cc4ff"
        text = escape(line if len(line) <= 135 else line[:134] + "…")
        y = 24 + 17 * number
        rows.append(f'<text x="14" y="{y}" fill="{color}" xml:space="preserve">{text}</text>')
    height = 24 + 17 * len(shown)
    font = "DejaVu Sans Mono, Menlo, Consolas, monospace"
    size = f'width="1010" height="{height}" viewBox="0 0 1010 {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{font}" font-size="12">'
    paper = '<rect width="100%" height="100%" rx="6" fill="#16191d"/>'
    (HERE / "terminal.svg").write_text("\n".join([head, paper, *rows, "</svg>\n"]))


if __name__ == "__main__":
    if sys.argv[1:]:
        draw_terminal(Path(sys.argv[1]))
    pictures = draw_turns, draw_two_sites, draw_islands, draw_fragment, draw_run_folder
    for draw in (*pictures, draw_exchange, draw_losses, draw_bytes):
        draw()
