"""What `benchmarks.gpu` runs: at full size on a GPU, and in miniature on a CPU."""

from dataclasses import dataclass

import torch

from benchmarks import core
from torchtitan_diloco.base.user import REPOSITORY
from torchtitan_diloco.diloco.config import BLOCK_SIZES

RUN = {
    "checkpoint.every_minutes": "0",
    "lr_schedule.warmup": "5",
    "metrics.log_every": "1",
    "metrics.boards": "none",
    "run.restarts": "0",
    "run.deterministic": "true",
    "validation.every": "0",
}


@dataclass(frozen=True)
class Scale:
    device: torch.device
    flavor: str
    step: core.Settings
    """Settings of the measured step."""
    run: core.Settings
    """Settings of whole runs."""
    blocks: tuple[int, ...]
    megabytes: tuple[float, ...]
    rounds: int
    host: core.Settings
    """Settings of the workers that show what state in host memory costs."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


LARGE = {"model.flavor": "paper-1b", "model.vocab_size": "32000", "run.device": "cuda"}
SMALL = {
    "training.sequence_length": "32",
    "run.device": "cpu",
    "data.corpus": str(REPOSITORY / "README.md"),
}
GPU = Scale(
    device=torch.device("cuda", 0),
    flavor="paper-1b",
    step=LARGE | {"training.sequence_length": "2048"},
    run=RUN
    | {"model.flavor": "paper-35m", "training.sequence_length": "512", "run.device": "cuda"},
    blocks=BLOCK_SIZES,
    megabytes=(2, 64, 604),
    rounds=5,
    host=LARGE | {"model.flavor": "paper-500m", "training.sequence_length": "1024"},
)
MINIATURE = Scale(
    device=core.CPU,
    flavor="debug",
    step=SMALL,
    run=RUN | SMALL,
    blocks=(64,),
    megabytes=(0.1,),
    rounds=1,
    host=SMALL,
)
