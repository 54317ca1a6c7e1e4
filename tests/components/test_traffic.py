"""The computed traffic of a run is the counted one, and its costs follow from it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from tests.diloco.toy import Net, config, join, start, train
from tests.processes import ProcessPool
from torchtitan_diloco.base.usage import Usage
from torchtitan_diloco.components.metrics import SENT, all_reduce_bytes
from torchtitan_diloco.components.run_plan import RunPlan
from torchtitan_diloco.components.traffic import (
    GB,
    RECEIVED,
    Party,
    RunTraffic,
    cost,
    store_of,
    traffic_of,
    traffic_rows,
    traffic_table,
    ways_to_meet,
)
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Price
from torchtitan_diloco.diloco import Beginning, DiLoCoConfig, Quantization
from torchtitan_diloco.diloco.transport import header_bytes
from torchtitan_diloco.distributed.world import leave_world
from torchtitan_diloco.store import Kind

STEPS = 45
PLAN = RunPlan(
    parameters=sum(one.numel() for one in Net().parameters()),
    embedding_parameters=77,
    accumulation=1,
    tokens_per_step=100,
    total_steps=STEPS,
)
STREAMING = replace(config(), quantization=Quantization("fp4_e3m0"))
BEGINNING = replace(config(), beginning=Beginning(length=10, sync_every=3))


def traffic(chosen: DiLoCoConfig, workers: int = 2, model: nn.Module | None = None) -> RunTraffic:
    chosen = replace(chosen, workers=workers)
    run = replace(load_config("debug"), diloco=chosen)
    return traffic_of(run, replace(PLAN, ranks=workers), model or Net())


def counted_bytes(chosen: DiLoCoConfig, workers: int) -> float:
    """Train, and return the bytes that this worker has counted."""
    world = join(workers)
    outer, model, optimizer = start(chosen, workers, world=world)
    train(outer, model, optimizer, range(1, STEPS + 1))
    outer.drain()
    sent = outer.metrics()["worker/sent_bytes"]
    outer.close()
    leave_world(world)
    return sent


@pytest.mark.parametrize(("chosen", "workers"), [(STREAMING, 2), (BEGINNING, 3)])
def test_workers_send_what_is_predicted(
    chosen: DiLoCoConfig, workers: int, processes: ProcessPool
) -> None:
    counted: Sequence[float] = processes.run(counted_bytes, workers, chosen, workers)
    (party,) = traffic(chosen, workers).parties(1.0)
    rounds = STEPS / chosen.sync_every + 10 / BEGINNING.beginning.sync_every
    headers = rounds * len(traffic(chosen).fragments) * (workers - 1) * header_bytes(workers)
    assert party.run.sent == pytest.approx(sum(counted) / workers, abs=headers)
    assert party.run.sent == party.run.received
    assert party.members == workers


def test_a_resumed_run_sends_the_rest() -> None:
    whole = traffic(BEGINNING)
    for step in (5, 10, 27):
        first = replace(whole, steps=step, diloco=replace(BEGINNING, workers=2))
        rest = replace(whole, first_step=step)
        both = [one.parties(1.0)[0].run.sent for one in (first, rest)]
        assert sum(both) == whole.parties(1.0)[0].run.sent


def test_an_hour_has_as_many_cycles_as_steps_allow() -> None:
    long = replace(traffic(STREAMING), steps=80_000)
    (slow,) = long.parties(2.0)
    (fast,) = long.parties(0.5)
    assert fast.hour.sent == pytest.approx(4 * slow.hour.sent)
    assert fast.run == slow.run
    assert slow.run.sent == pytest.approx(slow.hour.sent * 80_000 * 2.0 / 3600, rel=0.01)


def test_data_parallelism_sends_all_gradients_and_a_single_worker_nothing() -> None:
    control = replace(STREAMING, method="none")
    (party,) = traffic(control, workers=4).parties(0.1)
    in_a_step = all_reduce_bytes(PLAN.parameters, 4, each=4)
    assert party.run == Usage(STEPS * in_a_step, STEPS * in_a_step)
    assert party.hour.sent == pytest.approx(36_000 * in_a_step)
    assert traffic(control, workers=1).parties(0.1) == []
    assert traffic_rows([], Price(per_gb=1.0)) == {}


def test_the_end_of_a_run_has_the_bytes_that_were_counted() -> None:
    totals = {SENT: 5e9, RECEIVED: 7e9, "worker/steps": 20.0, "worker/wall_seconds": 1800.0}
    job = traffic(STREAMING)
    (worker,) = job.counted(totals)
    assert worker.run == Usage(5e9, 5e9)
    assert worker.hour == Usage(1e10, 1e10)
    island, syncer = replace(job, store=Kind.CLOUD).counted(totals)
    assert island.run[:2] == (5e9, 7e9)
    so_far = replace(job, store=Kind.CLOUD, steps=20)
    assert [island.run[2:], syncer.run] == [
        so_far.parties(90.0)[0].run[2:],
        so_far.parties(90.0)[1].run,
    ]
    assert job.counted({}) == []


def test_which_store_islands_meet_in() -> None:
    alone = load_config("debug")
    assert store_of(alone) is None
    here = replace(alone.islands, local=2)
    assert store_of(replace(alone, islands=here)) is Kind.FOLDER
    for join_at, kind in {"/some/folder": Kind.FOLDER, "gs://bucket/run": Kind.CLOUD}.items():
        islands = replace(alone.islands, join=join_at, name="a")
        assert store_of(replace(alone, islands=islands)) is kind


def test_workers_may_meet_in_a_bucket_unless_their_settings_forbid_it() -> None:
    job = traffic(STREAMING)
    assert list(ways_to_meet(job)) == ["of a job", "in a provider's bucket"]
    assert list(ways_to_meet(replace(job, store=Kind.NEAR))) == ["in a bucket of your own"]
    for chosen in (BEGINNING, replace(STREAMING, method="none")):
        assert list(ways_to_meet(traffic(chosen))) == ["of a job"]


# --- money and text -------------------------------------------------------------------------------

PRICE = Price(per_gb=0.5, per_gb_up=0.1, per_million_reads=2.0, per_million_writes=20.0)
WORKER = Party("worker", 2, hour=Usage(2 * GB, 2 * GB), run=Usage(20 * GB, 20 * GB))
ISLAND = Party("island", 3, hour=Usage(GB, 2 * GB, 1e6, 5e5), run=Usage(GB, GB, 1e6, 1e6))
SYNCER = Party("syncer", 1, hour=Usage(GB, 3 * GB, 2e6, 1e6), run=Usage())


def test_workers_pay_for_what_they_send_and_islands_for_what_they_read_and_ask() -> None:
    assert cost([WORKER], PRICE) == pytest.approx((2.0, 20.0))
    an_island = 2 * 0.5 + 1 * 0.1 + 1 * 2.0 + 0.5 * 20.0
    the_syncer = 3 * 0.5 + 1 * 0.1 + 2 * 2.0 + 1 * 20.0
    in_the_run = 0.5 + 0.1 + 2.0 + 20.0
    expected = 3 * an_island + the_syncer, 3 * in_the_run
    assert cost([ISLAND, SYNCER], PRICE) == pytest.approx(expected)


def test_the_lines_of_a_run() -> None:
    rows = traffic_rows([WORKER], Price(), condition=" at steps of 1 s")
    assert rows == {
        "traffic": "each worker sends 2.0 and receives 2.0 GB an hour at steps of 1 s, 20.0 and "
        "20.0 GB in the run"
    }
    rows = traffic_rows([ISLAND, SYNCER], PRICE)
    assert rows["traffic"].startswith("each island sends 1.0 and receives 2.0 GB an hour, ")
    assert rows["traffic"].endswith("; about 1,000,000 reads and 500,000 writes an hour")
    assert rows["syncer"].startswith("the syncer sends 1.0 and receives 3.0 GB an hour, 0 and 0 GB")
    assert rows["cost"].startswith("64.90 an hour, 67.80 in the run, of all of these")


def test_the_table_of_a_plan() -> None:
    free = traffic_table({"of a job": [WORKER]}, Price())
    assert "reads" not in free
    assert "cost" not in free
    assert "| 2 workers of a job | 2.0 " in free
    paid = traffic_table({"of a job": [WORKER], "in a folder": [ISLAND, SYNCER]}, PRICE)
    columns, _, job, islands, syncer = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in paid.splitlines()
    )
    assert columns[-2:] == ["cost of all an hour", "of a run"]
    assert (job[0], job[-2:]) == ("2 workers of a job", ["2.00", "20.00"])
    assert (islands[0], islands[-2:]) == ("3 islands in a folder", ["64.90", "67.80"])
    assert (syncer[0], syncer[-2:]) == ("their syncer", ["", ""])
