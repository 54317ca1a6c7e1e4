"""Settings that are proposed when the transfers of a cycle do not fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_diloco.diagnosis.admission import MARGIN, settings_that_fit
from torchtitan_diloco.diloco.codecs import bits_per_parameter, build_codec
from torchtitan_diloco.diloco.config import CodecName, DiLoCoConfig, Overlap, Quantization
from torchtitan_diloco.islands.changes import changed, parse_change, with_settings
from torchtitan_diloco.islands.config import Islands, change_commands
from torchtitan_diloco.islands.records import Facts


def bits(config: DiLoCoConfig) -> float:
    return bits_per_parameter(build_codec(config.quantization))


@given(
    every=st.integers(2, 400),
    delay=st.integers(0, 5),
    codec=st.sampled_from(["fp32", "int8", "fp4_e3m0", "topk"]),
    fragments=st.integers(1, 24),
    cycles=st.floats(1.0, 300.0, exclude_min=True),
    step=st.floats(0.01, 10.0),
)
def test_the_proposed_settings_fit_and_islands_can_change_to_them(
    every: int, delay: int, codec: CodecName, fragments: int, cycles: float, step: float
) -> None:
    config = replace(
        DiLoCoConfig(),
        sync_every=every,
        overlap=replace(Overlap(), delay=min(delay, every - 1)),
        quantization=replace(Quantization(), codec=codec),
    )
    transfers = cycles * every * step
    found = settings_that_fit(config, fragments, transfers, step)
    assert found
    fingerprints = {
        "diloco.sync_every": str(every),
        "diloco.overlap.delay": str(config.overlap.delay),
        "diloco.quantization.codec": codec,
    }
    facts = Facts(
        run="r",
        slots=2,
        begin=2,
        total_tokens=10**9,
        cycle=1000,
        outer_lr=1.0,
        checksums=("v0",),
        fingerprints=fingerprints,
    )
    for key, value in found.items():
        facts = changed(facts, parse_change(facts, key, str(value)))
    new = with_settings(config, facts.fingerprints)
    seconds = transfers * bits(new) / bits(config)
    assert MARGIN * seconds <= new.sync_every * step * 1.0001


def test_tau_rises_first_then_bits_fall_then_h_rises() -> None:
    config = DiLoCoConfig(sync_every=50, quantization=Quantization("fp32"))
    often = settings_that_fit(config, 5, 60.0, 1.0)
    assert often == {"diloco.overlap.delay": 4, "diloco.quantization.codec": "int8"}
    most = settings_that_fit(config, 5, 2000.0, 1.0)
    assert most["diloco.quantization.codec"] == "fp4_e3m0"
    assert most["diloco.sync_every"] == 400
    assert settings_that_fit(config, 5, 2e6, 1.0) == {"diloco.sync_every": 2_400_000}


def test_commands_show_no_password() -> None:
    secret = "nats+tls://island:secret@host:4222#run"
    found = change_commands(Islands(join=secret), {"diloco.sync_every": 80, "slots": 3})
    assert "secret" not in found
    one, other = found.split(" && ")
    assert one.endswith("islands change diloco.sync_every 80 --join join.txt")
    assert other.endswith("islands change slots 3 --join join.txt")
    assert change_commands(Islands(join="runs/my.txt"), {"slots": 3}).endswith("--join runs/my.txt")


@pytest.mark.parametrize("codec", ["topk", "fp4_e3m0"])
def test_only_h_is_left_to_change(codec: CodecName) -> None:
    config = DiLoCoConfig(sync_every=10, quantization=Quantization(codec))
    found = settings_that_fit(config, 1, 30.0, 1.0)
    assert "diloco.quantization.codec" not in found
    assert found["diloco.sync_every"] == 40
