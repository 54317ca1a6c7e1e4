"""Address of an https server, with a login: the line in a join file."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from torchtitan_diloco.store.errors import RefusedError

FORM = "https://LOGIN:PASSWORD@HOST:PORT/#CERTIFICATE"
HTTPS_PORT = 443
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
MOST_LINE = 4096


@dataclass(frozen=True)
class Address:
    """Address and login of a server. It contains a password: never log its line."""

    host: str
    port: int = HTTPS_PORT
    path: str = ""
    """Path in front of the server's paths, if another server forwards requests to it."""
    login: str = ""
    password: str = field(default="", repr=False)
    fingerprint: str = ""
    """SHA-256 of the only trusted certificate, in hexadecimal. Empty: the certificate must be one
    that this system trusts, for this host."""

    @classmethod
    def parse(cls, line: str) -> "Address":
        try:
            parts = urlsplit(line.strip())
            host = parts.hostname or ""
            port = parts.port or HTTPS_PORT
        except ValueError as error:
            raise _error(line, str(error)) from None
        if parts.scheme != "https" or not host or parts.query:
            raise _error(line, f"is not of the form {FORM}")
        if parts.fragment and not _FINGERPRINT.fullmatch(parts.fragment):
            raise _error(
                line, "its certificate does not have 64 hexadecimal digits: it may be incomplete"
            )
        return cls(
            host=host,
            port=port,
            path=parts.path.rstrip("/"),
            login=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            fingerprint=parts.fragment,
        )

    @property
    def line(self) -> str:
        """Content of a join file."""
        login = ""
        if self.login:
            login = f"{quote(self.login, safe='')}:{quote(self.password, safe='')}@"
        fingerprint = f"#{self.fingerprint}" if self.fingerprint else ""
        return f"https://{login}{self.place}/{fingerprint}"

    @property
    def place(self) -> str:
        """Host, port and path, to show to users."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}{self.path}"


def read_join_file(path: Path) -> Address:
    """Return the address in a file."""
    try:
        with path.open("rb") as file:
            line = file.read(MOST_LINE).decode()
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; give a join file that can be read") from None
    except ValueError:
        line = ""
    if not line.strip().startswith("https://"):
        raise RefusedError(
            f"{path}: it contains no line {FORM}; give a folder, or a join file "
            "written by `islands serve`"
        )
    return Address.parse(line)


def _error(line: str, reason: str) -> RefusedError:
    """Return an error that shows an address without its password."""
    shown = line.strip().rpartition("@")[2][:80]
    return RefusedError(f"{shown!r}: {reason}; copy the whole line from a join file")
