"""The page of a run over HTTP, from a real server of a run."""

import base64
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.islands.running import TOKENS, Island, started
from tests.islands.servers import Listener, free_port, need_server, running_server, wait_until
from tests.islands.test_serve import COMMAND, serving
from tests.islands.written import Log
from tests.report.test_page_in_browser import BROWSER, PHONE, measure
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.islands.members import Hint, Numbers
from torchtitan_diloco.islands.page import PageServer
from torchtitan_diloco.islands.page_server import html_page, page_address
from torchtitan_diloco.islands.reader import open_reader
from torchtitan_diloco.islands.server import Server
from torchtitan_diloco.report.page import html_page as report_page
from torchtitan_diloco.report.run_records import open_runs

need_server()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with the log of a run, in which the island "a" beats."""
    log, ended = Log(), threading.Event()
    log.round(10, 30)
    with running_server(tmp_path / "server") as found, Listener(found.join, "a") as listener:
        for raw in log.raw:
            listener.connection.append(raw)
        listener.read_to(len(log.raw))
        numbers = Numbers("oslo", 123.0, 0.25, 2.5, (40, 2.25), 0.01, 1e6)

        def beat() -> None:
            while not ended.wait(0.1):
                listener.connection.beat(Hint("a", 5, 500, 0.25, caught_up=True, numbers=numbers))

        thread = threading.Thread(target=beat)
        thread.start()
        yield found
        ended.set()
        thread.join()


@pytest.fixture
def page(server: Server) -> Iterator[PageServer]:
    found = PageServer(server, *page_address("0"))
    yield found
    found.close()


def get(page: PageServer, path: str, login: str | None) -> tuple[int, str, bytes]:
    request = urllib.request.Request(page.url + path)
    if login is not None:
        encoded = base64.b64encode(login.encode()).decode()
        request.add_header("Authorization", f"Basic {encoded}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["WWW-Authenticate"], error.read()


def test_the_page_needs_the_password_of_a_site(server: Server, page: PageServer) -> None:
    password = server.settings.sites["island"]
    refused = 401, 'Basic realm="islands"', b""
    for login in (None, "island:wrong", "island:", f"other:{password}", f"{password}", ":"):
        for path in ("/", "/metrics", "/none"):
            assert get(page, path, login) == refused, login
    admin = f"admin:{server.settings.admin_password}"
    assert get(page, "/", admin) == refused, "it is of no site"
    for header in ("Basic", "Basic !", "Basic /w==", "Basic é", f"Bearer {password}", "x" * 999):
        assert not page.allows(header)
    login = f"island:{password}"
    assert get(page, "/none", login)[0] == 404
    wait_until(lambda: b"oslo" in get(page, "/", login)[2], "the heartbeat")
    status, kind, content = get(page, "/", login)
    text = content.decode()
    assert (status, kind) == (200, "text/html")
    for shown in ("trains", "123", "25%", "10.0 ms", "8 Mbit/s", "2.2500 at 40 tokens", "b joins"):
        assert shown in text
    assert password not in text
    status, _, content = get(page, "/metrics", login)
    assert status == 200
    assert b'islands_island_tokens_per_second{island="a"} 123.0\n' in content
    server.settings.sites = {"other": "password"}
    assert get(page, "/", login) == refused, "the site has no login any more"


def test_serve_with_a_page_ends_without_a_word(tmp_path: Path) -> None:
    with serving("--folder", tmp_path, "--port", free_port(), "--http", "0") as found:
        assert found.process.stdout is not None
        lines = iter(found.process.stdout.readline, "")
        url = next(line for line in lines if line.startswith("page of the run: "))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url.split()[4].rstrip(","), timeout=60)
        found.process.send_signal(signal.SIGTERM)
        assert found.wait() == (0, "")


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, page: PageServer) -> None:
    port = page.server_port
    words = [*COMMAND, "serve", "--folder", tmp_path / "a", "--port", free_port(), "--http", port]
    ended = subprocess.run([*map(str, words)], capture_output=True, text=True, cwd=REPOSITORY)
    assert (ended.returncode, ended.stdout) == (USER_ERROR, "")
    reason = "Address already in use; give a free port, and an address of this machine"
    assert ended.stderr == f"error: --http 127.0.0.1:{port}: {reason}\n"
    for address in ("x", "1:", "99999", "::1", "::1:80"):
        with pytest.raises(UserError, match=f"--http {address}: give a port, HOST:PORT or "):
            page_address(address)


def test_an_address_of_ipv6_is_in_brackets(server: Server) -> None:
    page = PageServer(server, *page_address("[::1]:0"))
    try:
        assert page.url == f"http://[::1]:{page.server_port}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(page.url, timeout=60)
    finally:
        page.close()


def test_other_machines_get_it_encrypted(server: Server) -> None:
    page = PageServer(server, "0.0.0.0", 0)
    try:
        assert page.url.startswith("https://0.0.0.0:")
        request = f"https://127.0.0.1:{page.server_port}/"
        with pytest.raises(urllib.error.URLError, match="certificate"):
            urllib.request.urlopen(request, timeout=60)
    finally:
        page.close()


def test_the_server_says_when_a_round_was_merged(server: Server) -> None:
    time.sleep(1.0)
    began = time.time()
    with open_reader(server.join) as reader:
        assert reader.history.merged[0][1] <= began - 1.0
        assert reader.history.stays["a"].spans[0][0] <= began - 1.0


def test_a_report_of_the_join_file_is_of_the_run(server: Server) -> None:
    (run,) = open_runs([server.join_file()])
    text = report_page([run])
    for shown in ("40 of 100 (40.0%)", "2.2500 at 40 tokens", "2 islands", "Islands of test"):
        assert shown in text


def test_islands_say_how_fast_they_are(tmp_path: Path) -> None:
    keys = "tokens_per_second", "loss", "waited", "round_trip_seconds", "upload_bytes_per_second"
    with running_server(tmp_path / "server") as found:
        islands = [Island(found.join, name, steps=10**6, step_seconds=0.02) for name in "ab"]
        for island in islands:
            island.peers.gauges.loss = 2.5
            island.peers.gauges.validated = 1, 2.25
        with started(*islands), open_reader(found.join) as reader:

            def rows() -> list[dict[str, Any]]:
                reader.read(0.1)
                return [
                    row
                    for row in reader.overview()["islands"]
                    if row["doing"] == "trains" and all(row.get(key) is not None for key in keys)
                ]

            wait_until(lambda: len(rows()) == 2, "all numbers")
            wait_until(lambda: reader.history.losses == [(1, 2.25)] * 2, "the loss")
            assert {row["site"] for row in rows()} == {"island"}
            for row in rows():
                assert 0 < row["tokens_per_second"] <= TOKENS / 0.02
                assert 0 <= row["waited"] < 1
            assert {stay.ended for stay in reader.history.stays.values()} == {""}


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_the_page_fits_a_telephone(server: Server, tmp_path: Path) -> None:
    with open_reader(server.join) as reader:
        reader.read(1.0)
        reader.history.losses += [(10.0 * n, 3 / (1 + n)) for n in range(9)]
        history = reader.history
        began = history.stays["a"].spans[0][0]
        stays = list(history.stays.values())
        text = html_page(reader.overview(), stays, history.losses, at=began)
    for number in range(2):
        (tmp_path / f"report{number}.html").write_text(text.replace('http-equiv="refresh"', ""))
    for seen in measure(tmp_path, PHONE):
        assert (seen["viewport"], seen["too_wide"], seen["loads"]) == (PHONE[0], [], [])
        assert len(seen["widths"]) == 1
