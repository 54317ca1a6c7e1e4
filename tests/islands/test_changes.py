"""Runs whose settings, code and sites change while they go on."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import pytest

from tests.islands.running import TOKENS, Island, same, started
from tests.islands.servers import need_server, running_server
from tests.islands.test_coming_and_going import at, die, hold, save_in
from tests.islands.written import FACTS
from torchtitan_diloco.base.user import USER_ERROR
from torchtitan_diloco.diloco.state_dict import SavedState
from torchtitan_diloco.islands import __main__ as islands_main
from torchtitan_diloco.islands import joining, leader, peers
from torchtitan_diloco.islands import server as server_module
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.changes import parse_change
from torchtitan_diloco.islands.config import Join
from torchtitan_diloco.islands.connection import Connection
from torchtitan_diloco.islands.reader import open_reader

need_server()
pytestmark = pytest.mark.usefixtures("soon_gone")


def test_a_run_goes_on_with_other_settings_other_code_and_a_third_site(
    server: Join, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third island has the old settings, and joins a longer run of more slots, whose parts
    change from 4 bits to 32."""
    a, b, c = (Island(server, name, steps=90, slots=2, grace=0.3) for name in "abc")
    for island in (a, b, c):
        island.step_seconds = 0.02
    a.each_step = b.each_step = hold(60, lambda: c.step > 10)
    total = 120 * 2 * TOKENS
    changes = {"diloco.sync_every": "4", "total_tokens": f"{total}", "slots": "3"}
    changes |= {"diloco.quantization.codec": "fp32"}
    with started(a, b):
        a.wait_for_step(30)
        for key, value in changes.items():
            assert main(["change", key, value, "--join", str(server)]) == 0
        printed = capsys.readouterr().out
        assert "diloco.sync_every = 4 (before: 8)" in printed
        assert "codec = fp32 (before: fp4_e3m0)" in printed
        monkeypatch.setattr(peers, "code_fingerprint", lambda *_: "mended")
        with started(c):
            results = [island.finish() for island in (a, b, c)]
    for result in results:
        assert same(results[0].shared, result.shared)
        assert result.peers.total_tokens == total
        assert result.peers.schedule.sync_every == result.peers.config.sync_every == 4
        assert result.peers.clock >= total - 4 * 2 * TOKENS
    seat = c.peers.seat
    assert (seat.slot, seat.slots, seat.streams) == (2, 3, 2)
    sent = [one.sent_step for one in results[2].rounds if one.weight and one.fragment == 0]
    assert median(after - before for before, after in pairwise(sent[2:])) == 4
    rounds = [one for one in results[0].rounds if one.traffic.bytes_sent]
    sizes = [one.traffic.bytes_sent for one in rounds if one.fragment == 0]
    assert sizes[-1] > 6 * sizes[0]
    newest = {one.fragment: one.traffic.bytes_sent for one in rounds if one.weight}
    assert results[0].peers.gauges.sent_bytes == sum(newest.values())


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("diloco.sync_evry", "4", "cannot be changed during a run; did you mean diloco.sync_"),
        ("diloco.sync_every", "four", "expected"),
        ("diloco.overlap.delay", "8", "must be smaller than diloco.sync_every = 8"),
        ("quorum", "3", "the run has 2 slots"),
        ("total_tokens", "0", "expected"),
        ("slots", "2", "the run has 2 slots"),
        ("diloco.quantization.codec", "fp4", "expected one of"),
        ("diloco.quantization.codec", "topk", "needs a different outer optimizer"),
        ("diloco.outer_optimizer.lr", "1e300", "expected"),
    ],
)
def test_a_change_that_no_run_can_use_is_refused(key: str, value: str, problem: str) -> None:
    settings = {"diloco.sync_every": "8", "diloco.overlap.delay": "1"}
    with pytest.raises(ValueError, match=problem):
        parse_change(msgspec.structs.replace(FACTS, fingerprints=settings), key, value)


def test_a_run_that_has_not_begun_has_no_settings_to_change(
    server: Join, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["change", "quorum", "2", "--join", str(server)]) == USER_ERROR
    assert "the run has not started" in capsys.readouterr().err


def test_a_change_counts_only_when_it_is_read_back(
    server: Join, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not an equal one that was made before."""
    monkeypatch.setattr(islands_main, "CHANGE_SECONDS", 1.0)
    island = Island(server, "a", steps=60, begin=1, slots=1, grace=0.2, step_seconds=0.02)
    island.each_step = hold(20, lambda: False)
    again = ["change", "diloco.overlap.mixing", "0.5", "--join", str(server)]
    with started(island):
        island.wait_for_step(20)
        for value in ("0.5", "0.25"):
            assert main([*again[:2], value, *again[3:]]) == 0
        monkeypatch.setattr(Connection, "append", lambda *_: None)  # it is lost
        assert main(again) == USER_ERROR
    assert "did not confirm the change" in capsys.readouterr().err


def test_nobody_needs_the_first_records_of_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server deletes old records. A joiner and the reader of a status begin with a stored
    state, and an island whose checkpoint is older takes the copies of another one."""
    monkeypatch.setattr(server_module, "LOG_BYTES", 30_000)
    for module in (joining, leader):
        monkeypatch.setattr(module, "STATE_EVERY", 10)
    saved = list[SavedState]()
    with running_server(tmp_path / "server") as server:
        names = {name: Island(server.join, name, steps=200, slots=3, grace=0.2) for name in "abc"}
        again = Island(server.join, "b", steps=200, slots=3, grace=0.2)
        a, b, c = names.values()
        b.each_step = lambda one: (at(20, save_in(saved))(one), at(30, die)(one))
        a.each_step = hold(150, lambda: c.step and again.step)
        a.step_seconds = 0.02
        with started(a, b):
            a.wait_for_step(150)
            again.saved = saved[0]
            with open_reader(server.join) as reader:
                assert reader.connection.first > 1
                assert len(reader.state.owners()) == 2
            with started(again, c):
                results = [island.finish() for island in (a, again, c)]
    assert all(same(results[0].shared, result.shared) for result in results)
    assert "the log no longer reaches back to its checkpoint: this island takes" in caplog.text


def test_versions_do_not_pile_up_while_training_pauses(server: Join) -> None:
    """As during a validation of ten minutes."""
    a, b = (Island(server, name, steps=200, grace=0.1, step_seconds=0.01) for name in "ab")
    held = list[int]()

    def goes_on() -> bool:
        held.append(max(len(copy.versions) for copy in b.peers._copies.fragments))
        return a.step > 120

    b.each_step = hold(20, goes_on)
    with started(a, b):
        assert same(a.finish().shared, b.finish().shared)
    assert a.result is not None
    assert 1 < max(held) <= 4
