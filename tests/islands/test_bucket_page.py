"""Show people a run in a bucket of one's own, with a real SeaweedFS."""

import base64
import ssl
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.islands.test_bucket_server import SITE, Serving, serving
from tests.islands.written_run import WrittenRun
from tests.ports import free_port
from torchtitan_diloco.base.user import USER_ERROR
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.store import open_store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    """Return a server with a page, and a site."""
    flags = ["--address", "127.0.0.1", "--port", free_port(), "--no-syncer"]
    with serving(tmp_path / "bucket", *flags, "--http", "0.0.0.0:0") as found:
        found.read_to("page of the run: ")
        found.site()
        yield found


def page_status(url: str, login: str = "", secret: str = "") -> int:
    """Return the status of a page, whose certificate is not checked."""
    request = urllib.request.Request(url)
    encoded = base64.b64encode(f"{login}:{secret}".encode()).decode()
    request.add_header("Authorization", f"Basic {encoded}")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_the_page_has_the_logins_of_the_bucket(server: Serving) -> None:
    line = next(line for line in server.said if line.startswith("page of the run: "))
    url = line.split()[4].rstrip(",").replace("0.0.0.0", "127.0.0.1")
    assert url.startswith("https://")
    secret = tomllib.loads(server.join_file(SITE).read_text())["secret_access_key"]
    assert page_status(url) == 401
    assert page_status(url, SITE, "wrong") == 401
    assert page_status(url, SITE, secret) == 200
    assert secret not in "\n".join(server.said)
    server.site("--revoke")
    assert page_status(url, SITE, secret) == 401
    server.process.terminate()
    assert server.wait() == 0


def test_a_site_may_not_change_the_run_of_a_bucket(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    written = WrittenRun()
    written.rounds(1)
    written.write(server.join_file("syncer"))
    join = str(server.join_file(SITE))
    assert main(["status", "--join", join]) == 0
    assert "run r: " in capsys.readouterr().out
    for words in (["leave", "a"], ["evict", "a"], ["change", "slots", "9"]):
        assert main([*words, "--join", join]) == USER_ERROR
        said = capsys.readouterr().err
        assert "only the owner of the run may change it, or ask islands to leave" in said
        assert said.count("\n") == 1
    store = open_store(join, writes=None)
    assert store.list("change/") == []
    store.close()
