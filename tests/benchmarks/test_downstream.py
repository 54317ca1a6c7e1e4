"""Test the tasks of `benchmarks.downstream` by their definitions, and its command in miniature."""

import json
import random
import shutil
import string
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import core, downstream, downstream_models
from benchmarks.downstream_models import CONTROL, Source
from benchmarks.downstream_tasks import (
    BRACKETS,
    TASKS,
    Example,
    Text,
    examples_of_all,
    make_examples,
)
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.checkpoint import MODEL
from torchtitan_diloco.components.checkpoint_folder import read_manifest
from torchtitan_diloco.components.saved_tensors import SavedTensors
from torchtitan_diloco.config.schema import Phase
from torchtitan_diloco.data.batch import IGNORE_INDEX
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.diloco.state_dict import shared_parameter_name
from torchtitan_diloco.export.weights import SavedModel, open_saved
from torchtitan_diloco.train import main as train

TINY = (
    "--model.layers 1 --model.width 32 --model.heads 1 --model.feed_forward 32 --run.device cpu "
    "--training.sequence_length 64 --training.global_batch_size 4 --training.batch_size 4 "
    "--training.tokens_per_parameter 0 --training.steps 8 --validation.sequences 4 "
    "--data.validation_fraction 0.5 --run.restarts 0"
)
SEED = st.integers(0, 10_000)


def write_documents(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=4 + n % 3)) for n in range(60)]
    return [" = ".join(draw.choices(words, k=60)) for _ in range(count)]


TEXT = Text(write_documents(4))


def draw_example(task: str, seed: int) -> Example:
    return TASKS[task](TEXT, random.Random(seed))


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@given(seed=SEED)
def test_choices_differ_and_none_is_shorter(task: str, seed: int) -> None:
    example = draw_example(task, seed)
    assert example.right == example.choices[example.answer]
    assert len(set(example.choices)) == len(example.choices) == (3 if "bracket" in task else 4)
    assert len({len(choice) for choice in example.choices}) == 1
    assert len(example.context) <= 96


@given(seed=SEED)
def test_the_next_identifier_continues_the_text(seed: int) -> None:
    example = draw_example("next identifier", seed)
    assert any(example.context + example.right in document for document in TEXT.documents)


@given(seed=SEED)
def test_the_word_to_copy_follows_the_one_that_is_asked_for(seed: int) -> None:
    example = draw_example("copying", seed)
    line, asked = example.context.split("\n")
    assert f"{asked}{example.right} " in f"{line} "
    assert all(line.split().count(choice.strip()) == 1 for choice in example.choices)


@given(seed=SEED)
def test_the_bracket_closes_the_innermost_open_one(seed: int) -> None:
    example = draw_example("bracket matching", seed)
    still_open: list[str] = []
    for character in example.context + example.right:
        if character in BRACKETS:
            still_open.append(BRACKETS[character])
        elif character in BRACKETS.values():
            assert still_open.pop() == character
    assert example.context[-1] in BRACKETS.values(), "the last one opened is closed"


@given(seed=SEED)
def test_the_sum_is_right_and_choices_combine_two_digits_in_two_places(seed: int) -> None:
    example = draw_example("three-digit addition", seed)
    first, second = example.context.removesuffix(" =").split(" + ")
    assert int(example.right) == int(first) + int(second)
    assert len(first) == len(second) == len(example.right.strip()) == 3
    digits = [set(place) for place in zip(*example.choices, strict=True)]
    assert sorted(map(len, digits)) == [1, 1, 2, 2], "a space, and three digits"
    assert len(set(example.choices)) == 4, "no digit says which is right"


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_reproducible_and_keep_questions_out(task: str) -> None:
    tests = make_examples(task, TEXT, 40, "test")
    assert tests == make_examples(task, Text(list(TEXT.documents)), 40, "test")
    known = {example.context for example in tests}
    assert len(known) == 40
    lessons = make_examples(task, TEXT, 40, "test", without=known)
    assert not known & {example.context for example in lessons}


def test_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(UserError, match=r"has too few words: raise data\.val"):
        make_examples("copying", Text(["few words"]), 1, 0)
    with pytest.raises(UserError, match=r"too short for 400 examples .* lower --examples"):
        make_examples("next identifier", Text(TEXT.documents[:1]), 400, 0)


# --- the rule -------------------------------------------------------------------------------------


@given(right=st.integers(0, 400), seeds=st.integers(1, 3))
def test_a_task_counts_only_if_chance_would_hardly_do_as_well(right: int, seeds: int) -> None:
    answers = ["1" * right + "0" * (400 - right)] * seeds
    # Chance 1/4: mean 100, standard deviation 8.7, of which 2.33 are exceeded once in a hundred.
    assert downstream.counts(answers, 0.25) == (right > 121)


def test_differences_are_of_the_same_seed_and_question() -> None:
    control = {0: "1100" * 25, 1: "1000" * 25}
    assert downstream.difference(control, control) == "+0.0, ±0.0"
    better = {0: "1110" * 25, 1: "1000" * 25}
    text = downstream.difference(better, control)
    # In a quarter of the questions the mean of the seeds is 0.5 more.
    assert text == "+12.5 (+0.0 ... +25.0), ±4.3"


def record_of(right: int, loss: float) -> core.Record:
    """Return a result with so many of 100 right answers to one task, and chance at the other."""
    answers = {"copying": "1" * right + "0" * (100 - right), "addition": "1000" * 25}
    facts = {
        "parameters": 8e5,
        "tokens": 4_000_000,
        "device": "CPU",
        "versions": "2.13",
        "loss": loss,
    }
    chance = dict.fromkeys(answers, 0.25)
    return {**facts, "chance": chance, "before": answers, "after": answers}


def test_the_table_has_what_counts_and_names_the_rest(tmp_path: Path) -> None:
    merged = "streaming, M=2, H=30: merged"
    results = {
        Source(0, CONTROL, tmp_path): record_of(60, 2.0),
        Source(1, CONTROL, tmp_path): record_of(64, 2.0),
        Source(0, merged, tmp_path): record_of(61, 2.02),
        Source(1, merged, tmp_path): record_of(63, 2.04),
    }
    downstream.write_results(tmp_path, results, 100, 300)
    table = (tmp_path / "table.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert [merged, "4,000,000", "2.0300 (2.0200 ... 2.0400)", "+1.50 (+1.00 ... +2.00) %"] in rows
    shares = ["25.0", "62.0 (60.0 ... 64.0)", "+0.0 (-1.0 ... +1.0), ±1.4"]
    for phase in ("before", "after"):
        assert ["copying", phase, *shares] in rows
        assert f"- addition, {phase} fine-tuning: 25.0 %, chance 25.0 %" in table
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["after"]["copying"] for line in lines] == [0.6, 0.64, 0.61, 0.63]


@pytest.mark.parametrize(("of_control", "of_merged"), [(60, 25), (25, 60)])
def test_a_task_counts_whichever_model_has_learned_it(
    of_control: int, of_merged: int, tmp_path: Path
) -> None:
    results = {
        Source(0, CONTROL, tmp_path): record_of(of_control, 2.0),
        Source(0, "merged", tmp_path): record_of(of_merged, 2.0),
    }
    rows, others = downstream.answer_rows(results, [CONTROL, "merged"])
    assert [row[:2] for row in rows] == [["copying", "before"], ["copying", "after"]]
    assert [line.partition(",")[0] for line in others] == ["addition", "addition"]


# --- models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with data parallelism, and one with an outer loop."""
    folder = tmp_path_factory.mktemp("downstream")
    for number, document in enumerate(write_documents(40)):
        (folder / f"{number:02d}.txt").write_text(document)
    return folder


class InThisThread(Executor):
    """As a run sets handlers of signals, which only the main thread may."""

    def __init__(self, _: int) -> None: ...

    def submit(self, task: Callable[..., Any], /, *how: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(*how, **more))
        return future


def run_command(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[Path]:
    """Run the command, which trains one worker of each run here, and return what it trained."""
    trained: list[Path] = []

    def train_here(run: Path, chosen: core.Settings, **_: str) -> list[core.Record]:
        trained.append(run)
        assert train(core.command_line(chosen | {"run.folder": str(run)})) == 0
        return core.read_records(run)

    monkeypatch.setattr(core, "train", train_here)
    for module in (core, downstream):
        monkeypatch.setattr(module, "ThreadPoolExecutor", InThisThread)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = f"--out {folder / 'out'} --corpus {folder}/*.txt --size 0.1 --workers 1 --every 3 "
    words += f"--examples 40 --steps 2 {TINY} --data.cache_folder {folder / 'cache'}"
    monkeypatch.setattr("sys.argv", ["downstream", *words.split(), *more])
    downstream.main()
    return trained


def test_the_command_compares_three_models_and_repeats_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [CONTROL, "streaming, M=1, H=3: merged", "streaming, M=1, H=3: one worker"]
    assert len(run_command(runs, monkeypatch)) == 2
    table = (runs / "out/table.md").read_text()
    assert table in capsys.readouterr().out
    assert all(table.count(f"\n| {name} ") == 1 for name in names)
    lines = [json.loads(line) for line in (runs / "out/results.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == names
    for line in lines:
        assert set(line["before"]) == set(line["after"]) == set(TASKS)
        assert line["tokens"] == 8 * 4 * 64
        assert line["versions"].startswith(f"torch {torch.__version__}")
        assert line["settings"]["training.steps"] == "8"
    losses = [line["loss"] for line in lines]
    manifests = [
        read_manifest(one.path) for one in map(open_saved, sorted(runs.glob("out/**/run")))
    ]
    reported = [manifest.parts["validator"]["validated"][1] for manifest in manifests]
    assert losses[:2] == pytest.approx(reported[::-1]), "those of the runs' own validation"
    assert losses[2] != losses[1]

    monkeypatch.setattr(downstream, "measure", None)
    assert run_command(runs, monkeypatch) == []
    assert run_command(runs, monkeypatch, "--runs", str(runs / "out/runs")) == []
    assert (runs / "out/table.md").read_text() == table


def test_the_parameters_are_the_shared_ones_or_those_of_the_worker(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command(runs, monkeypatch)
    _, merged, worker = downstream_models.find_sources([runs / "out"])
    for source, of in ((merged, shared_parameter_name), (worker, (MODEL + "{}").format)):
        saved = downstream_models.open_source(source)
        values = dict(saved.model.named_parameters())
        expected = {of(name): torch.zeros_like(value) for name, value in values.items()}
        SavedTensors(saved.path, read_manifest(saved.path)).fill(expected)
        for value, known in zip(values.values(), expected.values(), strict=True):
            torch.testing.assert_close(value, known, rtol=0, atol=0)


def test_runs_that_cannot_be_compared_are_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_command(runs, monkeypatch)
    (streaming,) = runs.glob("out/runs/*M-1*")
    with pytest.raises(UserError, match=r"no run with checkpoints and run\.seed = 0"):
        downstream_models.find_sources([streaming])
    with pytest.raises(UserError, match="as a control: give such folders to --runs"):
        downstream_models.find_sources([tmp_path])
    (control,) = runs.glob("out/runs/*parallel*")
    settings = json.loads((control / core.FINISHED).read_text())["settings"]
    shorter = settings | {"training.steps": "1", "run.folder": str(tmp_path / "shorter")}
    assert train(core.command_line(shorter)) == 0
    with pytest.raises(UserError, match=r"differ in tokens: .* with --control-ratio"):
        downstream_models.find_sources([streaming, tmp_path])
    with pytest.raises(UserError, match="differ in tokens of controls"):
        downstream_models.find_sources([runs / "out", tmp_path], controls_may_differ_in_tokens=True)
    sources = downstream_models.find_sources(
        [streaming, tmp_path], controls_may_differ_in_tokens=True
    )
    assert [source.run.parent for source in sources] == [tmp_path, streaming, streaming]


def test_runs_that_differ_in_their_mixture_or_phases_are_refused(tmp_path: Path) -> None:
    """The tokens of a corpus count, not its name."""
    for name, seed in (("a", 1), ("b", 2)):
        documents = (json.dumps({"text": one}) + "\n" for one in write_documents(20, seed))
        (tmp_path / f"{name}.jsonl").write_text("".join(documents))
    a = tmp_path / "a.jsonl"
    b = tmp_path / "b.jsonl"
    renamed = shutil.copy(a, tmp_path / "renamed.jsonl")
    later = f'[{{start = 0.5, mixture = {{"{b}" = 1}}}}]'
    mixtures = {
        "mixed": {"data.mixture": f"{a}=3 {b}=1"},
        "renamed": {"data.mixture": f"{b}=0.25 {renamed}=0.75"},
        "even": {"data.mixture": f"{a}=1 {b}=1"},
        "later": {"data.mixture": f"{a}=3 {b}=1", "data.phases": later},
        "single": {"data.corpus": str(a)},
    }
    usual = f"{TINY} --training.steps 2 --diloco.method none --diloco.workers 1"
    usual += f" --validation.every 0 --data.cache_folder {tmp_path / 'cache'}"
    for name, mixture in mixtures.items():
        more = core.command_line({**mixture, "run.folder": str(tmp_path / name)})
        assert train([*more, *usual.split()]) == 0
    for name, reason in {
        "renamed": "two runs of the same method and seed",
        "even": "differ in corpus or mixture: give --runs",
        "later": "differ in phases: give --runs",
        "single": "differ in corpus or mixture: give --runs",
    }.items():
        with pytest.raises(UserError, match=reason):
            downstream_models.find_sources([tmp_path / "mixed", tmp_path / name])


# --- answers --------------------------------------------------------------------------------------


@pytest.fixture
def saved(runs: Path, monkeypatch: pytest.MonkeyPatch) -> SavedModel:
    run_command(runs, monkeypatch)
    return downstream_models.open_source(downstream_models.find_sources([runs / "out"])[0])


def log_likelihood(saved: SavedModel, context: str, answer: str) -> float:
    """Return it token by token, without padding."""
    before = saved.tokenizer.encode(context).tolist()
    after = saved.tokenizer.encode(answer)
    total = 0.0
    for token in after.tolist():
        logits = saved.model(torch.tensor([before[-saved.config.training.sequence_length :]]))
        total += float(logits[0, -1].log_softmax(dim=0)[token])
        before.append(token)
    return total


@pytest.mark.parametrize("task", TASKS)
def test_the_likeliest_choice_is_the_answer(saved: SavedModel, task: str) -> None:
    examples = [
        example._replace(context=example.context[-30:])  # what the model has room for
        for example in make_examples(task, TEXT, 8, "test")
    ]
    pairs = [(one.context, choice) for one in examples for choice in one.choices]
    with torch.no_grad():
        known = torch.tensor([log_likelihood(saved, *pair) for pair in pairs])
        batch = downstream.encode(pairs, saved.tokenizer, saved.config.training.sequence_length)
        losses = downstream.losses_of(saved.model, batch)
    torch.testing.assert_close(losses, -known, rtol=1e-4, atol=1e-4)
    best = known.view(len(examples), -1).argmax(dim=1).tolist()
    right = [guess == one.answer for guess, one in zip(best, examples, strict=True)]
    assert downstream.answer(saved, examples) == "".join("01"[one] for one in right)


@given(
    context=st.text(string.ascii_letters, min_size=1, max_size=50),
    answer=st.text("ab", min_size=1, max_size=9),
)
def test_a_long_context_loses_its_beginning(context: str, answer: str) -> None:
    tokenizer = build_tokenizer("bytes")
    inputs, targets = downstream.encode([(context, answer)], tokenizer, 12)
    whole = [*(context + answer).encode()][-13:]
    assert inputs[0].tolist() == whole[:-1]
    kept = [one for one in targets[0].tolist() if one != IGNORE_INDEX]
    assert kept == [*answer.encode()][-len(whole) + 1 :]


def test_fine_tuning_teaches_the_tasks(saved: SavedModel) -> None:
    """Enough to know what it was trained on by heart."""
    examples = {task: make_examples(task, TEXT, 8, 0) for task in TASKS}
    lessons = {task: of_task * 150 for task, of_task in examples.items()}
    pairs = [(one.context, one.right) for of_task in examples.values() for one in of_task]
    batch = downstream.encode(pairs, saved.tokenizer, saved.config.training.sequence_length)
    before = downstream.losses_of(saved.model, batch).sum()
    downstream.fine_tune(saved, lessons, 150)
    assert downstream.losses_of(saved.model, batch).sum() < 0.5 * before
    assert (
        downstream.share("".join(downstream.answer(saved, one) for one in examples.values())) > 0.7
    )


def test_text_is_divided_by_documents(saved: SavedModel) -> None:
    (to_fit,), (to_test,) = downstream_models.read_held_out(saved)
    documents = write_documents(40)
    found = [one for one in (*to_fit.documents, *to_test.documents) if one]
    assert set(found) <= set(documents)
    assert len(found) == len(set(found)) == 20
    assert abs(len(to_fit.documents) - len(to_test.documents)) <= 1


def test_all_corpora_of_a_mixture_have_as_many_questions(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their weights and lengths are, also those of a later phase."""
    written = []
    names = []
    for number, count in enumerate((40, 10, 6)):
        written.append(write_documents(count, seed=10 + number))
        lines = (json.dumps({"text": document}) + "\n" for document in written[-1])
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
        names.append(str(tmp_path / f"{number}.jsonl"))
    data = replace(
        saved.config.data,
        corpus="",
        mixture={names[0]: 0.9, names[1]: 0.1},
        phases=(Phase(0.5, {names[2]: 1.0}),),
        cache_folder=str(tmp_path / "cache"),
    )
    mixed = replace(saved, config=replace(saved.config, data=data))
    to_fit, to_test = downstream_models.read_held_out(mixed)
    for own, fit, test in zip(written, to_fit, to_test, strict=True):
        assert {*fit.documents, *test.documents} - {""} < set(own)
        assert not set(fit.documents) & set(test.documents) - {""}
    asked = examples_of_all("next identifier", to_test, 31, "test")
    assert len(asked) == 31
    for number, example in enumerate(asked):
        own = written[number % 3]
        assert any(example.context + example.right in document for document in own)
    contexts = {one.context for one in asked}
    lessons = examples_of_all("next identifier", to_fit, 30, "test", without=contexts)
    assert not contexts & {one.context for one in lessons}
    sums = examples_of_all("three-digit addition", to_test, 200, "test")
    assert len({one.context for one in sums}) == 200, "each corpus has others"
    alone = examples_of_all("copying", to_test[:1], 20, "test")
    assert alone == make_examples("copying", to_test[0], 20, "test")

    monkeypatch.setattr(downstream_models, "HELD_OUT_TOKENS", 900)
    (first, _, _), _ = downstream_models.read_held_out(mixed)
    assert sum(map(len, first.documents)) <= 300, "a third of the tokens"
