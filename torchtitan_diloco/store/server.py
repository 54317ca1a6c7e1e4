"""Server of a folder over https, for logins with permissions and quotas.

It has a separate thread with an event loop; calls that wait for the disk run in a few other
threads. The process that started it, and any other process, may use the folder directly at the same
time.
"""

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from torchtitan_diloco.base.hardware import raise_open_files_limit
from torchtitan_diloco.base.log import logger
from torchtitan_diloco.base.user import UserError, install_command
from torchtitan_diloco.store.errors import (
    DamagedError,
    FullError,
    PassingError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.folder import Folder
from torchtitan_diloco.store.https import socket_options
from torchtitan_diloco.store.logins import Login, Logins
from torchtitan_diloco.store.names import check_name, check_prefix
from torchtitan_diloco.store.protocol import (
    LIST_ROUTE,
    MODIFIED,
    MOST_LISTED,
    MOST_WAIT_SECONDS,
    NOW,
    OBJECT_ROUTE,
    WAIT_ROUTE,
    Listing,
    Mark,
)
from torchtitan_diloco.store.quota import Quota, Quotas
from torchtitan_diloco.store.rights import may_create, may_replace
from torchtitan_diloco.store.store import MOST_RAW_BYTES, SLOWEST, Store
from torchtitan_diloco.store.watches import Watches

try:
    from aiohttp import BasicAuth, web
except ImportError:
    raise UserError(f"install aiohttp: {install_command('islands')}") from None

T = TypeVar("T")
DISK_THREADS = 8
IDLE_SECONDS = 600.0
"""Seconds for which an idle connection is kept."""
BODY_SECONDS = 20.0
FOLDER_SECONDS = 30.0
ERRORS: tuple[tuple[type[Exception], int], ...] = (
    (DamagedError, 422),
    (FullError, 507),
    (RefusedError, 500),
    (StoreError, 400),
    (PassingError, 503),
)
"""Errors of the folder, and the status of the reply. If the folder refuses a request, this is not
the client's mistake, so the client retries."""


@dataclass(frozen=True)
class Caller:
    name: str
    login: Login


class Server:
    """A server of a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        quota: Quota | None = None,
        routes: Iterable[web.RouteDef] = (),
    ) -> None:
        """`port`: 0 for a free one. `routes`: additional pages, which need no login."""
        self.folder = Folder(folder)
        self.logins = Logins(folder)
        Store(self.folder).self_test("")
        self._quotas = Quotas(self.folder, quota or Quota())
        self._host = host
        self.port = port
        self._watches = Watches(self.folder)
        self._disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk")
        self._app = web.Application(client_max_size=MOST_RAW_BYTES, middlewares=[self._answer])
        self._app.add_routes(
            [
                web.get(f"{OBJECT_ROUTE}{{name:.+}}", self._get),
                web.post(f"{OBJECT_ROUTE}{{name:.+}}", self._create),
                web.put(f"{OBJECT_ROUTE}{{name:.+}}", self._replace),
                web.delete(f"{OBJECT_ROUTE}{{name:.+}}", self._delete),
                web.get(LIST_ROUTE, self._list),
                web.get(WAIT_ROUTE, self._wait),
                *routes,
            ]
        )
        self._thread = threading.Thread(target=self._run, name="store server", daemon=True)
        self._started = Future[None]()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Listen. Return once clients can connect."""
        raise_open_files_limit()
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """End all connections."""
        with suppress(RuntimeError):  # it has ended, or was not started
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            if self._started.done():
                logger.error(f"the server of {self.folder.location} has ended: {error}")
            else:
                self._started.set_exception(error)
        finally:
            self._disk.shutdown(wait=False)
            self._watches.close()
            self._loop.close()

    async def _serve(self) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.logins.certificate, self.logins.key)
        listening = self._listen()
        self.port = listening.getsockname()[1]
        runner = web.AppRunner(
            self._app, access_log=None, keepalive_timeout=IDLE_SECONDS, shutdown_timeout=0.5
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listening, ssl_context=context, backlog=512).start()
            self._started.set_result(None)
            await self._stop.wait()
        finally:
            await runner.cleanup()
            listening.close()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, self.port), family=family, backlog=512)
        except OSError as error:
            raise UserError(
                f"--host {self._host} --port {self.port}: {os.strerror(error.errno or 0)}; give a "
                "free port, and an address of this machine"
            ) from error
        for option in socket_options():  # connections inherit them
            listening.setsockopt(*option)
        return listening

    # --- requests ---------------------------------------------------------------------------------

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Add the clock to a reply, and turn errors into replies."""
        try:
            reply = await handler(request)
        except web.HTTPException as error:
            error.headers[NOW] = f"{time.time():.6f}"
            raise
        except tuple(kind for kind, _ in ERRORS) as error:
            status = next(status for kind, status in ERRORS if isinstance(error, kind))
            reply = web.Response(status=status, text=str(error))
        reply.headers[NOW] = f"{time.time():.6f}"
        return reply

    def _caller(self, request: web.Request) -> Caller:
        """Return the login of a request. Raise a 401 if it is unknown."""
        with suppress(ValueError):
            given = BasicAuth.decode(request.headers.get("Authorization", ""))
            if (login := self.logins.find(given.login, given.password)) is not None:
                return Caller(given.login, login)
        raise web.HTTPUnauthorized(text="unknown login or password")

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self._caller(request)
        name = _name_in(request)
        stored = await self._on_disk(lambda: self.folder.get(name, FOLDER_SECONDS))
        if stored is None:
            raise web.HTTPNotFound(text="there is none")
        return web.Response(body=stored.content, headers={MODIFIED: f"{stored.modified:.6f}"})

    async def _create(self, request: web.Request) -> web.StreamResponse:
        caller = self._caller(request)
        name = _name_in(request)
        may = may_create(name, caller.name, owner=caller.login.owner)
        self._check_right(may, caller=caller, name=name, verb="create")
        content = await self._body(request, caller, name)
        made = await self._on_disk(lambda: self.folder.create(name, content, FOLDER_SECONDS))
        return web.Response(status=201 if made else 409)

    async def _replace(self, request: web.Request) -> web.StreamResponse:
        caller = self._caller(request)
        name = _name_in(request)
        may = may_replace(name, caller.name)
        self._check_right(may, caller=caller, name=name, verb="replace")
        content = await self._body(request, caller, name)
        await self._on_disk(lambda: self.folder.replace(name, content, FOLDER_SECONDS))
        return web.Response(status=201)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        caller = self._caller(request)
        name = _name_in(request)
        may = may_create(name, caller.name, owner=caller.login.owner)
        self._check_right(may, caller=caller, name=name, verb="delete")
        await self._on_disk(lambda: self.folder.delete(name, FOLDER_SECONDS))
        return web.Response(status=204)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._caller(request)
        prefix = check_prefix(request.query.get("prefix", ""))
        after = check_prefix(request.query.get("after", ""))
        objects = await self._on_disk(lambda: self.folder.list(prefix, after, FOLDER_SECONDS))
        page = Listing(objects=objects[:MOST_LISTED], more=len(objects) > MOST_LISTED)
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def _wait(self, request: web.Request) -> web.StreamResponse:
        self._caller(request)
        prefix = check_prefix(request.query.get("prefix", ""))
        try:
            seconds = min(float(request.query.get("seconds", "0")), MOST_WAIT_SECONDS)
        except ValueError:
            raise web.HTTPBadRequest(text="seconds: give a number") from None
        mark = await self._watches.wait(prefix, request.query.get("mark", ""), seconds)
        return web.Response(body=msgspec.json.encode(Mark(mark)), content_type="application/json")

    def _check_right(self, may: bool, *, caller: Caller, name: str, verb: str) -> None:
        if not may:
            raise web.HTTPForbidden(
                text=f"login {caller.name} has no permission to {verb} {name}: "
                "a site writes its own parts and notes, and the owner of the "
                "run writes changes; use the join file of another login"
            )

    async def _body(self, request: web.Request, caller: Caller, name: str) -> bytes:
        """Return the content of a request after checking its size."""
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired(text="the request has no length")
        if size > MOST_RAW_BYTES:
            raise web.HTTPRequestEntityTooLarge(MOST_RAW_BYTES, size)
        owner = caller.login.owner
        await self._on_disk(lambda: self._quotas.admit(caller.name, name, size, owner=owner))
        try:
            async with asyncio.timeout(BODY_SECONDS + size / SLOWEST):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="the content did not arrive") from None

    async def _on_disk(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, function)


def _name_in(request: web.Request) -> str:
    return check_name(request.match_info["name"])
