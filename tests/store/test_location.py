"""Names, addresses, and the one word that says where a store is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.store import RefusedError, StoreError, open_store
from torchtitan_diloco.store.address import Address, read_join_file
from torchtitan_diloco.store.names import MOST_CHARACTERS, check_name, check_prefix

TEXT = some.text(min_size=1, max_size=30).filter(lambda text: text.isprintable())
HEX = "0123456789abcdef"


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("ftp://host/run", "ftp://host/run: there is no such kind of store; give a folder"),
        ("http://a:secret@host/run", "http://host/run: there is no such kind"),
        ("nats+tls://a:secret@host:4222#run", "nats.tls://host:4222#run: there is no such kind"),
        ("", "is empty; give a folder, a join file, https"),
        ("https://a:secret@host:port/", "'host:port/': Port could not be cast"),
        ("https://", "'https://': is not of the form"),
        ("https://a:secret@host/#12", "'host/#12': its certificate does not have 64 .* incomplete"),
        ("https://a:secret@host/?query", "is not of the form"),
    ],
)
def test_a_wrong_location_is_named_without_its_password(location: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        open_store(location)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"no address", b"http://host"])
def test_a_file_that_is_no_join_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "join.txt"
    path.write_bytes(content)
    with pytest.raises(RefusedError, match=r"join.txt: it contains no line https://LOGIN"):
        open_store(path)


def test_only_buckets_take_credentials(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="only buckets take credentials"):
        open_store(tmp_path, credentials={"access_key_id": "a"})


@given(
    host=some.sampled_from(["host", "a.example", "203.0.113.7", "2001:db8::1"]),
    port=some.integers(1, 65535),
    path=some.sampled_from(["", "/runs/a"]),
    login=TEXT,
    password=TEXT.map("secret{}".format),
    fingerprint=some.one_of(some.just(""), some.text(HEX, min_size=64, max_size=64)),
)
def test_a_join_file_holds_an_address(
    host: str, port: int, path: str, login: str, password: str, fingerprint: str
) -> None:
    address = Address(host, port, path, login, password, fingerprint)
    assert Address.parse(f" {address.line}\n") == address
    assert "secret" not in repr(address)


def test_a_join_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "join.txt"
    path.write_text("https://a:b@host:8443/#" + "0" * 64 + "\n")
    assert read_join_file(path) == Address("host", 8443, "", "a", "b", "0" * 64)


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
