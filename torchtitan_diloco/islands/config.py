"""Settings of islands: the `[islands]` section, its checks, and the join string in it."""

import base64
import binascii
import hashlib
import ipaddress
import re
import shlex
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from msgspec import Meta

from torchtitan_diloco.base.settings import (
    Mistakes,
    NotNegative,
    Section,
    check_class,
    convert,
    raise_mistakes,
)
from torchtitan_diloco.base.user import UserError, command_line
from torchtitan_diloco.diloco.config import DiLoCoConfig, diloco_mistakes
from torchtitan_diloco.islands.records import LARGEST, Positive
from torchtitan_diloco.islands_store.names import NAME_PATTERN, OWNER
from torchtitan_diloco.store.join_file import read_join_file
from torchtitan_diloco.store.location import BUCKETS, check_location


@dataclass(frozen=True)
class Islands(Section):
    """Workers as separate jobs, which join and leave while the others continue."""

    join: str = field(default="", repr=False)  # contains a password
    """Where islands meet: a folder, the join file of a bucket, or `s3://`, `gs://` or `az://` with
    the login of the environment. Empty: all workers are one job. With islands, each job is one
    worker."""
    name: str = ""
    """Name of this island. A job with the name of an island that has died takes its place."""
    slots: NotNegative = 0
    """Data streams of the run, which limit the number of islands. 0: as many as `begin`."""
    begin: NotNegative = 0
    """Islands that start together. 0: as many as `diloco.workers`."""
    quorum: Positive = 1
    """Smallest number of islands whose updates close a round once its waiting time is over."""
    grace_seconds: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Minimum time that a round, and training, wait for parts. It is longer if
    `diloco.overlap.delay` steps take longer. A round, but not training, also waits for parts that
    usually take longer."""
    slot_seconds: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Seconds of silence of an island after which another island may take its slot. After 5
    seconds, a restarted process of the same island may take it, and rounds do not wait for it."""
    action: Literal["note", "wait_less", "evict"] = "wait_less"
    """Strongest action of this island against one that is repeatedly late or wrong. note: report
    it. wait_less: let rounds close without it. evict: also vote to end it."""
    found: bool = False
    """Continue from the checkpoint in an empty folder or bucket: the checkpoint of a job, or of an
    island whose run has lost its location. Otherwise, that is an error, as the location may only be
    wrong."""
    sync: bool = False
    """Run the syncer of the run, too, beside this island. It goes on if the island ends before the
    run. `islands serve` and `islands.local` run one, and `islands sync` runs one alone."""
    local: NotNegative = 0
    """Start this number of islands on this machine, to try islands. They share the folder `store`
    in `run.folder`, and a syncer runs beside them. 0: none."""


def local_names(count: int) -> list[str]:
    """Return the names of islands that one command starts on this machine."""
    return [f"island-{number}" for number in range(1, count + 1)]


def islands_mistakes(islands: Islands, begin: int) -> Mistakes:
    """Check the settings of an island. `begin`: number of islands that start together."""
    site = ""
    try:
        if is_location(islands.join):
            check_location(islands.join)
            site = site_of(islands.join)
        elif islands.join and not _is_file(islands.join):  # a file need not be here to plan
            Join.parse(islands.join)
    except ValueError as error:
        yield "islands.join", str(error).removeprefix("islands.join = ")
    if islands.name and not re.fullmatch(NAME_PATTERN, islands.name):
        yield (
            "islands.name",
            (
                'must have at most 60 characters, from A-Z, a-z, 0-9, ".", "-" and "_", and begin '
                'with a letter, a digit or "_"'
            ),
        )
    elif islands.name and site and not f"{islands.name}.".startswith(f"{site}."):
        yield (
            "islands.name",
            f"must be {site}, the login in {islands.join}, or begin with it and a dot: give "
            f"{site}.{islands.name}",
        )
    if islands.slots and islands.slots < begin:
        yield (
            "islands.slots",
            (f"must be at least {begin}, the number of islands that start together"),
        )
    if islands.quorum > (slots := islands.slots or begin):
        yield (
            "islands.quorum",
            (f"must be at most {slots}, the number of islands that can train at the same time"),
        )
    if islands.join and islands.local:
        yield "islands.local", "has a store of its own: remove this setting or islands.join"
    if islands.sync and islands.local:
        yield "islands.sync", "islands.local runs the syncer: remove this setting"
    elif islands.sync and not is_location(islands.join):
        yield (
            "islands.sync",
            "is only for islands in a store, such as a folder or a bucket: remove this setting",
        )
    if islands.join and not islands.name:
        yield (
            "islands.name",
            (
                "must name this island: give a name that is unique in the "
                "run, such as that of its site"
            ),
        )


def is_location(join: str) -> bool:
    """Return whether a run is in a store: a folder, a join file of a bucket, or the URL of one."""
    scheme, separator, _ = join.partition("://")
    if separator:
        return scheme in BUCKETS
    if not _FILE.fullmatch(join) or Path(join).suffix == ".txt":
        return False
    with suppress(OSError, ValueError):
        return not _JOIN.fullmatch(Path(join).read_text().strip())
    return True


def site_of(location: str) -> str:
    """Return the login in a join file if it is that of a site, which writes below its names only.
    Otherwise return an empty string."""
    path = Path(location).expanduser()
    if not is_location(location) or not path.is_file():
        return ""
    join = read_join_file(path)
    return join.name if join.prefix and join.name != OWNER else ""


def check_may_decide(location: str) -> None:
    """Raise a UserError if a join file is that of a site, whose login may not write decisions."""
    if site := site_of(location):
        raise UserError(
            f"{location}: the login of {site} may not decide for a run: "
            f"`{command_line('islands')} serve` runs the syncer beside its bucket; to run one "
            "elsewhere, give the join file of the owner"
        )


def run_of(join: str) -> str:
    """Return a short id of the run that `islands.join` names, without a password."""
    if not is_location(join):
        return Join.parse(join).run
    path = Path(join).expanduser()
    place = read_join_file(path).location if path.is_file() else join
    if "://" not in place:
        place = str(path.absolute())
    return f"store-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def login_in(join: str) -> str:
    """Return the login in a join file of a bucket, or nothing for any other location."""
    path = Path(join).expanduser()
    return read_join_file(path).name if "://" not in join and path.is_file() else ""


def own_loop_settings(islands: Islands, config: DiLoCoConfig) -> tuple[Islands, DiLoCoConfig]:
    """Check the settings of an island in your own loop, and return the settings to use."""
    check_class(config, "diloco", DiLoCoConfig)
    begin, mistakes = islands.begin or config.workers, list[tuple[str, str]]()
    has_log = not is_location(islands.join)
    if not islands.join:
        text = (
            "is empty: give a folder, a bucket or a join file, or the join string of a server, or "
            "the file join.txt that it writes"
        )
        mistakes.append(("islands.join", text))
    if islands.local:
        text = "starts nothing in your own loop: remove this setting, and start each island"
        mistakes.append(("islands.local", text))
    if islands.sync:
        text = "starts nothing in your own loop: run `islands sync`, and remove this setting"
        mistakes.append(("islands.sync", text))
    mistakes += [
        *islands_mistakes(islands, begin),
        *diloco_mistakes(config, islands=True, has_log=has_log),
    ]
    raise_mistakes(mistakes, islands=replace(islands, join=""), diloco=config)
    config = replace(config, workers=1)
    if has_log:
        config = replace(config, link=replace(config.link, outer_state="device"))
    return replace(islands, begin=begin, slots=islands.slots or begin), config


def change_commands(islands: Islands, settings: Mapping[str, object]) -> str:
    """Return the commands that change settings of the run, without the password of a string."""
    is_shown = is_location(islands.join) or _is_file(islands.join)
    join = shlex.quote(islands.join) if is_shown else "join.txt"
    command = command_line("islands")
    lines = [f"{command} change {key} {value} --join {join}" for key, value in settings.items()]
    return " && ".join(lines)


def checked_count(name: str, value: Any) -> int:
    """Return a number of tokens or samples as an integer, because users write 1e9."""
    if isinstance(value, int | float) and value > LARGEST:
        raise UserError(
            f"{name} = {value!r}: give at most {LARGEST:.3g}, the largest number in a log"
        )
    try:
        return convert(value, Positive)  # type: ignore[no-any-return]
    except ValueError as error:
        raise UserError(f"{name} = {value!r}: {error}") from error


# --- join string: where the server of a run is, and how to log in to it ---------------------------

RUN_PATTERN = r"[A-Za-z0-9_-]{1,64}"
FORM = "nats+tls://USER:PASSWORD@HOST:PORT[,HOST:PORT...]#RUN[.CERTIFICATE]"
_JOIN = re.compile(
    r"(?P<scheme>nats|nats\+tls)://(?:(?P<user>[^:@/#]+):(?P<password>[^:@/#]+)@)?"
    rf"(?P<addresses>[^@/#]+)#(?P<run>{RUN_PATTERN})(?:\.(?P<certificate>[A-Za-z0-9_-]+))?"
)
_FILE = re.compile(r"[^:@#]+")
"""Pattern of a path. Other text counts as a join string, whose password is not shown, unless such a
file exists."""
HOST_PATTERN = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+"
_ADDRESS = re.compile(rf"(?P<host>{HOST_PATTERN}):(?P<port>[0-9]{{1,5}})")
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name


class RefusedError(UserError):
    """The server refuses this island, or does not match the join string."""


class LoginError(RefusedError):
    """The server does not know the user, or the password is wrong."""


@dataclass(frozen=True)
class Join:
    """Address and login of a server. It contains a password: never log its text."""

    addresses: tuple[str, ...]  # HOST:PORT of the server, or of the servers of a cluster
    run: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = True
    certificate: bytes = b""
    """The only trusted certificate, as DER. Empty: trust the system's, and check the host name."""

    @classmethod
    def parse(cls, text: str) -> "Join":
        """Parse a join string, or a file that contains one."""
        if _is_file(text):
            text = _read_file(text)
        found = _JOIN.fullmatch(text.strip())
        if found is None:
            raise _error(text, f"is not of the form {FORM}")
        addresses = tuple(found["addresses"].split(","))
        for address in addresses:
            _check_address(text, address, tls=found["scheme"] == "nats+tls")
        return cls(
            addresses=addresses,
            run=found["run"],
            user=unquote(found["user"] or ""),
            password=unquote(found["password"] or ""),
            tls=found["scheme"] == "nats+tls",
            certificate=_decode_certificate(text, found["certificate"] or ""),
        )

    def __str__(self) -> str:
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user else ""
        text = f"nats{'+tls' * self.tls}://{login}{','.join(self.addresses)}#{self.run}"
        if self.certificate:
            text += "." + base64.urlsafe_b64encode(self.certificate).decode().rstrip("=")
        return text

    @property
    def is_on_this_machine(self) -> bool:
        return all(is_loopback(address.rpartition(":")[0]) for address in self.addresses)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for checking the server, or None without TLS."""
        if not self.tls:
            return None
        if not self.certificate:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata=self.certificate)
        # Clocks of sites may differ, and the certificate is trusted until the run ends.
        context.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
        return context


def _check_address(text: str, address: str, tls: bool) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise _error(text, f"the address {address!r} is not HOST:PORT")
    if not tls and not is_loopback(found["host"]):
        raise _error(
            text,
            f"{address} is another machine, so the join string must "
            "begin with nats+tls:// for encryption",
        )


def _is_file(text: str) -> bool:
    if _FILE.fullmatch(text):
        return True
    with suppress(OSError):  # a join string is too long for a name
        return Path(text).is_file()
    return False


def _read_file(path: str) -> str:
    problem = ""
    try:
        text = Path(path).read_text()
        if not _JOIN.fullmatch(text.strip()):
            problem = "it contains no complete join string"
    except OSError as error:
        problem = str(error.strerror)
    except ValueError:
        problem = "it is not a text file"
    if problem:
        raise UserError(
            f"islands.join = {path!r}: {problem}; give the join string of the "
            f"server, or the file join.txt that `{command_line('islands')} serve` "
            "writes"
        )
    return text


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _decode_certificate(text: str, encoded: str) -> bytes:
    try:
        certificate = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        if encoded:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate)
    except (binascii.Error, ssl.SSLError, ValueError) as error:
        raise _error(text, "the certificate in it is damaged, and may be incomplete") from error
    return certificate


def _error(text: str, reason: str) -> ValueError:
    """Return an error that shows the join string without its password."""
    shown = f"...@{text.rpartition('@')[2].strip()[:80]}" if "@" in text else "..."
    remedy = (
        f"copy the whole line from the file join.txt that `{command_line('islands')} serve` writes"
    )
    return UserError(f"islands.join = {shown!r}: {reason}; {remedy}")


def explain(error: Exception, address: str, join: Join) -> Exception:
    """Return an error for users about a failure of a connection."""
    text = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError) and not join.certificate:
        return RefusedError(
            f"islands.join: this system does not trust the certificate of {address} "
            f"({error.verify_message}), and the join string contains none, so it "
            "may be incomplete: copy the whole line from the server's join.txt"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusedError(
            f"islands.join: the certificate of {address} is not the one in the join "
            f"string ({error.verify_message}): it is another server, or its folder "
            "was created again; use the join string in the server's current join.txt"
        )
    if isinstance(error, ssl.SSLError) and error.reason:  # else the server has closed it
        return RefusedError(
            f"islands.join: {address} does not start with a TLS handshake "
            f"({error.reason}): set `handshake_first: true` in the tls section of "
            "its configuration"
        )
    if "authorization" in text.lower():
        return LoginError(
            f"islands.join: {address} refuses the user or the password in the join "
            "string: use the newest join string that the server has written for this "
            "site"
        )
    if "permissions violation" in text.lower():
        return RefusedError(
            f"islands.join: this login has no permission for the run ({error}): use "
            "the join string of a run on this server"
        )
    if not join.tls and not isinstance(error, ConnectionRefusedError):
        text += "; a server with TLS needs a join string that begins with nats+tls://"
    return ConnectionError(f"{address}: {text}")
