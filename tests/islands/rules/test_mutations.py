"""Each important rule is needed: without it, a case or a simulated run fails."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest

from tests.islands.rules import (
    test_bounds,
    test_changes,
    test_clock,
    test_commit,
    test_founding,
    test_island,
    test_island_start,
    test_simulation,
    test_syncer,
)
from tests.islands.rules.hand import build_hand
from torchtitan_diloco.islands.rules import checkpoint, commit, founding, ledger, names
from torchtitan_diloco.islands.rules.changes import Changes
from torchtitan_diloco.islands.rules.clock import Clock
from torchtitan_diloco.islands.rules.fragment import OwnFragment
from torchtitan_diloco.islands.rules.island import Island
from torchtitan_diloco.islands.rules.presence import Presence, Seats
from torchtitan_diloco.islands.rules.rounds import Round
from torchtitan_diloco.islands.rules.syncer import Syncer
from torchtitan_diloco.islands.rules.writer import Writer


@contextmanager
def mutated(function: Any, old: str, new: str) -> Iterator[None]:
    """Run with other code in a function, wherever it is imported."""
    target = plain(function)
    source = textwrap.dedent(inspect.getsource(target))
    assert source.count(old) == 1, f"{target.__qualname__} has no line {old}"
    namespace: dict[str, Any] = {}
    exec(compile(source.replace(old, new), "mutated", "exec"), target.__globals__, namespace)
    before = target.__code__
    target.__code__ = plain(namespace[target.__name__]).__code__
    try:
        yield
    finally:
        target.__code__ = before


def plain(function: Any) -> FunctionType:
    """Return the function of a property, or a function."""
    target = function.fget if isinstance(function, property) else function
    assert isinstance(target, FunctionType)
    return target


@dataclass
class Mutation:
    function: Any
    old: str
    new: str
    case: Callable[[], object]


def with_hand(case: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: case(build_hand(), *arguments)


def commits(outcome: commit.Outcome) -> Callable[[], None]:
    def case() -> None:
        for answers, expected in test_commit.COMMITS:
            if expected is outcome:
                test_commit.test_a_decision_counts_if_it_is_created_and_the_highest(
                    answers, expected
                )

    return case


MUTATIONS = {
    "a decision with other bytes": Mutation(
        commit.commit,
        "return Outcome.SUPERSEDED\n            for",
        "pass\n            for",
        commits(commit.Outcome.SUPERSEDED),
    ),
    "a higher decision": Mutation(
        commit.commit, "other > name", "False", commits(commit.Outcome.SUPERSEDED)
    ),
    "a name of somebody else": Mutation(
        commit.commit,
        " and run_number(other) is not None",
        "",
        commits(commit.Outcome.COMMITTED),
    ),
    "a store that was put back": Mutation(
        commit.commit,
        "before in names",
        "True",
        test_commit.test_a_decision_after_one_that_is_gone_is_withdrawn,
    ),
    "the base holds the slot's last part": Mutation(
        ledger.judge,
        "max(ledger.version, fragment.version - VERSIONS_LATE)",
        "fragment.version - VERSIONS_LATE",
        test_syncer.test_a_part_is_not_merged_again_from_an_older_base,
    ),
    "a part is bounded by time": Mutation(
        ledger.judge,
        "if samples > allowed",
        "if False",
        test_syncer.test_a_part_of_too_many_samples_does_not_end_the_run,
    ),
    "a loss is bounded": Mutation(
        ledger.judge,
        "if is_bounded",
        "if True",
        test_syncer.test_a_loss_of_too_many_samples_spoils_no_slot,
    ),
    "a refusal is decided": Mutation(
        Syncer._read_parts,
        "self._refuse(incarnation, slot, part, Fate.MALFORMED)",
        "pass",
        test_syncer.test_a_malformed_part_does_not_silence_its_island,
    ),
    "a number is used once": Mutation(
        Syncer._read_parts,
        " or self.rounds[part.fragment].is_busy(slot)",
        "",
        test_syncer.test_a_number_is_used_once,
    ),
    "notes have counters": Mutation(
        Presence.hear,
        "note.counter <= member.note.counter",
        "False",
        test_syncer.test_an_older_note_that_lands_late_is_ignored,
    ),
    "who is ready has delivered": Mutation(
        Round.ready,
        "if had_part and",
        "if",
        test_syncer.test_an_island_that_never_delivers_delays_two_versions,
    ),
    "the fastest paces": Mutation(
        Round._is_paced,
        "is_due = ",
        "is_due = True or ",
        test_syncer.test_a_late_part_opens_no_round_of_its_own,
    ),
    "who is gone paces nothing": Mutation(
        Round._is_paced,
        "first or again or (stopped and not training)",
        "False",
        test_syncer.test_the_part_of_an_island_that_is_gone_is_merged_at_once,
    ),
    "the outer rate is scaled": Mutation(
        Round.close_if_due,
        "total + sum(usual)",
        "total",
        test_syncer.test_late_halves_of_a_round_do_not_move_twice_as_far,
    ),
    "silence is time listened": Mutation(
        Presence.listen,
        "min(now - self._polled, most_listened(pause))",
        "now - self._polled",
        test_syncer.test_an_outage_of_the_store_takes_no_slot,
    ),
    "a slot without work is taken": Mutation(
        Seats._is_replaceable,
        "> settings.slot_seconds:",
        "> 1e9:",
        test_syncer.test_a_spare_takes_the_slot_of_one_that_is_silent_or_never_delivers,
    ),
    "work is missing only in the run": Mutation(
        Seats._is_replaceable,
        "if not self._decision.begun:",
        "if False:",
        lambda: test_syncer.test_a_spare_takes_no_slot_for_work_that_was_missing_before_the_run(
            20.0
        ),
    ),
    "work is missing since the run has begun": Mutation(
        Seats.begin_if_due,
        "self._worked = ",
        "unused = ",
        lambda: test_syncer.test_a_spare_takes_no_slot_for_work_that_was_missing_before_the_run(
            20.0
        ),
    ),
    "a slot with a waiting part stays": Mutation(
        Round.is_busy,
        "return slot in self.waiting or slot in {merged.slot for merged in self.merging}",
        "return False",
        test_syncer.test_a_slot_changes_hands_when_no_part_of_it_waits,
    ),
    "the second start is told": Mutation(
        Seats._tell_twins,
        "told[incarnation] = RUNNING",
        "pass",
        test_syncer.test_the_second_of_two_starts_is_told,
    ),
    "not at once": Mutation(
        Seats._tell_twins,
        "lasts > SILENT",
        "lasts > 0.5",
        test_syncer.test_the_next_start_of_a_killed_island_takes_its_slot,
    ),
    "changes are done once": Mutation(
        Changes.make,
        "name in state.done or ",
        "",
        test_changes.test_done_changes_are_kept_while_they_are_listed,
    ),
    "a change that is listed stays done": Mutation(
        Changes.choose,
        "self._listed[name] = listened",
        "pass",
        test_changes.test_done_changes_are_kept_while_they_are_listed,
    ),
    "a change is deleted after its commit": Mutation(
        Syncer.choose_changes,
        "if name in committed.done",
        "if name in state.done",
        test_changes.test_a_change_is_deleted_once_its_decision_counts,
    ),
    "who has stopped hurries once": Mutation(
        Round._is_paced,
        "stopped - self.hurried",
        "stopped",
        lambda: test_simulation.test_an_island_that_lies_starves_nobody(1, {"is_idle": True}),
    ),
    "who has stopped hurries again once": Mutation(
        Round._may_hurry_again,
        " and sender not in self.hurried_again",
        "",
        lambda: test_simulation.test_an_island_that_lies_starves_nobody(1, {"is_idle": True}),
    ),
    "all that step set the pace": Mutation(
        Round._is_paced,
        "in self.decision.owners() if",
        "in self.ready().values() if",
        lambda: test_simulation.test_an_island_that_lies_starves_nobody(2, {"faster": 1000}),
    ),
    "a loss takes its time": Mutation(
        ledger.decide,
        "ledger.since =",
        "if fate is Fate.MERGED: ledger.since =",
        test_bounds.test_losses_do_not_use_up_the_numbers_of_a_slot,
    ),
    "the slack is taken once": Mutation(
        ledger.decide,
        "max(least, ledger.since + used)",
        "age",
        test_bounds.test_losses_do_not_use_up_the_numbers_of_a_slot,
    ),
    "positions have an end": Mutation(
        ledger.judge,
        "part.end > FURTHEST",
        "False",
        test_bounds.test_a_part_beyond_all_positions_is_refused,
    ),
    "the speed is unknown at first": Mutation(
        ledger.most_samples,
        "if not settings.fastest:",
        "if not settings.fastest: return 1e18\n    if False:",
        test_bounds.test_a_part_is_bounded_before_the_speed_is_known,
    ),
    "starts of a name are bounded": Mutation(
        Presence.choose,
        "heard[by_name] >= MOST_STARTS or ",
        "",
        test_bounds.test_a_hundred_starts_of_a_name_are_eight,
    ),
    "islands of a login are bounded": Mutation(
        Presence.choose,
        " or heard[by_login] >= MOST_OF_LOGIN",
        "",
        test_bounds.test_islands_of_a_login_are_bounded_and_owners_are_heard_always,
    ),
    "messages are forgotten": Mutation(
        Presence.forgotten,
        "is_gone = incarnation not in self.members and",
        "is_gone = False and",
        test_bounds.test_messages_to_incarnations_that_are_gone_are_forgotten,
    ),
    "losses are no work": Mutation(
        Syncer._decide,
        "assert self.state is not None",
        "for slot in self.state.slots: self.seats.note_merged(slot.owner or '')",
        test_bounds.test_losses_hold_no_slot,
    ),
    "a version waits for the one before it": Mutation(
        Syncer._is_settled,
        "return ",
        "return True or ",
        test_bounds.test_a_merge_waits_for_the_version_before_it,
    ),
    "a run that has ended is not loaded": Mutation(
        Syncer._lead,
        "if not state.ended:",
        "if True:",
        test_changes.test_a_successor_loads_a_run_that_has_ended_once_it_is_longer,
    ),
    "what is seen writes no decision": Mutation(
        Writer.write_if_due,
        "seen=[], ",
        "",
        test_bounds.test_steps_alone_write_no_decisions,
    ),
    "phases begin with the run": Mutation(
        Syncer._read_phases,
        "len(slot.entered) >= self.state.phases or ",
        "",
        test_bounds.test_streams_enter_phases_once_and_before_later_parts_count,
    ),
    "phases begin after what is merged": Mutation(
        Syncer._read_phases,
        "least <= position <= slot.furthest + most",
        "True",
        test_bounds.test_streams_enter_phases_once_and_before_later_parts_count,
    ),
    "a stand-by counts time in which it could read": Mutation(
        commit.StandBy.watch,
        "min(now - self._read_at, most_listened(self.pause))",
        "now - self._read_at",
        test_commit.test_a_stand_by_does_not_count_an_outage_of_the_store,
    ),
    "a reader lists": Mutation(
        commit.Reader.read,
        "now - self._listed_at < LIST_SECONDS",
        "True",
        test_commit.test_a_reader_that_slept_finds_the_highest_decision,
    ),
    "a reader takes the highest": Mutation(
        commit.Reader.read,
        "content = yield Get(run_name(highest))",
        "content = yield Get(run_name(known + 1))",
        test_commit.test_a_reader_that_slept_finds_the_highest_decision,
    ),
    "a sweep looks whether its decision is there": Mutation(
        Writer.garbage,
        " or run_name(decision.number) not in names",
        "",
        test_founding.test_foundings_of_a_run_that_is_founded_are_garbage,
    ),
    "facts are compared": Mutation(
        founding.check_facts,
        "facts.get(key) != of_run.get(key)",
        "False",
        lambda: test_island_start.test_another_tokenizer_or_model_is_an_error_for_people(
            build_hand(), is_saved=True
        ),
    ),
    "parameters are compared": Mutation(
        founding.check_run,
        "shapes_here != shared.shapes",
        "False",
        lambda: test_island_start.test_another_tokenizer_or_model_is_an_error_for_people(
            build_hand(), is_saved=True
        ),
    ),
    "a lost run keeps its settings": Mutation(
        checkpoint.Saved.found,
        "self.settings.founded_again(founding.settings)",
        "founding.settings",
        lambda: test_founding.test_a_lost_location_is_founded_with_the_settings_that_the_run_had(
            "folder"
        ),
    ),
    "a founding is checked by its island": Mutation(
        Island.on_empty,
        "check_founding(self.founds, self._facts)",
        "pass",
        lambda: test_founding.test_an_island_says_itself_why_no_syncer_would_begin_its_run(
            {"start_with": 4}, "start_with 4 is above 3 slots"
        ),
    ),
    "another founder follows": Mutation(
        founding.Founders.choose,
        "not self._presence.is_silent(current)",
        "True",
        test_founding.test_another_founder_follows_one_that_dies,
    ),
    "what is over is refused": Mutation(
        ledger.judge,
        "return Fate.OVER",
        "pass",
        test_syncer.test_the_run_ends_with_its_copies_and_goes_on_with_a_larger_total,
    ),
    "a stop waits for what is merged": Mutation(
        Syncer._end,
        " and not any(round_.merging for round_ in self.rounds)",
        "",
        test_syncer.test_a_stop_in_order_publishes_what_is_merged,
    ),
    "a part is sent once": Mutation(
        OwnFragment.next_send,
        "is_able = self.sent is None and",
        "oldest = 0; is_able = not self.is_undecided and",
        with_hand(test_island.test_it_does_not_send_before_its_last_part_is_applied),
    ),
    "a loss is declared": Mutation(
        OwnFragment.next_send,
        "self.lost_to > ledger.taken",
        "False",
        with_hand(test_island.test_what_a_reset_has_lost_is_declared),
    ),
    "a wait has an end": Mutation(
        OwnFragment.waits_until,
        "until if now < until else None",
        "until",
        test_island.test_it_waits_for_its_grace_at_most_and_not_in_vain,
    ),
    "no wait in vain": Mutation(
        OwnFragment.waits_until,
        " or usual > island.grace",
        "",
        test_island.test_it_waits_for_its_grace_at_most_and_not_in_vain,
    ),
    "no wait for nobody": Mutation(
        OwnFragment.waits_until,
        "now > island.heard_at + fresh or ",
        "",
        test_island.test_it_waits_for_no_decision_that_does_not_come,
    ),
    "the copy is compared": Mutation(
        OwnFragment.on_checksum,
        "known in (None, checksum)",
        "True",
        with_hand(test_island_start.test_a_checkpoint_with_a_wrong_bit_is_not_carried_on),
    ),
    "an early send fits": Mutation(
        OwnFragment._is_due,
        "upload <= seconds_left < turn + upload",
        "True",
        test_island.test_it_sends_early_only_if_the_upload_fits_and_the_turn_does_not,
    ),
    "the clock": Mutation(
        Clock.tokens,
        "max(self._floor, self._merged + self.expected_tokens - self._expected_before)",
        "self._merged + self.expected_tokens - self._expected_before",
        with_hand(test_island.test_the_clock_of_the_learning_rate_never_goes_back),
    ),
    "the clock keeps what it has shown": Mutation(
        Clock.apply,
        "self._floor = self.tokens",
        "pass",
        test_clock.test_it_never_goes_back_and_reading_it_changes_nothing,
    ),
    "who may be gone does not count": Mutation(
        Clock.advance,
        "self._training_islands if is_decided else 1",
        "self._training_islands",
        test_island.test_tokens_count_for_the_others_only_while_somebody_decides,
    ),
    "the clock takes the expectation of the send": Mutation(
        Island.on_applied,
        "fragment.expected_tokens if is_mixed else self.clock.expected_tokens",
        "self.clock.expected_tokens",
        test_island.test_the_clock_jumps_when_the_work_of_an_outage_is_merged,
    ),
    "a decision goes back": Mutation(
        founding.check_continues,
        "old.number > new.number",
        "False",
        with_hand(
            test_island_start.test_a_store_that_was_put_back_is_an_error_for_people, "ledger"
        ),
    ),
    "garbage has an old number": Mutation(
        names.is_garbage,
        "stored.number <= number and ",
        "",
        test_commit.test_only_what_is_old_and_not_named_is_garbage,
    ),
}


FAILURES = AssertionError, LookupError, ValueError, ExceptionGroup, pytest.fail.Exception


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_case_fails_without_the_rule(rule: str) -> None:
    mutation = MUTATIONS[rule]
    mutation.case()
    with (
        mutated(mutation.function, mutation.old, mutation.new),
        pytest.raises(FAILURES),
    ):
        mutation.case()
