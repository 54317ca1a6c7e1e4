"""Tables of `benchmarks.parity`: sets of runs that take the same tokens, each with its control."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.core import Settings

SHARED: Settings = {
    "model.width": "64",
    "model.heads": "2",
    "model.head_dim": "32",
    "model.feed_forward": "256",
    "lr_schedule.warmup_steps": "100",
    "optimizer.lr": "4e-3",
    "diloco.workers": "2",
    "diloco.fragments.layers_per_fragment": "1",
    "validation.every": "1000000",
    "metrics.log_every": "100",
    "metrics.tensorboard": "false",
    "run.device": "cpu",
}
SCALED = ("lr_schedule.warmup_steps", "checkpoint.every", "checkpoint.keep_every")
"""Settings in steps, which become shorter or longer with the run."""
RESERVED = {
    "run.folder",
    "run.seed",
    "data.corpus",
    "training.steps",
    "training.batch_size",
    "training.sequence_length",
    "diloco.method",
    "diloco.workers",
    "diloco.sync_every",
}
"""Settings that the tables set themselves."""
CONTROL = "data parallel"


@dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    sequences: int
    """Sequences in a step of all workers together, whatever their number."""
    sequence_length: int
    settings: Settings


WIDE_BATCH = Shape(16, 128, {"model.layers": "4", "validation.sequences": "512"})
"""0.22M parameters, 2,048 tokens a step: the shape of the first tables."""
_CHEAP_STEPS = {
    "model.layers": "2",
    "validation.sequences": "1024",
    "data.validation_fraction": "0.04",
    "checkpoint.every": "3000",
}
MANY_STEPS = Shape(8, 64, _CHEAP_STEPS)
"""0.12M parameters, 512 tokens a step: a run of some minutes has hundreds of outer rounds."""
LARGER_BATCH = Shape(32, 64, _CHEAP_STEPS)


@dataclass(frozen=True)
class Table:
    shape: Shape
    steps: int
    """Length of a run."""
    runs: dict[str, Settings]
    """By name; the first one is the control."""
    controls: dict[str, str] = field(default_factory=dict)
    """Controls of runs that are not compared with the first one."""
    begins: dict[str, int] = field(default_factory=dict)
    """Steps of the control after which a run continues from its checkpoint."""
    paper: dict[str, str] = field(default_factory=dict)
    """Numbers of the papers for the same comparison."""

    @property
    def tokens_per_step(self) -> int:
        return self.shape.sequences * self.shape.sequence_length

    def control_of(self, name: str) -> str:
        return self.controls.get(name, next(iter(self.runs)))

    def settings(self, name: str, steps: int) -> Settings:
        """Return all settings of a run of so many steps."""
        run = SHARED | self.shape.settings | self.runs[name]
        return run | {
            "training.steps": str(steps),
            "training.sequence_length": str(self.shape.sequence_length),
            "training.batch_size": str(self.shape.sequences // int(run["diloco.workers"])),
            **{key: str(self._scaled(int(run[key]), steps)) for key in SCALED if key in run},
        }

    def begin(self, name: str, steps: int) -> int:
        """Return after how many steps of the control a run begins: a step that the control keeps
        a checkpoint of, or 0."""
        if name not in self.begins:
            return 0
        every = int(self.runs[self.control_of(name)]["checkpoint.keep_every"])
        return self.begins[name] // every * self._scaled(every, steps)

    def _scaled(self, count: int, steps: int) -> int:
        return max(1, round(count * steps / self.steps))


def streaming(every: int, **changes: str) -> Settings:
    """Return Streaming DiLoCo with overlap in 4 bits. `outer_optimizer__lr="0.7"` is a key below
    [diloco]."""
    base = {
        "diloco.method": "streaming",
        "diloco.sync_every": str(every),
        "diloco.overlap.delay": "1",
        "diloco.overlap.mixing": "0.5",
        "diloco.outer_optimizer.name": "nesterov",
        "diloco.outer_optimizer.lr": "0.4",
        "diloco.outer_optimizer.momentum": "0.8",
        "diloco.quantization.codec": "fp4_e3m0",
    }
    return base | {f"diloco.{key.replace('__', '.')}": value for key, value in changes.items()}


def outer(lr: str, momentum: str) -> Settings:
    """Return changes for `streaming`."""
    return {"outer_optimizer__lr": lr, "outer_optimizer__momentum": momentum}


def warm_up(steps: int) -> Settings:
    return {"lr_schedule.warmup_steps": str(steps)}


def keep(every: int) -> Settings:
    """Return settings of a control whose checkpoints other runs continue from."""
    return {"checkpoint.every": str(every), "checkpoint.keep_every": str(every)}


ALONE: Settings = {"diloco.method": "none", "diloco.workers": "1"}
"""Data parallelism in one process: the samples of a step are those of any number of ranks."""
WHOLE_MODEL: Settings = {
    "fragments__layers_per_fragment": "0",
    "overlap__delay": "0",
    "overlap__mixing": "0",
}
"""DiLoCo: the whole model at once, waited for, and taken as it is."""
LIGHT = outer("0.7", "0.5")
"""An outer step little larger than plain averaging: lr / (1 - momentum) = 1.4."""
FP32: Settings = {"quantization__codec": "fp32"}


# --- the first tables: settings, and wire formats -------------------------------------------------


def _settings() -> Table:
    def run(every: int, lr: str, **changes: str) -> Settings:
        return streaming(every, **(FP32 | outer(lr, "0.9") | changes))

    runs = {
        CONTROL: {"diloco.method": "none"},
        "single-worker DiLoCo, H=30, lr 0.4": run(30, "0.4", workers="1", **WHOLE_MODEL),
        "DiLoCo, H=30, lr 0.7": run(30, "0.7", **WHOLE_MODEL),
        "streaming, H=30, alpha 0, lr 0.4": run(30, "0.4", overlap__mixing="0"),
        "streaming, H=30, alpha 0.5, lr 0.4": run(30, "0.4"),
        "streaming, H=30, alpha 0.5, lr 0.7": run(30, "0.7"),
        "streaming bf16, H=30, alpha 0.5, lr 0.7": run(30, "0.7", quantization__codec="bf16"),
        "streaming, H=30, alpha 0.5, lr 1.0": run(30, "1.0"),
        "streaming, H=10, alpha 0.5, lr 0.4": run(10, "0.4"),
        "streaming, H=10, alpha 0.5, lr 0.7": run(10, "0.7"),
        "streaming, H=5, alpha 0.5, lr 0.4": run(5, "0.4"),
        "streaming, H=5, alpha 0, lr 0.7": run(5, "0.7", overlap__mixing="0"),
        "streaming, H=100, alpha 0.5, lr 0.7": run(100, "0.7"),
    }
    return Table(WIDE_BATCH, 1500, runs)


def _codecs() -> Table:
    formats = ["fp32", "bf16", "int8", "fp4_e2m1", "fp4_e3m0", "ternary"]
    feedback = {"quantization__error_feedback": "true"}
    stochastic = {"quantization__rounding": "stochastic"}
    runs, controls = {}, {}
    for workers in (2, 4):
        variants: dict[str, Settings] = {codec: {} for codec in formats}
        variants |= {f"{codec}, feedback": feedback for codec in formats[2:]}
        variants |= {f"{codec}, stochastic": stochastic for codec in formats[3:]}
        variants["ternary, stochastic, feedback"] = stochastic | feedback
        if workers > 2:
            for name in ("fp4_e3m0, means fp32", "fp4_e3m0, means bf16", "fp4_e3m0, means int8"):
                variants[name] = {"quantization__gather_codec": name.split()[-1]}
            variants["ternary, means bf16"] = {"quantization__gather_codec": "bf16"}
        for name, changes in variants.items():
            chosen = {"workers": str(workers), "quantization__codec": name.split(",")[0]} | changes
            runs[f"M={workers}, {name}"] = streaming(10, **chosen)
            controls[f"M={workers}, {name}"] = f"M={workers}, fp32"
    return Table(WIDE_BATCH, 600, runs, controls)


def _block_sizes() -> Table:
    runs = {"fp32": streaming(10, **FP32)}
    for codec, size in itertools.product(("fp4_e3m0", "fp4_e2m1"), ("64", "256", "1024")):
        chosen = {"quantization__codec": codec, "quantization__block_size": size}
        runs[f"{codec}, blocks of {size}"] = streaming(10, **chosen)
    return Table(WIDE_BATCH, 600, runs)


# --- parity with data parallelism, and robustness -------------------------------------------------


def _parity() -> Table:
    exact, first = WHOLE_MODEL | LIGHT | FP32, 1000
    after = f", after {first:,} steps of data parallelism"
    runs = {
        CONTROL: ALONE | keep(first),
        "single-worker DiLoCo, H=30": streaming(30, workers="1", **exact),
        "DiLoCo, M=2, H=30": streaming(30, **exact),
        "streaming, M=2, H=30": streaming(30),
        f"streaming, M=2, H=30{after}": streaming(30),
        "streaming, M=4, H=30": streaming(30, workers="4"),
        f"streaming, M=4, H=30{after}": streaming(30, workers="4"),
        "streaming, M=2, H=100": streaming(100),
        f"streaming, M=2, H=100{after}": streaming(100),
    }
    paper = {
        "DiLoCo, M=2, H=30": "+0.9 %",
        "streaming, M=2, H=30": "+0.6 %",
        "streaming, M=2, H=100": "+1.4 %",
    }
    begins = {name: first for name in runs if name.endswith(after)}
    # The papers' warm-up: at this length better for all runs, and most for DiLoCo.
    runs = {name: run | warm_up(1000) for name, run in runs.items()}
    return Table(MANY_STEPS, 9000, runs, begins=begins, paper=paper)


def _parity_tuning() -> Table:
    """Compare outer steps at the length of `parity`."""
    runs = {CONTROL: ALONE | keep(1000) | warm_up(1000)}
    for lr, momentum in (("0.4", "0.8"), ("0.4", "0.9"), ("0.7", "0.9"), ("0.7", "0.5")):
        run = streaming(30, **outer(lr, momentum)) | warm_up(1000)
        runs[f"streaming, lr {lr}, momentum {momentum}"] = run
    return Table(MANY_STEPS, 9000, runs)


def _warm_ups(shape: Shape, steps: int, warm_ups: Iterable[int]) -> Table:
    """Compare each run with data parallelism of as many steps of warm-up."""
    runs: dict[str, Settings] = {}
    controls: dict[str, str] = {}
    for count in warm_ups:
        control, name = f"data parallel, warm-up {count:,}", f"streaming, warm-up {count:,}"
        runs |= {control: ALONE | warm_up(count), name: streaming(10) | warm_up(count)}
        controls |= {control: control, name: control}
    return Table(shape, steps, runs, controls)


def _first_steps() -> Table:
    """Show how much of the loss of a short run is due to its beginning."""
    starts = (125, 250, 500, 1000)
    begins = {f"{step:,} steps of data parallelism, then streaming": step for step in starts}
    runs = {CONTROL: ALONE | keep(125), "streaming from the first step": streaming(10)}
    runs |= {name: streaming(10) for name in begins}
    return Table(MANY_STEPS, 2000, runs, begins=begins)


def _drops() -> Table:
    runs = {
        f"{share} % dropped": streaming(10, link__drop_probability=f"{share / 100:g}")
        for share in (0, 10, 30, 50)
    }
    return Table(MANY_STEPS, 2000, runs, paper={"50 % dropped": "+2.1 % perplexity"})


def _shards() -> Table:
    clusters, random = "a cluster each", "random documents each"
    names = {"one order for all": "none", random: "random", clusters: "clusters"}
    # All that is held out: the corpus has several kinds of text, one after the other.
    held_out = {"validation.sequences": "4096"}
    runs = {
        name: streaming(10) | held_out | {"data.shard_by": value} for name, value in names.items()
    }
    paper = {clusters: "-0.4 % perplexity"}
    return Table(MANY_STEPS, 2000, runs, {clusters: random}, paper=paper)


def _outer_optimizers() -> Table:
    runs = {CONTROL: ALONE}
    for name, lr, momentum in (
        ("nesterov", "0.4", "0.8"),
        ("nesterov", "0.4", "0.9"),
        ("nesterov", "0.7", "0.9"),
        ("nesterov", "0.7", "0.5"),
        ("momentum", "0.4", "0.9"),
    ):
        run = streaming(10, outer_optimizer__name=name, **outer(lr, momentum))
        runs[f"{name}, lr {lr}, momentum {momentum}"] = run
    for name, lr in (("sgd", "1"), ("sgd", "0.5"), ("adam", "0.3"), ("sign_momentum", "0.001")):
        run = streaming(10, outer_optimizer__name=name, **outer(lr, "0.9"))
        epsilon = {"diloco.outer_optimizer.epsilon": "0.1"} if name == "adam" else {}
        runs[f"{name}, lr {lr}{', epsilon 0.1' if epsilon else ''}"] = run | epsilon
    return Table(MANY_STEPS, 2000, runs)


def _tuning() -> Table:
    """Compare what might bring short runs nearer to data parallelism."""
    average = WHOLE_MODEL | FP32 | {"outer_optimizer__name": "sgd", "outer_optimizer__lr": "1"}
    at_once = {"overlap__mixing": "0", "overlap__delay": "0"}
    base = "alpha 0.5, lr 0.4, momentum 0.8"
    runs = {
        CONTROL: ALONE,
        "data parallel, inner lr 2e-3": ALONE | {"optimizer.lr": "2e-3"},
        "data parallel, inner lr 8e-3": ALONE | {"optimizer.lr": "8e-3"},
        base: streaming(10),
        f"{base}, fp32": streaming(10, **FP32),
        f"{base}, inner lr 8e-3": streaming(10) | {"optimizer.lr": "8e-3"},
        "alpha 0.5, lr 0.7, momentum 0.5": streaming(10, **LIGHT),
        "alpha 0, lr 0.7, momentum 0.5": streaming(10, overlap__mixing="0", **LIGHT),
        "alpha 0, lr 0.28, momentum 0.8": streaming(
            10, overlap__mixing="0", **outer("0.28", "0.8")
        ),
        "alpha 0.25, lr 0.7, momentum 0.5": streaming(10, overlap__mixing="0.25", **LIGHT),
        "alpha 0, tau 0, lr 0.7, momentum 0.5": streaming(10, **at_once, **LIGHT),
        "whole model, alpha 0, tau 0, lr 0.7, momentum 0.5": streaming(10, **WHOLE_MODEL, **LIGHT),
        f"{base}, outer warm-up of 20 rounds": streaming(10, outer_optimizer__warmup_rounds="20"),
        "averaged every step": streaming(1, **average),
        "averaged every step, inner lr 5.6e-3": streaming(1, **average)
        | {"optimizer.lr": "5.6e-3"},
        "averaged every 10 steps, inner lr 5.6e-3": streaming(10, **average)
        | {"optimizer.lr": "5.6e-3"},
    }
    return Table(MANY_STEPS, 2000, runs)


def _compare(runs: dict[str, Settings]) -> Table:
    """Compare short runs with data parallelism."""
    return Table(MANY_STEPS, 2000, {CONTROL: ALONE} | runs)


TABLES = {
    "parity": _parity(),
    "parity-tuning": _parity_tuning(),
    "larger-batch": _warm_ups(LARGER_BATCH, 3000, (333, 1000)),
    "warm-up": _warm_ups(MANY_STEPS, 2000, (100, 300, 600, 1000)),
    "first-steps": _first_steps(),
    "robustness-drops": _drops(),
    "robustness-shards": _shards(),
    "sync-every": _compare({f"streaming, H={H}": streaming(H) for H in (5, 10, 30, 100, 300)}),
    "outer-optimizers": _outer_optimizers(),
    "workers": _compare({f"streaming, M={M}": streaming(10, workers=str(M)) for M in (1, 2, 4, 8)}),
    "tuning": _tuning(),
    "codecs": _codecs(),
    "block-size": _block_sizes(),
    "settings": _settings(),
}
