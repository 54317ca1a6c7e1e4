"""Faults that end a run or hold it up, in processes that are killed or wait."""

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.diloco.toy import AVERAGE_EVERY_STEP, Net, config, inner_step, join, sgd, start, train
from tests.processes import ProcessPool
from torchtitan_diloco.base import hardware
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco import Link, StreamingDiLoCo, WorkerLostError
from torchtitan_diloco.diloco import liveness as liveness_module
from torchtitan_diloco.diloco import reports as reports_module
from torchtitan_diloco.diloco.exchange import Exchange
from torchtitan_diloco.diloco.gloo_peers import GlooPeers
from torchtitan_diloco.diloco.liveness import Answer, Liveness
from torchtitan_diloco.diloco.reports import GlooReports, why_absent
from torchtitan_diloco.diloco.transport import Header, check_headers
from torchtitan_diloco.diloco.vitals import VerdictKind, absence
from torchtitan_diloco.distributed.collectives import PendingSum
from torchtitan_diloco.distributed.world import WORKER

PATIENT, IMPATIENT = Link(timeout_seconds=600), Link(timeout_seconds=3)
"""The first is longer than a test may take: what ends in time was not ended by it."""
VALUES = 6_000_000
"""Parameters of a delta that sockets do not hold."""


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


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
                    outer.loop.step += 2
                else:
                    state = outer.loop.states[1]
                    state.outer[3] += 1.0
                    state.checksum ^= 1  # as it would be, had the outer step gone wrong
            outer.step()
    except (WorkerLostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize(
    ("event", "at_step", "link", "named"),
    [
        ("silence", 10, IMPATIENT, "WorkerLostError: worker 1 left or did not answer"),
        ("schedule", 9, PATIENT, r"worker . sent fragment .* while worker .* schedules differ"),
        (
            "checksum",
            12,
            PATIENT,
            r"fragment 1 has different bits on .* outer round 2: it is unknown which",
        ),
    ],
)
def test_the_worker_at_fault_is_named(
    processes: ProcessPool, event: str, at_step: int, link: Link, named: str
) -> None:
    messages = processes.run(_fault, 2, event, at_step, link)
    for message in messages[:1] if event == "silence" else messages:
        assert re.search(named, message), message


def test_of_three_workers_the_one_with_other_bits_is_named() -> None:
    headers = [Header(0, 1, 2, 3, 4, 1.0, checksum) for checksum in (5, 6, 5)]
    with pytest.raises(
        UserError, match=r"before outer round 3: worker 1 differs from the 2 others"
    ):
        check_headers(headers, 2)


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
            later = ["sleep 1", f"kill -9 {os.getpid()}", *(f"kill -CONT {one}" for one in others)]
            subprocess.Popen(["sh", "-c", "; ".join(later)])
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
    world = join(3)
    outer, _, _ = start(replace(config(), link=PATIENT), world=world)
    dist.barrier(group=world.control)
    if outer.worker == victim:
        time.sleep(0.5)  # the others have left the barrier by then
        os.kill(os.getpid(), signal.SIGKILL)

    def check() -> None:
        for _ in range(1000):  # never to an exchange
            outer.check()
            time.sleep(0.05 * (1 + outer.worker))

    return until_lost(check)


def test_a_worker_killed_between_exchanges_is_named_by_all(processes: ProcessPool) -> None:
    _, *others = processes.run(_killed_while_idle, 3, 0, dying={0})
    for worker, message in enumerate(others, 1):
        assert message.startswith("worker 0 left")
        assert message.endswith(f"seen by worker {worker} after its step 0)")


def _killed_for_its_memory(folder: Path) -> str:
    hardware.CGROUP = folder
    world = join(2)
    liveness = Liveness(dist.new_group(backend="gloo"))
    dist.barrier(group=world.control)
    if world.worker == 0:
        (folder / "memory.events").write_text("oom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)
    while not liveness.is_lost:
        time.sleep(0.05)
    (reason,) = liveness.lost_ranks().values()
    return reason


def test_the_lack_of_memory_is_named_when_the_system_has_killed_a_worker(
    processes: ProcessPool, tmp_path: Path
) -> None:
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    _, reason = processes.run(_killed_for_its_memory, 2, tmp_path, dying={0})
    assert reason.startswith("memory has run out on this machine; ")


def _ends(how: str) -> tuple[list[str], bool]:
    world = join(2)
    lines = Lines()
    liveness = Liveness(dist.new_group(backend="gloo"))
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


NO_STEP = r"its header has not arrived .* it answers \(its last step, 1, was"
NO_ANSWER = "its header has not arrived .* and it does not answer"
NO_PAYLOAD = "but none of its payload has"
NO_MEAN = "its mean has"
LAST_MEAN = "the means of the others have arrived, but its mean has not"


def _waits(of_worker: dict[int, str], stops: str, values: int) -> tuple[list[str], dict[str, str]]:
    """Worker 1 makes no step, says nothing, or does not call a method of its exchange, until the
    others say so.

    Return the lines and why workers are missing.
    """
    world = join(3)
    lines = Lines()
    missing = dict[str, str]()
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(values))})
    outer = StreamingDiLoCo(model, world.group(WORKER), replace(AVERAGE_EVERY_STEP, link=PATIENT))
    outer.peers.reports.watcher = lambda reports: missing.update(
        {who: one.absent for who, one in reports.items()}
    )
    owner: type = StreamingDiLoCo if stops in ("step", "all") else Exchange
    method = "step" if stops == "all" else stops
    stopped = getattr(owner, method)

    def later(*arguments: Any) -> None:
        dist.barrier(group=world.control)
        stopped(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness_module, "LATE_SECONDS", 0.5)
        patch.setattr(reports_module, "HANG_SECONDS", 0.5)
        patch.setattr(liveness_module, "ANSWER_SECONDS", 0.5 if stops == "all" else 60.0)
        patch.setattr(reports_module, "STILL_SECONDS", 0.2)
        outer.step()
        if world.worker != 1:
            text = of_worker[world.worker]
            threading.Thread(target=_until_said, args=(lines, text, world.control)).start()
        else:
            patch.setattr(owner, method, later)
            if stops == "all":
                patch.setattr(Liveness, "_say", lambda *_: None)
        outer.step()
    outer.close()
    return lines.texts, missing


def _until_said(lines: Lines, what: str, group: dist.ProcessGroup | None) -> None:
    while not any(re.search(what, text) for text in lines.texts):
        time.sleep(0.05)
    dist.barrier(group=group)


@pytest.mark.parametrize(
    ("of_worker", "stops", "values", "reason"),
    [
        ({0: NO_STEP, 2: NO_STEP}, "step", 100, VerdictKind.HUNG),
        ({0: NO_ANSWER, 2: NO_ANSWER}, "all", 100, VerdictKind.STOPPED),
        # The delta is smaller than a slice. So only worker 0 needs it, and worker 2 waits for 0.
        ({0: NO_PAYLOAD, 2: NO_MEAN}, "_send", 100, VerdictKind.STUCK),
        # A link may begin to lose large packets between the two hops of an exchange.
        ({0: LAST_MEAN, 2: LAST_MEAN}, "_send_mean", 6000, VerdictKind.STUCK),
    ],
)
def test_a_worker_that_others_wait_for_is_named(
    processes: ProcessPool, of_worker: dict[int, str], stops: str, values: int, reason: str
) -> None:
    for worker, (lines, missing) in enumerate(processes.run(_waits, 3, of_worker, stops, values)):
        if worker != 1:
            assert re.fullmatch(r"waiting since \d+ s for worker .*", lines[0]), lines
            blames = of_worker[worker] != NO_MEAN  # who waits itself is not to blame
            assert missing == ({"worker 1": reason} if blames else {})


def _asks_while_a_line_is_written() -> list[bool]:
    """Worker 0 hangs, as with a full pipe, while it logs who is late, longer than it has to wait.

    Return whether it waits, as it answers worker 1 before and after the end of the wait.
    """
    world = join(2)
    watching = Liveness(dist.new_group(backend="gloo"))
    result = Future[None]()

    def write(_: float) -> None:
        dist.barrier(group=world.control)
        dist.barrier(group=world.control)
        result.set_result(None)
        dist.barrier(group=world.control)
        dist.barrier(group=world.control)

    waits = list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness_module, "LATE_SECONDS", 0.1)
        patch.setattr(liveness_module, "ANSWER_SECONDS", 30.0)
        if world.worker == 0:
            watching.wait_for(result, onlooker=write)
        else:
            for _ in range(2):
                dist.barrier(group=world.control)
                waits += [one.waits for one in watching.ask([0]).values()]
                dist.barrier(group=world.control)
    watching.close()
    return waits


def test_a_worker_answers_while_a_line_about_others_is_written(processes: ProcessPool) -> None:
    assert processes.run(_asks_while_a_line_is_written, 2)[1] == [True, False]


def test_a_step_that_may_compile_does_not_hang() -> None:
    def absent(answer: Answer, usual: float) -> str:
        return why_absent(answer, usual, is_stuck=False)

    assert not absent(Answer(5, 100.0, waits=True), 0.1)
    for seconds, usual, hangs in (11, 0.1, True), (11, 2.0, False), (21, 2.0, True):
        assert bool(absent(Answer(5, seconds, waits=False), usual)) == hangs
    for steps, usual in (2, 0.0), (0, 0.1):
        assert not absent(Answer(steps, 59.0, waits=False), usual)
        assert absent(Answer(steps, 60.0, waits=False), usual) == VerdictKind.HUNG


def test_why_a_worker_is_absent() -> None:
    assert absence(answers=False, is_stuck=True) == VerdictKind.STOPPED
    assert absence(answers=True, is_stuck=True) == VerdictKind.STUCK
    assert absence(answers=True, still=9.0, longest=8.0, is_stuck=True) == VerdictKind.HUNG
    assert (
        absence(answers=True, still=9.0, longest=8.0, may_wait=True, is_stuck=True)
        == VerdictKind.STUCK
    )
    assert absence(answers=True, still=7.0, longest=8.0) == ""


def _waits_elsewhere() -> list[str]:
    """Worker 0 waits for a sum over all ranks while worker 1 holds up an exchange."""
    world = join(2)
    lines = Lines()
    said = dist.new_group(backend="gloo")
    chosen = replace(config(0, delay=4), link=PATIENT)
    model = Net()
    optimizer = sgd(model)
    peers = GlooPeers(world.group(WORKER), reports=world.reports)
    outer = StreamingDiLoCo(model, peers, chosen)
    sent = next(step for step in range(1, 99) if outer.loop.schedule.sent_at(step))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness_module, "LATE_SECONDS", 0.5)
        patch.setattr(liveness_module, "ANSWER_SECONDS", 60.0)
        train(outer, model, optimizer, range(1, sent))
        if world.worker == 0:
            threading.Thread(target=_until_said, args=(lines, "waiting since", said)).start()
        else:
            dist.barrier(group=said)
        train(outer, model, optimizer, [sent])
        PendingSum(world, [1.0], "in the test").result()
    outer.drain()
    outer.close()
    return lines.texts


def test_a_wait_elsewhere_says_whom_an_exchange_waits_for(processes: ProcessPool) -> None:
    """As that for the loss of all workers, which every rank needs."""
    lines, _ = processes.run(_waits_elsewhere, 2)
    expected = (
        r"its header has not arrived for \d+ s, and it answers "
        r"\(its last step, \d+, was \d+ s ago\)"
    )
    assert re.fullmatch(rf"waiting since \d+ s for worker 1: {expected}", lines[0])


def test_a_worker_that_is_alone_waits_for_its_ranks(caplog: pytest.LogCaptureFixture) -> None:
    GlooReports(Liveness(None)).waiting(10.0)
    assert caplog.messages == ["waiting since 10 s for a rank of this worker"]
