"""Compare the loss of the shared model at equal tokens: data parallelism, DiLoCo and streaming
variants, with several seeds.

    python -m benchmarks.parity --table parity [--corpus 'text/*.txt'] [--section.key value ...]

The tables are those of benchmarks/parity_tables.py. On 2 CPU cores `parity` takes hours at full
length and the others about an hour each. `--short` is one seed of a tenth of the steps.

Every run is a real one (`python -m torchtitan_diloco.launch`, gloo processes on the CPU) and is
kept in --out: the same command continues where it was interrupted, and a run that another table
also has is not repeated. The table is printed each time a seed is complete. Without --corpus, the
text is the source of the Python standard library.
"""

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import core
from benchmarks.parity_tables import RESERVED, TABLES, Table
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.loader import load_config
from torchtitan_diloco.config.schema import flat_settings
from torchtitan_diloco.diloco.schedule import build_schedule

LOSS = "validation/loss_nats_per_token_global"


def resolved(settings: core.Settings) -> core.Settings:
    """Return all settings of a run, defaults included."""
    config = from_command_line(core.command_line(settings))
    assert config is not None
    return {key: str(value) for key, value in flat_settings(config).items()}


def run_folder(out: Path, settings: core.Settings) -> Path:
    """Return the folder of a run, which is the same for tables that share it."""
    run = resolved(settings)
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
    return out / f"{run['training.steps']}-steps-seed{run['run.seed']}-{digest}"


def train(out: Path, settings: core.Settings) -> float:
    """Return the last validation loss of a run; start or resume it unless it has finished."""
    folder = run_folder(out, settings)

    def run() -> dict[str, float]:
        if "checkpoint.resume" in settings or not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that cannot be resumed
        words = core.command_line(settings | {"run.folder": str(folder)})
        command = [sys.executable, "-m", "torchtitan_diloco.launch", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            output = done.stdout[-2000:] + done.stderr[-2000:]
            raise SystemExit(f"{' '.join(command)} failed:\n{output}")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if "checkpoint.keep_every" not in settings:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {"loss": [record[LOSS] for record in records if LOSS in record][-1]}

    return float(core.kept(folder, resolved(settings), run)["loss"])


def mean(values: Sequence[float], form: str) -> str:
    """Return `mean (min ... max)`."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} ... {max(values):{form}})"


def print_losses(table: Table, steps: int, losses: dict[str, list[float]]) -> None:
    """Compare each run with its control seed by seed: what the runs of a seed share cancels."""
    rows = []
    for name, found in losses.items():
        control, run = table.control_of(name), table.settings(name, steps)
        more = [100 * (loss / own - 1) for loss, own in zip(found, losses[control], strict=True)]
        compared = f"{mean(more, '+.2f')} %"
        rounds = "-"
        if run["diloco.method"] != "none":
            chosen = load_config("debug", run).diloco
            rounds_of = build_schedule(chosen, 1).outer_round
            rounds = str(rounds_of(0, steps) - rounds_of(0, table.begin(name, steps)))
        compared = "control" if name == control else compared
        rows.append([name, rounds, mean(found, ".4f"), compared, table.paper.get(name, "")])
    first, seeds = table.runs[0], len(next(iter(losses.values())))
    same_control = {table.control_of(name) for name in losses} == {first}
    against = f"against {first if same_control else 'its control'}"
    title = (
        f"validation loss of the shared model after {steps:,} steps = "
        f"{steps * table.tokens_per_step / 1e6:.1f}M tokens; n = {seeds} seeds; mean "
        "(min ... max)"
    )
    core.print_table(title, f"run | rounds | loss, nats per token | {against} | papers", rows)


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--table", choices=TABLES, default="parity")
    parser.add_argument("--corpus", default="stdlib")
    steps_help = "length of a run (default: the table's), to which warm-ups are scaled"
    parser.add_argument("--steps", type=core.positive, help=steps_help)
    parser.add_argument("--seeds", type=core.list_of(int), default=[0, 1, 2])
    parser.add_argument("--short", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument("--runs", default="", help="names, separated by ';' (default: all)")
    parser.add_argument("--out", type=Path, default=Path("outputs/parity"))
    options, words = parser.parse_known_args()
    extra, table = core.parse_settings(parser, words, RESERVED), TABLES[options.table]
    names = core.parse_names(parser, "--runs", options.runs, table.runs)
    names = list(dict.fromkeys([*map(table.control_of, names), *names]))
    steps = options.steps or (table.steps // 10 if options.short else table.steps)
    extra["data.corpus"] = options.corpus
    runs = {name: table.settings(name, steps) | extra for name in names}
    for run in runs.values():
        core.parse_config(parser, core.command_line(run))

    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in [0] if options.short else options.seeds:
        for name in names:
            run = runs[name] | {"run.seed": str(seed)}
            if step := table.begin(name, steps):
                control = runs[table.control_of(name)] | {"run.seed": str(seed)}
                path = run_folder(options.out, control) / "checkpoints" / f"step-{step:08d}"
                run |= {"checkpoint.resume": str(path), "checkpoint.new_workers": "copy"}
            losses[name].append(train(options.out, run))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
        print_losses(table, steps, losses)


if __name__ == "__main__":
    main()
