"""A trial trains like a run, and its steps are measured until their mean is known."""

import math
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.machines.test_compare import SMALL
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.loader import without_settings
from torchtitan_diloco.machines import trial
from torchtitan_diloco.machines.trial import Trial


def steps_of(*seconds: float) -> list[trial.Step]:
    return [trial.Step(one, queued_seconds=0.0) for one in seconds]


def test_the_first_half_of_the_time_is_not_measured() -> None:
    slow_at_first = steps_of(4.0, 3.0, 2.0, *[1.0] * 10)
    assert trial.warm(slow_at_first) == steps_of(*[1.0] * 9)
    assert trial.warm(steps_of(1.0)) == steps_of(1.0)
    assert trial.warm([]) == []


def test_steps_are_measured_until_they_vary_little_or_for_long() -> None:
    even = steps_of(*[0.1] * 40)
    assert trial.uncertainty(even) == pytest.approx(0.0)
    assert not trial.has_enough_steps(even, seconds=2.1)
    assert trial.has_enough_steps(even, seconds=1.9)
    # Half of the time another program was running: of independent steps, this many would do.
    uneven = 2 * steps_of(*[0.1] * 100, *[0.2] * 100)
    second_half = trial.warm(uneven)
    assert trial.uncertainty(second_half) > trial.STEADY
    total = sum(step.seconds for step in uneven)
    assert not trial.has_enough_steps(uneven, seconds=total / 3)
    assert trial.has_enough_steps(uneven, seconds=total / trial.LONGEST)
    times = trial.StepTimes.of(second_half, device="", crowded="")
    assert times.ends == pytest.approx((0.1, 0.2))


def test_few_steps_say_little_also_to_the_other_machine() -> None:
    few = steps_of(*[0.1] * (trial.BLOCKS - 1))
    assert trial.uncertainty(few) == math.inf
    times = trial.StepTimes.of(few, device="", crowded="")
    assert not times.is_steady
    sent = msgspec.json.encode(times)
    assert msgspec.json.decode(sent, type=trial.StepTimes) == times


def test_a_step_has_the_share_of_a_record_that_a_run_writes() -> None:
    record = {
        "worker/wall_seconds": 0.5,
        "worker/step_seconds": 0.3,
        "worker/agreement_seconds": 0.1,
        "worker/queued_seconds": 0.02,
    }
    assert trial.step_of_record(record, log_every=10).seconds == pytest.approx(0.41)
    assert trial.step_of_record(record, log_every=1) == trial.Step(0.5, 0.02)


def trial_of(*words: str, vocabulary: int = 320) -> Trial:
    given = [word.removeprefix("--") for word in words]
    training = [*without_settings(SMALL, given), *words]
    config = from_command_line(training)
    return Trial(training, config, workers=2, processes=1, trials=1, vocabulary=vocabulary)


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("forks")
def test_a_trial_trains_the_share_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "7")  # of the run that is to come
    seen = list[list[trial.Step]]()
    words = ["--model.weights", "/no/where", "--checkpoint.mirror", "s3://no/where"]
    words += ["--data.mixture", "/no/where=1", "--run.preemption", "aws"]
    with trial_of("--training.global_batch_size", "8", *words) as running:
        running.wait_for_steps(since=0.0, is_enough=bool, meanwhile=seen.append)
        begun = time.time()
        enough = partial(trial.has_enough_steps, seconds=0.1)
        running.wait_for_steps(since=begun, is_enough=enough, meanwhile=seen.append)
        found = [step.seconds for step in running.steps(begun)]
        log = running._log.read_text()
        running.check()
        process = running._process
    assert len(found) >= trial.LEAST_STEPS
    assert 0.2 <= sum(found) <= time.time() - begun
    assert "1 worker x 1 rank x 2 micro-batches x 2 sequences x 64 tokens = 256 tokens" in log
    assert process.poll() is not None
    assert not Path(running._folder.name).exists()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--run.device", "cuda"],
            'exit code 2: 1 thing to do .*: run.device = "cuda", but torch sees no',
        ),
        (
            ["--parallel.compute_dtype", "bfloat16"],
            "exit code 2: parallel.compute_dtype = .bfloat1",
        ),
        (
            ["--parallel.fsdp", "3"],
            r"code 2: .* parallel.fsdp = 3 is 3 processes, but 1 were start",
        ),
    ],
)
@pytest.mark.usefixtures("forks")
def test_why_a_trial_has_ended(words: list[str], message: str) -> None:
    with trial_of(*words) as failing, pytest.raises(UserError, match=message):
        failing.wait_for_steps(since=0.0, is_enough=bool, meanwhile=lambda _: None)
