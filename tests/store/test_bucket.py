"""What a bucket refuses, in one line each."""

import logging
import sys
from pathlib import Path

import pytest

from tests.store.places import Place
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.store import AwayError, RefusedError, StoreError, open_store


@pytest.mark.parametrize(
    ("location", "writes", "says"),
    [
        ("s3://nowhere/run", "", "there is no such bucket .* create it, or check its name"),
        ("s3://nowhere/run", None, "there is no such bucket"),
        ("s3://plain/run", "", "a second writer could create an object that already exists"),
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
    with pytest.raises(RefusedError, match=says) as raised:
        open_store(location, writes=writes)
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


def test_an_endpoint_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "a")
    credentials = {"endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
    with pytest.raises(AwayError, match=r"could not create test-.* for 0.2 s \(HTTP error"):
        open_store("s3://run/x", credentials=credentials, patience=0.2)


@pytest.mark.parametrize(
    ("location", "credentials", "says"),
    [
        ("s3://run/x", {"bogus": "1"}, "'bogus' is not valid .* set AWS_ACCESS_KEY_ID"),
        ("az://container/x", {}, "Account must be specified; set AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_credentials_that_cannot_be(
    location: str, credentials: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(RefusedError, match=says):
        open_store(location, credentials=credentials)


def test_all_three_providers_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their clients are made; nothing is sent."""
    pytest.importorskip("obstore", reason="needs obstore")
    from torchtitan_diloco.store.bucket import Bucket

    for location, credentials in (
        ("s3://bucket/run", {"region": "eu-west-1"}),
        ("gs://bucket/run", {"skip_signature": "true"}),
        ("az://container/run", {"account_name": "a", "access_key": "aGVsbG8="}),
    ):
        assert Bucket(location, credentials).location == location
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "missing.json"))
    with pytest.raises(StoreError, match="set GOOGLE_SERVICE_ACCOUNT"):
        Bucket("gs://bucket/run", {})


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "torchtitan_diloco.store.bucket", raising=False)
    with pytest.raises(UserError, match=r"install obstore: .*\[bucket\]"):
        open_store("s3://bucket/run")
