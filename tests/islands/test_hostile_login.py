"""A login of a site that writes all that it may, and tries the rest, while others train."""

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.diloco.toy import config
from tests.islands.audit import audited
from tests.islands.test_bucket_server import SITE, Serving, serving
from tests.islands.trainees import SAMPLES, TOKENS, Trainee, trained
from tests.ports import free_port
from torchtitan_diloco.islands.heard import MOST_LISTED
from torchtitan_diloco.islands.payload import PartHeader, encode, memory_of
from torchtitan_diloco.islands.rules.decision import Fate
from torchtitan_diloco.islands.rules.names import ISLAND, part_name
from torchtitan_diloco.islands.rules.note import Note, Part, encode_note
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import StoreError, open_store
from torchtitan_diloco.store.store import MOST_BYTES

DEEP = b"[" * 100_000 + b"]" * 100_000
WRITERS = 4
PAUSES = {"own_a_slot": 0.1, "rewrite": 0.5, "write_nonsense": 0.5}
"""Seconds between two attacks of a kind: a test of what is written, and not of how much a server
can take beside other tests."""
PATIENCE = 240.0


class Attacker:
    """Writes below `part/lab` and `island/lab`. Each attack is a thread that goes on to the end."""

    def __init__(self, join_file: Path) -> None:
        self.run = Run(open_store(join_file, writes=f"part/{SITE}/", quiet=True))
        self.store = self.run.brief
        self.owner = f"{SITE}/{secrets.token_hex(4)}"
        """The incarnation that gets a slot."""
        self.has_slot = threading.Event()
        self.errors = list[BaseException]()
        self._stop = threading.Event()

    @contextmanager
    def attacking(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._repeat, args=(getattr(self, name), pause))
            for name, pause in PAUSES.items()
        ]
        try:
            threads[0].start()
            assert self.has_slot.wait(PATIENCE)
            for thread in threads[1:]:
                thread.start()
            self.flood()
            yield
        finally:
            self._stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self.run.close()
        if self.errors:
            raise self.errors[0]

    def _repeat(self, attack: Callable[[int], None], pause: float) -> None:
        for number in itertools.count(1):
            if self._stop.wait(pause):
                return
            try:
                with suppress(StoreError):  # it is busy
                    attack(number)
            except BaseException as error:
                self.errors.append(error)
                return

    def flood(self) -> None:
        """Write more notes than are listed at a time, of which the names sort first."""

        def write(first: int) -> None:
            for number in range(first, MOST_LISTED + 100, WRITERS):
                note = encode_note(Note(counter=1, wish="join", step=number))
                with suppress(StoreError):
                    name = f"{ISLAND}{SITE}.{number}/{number:08x}"
                    self.store.replace(name, note, durable=False)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def rewrite(self, number: int) -> None:
        """Replace a note as often as the server allows, with a counter that jumps."""
        note = Note(counter=number * 10**6, wish="join", step=number * 10**5, step_seconds=1e-9)
        self.store.replace(f"{ISLAND}{SITE}.fast/0000", encode_note(note), durable=False)

    def write_nonsense(self, number: int) -> None:
        contents = [
            DEEP,
            b"",
            b"\xff" * 1000,
            os.urandom(MOST_BYTES),
            b'[1,"",0,0,0,0.0,false,[],[%b],"",false,[],%b]' % (DEEP, DEEP),
            b'[1,"join",1e400]',
            b"[" + b"9" * 400_000 + b"]",
        ]
        content = contents[number % len(contents)]
        self.store.replace(f"{ISLAND}{SITE}.{number % 5}/000{number % 7}", content)
        self.store.create(f"part/{SITE}/0000-0-{number}", content[:1000])

    def own_a_slot(self, number: int) -> None:
        """Hold a slot, count steps that were not made, and store parts that are all wrong."""
        decision = self.run.newest()
        assert decision is not None
        slot = decision.slot_of(self.owner)
        parts = list[Part]()
        if slot is not None and decision.begun:
            self.has_slot.set()
            for fragment, ledger in enumerate(decision.slots[slot].ledgers):
                shared = decision.fragments[fragment]
                base = Part(
                    fragment=fragment,
                    number=ledger.number + 1,
                    base=shared.version,
                    checksum=shared.kept[-1].checksum,
                    start=ledger.taken,
                    end=ledger.taken + 1,
                    weight=TOKENS // SAMPLES,
                )
                parts.append(self._spoil(base, shared.elements, ledger.number + fragment))
        note = Note(
            counter=number,
            wish="join",
            step=number * 1000,
            step_seconds=0.001,
            is_idle=number % 2 == 0,
            parts=[msgspec.Raw(msgspec.json.encode(part)) for part in parts],
        )
        self.store.replace(ISLAND + self.owner, encode_note(note), durable=False)

    def _spoil(self, part: Part, elements: int, way: int) -> Part:
        """Store a part that is wrong in one way of nine, and return what its note says."""
        values = torch.zeros(elements)
        match way % 9:
            case 0:
                values[0] = float("nan")
            case 1:
                values += 1e18
            case 2:
                part = msgspec.structs.replace(part, is_loss=True)
            case 3:
                part = msgspec.structs.replace(part, checksum="ffff")
            case 4:
                part = msgspec.structs.replace(part, end=part.end + 10**11)
            case 5:
                part = msgspec.structs.replace(part, weight=10**11)
            case 6:
                part = msgspec.structs.replace(part, codec="fp5", ranks=1024)
            case 7:
                values = values[: elements // 2]
        payload = memory_of(encode(values, PartHeader()))
        part = msgspec.structs.replace(part, size=0 if part.is_loss else len(payload))
        if way % 9 != 8:  # the last one is never stored
            self.run.large.create(
                part_name(self.owner, part.fragment, part.number), payload, resume=True
            )
        return part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    flags = ["--address", "127.0.0.1", "--port", free_port()]
    with serving(tmp_path / "bucket", *flags) as found:
        found.site()
        yield found


def test_a_hostile_login_delays_and_ends_nobody(server: Serving) -> None:
    """Two honest islands train to the end, with equal bits."""
    owner = server.join_file("owner")
    chosen = config(8, delay=1)
    total = 60 * 2 * TOKENS
    options: dict[str, Any] = {"total_tokens": total, "slots": 3, "step_seconds": 0.1, "grace": 2.0}
    pair = [Trainee(owner, f"owner.{name}", chosen, **options) for name in "ab"]
    attacker = Attacker(server.join_file(SITE))
    began = threading.Event()
    pair[0].on_step = lambda _: began.set()
    with audited(owner) as audit, trained(*pair):
        assert began.wait(PATIENCE)
        with attacker.attacking():
            pair[0].thread.join(PATIENCE)
    copies = audit.check(TOKENS // SAMPLES)
    for island in pair:
        for state, copy in zip(island.outer.loop.states, copies, strict=True):
            assert torch.equal(state.outer, copy)
    assert audit.newest.ended
    assert len({decision.session for decision in audit.decisions.values()}) == 1, "one syncer"
    fates = {
        ledger.fate
        for decision in audit.decisions.values()
        for slot in decision.slots
        if slot.owner == attacker.owner
        for ledger in slot.ledgers
    }
    assert {Fate.NOT_FINITE, Fate.LOSS, Fate.WRONG_BASE, Fate.TOO_LONG} <= fates
