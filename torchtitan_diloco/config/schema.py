"""Settings of a run. Each dataclass is a `[section]` of a TOML file.

The docstring of a field is its text in `--help`. A setting that is None is "not set", and is left
out of TOML files, which have no null. To add a setting, add a field with type, range, default and
docstring. If only some choices of another setting read it, name it in `reads` of their entries in
parts.py, or in `READ_WITH` of checks.py.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from torchtitan_diloco.base.registry import OneOf
from torchtitan_diloco.base.settings import (
    MOST_SECONDS,
    Fraction,
    Length,
    NoneOrWorkers,
    NotNegative,
    Positive,
    Seconds,
)
from torchtitan_diloco.base.settings import flat_settings as flat_settings
from torchtitan_diloco.base.settings import flatten as flatten
from torchtitan_diloco.config.parts import BOARDS, OPTIMIZERS, SCHEDULES
from torchtitan_diloco.diloco.config import DiLoCoConfig
from torchtitan_diloco.islands.config import Islands


@dataclass(frozen=True)
class Run:
    """Name, output folder and reproducibility of the run."""

    name: str = ""
    """Name of the run. Empty: the name of the config file."""
    folder: str = ""
    """Folder for the resolved config, metrics, traces and checkpoints. Empty: a new folder
    `outputs/<name>-<date>-<time>` on one machine, or `outputs/<name>-<id>` under torchrun, with
    its `--rdzv-id`. Workers that do not share a disk have one each."""
    description: str = ""
    """One line about the run for later readers."""
    imports: tuple[str, ...] = ()
    """Modules of your own, in the current folder or installed, which add models, optimizers and
    other choices to these settings (docs/own-parts.md). All processes import them first."""
    seed: NotNegative = 0
    """Seed of the initial weights, data order and dropped rounds."""
    deterministic: bool = False
    """Use deterministic kernels only, so that the same run gives the same bits. Slower on CUDA."""
    restarts: NotNegative = 10
    """How often a crashed run is restarted from its latest checkpoint: torchrun's
    `--max-restarts`."""
    preemption: Literal["none", "aws", "gcp", "azure"] = "none"
    """Cloud whose metadata server tells each node that its machine is about to be taken away. The
    run then saves and stops, and an island sends its work and leaves, as after SIGTERM."""
    preemption_address: str = ""
    """Address of the metadata server, such as http://127.0.0.1:8000. Empty: that of the cloud."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type. `auto`: CUDA if there is a GPU, otherwise the CPU."""


Dimension = Annotated[int, Meta(ge=1, le=2**20)]
"""Size of a model in one direction. The bytes of a matrix of `heads * head_dim` rows fit in 64
bits."""


@dataclass(frozen=True)
class Model:
    """Model architecture: a named shape, and changes to it."""

    flavor: str = "debug"
    """Name of the model: debug, SIZE or paper-SIZE (35m, 100m, 200m, 300m, 500m, 1b, 2.4b, 4b,
    10b), diloco-SIZE (60m, 150m, 400m), llama-SIZE (1b, 3b, 8b), or one that you add. `35m` to
    `10b`: SwiGLU and normalized queries and keys, as in Qwen3. `paper-...`, `diloco-...`: as in
    Streaming DiLoCo, its scaling laws, and DiLoCo, with GELU. `llama-...`: Llama 3.2 and 3.1 as
    published."""
    weights: str = ""
    """Initial weights of a new run: an exported folder, a transformers folder or torchtitan
    checkpoint (DCP) with a Qwen3 or Llama, or a safetensors file. Empty: random."""
    layers: Dimension | None = None
    """Number of transformer blocks. This and the following settings override the flavor."""
    width: Dimension | None = None
    """Width of the residual stream."""
    heads: Dimension | None = None
    """Number of attention heads."""
    kv_heads: Dimension | None = None
    """Number of key and value heads. Each serves `heads` / `kv_heads` query heads."""
    head_dim: Dimension | None = None
    """Width of one attention head."""
    feed_forward: Dimension | None = None
    """Hidden width of the feed-forward layer."""
    vocab_size: Annotated[int, Meta(ge=1, le=2**30)] | None = None
    """Rows of the embedding. Not set, or set before `data.tokenizer` was (as by a preset): the
    size of the tokenizer's vocabulary, rounded up to a multiple of 64."""
    activation: Literal["swiglu", "gelu"] | None = None
    """Feed-forward layer: SwiGLU (three matrices) or GELU (two; transformers has no such model)."""
    qk_norm: bool | None = None
    """Normalize the queries and keys of each head before attention. Qwen3 does, Llama does not."""
    tied_head: bool | None = None
    """Use one matrix as both embedding and head."""
    norm_epsilon: Annotated[float, Meta(gt=0)] | None = None
    """Epsilon of all RMSNorms."""
    rotary_base: Annotated[float, Meta(gt=1)] | None = None
    """Base of the rotary frequencies."""
    rotary_scaling: Annotated[float, Meta(ge=1)] | None = None
    """Factor by which Llama 3.1 and 3.2 reduce the low rotary frequencies, for texts longer than
    8,192 tokens. 1: no change."""
    document_mask: bool = False
    """Restrict attention to one document: a token attends only to earlier tokens of its document
    in its sequence. Otherwise it attends to all earlier tokens of the sequence."""


WORKER_FIELD = "{worker}"
"""Placeholder in the name of a corpus for the number of the worker that reads it."""


@dataclass(frozen=True)
class Phase:
    """A later part of a run that reads another mixture."""

    start: float
    """Share of the run at which the phase starts."""
    mixture: dict[str, float]
    """Weights of the corpora from then on, as in `data.mixture`."""


@dataclass(frozen=True)
class Data:
    """Training text, tokenizer and order of the samples."""

    corpus: str = "stdlib"
    """Training data: `stdlib` (the source of the Python standard library), a folder of token shards
    written by the command `prepare`, or text files as comma-separated paths and globs (`.txt`,
    `.md`, `.py`, `.jsonl`, all optionally as `.gz`)."""
    mixture: dict[str, float] = field(default_factory=dict)
    """Weights of several corpora, used in place of `corpus` and named in the same way. On the
    command line: `--data.mixture data/web=0.7 data/code=0.3`."""
    phases: tuple[Phase, ...] = ()
    """Later parts of the run, with other mixtures: tables with `start`, a share of the run, and
    `mixture`."""
    source: str = ""
    """Source of the text for a missing shard folder: any text `corpus`, or a Hugging Face
    dataset `hf:NAME[/SUBSET][:SPLIT]`. Only used to print the `prepare` command."""
    tokenizer: str = "bytes"
    """`bytes` (one token per byte), a tiktoken encoding such as `gpt2`, or the path of a
    Hugging Face `tokenizer.json`."""
    validation_corpus: str = ""
    """Separate corpus for validation. Empty: the held-out part of `corpus`."""
    validation_fraction: Annotated[float, Meta(ge=0, le=0.5)] = 0.02
    """Fraction of the pieces of a text corpus that are held out, at least one of several. A
    document of up to 32,768 characters is one piece; of a longer one, the pieces around a held-out
    one are trained on. Shard folders have a fixed split."""
    cache_folder: str = ".cache/corpora"
    """Folder that caches the tokens of text corpora."""
    shuffle: bool = True
    """Read the sequences in random order, with a new order in each epoch. Depends on `run.seed`."""
    shard_by: Literal["none", "random", "own"] = "none"
    """Text that each worker reads. `none`: all workers share all text. `random`: an equal random
    part of the sequences. `own`: its own corpora, with `{worker}` in their names, which is the
    number of the worker or the name of the island; averages are weighted by their tokens."""
    prefetch: NotNegative = 0
    """Micro-batches that a thread of each rank reads ahead. 0: read when they are needed, which is
    usually fast enough."""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the corpora at the beginning of the run, by name."""
        return dict(self.mixture) or {self.corpus: 1.0}

    @property
    def mixtures(self) -> list[dict[str, float]]:
        """Weights of the corpora at the beginning of the run, and in each phase."""
        return [self.weights, *(phase.mixture for phase in self.phases)]

    @property
    def corpora(self) -> list[str]:
        """Names of all corpora of the run, in the order in which they appear."""
        return list(dict.fromkeys(name for mixture in self.mixtures for name in mixture))

    @property
    def corpora_key(self) -> str:
        """Setting that names the corpora to train on."""
        if self.mixture:
            return "data.mixture"
        return "data.phases" if self.phases else "data.corpus"

    @property
    def held_out_corpora(self) -> list[str]:
        """Names of the corpora to validate on."""
        return [self.validation_corpus] if self.validation_corpus else self.corpora


@dataclass(frozen=True)
class Training:
    """Batch size, length of the run, gradients and loss."""

    sequence_length: Positive = 2048
    """Tokens per sequence."""
    batch_size: Positive = 8
    """Sequences per rank and forward pass."""
    global_batch_size: Positive | None = None
    """Sequences per step over all workers, reached by gradient accumulation. Not set: no
    accumulation."""
    steps: NotNegative = 0
    """Length of the run in steps. Set one of `steps`, `tokens` and `tokens_per_parameter`."""
    tokens: NotNegative = 0
    """Length of the run in tokens over all workers."""
    tokens_per_parameter: Annotated[float, Meta(ge=0)] = 0.0
    """Length of the run as tokens over all workers per model parameter. Chinchilla uses 20."""
    stop_after: NotNegative = 0
    """Save and stop after this step, before the end of the run. The learning-rate schedule still
    covers the whole run. 0: train to the end."""
    max_gradient_norm: Annotated[float, Meta(ge=0)] = 1.0
    """Clip gradients to this global norm. 0: do not clip."""
    max_skipped_steps: NotNegative = 10
    """Skip steps with non-finite gradients. More than this many in a row end the run."""
    z_loss: Annotated[float, Meta(ge=0)] = 1e-4
    """Weight of the z-loss (squared log-partition of the logits, which keeps them small)."""


@dataclass(frozen=True)
class Optimizer:
    """Inner optimizer."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """`muon`: Muon for the matrices of the blocks; AdamW for embeddings, head and norms."""
    lr: Annotated[float, Meta(gt=0, le=100)] = 4e-4
    """Peak learning rate."""
    matrix_lr: Annotated[float, Meta(gt=0, le=100)] | None = None
    """Peak learning rate of `muon`, whose updates are scaled to the size of AdamW's. Not set: the
    same as `lr`."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay rate of the Nesterov momentum of `muon`."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    """Decay rate of the second moment."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: Annotated[float, Meta(ge=0)] | Literal["1/steps"] = 0.1
    """Decoupled weight decay of the matrices; norms have none. `1/steps`: one divided by the number
    of steps of the run, as in the scaling-law paper."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of an optimizer that a module of `run.imports` adds. On the command line:
    `--optimizer.options rank=8 rescale=true`."""


@dataclass(frozen=True)
class LrSchedule:
    """Learning-rate schedule of the inner optimizer."""

    warmup: Length = 1000
    """Length of the linear warm-up from 0, in steps, or as a share of the run if below 1."""
    decay: Annotated[str, OneOf(SCHEDULES)] = "cosine"
    """Shape after the warm-up. `wsd` keeps the peak and decays linearly at the end."""
    decay_fraction: Fraction = 0.2
    """Fraction of the steps in which `wsd` decays."""
    floor: Fraction = 0.05
    """Learning rate at the end of the run, as a fraction of the peak."""


@dataclass(frozen=True)
class Parallel:
    """Parallelism inside a worker."""

    fsdp: NoneOrWorkers = 0
    """Ranks per worker, over which FSDP2 shards the model. 0: all processes / `diloco.workers`."""
    reshard_after_forward: Literal["always", "never", "auto"] = "auto"
    """`always`: free the gathered parameters of a block after its forward pass and gather them
    again for the backward pass (least memory). `never`: keep them. `auto`: `always` with several
    ranks per worker, otherwise `never`."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the forward and backward pass. Parameters and optimizer state are fp32. `auto`:
    bfloat16 on CUDA, float32 on the CPU."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are averaged over ranks, and added up over the micro-batches of
    a step. `bfloat16` halves what data parallelism sends; only with `diloco.method` = `none`."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Activation checkpointing: less memory, more compute."""

    mode: Literal["none", "full", "every_nth", "selective"] = "none"
    """What to recompute in the backward pass: nothing, all blocks, every n-th block, or, in all
    blocks, everything except attention and the matrix products that `every` keeps."""
    every: Positive = 2
    """For `every_nth`: recompute every n-th block. For `selective`: recompute every n-th matrix
    product of a block; 1 recomputes all of them and keeps only attention."""


@dataclass(frozen=True)
class Compile:
    """Compilation of the blocks by torch.compile."""

    enable: bool = False
    """Compile each block. Needs a C++ compiler on the CPU, Triton on CUDA."""


@dataclass(frozen=True)
class Distributed:
    """Process groups inside a worker, and start-up."""

    init_timeout_seconds: Seconds = 600
    """Seconds for which processes wait for each other at the start."""
    train_timeout_seconds: Seconds = 300
    """Seconds after which a collective inside a worker fails and ends the run; with several
    workers at least `diloco.link.timeout_seconds` + 60, which applies between workers."""


@dataclass(frozen=True)
class Validation:
    """Loss on held-out text, and samples of the text that the model writes."""

    every: NotNegative = 500
    """Steps between two validations. The last step is validated too. 0: no validation at all."""
    sequences: Positive = 512
    """Held-out sequences per validation over all ranks, spaced evenly over the held-out text, or
    all of them if there are fewer."""
    sample_every: NotNegative = 0
    """Steps between two samples, which are logged, recorded and shown on the boards. The last step
    has one, too. 0: none."""
    sample_prompt: str = ""
    """Text that the samples continue. Empty: they are beginnings of documents."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints: when to save, what to keep, what to start from."""

    every: NotNegative = 0
    """Steps between two checkpoints. 0: do not save by steps."""
    every_minutes: NotNegative = 5
    """Minutes between two checkpoints, by the clock of rank 0. 0: do not save by time."""
    at_end: bool = True
    """Save after the last step, and when a signal (SIGINT, SIGTERM, SIGHUP) stops the run."""
    keep_latest: Positive = 2
    """Number of latest checkpoints to keep."""
    keep_every: NotNegative = 0
    """Also keep all checkpoints whose step is a multiple of this. 0: none."""
    mirror: str = field(default="", repr=False)  # someone may write a login into it
    """Location to which each checkpoint is copied during training, and from which a run that has
    lost `run.folder` continues: a folder, a join file of an S3 server, `s3://BUCKET/PATH`,
    `gs://...` or `az://...`. Use a separate one for each run, the same for all its workers. Empty:
    none."""
    adopt: bool = False
    """Continue the run whose copies are in `mirror` although `run.folder` has no checkpoint and the
    settings differ in more than the length of the run, its workers, ranks, batch size, link,
    checkpoints, metrics and prices. Otherwise, this is an error."""
    mirror_wait_seconds: Annotated[int, Meta(ge=0, le=MOST_SECONDS)] = 300
    """Seconds that a run waits at its end for the last copy. After a signal, it waits at most until
    the processes are killed."""
    resume: str = "auto"
    """Where a run without checkpoints in `run.folder` and `mirror` starts: `auto` (from the
    beginning), or the folder of another run or checkpoint. A run with checkpoints resumes from the
    latest undamaged one."""

    @property
    def is_used(self) -> bool:
        """Whether a run saves checkpoints, even if it is not paused by `training.stop_after`."""
        return bool(self.every or self.every_minutes or self.at_end)


@dataclass(frozen=True)
class Metrics:
    """Logging."""

    log_every: Positive = 10
    """Steps between two lines on the console and in the records."""
    boards: tuple[Annotated[str, OneOf(BOARDS)], ...] = ("tensorboard",)
    """Programs that show the curves. `tensorboard`: event files in the folder of each worker. Those
    of the first worker, or of each island, which are one group there: `wandb:PROJECT`, Weights &
    Biases (extra `wandb`; without a network, set WANDB_MODE=offline), and `mlflow:EXPERIMENT`,
    MLflow on the server in MLFLOW_TRACKING_URI (extra `mlflow`). On the command line:
    `--metrics.boards tensorboard wandb:my-project`, or `none`."""


UnitPrice = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Price:
    """Prices of your providers, in any currency, by which `plan`, `compare` and a run say what its
    traffic costs."""

    per_gb: UnitPrice = 0.0
    """Price of 10^9 bytes that leave the place where they are paid for: those that workers of a
    job send, or those that are read from the bucket of islands."""
    per_gb_up: UnitPrice = 0.0
    """Price of 10^9 bytes that are sent to the bucket of islands, if their machines are at a
    provider that charges for what leaves it."""
    per_million_reads: UnitPrice = 0.0
    """Price of a million requests that read an object of the bucket of islands."""
    per_million_writes: UnitPrice = 0.0
    """Price of a million requests that write an object of that bucket, or list its objects."""


PRICES = tuple(flat_settings(Price(), "price."))
"""Keys of the prices, which differ between providers, and change nothing in a run."""


@dataclass(frozen=True)
class Profiling:
    """A torch.profiler trace of the first rank of each worker."""

    start: NotNegative = 0
    """Steps of this process before the trace, which is written to the run folder in Chrome /
    Perfetto format. 0: no trace."""
    steps: Positive = 3
    """Steps of the trace."""


@dataclass(frozen=True)
class Config:
    """All settings of a run. Builders and `RunData` read several sections; the parts
    that they build are handed theirs."""

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
    islands: Islands = field(default_factory=Islands)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    price: Price = field(default_factory=Price)
    profiling: Profiling = field(default_factory=Profiling)

    @property
    def workers(self) -> int:
        """Workers that train together from the start, including those of other islands."""
        islands = self.islands
        if islands.local:
            return islands.begin or islands.local
        if islands.join and islands.begin:
            return islands.begin
        return self.diloco.workers

    def worker_name(self, worker: int) -> str:
        """Return the value of `{worker}` in the names of corpora: the name of an island, or the
        number of a worker of a job."""
        return self.islands.name or str(worker)

    @property
    def workers_of_job(self) -> int:
        """Workers that are started together, as one job."""
        return 1 if self.islands.join else self.diloco.workers


def portable(config: Config) -> Config:
    """Return the settings that start the same run elsewhere, without its folders and passwords."""
    return replace(
        config,
        run=replace(config.run, folder=""),
        islands=replace(config.islands, join=""),
        checkpoint=replace(config.checkpoint, mirror="", adopt=False),
    )


BARE_KEY = "[A-Za-z0-9_-]+"
"""Keys of TOML that need no quotes."""


def format_value(value: Any) -> str:
    """Format a value as TOML on one line. JSON of texts, finite numbers and true or false is valid
    TOML, except for the character DEL."""
    if isinstance(value, dict):
        entries = [
            f"{key if re.fullmatch(BARE_KEY, key) else format_value(key)} = {format_value(entry)}"
            for key, entry in value.items()
        ]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
