"""Notices that a machine is taken away, from a server that speaks the dialect of each cloud."""

import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.components.test_resume import FP32, chosen, last, run
from tests.conftest import write_text
from tests.metadata_server import (
    AWS,
    AZURE,
    GCP,
    MetadataServer,
    aws_action,
    azure_events,
    metadata_server,
)
from tests.processes import ProcessPool
from tests.programs import run_program
from tests.test_trainer import around_steps
from torchtitan_diloco.components.checkpoint_folder import step_of
from torchtitan_diloco.config import ConfigError, load_config
from torchtitan_diloco.distributed import notices
from torchtitan_diloco.distributed.collectives import StopRequest
from torchtitan_diloco.distributed.notices import DIALECTS, Metadata, Notice, NoticeWatch
from torchtitan_diloco.distributed.world import World
from torchtitan_diloco.trainer import Trainer


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with metadata_server() as found:
        yield found


def ask(cloud: str, server: MetadataServer) -> Notice | None:
    return DIALECTS[cloud](Metadata(server.address))


@pytest.mark.parametrize("cloud", DIALECTS)
def test_nothing_is_said_as_long_as_the_machine_stays(cloud: str, server: MetadataServer) -> None:
    assert ask(cloud, server) is None


def test_aws_says_what_it_does_and_when(server: MetadataServer) -> None:
    server.answers[f"{AWS}events/recommendations/rebalance"] = '{"noticeTime": "2026-01-01"}'
    found = ask("aws", server)
    assert found is not None
    assert not found.stops
    server.answers[f"{AWS}spot/instance-action"] = aws_action(120)
    found = ask("aws", server)
    assert found is not None
    assert found.stops
    assert found.what == "AWS will terminate this machine"
    assert found.seconds is not None
    assert 100 < found.seconds <= 120


def test_a_token_of_aws_is_kept_until_it_expires(server: MetadataServer) -> None:
    metadata = Metadata(server.address)
    for _ in range(3):
        assert DIALECTS["aws"](metadata) is None
    assert server.tokens == 1
    server.token = "token-2"
    assert DIALECTS["aws"](metadata) is None
    assert server.tokens == 2


def test_gcp_says_true(server: MetadataServer) -> None:
    server.answers[GCP] = "TRUE"
    assert ask("gcp", server) == Notice("GCP will preempt this machine", 30.0)


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([("Preempt", "mine")], "Azure has scheduled Preempt for this machine"),
        ([("Preempt", "other"), ("Terminate", "mine")], "Azure has scheduled Terminate"),
        ([("Preempt", "other")], None),
        ([("Freeze", "mine")], None),
    ],
)
def test_azure_names_machines(
    server: MetadataServer, events: list[tuple[str, str]], what: str | None
) -> None:
    server.answers[AZURE] = azure_events(*events)
    found = ask("azure", server)
    assert (found.what if found else None) == what or (found and found.what.startswith(what or "-"))
    server.answers[AZURE] = azure_events(*events, seconds=None)  # it has begun
    found = ask("azure", server)
    assert (found is None) == (what is None)
    assert found is None or found.seconds == 0.0


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "POLL_SECONDS", dict.fromkeys(DIALECTS, 0.001))


WRONG = "<html>Log in to the network</html>"


@pytest.mark.parametrize(
    ("cloud", "answers"),
    [
        ("aws", {f"{AWS}spot/instance-action": WRONG}),
        ("aws", {f"{AWS}spot/instance-action": "{}"}),
        ("aws", {f"{AWS}spot/instance-action": '{"action": "stop", "time": "soon"}'}),
        ("gcp", {GCP: WRONG}),
        ("azure", {AZURE: WRONG}),
        ("azure", {AZURE: '{"Events": [{}]}'}),
        ("azure", {AZURE: "[]"}),
    ],
)
@pytest.mark.usefixtures("fast")
def test_an_answer_that_makes_no_sense_is_one_warning(
    server: MetadataServer,
    caplog: pytest.LogCaptureFixture,
    cloud: str,
    answers: dict[str, str],
) -> None:
    server.answers |= answers
    with NoticeWatch(cloud, server.address, lambda _: pytest.fail("there is none")) as watch:
        for _ in range(40):
            assert server.asked.acquire(timeout=60)
    watch._thread.join(60)
    (line,) = caplog.messages
    assert re.fullmatch(rf'run.preemption = "{cloud}": .* training continues without notices', line)


@pytest.mark.usefixtures("fast")
def test_a_server_that_does_not_answer_is_one_warning_and_one_that_comes_back_is_heard(
    server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    del server.answers[GCP]
    told = list[Notice]()
    heard = threading.Event()

    def tell(notice: Notice) -> None:
        told.append(notice)
        heard.set()

    with NoticeWatch("gcp", server.address, tell):
        for _ in range(20):
            assert server.asked.acquire(timeout=60)
        server.answers[GCP] = "TRUE"
        assert heard.wait(60)
    assert told == [Notice("GCP will preempt this machine", 30.0)]
    assert len(caplog.messages) == 1
    assert "status 404" in caplog.text


def test_a_proxy_is_never_asked(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert ask("gcp", server) is None


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def noticed(text: Path, folder: Path, cloud: str, server: MetadataServer, **more: Any) -> Any:
    base = {
        "run.preemption": cloud,
        "run.preemption_address": server.address,
        "training.steps": 5000,
        "checkpoint.every": 0,
        "validation.every": 0,
    }
    return chosen(text, folder, **(base | more))


def serve_notice(cloud: str, server: MetadataServer) -> None:
    if cloud == "aws":
        server.answers[f"{AWS}spot/instance-action"] = aws_action()
    elif cloud == "gcp":
        server.answers[GCP] = "TRUE"
    else:
        server.answers[AZURE] = azure_events(("Preempt", "mine"))


@pytest.mark.parametrize("cloud", DIALECTS)
@pytest.mark.usefixtures("fast")
def test_a_run_saves_and_stops_after_a_notice(
    text: Path,
    tmp_path: Path,
    server: MetadataServer,
    caplog: pytest.LogCaptureFixture,
    cloud: str,
) -> None:
    def serve(trainer: Trainer) -> None:
        if trainer.step == 3:
            serve_notice(cloud, server)

    with around_steps(before=serve):
        run(noticed(text, tmp_path / "run", cloud, server))
    assert 3 <= step_of(last(tmp_path / "run")) < 5000
    lines = [line for line in caplog.messages if line.startswith("notice: ")]
    assert len(lines) == 1
    assert re.search(r", \d+ s left: the run saves and stops", lines[0])


@pytest.mark.usefixtures("fast")
def test_a_recommendation_of_aws_saves_once_and_goes_on(
    text: Path, tmp_path: Path, server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers[f"{AWS}events/recommendations/rebalance"] = "{}"
    heard = threading.Event()
    note = StopRequest.note

    def note_and_tell(self: StopRequest, notice: Notice) -> None:
        note(self, notice)
        heard.set()

    def wait_for_it(trainer: Trainer) -> None:
        if trainer.step == 3:
            assert heard.wait(60)

    with patch.object(StopRequest, "note", note_and_tell), around_steps(before=wait_for_it):
        short = {"training.steps": 8, "checkpoint.at_end": "false"}
        run(noticed(text, tmp_path / "run", "aws", server, **short))
    assert 1 <= step_of(last(tmp_path / "run")) <= 4
    assert caplog.text.count("the run saves and continues") == 1


def run_and_tell(wanted: dict[str, str]) -> int:
    run(wanted)
    folder = Path(wanted["run.folder"])
    return step_of(last(folder, int(os.environ["RANK"])))


def test_all_ranks_stop_at_the_same_step(
    text: Path, tmp_path: Path, server: MetadataServer, processes: ProcessPool
) -> None:
    """Rank 0 gets the notice."""
    server.answers[GCP] = "TRUE"
    settings = noticed(text, tmp_path / "run", "gcp", server, **FP32)
    steps = processes.run(run_and_tell, 2, settings)
    assert steps[0] == steps[1] < 5000


def test_the_exit_code_is_that_of_sigterm_and_the_run_is_not_started_again(
    text: Path, tmp_path: Path, server: MetadataServer
) -> None:
    """Otherwise Kubernetes and Slurm would take it for finished."""
    server.answers[GCP] = "TRUE"
    wanted = noticed(text, tmp_path / "run", "gcp", server)
    words = [word for key, value in wanted.items() for word in (f"--{key}", str(value))]
    done = run_program(
        tmp_path / "console.txt",
        ["train", "--config", "debug", *words],
        variables=os.environ | {"NPROC": "1"},
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert "notice: GCP will preempt this machine, 30 s left" in done.stdout
    assert "started again" not in done.stdout + done.stderr
    assert step_of(last(tmp_path / "run")) < 5000


def test_a_signal_after_a_notice_is_the_first_one() -> None:
    """A cloud sends one soon after its notice, and a second signal would kill the run."""
    world = World(rank=0, size=1, workers=1, device=torch.device("cpu"))
    with StopRequest(world, longest_lag=0) as stop:
        assert stop.seconds_left == math.inf
        stop.note(Notice("taken away", 30.0))
        assert stop.agreed(1).stop
        found = [stop.got_signal]
        assert stop.seconds_left <= 30
        os.kill(os.getpid(), signal.SIGTERM)
        found.append(stop.got_signal)
        assert found == [False, True]
        assert stop.knows_of_stop


@pytest.mark.parametrize(
    ("cloud", "times", "needed"),
    [
        ("gcp", (3, 10.0, 0.0), ""),
        ("gcp", (3, 10.5, 0.0), "needs 32 s to stop (3 steps of 10.5 s, without a save)"),
        ("azure", (8, 0.1, 60.0), "needs 61 s to stop (8 steps of 0.1 s and a save of 60.0 s)"),
        ("aws", (8, 0.1, 60.0), ""),
        ("gcp", (3, 0.0, 60.0), ""),  # the time of a step is not known yet
        ("none", (3, 100.0, 60.0), ""),
    ],
)
def test_a_notice_that_is_too_short_is_named(
    caplog: pytest.LogCaptureFixture, cloud: str, times: tuple[int, float, float], needed: str
) -> None:
    watch = NoticeWatch(cloud, "", lambda _: None)
    for _ in range(2):
        watch.check_time(*times)
    assert len(caplog.messages) == bool(needed)
    assert needed in caplog.text


def test_a_run_compares_the_time_of_its_steps_with_the_notice(
    monkeypatch: pytest.MonkeyPatch,
    text: Path,
    tmp_path: Path,
    server: MetadataServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(notices.NOTICE_SECONDS, "gcp", 0.0)
    run(noticed(text, tmp_path / "run", "gcp", server, **{"training.steps": 4}))
    found = [line for line in caplog.messages if "gives a notice of 0 s, but this run" in line]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run.preemption": "gpc"}, 'run.preemption = "gpc": .*gcp'),
        ({"run.preemption_address": "http://a"}, "is only used with run.preemption"),
        (
            {"run.preemption": "aws", "run.preemption_address": "169.254.169.254"},
            "must look like http://HOST",
        ),
        *(
            ({"run.preemption": "aws", "run.preemption_address": address}, "must look like http:")
            for address in ("http://:80", "http://a:99999999", "http://a:x", "http://a/b", "http:a")
        ),
    ],
)
def test_settings_that_cannot_be(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("debug", given)
