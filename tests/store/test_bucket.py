"""A bucket refuses wrong settings and answers in one line each."""

import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.store.places import Place, bucket_environment
from tests.store.proxy import Proxy
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.store import (
    AwayError,
    FullError,
    Kind,
    RefusedError,
    StoreError,
    open_store,
)
from torchtitan_diloco.store.bucket import Bucket
from torchtitan_diloco.store.errors import PassingError
from torchtitan_diloco.store.store import seal


@pytest.mark.parametrize(
    ("location", "writes", "says"),
    [
        ("s3://nowhere/run", "", "there is no such bucket .* create it, or check its name"),
        ("s3://nowhere/run", None, "there is no such bucket"),
        ("s3://plain/run", "", "a second writer could create an object that already exists"),
        ("s3://racing/run", "", "a second writer could create an object that already exists"),
        ("s3://full/run", "", "XMinioStorageFull: The drive is full.; free some space there"),
        ("s3://clock/run", "", "the clock of this machine differs .* set the clock"),
        ("s3://clock/run", None, "the clock of this machine differs"),
        ("s3://wrong/run", "", "the credentials were refused .* set AWS_ACCESS_KEY_ID"),
        ("s3://readonly/run", "", "no permission to create test-.* grant it"),
    ],
)
def test_a_bucket_that_cannot_be_used(
    bucket: Place, location: str, writes: str | None, says: str
) -> None:
    assert bucket.kind == "bucket"
    with pytest.raises(StoreError, match=says) as raised:
        open_store(location, writes=writes)
    assert isinstance(raised.value, RefusedError | FullError)
    assert str(raised.value).startswith(f"{location}: ")
    assert "\n" not in str(raised.value)


def test_a_bucket_to_read(bucket: Place) -> None:
    store = open_store("s3://readonly/run", writes=None)
    assert store.list("") == []
    assert store.get("a") is None
    with pytest.raises(RefusedError, match=r"no permission to delete a"):
        store.delete("a")
    with pytest.raises(RefusedError, match=r"no permission to replace a"):
        store.replace("a", b"")
    with pytest.raises(RefusedError, match="there is no such bucket"):
        open_store("s3://nowhere/run", writes=None).list("")
    assert bucket.kind == "bucket"


def test_a_bucket_that_is_busy(bucket: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchtitan_diloco")
    store = open_store(f"s3://busy/{bucket.location.rpartition('/')[2]}")
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    assert [one.name for one in store.list("")] == ["a"]
    assert any("SlowDown: Reduce your request rate" in one for one in caplog.messages)


class Answers:
    """A bucket that gives the same answer to all requests."""

    def __init__(self) -> None:
        self.status = 200
        self.code = ""
        self.bucket: Bucket

    def expect(self, status: int, code: str, error: type[Exception], says: str = ".") -> None:
        """Check what each verb raises."""
        self.status = status
        self.code = code
        for verb, call in (
            ("create", lambda: self.bucket.create("a", seal(b"1"), large=False, durable=True)),
            ("replace", lambda: self.bucket.replace("a", seal(b"1"), large=False, durable=True)),
            ("get", lambda: self.bucket.get("a", large=False)),
            ("list", lambda: self.bucket.list("", "", None)),
            ("delete", lambda: self.bucket.delete("a")),
        ):
            with pytest.raises(Exception, match=says) as raised:
                call()
            assert type(raised.value) is error, (verb, raised.value)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    pytest.importorskip("obstore", reason="needs obstore")
    found = Answers()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            text = f"<Error><Code>{found.code}</Code></Error>" if found.code else ""
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = reply
        do_PUT = reply
        do_DELETE = reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for key, value in bucket_environment(server.server_address[1]).items():
        monkeypatch.setenv(key, value)
    found.bucket = Bucket("s3://run/x")
    yield found
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        *((status, "", PassingError) for status in (408, 425, 429, 500, 502, 503, 504)),
        *((status, "", PassingError) for status in (505, 520, 522, 524, 599)),
        *((409, code, PassingError) for code in ("OperationAborted", "Conflict", "")),
        *((400, code, PassingError) for code in ("RequestTimeout", "IncompleteBody")),
        *((400, code, PassingError) for code in ("OperationAborted", "SlowDown")),
        *((400, code, PassingError) for code in ("Throttling", "KMS.ThrottlingException")),
        *((403, code, PassingError) for code in ("RequestThrottled", "SlowDownRead")),
        (499, "", PassingError),
        *((409, code, StoreError) for code in ("BlobImmutableDueToPolicy", "InvalidBucketState")),
        (400, "InvalidArgument", StoreError),
        (400, "TimeoutIsNotValid", StoreError),
        (403, "AccessDenied", RefusedError),
        (501, "NotImplemented", RefusedError),
        (507, "", FullError),
    ],
)
def test_what_may_pass_is_told_from_what_stays(
    answers: Answers, status: int, code: str, error: type[Exception]
) -> None:
    """A link that is cut in a chunk, and a server that is busy, end no island."""
    answers.expect(status, code, error)


def test_a_server_that_answers_with_errors_can_be_reached(answers: Answers) -> None:
    """Such as a portal that wants a login first."""
    answers.status = 511
    with pytest.raises(AwayError, match=r"for 0.2 s \(status 511: .*\); there is an answer from"):
        open_store("s3://run/x", patience=0.2)


def test_another_region_is_named(answers: Answers) -> None:
    """Another attempt would be redirected again."""
    answers.expect(
        301, "PermanentRedirect", RefusedError, "may be in another region .* set AWS_REGION"
    )


def test_a_clock_may_be_wrong_for_some_time(answers: Answers) -> None:
    """A machine that was paused sets its clock again. One that starts so may never do it."""
    answers.expect(403, "RequestTimeTooSkewed", RefusedError, "s3://run/x: .* set the clock")
    answers.status = 404
    answers.code = "NoSuchKey"
    assert answers.bucket.get("a", large=False) is None
    answers.expect(403, "RequestTimeTooSkewed", PassingError, "set the clock")


def test_files_of_others_are_no_objects(bucket: Place) -> None:
    """A person may put them there, by a console: a reader of all would end with an error."""
    store = open_store(bucket.location)
    assert isinstance(store.backend, Bucket)
    for name in ("change/my note.txt", "change/1-ab"):
        store.backend.replace(name, seal(b""), large=False, durable=True)
    assert [listed.name for listed in store.list("change/")] == ["change/1-ab"]


def test_a_bucket_that_races_refuses_a_second_writer_later(bucket: Place) -> None:
    """So that only writers at the same time find the fault."""
    store = open_store(f"s3://racing/{bucket.location.rpartition('/')[2]}", writes=None)
    assert store.create("a", b"1")
    assert not store.create("a", b"2")


def test_an_endpoint_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    for key, value in bucket_environment(9).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(AwayError, match=r"create test-.* for 0.2 s \(Connection refused\)"):
        open_store("s3://run/x", patience=0.2)


def test_a_connection_that_is_silent(bucket: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small call is repeated over another connection long before a large one would fail."""
    proxy = Proxy(bucket.port)
    for key, value in bucket_environment(proxy.port).items():
        monkeypatch.setenv(key, value)
    store = open_store(bucket.location).with_patience(10.0)
    for call in (
        lambda: store.create("a", b"1"),
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.replace("a", b"2"),
        lambda: store.delete("a"),
    ):
        proxy.cut()  # so that the next call needs another connection
        proxy.silence_next()
        call()
        assert proxy.silences == 0, "the call has met it"
    proxy.close()


@pytest.mark.parametrize(
    ("location", "variables", "says"),
    [
        ("az://container/x", {}, "Account must be specified; set AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3://run/x", {"AWS_ENDPOINT_URL": "host:1"}, "AWS_ENDPOINT_URL = 'host:1' is not the"),
        ("s3://run/x", {"AWS_ENDPOINT": "https://a:secret@b"}, "AWS_ENDPOINT = 'b' is not the"),
    ],
)
def test_environments_that_cannot_be(
    location: str, variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(RefusedError, match=says):
        open_store(location)


def test_all_three_providers_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their clients are made; nothing is sent."""
    pytest.importorskip("obstore", reason="needs obstore")
    from torchtitan_diloco.store.bucket import Bucket

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    for location in ("s3://bucket/run", "gs://bucket/run", "az://container/run"):
        found = Bucket(location)
        assert found.location == location
        assert found.kind is Kind.CLOUD
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert Bucket("s3://bucket/run").kind is Kind.NEAR
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "missing.json"))
    with pytest.raises(StoreError, match="set GOOGLE_SERVICE_ACCOUNT"):
        Bucket("gs://bucket/run")


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "torchtitan_diloco.store.bucket", raising=False)
    with pytest.raises(UserError, match=r"install obstore: .*\[bucket\]"):
        open_store("s3://bucket/run")
