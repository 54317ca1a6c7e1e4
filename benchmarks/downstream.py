"""Compare data parallelism and streaming after fine-tuning, on tasks made from held-out text.

    .venv/bin/python -m benchmarks.downstream --out DIR [--section.key value ...]

For each seed this trains a model with data parallelism and one with streaming, for equal tokens,
or it takes the checkpoints of finished runs (`--runs DIR ...`). The control, the merged model
(shared parameters) and a single worker (its own parameters) answer questions of the tasks in
benchmarks/downstream_tasks.py, before and after the same fine-tuning on other questions. A task
counts where a model clearly beats chance: `counts`. Finished parts are kept in --out, so that
the same command continues. Without --corpus, the text is the source of Python's standard library.
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks import core, records, scale
from benchmarks.downstream_models import CONTROL, Source, find_sources, open_source, read_held_out
from benchmarks.downstream_tasks import TASKS, Example, examples_of_all
from torchtitan_diloco.base.formatting import markdown_table
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint_folder import read_manifest
from torchtitan_diloco.components.validation import open_held_out, validate
from torchtitan_diloco.data.batch import IGNORE_INDEX, Batch
from torchtitan_diloco.data.shards import INDEX_NAME, read_index
from torchtitan_diloco.data.tokenizer import Tokenizer
from torchtitan_diloco.distributed.world import World, pick_device
from torchtitan_diloco.export.weights import SavedModel, open_saved
from torchtitan_diloco.models.interface import parameter_counts

STEPS = 300
"""Steps of the fine-tuning of every model, by AdamW."""
EXAMPLES_PER_STEP = 8
"""Examples of each task in a step."""
LR = 1e-3
"""Learning rate, which is constant."""
PAIRS_AT_ONCE = 128
"""Pairs of a context and an answer in a forward pass without gradients."""
CLEARLY = 0.99
"""One-sided confidence that a model beats chance."""
LIKELY = 0.95
"""Two-sided confidence of a difference."""
PHASES = "before", "after"
WARM_UP = "0.2"
"""Share of a run that warms up, and in which streaming begins with frequent syncs."""
RESERVED = {
    *("run.folder", "run.seed", "data.corpus"),
    *("diloco.method", "diloco.workers", "diloco.sync_every"),
}
LOSSES = "model | tokens | loss on held-out text | against the control"
ANSWERS = "task | fine-tuning | chance, % | data parallel, %"


# --- answers --------------------------------------------------------------------------------------


def encode(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, length: int) -> Batch:
    """Return inputs, and targets that are the answers of (context, answer), with padding.

    Contexts lose their first tokens if there are more than the model was trained with.
    """
    inputs = []
    targets = []
    for context, answer in pairs:
        before, after = (
            torch.from_numpy(tokenizer.encode(text).astype("int64")) for text in (context, answer)
        )
        row = torch.cat([before, after])[-length - 1 :]
        target = row[1:].clone()
        target[: -len(after)] = IGNORE_INDEX
        inputs.append(row[:-1])
        targets.append(target)
    return (
        pad_sequence(inputs, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX),
    )


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return minus the log-likelihood of each answer."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in batch)
    logits = model(inputs).float().transpose(1, 2)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    return losses.sum(dim=1)


@torch.no_grad()
def answer(saved: SavedModel, examples: Sequence[Example]) -> str:
    """Return a "1" for each example whose likeliest choice is the right one, "0" for the others."""
    pairs = [(example.context, choice) for example in examples for choice in example.choices]
    losses: list[float] = []
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        part = pairs[first : first + PAIRS_AT_ONCE]
        batch = encode(part, saved.tokenizer, saved.config.training.sequence_length)
        losses += losses_of(saved.model, batch).tolist()
    of_examples = torch.tensor(losses).view(len(examples), -1)
    right = of_examples.argmin(dim=1) == torch.tensor([example.answer for example in examples])
    return "".join("01"[int(is_right)] for is_right in right)


def fine_tune(saved: SavedModel, examples: Mapping[str, Sequence[Example]], steps: int) -> None:
    """Train on the right answers to examples of all tasks, with equal weights of the tasks."""
    model = saved.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        for of_task in examples.values():
            part = of_task[step * EXAMPLES_PER_STEP : (step + 1) * EXAMPLES_PER_STEP]
            pairs = [(example.context, example.right) for example in part]
            batch = encode(pairs, saved.tokenizer, saved.config.training.sequence_length)
            tokens = (batch[1] != IGNORE_INDEX).sum()
            (losses_of(model, batch).sum() / tokens / len(examples)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)


def held_out_loss(saved: SavedModel, device: torch.device) -> float:
    """Return the loss that the run reports at its end, here of the parameters that the model
    has."""
    world = World(rank=0, size=1, workers=1, device=device)
    held_out = open_held_out(saved.config, saved.tokenizer, world, each_worker_has_its_own=False)
    return validate(saved.model, held_out, world, saved.config.data.mixtures[-1]).loss


def measure(source: Source, count: int, steps: int) -> core.Record:
    """Return the answers of a model, before and after fine-tuning."""
    saved = open_source(source)
    device = pick_device("auto", 0)
    saved.model.to(device)
    to_fit, to_test = read_held_out(saved)
    tests = {task: examples_of_all(task, to_test, count, "test") for task in TASKS}
    lessons = {
        task: examples_of_all(
            task,
            to_fit,
            steps * EXAMPLES_PER_STEP,
            f"fine-tuning, {source.seed}",
            without={example.context for example in tests[task]},
        )
        for task in TASKS
    }
    loss = held_out_loss(saved, device)
    before = {task: answer(saved, examples) for task, examples in tests.items()}
    fine_tune(saved, lessons, steps)
    after = {task: answer(saved, examples) for task, examples in tests.items()}
    return {
        **asdict(records.provenance("benchmarks.downstream", sys.argv[1:], device)),
        "settings": settings_of_run(source.run),
        "parameters": parameter_counts(saved.model)["total"],
        "tokens": read_manifest(saved.path).tokens,
        "loss": loss,
        "chance": {task: 1 / len(examples[0].choices) for task, examples in tests.items()},
        **dict(zip(PHASES, (before, after), strict=True)),
    }


def settings_of_run(run: Path) -> core.Settings:
    """Return the settings with which this benchmark trained a run, without those of its text. Empty
    for a run of somebody else."""
    file = run.parent / core.FINISHED
    settings: core.Settings = json.loads(file.read_text())["settings"] if file.exists() else {}
    return {key: value for key, value in settings.items() if key not in records.TEXT_SETTINGS}


def measure_kept(out: Path, source: Source, count: int, steps: int) -> core.Record:
    """Return the answers of a model, which are kept in `out`."""
    save = read_manifest(open_saved(source.run).path).save
    recipe = {"save": save, "steps": steps, "examples_per_step": EXAMPLES_PER_STEP, "lr": LR}
    settings = {key: str(value) for key, value in (recipe | {"examples": count}).items()}
    folder = core.run_folder(out / "answers", f"{source.name}, seed {source.seed}", settings)
    result = core.kept(folder, settings, lambda: measure(source, count, steps))
    for phase in PHASES:
        right = ", ".join(
            f"{task} {100 * share(answers):.1f} %" for task, answers in result[phase].items()
        )
        print(f"{source.name}, seed {source.seed}, {phase} fine-tuning: {right}", flush=True)
    return result


# --- results --------------------------------------------------------------------------------------

Results = Mapping[Source, core.Record]


def share(answers: str) -> float:
    return answers.count("1") / len(answers)


def counts(of_seeds: Sequence[str], chance: float) -> bool:
    """Return whether the answers of a model, by seed, clearly beat chance.

    The lower end of Wilson's interval has to be above chance. All seeds answer the same questions,
    so that they do not make the interval narrower.
    """
    mean = statistics.mean(map(share, of_seeds))
    z = statistics.NormalDist().inv_cdf(CLEARLY)
    n = len(of_seeds[0])
    spread = z * math.sqrt(mean * (1 - mean) / n + (z / n) ** 2 / 4)
    return (mean + z**2 / (2 * n) - spread) / (1 + z**2 / n) > chance


def difference(answers: Mapping[int, str], control: Mapping[int, str]) -> str:
    """Return the difference from the control in points: the mean (least ... greatest) of the seeds,
    and half the interval that the choice of the questions leaves open."""
    seeds = sorted(answers)
    points = [100 * (share(answers[seed]) - share(control[seed])) for seed in seeds]
    of_questions = [
        statistics.mean(int(answers[seed][n]) - int(control[seed][n]) for seed in seeds)
        for n in range(len(answers[seeds[0]]))
    ]
    z = statistics.NormalDist().inv_cdf((1 + LIKELY) / 2)
    half = 100 * z * statistics.stdev(of_questions) / math.sqrt(len(of_questions))
    return f"{core.summary(points, '+.1f', middle=statistics.mean)}, ±{half:.1f}"


def of_model(results: Results, name: str) -> dict[int, core.Record]:
    """Return the results of a model by seed."""
    return {source.seed: result for source, result in results.items() if source.name == name}


def loss_rows(results: Results, names: Sequence[str]) -> list[list[str]]:
    losses = {
        name: {seed: result["loss"] for seed, result in of_model(results, name).items()}
        for name in names
    }
    tokens = {source.name: result["tokens"] for source, result in results.items()}
    return [
        [
            name,
            f"{tokens[name]:,}",
            core.summary([*of_seeds.values()], ".4f", middle=statistics.mean),
            "" if name == CONTROL else core.against(of_seeds, losses[CONTROL]),
        ]
        for name, of_seeds in losses.items()
    ]


def answer_rows(results: Results, names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Return the rows of tasks that count, and a line for each of the others.

    A task counts if any model clearly beats chance: were only the control asked, tasks that it
    alone has learned would be shown, and those that it alone has not learned would be left out.
    """
    rows = []
    uncounted = []
    chances = next(iter(results.values()))["chance"]
    for task, phase in product(chances, PHASES):
        answers = {
            name: {seed: result[phase][task] for seed, result in of_model(results, name).items()}
            for name in names
        }
        chance = chances[task]
        does_count = any(counts([*of_seeds.values()], chance) for of_seeds in answers.values())
        control = answers.pop(CONTROL)
        shares = [100 * share(answers) for answers in control.values()]
        right = core.summary(shares, ".1f", middle=statistics.mean)
        if does_count:
            points = [difference(of_seeds, control) for of_seeds in answers.values()]
            rows.append([task, phase, f"{100 * chance:.1f}", right, *points])
        else:
            uncounted.append(f"{task}, {phase} fine-tuning: {right} %, chance {100 * chance:.1f} %")
    return rows, uncounted


def write_results(out: Path, results: Results, count: int, steps: int) -> None:
    """Write and print the tables, and write the results."""
    names = list(dict.fromkeys(source.name for source in results))
    first = next(iter(results.values()))
    seeds = ", ".join(map(str, of_model(results, CONTROL)))
    losses = markdown_table(LOSSES.split(" | "), loss_rows(results, names))
    rows, uncounted = answer_rows(results, names)
    answers = markdown_table([*ANSWERS.split(" | "), *names[1:]], rows)
    text = (
        f"{first['parameters'] / 1e6:.2f}M parameters, seeds {seeds}; {first['device']}; "
        f"{first['versions']}\n\n{losses}\n\n"
        f"right answers to {count:,} questions of each task, before and after {steps} steps of "
        "fine-tuning, of the control in %, of the others in points more; mean (least ... greatest) "
        f"of the seeds, ± what the draw of the questions leaves open ({LIKELY:.0%})\n\n{answers}\n"
    )
    if uncounted:
        listed = "".join(f"\n- {line}" for line in uncounted)
        text += f"\nNot counted, as no model clearly beats chance:\n{listed}\n"
    (out / "table.md").write_text(text)
    with (out / "results.jsonl").open("w") as file:
        for source, result in results.items():
            line = {"model": source.name, "seed": source.seed} | result
            for phase in PHASES:
                line[phase] = {task: share(answers) for task, answers in result[phase].items()}
            file.write(json.dumps(line) + "\n")
    print(f"\n{text}\nwrote {out}/table.md and results.jsonl")


# --- command line ---------------------------------------------------------------------------------


def settings_of(run: scale.Run, corpus: str, extra: core.Settings, ratio: float) -> core.Settings:
    """Return the settings of a run. Streaming has a beginning as long as the warm-up."""
    index = Path(corpus) / INDEX_NAME
    tokenizer = str(read_index(index).settings["tokenizer"]) if index.exists() else "bytes"
    text = {"data.corpus": corpus, "data.tokenizer": tokenizer, "data.validation_fraction": "0.04"}
    text |= {key: value for key, value in extra.items() if key.startswith("data.")}
    if "data.mixture" in extra:
        text["data.corpus"] = ""
    chosen_settings = {"lr_schedule.warmup": WARM_UP} | extra
    if run.every:
        chosen_settings = {"diloco.beginning.length": WARM_UP} | chosen_settings
    else:
        chosen_settings = {
            key: value for key, value in chosen_settings.items() if not key.startswith("diloco.")
        }
    return scale.settings_of(run, text, chosen_settings, ratio)


def train_runs(
    out: Path, runs: Mapping[str, core.Settings], jobs: int, seconds: float
) -> list[Path]:
    """Train runs, `jobs` at a time, unless they are finished, and return their folders."""
    finished = core.train_all(out, runs, jobs, seconds, keep_checkpoints=True)
    if len(finished) < len(runs):
        sys.exit("not every run was finished: the same command continues those that were begun")
    return [core.run_folder(out, name, settings) / "run" for name, settings in runs.items()]


def main() -> None:
    parser = core.build_parser(__doc__)
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    size = 15.0 if on_gpu else 0.8
    ratio = 20.0 if on_gpu else 5.0
    add("--out", type=Path, required=True, metavar="DIR")
    add("--runs", type=Path, nargs="+", default=[], metavar="DIR", help="finished runs")
    add("--corpus", default="stdlib", help="text files, or a folder of token shards")
    add("--size", type=float, default=size, help=f"million parameters: default here {size:g}")
    add("--ratio", type=float, default=ratio, help=f"tokens per parameter: default here {ratio:g}")
    add("--control-ratio", type=float, help="the same of controls; --runs: they may differ")
    add("--workers", type=core.positive, default=2, help="M: default 2")
    add("--every", type=core.positive, default=30, help="H: default 30")
    add("--seeds", type=core.list_of(int), default=[0], help="default 0")
    add("--jobs", type=core.positive, default=1, help="runs trained, and models tested, at once")
    add("--minutes", type=core.positive, help="stop training then (default: no limit)")
    add("--examples", type=core.positive, default=1000, help="questions a task: default 1000")
    add("--steps", type=core.positive, default=STEPS, help=f"of fine-tuning: default {STEPS}")
    options, words = parser.parse_known_args()
    extra = core.parse_settings(parser, words, RESERVED)
    out = options.out.resolve()
    seconds = 60.0 * options.minutes if options.minutes else math.inf
    stage = scale.Stage(round(1e6 * options.size), "adamw")
    runs: dict[str, core.Settings] = {}
    for run in scale.runs_of(stage, [options.workers], [options.every], options.seeds):
        tokens_per_parameter = options.ratio
        if run.every == 0 and options.control_ratio is not None:
            tokens_per_parameter = options.control_ratio
        runs[str(run)] = settings_of(run, options.corpus, extra, tokens_per_parameter)
        core.load(runs[str(run)])
    if not on_gpu:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)

    def test(source: Source) -> core.Record:
        return measure_kept(out, source, options.examples, options.steps)

    try:
        out.mkdir(parents=True, exist_ok=True)
        sources = find_sources(
            options.runs or train_runs(out / "runs", runs, options.jobs, seconds),
            controls_may_differ_in_tokens=options.control_ratio is not None,
        )
        with ThreadPoolExecutor(options.jobs) as pool:
            results = dict(zip(sources, pool.map(test, sources), strict=True))
    except UserError as error:
        parser.error(str(error))
    write_results(out, results, options.examples, options.steps)


if __name__ == "__main__":
    main()
