"""Whether a TCP address can be reached from here: its name, the route to it, and its port."""

import socket
import struct
import time
from contextlib import closing, suppress
from ipaddress import ip_address

from torchtitan_diloco.base.hardware import interfaces
from torchtitan_diloco.base.user import UserError, command_line

PATIENCE = 5.0
"""Seconds in which a connection must open, and the other end answer."""
PROBE = struct.pack("!Q", 1) + b"."
"""Message that `doctor` answers with `DOCTOR`, and a store of torchrun not at all."""
DOCTOR = b"."


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an option."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--endpoint {address}: give HOST:PORT, such as node0:29500")
    return host.strip("[]") or "localhost", int(port)


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses that a name has."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"{error.strerror}: give the IP address, or add the name to /etc/hosts"
        ) from error
    return [*dict.fromkeys(str(address[0]) for *_, address in answers)]


def route(host: str, port: int) -> str:
    """Return the address of this machine, and its interface, from which packets go there."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as asking:
            asking.connect(target)  # sends nothing
            source = str(asking.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{error.strerror}: start the VPN, or add a route to {target[0]}"
        ) from error
    names = [name for name, address in interfaces().items() if address == source]
    if not names:
        names = ["loopback" if ip_address(source.partition("%")[0]).is_loopback else "IPv6"]
    return f"{source} ({', '.join(names)})"


def dial(host: str, port: int) -> float:
    """Return the seconds until a connection is open."""
    started = time.perf_counter()
    try:
        connection = socket.create_connection((host, port), PATIENCE)
    except ConnectionRefusedError as error:
        raise UserError(
            "nothing listens there: start the first node, or run "
            f"`{command_line('doctor')} --endpoint :{port} --listen` there to test the connection"
        ) from error
    except OSError as error:
        reason = error.strerror or "no answer"
        raise UserError(f"{reason}: open the port in firewalls, or correct the address") from error
    seconds = time.perf_counter() - started
    connection.close()
    return seconds


def is_doctor(host: str, port: int, patience: float = PATIENCE) -> bool:
    """Return whether `doctor` listens, and not a store of torchrun. Raise an error for any other
    program."""
    answer = b""
    with socket.create_connection((host, port), patience) as other:
        other.sendall(PROBE)
        with suppress(ConnectionError, TimeoutError):
            answer = other.recv(1)
    if answer not in (b"", DOCTOR):
        raise UserError(f"another program uses port {port}: use another port")
    return answer == DOCTOR
