"""A bucket as a store: S3, GCS, Azure, and services with their protocols, through obstore."""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from torchtitan_diloco.store.errors import (
    DamagedError,
    PassingError,
    RefusedError,
    StoreError,
)
from torchtitan_diloco.store.store import MOST_RAW_BYTES, Backend, Listed, Raw

if TYPE_CHECKING:
    from obstore.store import ObjectStore

ANSWER_SECONDS = 60
"""Seconds for an attempt, including its content."""
CONNECT_SECONDS = 5
"""Seconds to connect."""
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
WRONG_CLOCK = ("RequestTimeTooSkewed", "date header too old", "iat and exp")
"""Messages of S3, Azure and Google about a wrong clock."""
WRONG_LOGIN = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
    *("AuthenticationFailed", "invalid_grant", "invalid_client"),
)
NO_LOGIN = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""Endpoints that provide credentials if none are given."""
PASSING = {408, 425, 429, 500, 502, 503, 504}
LOGIN_REMEDY = {
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "set GOOGLE_SERVICE_ACCOUNT to the path of a key",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_STATUS = re.compile(r"status code: (\d{3})")
_SAID = re.compile(r"<(?:Message|Code)>([^<]{1,200})")


class Bucket(Backend):
    """A bucket, below a path in it."""

    def __init__(self, location: str, credentials: Mapping[str, str]) -> None:
        self.location = location
        self._scheme = location.partition("://")[0]
        endpoints = [
            credentials.get("endpoint", ""),
            *(os.environ.get(key, "") for key in ENDPOINTS),
        ]
        config: dict[str, Any] = dict(credentials)
        try:
            self._store: ObjectStore = from_url(
                location,
                config=config or None,  # type: ignore[call-overload]
                client_options={
                    "timeout": f"{ANSWER_SECONDS}s",
                    "connect_timeout": f"{CONNECT_SECONDS}s",
                    "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
                },
                retry_config={"max_retries": 0},  # attempts.py repeats, and says so
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise RefusedError(f"{location}: {reason}; {LOGIN_REMEDY[self._scheme]}") from error

    def create(self, name: str, content: bytes, seconds: float) -> bool:
        try:
            obstore.put(self._store, name, content, mode="create")
        except AlreadyExistsError:
            stored = self.get(name, seconds)
            if stored is None:  # deleted meanwhile, or another writer is about to create it
                raise PassingError("another writer is writing it") from None
            return stored.content == content
        except NotImplementedError as error:
            raise self._without_conditions() from error
        except (BaseError, OSError) as error:
            raise self._explained("create", name, error) from error
        return True

    def replace(self, name: str, content: bytes, seconds: float) -> None:  # noqa: ARG002
        try:
            obstore.put(self._store, name, content, use_multipart=False)
        except (BaseError, OSError) as error:
            raise self._explained("replace", name, error) from error

    def get(self, name: str, seconds: float) -> Raw | None:  # noqa: ARG002
        try:
            answer = obstore.get(self._store, name)
            if (size := answer.meta["size"]) > MOST_RAW_BYTES:
                raise DamagedError(
                    f"{self.location}: {name} has {size} bytes, and objects of "
                    f"a store have at most {MOST_RAW_BYTES}; delete it"
                )
            return Raw(bytes(answer.bytes()), answer.meta["last_modified"].timestamp())
        except FileNotFoundError as error:
            if _says(error, NO_BUCKET):
                raise self._explained("get", name, error) from error
            return None
        except (BaseError, OSError) as error:
            raise self._explained("get", name, error) from error

    def list(self, prefix: str, after: str, seconds: float) -> list[Listed]:  # noqa: ARG002
        folder, _, start = prefix.rpartition("/")  # a bucket lists whole segments
        offset = max(after, prefix[:-1]) if start else after
        try:
            objects = obstore.list(
                self._store, folder or None, offset=offset or None, chunk_size=1000
            ).collect()
        except (BaseError, OSError) as error:
            raise self._explained("list", prefix, error) from error
        return sorted(
            Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())
            for meta in objects
            if meta["path"].startswith(prefix) and meta["path"] > after
        )

    def delete(self, name: str, seconds: float) -> None:  # noqa: ARG002
        try:
            obstore.delete(self._store, name)
        except FileNotFoundError as error:
            if _says(error, NO_BUCKET):
                raise self._explained("delete", name, error) from error
        except (BaseError, OSError) as error:
            raise self._explained("delete", name, error) from error

    # --- what may fail ----------------------------------------------------------------------------

    def _explained(self, verb: str, name: str, error: Exception) -> Exception:
        text = str(error).partition("\n\nDebug source:")[0]
        match = _STATUS.search(text)
        status = int(match[1]) if match else 0
        said = ": ".join(_SAID.findall(text)) or text.rpartition(" - ")[2]
        said = " ".join(said.split())[:300]
        remedy = LOGIN_REMEDY[self._scheme]
        if _says(error, NO_BUCKET):
            return RefusedError(
                f"{self.location}: there is no such bucket ({said}); create it, "
                "or check its name, region and endpoint"
            )
        if _says(error, WRONG_CLOCK):
            return RefusedError(
                f"{self.location}: the clock of this machine differs too much from "
                f"that of the bucket ({said}); set the clock, for example with NTP"
            )
        if _says(error, NO_LOGIN):
            return RefusedError(f"{self.location}: no credentials were found; {remedy}")
        if status == 401 or _says(error, WRONG_LOGIN):
            return RefusedError(f"{self.location}: the credentials were refused ({said}); {remedy}")
        if status == 403:
            return RefusedError(
                f"{self.location}: these credentials have no permission to {verb} "
                f"{name} ({said}); grant it"
            )
        if status == 501:
            return self._without_conditions()
        if status in PASSING or not status:
            return PassingError(f"status {status}: {said}" if status else said)
        return StoreError(f"{self.location}: cannot {verb} {name}: {said} (status {status})")

    def _without_conditions(self) -> RefusedError:
        return RefusedError(
            f"{self.location}: this bucket does not support conditional writes "
            "(If-None-Match), without which two syncers could decide at the same "
            "time; use another one"
        )


def _says(error: Exception, words: tuple[str, ...]) -> bool:
    return any(word in str(error) for word in words)
