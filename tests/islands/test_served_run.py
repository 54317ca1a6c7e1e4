"""Islands over the bucket of one's own, whose syncer decides."""

import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from tests.components.test_resume import last
from tests.diloco.toy import config
from tests.islands.by_hand import HandIsland, train
from tests.islands.test_bucket_server import SITE, serving
from tests.islands.test_run import island
from tests.islands.trainees import TOKENS, Trainee, trained
from tests.ports import free_port
from tests.waiting import wait_until
from torchtitan_diloco.components.checkpoint_folder import step_of
from torchtitan_diloco.islands.rules import names
from torchtitan_diloco.islands.runs import Run
from torchtitan_diloco.store import open_store
from torchtitan_diloco.store.errors import RefusedError

STEPS = 36


def test_islands_of_two_sites_train_over_a_bucket_of_ones_own(tmp_path: Path) -> None:
    """The island of the owner founds the run, and that of a site, which may not, joins it."""
    flags = ["--address", "127.0.0.1", "--port", free_port()]
    with serving(tmp_path / "bucket", *flags) as server, ExitStack() as stack:
        server.site()

        def island(login: str, name: str) -> HandIsland:
            store = open_store(server.join_file(login), writes=f"island/{name}/", quiet=True)
            run = stack.enter_context(closing(Run(store, streams=2)))
            return HandIsland(run, name, config(8, delay=1))

        def is_founded() -> bool:
            founder.look()
            decision = founder.machine.decision
            return decision is not None and decision.is_founded

        founder = island("owner", "owner")
        wait_until(is_founded, "the first copies")
        member = island(SITE, f"{SITE}.2")
        train([founder, member], STEPS, [100, 100])
        both = founder.versions.keys() & member.versions.keys()
        assert max(version for _, version in both) > 3
        for key in both:
            assert torch.equal(founder.versions[key], member.versions[key]), key


def test_an_island_of_a_site_that_has_lost_its_machine_continues_from_its_mirror(
    tmp_path: Path,
) -> None:
    """One join file is enough for the run and for the mirror."""
    flags = ["--address", "127.0.0.1", "--port", free_port()]
    with serving(tmp_path / "bucket", *flags) as server, ExitStack() as stack:
        server.site()

        def train(login: str, stop_after: int, **more: object) -> str:
            join_file = server.join_file(login)
            process = island(
                tmp_path,
                login,
                islands__join=join_file,
                islands__begin=1,
                islands__slots=2,
                training__stop_after=stop_after,
                **more,
            )
            return stack.enter_context(process).end()

        train("owner", 4)
        mirror = {"checkpoint__mirror": server.join_file(SITE)}
        output = train(SITE, 8, **mirror)
        assert "mirror: step 8" in output, output
        shutil.rmtree(tmp_path / SITE)
        output = train(SITE, 12, **mirror)
        assert "step 8 was taken from" in output, output
        assert "resumed from" in output
        assert step_of(last(tmp_path / SITE)) == 12
        with closing(open_store(server.join_file(SITE), writes=None, quiet=True)) as store:
            assert {one.name.split("/")[1] for one in store.list(names.MIRROR)} == {SITE}


def test_an_island_that_may_not_found_a_run_waits_for_one_that_may(tmp_path: Path) -> None:
    flags = ["--address", "127.0.0.1", "--port", free_port()]
    with serving(tmp_path / "bucket", *flags) as server:
        server.site()
        total = 40 * 2 * TOKENS
        member, founder = (
            Trainee(server.join_file(login), login, config(8, delay=1), total_tokens=total)
            for login in (SITE, "owner")
        )

        def is_waiting() -> bool:
            link = member.peers._link
            return link is not None and any("may found" in line for line in link.machine.news.lines)

        with trained(member):
            wait_until(is_waiting, "the first island to wait for another one")
            with trained(founder):
                pass
        for name, value in founder.shared.items():
            assert torch.equal(member.shared[name], value), name


def test_an_island_whose_login_is_revoked_ends(tmp_path: Path) -> None:
    """Nothing starts it again. The island of the owner trains on."""
    flags = ["--address", "127.0.0.1", "--port", free_port()]
    with serving(tmp_path / "bucket", *flags) as server:
        server.site()
        first, member = (
            Trainee(
                server.join_file(login),
                name,
                config(8, delay=1),
                total_tokens=10**9,
                step_seconds=0.01,
            )
            for login, name in (("owner", "a"), (SITE, SITE))
        )
        with trained(first):
            member.thread.start()
            wait_until(lambda: member.steps > 20, "the island of the site")
            server.site("--revoke")
            with pytest.raises(RefusedError, match=f"join-{SITE}.toml"):  # nothing restarts it
                member.finish()
            reached = first.steps
            wait_until(lambda: first.steps > reached + 20, "the island of the owner")
            first.stop.set()
    assert first.peers.left
