"""Settings that can change during a run: `islands change KEY VALUE`.

A change is a record. The facts in force at a position in the log are those of the first record with
all changes up to it. An island that joins takes these settings from them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from torchtitan_diloco.base.settings import Fraction, Positive, convert, nearest
from torchtitan_diloco.base.user import UserError
from torchtitan_diloco.diloco.config import CodecName, DiLoCoConfig
from torchtitan_diloco.islands.records import CODEC, MOST_SLOTS, Change, Facts, VoidError

MOST_STEPS = 10**6
SPARSE = "topk"
EVERY, DELAY = "diloco.sync_every", "diloco.overlap.delay"
MIXING, OUTER_LR = "diloco.overlap.mixing", "diloco.outer_optimizer.lr"
TOTAL_TOKENS, QUORUM, SLOTS = "total_tokens", "quorum", "slots"
CHANGEABLE: dict[str, Any] = {
    EVERY: Annotated[int, Meta(ge=1, le=MOST_STEPS)],
    DELAY: Annotated[int, Meta(ge=0, lt=MOST_STEPS)],
    MIXING: Fraction,
    OUTER_LR: Annotated[float, Meta(gt=0, le=100)],
    CODEC: CodecName,
    TOTAL_TOKENS: Positive,
    QUORUM: Positive,
    SLOTS: Annotated[int, Meta(ge=1, le=MOST_SLOTS)],
}


def parse_value(key: str, value: str) -> Any:
    """Return the value of a setting that can be changed, or raise a UserError."""
    if key not in CHANGEABLE:
        raise UserError(
            f"{key} cannot be changed during a run{nearest(key, CHANGEABLE)}; "
            f"these can: {', '.join(CHANGEABLE)}"
        )
    try:
        number = float(value) if CHANGEABLE[key] in (Positive,) else value  # such as 1e9
        return convert(number, CHANGEABLE[key], is_word=True)
    except ValueError as error:
        raise UserError(f"{key} = {value}: {error}") from error


def parse_change(facts: Facts, key: str, value: str) -> Change:
    """Return the record of a change. Raises a UserError if it is not possible."""
    change = Change(run=facts.run, key=key, value=str(parse_value(key, value)))
    try:
        changed(facts, change)
    except VoidError as error:
        raise UserError(f"{key} = {value}: {error}") from error
    return change


def changed(facts: Facts, change: Change) -> Facts:
    """Return the facts after a change. Raises a VoidError if it is not valid."""
    key = change.key
    if key not in CHANGEABLE:
        raise VoidError(f"{key} cannot be changed")
    try:
        value = msgspec.convert(change.value, CHANGEABLE[key], strict=False)
    except msgspec.ValidationError as error:
        raise VoidError(f"{key} = {change.value}: {error}") from error
    if str(value) != change.value:
        raise VoidError(f"{change.value} must be written as {value}")
    settings = {**facts.fingerprints, key: change.value}
    every, delay = (int(settings.get(one, 0)) for one in (EVERY, DELAY))
    if key in (EVERY, DELAY) and delay >= every:
        raise VoidError(f"{DELAY} = {delay} must be smaller than {EVERY} = {every}")
    if key == QUORUM and value > facts.slots:
        raise VoidError(f"the run has {facts.slots} slots")
    if key == SLOTS:
        if value <= facts.slots:
            raise VoidError(
                f"the run has {facts.slots} slots, which cannot be removed: give a larger number"
            )
        return msgspec.structs.replace(facts, slots=value, streams=facts.streams or facts.slots)
    if key == CODEC and SPARSE in (value, facts.codec):
        raise VoidError(
            f"a run cannot change to or from {SPARSE}, which needs a different outer optimizer"
        )
    if key == EVERY:
        before = int(facts.fingerprints.get(EVERY, value))
        cycle = max(1, facts.cycle * value // before)
        return msgspec.structs.replace(facts, fingerprints=settings, cycle=cycle)
    if key == OUTER_LR:
        return msgspec.structs.replace(facts, fingerprints=settings, outer_lr=value)
    if key in (TOTAL_TOKENS, QUORUM):
        return msgspec.structs.replace(facts, **{key: value})
    return msgspec.structs.replace(facts, fingerprints=settings)


def with_settings(config: DiLoCoConfig, settings: Mapping[str, str]) -> DiLoCoConfig:
    """Return the settings of an outer loop with those of the run."""
    overlap, quantization = config.overlap, config.quantization
    codec = convert(settings.get(CODEC, quantization.codec), CodecName, is_word=True)
    return replace(
        config,
        sync_every=int(settings.get(EVERY, config.sync_every)),
        overlap=replace(
            overlap,
            delay=int(settings.get(DELAY, overlap.delay)),
            mixing=float(settings.get(MIXING, overlap.mixing)),
        ),
        quantization=replace(quantization, codec=codec),
    )


def settings_of(facts: Facts) -> dict[str, str]:
    """Return the settings in force that can change."""
    numbers = {TOTAL_TOKENS: facts.total_tokens, QUORUM: facts.quorum, SLOTS: facts.slots}
    settings = {key: value for key, value in facts.fingerprints.items() if key in CHANGEABLE}
    return settings | {key: str(number) for key, number in numbers.items()}
