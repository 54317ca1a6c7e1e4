"""Compare the loss of islands that join, leave, lag and die with that of islands in lockstep.

    .venv/bin/python -m benchmarks.islands_quality [--cases 'one always late'] [--seeds 0,1,2]

All cases train the decoder of 0.12M parameters of docs/measurements.md with the same number of
tokens, on the source of the Python standard library. Islands are threads of this process, with a
server on this machine. A slow island sleeps in multiples of the first island's step. Except in
lockstep, rounds wait for 0.1 s, which is less than an exchange takes.

Each run is a line of --out. The same command continues an interrupted table.
"""

import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import core
from benchmarks.islands_program import audit
from benchmarks.parity import against
from benchmarks.parity_tables import DEFAULTS, MANY_STEPS
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.optimizer import (
    build_optimizer,
    clipped_step,
    gradient_norm,
    lr_factor,
    set_lr,
)
from torchtitan_diloco.components.validation import validate
from torchtitan_diloco.config import Config, from_command_line
from torchtitan_diloco.data.corpus import open_split
from torchtitan_diloco.data.loader import Stream, TrainLoader, ValidationBatches
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diloco import StreamingDiLoCo
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.islands import IslandPeers, Islands, connection, leader
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.leader import Seat
from torchtitan_diloco.islands.local import local_server
from torchtitan_diloco.models import LanguageModel, build_model, vocabulary_rows

EXPIRY_SECONDS, BEAT_SECONDS = 2.0, 0.1
"""Shorter than the defaults, as steps are short."""
TOKENS_PER_STEP = 512
"""Two islands together train so many tokens in a step."""
UPLOAD_STEPS = 5
"""Length of an upload of an island that is always late: more than the grace, less than H."""
ROUNDS_OF_A_LIFE = 20


@dataclass(frozen=True)
class Case:
    islands: tuple[int, ...] = (2,)
    """Number of islands in each phase."""
    ends: tuple[float, ...] = (1.0,)
    """End of each phase, as a share of the tokens of the run."""
    grace: float = 0.1
    slow: float = 1.0
    """Length of the last island's steps / that of the others."""
    late: bool = False
    """The uploads of the last island take UPLOAD_STEPS."""
    dies: bool = False
    """The last island dies repeatedly, and restarts with a fresh inner optimizer."""


CONTROL = "lockstep"
CASES = {
    CONTROL: Case(grace=60.0),
    "constant, 2": Case(),
    "one 3x slower": Case(slow=3.0),
    "one absent, middle third": Case((2, 1, 2), (1 / 3, 2 / 3, 1.0)),
    "one dies, optimizer fresh": Case(dies=True),
    "one always late": Case(late=True),
    "doubling, 1 2 4": Case((1, 2, 4), (1 / 7, 3 / 7, 1.0)),
    "halving, 4 2 1": Case((4, 2, 1), (4 / 7, 6 / 7, 1.0)),
    "ramp up, 1 2 3 4": Case((1, 2, 3, 4), (0.1, 0.3, 0.6, 1.0)),
    "ramp down, 4 3 2 1": Case((4, 3, 2, 1), (0.4, 0.7, 0.9, 1.0)),
}
"""All phases of a case take equally long if all islands are equally fast."""


def settings(tokens: int, seed: int) -> core.Settings:
    """Return the settings of the same run as a single job."""
    shape = {key: value for key, value in MANY_STEPS.items() if key != "checkpoint.every"}
    steps = tokens // TOKENS_PER_STEP
    run = DEFAULTS | shape | {"training.steps": str(steps), "training.batch_size": "4"}
    return run | {"lr_schedule.warmup_steps": str(3 * steps // 10), "run.seed": str(seed)}


class LatePeers(IslandPeers):
    """An island on a slow link."""

    upload_seconds: Callable[[], float]

    def _upload(self, *part: Any) -> None:
        time.sleep(self.upload_seconds())
        super()._upload(*part)


class Island(threading.Thread):
    """An island that trains until the run ends, or until it has to leave or die."""

    def __init__(self, run: "Run", number: int) -> None:
        super().__init__(name=f"island-{number}", daemon=True)
        case, config = run.case, run.config
        last = number == case.islands[0] - 1
        self.run_, self.number, self.slow = run, number, case.slow if last else 1.0
        self.leaves, self.dies = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.shared: dict[str, Tensor] = {}
        self.model = run.build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer, config.training.steps)
        self.peers = (LatePeers if case.late and last else IslandPeers)(
            Islands(
                str(run.join),
                self.name,
                slots=max(case.islands),
                begin=case.islands[0],
                grace_seconds=case.grace,
            ),
            total_tokens=run.tokens,
            tokens_per_step=config.training.batch_size * config.training.sequence_length,
            samples_per_step=config.training.batch_size,
        )
        self.outer = StreamingDiLoCo(
            self.model, self.peers, config.diloco, optimizer=self.optimizer
        )
        if isinstance(self.peers, LatePeers):
            self.peers.upload_seconds = lambda: UPLOAD_STEPS * run.usual_seconds()

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._train()
        except BaseException as error:
            self.failure = error
        finally:
            self.outer.close()

    def _train(self) -> None:
        outer, run, training = self.outer, self.run_, self.run_.config.training
        batches = iter(run.load(self.peers.join()))
        while not self.peers.finished and not self.leaves.is_set():
            started = time.perf_counter()
            self._step(*next(batches))
            if self.number == 0:
                run.latest_seconds.append(time.perf_counter() - started)
            time.sleep((self.slow - 1) * run.usual_seconds())
            if self.dies.is_set():
                return
            run.trained[self.peers.seat.slot] += training.batch_size
            outer.step(weight=training.batch_size * training.sequence_length)
        outer.drain()
        if not self.leaves.is_set():
            self.shared = {name: one.clone() for name, one in outer.global_state_dict().items()}

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        """Take an inner step, as `Trainer.train_step` does."""
        config, training = self.run_.config, self.run_.config.training
        share = self.peers.clock / self.run_.tokens * training.steps + 1
        set_lr(self.optimizer, lr_factor(share, training.steps, config.lr_schedule))
        head = loss_head(targets, z_loss=training.z_loss, chunk_tokens=training.loss_chunk_tokens)
        (self.model(inputs, head=head).objective / inputs.numel()).backward()
        norm = gradient_norm(self.model.parameters())
        clipped_step(self.optimizer, norm, training.max_gradient_norm)
        self.optimizer.zero_grad()


class Run:
    def __init__(self, case: Case, tokens: int, seed: int, join: Join) -> None:
        self.case, self.join = case, join
        config = from_command_line(core.command_line(settings(tokens, seed)))
        assert config is not None
        self.config: Config = config
        self.tokens = config.training.steps * TOKENS_PER_STEP
        tokenizer = build_tokenizer(config.data.tokenizer)
        self._rows = vocabulary_rows(config.model, tokenizer.vocab_size)
        self._text = open_split(config.data, tokenizer, "train")
        self._held_out = open_split(config.data, tokenizer, "validation")
        self.trained: dict[int, int] = defaultdict(int)
        """Samples by slot."""
        self.latest_seconds: deque[float] = deque(maxlen=32)

    def usual_seconds(self) -> float:
        """Return the median seconds of the first island's last steps."""
        return statistics.median(list(self.latest_seconds) or [0.0])

    def build_model(self) -> LanguageModel:
        model = build_model(self.config.model, self._rows, self.config.training.sequence_length)
        model.to_empty(device="cpu")
        model.init_weights(self.config.run.seed)
        return model

    def load(self, seat: Seat) -> TrainLoader:
        """Return batches from the position at which the island joins its stream."""
        training = self.config.training
        return TrainLoader(
            self._text,
            sequence_length=training.sequence_length,
            batch_size=training.batch_size,
            accumulation=1,
            rank=0,
            ranks=1,
            seed=self.config.run.seed,
            shuffle=True,
            processes=0,
            start=seat.position,
            stream=Stream(seat.slot, seat.slots, training.batch_size),
        )

    def train(self) -> dict[str, Any]:
        """Start and stop islands as the case says, and return the results of the run."""
        case = self.case
        latest: dict[int, Island] = {}
        started: list[Island] = []

        def start(number: int) -> None:
            latest[number] = Island(self, number)
            started.append(latest[number])
            latest[number].start()

        life = ROUNDS_OF_A_LIFE * self.config.diloco.sync_every * TOKENS_PER_STEP
        died = 0
        while not any(island.shared for island in started):
            raise_failures(started)
            clock = max((island.peers.clock for island in started), default=0)
            phases = zip(case.ends, case.islands, strict=True)
            wanted = next((n for end, n in phases if clock < end * self.tokens), case.islands[-1])
            for number in range(max(case.islands)):
                alive = number in latest and latest[number].is_alive()
                if number >= wanted and alive:
                    latest[number].leaves.set()
                elif number < wanted and not alive and clock < self.tokens:
                    start(number)
            if case.dies and life * (died + 1) < clock < 0.9 * self.tokens:
                died += 1
                latest[1].dies.set()
                latest[1].join()
                start(1)
            time.sleep(0.01)
        for island in started:
            island.join(60.0)
            assert not island.is_alive(), f"{island.name} does not end"
        raise_failures(started)
        first, *rest = [island.shared for island in started if island.shared]
        for one in rest:
            assert all(torch.equal(one[name], value) for name, value in first.items())
        return {"loss": self.evaluate(first)} | self.read_log()

    def evaluate(self, shared: dict[str, Tensor]) -> float:
        """Return the loss of the shared copy on held-out text."""
        model = self.build_model()
        model.load_state_dict(shared)
        length, sequences = self.config.training.sequence_length, self.config.validation.sequences
        shape = {"sequence_length": length, "batch_size": 8, "sequences": sequences}
        batches = ValidationBatches(self._held_out, rank=0, ranks=1, **shape)
        world = World(rank=0, size=1, workers=1, device=core.CPU)
        return validate(model, batches, world, chunk_tokens=1024).loss

    def read_log(self) -> dict[str, Any]:
        """Return statistics of rounds and trained samples from the log."""
        found = audit(self.join)
        merged, late = [], found["late"]
        for number, slot in enumerate(found["ledger"]):
            spans = [span for spans in slot for span in spans if span[2] == "merged"]
            samples = sum(end - start for start, end, _ in spans)
            merged.append(samples / len(slot) / self.trained[number])
        return {
            "merged": merged,
            "rounds": len(found["participants"]) / len(found["ledger"][0]),
            "late": [late.count(versions) for versions in range(max(late) + 1)],
            "parts": statistics.mean(found["participants"]),
        }


def raise_failures(islands: list[Island]) -> None:
    for island in islands:
        if island.failure is not None:
            raise island.failure


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--cases", default="", help="names, separated by ';' (default: all)")
    parser.add_argument("--seeds", type=core.list_of(int), default=[0, 1, 2])
    parser.add_argument("--tokens", type=core.positive, default=409_600)
    parser.add_argument("--out", type=Path, default=Path("outputs/islands-quality.jsonl"))
    options = parser.parse_args()
    names = core.parse_names(parser, "--cases", options.cases, list(CASES))
    sys.setswitchinterval(0.0005)  # islands are threads, and must not wait long for each other
    connection.EXPIRY, leader.BEAT = EXPIRY_SECONDS, BEAT_SECONDS
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.touch()
    results = read_results(options.out, options.tokens)
    for seed, name in product(options.seeds, names):
        if (name, seed) not in results:
            with tempfile.TemporaryDirectory() as folder, local_server(Path(folder)) as server:
                found = Run(CASES[name], options.tokens, seed, server.join).train()
            with options.out.open("a") as file:
                run = {"case": name, "seed": seed, "tokens": options.tokens}
                file.write(json.dumps(run | found) + "\n")
    print_losses(read_results(options.out, options.tokens), options.tokens)


def read_results(path: Path, tokens: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the runs with this number of tokens, by case and seed."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return {(run["case"], run["seed"]): run for run in runs if run["tokens"] == tokens}


def print_losses(results: dict[tuple[str, int], dict[str, Any]], tokens: int) -> None:
    rows, found = [], {name: losses_of(results, name) for name in CASES}
    for name, losses in found.items():
        if not losses:
            continue
        runs = [results[name, seed] for seed in losses]
        late = [run["late"] for run in runs]
        share = statistics.mean(100 * (1 - counts[0] / sum(counts)) for counts in late)
        rows.append(
            [
                name,
                str(len(runs)),
                core.mean(list(losses.values()), ".4f"),
                "" if name == CONTROL else against(losses, found[CONTROL]),
                f"{100 * min(min(run['merged']) for run in runs):.1f} %",
                f"{share:.0f} %, {max(map(len, late)) - 1}",
            ]
        )
    title = f"validation loss of the shared copy after {tokens:,} tokens, mean (min ... max)"
    core.print_table(title, "case | n | loss | against lockstep | merged | parts late", rows)


def losses_of(results: dict[tuple[str, int], dict[str, Any]], name: str) -> dict[int, float]:
    return {seed: run["loss"] for (case, seed), run in results.items() if case == name}


if __name__ == "__main__":
    main()
