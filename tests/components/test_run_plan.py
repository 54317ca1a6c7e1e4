"""Length and schedules of a run whose batch changes when it is resumed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.components.lr_schedule import lr_factor
from torchtitan_diloco.components.run_plan import Counted, RunPlan, plan_run
from torchtitan_diloco.config.parts import OPTIMIZERS
from torchtitan_diloco.config.schema import LrSchedule, Training

TOKENS = 12 * 80
batches = st.sampled_from([1, 2, 3, 4, 6])
decays = st.sampled_from(["cosine", "linear", "wsd", "constant"])


def plan(
    batch: int,
    *,
    before: RunPlan | None = None,
    step: int = 0,
    tokens: int = TOKENS,
    beginning: float = 0.0,
) -> RunPlan:
    """Return the plan of a run with so many tokens in a step.

    `before`: that up to `step`. `tokens`: 0 for a run of 100 steps. `beginning`: its end in the
    schedules.
    """
    return plan_run(
        Training(sequence_length=1, batch_size=batch, tokens=tokens, steps=0 if tokens else 100),
        ranks=1,
        parameters=10,
        embedding_parameters=1,
        optimizer=OPTIMIZERS["adamw"],
        before=None if before is None else counted(before, step, beginning),
    )


def counted(plan: RunPlan, step: int, beginning: float) -> Counted:
    """Return what a run has counted up to a step, whose beginning has this place as its end."""
    end = plan.step_at(beginning)
    ended = end if end <= step else 0
    return Counted(step, plan.tokens_at(step), plan.schedule_tokens, ended_beginning=ended)


def factor(at: RunPlan, step: int, schedule: LrSchedule) -> float:
    return lr_factor(at.scheduled_step(step), at.schedule_steps, schedule)


@given(
    first=batches,
    second=batches,
    turn=st.integers(1, 79),
    decay=decays,
    warmup=st.sampled_from([0, 0.25, 40]),
)
def test_schedules_go_on_by_tokens_with_another_batch(
    first: int, second: int, turn: int, decay: str, warmup: float
) -> None:
    """Also in a warm-up of so many steps: a run with the first batch has as much at the same
    tokens."""
    schedule = LrSchedule(warmup=warmup, decay=decay, floor=0.1)
    whole = plan(first)
    stopped_at = 12 * turn // first
    resumed = plan(second, before=whole, step=stopped_at)
    tokens = whole.tokens_at(stopped_at)
    for done in range(tokens, TOKENS + 1):
        later = done - tokens
        if later % second == 0 and done % first == 0:
            expected = factor(whole, done // first, schedule)
            step = stopped_at + later // second
            assert factor(resumed, step, schedule) == pytest.approx(expected, abs=1e-9)
    assert resumed.scheduled_step(resumed.total_steps) == resumed.schedule_steps


@given(
    sizes=st.lists(batches, min_size=2, max_size=9),
    warmup=st.sampled_from([0, 0.25, 40]),
    decay=decays,
)
def test_schedules_do_not_jump_however_often_the_batch_changes(
    sizes: list[int], warmup: float, decay: str
) -> None:
    """A start with the same batch as before changes nothing at all."""
    schedule = LrSchedule(warmup=warmup, decay=decay)
    now = plan(sizes[0])
    step = 0
    for size in sizes[1:]:
        step += 96 // now.tokens_per_step
        following = plan(size, before=now, step=step)
        share = now.tokens_at(step) / TOKENS
        assert following.scheduled_step(step) / following.schedule_steps == pytest.approx(share)
        expected = pytest.approx(factor(now, step, schedule), abs=1e-12)
        assert factor(following, step, schedule) == expected
        again = plan(size, before=following, step=step + 1)
        for later in (step + 1, step + 2, following.total_steps):
            assert factor(again, later, schedule) == factor(following, later, schedule)
        now = following


@given(
    sizes=st.lists(batches, min_size=2, max_size=5),
    place=st.floats(0, 80),
)
def test_a_place_in_the_schedules_is_found_again(sizes: list[int], place: float) -> None:
    """It is that of the last step up to it, also before the last start."""
    now = plan(sizes[0])
    step = 0
    for size in sizes[1:]:
        step += 24 // now.tokens_per_step
        now = plan(size, before=now, step=step)
    places = [now.scheduled_step(number) for number in range(now.total_steps + 1)]
    assert places == sorted(places)
    step_here = now.step_at(place)
    if step_here >= step:
        assert places[step_here] <= place + 1e-5
        assert step_here == now.total_steps or place < places[step_here + 1] + 1e-5
    for number in range(step, now.total_steps):
        assert now.step_at(places[number]) == number


@given(batch=batches, sizes=st.lists(batches, min_size=1, max_size=4), place=st.integers(1, 40))
def test_a_beginning_ends_once_however_often_the_run_is_resumed(
    batch: int, sizes: list[int], place: int
) -> None:
    """Its end moves while it is not over, and only with the batch."""
    now = plan(batch)
    step = 0
    for size in [sizes[0], *sizes]:
        before = now
        end = before.step_at(place)
        step += max(1, 60 // before.tokens_per_step)
        now = plan(size, before=before, step=step, beginning=place)
        if end <= step or size == before.tokens_per_step:
            assert now.step_at(place) == end


@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_steps_are_scheduled_as_they_are_counted_without_a_change(tokens: int) -> None:
    """And in a run that is measured in steps, also with another batch."""
    whole = plan(4, tokens=tokens)
    for batch in [4] if tokens else [4, 8]:
        resumed = plan(batch, before=whole, step=50, tokens=tokens)
        assert resumed.schedule_steps == whole.total_steps
        assert all(resumed.scheduled_step(step) is step for step in (50, 51, 99))


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_a_finished_run_is_finished_with_any_batch(batch: int) -> None:
    """Its last step may have trained more tokens than the run needs."""
    whole = plan(7, tokens=100)
    again = plan(batch, before=whole, step=whole.total_steps, tokens=100)
    assert again.total_steps == whole.total_steps
    assert again.tokens_at(again.total_steps) == whole.tokens_at(whole.total_steps) == 105
    assert again.scheduled_step(again.total_steps) == again.schedule_steps
