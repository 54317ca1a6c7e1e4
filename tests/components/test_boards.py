"""Boards: what each is sent, islands as one group, and a server that does not answer."""

import math
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.components.test_telemetry import SENT, telemetry, train
from tests.test_trainer import LOSS, records
from tests.waiting import wait_until
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.components.boards import Shown, tensorboard
from torchtitan_diloco.components.boards.base import GuardedBoard
from torchtitan_diloco.components.records import SampleRecord

BOARDS = "torchtitan_diloco.components.boards"
SERVER = "http://tracking.test"


@pytest.fixture(autouse=True)
def boards_are_imported_anew() -> Iterator[None]:
    """Let each test have the packages that it puts into sys.modules."""
    names = [f"{BOARDS}.{name}" for name in ("wandb", "mlflow")]
    for name in names:
        sys.modules.pop(name, None)
    yield
    for name in names:
        sys.modules.pop(name, None)


# --- Weights & Biases -----------------------------------------------------------------------------


def test_weights_and_biases_has_islands_in_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []

    def init(**given: Any) -> Any:
        begun.append(given)
        ignored = dict.fromkeys(("define_metric", "log", "alert", "finish"), lambda *_, **__: None)
        return SimpleNamespace(id=f"id{len(begun)}", **ignored)

    fake = SimpleNamespace(init=init, Error=OSError, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for folder, run in (("island-0", "abc"), ("island-1", "abc"), ("job", "")):
        with telemetry(tmp_path / folder, boards=("wandb:slow-links",), run=run) as own:
            train(own, range(1, 3))
    found = [(one["name"], one["group"], one["job_type"]) for one in begun]
    assert found == [
        ("island-0", "abc", "island"),
        ("island-1", "abc", "island"),
        ("job", None, None),
    ]


def test_weights_and_biases_gets_the_same_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = []
    folder = tmp_path / "worker-0"
    for step in (0, 4):
        with telemetry(tmp_path, boards=("wandb:slow-links",), step=step, run="the-group") as own:
            train(own, range(step + 1, step + 5))
            own.files.write(SampleRecord(step + 4, 0.0, "if a < b:\n    b"))
        names.append((folder / "wandb/run-id").read_text())
    assert names[0] == names[1], "a resumed run goes on"
    written = list(folder.glob("wandb/offline*/run-*.wandb"))
    assert len(written) == 2
    wait_until(lambda: min(path.stat().st_size for path in written) > 1000, "wandb's process")
    for path in written:
        for expected in ("slow-links", LOSS, SENT, names[0], "the-group", "sample"):
            assert expected.encode() in path.read_bytes()
    pages = [path.read_text() for path in folder.glob("wandb/offline*/files/media/html/*.html")]
    assert len(pages) == 2
    assert all("<pre>if a &lt; b:\n    b</pre>" in page for page in pages)


# --- a board that fails ---------------------------------------------------------------------------


class Failing:
    """A board of which some methods raise an error that is none of the operating system."""

    def __init__(self, *names: str) -> None:
        self.calls: list[str] = []
        self._names = names

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self._names:
            raise ValueError(f"cannot {name}\nmore")

    def add(self, *_: Any) -> None:
        self._call("add")

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("failing", [("add", "close"), ("close",)])
def test_a_board_never_ends_training_and_is_named_once(
    failing: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Failing(*failing)
    monkeypatch.setattr(tensorboard, "TensorBoard", lambda _: board)
    with telemetry(tmp_path, boards=("tensorboard",)) as own:
        train(own, range(1, 7))
    assert board.calls == ["add", "add", "add", "close"]
    assert caplog.messages == [
        f"tensorboard: ValueError: cannot {failing[0]}; its curves have gaps, the records do "
        "not depend on it"
    ]
    assert [one["step"] for one in records(tmp_path)] == [2, 4, 6]


def test_a_resumed_run_goes_on_without_a_board_that_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new run whose settings are wrong does not begin."""

    def refuse(_: Shown) -> Any:
        raise UserError("nobody answers")

    monkeypatch.setattr(tensorboard, "TensorBoard", refuse)
    boards = ("tensorboard",)
    with pytest.raises(UserError, match="nobody answers"), telemetry(tmp_path, boards=boards):
        pass
    with telemetry(tmp_path, boards=boards, step=2) as own:
        train(own, range(3, 5))
    assert "tensorboard: nobody answers; its curves have gaps" in caplog.text
    assert [one["step"] for one in records(tmp_path)] == [4]


@pytest.fixture
def small_files() -> Iterator[Callable[[bool], None]]:
    """Return what lets each file of this process have at most 100 bytes, or as many as before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(is_full: bool) -> None:
        most = (100, before[1]) if is_full else before
        resource.setrlimit(resource.RLIMIT_FSIZE, most)

    yield limit
    limit(False)


def test_tensorboard_goes_on_after_a_disk_was_full(
    tmp_path: Path,
    small_files: Callable[[bool], None],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The disk is full for steps 3 and 4, of which the second one ends within a record."""
    shown = Shown(tmp_path, 0, 1, {})
    board = GuardedBoard("tensorboard", lambda: tensorboard.TensorBoard(shown), is_new=True)
    for step in range(1, 7):
        small_files(step in (3, 4))
        board.add(step, {LOSS: 1.0 * step})
    board.add_text(6, "verdicts", "worker 1: slow compute")
    board.close()
    assert [record.message for record in caplog.records] == [
        "tensorboard: OSError: [Errno 27] File too large; its curves have gaps, the records do not "
        "depend on it"
    ]
    assert not capfd.readouterr().err
    assert len([*tmp_path.glob("*tfevents*")]) == 2, "before and after"
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in curves.Scalars(LOSS)] == [1, 2, 5, 6]
    assert [event.step for event in curves.Tensors("verdicts/text_summary")] == [6]


# --- MLflow ---------------------------------------------------------------------------------------


class MlflowError(Exception):
    """Stands for MlflowException."""


class Value(NamedTuple):
    """Stands for Metric, Param and RunTag."""

    key: str
    value: Any
    timestamp: int = 0
    step: int = 0


class Tracking:
    """An MLflow server. It fails while `fails`, and `hold` lets no call through."""

    def __init__(self) -> None:
        self.fails = False
        self.hold = threading.Event()
        self.hold.set()
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}

    def client(self) -> "Tracking":
        return self

    def answer(self) -> None:
        self.hold.wait(timeout=60)
        if self.fails:
            raise MlflowError("API request failed (Caused by <object at 0x1>)\nmore")

    def get_experiment_by_name(self, name: str) -> Any:
        self.answer()
        known = self.experiments.get(name)
        return None if known is None else SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment: str, *, run_name: str, tags: Mapping[str, str]) -> Any:
        run = f"r{len(self.runs)}"
        self.runs[run] = {"experiment": experiment, "name": run_name, "status": "RUNNING"}
        self.runs[run] |= {"tags": dict(tags), "params": {}, "metrics": [], "files": {}}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, *, status: str) -> None:
        self.runs[run]["status"] = status

    def log_batch(
        self,
        run: str,
        *,
        metrics: Sequence[Value] = (),
        params: Sequence[Value] = (),
        tags: Sequence[Value] = (),
    ) -> None:
        self.answer()
        assert len(params) <= 100
        assert all(math.isfinite(one.value) for one in metrics)
        found = self.runs[run]
        found["metrics"] += [(one.step, one.key, one.value) for one in metrics]
        found["params"] |= {one.key: one.value for one in params}
        found["tags"] |= {one.key: one.value for one in tags}

    def log_text(self, run: str, text: str, artifact_file: str) -> None:
        self.runs[run]["files"][artifact_file] = text

    def set_terminated(self, run: str) -> None:
        self.answer()
        self.runs[run]["status"] = "FINISHED"


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracking]:
    server = Tracking()
    entities = SimpleNamespace(Metric=Value, Param=Value, RunTag=Value)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    exceptions = SimpleNamespace(MlflowException=MlflowError)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", exceptions)
    fake = SimpleNamespace(MlflowClient=server.client)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    yield server
    server.hold.set()


def test_mlflow_has_islands_in_one_group_and_resumes(tmp_path: Path, tracking: Tracking) -> None:
    folders = ("island-0", "abc", 0), ("island-1", "abc", 0), ("job", "", 0), ("island-0", "abc", 2)
    for folder, run, step in folders:
        with telemetry(tmp_path / folder, boards=("mlflow:slow links",), run=run, step=step) as own:
            train(own, range(step + 1, step + 3))
    assert tracking.experiments == {"slow links": "e0"}
    names = [(one["name"], one["tags"]) for one in tracking.runs.values()]
    group = {"torchtitan_diloco.run": "abc"}
    assert names == [("island-0", group), ("island-1", group), ("job", {})]
    resumed = tracking.runs["r0"]
    assert [step for step, name, _ in resumed["metrics"] if name == LOSS] == [2, 4]
    assert resumed["params"] == {"run.seed": "1"}
    assert {one["status"] for one in tracking.runs.values()} == {"FINISHED"}


def test_mlflow_gets_all_settings_and_finite_numbers(tmp_path: Path, tracking: Tracking) -> None:
    build = import_module(f"{BOARDS}.mlflow").MLflow
    settings = {f"section.key{number}": number for number in range(250)}
    board = build("all", Shown(tmp_path / "run" / "worker-0", 0, 1, settings))
    board.add(3, {"loss/val": 1.5, "loss/train": math.nan, "worker/x": math.inf})
    board.add_text(3, "verdicts", "worker 1: slow compute")
    board.add_sample(3, "one\ntwo")
    board.close()
    (run,) = tracking.runs.values()
    assert run["params"] == {key: str(value) for key, value in settings.items()}
    assert run["metrics"] == [(3, "loss/val", 1.5)]
    assert run["tags"] == {"verdicts": "step 3: worker 1: slow compute"}
    assert run["files"] == {"samples/step-00000003.txt": "one\ntwo"}


def test_a_server_that_fails_later_is_said_once(
    tmp_path: Path, tracking: Tracking, caplog: pytest.LogCaptureFixture
) -> None:
    with telemetry(tmp_path, boards=("mlflow:slow links",)) as own:
        tracking.fails = True
        train(own, range(1, 5))
    assert [one.message for one in caplog.records if "MLflow" in one.message] == [
        "MLflow: API request failed; its curves have gaps, the records do not depend on it"
    ]


def test_a_server_that_hangs_stops_nothing(
    tmp_path: Path,
    tracking: Tracking,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mlflow = import_module(f"{BOARDS}.mlflow")  # not an attribute of an import before
    monkeypatch.setattr(mlflow, "MOST_WAITING", 2)
    monkeypatch.setattr(mlflow, "CLOSE_SECONDS", 0.01)
    with telemetry(tmp_path, boards=("mlflow:slow links",)) as own:
        tracking.hold.clear()
        train(own, range(1, 9))
    assert caplog.text.count("MLflow: has not answered for long; its curves have gaps") == 1


def test_a_server_that_is_not_there_is_an_error_at_the_start(
    tmp_path: Path, tracking: Tracking
) -> None:
    tracking.fails = True
    boards = ("mlflow:slow links",)
    with pytest.raises(UserError) as caught, telemetry(tmp_path, boards=boards):
        pass
    assert str(caught.value) == (
        'metrics.boards = "mlflow:slow links": API request failed (MLFLOW_TRACKING_URI is the '
        "address of the server, MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME logs in)"
    )


def test_mlflow_itself_has_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    with telemetry(tmp_path / "island-0", boards=("mlflow:slow links",), run="abc") as own:
        train(own, range(1, 5))
        own.files.write(SampleRecord(4, 0.0, "one\ntwo"))
    client = mlflow.MlflowClient()
    where = client.get_experiment_by_name("slow links").experiment_id
    (run,) = client.search_runs([where], "tags.`torchtitan_diloco.run` = 'abc'")
    assert (run.info.run_name, run.info.status) == ("island-0", "FINISHED")
    assert run.data.params == {"run.seed": "1"}
    history = client.get_metric_history(run.info.run_id, LOSS)
    assert [one.step for one in history] == [2, 4]
    (sample,) = (tmp_path / "store").rglob("samples/step-00000004.txt")
    assert sample.read_text() == "one\ntwo"
