"""Tables of `benchmarks.parity`: sets of runs that take the same tokens, each with its control.

The name of a run says what is special about it: "streaming, M=4, H=100, lr 0.7". `TERMS` and
`NUMBERS` give the settings of each term. What the name leaves open is as in `DEFAULTS`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.core import Settings

DEFAULTS: Settings = {
    "model.activation": "gelu",
    "model.width": "64",
    "model.heads": "2",
    "model.head_dim": "32",
    "model.feed_forward": "256",
    "lr_schedule.warmup_steps": "100",
    "optimizer.lr": "4e-3",
    "diloco.method": "streaming",
    "diloco.workers": "2",
    "diloco.sync_every": "10",
    "diloco.fragments.layers_per_fragment": "1",
    "diloco.overlap.delay": "1",
    "diloco.overlap.mixing": "0.5",
    "diloco.outer_optimizer.name": "nesterov",
    "diloco.outer_optimizer.lr": "0.4",
    "diloco.outer_optimizer.momentum": "0.8",
    "diloco.quantization.codec": "fp4_e3m0",
    "validation.every": "1000000",
    "metrics.log_every": "100",
    "metrics.tensorboard": "false",
    "run.device": "cpu",
}
SCALED = (
    "lr_schedule.warmup_steps",
    "diloco.beginning.steps",
    "checkpoint.every",
    "checkpoint.keep_every",
)
"""Settings in steps, which become shorter or longer with the run."""
RESERVED = {
    "run.folder",
    "run.seed",
    "data.corpus",
    "training.steps",
    "training.batch_size",
    "training.global_batch_size",
    "training.sequence_length",
    "diloco.method",
    "diloco.workers",
    "diloco.sync_every",
}
"""Settings that the tables set themselves."""

CONTROL = "data parallel"
MUON = f"{CONTROL}, Muon"
AFTER = "after {} steps of data parallelism"
"""Term of a run that continues from a checkpoint of its control."""
CODECS = ("fp32", "bf16", "int8", "fp4_e2m1", "fp4_e3m0", "ternary")
TERMS: dict[str, Settings] = {
    # In one process: the samples of a step are those of any number of ranks.
    CONTROL: {"diloco.method": "none", "diloco.workers": "1"},
    "streaming": {},
    "DiLoCo": {  # the whole model at once, waited for, and taken as it is
        "diloco.fragments.layers_per_fragment": "0",
        "diloco.overlap.delay": "0",
        "diloco.overlap.mixing": "0",
        "diloco.quantization.codec": "fp32",
        # Little more than averaging: lr / (1 - momentum) = 1.4.
        "diloco.outer_optimizer.lr": "0.7",
        "diloco.outer_optimizer.momentum": "0.5",
    },
    "SparseLoCo": {
        "diloco.quantization.codec": "topk",
        "diloco.overlap.mixing": "0",  # as in the paper
        "diloco.outer_optimizer.name": "sgd",
        "diloco.outer_optimizer.lr": "1",
    },
    "alpha falls": {"diloco.overlap.mixing_end": "0"},
    "Muon": {"optimizer.name": "muon", "optimizer.matrix_lr": "6e-3"},
    **{codec: {"diloco.quantization.codec": codec} for codec in CODECS},
    **{name: {"diloco.outer_optimizer.name": name} for name in ("nesterov", "momentum", "sgd")},
}
NUMBERS = {
    "M=": "diloco.workers",
    "H=": "diloco.sync_every",
    "tau ": "diloco.overlap.delay",
    "alpha ": "diloco.overlap.mixing",
    "beginning H=": "diloco.beginning.sync_every",
    "beginning ": "diloco.beginning.steps",
    "matrix lr ": "optimizer.matrix_lr",
    "lr ": "diloco.outer_optimizer.lr",
    "momentum ": "diloco.outer_optimizer.momentum",
    "inner lr ": "optimizer.lr",
    "warm-up ": "lr_schedule.warmup_steps",
    "top ": "diloco.quantization.top_values",
    "decay ": "diloco.quantization.residual_decay",
    "blocks of ": "diloco.quantization.block_size",
    "drop probability ": "diloco.link.drop_probability",
}
"""Settings of terms that end with a value, by what precedes it."""


def parse_terms(terms: str) -> Settings:
    """Return the settings of comma-separated terms. Later ones override earlier ones."""
    settings: Settings = {}
    for term in filter(None, terms.split(", ")):
        if term in TERMS:
            settings |= TERMS[term]
        elif _begin(term) == 0:
            prefix = next(prefix for prefix in NUMBERS if term.startswith(prefix))
            settings[NUMBERS[prefix]] = term.removeprefix(prefix)
    return settings


def _begin(name: str) -> int:
    """Return after how many steps of the control a run begins."""
    before, after = AFTER.split("{}")
    _, found, rest = name.partition(before)
    return int(rest.removesuffix(after)) if found and rest.endswith(after) else 0


WIDE_BATCH: Settings = {
    "model.layers": "4",
    "validation.sequences": "512",
    "training.global_batch_size": "16",
    "training.sequence_length": "128",
}
"""0.22M parameters, 2,048 tokens a step: the shape of the first tables."""
MANY_STEPS: Settings = {
    "model.layers": "2",
    "validation.sequences": "1024",
    "data.validation_fraction": "0.04",
    "checkpoint.every": "3000",
    "training.global_batch_size": "8",
    "training.sequence_length": "64",
}
"""0.12M parameters, 512 tokens a step: a run of some minutes has hundreds of outer rounds."""
LARGER_BATCH: Settings = MANY_STEPS | {"training.global_batch_size": "32"}
"""2,048 tokens a step, which leave each of eight workers 256."""
LARGER_MODEL: Settings = MANY_STEPS | {
    "model.layers": "4",
    "model.width": "128",
    "model.heads": "4",
    "model.feed_forward": "512",
}
"""0.82M parameters."""


@dataclass(frozen=True)
class Table:
    shape: Settings
    """Model and batch. A step has as many sequences for any number of workers."""
    steps: int
    """Length of a run."""
    runs: Sequence[str]
    """Names; the first one is the control."""
    common: str = ""
    """Terms of all runs."""
    controls: dict[str, str] = field(default_factory=dict)
    """Controls of runs that are not compared with the first one."""
    keep_every: int = 0
    """Steps between the checkpoints that the control keeps for other runs, and for other tables."""
    paper: dict[str, str] = field(default_factory=dict)
    """Numbers of the papers for the same comparison."""

    @property
    def tokens_per_step(self) -> int:
        keys = ("training.global_batch_size", "training.sequence_length")
        return math.prod(int(self.shape[key]) for key in keys)

    def control_of(self, name: str) -> str:
        return self.controls.get(name, self.runs[0])

    def settings(self, name: str, steps: int) -> Settings:
        """Return all settings of a run of so many steps."""
        run = DEFAULTS | self.shape | parse_terms(self.common) | parse_terms(name)
        if self.keep_every and name == self.runs[0]:
            every = str(self.keep_every)
            run |= {"checkpoint.every": every, "checkpoint.keep_every": every}
        if run["diloco.method"] == "none":  # runs that differ in other settings are the same
            other = [key for key in run if key.startswith("diloco.")]
            run = {key: value for key, value in run.items() if key not in other} | TERMS[CONTROL]
        sequences = int(run["training.global_batch_size"])
        return run | {
            "training.steps": str(steps),
            "training.batch_size": str(sequences // int(run["diloco.workers"])),
            **{key: str(self._scaled(int(run[key]), steps)) for key in SCALED if key in run},
        }

    def begin(self, name: str, steps: int) -> int:
        """Return after how many steps of the control a run begins: the step of a checkpoint."""
        every = self.keep_every
        return _begin(name) // every * self._scaled(every, steps) if _begin(name) else 0

    def _scaled(self, count: int, steps: int) -> int:
        return max(1, round(count * steps / self.steps))


def _codecs() -> Table:
    runs = [f"M={workers}, {codec}" for workers in (2, 4) for codec in CODECS]
    controls = {name: f"{name.split(', ')[0]}, fp32" for name in runs}
    return Table(WIDE_BATCH, 600, runs, controls=controls)


def _parity() -> Table:
    after = AFTER.format(1000)
    begun, longer = (f"beginning {steps}, alpha falls" for steps in (1000, 2000))
    runs = [
        CONTROL,
        "DiLoCo, M=1, H=30",
        "DiLoCo, M=2, H=30",
        "streaming, M=2, H=30",
        f"streaming, M=2, H=30, {after}",
        "streaming, M=4, H=30",
        f"streaming, M=4, H=30, {after}",
        "streaming, M=2, H=100",
        f"streaming, M=2, H=100, {after}",
        "streaming, M=2, H=30, alpha falls",
        *(f"streaming, M={M}, H={H}, {begun}" for M, H in ((2, 30), (2, 100), (4, 30))),
        *(f"streaming, M={M}, H={H}, {longer}" for M, H in ((2, 30), (2, 100), (4, 30))),
        MUON,
        *(f"streaming, Muon, M=2, H={H}" for H in (30, 100)),
        *(f"streaming, Muon, M=4, H={H}" for H in (30, 100)),
        *(f"SparseLoCo, M=2, H={H}, top 32, alpha 0.5" for H in (10, 30)),
    ]
    paper = dict(zip([runs[2], runs[3], runs[7]], ["+0.9 %", "+0.6 %", "+1.4 %"], strict=True))
    # The papers' warm-up: at this length better for all runs, and most for DiLoCo.
    common, controls = "warm-up 1000", _muon_controls(runs)
    return Table(MANY_STEPS, 9000, runs, common, controls, keep_every=1000, paper=paper)


def _muon_controls(runs: Sequence[str]) -> dict[str, str]:
    return {name: MUON for name in runs if "Muon" in name}


def _with_muon(shape: Settings, runs: Sequence[str]) -> Table:
    """Runs with either optimizer, each beside its own data parallelism."""
    return Table(shape, 3000, [CONTROL, MUON, *runs], "warm-up 300", _muon_controls(runs))


SETTINGS = [
    CONTROL,
    "DiLoCo, M=1, H=30, lr 0.4, momentum 0.9",
    "DiLoCo, H=30, lr 0.7, momentum 0.9",
    "streaming, H=30, alpha 0, lr 0.4",
    "streaming, H=30, alpha 0.5, lr 0.4",
    "streaming, H=30, alpha 0.5, lr 0.7",
    "streaming, bf16, H=30, alpha 0.5, lr 0.7",
    "streaming, H=30, alpha 0.5, lr 1.0",
    "streaming, H=10, alpha 0.5, lr 0.4",
    "streaming, H=10, alpha 0.5, lr 0.7",
    "streaming, H=5, alpha 0.5, lr 0.4",
    "streaming, H=5, alpha 0, lr 0.7",
    "streaming, H=100, alpha 0.5, lr 0.7",
]
OUTER_OPTIMIZERS = [
    CONTROL,
    "nesterov, lr 0.4, momentum 0.8",
    "nesterov, lr 0.4, momentum 0.9",
    "nesterov, lr 0.7, momentum 0.9",
    "nesterov, lr 0.7, momentum 0.5",
    "momentum, lr 0.4, momentum 0.9",
    "sgd, lr 1",
    "sgd, lr 0.5",
]
BEGUN = "beginning 300, alpha falls"
LONG_BEGUN = "beginning 600, alpha falls"
FRONTIER = [
    *(f"streaming, M=2, H={H}, {BEGUN}" for H in (10, 30)),
    *(f"streaming, M=2, H={H}, {LONG_BEGUN}" for H in (30, 100)),
    *(f"streaming, Muon, M=2, H={H}" for H in (10, 30, 100)),
    *(f"streaming, M=4, H=10, {terms}" for terms in (BEGUN, LONG_BEGUN)),
    *(f"streaming, Muon, M=4, H={H}" for H in (10, 30, 100)),
    *(f"streaming, M=2, H={H}" for H in (10, 30, 100)),
    *(f"SparseLoCo, M=2, H={H}, top {n}" for H, n in ((30, 10), (30, 32), (10, 32), (30, 128))),
    *(f"SparseLoCo, Muon, M=2, H=30, top {n}" for n in (10, 32)),
    "streaming, M=2, H=10, alpha falls",
    f"streaming, M=2, H=100, {BEGUN}",
    "streaming, M=2, H=100, beginning 600, beginning H=5, alpha falls",
    "streaming, M=2, H=100, beginning 900, alpha falls",
    f"streaming, M=2, H=100, {LONG_BEGUN}, sgd, lr 1",
    f"streaming, M=2, H=100, {LONG_BEGUN}, lr 0.7, momentum 0.5",
    f"streaming, M=2, H=10, {BEGUN}, fp32",
    "streaming, Muon, M=2, H=100, beginning 300",
    *(f"streaming, Muon, M=4, H=100, beginning {steps}" for steps in (300, 600)),
    "SparseLoCo, M=2, H=10, top 32, alpha 0.5",
]
"""Loss over bytes, the most important runs first."""
RATES = [
    CONTROL,
    *(f"{CONTROL}, inner lr {lr}" for lr in ("1e-3", "2e-3", "8e-3")),
    MUON,
    *(f"{MUON}, matrix lr {lr}" for lr in ("3e-3", "1.2e-2")),
    *(f"{MUON}, inner lr {lr}" for lr in ("1e-3", "2e-3", "8e-3", "1.6e-2")),
    *(f"{control}, warm-up 900" for control in (CONTROL, MUON)),
]
LONG_WARM_UPS = [
    "streaming, M=2, H=10, beginning 900, alpha falls, warm-up 900",
    f"streaming, M=2, H=100, {LONG_BEGUN}, warm-up 900",
]
EIGHT_WORKERS = [
    *(f"streaming, Muon, M={M}, H=10" for M in (8, 4, 2)),
    "streaming, Muon, M=8, H=100",
    *(f"streaming, Muon, M=8, H=10, {terms}" for terms in (BEGUN, LONG_BEGUN)),
    *(f"{control}, inner lr 8e-3" for control in (CONTROL, MUON)),
    f"streaming, Muon, M=8, H=10, {BEGUN}, inner lr 8e-3",
    *(f"streaming, M={M}, H=10, {BEGUN}" for M in (8, 4, 2)),
]
LARGER = [
    f"streaming, M=2, H=10, {BEGUN}",
    f"streaming, M=2, H=30, {LONG_BEGUN}",
    *(f"streaming, Muon, M=2, H={H}" for H in (10, 100)),
]
DROPS = [f"drop probability {share}" for share in ("0", "0.1", "0.3", "0.5")]
BLOCKS = [f"{codec}, blocks of {n}" for codec in CODECS[4:2:-1] for n in (64, 256, 1024)]
WARM_UPS = (100, 300, 600, 1000)

TABLES = {
    "bytes": _with_muon(MANY_STEPS, FRONTIER),
    "eight-workers": _with_muon(LARGER_BATCH, EIGHT_WORKERS),
    "larger": _with_muon(LARGER_MODEL, LARGER),
    "rates": Table(
        MANY_STEPS,
        3000,
        [*RATES, *LONG_WARM_UPS],
        "warm-up 300",
        controls=dict.fromkeys(LONG_WARM_UPS, f"{CONTROL}, warm-up 900"),
    ),
    "parity": _parity(),
    # Each run is compared with data parallelism of as many steps of warm-up.
    "warm-up": Table(
        MANY_STEPS,
        2000,
        [f"{method}, warm-up {n}" for n in WARM_UPS for method in (CONTROL, "streaming")],
        controls={
            f"{method}, warm-up {n}": f"{CONTROL}, warm-up {n}"
            for n in WARM_UPS
            for method in (CONTROL, "streaming")
        },
    ),
    "robustness-drops": Table(MANY_STEPS, 2000, DROPS, paper={DROPS[3]: "+2.1 % perplexity"}),
    "sync-every": Table(
        MANY_STEPS, 2000, [CONTROL, *(f"streaming, H={H}" for H in (5, 10, 30, 100, 300))]
    ),
    "outer-optimizers": Table(MANY_STEPS, 2000, OUTER_OPTIMIZERS),
    "workers": Table(MANY_STEPS, 2000, [CONTROL, *(f"streaming, M={M}" for M in (1, 2, 4, 8))]),
    "codecs": _codecs(),
    "block-size": Table(WIDE_BATCH, 600, ["fp32", *BLOCKS]),
    "settings": Table(WIDE_BATCH, 1500, SETTINGS, "fp32, momentum 0.9"),
}
