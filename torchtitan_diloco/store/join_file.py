"""Join file: where a bucket of an S3 server is, and the login of a site, as TOML.

    location = "s3://islands"               # the bucket, and a path in it
    endpoint = "https://203.0.113.7:8333"   # the server; without it, that of AWS in the region
    access_key_id = "..."
    secret_access_key = "..."
    region = "us-east-1"                    # default
    certificate = "-----BEGIN CERTIFICATE-----..."   # PEM of those to trust beside the system's
    name = "site-a"                         # the login
    prefix = "mirror/site-a/"               # below which this login may store mirrors
    kind = "near"                           # or "cloud"; else it follows from the endpoint

Only the first, third and fourth lines are required. A file is never logged.
"""

import ipaddress
import os
import ssl
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan_diloco.store.errors import RefusedError, StoreError
from torchtitan_diloco.store.names import check_prefix
from torchtitan_diloco.store.store import Kind

MOST_FILE_BYTES = 2**16
REQUIRED = ("location", "access_key_id", "secret_access_key")
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}
"""Variables that name the server of a bucket, by its scheme."""
OWN_DOMAINS = (".local", ".localhost", ".internal", ".lan", ".home.arpa")
"""Domains of names that no provider uses."""


@dataclass(frozen=True)
class JoinFile:
    """Content of a join file."""

    path: Path
    location: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    endpoint: str = ""
    region: str = "us-east-1"
    certificate: str = ""
    name: str = ""
    prefix: str = ""
    kind: str = ""

    @property
    def server(self) -> str:
        """URL of the server."""
        return self.endpoint or f"https://s3.{self.region}.amazonaws.com"

    @property
    def store_kind(self) -> Kind:
        """Kind of the store: that of the file, or else of its server."""
        return Kind(self.kind) if self.kind else kind_of(self.server, self.certificate)

    @property
    def shown(self) -> str:
        """Location to show to users."""
        return f"{self.location} at {urlsplit(self.server).netloc}"


def read_join_file(path: Path) -> JoinFile:
    """Return the content of a join file. Raise a RefusedError that names what is wrong in it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_FILE_BYTES)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; give a join file that can be read") from None
    try:
        table = tomllib.loads(raw.decode())
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise _error(path, f"it is no join file, which is TOML ({reason})") from None
    known = [field.name for field in fields(JoinFile) if field.name != "path"]
    for key, value in table.items():
        if key not in known:
            raise _error(path, f"there is no key {key[:40]!r}; the keys are {', '.join(known)}")
        if not isinstance(value, str):
            raise _error(path, f"{key} is not a text")
    for key in REQUIRED:
        if not table.get(key):
            raise _error(path, f"{key} is missing")
    join = JoinFile(path=path, **table)
    _check(join)
    return join


def _check(join: JoinFile) -> None:
    try:
        check_bucket_url(join.location)
        check_endpoint("endpoint", join.server)
        check_prefix(join.prefix)
    except StoreError as error:
        raise RefusedError(f"{join.path}: {error}") from None
    if not join.location.startswith("s3://"):
        raise _error(join.path, f"location = {join.location[:80]!r} is not of the form s3://BUCKET")
    if join.prefix and not join.prefix.endswith("/"):
        raise _error(join.path, f"prefix = {join.prefix!r} does not end with a slash")
    if join.kind not in ("", Kind.NEAR, Kind.CLOUD):
        raise _error(join.path, f"kind = {join.kind[:40]!r} is neither 'near' nor 'cloud'")
    if join.certificate:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=join.certificate)
        except (ssl.SSLError, ValueError):
            raise _error(join.path, "certificate is incomplete, or not in PEM") from None


def check_bucket_url(location: str) -> None:
    """Raise a RefusedError unless a location is of the form SCHEME://BUCKET/PATH."""
    parts = urlsplit(location)
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:80]
        raise RefusedError(
            f"{shown}: the location of a bucket contains a login; remove it, and give the login in "
            "a join file or in the environment"
        )
    if not parts.netloc or parts.query or parts.fragment:
        raise RefusedError(
            f"{location[:80]}: the location of a bucket is {parts.scheme}://BUCKET/PATH; correct it"
        )


def check_endpoint(key: str, endpoint: str) -> None:
    """Raise a RefusedError unless an endpoint is the URL of a server."""
    try:
        parts = urlsplit(endpoint)
        is_server = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        is_server = is_server and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:
        is_server = False
    if not is_server or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        shown = endpoint.rpartition("@")[2][:80]
        raise RefusedError(
            f"{key} = {shown!r} is not the address of a server; give https://HOST:PORT"
        )


def endpoint_of_environment(scheme: str) -> str:
    """Return the URL of a server that a variable names, or an empty string."""
    for variable in ENDPOINTS[scheme]:
        if endpoint := os.environ.get(variable, ""):
            check_endpoint(variable, endpoint)
            return endpoint
    return ""


def kind_of(endpoint: str, certificate: str = "") -> Kind:
    """Return the kind of a server: NEAR if no provider has such an address or certificate."""
    host = urlsplit(endpoint).hostname or ""
    try:
        ipaddress.ip_address(host)
        is_own = True
    except ValueError:
        is_own = bool(host) and ("." not in host or host.endswith(OWN_DOMAINS))
    return Kind.NEAR if is_own or certificate else Kind.CLOUD


def _error(path: Path, reason: str) -> RefusedError:
    return RefusedError(f"{path}: {reason}; use the newest join file of this site, or correct it")
