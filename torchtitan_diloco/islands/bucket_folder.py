"""Folder of a bucket of one's own: its settings, certificates, logins and join files.

| file | holds |
|---|---|
| `serve.json` | where it is served |
| `data/` | all objects: the disk of SeaweedFS |
| `identities.json` | the logins with their secrets and rights, as SeaweedFS reads them |
| `join-LOGIN.toml` | the join file of a login |
| `authority.pem`, `authority-key.pem` | the authority whose certificate is in the join files |
| `server/` | what SeaweedFS reads and logs, written anew at each start |

Only the user who has created the folder can read the secrets in it. A process that serves it holds
its lock; the logins may change meanwhile.
"""

import datetime
import fcntl
import ipaddress
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import msgspec
import tomli_w
from msgspec import Meta

from torchtitan_diloco.base.hardware import write_whole
from torchtitan_diloco.base.user import UserError, install_command
from torchtitan_diloco.islands.rules.names import LOGIN_PATTERN, MIRROR, OWNER, site_prefixes
from torchtitan_diloco.store import Kind

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, GeneralName

BUCKET = "islands"
SYNCER = "syncer"
"""Login of every folder that may write all objects. That of the owner may do everything."""
RESERVED = (OWNER, SYNCER, "anonymous", "admin")
"""Logins that no site can have. For SeaweedFS, `anonymous` is everybody without a login."""
DEFAULT_HOST = "0.0.0.0"
S3_PORT = 8333
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses on which a server is reached from this machine if it listens on all of them."""
HOST_PATTERN = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+"
AUTHORITY_DAYS = 36500
CERTIFICATE_DAYS = 7300
BEFORE = datetime.timedelta(days=30)
"""Time before now from which certificates are valid, for a machine whose clock is slow."""
SiteChange = Literal["add", "renew", "revoke"]
Content = TypeVar("Content")


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Where a folder is served: its `serve.json`."""

    address: str  # that others connect to
    host: str = DEFAULT_HOST  # to listen on
    port: Annotated[int, Meta(ge=1, le=65535)] = S3_PORT


class Credential(msgspec.Struct, rename="camel"):
    access_key: str
    secret_key: str


class Identity(msgspec.Struct):
    """A login, as SeaweedFS reads it."""

    name: str
    credentials: Annotated[list[Credential], Meta(min_length=1)]
    actions: list[str]
    disabled: bool = False


class Identities(msgspec.Struct):
    identities: list[Identity]


class BucketFolder:
    """The folder of a bucket of one's own."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.settings = self._read("serve.json", Settings)

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def identities(self) -> Path:
        return self.path / "identities.json"

    def join_file(self, login: str) -> Path:
        return self.path / f"join-{login}.toml"

    @property
    def endpoint(self) -> str:
        """URL of the server for others."""
        return self._endpoint(self.settings.address)

    def save_settings(self) -> None:
        """Write the settings, and the join files for them."""
        with files_of(self.path), _locked(self.path / "logins.lock"):
            write_secret(self.path / "serve.json", msgspec.json.encode(self.settings))
            for login, secret in self.logins().items():
                self._write_join_file(login, secret)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Hold the lock of the folder. Raise a UserError if another process holds it."""
        with files_of(self.path):
            file = (self.path / "lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path}: another process serves this folder; stop that one first"
                ) from None
            yield

    # --- logins -----------------------------------------------------------------------------------

    def logins(self) -> dict[str, str]:
        """Return the secret of each login that has not been revoked."""
        return {
            each.name: each.credentials[0].secret_key
            for each in self._read("identities.json", Identities).identities
            if not each.disabled
        }

    def sites(self) -> list[str]:
        """Return the logins of sites."""
        return [login for login in self.logins() if login not in (OWNER, SYNCER)]

    def change_site(self, site: str, change: SiteChange) -> Path:
        """Add, renew or revoke the login of a site. Return the path of its join file."""
        if site in RESERVED or not re.fullmatch(LOGIN_PATTERN, site):
            raise UserError(
                f"site {site!r}: give a name of at most 40 characters from A-Z, a-z, 0-9, - and _ "
                f"that does not start with -, and is none of {', '.join(RESERVED)}"
            )
        path = self.join_file(site)
        with files_of(self.path), _locked(self.path / "logins.lock"):
            logins = self.logins()
            if change == "add" and site in logins:
                raise UserError(
                    f"site {site} has a login, and its join file is {path}; --renew gives it a new "
                    "secret, and --revoke removes it"
                )
            if change != "add" and site not in logins:
                names = ", ".join(self.sites()) or "none"
                raise UserError(f"there is no site {site!r}; there are: {names}")
            if change == "revoke":
                self._write_identity(revoked_identity(site))
                path.unlink(missing_ok=True)
            else:
                secret = new_secret()
                self._write_identity(identity_of(site, secret))
                self._write_join_file(site, secret)
        return path

    def _write_identity(self, identity: Identity) -> None:
        """Add an identity, or replace that of the same name."""
        known = self._read("identities.json", Identities).identities
        others = [each for each in known if each.name != identity.name]
        write_identities(self.path, [*others, identity])

    def _write_join_file(self, login: str, secret: str) -> None:
        content = {
            "location": f"s3://{BUCKET}",
            "endpoint": self.endpoint,
            "access_key_id": login,
            "secret_access_key": secret,
            "certificate": (self.path / "authority.pem").read_text(),
            "name": login,
            "prefix": f"{MIRROR}{login}/",
            "kind": str(Kind.NEAR),
        }
        if login == SYNCER:  # it runs on this machine, and writes everywhere
            host = self.settings.host
            content |= {"endpoint": self._endpoint(LOOPBACK.get(host, host)), "prefix": ""}
        write_secret(self.join_file(login), tomli_w.dumps(content).encode())

    def _endpoint(self, host: str) -> str:
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"https://{host}:{self.settings.port}"

    # --- the server's files -----------------------------------------------------------------------

    def certify(self) -> "Files":
        """Write a new certificate of the server, which the authority signs."""
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificate

        try:
            certificate = load_pem_x509_certificate((self.path / "authority.pem").read_bytes())
            key = load_pem_private_key((self.path / "authority-key.pem").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.path}: authority.pem or authority-key.pem cannot be read ({error}); "
                "restore both, or serve a new folder"
            ) from error
        assert isinstance(key, EllipticCurvePrivateKey)
        hosts = {self.settings.address, self.settings.host, "localhost", *LOOPBACK.values()}
        signed = make_certificate(
            BUCKET,
            days=CERTIFICATE_DAYS,
            hosts=hosts.difference(LOOPBACK),
            by=Signed(certificate, key),
        )
        return signed.write(self.server, "s3")

    def _read(self, name: str, kind: type[Content]) -> Content:
        path = self.path / name
        try:
            with files_of(self.path):
                if not path.exists():
                    raise UserError(
                        f"{self.path} is not the folder of a bucket, as it has no {name}; give the "
                        "FOLDER of `islands serve`"
                    )
                return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{path} is damaged ({error}); restore it, or serve a new folder"
            ) from error


def open_folder(
    path: Path, *, address: str | None, host: str | None, port: int | None
) -> BucketFolder:
    """Return the folder at a path, which is filled if it is new or empty.

    `address`, `host`, `port`: settings that differ from those of the folder, or from the defaults.
    They are kept by `save_settings`, once the server has started with them.
    """
    if address is not None and not re.fullmatch(HOST_PATTERN, address):
        raise UserError(
            f"--address {address!r}: give the name or address at which sites reach this machine, "
            "without a port, and IPv6 in brackets"
        )
    if host is not None and not _is_ip(host):
        raise UserError(
            f"--host {host!r}: give an IP address of this machine, such as 0.0.0.0 or :: for all "
            "of them"
        )
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"--port {port}: give a number from 1 to 65535")
    with files_of(path):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; give a new folder")
        if not (path / "serve.json").exists():
            if path.exists() and any(path.iterdir()):
                raise UserError(
                    f"{path} has files, but is not the folder of a bucket; give a new one"
                )
            if address is None:
                raise UserError(
                    "--address is missing; give the name or address at which sites reach this "
                    "machine"
                )
            _fill(path.absolute(), Settings(address))
    folder = BucketFolder(path)
    settings = folder.settings
    folder.settings = Settings(
        address or settings.address, host or settings.host, port or settings.port
    )
    return folder


def _fill(path: Path, settings: Settings) -> None:
    """Fill a new folder. `serve.json` is the last file."""
    authority = make_certificate(f"{BUCKET} authority", days=AUTHORITY_DAYS)
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    authority.write(path, "authority")
    write_identities(path, [identity_of(login, new_secret()) for login in (OWNER, SYNCER)])
    write_secret(path / "serve.json", msgspec.json.encode(settings))


def new_secret() -> str:
    return secrets.token_urlsafe(30)


def identity_of(login: str, secret: str) -> Identity:
    return Identity(login, [Credential(login, secret)], actions=actions_of(login))


def revoked_identity(login: str) -> Identity:
    """Return the identity that takes a login its rights.

    SeaweedFS keeps an identity that is missing when it reads them again. It is therefore given
    another secret, which nobody has.
    """
    return Identity(login, [Credential(login, new_secret())], actions=[], disabled=True)


def write_identities(path: Path, identities: list[Identity]) -> None:
    """Write identities into a folder, as SeaweedFS reads them."""
    content = msgspec.json.encode(Identities(identities))
    write_secret(path / "identities.json", msgspec.json.format(content, indent=1))


def actions_of(login: str) -> list[str]:
    """Return what SeaweedFS allows a login."""
    if login == OWNER:
        return ["Admin"]
    reads = [f"Read:{BUCKET}", f"List:{BUCKET}"]
    if login == SYNCER:
        return [*reads, f"Write:{BUCKET}"]
    return [*reads, *(f"Write:{BUCKET}/{prefix}*" for prefix in site_prefixes(login))]


# --- certificates ---------------------------------------------------------------------------------


class Files(NamedTuple):
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Signed(NamedTuple):
    """A certificate with its key."""

    certificate: "Certificate"
    key: "EllipticCurvePrivateKey"

    def write(self, folder: Path, name: str) -> Files:
        """Write both into a folder."""
        from cryptography.hazmat.primitives import serialization

        pem = serialization.Encoding.PEM
        files = Files(folder / f"{name}.pem", folder / f"{name}-key.pem")
        key = self.key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_secret(files.key, key)
        write_secret(files.certificate, self.pem())
        return files

    def pem(self) -> bytes:
        """Return the certificate alone."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.certificate.public_bytes(Encoding.PEM)


def make_certificate(
    name: str, *, days: int, hosts: Collection[str] = (), by: Signed | None = None
) -> Signed:
    """Return a new certificate of an authority, or of a server and client that it signs.

    `hosts`: names and addresses of the server. `by`: the authority. None makes a new one.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    is_authority = by is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )
    if by is not None:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
    if hosts:
        names = [_host_name(host.strip("[]")) for host in sorted(hosts)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return Signed(builder.sign(by.key if by else key, hashes.SHA256()), key)


def _host_name(host: str) -> "GeneralName":
    from cryptography import x509

    return x509.IPAddress(ipaddress.ip_address(host)) if _is_ip(host) else x509.DNSName(host)


def check_cryptography() -> None:
    """Raise a UserError if certificates cannot be made."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UserError(f"install cryptography: {install_command('islands')}") from None


# --- files ----------------------------------------------------------------------------------------


def write_secret(path: Path, content: bytes) -> None:
    """Write a file atomically that only this user can read."""
    write_whole(path, content, is_secret=True)


@contextmanager
def files_of(folder: Path) -> Iterator[None]:
    """Raise errors about files of a folder that name it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder}: {error.filename or folder}: {error.strerror}; give a folder that this user "
            "can read and write"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
