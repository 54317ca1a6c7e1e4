"""Checks a run by what its store holds: decisions, copies and updates."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from torchtitan_diloco.islands.layout import Layout, hexadecimal
from torchtitan_diloco.islands.merging import apply_version, read_copy
from torchtitan_diloco.islands.payload import HEADER_BYTES
from torchtitan_diloco.islands.rules.decision import Decision, decode_decision
from torchtitan_diloco.islands.rules.names import COPY, RUN, VERSION, Object, run_name, run_number
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import AwayError, open_store

LOOK_SECONDS = 0.1


class Audit:
    """Collects the objects of a run while it goes on, because old ones are deleted."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.decisions = dict[int, Decision]()
        self.contents = dict[Object, bytearray]()

    def look(self) -> None:
        """Read all new decisions, and the objects that they name."""
        after = run_name(max(self.decisions)) if self.decisions else ""
        for entry in self._run.brief.list(RUN, after):
            number = run_number(entry.name)
            assert number is not None, entry.name
            stored = self._run.brief.get(entry.name)
            if stored is None:
                continue
            decision = decode_decision(stored.content, number)
            self.decisions[number] = decision
            if not decision.is_founded:
                continue  # a syncer that takes over here deletes the copies, and fetches them again
            for fragment, shared in enumerate(decision.fragments):
                for named in shared.objects(fragment):
                    if named.kind in (VERSION, COPY) and named not in self.contents:
                        most = HEADER_BYTES + 4 * shared.elements
                        content = self._run.large.get(named.name, most)
                        assert content is not None, f"{number} names {named}, which is missing"
                        self.contents[named] = content

    @property
    def newest(self) -> Decision:
        return self.decisions[max(self.decisions)]

    def check(self, tokens_per_sample: int) -> list[Tensor]:
        """Check that nothing was merged twice, and that all versions follow from the first copies.
        Return the newest copies."""
        numbers = sorted(self.decisions)
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a decision is missing"
        founded = [self.decisions[n] for n in numbers if self.decisions[n].is_founded]
        for before, after in itertools.pairwise(founded):
            check_ledgers(before, after)
        newest = founded[-1]
        for number, shared in enumerate(newest.fragments):
            ledgers = [slot.ledgers[number] for slot in newest.slots]
            merged = sum(ledger.taken - ledger.lost for ledger in ledgers)
            assert shared.clock == merged * tokens_per_sample, "each sample counts once"
        return [self._copy_of(number, founded) for number in range(len(newest.fragments))]

    def _copy_of(self, fragment: int, founded: list[Decision]) -> Tensor:
        """Return the newest copy: the first one, and all updates in order."""
        layout = Layout(founded[-1].fragments[fragment].shapes)
        kept = {
            one.version: one for decision in founded for one in decision.fragments[fragment].kept
        }
        copies = {
            one.version: one for decision in founded for one in decision.fragments[fragment].copies
        }
        values = torch.empty(layout.values)
        first = Object(COPY, copies[0].number, fragment, 0)
        read_copy(self.contents[first], values)
        for version in range(founded[-1].fragments[fragment].version + 1):
            if version:
                update = Object(VERSION, kept[version].number, fragment, version)
                apply_version(values, self.contents[update])
            checksum = hexadecimal(layout.checksum(values))
            assert checksum == kept[version].checksum, f"version {version} of {fragment}"
            if version in copies:
                stored = torch.empty(layout.values)
                copy = Object(COPY, copies[version].number, fragment, version)
                read_copy(self.contents[copy], stored)
                assert torch.equal(stored, values), f"copy {version} of {fragment}"
        return values


def check_ledgers(before: Decision, after: Decision) -> None:
    """Check that a decision follows from the one before."""
    assert after.run == before.run
    for fragment, (old, new) in enumerate(zip(before.fragments, after.fragments, strict=True)):
        assert new.version - old.version in (0, 1)
        decided = 0
        for old_slot, new_slot in zip(before.slots, after.slots, strict=False):
            was = old_slot.ledgers[fragment]
            now = new_slot.ledgers[fragment]
            assert now.taken >= was.taken
            assert now.lost >= was.lost
            assert now.number - was.number in (0, 1), "an island has one part undecided"
            if now.version != was.version:
                assert now.version == new.version == old.version + 1
                decided += 1
        assert (decided > 0) == (new.version > old.version), "a version has parts"


@contextmanager
def audited(location: Path) -> Iterator[Audit]:
    """Collect the objects of a run in a thread."""
    store = open_store(str(location))
    run = Run(store)
    audit = Audit(run)
    is_over = threading.Event()
    errors = list[BaseException]()

    def body() -> None:
        while not is_over.wait(LOOK_SECONDS):
            try:
                with suppress(AwayError):
                    audit.look()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield audit
    finally:
        is_over.set()
        thread.join()
        if not errors:
            audit.look()
        run.close()
    if errors:
        raise errors[0]
