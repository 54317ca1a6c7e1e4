"""Islands by hand: the shipped rules, buffers and payloads, in one thread, without waiting."""

import math
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.diloco.toy import Net, inner_step, sgd
from torchtitan_diloco.diloco import DiLoCoConfig
from torchtitan_diloco.diloco.fragments import build_fragments
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.islands.layout import Layout, hexadecimal, shapes_of
from torchtitan_diloco.islands.payload import (
    HEADER_BYTES,
    PartHeader,
    decode,
    encode,
    memory_of,
    read_header,
)
from torchtitan_diloco.islands.rules.decision import Decision
from torchtitan_diloco.islands.rules.founding import Founding, encode_founding
from torchtitan_diloco.islands.rules.fragment import Apply
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.names import ISLAND, founding_name, part_name
from torchtitan_diloco.islands.rules.note import Part
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.runs import Decisions, Run
from torchtitan_diloco.islands.syncing import SyncerProcess
from torchtitan_diloco.store import open_store

SAMPLES = 2
TOKENS_PER_SAMPLE = 100
PATIENCE = 300.0
NOTE_SECONDS = 0.5
LOOK_SECONDS = 0.005


def settings_of(config: DiLoCoConfig, *, step_tokens: int = 0, **changed: Any) -> Settings:
    """Return the settings of a run of two islands, in which nobody is late. `step_tokens`: of both
    in a step, for a warm-up."""
    outer = config.outer_optimizer
    numbers = {"momentum": outer.momentum, "beta2": outer.beta2, "epsilon": outer.epsilon}
    numbers["warmup"] = outer.warmup * step_tokens
    fields: dict[str, Any] = {
        "sync_every": config.sync_every,
        "delay": config.overlap.delay,
        "total_tokens": 10**9,
        "slots": 2,
        "start_with": 2,
        "streams": 2,
        "block": SAMPLES,
        "tokens_per_sample": TOKENS_PER_SAMPLE,
        "mixing": config.overlap.mixing,
        "outer_optimizer": outer.name,
        "outer_lr": outer.lr,
        "outer_numbers": numbers,
        "codec": config.quantization.codec,
        "block_size": config.quantization.block_size,
        "grace": PATIENCE,
    }
    return Settings(**(fields | changed))


class HandIsland:
    """An island whose clock stands still: it always waits for the version with its part."""

    def __init__(
        self, run: Run, name: str, config: DiLoCoConfig, *, adam: bool = False, **changed: Any
    ) -> None:
        self.run = run
        self.model = Net()
        params = self.model.parameters()
        self.optimizer = torch.optim.AdamW(params, lr=0.02) if adam else sgd(self.model)
        fragments = build_fragments(self.model, config.fragments)
        self.states = [
            OuterState(one, config.outer_optimizer, torch.device("cpu"), has_optimizer=False)
            for one in fragments
        ]
        self.layouts = [Layout(shapes_of(one)) for one in fragments]
        self.incarnation = f"{name}/{secrets.token_hex(4)}"
        self.founding = Founding(
            run="run-1",
            settings=settings_of(config, **changed),
            shapes=[list(one.shapes) for one in self.layouts],
            checksums=[self.checksum(number) for number in range(len(fragments))],
        )
        self.machine = Island(
            self.incarnation, facts={}, shapes=self.founding.shapes, founds=self.founding
        )
        self.decisions = Decisions(run)
        self.held = dict[str, bytearray]()
        self.versions = dict[tuple[int, int], Tensor]()
        """P by fragment and version."""
        self._is_stored = [False, False]  # the founding, and its copies
        self._noted_at = -math.inf
        self._is_note_due = True

    def checksum(self, fragment: int) -> str:
        return hexadecimal(self.layouts[fragment].checksum(self.states[fragment].outer))

    # --- the store --------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the newest decision, download, and write the note if that is due."""
        decision = self.decisions.next()
        if decision is not None:
            self.machine.on_decision(decision, 0.0)
            self._is_note_due = True
        elif self.decisions.is_empty:
            self.machine.on_empty()
        self.found()
        for stored in self.machine.wanted():
            most = HEADER_BYTES + 4 * self.layouts[stored.fragment].values
            content = self.run.large.get(stored.name, most)
            if content is None:
                break  # a newer decision names another object
            self.held[stored.name] = content
            self.machine.on_held(stored, 0.0)
        now = time.monotonic()
        if self._is_note_due or now - self._noted_at > NOTE_SECONDS:
            self._is_note_due = False
            self._noted_at = now
            self.run.store.replace(ISLAND + self.incarnation, self.machine.note(), durable=False)
            for name in self.machine.take_garbage():
                self.run.large.delete(name)

    def found(self) -> None:
        if self.machine.may_found and not self._is_stored[0]:
            self._is_stored[0] = True
            name = founding_name(self.incarnation)
            self.run.store.create(name, encode_founding(self.founding))
        if self.machine.is_founder and not self._is_stored[1]:
            self._is_stored[1] = True
            for number, state in enumerate(self.states):
                content = memory_of(encode(state.outer, PartHeader()))
                assert self.run.large.create(founding_name(self.incarnation, number), content)

    # --- training ---------------------------------------------------------------------------------

    def step(self, tokens: int) -> None:
        """Train on the batch of the slot. Call `boundary` until it returns True then."""
        slot = self.machine.slot
        assert slot is not None
        inner_step(self.model, self.optimizer, slot, self.machine.step + 1)
        self.machine.finish_step(SAMPLES, tokens, 0.01)
        self._is_note_due = True

    def boundary(self) -> bool:
        """Do what is due, and return whether the next step may follow."""
        due = self.machine.boundary(0.0)
        for apply in due.applies:
            self.apply(apply)
        for send in due.sends:
            self.send(send.part)
        self._is_note_due |= bool(due.applies or due.sends)
        if self.machine.ending:
            return True
        is_done = not (due.applies or due.sends) and due.waits_until is None
        return is_done and due.is_training

    def send(self, part: Part) -> None:
        state = self.states[part.fragment]
        state.take_delta()
        state.finish_delta()
        settings = self.machine.settings
        payload = memory_of(encode(state.delta, PartHeader(settings.codec, settings.block_size)))
        name = part_name(self.incarnation, part.fragment, part.number)
        assert self.run.large.create(name, payload)
        self.machine.on_stored(part, len(payload), 0.0)

    def apply(self, apply: Apply) -> None:
        state = self.states[apply.fragment]
        copy = state.outer
        if apply.source is not None:
            content = self.held.pop(apply.source.name)
            pieces = (piece.values for piece in decode(content, [state.values]))
            state.prepare(pieces, replaces=read_header(content).codec == "fp32")
            copy = state.delta
        state.apply(copy, apply.mode, apply.share)
        self.versions[apply.fragment, apply.version] = state.outer.clone()
        self.machine.on_checksum(apply.fragment, apply.version, self.checksum(apply.fragment))
        assert not self.machine.fragments[apply.fragment].is_wrong


@contextmanager
def open_run(location: Path | str) -> Iterator[Run]:
    run = Run(open_store(location), streams=2)
    try:
        yield run
    finally:
        run.close()


@contextmanager
def syncer(store: Path | str, scratch: Path) -> Iterator[SyncerProcess]:
    """Run a syncer in threads of this process, and stop it in order."""
    errors = list[BaseException]()

    def body() -> None:
        try:
            process.run()
        except BaseException as error:
            errors.append(error)

    with open_run(store) as run:
        process = SyncerProcess(run, scratch)
        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield process
        finally:
            process.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
    if errors:
        raise errors[0]


def train(islands: list[HandIsland], steps: int, tokens: list[int]) -> None:
    """Train islands in turn, each up to this step. `tokens`: of a step, by slot."""
    until = time.monotonic() + PATIENCE
    waiting = list(islands)
    while waiting:
        is_waiting_for_others = True
        for island in waiting:
            island.look()
            if island.boundary() and island.machine.step < steps and not island.machine.ending:
                assert island.machine.slot is not None
                island.step(tokens[island.machine.slot])
                is_waiting_for_others = False
        if is_waiting_for_others:
            time.sleep(LOOK_SECONDS)  # the syncer may be a thread of this process
        waiting = [
            one
            for one in waiting
            if not one.machine.ending and (one.machine.step < steps or not one.boundary())
        ]
        assert time.monotonic() < until, [one.machine.news.lines for one in islands]


def newest(location: Path | str) -> Decision:
    with open_run(location) as run:
        decision = run.newest()
        assert decision is not None
        return decision
