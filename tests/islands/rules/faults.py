"""Faults of a simulation, and plans that have them."""

import copy
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.islands.rules.island_process import IslandProcess, Nature
from tests.islands.rules.liars import Liar, ask, change_often, start_often
from tests.islands.rules.simulation import ISLAND, Plan, Simulation
from tests.islands.rules.syncers import SyncerProcess
from torchtitan_diloco.islands.rules.changes import Admit, Change, Evict, Leave, Set
from torchtitan_diloco.islands.rules.note import Note, Part, encode_note

MOST_FAULTS = 6
CALM = 4
"""One seed of so many is calm: nothing may be lost or starve there."""


def inject(simulation: Simulation, fault: str, rng: random.Random) -> None:
    """Do what a fault is called."""
    world = simulation.world
    store = simulation.world.store
    living = [island for island in simulation.living if not island.machine.is_leaving]
    syncers = [syncer for syncer in simulation.syncers if syncer.is_alive]
    if fault in FAULTS_OF_ISLANDS and living:
        FAULTS_OF_ISLANDS[fault](simulation, rng.choice(living), rng)
    elif fault in FAULTS_OF_SYNCERS and syncers:
        leaders = simulation.leaders or syncers
        FAULTS_OF_SYNCERS[fault](simulation, rng.choice(leaders), rng)
    elif fault == "second syncer":
        simulation.start_syncer()
    elif fault == "store away":
        store.away_until = max(store.away_until, world.now + rng.uniform(0.5, 20))
    elif fault == "restored" and simulation.restores < 2:
        restore(simulation, rng.uniform(1, 8), rng)
    elif fault == "joiners":
        for number in range(rng.randint(1, 3)):
            simulation.start(f"late{len(simulation.islands)}.{number}", nature(simulation, rng))
    elif fault == "hostile":
        be_hostile(simulation, rng)
    elif fault == "change":
        change(simulation, rng)
    elif fault in LIES:
        Liar(simulation, f"liar{simulation.next_nonce()}", **LIES[fault](rng))
    elif fault == "many starts":
        names = [island.name for island in simulation.islands] or ["nobody"]
        start_often(simulation, rng.choice(names))
    elif fault == "many changes":
        change_often(simulation)
    elif fault == "kill after change":
        value = f"{8 + simulation.next_nonce() / 1e6:.6f}"
        simulation.kills_after.add(ask(simulation, Set("slot_seconds", value)))
    elif fault == "store away beside a stand-by":
        simulation.start_syncer()
        store.away_until = max(store.away_until, world.now + rng.uniform(3.5, 23))
    elif fault == "all die":
        for process in (*living, *syncers):
            process.is_alive = False
        simulation.start_syncer(after=rng.uniform(0.1, 5))
        for island in living:
            checkpoint = island.checkpoint if rng.random() < 0.7 else None
            simulation.start(island.name, island.nature, checkpoint, after=rng.uniform(0.1, 5))


# --- islands --------------------------------------------------------------------------------------


def kill(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    """Killed, and started again: with its checkpoint, without, or another one in its place."""
    victim.is_alive = False
    later = rng.uniform(0.1, 4)
    how = rng.choice(["checkpoint", "fresh", "heir"])
    name = f"heir{len(simulation.islands)}" if how == "heir" else victim.name
    checkpoint = victim.checkpoint if how == "checkpoint" else None
    simulation.start(name, victim.nature, checkpoint, after=later)


def kill_between_calls(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.dies_at = victim.calls + rng.randint(1, 10) + rng.choice([0, 0.5])
    simulation.start(victim.name, victim.nature, after=rng.uniform(5, 8))


def pause(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.paused_until = simulation.world.now + rng.uniform(0.5, 14)


def cut(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.cut_until = simulation.world.now + rng.uniform(0.5, 14)


def slow_link(_: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.nature = copy.copy(victim.nature)
    victim.nature.upload = min(30.0, victim.nature.upload * rng.choice([3, 30]))
    victim.nature.download = min(5.0, victim.nature.download * rng.choice([1, 10]))


def slow(_: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.nature = copy.copy(victim.nature)
    victim.nature.step *= rng.choice([2, 4])


def leave(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.machine.leave()
    if rng.random() < 0.7:
        simulation.start(
            f"after{len(simulation.islands)}", nature(simulation, rng), after=rng.uniform(0, 4)
        )


def twin(simulation: Simulation, victim: IslandProcess, _: random.Random) -> None:
    simulation.start(victim.name, victim.nature)


def flip(_: Simulation, victim: IslandProcess, __: random.Random) -> None:
    if victim.tensors.accounts:
        victim.flip()


def go_wrong(_: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    victim.nature = copy.copy(victim.nature)
    what = rng.choice(["not_finite_at", "sick_at", "overflows_at"])
    setattr(victim.nature, what, victim.machine.step + rng.randint(1, 5))


def stop_and_return(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    """A planned stop: leave, save, and come back."""
    victim.machine.leave()

    def come_back() -> None:
        if victim.is_over or not victim.is_alive:
            victim.save()
            simulation.start(victim.name, victim.nature, victim.checkpoint)
        else:
            simulation.world.schedule(0.5, None, come_back)

    simulation.world.schedule(rng.uniform(0.5, 4), None, come_back)


def sleep(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    """So long that all decisions that it could read next are deleted."""
    victim.paused_until = simulation.world.now + rng.uniform(20, 60)


def heir_then_checkpoint(simulation: Simulation, victim: IslandProcess, rng: random.Random) -> None:
    """Another island takes the slot of one that was killed, and leaves. Then that one comes back
    with its old checkpoint."""
    victim.is_alive = False
    name = f"heir{len(simulation.islands)}"
    simulation.start(name, victim.nature)

    def leave_again() -> None:
        for island in simulation.living:
            if island.name == name:
                island.machine.leave()
        simulation.start(victim.name, victim.nature, victim.checkpoint, after=rng.uniform(0.5, 3))

    simulation.world.schedule(simulation.plan.slot_seconds + rng.uniform(2, 6), None, leave_again)


FAULTS_OF_ISLANDS: dict[str, Callable[[Simulation, IslandProcess, random.Random], None]] = {
    "kill": kill,
    "kill between calls": kill_between_calls,
    "pause": pause,
    "cut": cut,
    "slow link": slow_link,
    "slow": slow,
    "leave": leave,
    "twin": twin,
    "flip": flip,
    "wrong": go_wrong,
    "stop and return": stop_and_return,
    "sleep": sleep,
    "heir, then checkpoint": heir_then_checkpoint,
}


# --- syncers and the store ------------------------------------------------------------------------


def kill_syncer(simulation: Simulation, victim: SyncerProcess, rng: random.Random) -> None:
    """Killed between any two writes; another one starts."""
    victim.dies_at = victim.calls + rng.randint(1, 25) + rng.choice([0, 0.5])
    simulation.start_syncer(after=rng.uniform(0.1, 4))


def pause_syncer(simulation: Simulation, victim: SyncerProcess, rng: random.Random) -> None:
    """Stopped for long, so that a stand-by takes over, and awake again beside it."""
    victim.paused_until = simulation.world.now + rng.uniform(0.5, 25)
    simulation.start_syncer()


def stop_syncer(simulation: Simulation, victim: SyncerProcess, rng: random.Random) -> None:
    if victim.machine is not None:
        victim.machine.is_stopping = True
    simulation.start_syncer(after=rng.uniform(0, 6))


def slow_syncer(simulation: Simulation, _: SyncerProcess, __: random.Random) -> None:
    """Uploads of versions outlast ten decisions and more."""
    simulation.upload_seconds = 3.0


FAULTS_OF_SYNCERS: dict[str, Callable[[Simulation, SyncerProcess, random.Random], None]] = {
    "kill syncer": kill_syncer,
    "pause syncer": pause_syncer,
    "stop syncer": stop_syncer,
    "slow uploads": slow_syncer,
}


def restore(simulation: Simulation, seconds: float, rng: random.Random) -> None:
    """The store is away, and comes back as it was some seconds ago."""
    world = simulation.world
    store = simulation.world.store
    if not simulation.decisions or not simulation.last.is_founded:
        return
    older = dict(store.entries)

    def put_back() -> None:
        away = rng.uniform(1, 15)
        store.away_until = max(store.away_until, world.now + away)
        store.age = store.age + 1
        store.entries = older
        simulation.restores += 1
        simulation.is_restored = True
        if rng.random() < 0.6:
            for syncer in simulation.syncers:
                syncer.is_alive = False
            simulation.start_syncer(after=1.0)

    world.schedule(seconds, None, put_back)


def change(simulation: Simulation, rng: random.Random) -> None:
    names = [island.name for island in simulation.islands] or ["nobody"]
    possible: list[Change] = [
        Set("sync_every", rng.choice(["3", "4", "9"])),
        Set("slots", str(rng.choice([5, 6]))),
        Set("total_tokens", str(int(simulation.settings.total_tokens * 1.2))),
        Set("delay", "2"),
        Set("sync_every", "nonsense"),
        Set("codec", "other"),
        Set("codec", "int8"),
        Set("total_tokens", "1e3"),
        Leave(rng.choice(names)),
        Evict(rng.choice(names)),
        Admit(rng.choice(names)),
    ]
    ask(simulation, rng.choice(possible))


def be_hostile(simulation: Simulation, rng: random.Random) -> None:
    """A login writes what it likes under its name, with the numbers that would count."""
    login = f"evil/{simulation.next_nonce():08x}"
    world = simulation.world
    counter = [0]

    def write() -> None:
        counter[0] += 1
        world.store.put(
            ISLAND + login, hostile_note(simulation, login, counter[0], rng), replaces=True
        )
        if counter[0] < 60:
            world.schedule(0.3, None, write)

    write()


def hostile_note(simulation: Simulation, login: str, counter: int, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        junk = [b"", b"\xff" * 100, b"x" * 10_000_000, b"[" * 100_000, b"[1e999]", b'["\x00"]']
        return rng.choice(junk)
    parts = list[msgspec.Raw]()
    if simulation.decisions:
        last = simulation.last
        slot = last.slot_of(login)
        for fragment, shared in enumerate(last.fragments):
            ledger = last.slots[slot].ledgers[fragment] if slot is not None else None
            number, taken = (ledger.number + 1, ledger.taken) if ledger else (1, 0)
            checksum = shared.kept[-1].checksum if shared.kept else "0"
            wrong = rng.choice(
                ["number", "base", "start", "end", "weight", "size", "form", "bytes"]
            )
            part = Part(
                fragment=fragment,
                number=number if wrong != "number" else rng.choice([10**11, 1]),
                base=shared.version if wrong != "base" else shared.version + 3,
                checksum=checksum,
                start=taken if wrong != "start" else 0,
                end=taken + (3 if wrong != "end" else 10**9),
                weight=21 if wrong != "weight" else 10**9,
                size=100 if wrong != "size" else 10**10,
                is_loss=rng.random() < 0.1,
            )
            raw = msgspec.json.encode(part)
            if wrong == "form":
                raw = raw.replace(b'"fp32"', rng.choice([b'"fp\\u0000"', b"[[]]", b"-1"]))
            parts.append(msgspec.Raw(raw))
    note = Note(
        counter=counter,
        wish="join",
        step=counter * rng.choice([0, 1, 10**6]),
        step_seconds=rng.choice([0.0, 1e6]),
        tokens=10**11,
        sending=[0, 1, 99],
        parts=parts,
        is_idle=rng.random() < 0.2,
        needs_copies=True,
        entered=[10**11, 3],
        gauges=msgspec.Raw(rng.choice([b"[]", b'["x",{}]', b"[[1e300]]"])),
    )
    return encode_note(note)


LIES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "flood of parts": lambda rng: {"is_idle": rng.random() < 0.7, "samples": rng.choice([1, 1, 5])},
    "flood of losses": lambda _: {"losses": True},
    "lying steps": lambda rng: {"faster": 1000, "samples": rng.choice([1, 20])},
}
OTHERS = (
    "second syncer",
    "store away",
    "restored",
    "joiners",
    "hostile",
    "change",
    "all die",
    "many starts",
    "many changes",
    "kill after change",
    "store away beside a stand-by",
)
FAULTS = (*FAULTS_OF_ISLANDS, *FAULTS_OF_SYNCERS, *OTHERS, *LIES)


def nature(simulation: Simulation, rng: random.Random) -> Nature:
    step = simulation.plan.step
    return Nature(
        step=rng.choice([step, step, 2 * step]),
        jitter=rng.choice([0, 0.3 * step]),
        upload=rng.choice([0.05, 0.05, 1.0]),
        download=rng.choice([0.02, 0.2]),
    )


def build(seed: int, faults: tuple[str, ...] = FAULTS) -> Simulation:
    """Return a run whose plan and faults are drawn from a seed."""
    rng = random.Random(seed)
    is_calm = seed % CALM == 0
    plan = Plan(
        sync_every=rng.choice([4, 6, 8]),
        fragments=rng.choice([1, 2, 3]),
        delay=rng.choice([0, 1, 2, 3]),
        alpha=rng.choice([0.0, 0.25, 0.5]),
        steps=rng.choice([30, 45]),
        start_with=rng.choice([1, 2, 2]),
        grace=rng.choice([0.3, 1.0]),
        is_rough=rng.random() < 0.8,
        copies_every=rng.choice([2, 8]),
        rates=(1.0,) if is_calm else (0.7, 1.0, 1.4),
        failing=0.0 if is_calm else rng.choice([0.0, 0.05, 0.15]),
        lag=0.0 if is_calm else rng.choice([0.0, 0.2]),
        latency=rng.choice([(0.002, 0.02), (0.02, 0.06)]),
        commit_seconds=rng.choice([0.05, 0.05, 1.0]),
        phases=rng.choice([(), (0.3,), (0.2, 0.6)]),
    )
    simulation = Simulation(plan, seed)
    simulation.is_calm = is_calm
    simulation.save_every = rng.choice([3, 7])
    for _ in range(rng.choice([1, 1, 2])):
        simulation.start_syncer(after=rng.uniform(0, 1))
    for number in range(rng.randint(plan.start_with, 3)):
        own_nature = nature(simulation, rng)
        if is_calm:
            own_nature.upload = min(own_nature.upload, 0.5)
        simulation.start(f"i{number}", own_nature, after=rng.uniform(0, 1))
    for _ in range(0 if is_calm else rng.randint(1, MOST_FAULTS)):
        fault = rng.choice(faults)
        at = rng.uniform(1, 1.2 * plan.steps * plan.step)
        simulation.planned.append((round(at, 1), fault))
        simulation.world.schedule(at, None, lambda name=fault: inject(simulation, name, rng))  # type: ignore[misc]
    return simulation
