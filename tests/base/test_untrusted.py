"""Decoding what other processes have written."""

import subprocess
import sys

FIRST_USES = """
import sys, threading
import msgspec
from torchtitan_diloco.base.untrusted import decode_json

sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = msgspec.defstruct("Inner", [(f"f{n}", list[int], []) for n in range(20)])
    outer = msgspec.defstruct("Outer", [("a", list[inner]), ("b", dict[str, inner], {})])
    start = threading.Barrier(6)

    def decode():
        start.wait()
        assert decode_json(b'{"a": [{"f3": [1]}]}', outer).a[0].f3 == [1]

    threads = [threading.Thread(target=decode) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_use_a_type_for_the_first_time_at_once() -> None:
    """msgspec alone crashes: two islands of a process read their first decision."""
    subprocess.run([sys.executable, "-c", FIRST_USES], check=True)
