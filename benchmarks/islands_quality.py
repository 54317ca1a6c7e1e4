"""Compare the loss of islands that come, go, lag and die with that of two islands in lockstep.

    python -m benchmarks.islands_quality [--cases 'one always late;constant, 2'] [--seeds 0,1,2]

All cases train the decoder of 0.12M parameters of docs/measurements.md with as many tokens, on the
source of the Python standard library. Islands are threads of this process, around a server on this
machine. A slow island sleeps as long as the steps of the first one take.

Each run is a line of --out: the same command continues where it was interrupted.
"""

import copy
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import core
from benchmarks.parity import mean
from benchmarks.parity_tables import DEFAULTS, MANY_STEPS
from torchtitan_diloco.components.loss import loss_head
from torchtitan_diloco.components.optimizer import (
    build_optimizer,
    clipped_step,
    gradient_norm,
    lr_factor,
    set_lr,
)
from torchtitan_diloco.config import Config, from_command_line
from torchtitan_diloco.data.corpus import open_split, open_tokenizer
from torchtitan_diloco.data.loader import Stream, TrainLoader, ValidationBatches
from torchtitan_diloco.islands import IslandDiLoCo, Islands, connection, leader
from torchtitan_diloco.islands.__main__ import open_reader
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.log import Outcome
from torchtitan_diloco.islands.server import local_server
from torchtitan_diloco.models import LanguageModel, build_model, vocabulary_rows

GRACE_SECONDS = 3.0
"""Longer than an exchange, also on a loaded machine: rounds wait for all islands that are there."""
EXPIRY_SECONDS, BEAT_SECONDS = 2.0, 0.1
"""Shorter than the defaults, as the steps are."""
LOCKSTEP_SECONDS = 60.0
TOKENS_PER_STEP = 512
"""Length of a run of two islands."""
UPLOAD_STEPS = 5
"""Time in which an island uploads that is always late: more than the grace, and less than H."""
ROUNDS_OF_A_LIFE = 20


@dataclass(frozen=True)
class Case:
    islands: tuple[int, ...] = (2,)
    """Islands in each phase."""
    ends: tuple[float, ...] = (1.0,)
    """Share of the run's tokens at which each phase ends."""
    grace: float = GRACE_SECONDS
    slow: float = 1.0
    """How many times longer the steps of the last island are."""
    late: bool = False
    """The uploads of the last island take UPLOAD_STEPS."""
    deaths: str = ""
    """The last island dies again and again; its inner optimizer is then "kept" or "fresh"."""


CONTROL = "lockstep"
CASES = {
    CONTROL: Case(grace=LOCKSTEP_SECONDS),
    "one 3x slower": Case(slow=3.0, grace=0.1),
    "one absent, middle third": Case((2, 1, 2), (1 / 3, 2 / 3, 1.0)),
    "one dies, optimizer kept": Case(deaths="kept"),
    "one dies, optimizer fresh": Case(deaths="fresh"),
    "one always late": Case(late=True, grace=0.1),
    "doubling, 1 2 4": Case((1, 2, 4), (1 / 7, 3 / 7, 1.0)),
    "halving, 4 2 1": Case((4, 2, 1), (4 / 7, 6 / 7, 1.0)),
    "ramp up, 1 2 3 4": Case((1, 2, 3, 4), (0.1, 0.3, 0.6, 1.0)),
    "ramp down, 4 3 2 1": Case((4, 3, 2, 1), (0.4, 0.7, 0.9, 1.0)),
    "constant, 2": Case(),
}
"""Phases of a schedule are equally long if all islands are equally fast."""


def settings(tokens: int, seed: int) -> core.Settings:
    """Return the settings of the same run in one world."""
    shape = {key: value for key, value in MANY_STEPS.items() if key != "checkpoint.every"}
    steps = tokens // TOKENS_PER_STEP
    run = DEFAULTS | shape | {"training.steps": str(steps), "training.batch_size": "4"}
    return run | {"lr_schedule.warmup_steps": str(3 * steps // 10), "run.seed": str(seed)}


# --- an island ------------------------------------------------------------------------------------


class LateIsland(IslandDiLoCo):
    """An island on a slow link."""

    upload_seconds: Callable[[], float]

    def _upload(self, *part: Any) -> None:
        time.sleep(self.upload_seconds())
        super()._upload(*part)


class Island(threading.Thread):
    """One island that trains until the run ends, it is told to leave, or it dies."""

    def __init__(self, run: "Run", number: int, state: dict[str, Any] | None = None) -> None:
        """`state`: of the inner optimizer."""
        super().__init__(name=f"island-{number}", daemon=True)
        last = number == run.case.islands[0] - 1
        self.run_, self.number, config = run, number, run.config
        self.slow = run.case.slow if last else 1.0
        self.leaves, self.dies = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.shared: dict[str, Tensor] = {}
        self.seconds: list[float] = []
        self.model = run.build_model()
        self.optimizer = build_optimizer(self.model, config.optimizer, config.training.steps)
        if state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state))
        begin, slots = run.case.islands[0], max(run.case.islands)
        settings = Islands(
            str(run.join), self.name, slots=slots, begin=begin, grace_seconds=run.case.grace
        )
        late = run.case.late and last
        self.outer = (LateIsland if late else IslandDiLoCo)(
            self.model,
            settings,
            config.diloco,
            total_tokens=run.tokens,
            optimizer=self.optimizer,
            seed=config.run.seed,
            samples_per_step=config.training.batch_size,
        )
        if isinstance(self.outer, LateIsland):
            self.outer.upload_seconds = lambda: UPLOAD_STEPS * run.usual_seconds()

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._train()
        except BaseException as error:
            self.failure = error
        finally:
            self.outer.close()

    def _train(self) -> None:
        outer, config = self.outer, self.run_.config.training
        outer.join()
        batches = iter(self.run_.load(outer, config.batch_size))
        while not outer.finished and not self.leaves.is_set():
            started = time.perf_counter()
            self._step(*next(batches))
            if self.number == 0:
                self.run_.latest_seconds.append(time.perf_counter() - started)
            time.sleep((self.slow - 1) * self.run_.usual_seconds())
            if self.dies.is_set():
                return
            self.seconds.append(time.perf_counter() - started)
            self.run_.trained[outer.seat.slot] += config.batch_size
            outer.step(weight=config.batch_size * config.sequence_length)
        outer.drain()
        if not self.leaves.is_set():
            self.shared = {name: one.clone() for name, one in outer.global_state_dict().items()}

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        """Take an inner step, as `Trainer.train_step` does."""
        config = self.run_.config
        share = self.outer.clock / self.run_.tokens * config.training.steps + 1
        set_lr(self.optimizer, lr_factor(share, config.training.steps, config.lr_schedule))
        training = config.training
        head = loss_head(targets, z_loss=training.z_loss, chunk_tokens=training.loss_chunk_tokens)
        (self.model(inputs, head=head).objective / inputs.numel()).backward()
        norm = gradient_norm(self.model.parameters())
        clipped_step(self.optimizer, norm, training.max_gradient_norm)
        self.optimizer.zero_grad()


# --- a run ----------------------------------------------------------------------------------------


class Run:
    def __init__(self, case: Case, tokens: int, seed: int, join: Join) -> None:
        self.case, self.join = case, join
        config = from_command_line(core.command_line(settings(tokens, seed)))
        assert config is not None
        self.config: Config = config
        self.tokens = config.training.steps * TOKENS_PER_STEP
        tokenizer = open_tokenizer(config.data)
        self._rows = vocabulary_rows(config.model, tokenizer.vocab_size)
        self._text = open_split(config.data, tokenizer, "train")
        self._held_out = open_split(config.data, tokenizer, "validation")
        self.trained: dict[int, int] = defaultdict(int)
        """Samples by slot."""
        self.latest_seconds: deque[float] = deque(maxlen=32)

    def usual_seconds(self) -> float:
        """Return how long a step of the first island takes."""
        return statistics.median(list(self.latest_seconds) or [0.0])

    def build_model(self) -> LanguageModel:
        model = build_model(self.config.model, self._rows, self.config.training.sequence_length)
        model.to_empty(device="cpu")
        model.init_weights(self.config.run.seed)
        return model

    def load(self, outer: IslandDiLoCo, batch: int) -> TrainLoader:
        """Return batches from where the island begins to read its stream."""
        return TrainLoader(
            [self._text],
            sequence_length=self.config.training.sequence_length,
            batch_size=batch,
            accumulation=1,
            rank=0,
            ranks=1,
            seed=self.config.run.seed,
            shuffle=True,
            processes=0,
            start=outer.seat.position,
            stream=Stream(outer.seat.slot, outer.seat.slots, batch),
        )

    def train(self) -> dict[str, Any]:
        """Start and stop islands as the case says, and return what came of the run."""
        latest: dict[int, Island] = {}
        started: list[Island] = []

        def start(number: int) -> None:
            state = None
            if number in latest and self.case.deaths != "fresh":
                state = latest[number].optimizer.state_dict()
            latest[number] = Island(self, number, state)
            started.append(latest[number])
            latest[number].start()

        life = ROUNDS_OF_A_LIFE * self.config.diloco.sync_every * TOKENS_PER_STEP
        died, begun = 0, time.time()
        while not any(island.shared for island in started):
            _raise_failures(started)
            clock = max((island.outer.clock for island in started), default=0)
            ends = (share for share in self.case.ends if clock < share * self.tokens)
            wanted = self.case.islands[self.case.ends.index(next(ends, 1.0))]
            for number in range(max(self.case.islands)):
                alive = number in latest and latest[number].is_alive()
                if number >= wanted and alive:
                    latest[number].leaves.set()
                elif number < wanted and not alive and clock < self.tokens:
                    start(number)
            if self.case.deaths and life * (died + 1) < clock < 0.9 * self.tokens:
                died += 1
                latest[1].dies.set()
                latest[1].join()
                start(1)
            time.sleep(0.01)
        for island in started:
            island.join(60.0)
            assert not island.is_alive(), f"{island.name} does not end"
        _raise_failures(started)
        shared = [island.shared for island in started if island.shared]
        for one in shared:
            assert all(torch.equal(one[name], value) for name, value in shared[0].items())
        usual = [statistics.median(one.seconds) for one in started[:2] if one.seconds]
        found: dict[str, Any] = {"loss": self.evaluate(shared[0]), "seconds": time.time() - begun}
        found |= {"starts": len(started), "died": died, "step_seconds": usual}
        return found | self.read_log()

    @torch.no_grad()
    def evaluate(self, shared: dict[str, Tensor]) -> float:
        """Return the loss of the shared copy on held-out text."""
        model, total, tokens = self.build_model(), 0.0, 0
        model.load_state_dict(shared)
        length, sequences = self.config.training.sequence_length, self.config.validation.sequences
        shape = {"sequence_length": length, "batch_size": 8, "sequences": sequences}
        batches = ValidationBatches(self._held_out, rank=0, ranks=1, **shape)
        for inputs, targets in batches:
            sums = model(inputs, head=loss_head(targets, z_loss=0.0, chunk_tokens=1024))
            total, tokens = total + sums.cross_entropy.item(), tokens + int(sums.tokens)
        return total / tokens

    def read_log(self) -> dict[str, Any]:
        """Return what the log tells of the rounds, and of the samples that were trained."""
        outcomes: list[Outcome] = []
        with open_reader(self.join, outcomes.append) as reader:
            state = reader.state
        entries = [one.entry for one in outcomes if one.entry is not None]
        merged = [0.0] * len(state.slots)
        for number, slot in enumerate(state.slots):
            for span in (span for ledger in slot.ledgers for span in ledger.spans):
                if span.fate == "merged":
                    merged[number] += (span.end - span.start) / len(slot.ledgers)
        late = [entry.close.version - 1 - one.base for entry in entries for one in entry.parts]
        return {
            "merged": [count / self.trained[slot] for slot, count in enumerate(merged)],
            "rounds": len(entries) / len(state.fragments),
            "late": [late.count(versions) for versions in range(max(late) + 1)],
            "parts": statistics.mean(len(entry.parts) for entry in entries),
        }


def _raise_failures(islands: list[Island]) -> None:
    for island in islands:
        if island.failure is not None:
            raise island.failure


def main() -> None:
    parser = core.build_parser(__doc__)
    parser.add_argument("--cases", default="", help="names, separated by ';' (default: all)")
    parser.add_argument("--seeds", type=core.list_of(int), default=[0, 1, 2])
    parser.add_argument("--tokens", type=core.positive, default=409_600)
    parser.add_argument("--grace", type=core.positive_number, help="seconds, but of the control")
    parser.add_argument("--out", type=Path, default=Path("outputs/islands-quality.jsonl"))
    options = parser.parse_args()
    names = core.parse_names(parser, "--cases", options.cases, list(CASES))
    sys.setswitchinterval(0.0005)  # islands of a process take turns
    connection.EXPIRY, leader.BEAT = EXPIRY_SECONDS, BEAT_SECONDS
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.touch()
    for seed in options.seeds:
        for name in names:
            case = CASES[name]
            if options.grace and name != CONTROL:
                case = replace(case, grace=options.grace)
            if (name, seed) in read_results(options.out, options.tokens, options.grace):
                continue
            with tempfile.TemporaryDirectory() as folder, local_server(Path(folder)) as join:
                found = Run(case, options.tokens, seed, join).train()
            run = {"case": name, "seed": seed, "tokens": options.tokens, "grace": case.grace}
            with options.out.open("a") as file:
                file.write(json.dumps(run | found) + "\n")
    print_losses(read_results(options.out, options.tokens, options.grace), options.tokens)


def read_results(
    path: Path, tokens: int, grace: float | None
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the runs of so many tokens with this grace, by case and seed."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    found = {}
    for run in runs:
        name, usual = run["case"], CASES[run["case"]].grace
        wanted = usual if grace is None or name == CONTROL else grace
        if (run["tokens"], run["grace"]) == (tokens, wanted):
            found[name, run["seed"]] = run
    return found


def print_losses(results: dict[tuple[str, int], dict[str, Any]], tokens: int) -> None:
    """Compare with the control seed by seed: what the runs of a seed share cancels."""
    rows = []
    for name in CASES:
        seeds = [seed for case, seed in results if case == name and (CONTROL, seed) in results]
        runs = [results[name, seed] for seed in seeds]
        if not runs:
            continue
        losses, late = [run["loss"] for run in runs], [run["late"] for run in runs]
        more = [
            100 * (run["loss"] / results[CONTROL, seed]["loss"] - 1)
            for seed, run in zip(seeds, runs, strict=True)
        ]
        merged = [100 * min(run["merged"]) for run in runs]
        share = [100 * (1 - counts[0] / sum(counts)) for counts in late]
        rows.append(
            [
                name,
                str(len(runs)),
                mean(losses, ".4f"),
                "" if name == CONTROL else f"{mean(more, '+.2f')} %",
                f"{min(merged):.1f} %",
                f"{statistics.mean(share):.0f} %, {max(map(len, late)) - 1}",
                f"{statistics.mean(run['rounds'] for run in runs):.0f}",
                f"{statistics.mean(run['parts'] for run in runs):.2f}",
            ]
        )
    title = f"validation loss of the shared copy after {tokens:,} tokens, mean (min ... max)"
    header = "case | n | loss | against lockstep | merged, least | late parts, versions"
    core.print_table(title, f"{header} | rounds | parts a round", rows)


if __name__ == "__main__":
    main()
