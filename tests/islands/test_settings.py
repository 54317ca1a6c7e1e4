"""Settings of a run that change while it goes on."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from tests.conftest import REPOSITORY
from tests.diloco.toy import config
from tests.islands.by_hand import newest, open_run, syncer
from tests.islands.test_peers import same
from tests.islands.trainees import TOKENS, Trainee, trained
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.config import load_config
from torchtitan_diloco.config.schema import Config, flat_settings
from torchtitan_diloco.diloco.config import NOT_WITH_ISLANDS, DiLoCoConfig, Overlap
from torchtitan_diloco.diloco.modes import Mode
from torchtitan_diloco.diloco.outer_state import OuterState
from torchtitan_diloco.islands.founding import settings_of
from torchtitan_diloco.islands.merging import outer_optimizer
from torchtitan_diloco.islands.rules.changes import encode_change
from torchtitan_diloco.islands.rules.settings import Settings
from torchtitan_diloco.islands.run_settings import (
    KEYS,
    change_of,
    in_diloco,
    overridden_by_run,
    setting_of,
)

SETTINGS = Settings(
    sync_every=20, delay=2, total_tokens=1000, slots=2, start_with=2, streams=2, block=1
)


def test_the_page_names_all_settings_that_islands_do_not_have() -> None:
    page = (REPOSITORY / "docs/islands-reference.md").read_text()
    (line,) = re.findall(r"^- (.*) are not supported\.", page, re.M)
    named = re.findall(r"`(diloco\.[\w.]+)", line)
    assert named == list(NOT_WITH_ISLANDS)
    values = {"diloco.method": "none", "diloco.beginning.length": "9"}
    for key in named:
        changes = {"islands.join": "store", "islands.name": "a", key: values.get(key, "0.1")}
        with pytest.raises(UserError, match=f"{key} = .* does not work with islands: remove it"):
            load_config("debug", changes)


def test_an_island_names_the_settings_that_its_run_has_instead() -> None:
    chosen = in_diloco(DiLoCoConfig(), SETTINGS)
    assert overridden_by_run(chosen, SETTINGS.total_tokens, SETTINGS) == []
    lines = overridden_by_run(replace(chosen, sync_every=30), 2000, SETTINGS)
    assert [line.partition(",")[0] for line in lines] == [
        "the run has diloco.sync_every = 20",
        "the run has total_tokens = 1000",
    ]
    assert lines[0].endswith("instead of 30: `islands change` changes it")


def test_islands_follow_changes_of_all_kinds_with_equal_bits(tmp_path: Path) -> None:
    """Change H, tau, alpha, the format there and back, the outer learning rate and the length."""
    store = tmp_path / "store"
    chosen = config(8, delay=1)
    codecs = ("fp4_e3m0", "fp32", "fp4_e3m0")
    wanted = [
        ("diloco.quantization.codec", codecs[0]),
        ("diloco.sync_every", "6"),
        ("diloco.overlap.delay", "3"),
        ("diloco.quantization.codec", codecs[1]),
        ("diloco.overlap.mixing", "0.25"),
        ("diloco.outer_optimizer.lr", "0.3"),
        ("diloco.quantization.codec", codecs[2]),
        ("total_tokens", str(250 * 2 * TOKENS)),
    ]
    pair = [
        Trainee(store, name, chosen, total_tokens=10**9, grace=60.0, step_seconds=0.005)
        for name in "ab"
    ]
    sent = list[tuple[int, str]]()
    checksums: list[dict[tuple[int, int], str]] = [{}, {}]
    formats = list[str]()
    """Formats of the parts of fragment 0 of the first island."""

    def watch(one: Trainee, found: dict[tuple[int, int], str]) -> Callable[[int], None]:
        def look(_: int) -> None:
            decision = one.peers.machine.decision
            assert decision is not None
            for number, shared in enumerate(decision.fragments):
                own = one.peers.machine.fragments[number]
                checksum = one.peers._layouts[number].checksum(one.outer.loop.states[number].outer)
                if not own.is_wrong and shared.checksum(own.applied) is not None:
                    found[number, own.applied] = f"{checksum:x}"
                    known = shared.checksum(own.applied)
                    assert known is not None
                    assert int(known, 16) == checksum

        return look

    for one, found in zip(pair, checksums, strict=True):
        one.on_step = watch(one, found)
    look = pair[0].on_step

    def change(step: int) -> None:
        look(step)
        part = pair[0].peers.machine.fragments[0].sent
        if part is not None and formats[-1:] != [part.part.codec]:
            formats.append(part.part.codec)
        if step % 20 == 0 and step <= 20 * len(wanted):
            key, value = wanted[step // 20 - 1]
            with open_run(store) as run:
                content = encode_change(change_of(newest(store).settings, key, value))
                assert run.store.create(f"change/{step:03d}-0123abcd", content)
            sent.append((step, key))

    pair[0].on_step = change
    with syncer(store, tmp_path / "scratch"), trained(*pair):
        pass
    assert len(sent) == len(wanted)
    assert formats[-3:] == list(codecs)
    same(*pair)
    decision = newest(store)
    assert decision.ended
    assert not any(one.fate.is_lost for slot in decision.slots for one in slot.ledgers)
    both = checksums[0].keys() & checksums[1].keys()
    assert len(both) > 20
    assert all(checksums[0][key] == checksums[1][key] for key in both)
    for one in pair:
        used = one.outer.config
        assert (used.sync_every, used.overlap.delay, used.overlap.mixing) == (6, 3, 0.25)
        assert used.quantization.codec == codecs[-1]
        assert one.peers.total_tokens == 250 * 2 * TOKENS
        assert 200 < one.steps < 400
    assert decision.settings.outer_lr == 0.3


def test_alpha_follows_the_tokens_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = list[float]()
    apply = OuterState.apply

    def recorded(
        state: OuterState, copy: Tensor, mode: Mode, share: float = 0.0, **more: bool
    ) -> Tensor:
        shares.append(share)
        return apply(state, copy, mode, share, **more)

    monkeypatch.setattr(OuterState, "apply", recorded)
    chosen = replace(config(0), overlap=Overlap(mixing=0.5, mixing_end=0.1))
    island = Trainee(
        tmp_path / "store", "a", chosen, total_tokens=60 * TOKENS, begin=1, slots=1, grace=60.0
    )
    with syncer(tmp_path / "store", tmp_path / "scratch"), trained(island):
        pass
    mixed = [share for share in shares if share]
    assert len(mixed) > 3
    assert mixed == sorted(mixed, reverse=True)
    assert mixed[0] > 0.4
    assert mixed[-1] == pytest.approx(0.1, abs=0.1)


def settings_founded(chosen: DiLoCoConfig) -> Settings:
    """Return the settings of a run of two islands, of 100 steps."""
    return settings_of(
        chosen,
        replace(Config().islands, begin=2, slots=2),
        "folder",
        total_tokens=100 * 2 * TOKENS,
        tokens_per_step=TOKENS,
        samples_per_step=1,
        facts={},
    )


def test_settings_have_the_names_of_a_configuration() -> None:
    known = flat_settings(Config()).keys()
    assert {key for key in KEYS if "." in key} <= known
    chosen = config(8, delay=1)
    founded = settings_founded(chosen)
    assert in_diloco(Config().diloco, founded) == replace(
        Config().diloco,
        sync_every=chosen.sync_every,
        overlap=chosen.overlap,
        quantization=replace(Config().diloco.quantization, codec=chosen.quantization.codec),
        outer_optimizer=replace(Config().diloco.outer_optimizer, lr=chosen.outer_optimizer.lr),
        delta_norm_limit=chosen.delta_norm_limit,
    )


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (30, 30), (0.25, 25)])
def test_a_warm_up_of_the_outer_rate_is_counted_in_tokens(warmup: float, steps: int) -> None:
    """The warm-up counts the tokens of all islands, as the syncer knows no steps of the run."""
    founded = settings_founded(config(8, lr=0.5, warmup=warmup))
    optimizer = outer_optimizer(founded)
    assert optimizer.warmup == 2 * TOKENS * steps
    assert optimizer.lr_after(2 * TOKENS * 10) == 0.5 * min(1.0, 10 / max(1, steps))
    assert optimizer.lr_after(2 * TOKENS * 30) == 0.5


def test_changes_that_cannot_be_are_refused() -> None:
    for key, value, says in (
        ("sync_every", "3", "cannot be changed during a run; did you mean diloco.sync_every"),
        ("diloco.overlap.delay", "20", "delay 20 must be smaller than 20"),
        ("diloco.quantization.codec", "topk", "give one of fp32, "),
        ("islands.slots", "1", "cannot be removed"),
        ("total_tokens", "0", "total_tokens = 0"),
    ):
        with pytest.raises(UserError, match=says):
            change_of(SETTINGS, key, value)
    assert setting_of("islands.grace_seconds") == "grace"
    assert change_of(SETTINGS, "total_tokens", "1e9").key == "total_tokens"
    change_of(SETTINGS, "diloco.overlap.mixing_end", "none")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("diloco.sync_every", "banana", "give a whole number"),
        ("diloco.sync_every", "1:2", "give a whole number"),
        ("diloco.sync_every", "-1", "give a whole number >= 1"),
        ("diloco.outer_optimizer.lr", "none", "give a number"),
        ("diloco.overlap.mixing_end", "banana", "give a number or none"),
        ("diloco.overlap.delay", "99", "delay 99 must be smaller than 20"),
    ],
)
def test_an_impossible_value_is_named_once(key: str, value: str, says: str) -> None:
    with pytest.raises(UserError) as raised:
        change_of(SETTINGS, key, value)
    assert str(raised.value) == f"{key} = {value}: {says}"
