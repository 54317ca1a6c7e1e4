"""Start the host of a bucket of one's own, and kill its syncer."""

from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.hosts import BucketHost
from benchmarks.network import NoNetwork
from tests.waiting import wait_until
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.islands.seaweed import find_weed
from torchtitan_diloco.store import open_store

for module in ("cryptography", "obstore"):
    pytest.importorskip(module)
try:
    find_weed()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)


def test_a_bucket_has_a_login_for_each_island_and_another_syncer_when_one_is_killed(
    tmp_path: Path,
) -> None:
    with NoNetwork() as network:
        host = BucketHost(tmp_path, network, worker=0, islands=2)
        try:
            host.start()
            for worker, name in enumerate(("worker-0", "worker-1")):
                open_store(host.join(worker), writes=f"part/{name}/", quiet=True).close()
            wait_until(lambda: bool(syncer_of(host)), "the syncer")
            before = syncer_of(host)
            host.kill_syncer()
            wait_until(lambda: syncer_of(host) not in (0, before), "another syncer")
            processes = host.processes
        finally:
            host.stop()
    wait_until(lambda: not any(map(runs, processes)), "the end of all processes")


def syncer_of(host: BucketHost) -> int:
    with suppress(ProcessLookupError):
        return host.syncer
    return 0


def runs(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    with suppress(OSError):
        return path.read_text().rpartition(")")[2].split()[0] != "Z"
    return False
