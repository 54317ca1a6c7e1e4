"""The page of a run over HTTP, and its report."""

import base64
import signal
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from tests.diloco.toy import config
from tests.islands.rules.desk import A
from tests.islands.test_syncing import sync
from tests.islands.trainees import TOKENS, Trainee
from tests.islands.written_run import WrittenRun, reading
from tests.report.test_page_in_browser import BROWSER, PHONE, measure
from tests.waiting import wait_until
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.islands.config import location_id
from torchtitan_diloco.islands.overview import View, overview
from torchtitan_diloco.islands.page import RunPages, serve_page
from torchtitan_diloco.islands.page_server import PageServer, html_page
from torchtitan_diloco.islands.reader import Reader
from torchtitan_diloco.islands.rules import history
from torchtitan_diloco.report import page as report
from torchtitan_diloco.report.run_records import open_runs

SOON = 20.0
LOGIN = "lab", "secret"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run in which the island b was away for a while."""
    monkeypatch.setattr(history, "BIN_SECONDS", SOON)
    run = WrittenRun(wall=time.time() - 60)
    for number in range(12):
        names = (A,) if 4 <= number < 7 else ()
        run.rounds(5, *names, validated=(10 * number, 4.0 - number / 10))
    run.write(tmp_path / "store")
    return tmp_path / "store"


def get(url: str, login: tuple[str, str] | None = None, host: str = "") -> tuple[int, str, bytes]:
    request = urllib.request.Request(url)
    if login is not None:
        encoded = base64.b64encode(":".join(login).encode()).decode()
        request.add_header("Authorization", f"Basic {encoded}")
    if host:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["WWW-Authenticate"], error.read()


def shows(url: str, text: str) -> bool:
    return text.encode() in get(url)[2]


def test_the_page_shows_what_was_before_this_syncer(folder: Path) -> None:
    with closing(serve_page(str(folder), "0")) as page:
        wait_until(lambda: shows(page.url, "b is heard again"), "the history")
        status, kind, content = get(page.url)
        assert (status, kind) == (200, "text/html")
        text = content.decode()
        for shown in (
            "b is silent",
            "trains",
            "oslo",
            "2.9000 at 110 tokens",
            "loss of the shared",
        ):
            assert shown in text
        assert text.count('title="b: ') == 2, "two bars"
        assert "2.9000 to 4.0000" in text, "the losses of all bins"
        status, kind, content = get(f"{page.url}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4")
        assert b'islands_island_step{island="a"} 600.0\n' in content
        assert get(f"{page.url}/none")[0] == 404


def test_without_logins_only_this_machine_may_read(folder: Path) -> None:
    """A page in a browser whose name resolves to the loopback may not."""
    with closing(serve_page(str(folder), "localhost:0")) as page:
        for host in ("127.0.0.1", "localhost:80", "[::1]:8080"):
            assert get(page.url, host=host)[0] == 200, host
        for host in ("example.org", "127.0.0.1.example.org", "a@b", "["):
            assert get(page.url, host=host)[0] == 401, host
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(UserError, match="forward it with `ssh -L`"):
            serve_page(str(folder), address)


def test_the_page_needs_a_login(folder: Path) -> None:
    logins = dict([LOGIN])
    pages = RunPages(folder)
    with closing(PageServer(pages, "127.0.0.1", 0, logins=lambda: logins)) as page:
        for wrong in (None, ("lab", "wrong"), ("lab", ""), ("other", "secret"), ("", "")):
            assert get(page.url, wrong) == (401, 'Basic realm="islands"', b""), wrong
        assert get(page.url, LOGIN)[0] == 200
        del logins["lab"]
        assert get(page.url, LOGIN)[0] == 401, "it was revoked"


def test_a_join_file_gives_the_login_of_the_page(tmp_path: Path) -> None:
    join = tmp_path / "join.toml"
    join.write_text(
        'location = "s3://islands"\nendpoint = "http://127.0.0.1:1"\n'
        f'access_key_id = "{LOGIN[0]}"\nsecret_access_key = "{LOGIN[1]}"\n'
    )
    pytest.importorskip("obstore")
    with closing(serve_page(str(join), "0")) as page:
        assert get(page.url)[0] == 401
        status, _, content = get(page.url, LOGIN)
        assert status == 200
        assert b"read" in content
        assert LOGIN[1].encode() not in content


def test_the_history_is_worked_out_when_somebody_asks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After weeks, it takes long, and the process may be the one that decides."""
    reads = list[Reader]()
    views = list[Reader]()
    read = Reader.read
    view = Reader.view

    def count_read(reader: Reader) -> None:
        reads.append(reader)
        read(reader)

    def count_view(reader: Reader) -> View:
        views.append(reader)
        return view(reader)

    monkeypatch.setattr(Reader, "read", count_read)
    monkeypatch.setattr(Reader, "view", count_view)
    monkeypatch.setattr("torchtitan_diloco.islands.page.REFRESH_SECONDS", 0.02)
    with closing(RunPages(folder)) as pages:
        wait_until(lambda: len(reads) > 5, "the reader")
        assert views == []
        for number in (1, 2):
            time.sleep(0.05)
            shown = pages.page("/")
            assert shown is not None
            assert b"b is heard again" in shown[1]
            assert len(views) == number


def test_a_page_waits_for_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with closing(serve_page(str(folder), "0")) as page:
        wait_until(lambda: shows(page.url, "the run cannot be read"), "the error")
        run = WrittenRun()
        run.rounds(1)
        run.write(folder)
        wait_until(lambda: shows(page.url, "trains"), "the run")


def test_the_page_of_an_empty_location_says_that_there_is_no_run() -> None:
    text = html_page(overview(View()), [], [], at=0.0)
    assert "<title>no run yet</title>" in text
    assert "<h1>no run yet</h1>\n<p>nothing has been written yet; " in text


def stop(islands: list[Trainee]) -> None:
    for one in islands:
        one.stop.set()
    for one in islands:
        one.thread.join(120)


def test_the_page_of_a_syncer_that_was_started_again(tmp_path: Path) -> None:
    """With live processes: two islands train, and the syncer is killed."""
    store = tmp_path / "store"
    chosen = config(2, delay=1)
    islands = [Trainee(store, name, chosen, total_tokens=10**9, step_seconds=0.02) for name in "ab"]
    for one in islands:
        one.peers.gauges.loss = 2.5
        one.peers.gauges.validated = TOKENS, 2.25
        one.thread.start()
    try:
        with sync(store, tmp_path / "scratch", "--http", "0") as first:
            url = first.line("page of the run: ")
            wait_until(lambda: shows(url, "b joins") and shows(url, "2.5000"), "both islands")
            assert not shows(url, "a syncer decides"), "as the first one has founded the run"
            first.kill()
        with sync(store, tmp_path / "scratch", "--http", "0") as second:
            url = second.line("page of the run: ")
            wait_until(lambda: shows(url, "a syncer decides"), "the second one")
            wait_until(lambda: shows(url, "2.2500 at 100 tokens"), "the loss")
            text = get(url)[2].decode()
            assert "b joins" in text
            assert "running" in text
            assert get(f"{url}/metrics")[2].count(b"islands_island_trains") == 3
            stop(islands)
            second.terminate()
            second.end(128 + signal.SIGTERM)
    finally:
        stop(islands)
    with reading(store) as reader:
        rows = reader.overview()["islands"]
        assert reader.view().decision is not None
    assert all(row["tokens_per_second"] is None or row["tokens_per_second"] > 0 for row in rows)


# --- report ---------------------------------------------------------------------------------------


def test_a_report_of_a_location_needs_no_records(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert report.main([str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    text = out.read_text()
    for shown in (
        *("2 islands", "Islands of r", "Loss of r", "Training loss of the islands of r"),
        *("Merged tokens of r", "What happened", "b is silent", "of 1,000,000"),
        *("2.9000 at 110 tokens", "own, mean of its last minutes"),
    ):
        assert shown in text, shown
    assert "has not logged a step" not in text
    (run,) = open_runs([folder])
    assert run.history is not None
    assert location_id(str(folder)) in run.history.ids
    with reading(folder) as reader:
        assert reader.decision is not None
        merged = [slot.ledgers[0].number for slot in reader.decision.slots]
    assert [stay.parts for stay in run.stays] == merged


def test_a_report_of_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("obstore")
    for place, why in (
        (str(tmp_path / "missing"), "it does not exist"),
        (str(tmp_path), "it has no worker-0/metrics.jsonl"),
        ("s3://user:secret@bucket", "remove it"),
        ("ftp://bucket", "it is not"),
    ):
        assert report.main([place]) == USER_ERROR
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert "secret" not in said
        assert why in said or place.startswith("ftp")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_pages_fit_a_telephone(folder: Path, tmp_path: Path) -> None:
    with reading(folder) as reader:
        past = reader.view().past
        text = html_page(reader.overview(), past.stays, past.losses, at=time.time())
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "report0.html").write_text(text.replace('http-equiv="refresh"', ""))
    report.main([str(folder), "--out", str(shown / "report1.html")])
    for seen in measure(shown, PHONE):
        assert (seen["viewport"], seen["too_wide"], seen["loads"]) == (PHONE[0], [], [])
