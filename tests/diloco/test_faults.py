"""Faults that end a run or hold it up, in processes that are killed or stopped."""

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.diloco.toy import (
    AVERAGE_EVERY_STEP,
    Net,
    alone,
    config,
    full,
    inner_step,
    join,
    parameters,
    start,
    train,
)
from tests.processes import ProcessPool
from torchtitan_diloco.diloco import Link, Quantization, StreamingDiLoCo, WorkerLostError
from torchtitan_diloco.diloco.heartbeat import Message, OwnClock, Pace
from torchtitan_diloco.diloco.liveness import Liveness
from torchtitan_diloco.distributed.world import WORKER, leave_world
from torchtitan_diloco.utils import logger

PATIENT, IMPATIENT = Link(timeout_seconds=600), Link(timeout_seconds=3)
"""The first is longer than a test may take: what ends in time was not ended by it."""
PACE = Pace(beat=0.2, silence=1.5, again=60.0)
VALUES = 6_000_000
"""Parameters of a delta that sockets do not hold."""
STOP_SECONDS = 6.0
"""A busy machine holds nobody up for half of it."""


def watch(pace: Pace = PACE) -> Liveness:
    return Liveness(dist.new_group(backend="gloo"), pace=pace)


def later(seconds: float, *commands: str) -> None:
    """Run commands after some time, from a process of their own."""
    subprocess.Popen(["sh", "-c", "; ".join([f"sleep {seconds}", *commands])])


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# --- disagreement, and what is saved after a failure ----------------------------------------------


def _fault(event: str, at_step: int, link: Link) -> str:
    """Return the error after an event in worker 1."""
    outer, model, optimizer = start(replace(config(2, delay=0), link=link))
    try:
        for step in range(1, 60):
            inner_step(model, optimizer, outer.worker, step)
            if step == at_step and outer.worker == 1:
                if event == "silence":
                    time.sleep(2 * IMPATIENT.timeout_seconds)
                elif event == "schedule":
                    outer.step_count += 2
                else:
                    outer._states[1].outer[3] += 1.0
                    outer._states[1].checksum ^= 1  # as it would be, had the outer step gone wrong
            outer.step()
    except (WorkerLostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize(
    ("event", "at_step", "link", "named"),
    [
        ("silence", 10, IMPATIENT, "WorkerLostError: worker 1 left or did not answer"),
        ("schedule", 9, PATIENT, r"worker . sent fragment .* while worker .* schedules differ"),
        ("checksum", 12, PATIENT, r"fragment 1 differs between workers before outer round 2: its"),
    ],
)
def test_the_worker_at_fault_is_named(
    processes: ProcessPool, event: str, at_step: int, link: Link, named: str
) -> None:
    messages = processes.run(_fault, 2, event, at_step, link)
    for message in messages[:1] if event == "silence" else messages:
        assert re.search(named, message), message


def everything(model: Net, outer: StreamingDiLoCo) -> dict[str, Tensor]:
    shared = {f"shared/{name}": full(value) for name, value in outer.global_state_dict().items()}
    return parameters(model) | shared


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _after_a_failure(delay: int) -> list[int]:
    """Return the fragments that worker 0 gives up when worker 1 dies, with some in flight."""
    chosen = replace(config(2, delay), link=PATIENT, quantization=Quantization("topk"))
    outer, model, optimizer = start(chosen)
    with suppress(WorkerLostError):
        for step in range(1, 60):
            inner_step(model, optimizer, outer.worker, step)
            if step == 20 and outer.worker == 1:
                outer.state_dict()  # waits for what is in flight
                os._exit(1)
            before = everything(model, outer)
            outer.step()
    assert equal(before, everything(model, outer)), "a failed exchange changes nothing"
    outer.rounds()
    flying = list(outer._in_flight)
    saved = outer.state_without_others()
    given_up = set(flying) - {one.fragment for one in outer.rounds()}
    now = everything(model, outer)
    for index in given_up:
        for part in outer.fragments[index].parts:
            assert not saved.own[f"residual/{part.name}"].any()
            assert torch.equal(before[f"shared/{part.name}"], now[f"shared/{part.name}"])

    resumed, again, _ = alone(chosen)
    again.load_state_dict(model.state_dict())
    assert resumed.load_state_dict(saved) == []
    assert equal(everything(again, resumed), now)
    for _ in range(2 * chosen.sync_every):
        resumed.step()
    return sorted(given_up)


@pytest.mark.parametrize("delay", [0, 6])
def test_after_a_failure_a_worker_can_be_saved_alone(processes: ProcessPool, delay: int) -> None:
    given_up, _ = processes.run(_after_a_failure, 2, delay, dying={1})
    assert given_up


# --- deaths ---------------------------------------------------------------------------------------


def until_lost(act: Callable[[], object]) -> str:
    """Return the error in which something ends."""
    try:
        act()
    except WorkerLostError as error:
        return str(error)
    return "went on"


def _killed_in_a_payload(workers: int) -> str:
    """Worker 1 is killed while the others, stopped, have received only a part of its payload."""
    world = join(workers)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(VALUES))})
    chosen = replace(AVERAGE_EVERY_STEP, link=PATIENT)
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen)
    ids = torch.zeros(workers, dtype=torch.int64)
    ids[world.rank] = os.getpid()
    dist.all_reduce(ids, group=world.control)

    def two_steps() -> None:
        outer.step()
        if world.worker == 1:
            time.sleep(0.5)  # the others wait in the exchange by then
            others = [one for one in ids.tolist() if one != os.getpid()]
            for one in others:
                os.kill(one, signal.SIGSTOP)
            later(1.0, f"kill -9 {os.getpid()}", *(f"kill -CONT {one}" for one in others))
        outer.step()

    return until_lost(two_steps)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_killed_in_the_middle_of_a_payload_is_named(
    processes: ProcessPool, workers: int
) -> None:
    results = processes.run(_killed_in_a_payload, workers, workers, dying={1})
    for worker in {0, 2} & set(range(workers)):
        assert results[worker].startswith("worker 1 left or did not answer"), results
        # On a busy machine a worker hears of the death before it comes to the exchange.
        where = "(in the exchange of fragment 0|after its step [12])"
        assert re.search(f"seen by worker {worker} {where}", results[worker]), results


def _killed_while_idle(victim: int) -> str:
    outer, _, _ = start(replace(config(), link=PATIENT), 3)
    if outer.worker == victim:
        os.kill(os.getpid(), signal.SIGKILL)

    def check() -> None:
        for _ in range(1000):  # never to an exchange
            outer.check()
            time.sleep(0.05 * (1 + outer.worker))

    return until_lost(check)


def test_a_worker_killed_between_exchanges_is_named_by_all(processes: ProcessPool) -> None:
    results = processes.run(_killed_while_idle, 3, 0, dying={0})
    for worker in (1, 2):
        assert results[worker].startswith("worker 0 left")
        assert results[worker].endswith(f"seen by worker {worker} after its step 0)")


def _leaves_because_of_another(_: int) -> str:
    """Only worker 1 gives up worker 2, which is alive. It leaves, and worker 0 hears why."""
    world = join(3)
    liveness = watch()
    dist.barrier(group=world.control)
    if world.worker == 1:
        liveness.first_cause(WorkerLostError([2], "silent for too long"))
        liveness.close()
    message = ""
    if world.worker == 0:
        with pytest.raises(WorkerLostError) as error:
            liveness.wait(Future(), step=1)
        message = str(error.value)
    dist.barrier(group=world.control)
    return message


def test_the_first_cause_is_named_and_not_who_left_because_of_it(processes: ProcessPool) -> None:
    first, _, _ = processes.run(_leaves_because_of_another, 3, 0)
    assert first.startswith("worker 2 left")
    assert "silent for too long; told by worker 1" in first


def _ends(how: str) -> tuple[list[str], bool]:
    world, lines = join(2), Lines()
    liveness = watch()
    if world.worker == 1:
        {"close": liveness.close, "destroy": dist.destroy_process_group}[how]()
    time.sleep(2.0)
    return [text for text in lines.texts if "left" in text], liveness.is_lost


@pytest.mark.parametrize("how", ["close", "destroy"])
def test_a_clean_end_is_no_death(processes: ProcessPool, how: str) -> None:
    assert processes.run(_ends, 2, how) == [([], False)] * 2


def _steps(counts: list[int]) -> str:
    outer, model, optimizer = start(replace(config(0), link=PATIENT))

    def steps() -> None:
        train(outer, model, optimizer, range(1, 1 + counts[outer.worker]))
        outer.drain()
        outer.close()

    return until_lost(steps)


def test_a_worker_that_made_fewer_steps_is_named_when_it_ends(processes: ProcessPool) -> None:
    more, fewer = processes.run(_steps, 2, [16, 15])
    assert fewer == "went on"
    assert "worker 1 left" in more
    assert "ended after its step 15, and this one is at 16; call step() equally often" in more


# --- silence --------------------------------------------------------------------------------------


def _stopped(where: str) -> tuple[list[str], float, float]:
    """Worker 1 stops for a while: its process, or its training alone."""
    world, model, lines = join(2), Net(), Lines()
    liveness = watch(replace(PACE, silence=STOP_SECONDS / 2))
    chosen = replace(AVERAGE_EVERY_STEP, link=PATIENT)
    outer = StreamingDiLoCo(model, world.group(WORKER), chosen, liveness=liveness)
    for step in range(1, 7):
        if step == 4 and world.worker == 1:
            if where == "process":
                later(STOP_SECONDS, f"kill -CONT {os.getpid()}")
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(STOP_SECONDS)
        outer.step()
    time.sleep(3 * PACE.beat)
    gap, stopped = liveness.clock.longest_gap(), liveness.clock.stopped_since(0.0)
    leave_world(world)
    liveness.close()
    return lines.texts, gap, stopped


@pytest.mark.parametrize(
    ("where", "waiting", "passed"),
    [
        ("process", "no sign of life from its process or its link", "its process stood still"),
        ("training", "it is alive, but makes no step after its step 3", "it made no step"),
    ],
)
def test_a_stall_is_told_while_it_lasts_and_its_culprit_is_named(
    processes: ProcessPool, where: str, waiting: str, passed: str
) -> None:
    (lines, gap, _), (_, own_gap, own_stop) = processes.run(_stopped, 2, where)
    begun, ended = (line for line in lines if "worker 1" in line)
    assert re.fullmatch(rf"waiting for worker 1 since \d+ s: {waiting}", begun)
    assert re.fullmatch(rf"worker 1 goes on after \d+ s: {passed}", ended)
    assert own_gap > 0.9 * STOP_SECONDS
    assert gap < own_gap / 2, "the time in which it waited is not its own"
    assert (own_stop > 0.9 * STOP_SECONDS) == (where == "process")


# --- use from several threads ---------------------------------------------------------------------


def test_a_second_thread_is_refused() -> None:
    outer, _, _ = alone(config())
    with outer.global_parameters(), ThreadPoolExecutor(thread_name_prefix="second") as second:
        error = second.submit(outer.step).exception()
    message = r"StreamingDiLoCo.step\(\) was called from thread second.* while"
    assert re.match(message, str(error))
    outer.step()


# --- without processes ----------------------------------------------------------------------------


def test_a_message_is_what_was_packed_also_if_its_text_is_too_long() -> None:
    message = Message(1, 2, 3, 5.5, 7.5, 6.25, "é" * 300)
    unpacked = Message.unpack(message.pack())
    assert unpacked[:-1] == message[:-1]
    assert message.text.startswith(unpacked.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(unpacked.text) > 80


def test_the_own_clock_does_not_count_what_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = OwnClock(every=1.0)

    def passes(seconds: float, do: Callable[[], object] = lambda: None) -> None:
        nonlocal now
        for _ in range(round(seconds)):
            now += 1.0
            clock.beat()
        do()

    clock.tick()
    passes(3, clock.tick)
    with clock.waiting():
        passes(20)
    passes(2, clock.tick)
    assert clock.longest_gap() == 3.0
    passes(30, lambda: clock.tick(counts=False))
    passes(1, clock.tick)
    assert clock.longest_gap() == 1.0
    before, now = now, now + 12.0
    with clock.waiting():
        assert clock.stopped_since(before) == 12.0
        assert clock.beat() == 12.0
    assert clock.longest_gap() == 12.0
    assert clock.stopped_since(now) == 0.0
    alone = OwnClock(every=1.0)
    now += 100.0  # nobody beats where there is nobody to watch
    assert alone.longest_gap() == 0.0
