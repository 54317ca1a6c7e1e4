"""Loss of the shared model at equal tokens: data parallelism, DiLoCo and streaming variants, several seeds.

    python -m benchmarks.parity [--table settings] [--corpus 'text/*.txt'] [--steps 1500] [--seeds 0,1,2]
                                [--variants 'NAME;...'] [--out outputs/parity] [--section.key value ...]

`--table settings` compares H, alpha and outer learning rates with data parallelism; `--table codecs` what goes over the wire
with fp32, for two and for four workers.

Every run is a real one (`python -m torchtitan_diloco.launch`, gloo processes on the CPU). Finished runs are kept in --out
and not repeated, so a long table can be continued. Without --corpus the text is the Python standard library's source.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.table import print_table, summary

MODEL = {
    "model.layers": "4",
    "model.width": "64",
    "model.heads": "2",
    "model.head_dim": "32",
    "model.feed_forward": "256",
    "training.sequence_length": "128",
    "training.batch_size": "8",
    "lr_schedule.warmup_steps": "100",
    "optimizer.lr": "4e-3",
    "diloco.fragments.layers_per_fragment": "1",
    "diloco.workers": "2",
    "validation.sequences": "512",
    "validation.every": "1000000",
    "metrics.log_every": "100",
    "metrics.tensorboard": "false",
    "run.device": "cpu",
}

STREAMING = {
    "diloco.method": "streaming",
    "diloco.sync_every": "30",
    "diloco.overlap.delay": "1",
    "diloco.overlap.mixing": "0.5",
}
WHOLE_MODEL = {"diloco.fragments.layers_per_fragment": "0", "diloco.overlap.delay": "0", "diloco.overlap.mixing": "0"}
LOW, HIGH = {"diloco.outer_optimizer.lr": "0.4"}, {"diloco.outer_optimizer.lr": "0.7"}

CONTROL = "data parallel"
SETTINGS: dict[str, dict[str, str]] = {
    CONTROL: {"diloco.method": "none"},
    "single-worker DiLoCo, H=30, lr 0.4": STREAMING | WHOLE_MODEL | LOW | {"diloco.workers": "1", "training.batch_size": "16"},
    "DiLoCo, H=30, lr 0.7": STREAMING | WHOLE_MODEL | HIGH,
    "streaming, H=30, alpha 0, lr 0.4": STREAMING | LOW | {"diloco.overlap.mixing": "0"},
    "streaming, H=30, alpha 0.5, lr 0.4": STREAMING | LOW,
    "streaming, H=30, alpha 0.5, lr 0.7": STREAMING | HIGH,
    "streaming bf16, H=30, alpha 0.5, lr 0.7": STREAMING | HIGH | {"diloco.quantization.codec": "bf16"},
    "streaming, H=30, alpha 0.5, lr 1.0": STREAMING | {"diloco.outer_optimizer.lr": "1.0"},
    "streaming, H=10, alpha 0.5, lr 0.4": STREAMING | LOW | {"diloco.sync_every": "10"},
    "streaming, H=10, alpha 0.5, lr 0.7": STREAMING | HIGH | {"diloco.sync_every": "10"},
    "streaming, H=5, alpha 0.5, lr 0.4": STREAMING | LOW | {"diloco.sync_every": "5"},
    "streaming, H=5, alpha 0, lr 0.7": STREAMING | HIGH | {"diloco.sync_every": "5", "diloco.overlap.mixing": "0"},
    "streaming, H=100, alpha 0.5, lr 0.7": STREAMING | HIGH | {"diloco.sync_every": "100"},
}

CODED = ["fp32", "bf16", "int8", "fp4_e2m1", "fp4_e3m0", "ternary"]
FEEDBACK, STOCHASTIC = {"diloco.quantization.error_feedback": "true"}, {"diloco.quantization.rounding": "stochastic"}


def codecs(workers: int) -> dict[str, dict[str, str]]:
    """What goes over the wire, all else equal: streaming, H=10, alpha 0.5, lr 0.4."""
    share = {"diloco.workers": str(workers), "training.batch_size": str(16 // workers), "diloco.sync_every": "10"}

    def variant(codec: str, more: dict[str, str]) -> dict[str, str]:
        return STREAMING | LOW | share | {"diloco.quantization.codec": codec} | more

    chosen = {codec: variant(codec, {}) for codec in CODED}
    chosen |= {f"{codec}, feedback": variant(codec, FEEDBACK) for codec in CODED[2:]}
    chosen |= {f"{codec}, stochastic": variant(codec, STOCHASTIC) for codec in CODED[3:]}
    chosen["ternary, stochastic, feedback"] = variant("ternary", STOCHASTIC | FEEDBACK)
    if workers > 2:
        gathers = {"fp4_e3m0": ["fp32", "bf16", "int8"], "ternary": ["bf16"]}
        for codec, others in gathers.items():
            for gather in others:
                chosen[f"{codec}, means {gather}"] = variant(codec, {"diloco.quantization.gather_codec": gather})
    return {f"M={workers}, {name}": settings for name, settings in chosen.items()}


TABLES = {"settings": SETTINGS, "codecs": codecs(2) | codecs(4)}


def control_of(name: str) -> str:
    """The run that a variant is compared with."""
    return f"{name.split(',')[0]}, fp32" if name.startswith("M=") else CONTROL


def train(folder: Path, settings: dict[str, str]) -> float:
    """The last validation loss of a run, which is started unless its folder says that it has finished."""
    finished = folder / "finished.json"
    if finished.exists():
        recorded = json.loads(finished.read_text())
        if recorded["settings"] == settings:
            return float(recorded["loss"])
        raise SystemExit(f"{folder} holds a run with other settings: choose another --out, or remove it")
    words = [word for key, value in {**settings, "run.folder": str(folder)}.items() for word in (f"--{key}", value)]
    if folder.exists():  # an earlier start was interrupted
        for path in folder.glob("metrics.jsonl"):
            path.unlink()
    command = [sys.executable, "-m", "torchtitan_diloco.launch", *words]
    outcome = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if outcome.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{outcome.stdout[-2000:]}{outcome.stderr[-2000:]}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = [record[KEY] for record in records if KEY in record][-1]
    finished.write_text(json.dumps({"settings": settings, "loss": loss}))
    return float(loss)


KEY = "validation/loss_nats_per_token_global"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="stdlib")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--table", choices=TABLES, default="settings")
    parser.add_argument("--variants", default="", help="names in the table, separated by ';' (default: all)")
    parser.add_argument("--out", type=Path, default=Path("outputs/parity"))
    own, words = parser.parse_known_args()
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        parser.error("further settings look like --section.key value")
    extra = {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    variants = TABLES[own.table]
    names = [name.strip() for name in own.variants.split(";") if name.strip()] or list(variants)
    for name in names:
        if name not in variants:
            parser.error(f"no variant {name!r}; there are: {'; '.join(variants)}")
    seeds = [int(seed) for seed in own.seeds.split(",")]

    common = MODEL | {"data.corpus": own.corpus, "training.steps": str(own.steps)}
    losses: dict[str, list[float]] = {}
    for name in dict.fromkeys([*map(control_of, names), *names]):
        losses[name] = []
        for seed in seeds:
            folder = own.out / f"{''.join(c if c.isalnum() else '-' for c in name)}-{own.steps}-seed{seed}"
            losses[name].append(train(folder, common | variants[name] | extra | {"run.seed": str(seed)}))
            print(f"{name}, seed {seed}: {losses[name][-1]:.4f}", flush=True)

    rows = []
    for name, found in losses.items():
        behind = [100 * (loss / control - 1) for loss, control in zip(found, losses[control_of(name)], strict=True)]
        every = int(variants[name].get("diloco.sync_every", "0"))
        rounds = str(own.steps // every) if every else "-"
        compared = f"{statistics.median(behind):+.2f} % ({min(behind):+.2f} ... {max(behind):+.2f})"
        rows.append([name, rounds, summary(found, 4), compared])
    tokens = own.steps * 16 * 128
    title = (
        f"validation loss of the shared model after {tokens / 1e6:.1f}M tokens; n = {len(seeds)} seeds; median (min ... max)"
    )
    against = CONTROL if own.table == "settings" else "fp32 with as many workers"
    print_table(title, ["run", "rounds", "loss, nats per token", f"against {against}"], rows)


if __name__ == "__main__":
    main()
