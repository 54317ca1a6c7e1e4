"""Names, and the one word that says where a store is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.store import StoreError, open_store
from torchtitan_diloco.store.location import OWN_BUCKET, check_location, kind_at
from torchtitan_diloco.store.names import MOST_CHARACTERS, check_name, check_prefix
from torchtitan_diloco.store.store import Kind


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("ftp://host/run", "ftp://host/run: there is no such kind of store; give a folder"),
        ("https://a:secret@host/run", "https://host/run: there is no such kind"),
        ("ftp://a:secret@host/run", "ftp://host/run: there is no such kind"),
        ("", "is empty; give a folder, a join file, s3"),
        ("s3://a:secret@bucket/run", "s3://bucket/run: .* contains a login; remove it"),
        ("s3:///run", "s3:///run: the location of a bucket is s3://BUCKET/PATH; correct it"),
        ("gs://bucket/run?a=b", "the location of a bucket is gs://BUCKET/PATH"),
        (
            "s3:/a:secret@bucket/run",
            r"^s3:\.\.\. is no location; give s3://BUCKET/PATH, with ",
        ),
        ("~nobody-here/run", "^~nobody-here/run is in the home folder of a user whom this machine"),
        (5000 * "x", r"^x{80}: it cannot be read \(File name too long\); correct its path$"),
    ],
)
def test_a_wrong_location_is_named_without_its_password(location: str, says: str) -> None:
    for call in (open_store, check_location):
        with pytest.raises(UserError, match=says) as raised:
            call(location)
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_check_of_a_location_creates_nothing(tmp_path: Path) -> None:
    check_location(str(tmp_path / "run"))
    check_location("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("server", "kind"), [("", Kind.CLOUD), ("http://10.0.0.1:8333", Kind.NEAR)]
)
def test_the_kind_of_a_store_is_known_before_it_is_opened(
    server: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kind_at(str(tmp_path)) is Kind.FOLDER
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    assert kind_at("s3://bucket/run") is kind
    assert kind_at("gs://bucket/run") is Kind.CLOUD, "whose server is not that of S3"
    join = 'location = "s3://bucket"\naccess_key_id = "a"\nsecret_access_key = "b"\n'
    if server:
        join += f'endpoint = "{server}"\n'
    (tmp_path / "join.toml").write_text(join)
    assert kind_at(str(tmp_path / "join.toml")) is kind


def test_the_folder_of_a_served_bucket_is_no_store(tmp_path: Path) -> None:
    """Nobody would read what is written there, beside the objects of its server."""
    check_location(str(tmp_path))
    for name in OWN_BUCKET:
        (tmp_path / name).touch()
    for call in (check_location, open_store, lambda folder: open_store(folder, writes=None)):
        with pytest.raises(UserError) as raised:
            call(str(tmp_path))
        assert str(raised.value) == (
            f"{tmp_path}: it is the folder of a bucket that `islands serve` serves; give "
            f"{tmp_path}/join-owner.toml"
        )
    assert {path.name for path in tmp_path.iterdir()} == {*OWN_BUCKET}


@given(some.one_of(some.text(max_size=40), some.text("a./-\n", max_size=8)))
def test_a_name_stays_below_the_folder(text: str) -> None:
    """Whatever passes as a name is a path below a folder, and no file that is not shown."""
    try:
        check_name(text)
    except StoreError:
        return
    path = Path("/folder", text)
    assert str(path) == f"/folder/{text}"
    assert not any(part.startswith(".") for part in path.parts)
    for end in range(len(text) + 1):
        check_prefix(text[:end])


@pytest.mark.parametrize(
    "name", ["a" * 151, "/".join("a" * 7), "/".join(["a" * 120] * 3), "a\n", "a\0", "-a", "a/"]
)
def test_names_are_bounded(name: str) -> None:
    with pytest.raises(StoreError, match="is not a valid name of an object"):
        check_name(name)
    assert len("/".join(["a" * 120] * 3)) > MOST_CHARACTERS
