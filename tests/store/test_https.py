"""The server of a folder and its client: rights, quotas, certificates, links that break."""

import datetime
import http.client
import http.server
import logging
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.store.places import PATIENCE, SITE, Place, https_place
from tests.store.proxy import Proxy
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.store import AwayError, FullError, RefusedError, Store, open_store
from torchtitan_diloco.store.address import Address, read_join_file
from torchtitan_diloco.store.rights import LOGIN, may_create, may_replace
from torchtitan_diloco.store.store import MOST_RAW_BYTES

pytest.importorskip("aiohttp", reason="needs aiohttp")
pytest.importorskip("cryptography", reason="needs cryptography")

from torchtitan_diloco.store import attempts
from torchtitan_diloco.store import quota as quota_module
from torchtitan_diloco.store.certificate import make_certificate
from torchtitan_diloco.store.logins import OWN_FOLDER, Logins
from torchtitan_diloco.store.quota import Quota
from torchtitan_diloco.store.server import Server

LOGINS = some.from_regex(LOGIN, fullmatch=True)
ISLANDS = ("run/1", "version/1", "copy/1", "outer/1", "test-1", "island/x", "part/x")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Place, Any]]:
    with https_place(tmp_path / "run") as found:
        yield found


def address_of(place: Place) -> Address:
    return read_join_file(Path(place.location))


# --- rights ---------------------------------------------------------------------------------------


@given(login=LOGINS, other=LOGINS, rest=some.from_regex(r"[A-Za-z0-9]{1,9}", fullmatch=True))
def test_a_login_writes_under_its_own_name_only(login: str, other: str, rest: str) -> None:
    if other == login:
        return
    for owner in (False, True):
        assert may_create(f"part/{login}/{rest}/1", login, owner=owner)
        assert may_create(f"island/{login}-{rest}", login, owner=owner)
        assert may_replace(f"island/{login}-{rest}", login)
        assert not may_replace(f"part/{login}/{rest}", login)
        assert not may_create(f"part/{other}/{rest}", login, owner=owner)
        assert not may_create(f"island/{other}-{rest}", login, owner=owner)
        assert not may_replace(f"island/{other}-{rest}", login)
        assert may_create(f"change/{rest}", login, owner=owner) == owner
        assert may_create(f"found/{rest}", login, owner=owner) == owner
        assert not any(may_create(name, login, owner=owner) for name in ISLANDS)


def test_rights_are_those_of_the_login(served: tuple[Place, Any]) -> None:
    place, server = served
    owner = open_store(server.logins.add("people", owner=True))
    site = place.open()
    assert site.create(f"part/{SITE}/1", b"")
    assert owner.create("change/1", b"")
    assert owner.create("found/1", b"")
    forbidden: list[Callable[[], object]] = [
        lambda: site.create("change/1", b"1"),
        lambda: site.create("found/2", b""),
        lambda: site.create("part/people/1", b""),
        lambda: site.create("run/000000000001", b""),
        lambda: site.replace(f"part/{SITE}/1", b"other"),
        lambda: site.replace("island/people-1", b""),
        lambda: site.delete("change/1"),
        lambda: owner.delete(f"part/{SITE}/1"),
        lambda: owner.create("version/1", b""),
    ]
    for call in forbidden:
        with pytest.raises(
            RefusedError, match=r"no permission to (create|replace|delete) .* another login"
        ):
            call()
    names = [one.name for one in server.folder.list("", "", PATIENCE)]
    assert names == ["change/1", "found/1", f"part/{SITE}/1"]
    found = owner.get(f"part/{SITE}/1")
    assert found is not None
    assert found.content == b""


def test_a_name_cannot_leave_the_folder(served: tuple[Place, Any]) -> None:
    place, server = served
    for name in (
        f"part/{SITE}/../../run/1",
        f"part/{SITE}/%2e%2e/%2e%2e/run/1",
        f"part/{SITE}/.a",
        "..%2f.serve/key.pem",
        ".serve/logins.json",
        "%00",
    ):
        for method in ("GET", "POST", "PUT", "DELETE"):
            status, _ = ask(place, method, f"/store/object/{name}", b"1" * 30)
            assert status in (400, 403, 404), (method, name)
    assert server.folder.list("", "", PATIENCE) == []
    assert list((server.folder.path).iterdir()) == [server.folder.path / ".serve"]


def ask(
    place: Place,
    method: str,
    route: str,
    body: bytes = b"",
    login: str | None = None,
    headers: Mapping[str, str] = {},
) -> tuple[int, bytes]:
    """Send a request of any kind, and return the status and the reply."""
    address = address_of(place)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", address.port, context=context)
    given = f"{address.login}:{address.password}" if login is None else login
    basic = {"Authorization": f"Basic {b64encode(given.encode()).decode()}"}
    connection.request(method, route, body, basic | dict(headers))
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


@pytest.mark.parametrize("login", ["", ":", "site-a", "site-a:", "site-a:wrong", "nobody:x", "é:é"])
def test_no_request_without_a_login(served: tuple[Place, Any], login: str) -> None:
    place, server = served
    for method, route in (
        ("GET", "/store/object/a"),
        ("POST", f"/store/object/part/{SITE}/1"),
        ("PUT", f"/store/object/{place.note}"),
        ("DELETE", f"/store/object/part/{SITE}/1"),
        ("GET", "/store/list"),
        ("GET", "/store/wait"),
    ):
        assert ask(place, method, route, b"1" * 30, login)[0] == 401
    assert ask(place, "GET", "/store/list", headers={"Authorization": "Basic ???"})[0] == 401
    assert server.folder.list("", "", PATIENCE) == []


def test_a_wrong_password_is_one_line(served: tuple[Place, Any]) -> None:
    place, server = served
    store = place.open()
    server.logins.renew(SITE)
    with pytest.raises(
        RefusedError, match=f"does not accept the login '{SITE}' with this password"
    ):
        store.list("")
    assert place.open().list("") == [], "with the new join file"
    Logins(server.folder.path).revoke(SITE)  # as another process does
    with pytest.raises(RefusedError, match="does not accept the login"):
        store.list("")
    assert not Path(place.location).exists()


def test_logins_are_named(tmp_path: Path) -> None:
    logins = Logins(tmp_path)
    logins.add("a")
    with pytest.raises(RefusedError, match="site a already has a login"):
        logins.add("a")
    for name in ("", "../a", "a/b", ".a", "-a", "a" * 61):
        with pytest.raises(RefusedError, match="give a name of at most 60"):
            logins.add(name)
    with pytest.raises(RefusedError, match="there is no site b; there are: a"):
        logins.renew("b")
    assert logins.join_file("a").stat().st_mode & 0o777 == 0o600
    assert logins.key.stat().st_mode & 0o777 == 0o600
    logins._path.write_text("{")
    with pytest.raises(RefusedError, match=r"logins.json is damaged"):
        Logins(tmp_path)


def test_addresses_in_join_files_follow(tmp_path: Path) -> None:
    logins = Logins(tmp_path)
    path = logins.add("a")
    first = read_join_file(path)
    logins.set_address("2001:db8::1", 8443)
    assert read_join_file(path) == replace(first, host="2001:db8::1", port=8443)


# --- sizes ----------------------------------------------------------------------------------------


def test_a_body_is_bounded(served: tuple[Place, Any]) -> None:
    place, server = served
    route = f"/store/object/part/{SITE}/1"
    assert ask(place, "POST", route, bytes(MOST_RAW_BYTES + 1))[0] == 413
    assert ask(place, "POST", route, headers={"Transfer-Encoding": "chunked"})[0] in (
        400,
        411,
    )
    assert ask(place, "GET", "/store/wait?seconds=x")[0] == 400
    assert ask(place, "GET", "/store/list?prefix=../")[0] == 400
    assert server.folder.list("", "", PATIENCE) == []


def test_a_body_that_is_cut_is_no_object(served: tuple[Place, Any]) -> None:
    place, server = served
    address = address_of(place)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    login = b64encode(f"{address.login}:{address.password}".encode()).decode()
    with context.wrap_socket(socket.create_connection(("127.0.0.1", address.port))) as wire:
        head = f"POST /store/object/part/{SITE}/1 HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        wire.sendall(f"{head}Authorization: Basic {login}\r\n\r\nhalf".encode())
    assert place.open().list(f"part/{SITE}/") == []
    assert server.folder.list("", "", PATIENCE) == []


def test_a_quota_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module, "COUNT_SECONDS", -1.0)
    with https_place(tmp_path / "run", quota=Quota(objects=3)) as (place, server):
        store = open_store(place.location, writes=None)
        for number in range(3):
            store.create(f"part/{SITE}/{number}", b"")
        with pytest.raises(FullError, match=f"login {SITE} stores 3 objects .* may store 3 with"):
            store.create(f"part/{SITE}/3", b"")
        server.folder.delete(f"part/{SITE}/0", PATIENCE)  # as the syncer does
        assert store.create(f"part/{SITE}/3", b"")
        with pytest.raises(FullError):
            store.create(f"island/{SITE}-1", b"")
        other = open_store(server.logins.add(f"{SITE}-b"), writes=None)
        assert other.create(f"island/{SITE}-b-1", b""), "another login has a quota of its own"
        owner = open_store(server.logins.add("people", owner=True), writes=None)
        for number in range(5):
            assert owner.create(f"change/{number}", b""), "owners have none"


def test_a_quota_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_module, "COUNT_SECONDS", -1.0)
    with https_place(tmp_path / "run", quota=Quota(bytes=10_000)) as (place, _):
        store = open_store(place.location, writes=None)
        assert store.create(f"part/{SITE}/1", bytes(9000))
        with pytest.raises(FullError, match=r"with 0.00 GB"):
            store.create(f"part/{SITE}/2", bytes(2000))
        store.delete(f"part/{SITE}/1")
        assert store.create(f"part/{SITE}/2", bytes(2000))
        for _ in range(10):
            store.replace(f"island/{SITE}-1", bytes(5000))


def test_some_of_the_disk_stays_free(tmp_path: Path) -> None:
    with https_place(tmp_path / "run", quota=Quota(spare_bytes=10**18)) as (place, _):
        with pytest.raises(FullError, match=r"the disk of the server has .* GB left"):
            place.open()
        assert open_store(place.location, writes=None).list("") == []


# --- certificates ---------------------------------------------------------------------------------


def test_another_certificate_is_refused(tmp_path: Path) -> None:
    with https_place(tmp_path / "one") as (one, _), https_place(tmp_path / "two") as (two, server):
        wrong = replace(address_of(one), port=address_of(two).port)
        with pytest.raises(RefusedError, match="its certificate is not the one in the join file"):
            open_store(wrong.line)
        assert server.folder.list("", "", PATIENCE) == []
        unpinned = replace(address_of(one), fingerprint="")
        with pytest.raises(RefusedError, match=r"does not trust its certificate .* join file"):
            open_store(unpinned.line)


@pytest.mark.parametrize(("first", "last"), [(1, 365), (-365, -1)])
def test_a_clock_that_is_a_year_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    """Seen from here, a certificate that an authority has signed is not valid yet, or any more."""
    path, now = tmp_path / "run" / OWN_FOLDER, datetime.datetime.now(datetime.UTC)
    path.mkdir(parents=True)
    begin, end = (now + datetime.timedelta(days=number) for number in (first, last))
    certificate, key = make_certificate(begin, end)
    (path / "certificate.pem").write_bytes(certificate)
    (path / "key.pem").write_bytes(key)
    with https_place(tmp_path / "run") as (place, server):
        assert place.open().list("") == [], "who has a join file does not look at clocks"
        monkeypatch.setenv("SSL_CERT_FILE", str(server.logins.certificate))
        line = replace(address_of(place), fingerprint="").line
        with pytest.raises(
            RefusedError, match=r"the time here is \d{4}-\d\d-\d\d .*; set the clock"
        ):
            open_store(line)


@pytest.mark.parametrize("kind", ["http", "silent", "other"])
def test_what_is_no_server_of_a_store(tmp_path: Path, kind: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    if kind == "silent":  # it closes each connection
        with socket.create_server(("127.0.0.1", 0)) as listening:
            threading.Thread(target=_close_all, args=(listening,), daemon=True).start()
            line = f"https://a:b@127.0.0.1:{listening.getsockname()[1]}/#{'0' * 64}"
            with pytest.raises(AwayError, match=r"could not get test for 0.3 s"):
                open_store(line, patience=0.3, writes=None)
            return
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fingerprint = "0" * 64
    if kind == "other":
        logins = Logins(tmp_path)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(logins.certificate, logins.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        fingerprint = logins.fingerprint
    threading.Thread(target=server.serve_forever, daemon=True).start()
    says = "not a store server" if kind == "other" else "does not use TLS"
    line = f"https://a:b@127.0.0.1:{server.server_port}/#{fingerprint}"
    for writes in ("", None):
        with pytest.raises(RefusedError, match=says):
            open_store(line, patience=5.0, writes=writes)
    server.shutdown()
    server.server_close()


def _close_all(listening: socket.socket) -> None:
    while True:
        try:
            listening.accept()[0].close()
        except OSError:
            return


# --- links ----------------------------------------------------------------------------------------


def test_a_server_that_is_away_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchtitan_diloco")
    with https_place(tmp_path / "run") as (place, server):
        store, port = place.open(), server.port
        server.stop()
        results = list[object]()
        calls = [
            lambda: results.append(store.create(f"part/{SITE}/1", b"")),
            lambda: results.append(store.list("run/")),
            lambda: results.append(store.get("run/1")),
        ]
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        while len(caplog.messages) < len(threads):
            time.sleep(0.01)
        again = Server(tmp_path / "run", host="127.0.0.1", port=port)
        again.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, results)) == ["None", "True", "[]"]
        said = [one for one in caplog.messages if "trying again" in one]
        assert len(said) == len(threads), "one line for each verb, not for each attempt"
        store.close()
        again.stop()


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    with https_place(tmp_path / "run") as (place, server):
        store = place.open(patience=0.2)
        server.stop()
        with pytest.raises(AwayError, match=r"could not list all for 0.2 s .*can be reached"):
            store.list("")


def test_a_reply_that_was_lost(tmp_path: Path) -> None:
    """The object was created, but the reply is lost: the next attempt is no other writer."""
    with https_place(tmp_path / "run") as (place, server):
        proxy = Proxy(place.port)
        store = open_store(replace(address_of(place), port=proxy.port).line)
        create, count = server.folder.create, []

        def create_and_cut(name: str, content: bytes, seconds: float) -> bool:
            made = create(name, content, seconds)
            count.append(made)
            if len(count) == 1:
                proxy.cut_after(0)
                proxy._cut()
            return bool(made)

        server.folder.create = create_and_cut
        assert store.create(f"part/{SITE}/1", b"content")
        assert count == [True, True]
        proxy.close()


def test_a_connection_that_dies_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No packet passes any more on the connections that there are; a new one works."""
    monkeypatch.setattr(attempts, "ATTEMPT_SECONDS", (0.3, PATIENCE))
    with https_place(tmp_path / "run") as (place, _):
        proxy = Proxy(place.port)
        store = open_store(replace(address_of(place), port=proxy.port).line)
        proxy.silence()
        assert store.create(f"part/{SITE}/1", b"content")
        assert any("trying again" in one for one in caplog.messages)
        store.close()
        proxy.close()


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_a_full_disk_of_the_server(served: tuple[Place, Any], verb: str) -> None:
    place, server = served
    store = place.open()

    def fail(*_: object) -> None:
        raise FullError("/srv: No space left on device; free some space on this disk")

    setattr(server.folder, verb, fail)
    with pytest.raises(FullError, match=r"https://.*: /srv: No space left on device; free some"):
        getattr(store, verb)(place.note, b"")


def test_many_clients_wait_with_one_thread(served: tuple[Place, Any]) -> None:
    place, server = served
    stores = [open_store(place.location, writes=None) for _ in range(8)]
    marks = [store.wait("run/", "", PATIENCE) for store in stores]
    assert len(set(marks)) == 1
    found = list[str]()
    waits = [
        threading.Thread(
            target=lambda one=store: found.append(one.wait("run/", marks[0], PATIENCE))
        )
        for store in stores
    ]
    for thread in waits:
        thread.start()
    time.sleep(0.1)
    assert len(server._watches._watches) == 1
    Store(server.folder).create("run/1", b"")  # as the syncer does
    for thread in waits:
        thread.join()
    assert len(found) == len(stores)
    assert marks[0] not in found


def test_a_watch_ends_when_nobody_waits(
    served: tuple[Place, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_diloco.store.watches.TURN_SECONDS", 0.02)
    place, server = served
    store = place.open()
    for number in range(40):  # more than there may be
        assert store.wait(f"run/{number}", "", 0.2) == store.wait(f"run/{number}", "", 0.2) or True
    until = time.monotonic() + PATIENCE
    while server._watches._watches:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with https_place(tmp_path / "one") as (place, _):
        server = Server(tmp_path / "two", host="127.0.0.1", port=place.port)
        with pytest.raises(UserError, match=r"--port \d+: Address already in use; give a free"):
            server.start()
