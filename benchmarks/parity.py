"""Loss of the shared model at equal tokens: data parallelism, DiLoCo and streaming variants, several seeds.

    python -m benchmarks.parity --table parity [--corpus 'text/*.txt'] [--seeds 0,1,2] [--short]
                                [--steps N] [--runs 'NAME;...'] [--out outputs/parity] [--section.key value ...]

The tables are those of `benchmarks/parity_tables.py`. At full length `parity` takes hours on 2 CPU cores and the others about
an hour each; `--short` is one seed of a tenth of the steps, warm-ups and beginnings included, in minutes.

Every run is a real one (`python -m torchtitan_diloco.launch`, gloo processes on the CPU), and is kept in --out. The same
command again goes on where it was interrupted; a run that another table has too is not repeated. The table of the seeds that
are complete is printed each time one is. Without --corpus the text is the Python standard library's source.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import further_settings, positive
from benchmarks.parity_tables import SET_BY_THE_TABLE, TABLES, Settings, Table
from benchmarks.table import print_table
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.schema import flat_settings

LOSS = "validation/loss_nats_per_token_global"


def command_line(settings: Settings) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def run_folder(out: Path, settings: Settings) -> Path:
    """One folder for each thing that a run may be, defaults included: tables share their runs and never mistake them."""
    config = from_command_line(command_line(settings))
    assert config is not None
    resolved = {key: str(value) for key, value in flat_settings(config).items()}
    digest = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{config.training.steps}-steps-seed{config.run.seed}-{digest}"


def train(out: Path, settings: Settings) -> float:
    """The last validation loss of a run, which is started, or goes on, unless its folder says that it has finished."""
    folder = run_folder(out, settings)
    finished = folder / "finished.json"
    if finished.exists():
        return float(json.loads(finished.read_text())["loss"])
    if "checkpoint.resume" in settings or not (folder / "checkpoints").exists():
        shutil.rmtree(folder, ignore_errors=True)  # an earlier start came to nothing
    command = [
        sys.executable,
        "-m",
        "torchtitan_diloco.launch",
        *command_line({**settings, "run.folder": str(folder)}),
    ]
    outcome = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if outcome.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed:\n{outcome.stdout[-2000:]}{outcome.stderr[-2000:]}"
        )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = [record[LOSS] for record in records if LOSS in record][-1]
    if "checkpoint.keep_every" not in settings:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    finished.write_text(json.dumps({"loss": loss, "settings": settings}, indent=2))
    return float(loss)


def spread(values: Sequence[float], form: str) -> str:
    """`mean (least ... greatest)`."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} ... {max(values):{form}})"


def print_losses(table: Table, steps: int, losses: dict[str, list[float]]) -> None:
    """Every run beside its control, seed by seed, so that what a seed has in common cancels."""
    rows = []
    for name, found in losses.items():
        control = table.control_of(name)
        behind = [
            100 * (loss / beside - 1) for loss, beside in zip(found, losses[control], strict=True)
        ]
        settings = table.runs[name]
        apart = steps - table.begins.get(name, 0)
        rounds = (
            "-"
            if settings["diloco.method"] == "none"
            else str(apart // int(settings["diloco.sync_every"]))
        )
        compared = "control" if name == control else f"{spread(behind, '+.2f')} %"
        rows.append([name, rounds, spread(found, ".4f"), compared, table.paper.get(name, "")])
    seeds = len(next(iter(losses.values())))
    title = (
        f"validation loss of the shared model after {steps:,} steps = {steps * table.tokens_per_step / 1e6:.1f}M tokens; "
        f"n = {seeds} seeds; mean (least ... greatest)"
    )
    several = set(map(table.control_of, losses)) != {next(iter(table.runs))}
    against = "against its control" if several else f"against {next(iter(table.runs))}"
    print_table(title, ["run", "rounds", "loss, nats per token", against, "papers"], rows)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, default="parity")
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument(
        "--steps",
        type=positive,
        help="length of a run (default: the table's); warm-ups and the like with it",
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--short", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument(
        "--runs", default="", help="names in the table, separated by ';' (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/parity"))
    own, words = parser.parse_known_args()
    extra = further_settings(parser, words, SET_BY_THE_TABLE)
    table = TABLES[own.table]
    names = [name.strip() for name in own.runs.split(";") if name.strip()] or list(table.runs)
    for name in names:
        if name not in table.runs:
            parser.error(f"no run {name!r} in the table; there are: {'; '.join(table.runs)}")
    names = list(dict.fromkeys([*map(table.control_of, names), *names]))
    table = table.of_length(own.steps or (table.steps // 10 if own.short else table.steps))
    steps = table.steps
    seeds = [0] if own.short else [int(seed) for seed in own.seeds.split(",")]

    common = {"data.corpus": own.corpus, "training.steps": str(steps)}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            more = common | extra | {"run.seed": str(seed)}
            if name in table.begins:
                control = run_folder(own.out, table.runs[table.control_of(name)] | more)
                checkpoint = control / "checkpoints" / f"step-{table.begins[name]:08d}"
                more |= {"checkpoint.resume": str(checkpoint), "checkpoint.new_workers": "copy"}
            losses[name].append(train(own.out, table.runs[name] | more))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
        print_losses(table, steps, losses)


if __name__ == "__main__":
    main()
