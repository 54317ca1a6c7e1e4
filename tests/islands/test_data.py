"""Islands read phases of the data, and corpora of their own."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.diloco.toy import config
from tests.islands.by_hand import newest, open_run, syncer
from tests.islands.trainees import SAMPLES, TOKENS, KilledError, Trainee, trained
from tests.waiting import wait_until
from torchtitan_diloco.components.run_data import Position, RunData
from torchtitan_diloco.config import load_config
from torchtitan_diloco.data.loader import Stream
from torchtitan_diloco.data.mixture import Indices
from torchtitan_diloco.data.tokenizer import build_tokenizer
from torchtitan_diloco.islands.rules.changes import Set, encode_change
from torchtitan_diloco.islands.seat import Seat

Place = tuple[int, int]
"""Corpus and sequence of a sample."""
LENGTH = 16
STARTS = 0.3, 0.65


class Places:
    """Returns what is read in place of its tokens."""

    def __init__(self, readers: Any) -> None:
        self.readers = readers

    def __getitem__(self, places: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(places), torch.from_numpy(places)


class Corpora:
    """Two corpora, whose mixture has three phases."""

    def __init__(self, folder: Path) -> None:
        self.names = list[str]()
        for name in ("web", "code"):
            path = folder / f"{name}.txt"
            path.write_text("\n".join(f"{name} {number}" for number in range(12_000)))
            self.names.append(str(path))
        web, code = self.names
        even = f'{{"{web}" = 1, "{code}" = 1}}'
        first, second = STARTS
        phases = (
            f'[{{start = {first}, mixture = {{"{code}" = 1}}}}, '
            f"{{start = {second}, mixture = {even}}}]"
        )
        self.config = load_config(
            "debug",
            {
                "data.mixture": f"{web}=3 {code}=1",
                "data.phases": phases,
                "data.cache_folder": str(folder / "cache"),
                "data.prefetch": "3",
                "training.sequence_length": str(LENGTH),
                "training.batch_size": str(SAMPLES),
                "islands.join": str(folder / "store"),
                "islands.name": "a",
            },
        )

    def open(self, slot: int, position: int, entered: list[int], block: int) -> RunData:
        """Open the data of an island at a position of its slot."""
        world: Any = SimpleNamespace(
            worker=0, rank_in_worker=0, ranks_per_worker=1, device=torch.device("cpu")
        )
        data = RunData(self.config, build_tokenizer("bytes"), world)
        plan: Any = SimpleNamespace(accumulation=1)
        stream = Stream(slot, 2, block)
        data.begin(plan, position, Position(), stream, entered)
        data.loader._reader = Places(data.loader._reader.readers)  # type: ignore[assignment]
        return data


class Reading:
    """Lets a trainee read its data, and notes what it has read at which sample of its slot."""

    def __init__(self, trainee: Trainee, corpora: Corpora, on_step: Callable[[int], None]) -> None:
        self.trainee = trainee
        self.corpora = corpora
        self.slot = -1
        self.read = dict[int, Place]()
        self._after_step = on_step
        trainee.on_join = self.begin
        trainee.on_step = self.step

    def begin(self, seat: Seat) -> None:
        self.slot = seat.slot
        entered = self.trainee.peers.entered
        self.data = self.corpora.open(seat.slot, seat.position, entered, seat.block)
        self.batches = iter(self.data.loader)

    def step(self, steps: int) -> None:
        """Read the samples of the step that was just taken, then enter phases, as the trainer."""
        first = self.data.loader.position
        places, _ = next(self.batches)
        self.read |= dict(enumerate(map(tuple, places.tolist()), first))
        self.data.enter(self.trainee.peers.entered)
        self._after_step(steps)


@pytest.mark.usefixtures("soon_silent")
def test_phases_begin_at_the_recorded_positions_also_after_kills_and_for_an_heir(
    tmp_path: Path,
) -> None:
    """An island is killed before a phase and just after it; then another one takes its slot."""
    corpora = Corpora(tmp_path)
    chosen = config(8, delay=1)
    total = 300 * 2 * TOKENS
    readings = list[Reading]()

    def reading(name: str, dies: Callable[[Trainee, int], bool] = lambda *_: False) -> Trainee:
        trainee = Trainee(
            tmp_path / "store",
            name,
            chosen,
            total_tokens=total,
            step_seconds=0.02,
            slot_seconds=2.5,
            phases=STARTS,
        )

        def after_step(steps: int) -> None:
            if dies(trainee, steps):
                raise KilledError

        readings.append(Reading(trainee, corpora, after_step))
        return trainee

    def just_entered(trainee: Trainee, _: int) -> bool:
        entered = trainee.peers.entered
        return bool(entered) and trainee.peers.machine.position > entered[0] + 3 * SAMPLES

    first = reading("a")
    with syncer(tmp_path / "store", tmp_path / "scratch"), trained(first):
        for name, dies in (("b", lambda _, steps: steps == 30), ("b", just_entered)):
            with pytest.raises(KilledError), trained(reading(name, dies)):
                pass
        with trained(reading("c")):
            pass
    decision = newest(tmp_path / "store")
    assert decision.ended
    assert len(decision.slots) == 2, "the heir has continued a slot"
    seen = list[Place]()
    for number, slot in enumerate(decision.slots):
        assert len(slot.entered) == len(STARTS)
        data = corpora.open(number, 0, slot.entered, SAMPLES)
        batches = iter(data.loader)
        expected = [
            tuple(one) for _ in range(slot.furthest // SAMPLES) for one in next(batches)[0].tolist()
        ]
        del batches
        in_phase = {corpus for corpus, _ in expected[slot.entered[0] : slot.entered[1]]}
        assert in_phase == {1}, "only code"
        read = [one.read for one in readings if one.slot == number]
        for position, place in enumerate(expected):
            found = {one[position] for one in read if position in one}
            assert found == {place}, (number, position, slot.entered)
        seen += expected
    assert len(set(seen)) == len(seen), "no sample is in two slots, or twice in one"


# --- corpora of their own -------------------------------------------------------------------------


@pytest.mark.usefixtures("soon_silent")
def test_an_island_continues_only_a_slot_of_its_own_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LATE_SECONDS", "STILL_SECONDS"):
        monkeypatch.setattr(f"torchtitan_diloco.islands.waiting.{name}", 0.5)
    store = tmp_path / "store"
    total = 10**9
    places = dict[str, Seat]()
    ends = Event()

    def island(name: str, corpus: str, steps: int = 0) -> Trainee:
        """`steps`: after which it is killed."""
        trainee = Trainee(
            store,
            name,
            config(8, delay=1),
            total_tokens=total,
            step_seconds=0.02,
            slot_seconds=2.5,
            corpus=corpus,
        )

        def after_step(taken: int) -> None:
            if ends.is_set():
                trainee.stop.set()
            if taken == steps:
                raise KilledError

        trainee.on_join = lambda seat: places.update({name: seat})
        trainee.on_step = after_step
        return trainee

    with syncer(store, tmp_path / "scratch"), trained(island("a", "aa")):
        with pytest.raises(KilledError), trained(island("b", "bb", steps=40)):
            pass
        with trained(island("c", "cc")):
            wait_until(lambda: "a slot of its corpus" in caplog.text, "what c waits for")
            assert "c" not in places
            with trained(island("d", "bb")):
                wait_until(lambda: "d" in places, "the slot of b")
                with open_run(store) as run:
                    change = encode_change(Set("slots", "3"))
                    assert run.store.create("change/1-0123abcd", change)
                wait_until(lambda: "c" in places, "a slot of its own")
                ends.set()
    assert places["d"].slot == places["b"].slot
    assert places["d"].position > 0
    assert (places["c"].slot, places["c"].position) == (2, 0)
    slots = newest(store).slots
    assert [slots[places[name].slot].corpus for name in "abc"] == ["aa", "bb", "cc"]


def test_the_digest_is_that_of_the_own_corpora_and_their_weights(tmp_path: Path) -> None:
    for name in ("a", "b", "common"):
        (tmp_path / f"{name}.txt").write_text(f"{name[0]} is what this text repeats. " * 9000)
    (tmp_path / "c.txt").write_bytes((tmp_path / "a.txt").read_bytes())

    def open_data(name: str, share: int = 1, shard_by: str = "own") -> RunData:
        own = str(tmp_path / "{worker}.txt")
        corpora = {"own": f"{own}={share} {tmp_path / 'common.txt'}=1"}
        changed = {
            "data.mixture": corpora.get(shard_by, f"{tmp_path / 'a.txt'}=1"),
            "data.shard_by": shard_by,
            "data.cache_folder": str(tmp_path / "cache"),
            "training.sequence_length": str(LENGTH),
            "islands.join": str(tmp_path / "store"),
            "islands.name": name,
        }
        world: Any = SimpleNamespace(worker=0, ranks_per_worker=1, control=None)
        return RunData(load_config("debug", changed), build_tokenizer("bytes"), world)

    first = open_data("a")
    assert first.own_digest
    assert open_data("c").own_digest == first.own_digest, "the same text elsewhere"
    assert open_data("b").own_digest not in ("", first.own_digest)
    assert open_data("a", share=3).own_digest != first.own_digest, "other samples have its numbers"
    assert open_data("b").common_facts == first.common_facts
    assert open_data("a", shard_by="none").own_digest == ""
