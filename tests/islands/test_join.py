"""The join string."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.config import from_command_line
from torchtitan_diloco.config.loader import ConfigError
from torchtitan_diloco.islands.config import Join

SECRET = "s3cret"


@given(
    addresses=st.lists(st.sampled_from(["a.b:1", "10.0.0.1:65535", "[::1]:4222"]), min_size=1),
    run=st.text("aZ09_-", min_size=1, max_size=64),
    user=st.text("aZ0 @:/#%é", min_size=1),
    password=st.text("aZ0 @:/#%é", min_size=1),
)
def test_a_join_string_is_read_as_it_is_written(
    addresses: list[str], run: str, user: str, password: str
) -> None:
    join = Join(tuple(addresses), run, user, password)
    assert Join.parse(str(join)) == join
    assert "password" not in repr(join)


def test_a_file_holds_a_join_string(tmp_path: Path) -> None:
    join, path = Join(("host:1",), "run", "user", SECRET), tmp_path / "join.txt"
    from_command_line(["--islands.name", "a", "--islands.join", str(path)])  # to plan elsewhere
    with pytest.raises(ValueError, match=r"islands\.join = '.*join\.txt': No such file"):
        Join.parse(str(path))
    for file in (path, tmp_path / "#1@12:00.txt"):
        file.write_text(f"{join}\n")
        assert Join.parse(str(file)) == join
        from_command_line(["--islands.name", "a", "--islands.join", str(file)])
    path.write_text("no join string # at all")
    with pytest.raises(
        ValueError, match=r"islands\.join = '.*join\.txt': it contains no complete join string"
    ):
        Join.parse(str(path))
    with pytest.raises(ConfigError, match=r"islands\.join: .*not HOST:PORT") as error:
        from_command_line(["--islands.name", "a", "--islands.join", f"nats+tls://u:{SECRET}@h#run"])
    assert SECRET not in str(error.value)


def test_a_server_on_this_machine_needs_no_encryption() -> None:
    join = Join.parse("nats://127.0.0.1:4222,localhost:4223,[::1]:4224#run")
    assert (join.tls, join.user, join.context()) == (False, "", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not of the form"),
        ("nats+tls://u:s3cret@host:1", "is not of the form"),
        ("nats+tls://u:s3cret@host:1#a b", "is not of the form"),
        ("nats+tls://u:s3cret@host#run", "'host' is not HOST:PORT"),
        ("nats+tls://u:s3cret@host:70000#run", "'host:70000' is not HOST:PORT"),
        ("nats+tls://u:s3cret@host:1,#run", "'' is not HOST:PORT"),
        ("nats+tls://u:s3cret@host:1#run.AAAA", "certificate in it is damaged"),
        ("nats+tls://u:s3cret@x@host:1#run", "is not of the form"),
        ("nats://u:s3cret@host:1#run", "must begin with nats\\+tls"),
        ("u:s3cret", "is not of the form"),
    ],
)
def test_a_wrong_join_string_is_refused_without_its_password(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"islands\.join = .*{reason}.*copy the whole") as error:
        Join.parse(text)
    assert SECRET not in str(error.value)
