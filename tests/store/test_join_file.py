"""Join files: what they contain, and what is wrong with them, in one line each."""

import http.server
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w

from tests.store.places import Place
from torchtitan_diloco.store import AwayError, Kind, RefusedError, StoreError, open_store
from torchtitan_diloco.store.join_file import check_endpoint, kind_of, read_join_file
from torchtitan_diloco.store.location import check_location, is_bucket

pytest.importorskip("cryptography", reason="needs cryptography")

from tests.store.certificates import Certificate, make_certificate

SECRET = "open-sesame"
LOGIN = {
    "location": "s3://run/path",
    "endpoint": "https://127.0.0.1:8333",
    "access_key_id": "key",
    "secret_access_key": SECRET,
}


def write(folder: Path, content: Mapping[str, object]) -> Path:
    path = folder / "join.toml"
    path.write_text(tomli_w.dumps(content))
    return path


def test_a_join_file_is_read_and_shows_no_secret(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path).certificate.read_text()
    more = {"certificate": certificate, "name": "site-a", "prefix": "mirror/site-a/"}
    join = read_join_file(write(tmp_path, LOGIN | more))
    assert join.secret_access_key == SECRET
    assert (join.name, join.prefix, join.region) == ("site-a", "mirror/site-a/", "us-east-1")
    assert join.shown == "s3://run/path at 127.0.0.1:8333"
    assert SECRET not in repr(join)
    assert SECRET not in str(join)


def test_without_an_endpoint_it_is_aws(tmp_path: Path) -> None:
    content = {key: LOGIN[key] for key in LOGIN if key != "endpoint"}
    join = read_join_file(write(tmp_path, content | {"region": "eu-west-1"}))
    assert join.server == "https://s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secret_access_key": ""}, "secret_access_key is missing; use the newest join file"),
        ({"access_key_id": ""}, "access_key_id is missing"),
        ({"location": ""}, "location is missing"),
        ({"location": "gs://bucket"}, "location = 'gs://bucket' is not of the form s3://BUCKET"),
        ({"location": "s3://"}, "the location of a bucket is s3://BUCKET/PATH; correct it"),
        ({"location": f"s3://a:{SECRET}@b/c"}, "s3://b/c: .* contains a login; remove it"),
        ({"secret": SECRET}, "there is no key 'secret'; the keys are location, access_key_id"),
        ({"region": 1}, "region is not a text"),
        ({"endpoint": "127.0.0.1:8333"}, "endpoint = '127.0.0.1:8333' is not the address"),
        ({"endpoint": f"https://a:{SECRET}@host"}, "endpoint = 'host' is not the address"),
        ({"prefix": "mirror/site-a"}, "prefix = 'mirror/site-a' does not end with a slash"),
        ({"prefix": "../"}, r"'\.\./' is not a valid prefix"),
        ({"kind": "far"}, "kind = 'far' is neither 'near' nor 'cloud'"),
        ({"certificate": "-----BEGIN CERTIFICATE-----\nabc"}, "certificate is incomplete, or not"),
    ],
)
def test_what_is_wrong_in_a_join_file(
    tmp_path: Path, changes: Mapping[str, object], says: str
) -> None:
    path = write(tmp_path, {**LOGIN, **changes})
    with pytest.raises(RefusedError, match=rf"join\.toml: .*{says}") as raised:
        check_location(str(path))
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", f"{SECRET}\n{SECRET}".encode(), b"a = 'b", b""])
def test_a_file_that_is_no_join_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "join.toml"
    path.write_bytes(content)
    with pytest.raises(
        RefusedError, match=r"join\.toml: (it is no join file|location is miss)"
    ) as e:
        open_store(path)
    assert SECRET not in str(e.value)
    assert "\n" not in str(e.value)


def test_a_join_file_is_a_bucket(tmp_path: Path) -> None:
    assert is_bucket(str(write(tmp_path, LOGIN)))
    assert not is_bucket(str(tmp_path))
    assert not is_bucket("")


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [
        ("https://127.0.0.1:8333", Kind.NEAR),
        ("https://[2001:db8::1]:8333", Kind.NEAR),
        ("http://minio:9000", Kind.NEAR),
        ("https://storage.lab.internal", Kind.NEAR),
        ("https://s3.eu-west-1.amazonaws.com", Kind.CLOUD),
        ("https://account.r2.cloudflarestorage.com", Kind.CLOUD),
        ("", Kind.CLOUD),
    ],
)
def test_the_kind_of_a_server(endpoint: str, kind: Kind) -> None:
    assert kind_of(endpoint) is kind
    assert kind_of(endpoint, certificate="one of its own") is Kind.NEAR


@pytest.mark.parametrize(
    "endpoint", ["host", "ftp://host", "https://", "https://host:port", "https://a b", "https://ä"]
)
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    """obstore panics if it is given one of these."""
    with pytest.raises(RefusedError, match=r"endpoint = .* give https://HOST:PORT"):
        check_endpoint("endpoint", endpoint)


# --- servers --------------------------------------------------------------------------------------


def joined(bucket: Place, folder: Path, **changes: str) -> Path:
    endpoint = f"http://127.0.0.1:{bucket.port}"
    return write(folder, LOGIN | {"location": bucket.location, "endpoint": endpoint} | changes)


def test_the_environment_does_not_change_a_join_file(
    bucket: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_SESSION_TOKEN": "token of another login",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }.items():
        monkeypatch.setenv(key, value)
    store = open_store(joined(bucket, tmp_path, prefix="mirror/a/"), patience=0.0)
    assert store.backend.own_prefix == "mirror/a/"
    assert store.create("a", b"1")
    monkeypatch.undo()
    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    assert open_store(bucket.location).get("a") is not None


@pytest.mark.parametrize("kind", ["near", "cloud"])
def test_a_join_file_may_name_its_kind(bucket: Place, tmp_path: Path, kind: str) -> None:
    assert open_store(joined(bucket, tmp_path, kind=kind), writes=None).kind == kind


def test_a_wrong_key_names_the_join_file(bucket: Place, tmp_path: Path) -> None:
    path = joined(bucket, tmp_path, location="s3://wrong/a")
    says = r"s3://wrong/a at 127.0.0.1:\d+: the credentials were refused \(.*\); .*join\.toml is "
    with pytest.raises(RefusedError, match=says + "not valid here: use the newest") as raised:
        open_store(path)
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


class Nothing(http.server.BaseHTTPRequestHandler):
    """A server of something else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b"404 page not found"
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET
    do_DELETE = do_GET

    def log_message(self, *_: object) -> None: ...


@contextmanager
def server(certificate: Certificate | None = None) -> Iterator[int]:
    """Serve nothing, with TLS if there is a certificate. Yield the port."""
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        found.socket = context.wrap_socket(found.socket, server_side=True)
    found.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    try:
        yield found.server_port
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("other certificate", r"certificate is not the one in .*join\.toml \(\w+\): it is another"),
        ("no certificate", r"does not trust its certificate \(\w+\); give a join file with its"),
        ("an old certificate", r"certificate is not valid now \(Expired\w*\); set the clock"),
        ("no TLS", "the server there does not use TLS; check its endpoint"),
        (
            "no S3",
            r"the server there does not speak S3 \(status 404: .*page not found\); check its",
        ),
    ],
)
@pytest.mark.parametrize("writes", ["", None])
def test_what_is_no_server_of_the_join_file(
    tmp_path: Path, case: str, says: str, writes: str | None
) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    own = make_certificate(tmp_path, days=-1 if case == "an old certificate" else 2)
    text = own.certificate.read_text()
    if case == "other certificate":
        own = make_certificate(tmp_path)
    if case == "no certificate":
        text = ""
    with server(None if case == "no TLS" else own) as port:
        content = LOGIN | {"endpoint": f"https://127.0.0.1:{port}", "certificate": text}
        with pytest.raises(StoreError, match=says) as raised:
            open_store(write(tmp_path, content), patience=2.0, writes=writes)
    assert isinstance(raised.value, RefusedError)
    assert str(raised.value).startswith(f"s3://run/path at 127.0.0.1:{port}: ")
    assert "\n" not in str(raised.value)


def test_a_server_that_is_away(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    path = write(tmp_path, LOGIN | {"endpoint": "https://127.0.0.1:9"})
    with pytest.raises(AwayError, match=r"for 0.1 s \(Connection refused\); check that it can be"):
        open_store(path, patience=0.1)
