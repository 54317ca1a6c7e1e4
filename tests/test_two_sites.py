"""The commands of docs/islands.md and docs/launching.md, run at two sites behind routers with NAT.

Commands are taken from the pages. Added are only settings that make the run small.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from benchmarks.network import ENVIRONMENT, Program, enter
from tests.conftest import REPOSITORY
from tests.network import Sites, built
from tests.processes import FORKS
from tests.waiting import wait_until
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.export.weights import open_saved
from torchtitan_diloco.islands.seaweed import find_weed

PATIENCE = 400
STEPS = 9000
"""Enough for site B to come back before site A has trained all of them. Then they become fewer."""
MORE_STEPS = 150
"""Steps of both that are left then: more than they train while the length is changed."""
SMALL: dict[str, Any] = {
    "config": "debug",
    "parallel.fsdp": 1,
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "training.sequence_length": 32,
    "training.batch_size": 8,
    "lr_schedule.warmup": 2,
    "diloco.sync_every": 4,
    "validation.sequences": 8,
    "metrics.boards": "none",
    "metrics.log_every": 5,
    "checkpoint.every_minutes": 0,
}
LINK_PORT = 8443
"""Port that leads to the bucket over a long link."""
WIREGUARD_GO = """mkdir -p /run/wireguard
mount -t tmpfs none /run/wireguard
wireguard-go -f wg0 &
trap 'kill %1' EXIT
until [ -S /run/wireguard/wg0.sock ]; do sleep 0.05; done"""


OWN = ("islands.md", "A bucket of your own")
PROVIDER = ("islands.md", "A provider's bucket")
ONE_WORLD = ("launching.md", "One world")
"""Pages, and their sections."""


def section_of(page: str, section: str) -> str:
    text = (REPOSITORY / "docs" / page).read_text()
    return text.split(f"\n## {section}\n")[1].split("\n## ")[0]


def commands(place: str, page: str, section: str) -> list[str]:
    """Return the commands that a section of a page has for a place, such as `site-a$`."""
    text = section_of(page, section).replace("\\\n", " ")
    found = re.findall(rf"^{re.escape(place)} (.*)$", text, re.M)
    assert found, f"docs/{page} has no command of {place}"
    return found


def command_with(word: str, place: str, page: str, section: str) -> str:
    """Return the command of a place that has this word."""
    (found,) = (one for one in commands(place, page, section) if word in one)
    return found


class Console:
    """A program at a place, with a folder of its own."""

    program: Program

    def __init__(self, sites: Sites, place: str, folder: Path) -> None:
        self.sites = sites
        self.place = place
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def start(self, command: str, **settings: object) -> None:
        """Start a command of the page; settings are added to a training."""
        if "run_train.sh" in command:
            settings = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
            words = [f"--{key} {value}" for key, value in settings.items()]
            command = " ".join(["exec env", command.replace("./", f"{REPOSITORY}/"), *words])
        module = f"exec {sys.executable} -m torchtitan_diloco "
        command = command.replace(".venv/bin/torchtitan-diloco ", module)
        self.program = self.sites.launch(
            Sites.PLACES.index(self.place),
            ["bash", "-c", f"cd {self.folder}; {command}"],
            self.folder / "console.txt",
            PATH=ENVIRONMENT["PATH"],
            PYTHON=sys.executable,
        )

    def wait_for(self, pattern: str) -> None:
        self.wait_until(lambda: bool(self.program.line(pattern)) or not self.program.running)
        assert self.program.line(pattern), self.program.printed()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        wait_until(reached, f"what {self.place} does", self.program.log, PATIENCE)

    def finish(self) -> None:
        assert self.program.wait(PATIENCE) == 0, self.program.printed()

    @property
    def step(self) -> int:
        steps = re.findall(r"^step +(\d+)(?:/|  run)", self.program.printed(), re.M)
        return max(map(int, steps), default=0)


@pytest.fixture
def sites() -> Iterator[Sites]:
    with built(Sites()) as network:
        yield network


def refused(holder: int, address: str, port: int) -> None:
    enter(holder)
    with pytest.raises(OSError, match=r"timed out|refused|unreachable"):
        socket.create_connection((address, port), timeout=2)


def check_that_no_site_reaches_the_other(sites: Sites) -> None:
    for site, other in (("a", "b"), ("b", "a")):
        given = sites.place(f"site-{site}").pid, Sites.PUBLIC[other], 29500
        process = FORKS.Process(target=refused, args=given, daemon=True)
        process.start()
        process.join()
        assert process.exitcode == 0


def need_seaweed() -> None:
    """Skip a test if what `islands serve` needs is missing."""
    for module in ("obstore", "cryptography"):
        pytest.importorskip(module)
    try:
        find_weed()
    except UserError as error:
        pytest.skip(str(error))


def serve(sites: Sites, folder: Path, options: str = "") -> Console:
    """Serve a bucket, as the page says."""
    need_seaweed()
    server = Console(sites, "server", folder)
    command = command_with("islands serve", "server$", *OWN)
    server.start(command.replace("server.example.org", Sites.PUBLIC["server"]) + options)
    server.wait_for("join files: ")
    return server


def train_lose_and_return(
    sites: Sites, consoles: list[Console], trains: list[str], **settings: object
) -> None:
    """Site B is killed and started again; site A trains on. Then the run is made shorter."""
    a, b = consoles
    settings |= {"training__steps": STEPS, "checkpoint__every": 20}
    for console, train in zip(consoles, trains, strict=True):
        console.start(train, **settings)
    b.wait_for("checkpoint of step 20")
    b.program.process.kill()
    reached = a.step
    a.wait_until(lambda: a.step > reached + 10)
    b.start(trains[1], **settings)
    b.wait_for("resumed from")
    b.wait_until(lambda: b.step > 50)
    change = Console(sites, "site-a", a.folder.with_name("change"))
    step_tokens = SMALL["training.batch_size"] * SMALL["training.sequence_length"]
    tokens = step_tokens * (a.step + b.step + MORE_STEPS)
    (join,) = re.findall(r"--islands.join (\S+)", trains[0])
    command = command_with("islands change diloco.sync_every", "$", "islands.md", "Change the run")
    command = command.partition("#")[0].replace("diloco.sync_every 50", f"total_tokens {tokens}")
    change.start(command.replace("LOCATION", str(a.folder / join)))
    for console in (change, *consoles):
        console.finish()
    check_that_both_have_the_same_model(consoles)


@pytest.mark.long
def test_islands_over_a_bucket_of_ones_own(sites: Sites, tmp_path: Path) -> None:
    """The island of the owner begins the run. That of the other site has a login of its own."""
    check_that_no_site_reaches_the_other(sites)
    server = serve(sites, tmp_path / "server")
    site = Console(sites, "server", tmp_path / "server")
    site.start(command_with("islands site", "server$", *OWN))
    site.finish()
    consoles = [Console(sites, f"site-{site}", tmp_path / site) for site in ("a", "b")]
    for console, login in zip(consoles, ("owner", "b"), strict=True):
        shutil.copy(server.folder / f"bucket/join-{login}.toml", console.folder)
    trains = [command_with("run_train.sh", f"{one.place}$", *OWN) for one in consoles]
    train_lose_and_return(sites, consoles, trains)
    server.program.process.terminate()
    server.finish()


@pytest.mark.long
def test_islands_over_a_bucket_of_a_provider(sites: Sites, tmp_path: Path) -> None:
    """Each call takes 50 ms or more, and the syncer runs at a site. SeaweedFS takes the place of
    the provider, and the join file is that of the page."""
    server = serve(sites, tmp_path / "server", " --no-syncer")
    link = Console(sites, "server", tmp_path / "link")
    link.start(f"exec {sys.executable} -m tests.slow_link {LINK_PORT} 8333 50")
    link.wait_for("listening")
    owner = tomllib.loads((server.folder / "bucket/join-owner.toml").read_text())
    (block,) = re.findall(r"^```toml\n(.*?)^```", section_of(*PROVIDER), re.M | re.S)
    join = tomllib.loads(block)
    assert join["location"] == "s3://my-bucket/run-1"
    join["location"] = "s3://islands/run-1"
    join["endpoint"] = owner["endpoint"].replace(":8333", f":{LINK_PORT}")
    for key in ("access_key_id", "secret_access_key", "certificate"):
        join[key] = owner[key]
    join["kind"] = "cloud"  # a provider is recognized by the name in its endpoint
    consoles = [Console(sites, f"site-{site}", tmp_path / site) for site in ("a", "b")]
    for console in consoles:
        (console.folder / "join.toml").write_text(tomli_w.dumps(join))
    trains = [command_with("run_train.sh", f"{one.place}$", *PROVIDER) for one in consoles]
    trains = [train.replace("s3://my-bucket/run-1", "join.toml") for train in trains]
    rounds = {"diloco__sync_every": 60, "diloco__overlap__delay": 30}  # of several seconds
    train_lose_and_return(sites, consoles, trains, **rounds)
    server.program.process.terminate()
    server.finish()


@pytest.mark.long
def test_one_world_over_wireguard(sites: Sites, tmp_path: Path) -> None:
    """Site B is killed and started again; site A waits for it."""
    consoles = [Console(sites, f"site-{site}", tmp_path / site) for site in ("a", "b")]
    set_up_wireguard(sites, tmp_path)
    settings = {"training__steps": 40, "checkpoint__every": 10}
    for console in consoles:
        (train,) = commands(f"{console.place}$", *ONE_WORLD)
        console.start(train, **settings)
    a, b = consoles
    b.wait_for("checkpoint of step 20")
    b.program.process.kill()
    a.wait_for("rank 1 was lost|worker 1")
    b.start(train, **settings)
    for console in consoles:
        console.finish()
        assert "resumed from" in console.program.printed()
    check_that_both_have_the_same_model(consoles)


def set_up_wireguard(sites: Sites, folder: Path) -> None:
    """Run the commands of the page. A kernel without WireGuard gets wireguard-go in its place."""
    if os.geteuid() or shutil.which("wg", path=ENVIRONMENT["PATH"]) is None:
        pytest.skip("needs root and the wg command (Debian: wireguard-tools)")
    probe = [*sites.inside(sites.switch), "ip", "link", "add", "wg0", "type", "wireguard"]
    in_kernel = subprocess.run(probe, capture_output=True, env=ENVIRONMENT).returncode == 0
    if not in_kernel and shutil.which("wireguard-go", path=ENVIRONMENT["PATH"]) is None:
        pytest.skip("needs WireGuard in the kernel, or wireguard-go")
    tunnels = [Console(sites, f"site-{site}", folder / f"tunnel-{site}") for site in ("a", "b")]
    scripts = []
    keys = {}
    for tunnel, name in zip(tunnels, ("KEY_OF_A", "KEY_OF_B"), strict=True):
        make_key, *lines = commands(f"{tunnel.place}#", *ONE_WORLD)
        tunnel.start(make_key)
        tunnel.finish()
        keys[name] = tunnel.program.printed().strip()
        scripts.append("\n".join([*lines, "wg show wg0"]))
    for tunnel, script in zip(tunnels, scripts, strict=True):
        for name, key in keys.items():
            script = script.replace(name, key)
        if not in_kernel:
            script = script.replace("ip link add wg0 type wireguard", WIREGUARD_GO)
            script = f'unshare --mount bash -ec "{script}\nwait"'
        tunnel.start(script)
    for tunnel in tunnels:
        tunnel.wait_for("peer: ")


def check_that_both_have_the_same_model(consoles: list[Console]) -> None:
    one, other = (open_saved(console.folder / "runs/1b") for console in consoles)
    ours = one.model.state_dict()
    theirs = other.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
