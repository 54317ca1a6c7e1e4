"""A metadata server on the loopback, which speaks the dialects of the clouds."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AWS = "/latest/meta-data/"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class MetadataServer:
    """Holds what the server says, and what it was asked."""

    def __init__(self) -> None:
        self.answers = {GCP: "FALSE", AZURE: json.dumps({"Events": []}), AZURE_NAME: "mine"}
        self.token = "token-1"
        self.tokens = 0
        self.asked = threading.Semaphore(0)
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path.startswith("/latest/"):
            if path == "/latest/api/token":
                ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
                self.tokens += 1
                return (200, self.token) if method == "PUT" and ttl.isdigit() else (400, "")
            if headers.get("x-aws-ec2-metadata-token") != self.token:
                return 401, ""
        elif path == GCP and headers.get("metadata-flavor") != "Google":
            return 403, ""
        elif path.startswith("/metadata/") and headers.get("metadata") != "true":
            return 400, ""
        found = self.answers.get(path)
        return (404, "") if found is None else (200, found)


def aws_action(seconds: float = 120.0, action: str = "terminate") -> str:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return json.dumps({"action": action, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


def azure_events(*events: tuple[str, str], seconds: float | None = 30.0) -> str:
    """Return events: their types, and names of the machines."""
    at = datetime.now(UTC) + timedelta(seconds=seconds or 0)
    before = "" if seconds is None else format_datetime(at, usegmt=True)
    return json.dumps(
        {
            "DocumentIncarnation": 1,
            "Events": [
                {
                    "EventId": "1",
                    "EventType": kind,
                    "ResourceType": "VirtualMachine",
                    "Resources": [machine],
                    "EventStatus": "Scheduled",
                    "NotBefore": before,
                }
                for kind, machine in events
            ],
        }
    )


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    said = MetadataServer()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            status, text = said.answer(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
            said.asked.release()

        do_GET = reply
        do_PUT = reply

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    said.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield said
    finally:
        server.shutdown()
        server.server_close()
