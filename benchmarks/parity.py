"""Compare the loss of data parallelism, DiLoCo and streaming variants at equal tokens.

    .venv/bin/python -m benchmarks.parity --table parity [--corpus 'text/*.txt'] [--section.key ...]

The tables are in benchmarks/parity_tables.py. On 2 CPU cores, `parity` takes hours at full length
and the others about an hour each. `--short` runs one seed with a tenth of the steps.

Every run starts `torchtitan_diloco.launch` on the CPU, with one thread for each process.
Runs are kept in --out: the same command continues an interrupted table, and tables share runs. They
start seed by seed, in the order of the table. Without --corpus, the text is the source of the
Python standard library.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks import core
from benchmarks.parity_runs import run_folder, train_all
from benchmarks.parity_tables import RESERVED, TABLES, Table
from torchtitan_diloco.components.summary import all_reduce_bytes
from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.diloco.schedule import build_schedule
from torchtitan_diloco.planner.prediction import Conditions, Workload

BYTES = 256
"""Vocabulary."""
Losses = Mapping[int, float]
"""Loss of each seed."""


def against(losses: Losses, control: Losses) -> str:
    """Compare seed by seed, as runs of the same seed have much of their noise in common."""
    more = [100 * (losses[seed] / control[seed] - 1) for seed in losses if seed in control]
    return f"{core.mean(more, '+.2f')} %" if more else ""


def bytes_of_gradients(settings: core.Settings) -> float:
    """Return the bytes that data parallelism would send as bf16 gradients / those of this run."""
    config = load_config("debug", settings)
    load = Workload.of(config, BYTES)
    link = Conditions(1e12, (1.0,) * load.workers)
    sent = load.predict(config.diloco, link).sent_bytes_per_step
    return all_reduce_bytes(load.plan.parameters, load.workers) / sent if sent else 1.0


def print_losses(table: Table, steps: int, losses: Mapping[str, Losses]) -> None:
    """Compare each run with its own control and with the first run of the table."""
    rows, first = [], table.runs[0]
    for name, found in losses.items():
        if not found:
            continue
        control, run = table.control_of(name), table.settings(name, steps)
        rounds = share = "-"
        if run["diloco.method"] != "none":
            chosen = load_config("debug", run).diloco
            rounds_of = build_schedule(chosen, 1).outer_round
            rounds = str(rounds_of(0, steps) - rounds_of(0, table.begin(name, steps)))
            share = f"1/{bytes_of_gradients(run):.0f}" if chosen.workers > 1 else "0"
        of_control = "control" if name == control else against(found, losses[control])
        of_first = "" if first in (name, control) else against(found, losses.get(first, {}))
        loss, paper = core.mean(list(found.values()), ".4f"), table.paper.get(name, "")
        rows.append([name, share, rounds, str(len(found)), loss, of_control, of_first, paper])
    title = (
        f"validation loss of the shared model after {steps:,} steps = "
        f"{steps * table.tokens_per_step / 1e6:.1f}M tokens; n seeds, mean (min ... max); bytes "
        "are those of bf16 gradients at every step"
    )
    columns = f"run | bytes | rounds | n | loss | against its control | against {first} | papers"
    core.print_table(title, columns, rows)


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--table", choices=TABLES, default="parity")
    parser.add_argument("--corpus", default="stdlib")
    steps_help = "length of a run (default: the table's), to which warm-ups are scaled"
    parser.add_argument("--steps", type=core.positive, help=steps_help)
    parser.add_argument("--seeds", type=core.list_of(int), default=[0, 1, 2])
    parser.add_argument("--short", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument("--runs", default="", help="names, separated by ';' (default: all)")
    jobs_help = "training processes at once; a run has as many as workers"
    parser.add_argument("--jobs", type=core.positive, default=1, help=jobs_help)
    parser.add_argument("--out", type=core.folder, default=Path("outputs/parity"))
    options, words = parser.parse_known_args()
    extra, table = core.parse_settings(parser, words, RESERVED), TABLES[options.table]
    names = core.parse_names(parser, "--runs", options.runs, table.runs)
    names = list(dict.fromkeys([*map(table.control_of, names), *names]))
    steps = options.steps or (table.steps // 10 if options.short else table.steps)
    extra["data.corpus"] = options.corpus
    runs = {name: table.settings(name, steps) | extra for name in names}
    for run in runs.values():
        core.parse_config(parser, core.command_line(run))

    todo: list[tuple[int, str, core.Settings]] = []
    for seed in [0] if options.short else options.seeds:
        for name in names:
            run = runs[name] | {"run.seed": str(seed)}
            if step := table.begin(name, steps):
                control = runs[table.control_of(name)] | {"run.seed": str(seed)}
                path = run_folder(options.out, control) / "checkpoints" / f"step-{step:08d}"
                run["checkpoint.resume"] = str(path)
            todo.append((seed, name, run))
    named = [(f"seed {seed}, {name}", run) for seed, name, run in todo]
    trained = train_all(options.out, named, options.jobs)
    losses: dict[str, dict[int, float]] = {name: {} for name in names}
    for (seed, name, _), loss in zip(todo, trained, strict=True):
        losses[name][seed] = loss
    print_losses(table, steps, losses)


if __name__ == "__main__":
    main()
