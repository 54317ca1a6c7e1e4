"""What `benchmarks.parity` compares: each table is a set of runs at equal tokens, and the run that each is held against."""

import itertools
from dataclasses import dataclass, field, replace

Settings = dict[str, str]
"""--section.key -> value"""

SHARED: Settings = {
    "model.width": "64",
    "model.heads": "2",
    "model.head_dim": "32",
    "model.feed_forward": "256",
    "lr_schedule.warmup_steps": "100",
    "optimizer.lr": "4e-3",
    "diloco.fragments.layers_per_fragment": "1",
    "validation.every": "1000000",
    "metrics.log_every": "100",
    "metrics.tensorboard": "false",
    "run.device": "cpu",
}


GROWS_WITH_STEPS = ("lr_schedule.warmup_steps", "checkpoint.every", "checkpoint.keep_every")
SET_BY_THE_TABLE = {
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


@dataclass(frozen=True)
class Shape:
    """A model and a batch. All runs of a table take the same tokens a step, whatever the number of workers."""

    settings: Settings
    sequences: int
    """A step, of all workers together."""
    sequence_length: int

    def workers(self, count: int) -> Settings:
        share = {"diloco.workers": str(count), "training.batch_size": str(self.sequences // count)}
        return (
            SHARED | self.settings | {"training.sequence_length": str(self.sequence_length)} | share
        )


WIDE_BATCH = Shape(
    {"model.layers": "4", "validation.sequences": "512"}, sequences=16, sequence_length=128
)
"""0.22M parameters, 2,048 tokens a step: the shape of the first tables."""
MANY_STEPS = Shape(
    {
        "model.layers": "2",
        "validation.sequences": "1024",
        "data.validation_fraction": "0.04",
        "checkpoint.every": "3000",
    },
    sequences=8,
    sequence_length=64,
)
"""0.12M parameters, 512 tokens a step: cheap steps, so that a run of some minutes has hundreds of outer rounds."""

CONTROL = "data parallel"


@dataclass(frozen=True)
class Table:
    steps: int
    """Of a run at full length."""
    runs: dict[str, Settings]
    """By name; the first one is the control."""
    tokens_per_step: int
    controls: dict[str, str] = field(default_factory=dict)
    """Of runs that are compared with another one than the first."""
    begins: dict[str, int] = field(default_factory=dict)
    """Of runs that take over from the control after so many of its steps: one whose checkpoints are kept."""
    paper: dict[str, str] = field(default_factory=dict)
    """What the papers have for the same comparison."""

    def of_length(self, steps: int) -> "Table":
        """The same in miniature, or at length: what is counted in steps becomes shorter or longer with the run."""

        def scaled(count: int) -> int:
            return max(1, round(count * steps / self.steps))

        def run(settings: Settings) -> Settings:
            return settings | {
                key: str(scaled(int(settings[key]))) for key in GROWS_WITH_STEPS if key in settings
            }

        begins = {}
        for name, first in self.begins.items():  # at a checkpoint that the control keeps
            every = int(self.runs[self.control_of(name)]["checkpoint.keep_every"])
            begins[name] = first // every * scaled(every)
        return replace(
            self,
            steps=steps,
            begins=begins,
            runs={name: run(settings) for name, settings in self.runs.items()},
        )

    def control_of(self, name: str) -> str:
        return self.controls.get(name, next(iter(self.runs)))


def streaming(every: int, **changes: str) -> Settings:
    """Streaming DiLoCo with overlap, in 4 bits; `outer_optimizer__lr="0.7"` is a key below [diloco]."""
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


WHOLE_MODEL: Settings = {
    "fragments__layers_per_fragment": "0",
    "overlap__delay": "0",
    "overlap__mixing": "0",
}
"""DiLoCo: the whole model at once, waited for, and taken as it is."""


def _table(
    shape: Shape,
    steps: int,
    runs: dict[str, Settings],
    *,
    controls: dict[str, str] | None = None,
    begins: dict[str, int] | None = None,
    paper: dict[str, str] | None = None,
) -> Table:
    placed = {
        name: shape.workers(int(run.get("diloco.workers", "2"))) | run for name, run in runs.items()
    }
    return Table(
        steps,
        placed,
        shape.sequences * shape.sequence_length,
        controls or {},
        begins or {},
        paper or {},
    )


# --- the first tables: settings, and what goes over the wire -------------------------------------------------------------


def _settings() -> Table:
    exact = {"quantization__codec": "fp32", "outer_optimizer__momentum": "0.9"}

    def run(every: int, lr: str, **changes: str) -> Settings:
        return streaming(every, **(exact | {"outer_optimizer__lr": lr} | changes))

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
    return _table(WIDE_BATCH, 1500, runs)


CODED = ["fp32", "bf16", "int8", "fp4_e2m1", "fp4_e3m0", "ternary"]
FEEDBACK, STOCHASTIC = (
    {"quantization__error_feedback": "true"},
    {"quantization__rounding": "stochastic"},
)


def _codecs() -> Table:
    runs, controls = {}, {}
    for workers in (2, 4):
        variants: dict[str, Settings] = {codec: {} for codec in CODED}
        variants |= {f"{codec}, feedback": FEEDBACK for codec in CODED[2:]}
        variants |= {f"{codec}, stochastic": STOCHASTIC for codec in CODED[3:]}
        variants["ternary, stochastic, feedback"] = STOCHASTIC | FEEDBACK
        if workers > 2:
            variants |= {
                f"fp4_e3m0, means {gather}": {"quantization__gather_codec": gather}
                for gather in CODED[:3]
            }
            variants["ternary, means bf16"] = {"quantization__gather_codec": "bf16"}
        for name, changes in variants.items():
            codec = name.split(",")[0]
            runs[f"M={workers}, {name}"] = streaming(
                10, workers=str(workers), quantization__codec=codec, **changes
            )
            controls[f"M={workers}, {name}"] = f"M={workers}, fp32"
    return _table(WIDE_BATCH, 600, runs, controls=controls)


def _block_sizes() -> Table:
    """More values to a scale are fewer bits on the wire."""
    runs = {"fp32": streaming(10, quantization__codec="fp32")}
    for codec, size in itertools.product(("fp4_e3m0", "fp4_e2m1"), ("64", "256", "1024")):
        runs[f"{codec}, blocks of {size}"] = streaming(
            10, quantization__codec=codec, quantization__block_size=size
        )
    return _table(WIDE_BATCH, 600, runs)


# --- the fair bar, and paper B's robustness ------------------------------------------------------------------------------

ALONE = {"diloco.method": "none", "diloco.workers": "1"}
"""The control in one process: the samples of a step are those of any number of ranks."""


LIGHT: Settings = {"outer_optimizer__lr": "0.7", "outer_optimizer__momentum": "0.5"}
"""An outer step that goes little further than plain averaging would: lr / (1 - momentum) = 1.4."""


def kept(every: int) -> Settings:
    """Checkpoints that other runs begin from."""
    return {"checkpoint.every": str(every), "checkpoint.keep_every": str(every)}


def _parity() -> Table:
    exact = WHOLE_MODEL | LIGHT | {"quantization__codec": "fp32"}
    first = 1000
    after = f", after {first:,} steps of data parallelism"
    runs = {
        CONTROL: ALONE | kept(first),
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
    warm_up = {
        "lr_schedule.warmup_steps": "1000"
    }  # the papers'; at this length better for all, and most for DiLoCo
    return _table(
        MANY_STEPS,
        9000,
        {name: run | warm_up for name, run in runs.items()},
        begins=begins,
        paper=paper,
    )


def _parity_tuning() -> Table:
    """Outer steps at the length of `parity`."""
    chosen = {"lr 0.4, momentum 0.8": ("0.4", "0.8"), "lr 0.4, momentum 0.9": ("0.4", "0.9")}
    chosen |= {"lr 0.7, momentum 0.9": ("0.7", "0.9"), "lr 0.7, momentum 0.5": ("0.7", "0.5")}
    runs = {
        f"streaming, {name}": streaming(
            30, outer_optimizer__lr=lr, outer_optimizer__momentum=momentum
        )
        for name, (lr, momentum) in chosen.items()
    }
    warm_up = {"lr_schedule.warmup_steps": "1000"}
    named = {CONTROL: ALONE | kept(1000)} | runs
    return _table(MANY_STEPS, 9000, {name: run | warm_up for name, run in named.items()})


def _larger_batch() -> Table:
    """Four times the tokens a step for a third of the steps, with a warm-up of a ninth and of a third of the run."""
    runs: dict[str, Settings] = {}
    controls: dict[str, str] = {}
    for steps in (333, 1000):
        warm_up = {"lr_schedule.warmup_steps": str(steps)}
        control, name = f"data parallel, warm-up {steps:,}", f"streaming, warm-up {steps:,}"
        runs |= {control: ALONE | warm_up, name: streaming(10) | warm_up}
        controls |= {control: control, name: control}
    return _table(
        Shape(MANY_STEPS.settings, sequences=32, sequence_length=64), 3000, runs, controls=controls
    )


def _warm_up() -> Table:
    """Steps of linear warm-up of the inner learning rate, each against data parallelism with as many."""
    runs: dict[str, Settings] = {}
    controls: dict[str, str] = {}
    for steps in (100, 300, 600, 1000):
        warm_up = {"lr_schedule.warmup_steps": str(steps)}
        control, name = f"data parallel, warm-up {steps:,}", f"streaming, warm-up {steps:,}"
        runs |= {control: ALONE | warm_up, name: streaming(10) | warm_up}
        controls |= {control: control, name: control}
    return _table(MANY_STEPS, 2000, runs, controls=controls)


def _first_steps() -> Table:
    """How much of what a short run loses it loses at its beginning."""
    begins = {
        f"{steps:,} steps of data parallelism, then streaming": steps
        for steps in (125, 250, 500, 1000)
    }
    runs = {CONTROL: ALONE | kept(125), "streaming from the first step": streaming(10)}
    return _table(MANY_STEPS, 2000, runs | {name: streaming(10) for name in begins}, begins=begins)


def _drops() -> Table:
    runs = {
        f"{share} % dropped": streaming(10, link__drop_probability=f"{share / 100:g}")
        for share in (0, 10, 30, 50)
    }
    return _table(MANY_STEPS, 2000, runs, paper={"50 % dropped": "+2.1 % perplexity"})


def _shards() -> Table:
    names = {
        "one order for all": "none",
        "random documents each": "random",
        "a cluster each": "clusters",
    }
    held_out = {
        "validation.sequences": "4096"
    }  # all of it: the corpus is of several kinds, one after the other
    runs = {
        name: streaming(10) | held_out | {"data.shard_by": value} for name, value in names.items()
    }
    controls = {"a cluster each": "random documents each"}
    return _table(
        MANY_STEPS, 2000, runs, controls=controls, paper={"a cluster each": "-0.4 % perplexity"}
    )


def _sync_every() -> Table:
    runs = {CONTROL: ALONE} | {
        f"streaming, H={every}": streaming(every) for every in (5, 10, 30, 100, 300)
    }
    return _table(MANY_STEPS, 2000, runs)


def _outer_optimizers() -> Table:
    chosen = {
        "nesterov, lr 0.4, momentum 0.8": ("nesterov", "0.4", "0.8"),
        "nesterov, lr 0.4, momentum 0.9": ("nesterov", "0.4", "0.9"),
        "nesterov, lr 0.7, momentum 0.9": ("nesterov", "0.7", "0.9"),
        "nesterov, lr 0.7, momentum 0.5": ("nesterov", "0.7", "0.5"),
        "momentum, lr 0.4, momentum 0.9": ("momentum", "0.4", "0.9"),
        "sgd, lr 1": ("sgd", "1", "0.9"),
        "sgd, lr 0.5": ("sgd", "0.5", "0.9"),
        "adam, lr 0.3, epsilon 0.1": ("adam", "0.3", "0.9"),
        "sign_momentum, lr 0.001": ("sign_momentum", "0.001", "0.9"),
    }
    runs = {
        name: streaming(
            10,
            outer_optimizer__name=kind,
            outer_optimizer__lr=lr,
            outer_optimizer__momentum=momentum,
        )
        for name, (kind, lr, momentum) in chosen.items()
    }
    runs["adam, lr 0.3, epsilon 0.1"]["diloco.outer_optimizer.epsilon"] = "0.1"
    return _table(MANY_STEPS, 2000, {CONTROL: ALONE} | runs)


def _tuning() -> Table:
    """What brings short runs nearer to data parallelism."""
    average = WHOLE_MODEL | {
        "outer_optimizer__name": "sgd",
        "outer_optimizer__lr": "1",
        "quantization__codec": "fp32",
    }
    runs = {
        CONTROL: ALONE,
        "data parallel, inner lr 2e-3": ALONE | {"optimizer.lr": "2e-3"},
        "data parallel, inner lr 8e-3": ALONE | {"optimizer.lr": "8e-3"},
        "alpha 0.5, lr 0.4, momentum 0.8": streaming(10),
        "alpha 0.5, lr 0.4, momentum 0.8, fp32": streaming(10, quantization__codec="fp32"),
        "alpha 0.5, lr 0.4, momentum 0.8, inner lr 8e-3": streaming(10) | {"optimizer.lr": "8e-3"},
        "alpha 0.5, lr 0.7, momentum 0.5": streaming(10, **LIGHT),
        "alpha 0, lr 0.7, momentum 0.5": streaming(10, overlap__mixing="0", **LIGHT),
        "alpha 0, lr 0.28, momentum 0.8": streaming(
            10, overlap__mixing="0", outer_optimizer__lr="0.28"
        ),
        "alpha 0.25, lr 0.7, momentum 0.5": streaming(10, overlap__mixing="0.25", **LIGHT),
        "alpha 0, tau 0, lr 0.7, momentum 0.5": streaming(
            10, overlap__mixing="0", overlap__delay="0", **LIGHT
        ),
        "whole model, alpha 0, tau 0, lr 0.7, momentum 0.5": streaming(10, **WHOLE_MODEL, **LIGHT),
        "alpha 0.5, lr 0.4, momentum 0.8, outer warm-up of 20 rounds": streaming(
            10, outer_optimizer__warmup_rounds="20"
        ),
        "averaged every step": streaming(1, **average),
        "averaged every step, inner lr 5.6e-3": streaming(1, **average)
        | {"optimizer.lr": "5.6e-3"},
        "averaged every 10 steps, inner lr 5.6e-3": streaming(10, **average)
        | {"optimizer.lr": "5.6e-3"},
    }
    return _table(MANY_STEPS, 2000, runs)


def _workers() -> Table:
    runs = {
        f"streaming, M={workers}": streaming(10, workers=str(workers)) for workers in (1, 2, 4, 8)
    }
    return _table(MANY_STEPS, 2000, {CONTROL: ALONE} | runs)


TABLES = {
    "parity": _parity(),
    "parity-tuning": _parity_tuning(),
    "larger-batch": _larger_batch(),
    "warm-up": _warm_up(),
    "first-steps": _first_steps(),
    "robustness-drops": _drops(),
    "robustness-shards": _shards(),
    "sync-every": _sync_every(),
    "outer-optimizers": _outer_optimizers(),
    "workers": _workers(),
    "tuning": _tuning(),
    "codecs": _codecs(),
    "block-size": _block_sizes(),
    "settings": _settings(),
}
