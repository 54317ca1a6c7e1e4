"""A SeaweedFS that ends at its start is started again, if that may help."""

from pathlib import Path

import pytest

from tests.ports import free_port
from torchtitan_diloco.base.user import UserError

pytest.importorskip("cryptography")
pytest.importorskip("obstore")

from torchtitan_diloco.islands.bucket_folder import open_folder
from torchtitan_diloco.islands.bucket_server import BucketServer
from torchtitan_diloco.islands.seaweed import Seaweed, find_weed

try:
    find_weed()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    ("said", "starts", "why"),
    [
        ("", 3, r"not start in 3 attempts: it ended with code 7; look into .*/log, and try again"),
        ("F0101 00:00:00.000000 1 a.go:1] listen: address already in use", 3, "3 attempts: listen"),
        ("F0101 00:00:00.000000 1 a.go:1] no data", 1, "did not start: no data$"),
    ],
)
def test_what_ends_at_its_start_is_started_again(
    tmp_path: Path, said: str, starts: int, why: str
) -> None:
    """If it says why, and that will not pass, it is not."""
    folder = open_folder(tmp_path / "bucket", address="127.0.0.1", host=None, port=free_port())
    folder.save_settings()
    weed = Seaweed(folder)
    program = tmp_path / "weed"
    program.write_text(f"#!/bin/sh\necho start >> {tmp_path}/starts\necho '{said}'\nexit 7\n")
    program.chmod(0o755)
    weed._weed = program
    server = BucketServer(
        folder, weed, with_syncer=False, check_signals=lambda: None, say=lambda _: None
    )
    with pytest.raises(UserError, match=why):
        server.start()
    assert (tmp_path / "starts").read_text().count("start") == starts
