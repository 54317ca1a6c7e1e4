"""S3 by moto, in a process of its own. It prints its port.

Some buckets have faults: `plain` has no conditional writes, `racing` looks and then writes, so that
of several writers at once all succeed, `clock` finds every clock wrong, `wrong` every signature,
`readonly` takes no objects, `full` has no space, `busy` refuses every third request for now.
"""

import io
import itertools
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

import boto3  # type: ignore[import-untyped]
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKETS = "run", "plain", "racing", "clock", "wrong", "readonly", "full", "busy"
WRITES = ("PUT", "DELETE", "POST")
RACE_SECONDS = 0.2
"""Between the look and the write of a bucket that races."""
REFUSALS = {
    "clock": ("403 Forbidden", "RequestTimeTooSkewed", "The difference is too large."),
    "wrong": ("403 Forbidden", "SignatureDoesNotMatch", "Check your key."),
    "readonly": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "full": ("507 Insufficient Storage", "XMinioStorageFull", "The drive is full."),
    "busy": ("503 Slow Down", "SlowDown", "Reduce your request rate."),
}


class Application:
    """One request at a time: moto's own check of a condition is not atomic."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._count = itertools.count()
        self.is_ready = False

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        bucket = environ["PATH_INFO"].split("/")[1]
        refused = bucket in REFUSALS and self.is_ready
        if bucket in ("readonly", "full"):
            refused = refused and environ["REQUEST_METHOD"] in WRITES
        if bucket == "busy":
            refused = refused and next(self._count) % 3 == 0
        if bucket == "plain" or (bucket == "racing" and not self._is_there(environ)):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if refused:
            status, code, message = REFUSALS[bucket]
            text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            return _reply(environ, start, status, text)
        with self._lock:
            return list(self._moto(environ, start))

    def _is_there(self, environ: dict[str, Any]) -> bool:
        """Return whether an object was there some time ago."""
        if "HTTP_IF_NONE_MATCH" not in environ:
            return False
        statuses = list[str]()
        look = {**environ, "REQUEST_METHOD": "HEAD", "wsgi.input": io.BytesIO()}
        for key in ("HTTP_IF_NONE_MATCH", "CONTENT_LENGTH"):
            look.pop(key, None)
        with self._lock:
            list(self._moto(look, lambda status, *_: statuses.append(status)))
        time.sleep(RACE_SECONDS)
        return statuses[0].startswith("200")


def _reply(environ: dict[str, Any], start: Any, status: str, text: str) -> Iterable[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = text.encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = Application()
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    for bucket in BUCKETS:
        client.create_bucket(Bucket=bucket)
    application.is_ready = True
    print(server.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    from torchtitan_diloco.base.hardware import end_with_parent

    end_with_parent()
    main()
