"""A bucket as a store: S3, GCS, Azure, and services with their protocols, through obstore."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store, from_url

from torchtitan_diloco.store.errors import (
    FullError,
    PassingError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.join_file import JoinFile, endpoint_of_environment, kind_of
from torchtitan_diloco.store.store import (
    MOST_RAW_BYTES,
    SEAL_BYTES,
    Backend,
    Listed,
    Raw,
    Sealed,
    too_large,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore, RetryConfig

ATTEMPT_SECONDS = 60
"""Seconds for an attempt, including its content."""
SILENCE_SECONDS = 2
"""Seconds without an answer after which an attempt without a large content fails, and to
connect. Of a content that is written, they include the upload."""
PAGE = 1000
"""Objects in a reply to a list."""
ONE_BY_ONE = {"disable_bulk_delete": "true"}
"""A deletion in bulk is answered with status 200 even if it is refused."""
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
WRONG_CLOCK = ("RequestTimeTooSkewed", "date header too old", "iat and exp")
"""Messages of S3, Azure and Google about a wrong clock."""
WRONG_LOGIN = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
    *("AuthenticationFailed", "invalid_grant", "invalid_client"),
)
NO_LOGIN = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""Endpoints that provide credentials if none are given."""
FULL = ("QuotaExceeded", "StorageFull")
PASSING = {408, 409, 425, 429, 499}
"""Statuses after which another attempt may get a better one, as after all from 500 on, except 501
and 507."""
PASSING_CODES = re.compile(
    r"<Code>(?:RequestTimeout|IncompleteBody|OperationAborted|SlowDown\w*|[\w.]*Throttl\w*)</Code>"
)
"""The same with statuses that are otherwise final, such as 400 after a link that was cut."""
FINAL_CODES = re.compile(r"<Code>(?:\w*Immutable\w*|InvalidBucketState)</Code>")
"""Codes of rules of the bucket, which stay, with a status that otherwise passes."""
ANSWERED = "there is an answer from there: check the server, and proxies on the way to it"
"""Remedy if a server has answered with an error until the end of the attempts."""
OTHER_REGION = ("incorrectly configured region",)
"""Message of obstore about any redirect without an address, which may also be one of a proxy."""
LOGIN_REMEDY = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "set GOOGLE_SERVICE_ACCOUNT to the path of a key",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_STATUS = re.compile(r"status code: (\d{3})")
_SAID = re.compile(r"<(?:Message|Code)>([^<]{1,200})")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_CAUSE = re.compile(r'(?:message|error): "([^"\n]{1,200})"')
"""Why a connection failed, in obstore's description of an error."""


class Bucket(Backend):
    """A bucket, below a path in it."""

    def __init__(self, location: str, join: JoinFile | None = None) -> None:
        """Open a bucket. `join`: server and login, otherwise those of the environment."""
        self._scheme = location.partition("://")[0]
        self._join = join
        self._has_worked = False
        """Whether a call has succeeded: the clock of this machine was right."""
        options: dict[str, Any] = {
            "timeout": f"{ATTEMPT_SECONDS}s",
            "connect_timeout": f"{SILENCE_SECONDS}s",
        }
        if join is None:
            self.location = location
            endpoint = endpoint_of_environment(self._scheme)
            self.kind = kind_of(endpoint)
        else:
            self.location = join.shown
            self.own_prefix = join.prefix
            endpoint = join.server
            self.kind = join.store_kind
            if join.certificate:
                options["root_certificate"] = join.certificate
        options["allow_http"] = endpoint.startswith("http://")
        self._large = self._client(location, options)
        options["read_timeout"] = f"{SILENCE_SECONDS}s"
        self._small = self._client(location, options)

    def _client(self, location: str, options: dict[str, Any]) -> "ObjectStore":
        once: RetryConfig = {"max_retries": 0}  # attempts.py repeats, and says so
        config = dict(ONE_BY_ONE) if self._scheme == "s3" else {}
        try:
            if self._join is None:
                client: ObjectStore = from_url(  # type: ignore[call-overload]
                    location, config=config, client_options=options, retry_config=once
                )
                return client
            parts = urlsplit(location)
            return S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                config=config | _config(self._join),  # type: ignore[arg-type]
                client_options=options,  # type: ignore[arg-type]
                retry_config=once,
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise RefusedError(f"{self.location}: {reason}; {self._login_remedy}") from error

    def create(self, name: str, content: Sealed, *, large: bool, durable: bool) -> bool:  # noqa: ARG002
        with self._explain("create", name):
            try:
                obstore.put(self._chosen(large), name, content.whole, mode="create")
            except AlreadyExistsError:
                stored = self.get(name, large=large)
                if stored is None:  # deleted meanwhile, or another writer is about to create it
                    raise PassingError("another writer is writing it", ANSWERED) from None
                return stored.sealed == content
            except NotImplementedError as error:
                raise self._without_conditions() from error
            return True

    def replace(self, name: str, content: Sealed, *, large: bool, durable: bool) -> None:  # noqa: ARG002
        with self._explain("replace", name):
            obstore.put(self._chosen(large), name, content.whole, use_multipart=False)

    def get(
        self,
        name: str,
        *,
        large: bool,
        most: int = MOST_RAW_BYTES,
        into: memoryview | None = None,
    ) -> Raw | None:
        with self._explain("get", name):
            try:
                answer = obstore.get(self._chosen(large), name)
            except FileNotFoundError as error:
                if self._is_bucket_missing(error):
                    raise
                return None
            if (size := answer.meta["size"]) > most:
                raise too_large(self.location, name, size, most)
            modified = answer.meta["last_modified"].timestamp()
            stored = answer.bytes()
            if into is None or len(stored) != len(into) + SEAL_BYTES:
                return Raw(Sealed.split(bytes(stored)), modified)
            view = memoryview(stored)
            into[:] = view[:-SEAL_BYTES]
            return Raw(Sealed(into, bytes(view[-SEAL_BYTES:])), modified)

    def list(self, prefix: str, after: str, most: int | None) -> list[Listed]:
        # A bucket lists whole segments, and servers disagree about the order of "a.b" and "a/b":
        # what is wanted is chosen here.
        folder = prefix.rpartition("/")[0]
        objects = list[Listed]()
        with self._explain("list", prefix):
            for page in obstore.list(self._small, folder or None, chunk_size=PAGE):
                objects += (
                    Listed(
                        meta["path"],
                        size=meta["size"],
                        modified=meta["last_modified"].timestamp(),
                        tag=meta["e_tag"] or meta["version"] or meta["last_modified"].isoformat(),
                    )
                    for meta in page
                    if meta["path"].startswith(prefix) and meta["path"] > after
                )
                if most is not None and len(objects) >= most:
                    break
        return sorted(objects[:most])

    def delete(self, name: str) -> None:
        with self._explain("delete", name):
            try:
                obstore.delete(self._small, name)
            except FileNotFoundError as error:
                if self._is_bucket_missing(error):
                    raise

    def _chosen(self, large: bool) -> "ObjectStore":
        return self._large if large else self._small

    # --- what may fail ----------------------------------------------------------------------------

    @property
    def _login_remedy(self) -> str:
        if self._join is not None:
            return f"{self._join.path} is not valid here: use the newest join file of this site"
        return LOGIN_REMEDY[self._scheme]

    @property
    def _region_remedy(self) -> str:
        if self._join is not None:
            return f"correct `region` in {self._join.path}"
        return "set AWS_REGION to that of the bucket"

    @contextmanager
    def _explain(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._explained(verb, name, error) from error
        self._has_worked = True

    def _is_bucket_missing(self, error: FileNotFoundError) -> bool:
        """Return whether it is not the object alone that was not found."""
        return _says(error, NO_BUCKET) or self._is_other_server(str(error))

    def _explained(self, verb: str, name: str, error: Exception) -> Exception:
        text, _, debug = str(error).partition("\n\nDebug source:")
        match = _STATUS.search(text)
        status = int(match[1]) if match else 0
        message = ": ".join(_SAID.findall(text)) or text.rpartition(" - ")[2]
        message = " ".join(message.split())[:300]
        if _says(error, NO_BUCKET):
            return RefusedError(
                f"{self.location}: there is no such bucket ({message}); create it, "
                "or check its name, region and endpoint"
            )
        if _says(error, OTHER_REGION):
            return RefusedError(
                f"{self.location}: the bucket may be in another region ({message}); "
                f"{self._region_remedy}"
            )
        if _says(error, WRONG_CLOCK):
            return self._about_clock(message)
        if _says(error, NO_LOGIN):
            return RefusedError(f"{self.location}: no credentials were found; {self._login_remedy}")
        if status == 401 or _says(error, WRONG_LOGIN):
            return RefusedError(
                f"{self.location}: the credentials were refused ({message}); {self._login_remedy}"
            )
        if PASSING_CODES.search(text):
            return PassingError(f"status {status}: {message}", ANSWERED)
        if self._is_other_server(text):
            return RefusedError(
                f"{self.location}: the server there does not speak S3 (status {status}: {message})"
                "; check its endpoint"
            )
        if status == 507 or _says(error, FULL):
            return FullError(f"{self.location}: {message}; free some space there")
        if status == 403:
            return RefusedError(
                f"{self.location}: these credentials have no permission to {verb} "
                f"{name or 'all'} ({message}); grant it"
            )
        if status == 501:
            return self._without_conditions()
        if not status:
            return self._unreached(message, debug)
        if (status in PASSING or status >= 500) and not FINAL_CODES.search(text):
            return PassingError(f"status {status}: {message}", ANSWERED)
        return StoreError(f"{self.location}: cannot {verb} {name}: {message} (status {status})")

    def _is_other_server(self, text: str) -> bool:
        """Return whether an error is not one of S3, which says what was not found."""
        match = _STATUS.search(text)
        is_wrong = match is not None and int(match[1]) in (400, 404, 405)
        return self._scheme == "s3" and is_wrong and "<Code>" not in text

    def _unreached(self, message: str, debug: str) -> Exception:
        """Return an error about a server that gave no answer."""
        if certificate := _CERTIFICATE.search(debug):
            return RefusedError(f"{self.location}: {self._about_certificate(certificate[1])}")
        if "InvalidMessage" in debug:
            return RefusedError(
                f"{self.location}: the server there does not use TLS; check its endpoint"
            )
        if "kind: Timeout" in debug:
            return PassingError("no answer")
        cause = _CAUSE.search(debug)
        return PassingError(cause[1] if cause else message)

    def _about_clock(self, message: str) -> Exception:
        """Return an error about a wrong clock. That of a machine that was paused becomes right
        again, and one that was wrong from the start may not."""
        reason = (
            f"the clock of this machine differs too much from that of the bucket ({message}); "
            "set the clock, for example with NTP"
        )
        if self._has_worked:
            return PassingError(reason, remedy="")
        return RefusedError(f"{self.location}: {reason}")

    def _about_certificate(self, reason: str) -> str:
        if reason.startswith(("Expired", "NotValidYet")):
            return f"its certificate is not valid now ({reason}); set the clock, or renew it"
        if self._join is not None and self._join.certificate:
            return (
                f"its certificate is not the one in {self._join.path} ({reason}): it is another "
                "server, or has a new one; use the newest join file that it has written"
            )
        return (
            f"this system does not trust its certificate ({reason}); give a join file with its "
            "`certificate`"
        )

    def _without_conditions(self) -> RefusedError:
        return RefusedError(
            f"{self.location}: this bucket does not support conditional writes "
            "(If-None-Match), without which two syncers could decide at the same "
            "time; use another one"
        )


def _says(error: Exception, words: tuple[str, ...]) -> bool:
    return any(word in str(error) for word in words)


def _config(join: JoinFile) -> dict[str, str]:
    """Return obstore's settings for a join file, so that none comes from the environment."""
    return {
        "access_key_id": join.access_key_id,
        "secret_access_key": join.secret_access_key,
        "session_token": "",
        "skip_signature": "false",
        "region": join.region,
        "aws_endpoint_url_s3": join.server,  # of all variables for it, this one takes precedence
        "virtual_hosted_style_request": "false",
    }
