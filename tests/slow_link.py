"""A port that leads to another one of this machine, over a long link.

    python -m tests.slow_link PORT TARGET MILLISECONDS

MILLISECONDS: of a round trip. It stands in for netem, which not every kernel has.
"""

import asyncio
import contextlib
import math
import socket
import sys

from benchmarks.streams import Bucket, pass_on


async def serve(port: int, target: int, delay: float) -> None:
    """`delay`: seconds of one way."""
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()
    listening = socket.create_server(("", port), backlog=512)
    listening.setblocking(False)
    print(f"listening at {port}", flush=True)

    async def connect(near: socket.socket) -> None:
        far = socket.socket()
        far.setblocking(False)
        with near, far, contextlib.suppress(OSError):
            await asyncio.sleep(2 * delay)  # the handshake
            await loop.sock_connect(far, ("127.0.0.1", target))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.gather(
                pass_on(near, far, Bucket(math.inf), delay),
                pass_on(far, near, Bucket(math.inf), delay),
            )

    while True:
        near, _ = await loop.sock_accept(listening)
        near.setblocking(False)
        task = asyncio.create_task(connect(near))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    number, to, milliseconds = map(int, sys.argv[1:])
    asyncio.run(serve(number, to, milliseconds / 2e3))
