"""Every setting of a run. One dataclass is one `[section]` of the TOML; the docstring under a field is its help.

`Optional` fields that are `None` are "not set": TOML has no null, so they are simply left out.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from torchtitan_diloco.diloco.config import DiLoCoConfig, Fraction, NotNegative, Positive


@dataclass(frozen=True)
class Run:
    """Where a run is written and how far it is repeatable."""

    name: str = ""
    """Name of the run. Empty: the name of the config file."""
    folder: str = ""
    """Folder of the run: resolved config, TensorBoard, metrics.jsonl, traces, checkpoints. Empty: a new folder
    `outputs/<name>-<date>-<time>`."""
    description: str = ""
    """A line for the humans who read the run later."""
    seed: NotNegative = 0
    """Seed of the initial weights, the order of the data, dropped rounds and stochastic rounding."""
    deterministic: bool = False
    """Only use deterministic kernels (slower on CUDA); the same run then gives the same bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is a GPU and the CPU otherwise."""
    garbage_collect_every: NotNegative = 50
    """Steps between two runs of Python's garbage collector, the same on every rank, so that no rank keeps the
    others waiting. 0 leaves the collector to Python."""


@dataclass(frozen=True)
class Model:
    """The shape of the decoder: a flavor, and what is to differ from it."""

    name: Literal["chinchilla"] = "chinchilla"
    """Model family."""
    flavor: Literal[
        "debug",
        "35m",
        "100m",
        "200m",
        "300m",
        "500m",
        "1b",
        "2.4b",
        "4b",
        "10b",
        "diloco-60m",
        "diloco-150m",
        "diloco-400m",
    ] = "debug"
    """Named shape: `35m` to `10b` are those of Streaming DiLoCo and its scaling laws, `diloco-...` those of DiLoCo."""
    weights: str = ""
    """Weights to start a new run from: a safetensors file, or a folder with one, under this model's own names (an export).
    Empty: initial values drawn from `run.seed`."""
    layers: Positive | None = None
    """Number of transformer blocks, instead of the flavor's."""
    width: Positive | None = None
    """Width of the residual stream, instead of the flavor's."""
    heads: Positive | None = None
    """Attention heads, instead of the flavor's."""
    head_dim: Positive | None = None
    """Width of one attention head, instead of the flavor's."""
    feed_forward: Positive | None = None
    """Hidden width of the feed-forward layer, instead of the flavor's."""
    vocab_size: Positive | None = None
    """Rows of the embedding. Not set: the tokenizer's vocabulary, rounded up to a multiple of 64."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, before the feed-forward layer and before the head."""
    qk_norm: bool = True
    """Normalise queries and keys (per head) before attention."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary positions, or a learned embedding per position (a table of `training.sequence_length` rows)."""
    rotary_base: Annotated[float, Meta(gt=1)] = 10_000.0
    """Base of the rotary frequencies."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Feed-forward layer: GELU without a gate, or SwiGLU (three matrices)."""


@dataclass(frozen=True)
class Data:
    """Text, tokens and their order."""

    corpus: str = "stdlib"
    """What to train on: `stdlib` (the Python standard library's source, on every machine), a folder of token shards
    written by `python -m torchtitan_diloco.data.prepare`, or text files as comma-separated paths and globs
    (`.txt .md .py .jsonl`, each also with `.gz` and `.zst`)."""
    source: str = ""
    """Where `prepare` gets the text of a shard folder that is not there yet: anything `corpus` takes, or a Hugging Face
    dataset `hf:NAME[/SUBSET][:SPLIT]`. Only used to print the exact command."""
    tokenizer: str = "bytes"
    """`bytes` (one token a byte), a `.tiktoken` rank file, or a named tiktoken encoding such as `gpt2`."""
    validation_corpus: str = ""
    """A corpus of its own for validation. Empty: the held-out part of `corpus`."""
    validation_fraction: Annotated[float, Meta(ge=0, le=0.5)] = 0.02
    """Share of the documents held out for validation when a text corpus is tokenised (shard folders carry the split
    they were prepared with)."""
    cache_folder: str = ".cache/corpora"
    """Where the tokens of text corpora are kept between runs."""
    shuffle: bool = True
    """Draw sequences in a random order, another one each epoch, set by `run.seed`."""
    shard_by: Literal["none", "random", "clusters"] = "none"
    """`none`: all workers share one order of all sequences. Else every worker has documents of its own and counts by their
    tokens: `random` deals them out, `clusters` puts those with alike text together (docs/data.md)."""
    loader_processes: NotNegative = 0
    """Processes that read ahead, per rank. 0 reads in the training process: enough for memory-mapped tokens."""


@dataclass(frozen=True)
class Training:
    """Batch, length and safety of the training steps."""

    sequence_length: Positive = 2048
    """Tokens a sequence."""
    batch_size: Positive = 8
    """Sequences in one forward pass of one rank."""
    global_batch_size: Positive | None = None
    """Sequences in one step of all workers together; beyond workers x ranks x batch_size by gradient accumulation.
    Not set: no accumulation."""
    steps: NotNegative = 0
    """Length of the run in steps. Exactly one of `steps`, `tokens` and `tokens_per_parameter` is set."""
    tokens: NotNegative = 0
    """Length of the run in tokens of all workers together."""
    tokens_per_parameter: Annotated[float, Meta(ge=0)] = 0.0
    """Length of the run in tokens per model parameter; 20 is Chinchilla's."""
    stop_after: NotNegative = 0
    """Step after which this start saves and ends, while the rest of the run, and of its learning rates, is still to come: for a
    beginning in one place, or for short jobs. 0: trains to the end."""
    max_gradient_norm: Annotated[float, Meta(ge=0)] = 1.0
    """Gradients are scaled down to this global norm. 0 turns clipping off."""
    max_skipped_steps: NotNegative = 10
    """A step whose gradients are not finite is skipped; more than this many in a row end the run."""
    z_loss: Annotated[float, Meta(ge=0)] = 1e-4
    """Weight of the square of the logits' log-partition, which keeps the logits from drifting."""
    loss_chunk_tokens: Positive = 2048
    """Tokens whose fp32 logits exist at once while the loss is computed."""


@dataclass(frozen=True)
class Optimizer:
    """The inner optimizer, AdamW."""

    lr: Annotated[float, Meta(gt=0)] = 4e-4
    """Peak learning rate."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Decay of the second moment."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Meta(ge=0)] | Literal["1/steps"] = 0.1
    """Decoupled weight decay of the matrices (norms have none); `1/steps` is the scaling-law papers' choice."""


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate over the run."""

    warmup_steps: NotNegative = 1000
    """Steps of linear warm-up from 0."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; `wsd` holds the peak and decays linearly at the end."""
    decay_fraction: Fraction = 0.2
    """Share of the steps that `wsd` decays over."""
    floor: Fraction = 0.05
    """Learning rate at the end, as a share of the peak."""


@dataclass(frozen=True)
class Parallel:
    """What happens inside a worker."""

    fsdp: NotNegative = 0
    """Ranks of one worker, over which FSDP2 shards. 0: all processes divided by `diloco.workers`."""
    reshard_after_forward: Literal["always", "never", "auto"] = "auto"
    """`always` frees a block's full parameters after its forward pass and gathers them again for the backward pass
    (least memory); `never` keeps them; `auto` is `always` with several ranks a worker and `never` with one."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of forward and backward; parameters, gradient sums and optimizer stay fp32. `auto`: bfloat16 on CUDA,
    float32 on the CPU."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Trade compute for memory."""

    mode: Literal["none", "full", "every_nth"] = "none"
    """Which blocks recompute their activations in the backward pass."""
    every: Positive = 2
    """With `every_nth`: every n-th block recomputes."""


@dataclass(frozen=True)
class Compile:
    """torch.compile of each block."""

    enable: bool = False
    """Compile (needs a C++ compiler on the CPU, Triton on CUDA)."""


@dataclass(frozen=True)
class Distributed:
    """Process groups."""

    init_timeout_seconds: Positive = 600
    """How long processes wait for each other at start."""
    train_timeout_seconds: Positive = 300
    """How long a collective inside a worker may take before the run ends with an error. Between workers it is
    `diloco.link.timeout_seconds`."""


@dataclass(frozen=True)
class Validation:
    """Loss on held-out text."""

    every: NotNegative = 500
    """Steps between two validations, which also run at the end. 0 turns validation off."""
    sequences: Positive = 512
    """Held-out sequences a validation reads, all ranks together (fewer if there are fewer)."""
    local: bool = False
    """Also validate the workers' own parameters, each on its share of the sequences, beside the shared ones."""


@dataclass(frozen=True)
class Checkpoint:
    """What is saved of a run, when, and what a run starts from."""

    every: NotNegative = 0
    """Steps between two checkpoints. 0: none by steps."""
    every_minutes: NotNegative = 30
    """Minutes between two checkpoints, by the first rank's clock. 0: none by time."""
    at_end: bool = True
    """Save after the last step, and when a signal (Ctrl-C, SIGTERM, SIGHUP) ends the run."""
    asynchronous: bool = True
    """Training goes on while a copy in host memory is written."""
    keep_latest: Positive = 2
    """So many of the latest checkpoints are kept."""
    keep_every: NotNegative = 0
    """Checkpoints of steps that are a multiple of this are kept for good. 0: none."""
    resume: str = "auto"
    """`auto` goes on with what is in `run.folder`, if there is a checkpoint. `never` starts anew. The folder of a run goes
    on with that run, in its folder; the folder of a checkpoint starts a new run from it."""
    new_workers: Literal["fresh", "copy"] = "fresh"
    """Inner optimizer of workers that the saved run did not have: `fresh`, or a `copy` of another worker's. They start from the
    shared parameters."""


@dataclass(frozen=True)
class Metrics:
    """What is reported."""

    log_every: Positive = 10
    """Steps between two lines on the console and in metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""


@dataclass(frozen=True)
class Profiling:
    """torch.profiler traces."""

    enable: bool = False
    """Write traces (Chrome / Perfetto format) into the run folder."""
    start: NotNegative = 10
    """Steps before the first trace."""
    steps: Positive = 3
    """Steps in one trace."""
    every: NotNegative = 0
    """Steps between the starts of two traces. 0: one trace only."""
    ranks: tuple[NotNegative, ...] = (0,)
    """Ranks that write traces."""


@dataclass(frozen=True)
class Config:
    """A whole run. Only the trainer sees all of it; every component is handed its own section."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    parallel: Parallel = field(default_factory=Parallel)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    distributed: Distributed = field(default_factory=Distributed)
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
