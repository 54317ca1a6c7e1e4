"""Parts that are left out of a version: not finite, or with an unusual norm."""

import math

import msgspec
import pytest

from tests.islands.rules.desk import A, B, C, Desk, founded, round_of_all
from torchtitan_diloco.islands.rules.changes import Set
from torchtitan_diloco.islands.rules.decision import (
    SICK,
    Fate,
)
from torchtitan_diloco.islands.rules.rounds import VERSIONS_JUDGED_BY
from torchtitan_diloco.islands.rules.wrong_parts import WRONG_IN_A_ROW


def test_an_outer_step_that_is_not_finite_is_not_published() -> None:
    desk = Desk(founded())
    desk.is_finite = False
    round_of_all(desk, 10)
    assert desk.state.fragments[0].version == 0
    assert {desk.ledger(slot).fate for slot in (0, 1)} == {Fate.NOT_FINITE}
    assert {desk.ledger(slot).lost for slot in (0, 1)} == {10}
    desk.is_finite = True
    round_of_all(desk, 20)
    assert desk.state.fragments[0].version == 1


def test_outliers_are_lost_and_rounds_do_not_wait_for_a_sick_island() -> None:
    """Only a person evicts it. Its next good part counts."""
    desk = Desk(founded((A, B, C), norm_limit=20.0, total_tokens=10**6))

    def rounds(first: int, last: int, norm: float) -> None:
        desk.norms[C] = norm
        for number in range(first, last):
            for slot, incarnation in enumerate((A, B, C)):
                desk.note(incarnation, desk.part(slot), step=10 * (number + 1))
                desk.pass_time(0.1)
            desk.pass_time(1.5)

    rounds(0, 6, 1.0)
    last = 2 * WRONG_IN_A_ROW + 6
    rounds(6, last, 100.0)
    assert desk.ledger(2).fate is Fate.OUTLIER
    assert desk.ledger(0).fate is Fate.MERGED
    assert desk.state.told == {C: SICK}
    assert desk.state.owners() == [A, B, C]
    assert desk.state.ready == [A, B]
    rounds(last, last + 3, 1.0)
    assert desk.ledger(2).fate is Fate.MERGED
    assert desk.state.told == {}
    assert desk.state.ready == [A, B, C]


@pytest.mark.parametrize("owners", [(A,), (A, B)])
def test_a_part_beyond_all_training_is_lost_in_the_first_round(owners: tuple[str, ...]) -> None:
    """Leave it out although one part, or two, do not tell what is usual."""
    desk = Desk(founded(owners, norm_limit=20.0))
    desk.norms[A] = 1e18
    round_of_all(desk, 10, owners=owners)
    assert desk.ledger(0).fate is Fate.OUTLIER
    assert desk.state.fragments[0].version == len(owners) - 1
    desk.norms[A] = 100 * math.sqrt(desk.state.fragments[0].elements)
    round_of_all(desk, 20, owners=owners)
    assert desk.ledger(0).fate is Fate.MERGED


def test_very_small_parts_of_one_island_make_nobody_an_outlier() -> None:
    desk = Desk(founded((A, B, C), norm_limit=20.0))
    desk.norms[C] = 1e-30
    for number in range(1, 12):
        round_of_all(desk, 10 * number, owners=(A, B, C))
    assert [desk.ledger(slot).lost for slot in range(3)] == [0, 0, 0]
    assert desk.state.fragments[0].version == 11


def test_an_island_alone_does_not_change_what_is_usual() -> None:
    """The others return to a run in which it has sent only very small parts."""
    desk = Desk(founded((A, B, C), norm_limit=20.0))
    desk.norms[C] = 1e-30
    for number in range(1, 7):
        round_of_all(desk, 10 * number, owners=(A, B, C))
    desk.pass_time(10.0)
    for number in range(7, 14):
        desk.note(C, desk.part(2), step=10 * number)
        desk.pass_time(1.0)
    before = desk.state.fragments[0].version
    assert before > 10
    for number in range(14, 16):
        round_of_all(desk, 10 * number, owners=(A, B, C))
    assert [desk.ledger(slot).lost for slot in range(3)] == [0, 0, 0]


def test_norms_are_learned_anew_after_a_change_of_h() -> None:
    desk = Desk(founded(norm_limit=20.0))
    for number in range(1, 7):
        round_of_all(desk, 10 * number)
    assert len(desk.state.fragments[0].norms) == VERSIONS_JUDGED_BY
    desk.syncer.on_change("change/1", msgspec.json.encode(Set("sync_every", "300")))
    desk.pass_time(1.0)
    assert desk.state.fragments[0].norms == []


def test_a_part_that_is_not_finite_is_lost_and_the_others_are_merged_without_it() -> None:
    desk = Desk(founded((A, B)))
    desk.norms[A] = math.inf
    for slot, incarnation in enumerate((A, B)):
        desk.note(incarnation, desk.part(slot, 10 + slot), step=10)
    desk.pass_time(1.5)
    assert [desk.ledger(slot).fate for slot in (0, 1)] == [Fate.NOT_FINITE, Fate.MERGED]
    assert [(len(job.parts), job.version) for job in desk.merges] == [(2, 1), (1, 1)]
    assert [job.weight_of_all for job in desk.merges] == [21, 11], "B makes a whole step"
    assert desk.state.fragments[0].version == 1
