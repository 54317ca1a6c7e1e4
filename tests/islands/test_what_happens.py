"""The rows of "What happens when" in docs/islands-reference.md, and the tests that show them."""

import ast
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs/islands-reference.md"
SHOWN = {
    "an island dies": [
        "islands/test_faults.py::test_an_island_is_killed_in_its_uploads",
        "islands/rules/test_syncer.py::test_the_part_of_an_island_that_is_gone_is_merged_at_once",
        "islands/rules/test_syncer.py::"
        "test_a_spare_takes_the_slot_of_one_that_is_silent_or_never_delivers",
    ],
    "it dies in an upload": [
        "islands/test_faults.py::test_an_island_is_killed_in_its_uploads",
        "islands/rules/test_commit.py::test_only_what_is_old_and_not_named_is_garbage",
    ],
    "it restarts under the same name": [
        "islands/test_run.py::test_islands_stop_are_killed_and_go_on",
        "islands/rules/test_syncer.py::test_the_next_start_of_a_killed_island_takes_its_slot",
        "islands/rules/test_island_start.py::"
        "test_a_restart_takes_the_copy_of_its_checkpoint_and_reads_again",
        "islands/rules/test_island_start.py::"
        "test_a_restart_drops_the_tokens_of_work_that_nobody_merged",
    ],
    "an island is stopped, or its machine will be taken away": [
        "islands/test_run.py::test_islands_leave_on_a_notice",
        "islands/rules/test_simulation.py::test_a_planned_stop_loses_nothing",
        "islands/rules/test_syncer.py::"
        "test_an_island_that_leaves_after_a_late_part_waits_for_no_cycle_of_the_others",
    ],
    "an island joins": [
        "islands/test_peers.py::test_an_island_joins_leaves_and_returns",
        "islands/rules/test_island_start.py::test_a_joiner_takes_a_copy_and_the_versions_after_it",
    ],
    "its uplink or downlink is too slow": [
        "islands/test_island_reports.py::test_a_slow_link_is_found",
        "islands/rules/test_island.py::test_it_waits_for_its_grace_at_most_and_not_in_vain",
    ],
    "an island is slower than the others": [
        "islands/rules/test_simulation.py::"
        "test_rounds_come_at_the_pace_of_the_fastest_and_all_work_is_merged",
        "islands/rules/test_syncer.py::test_a_late_part_opens_no_round_of_its_own",
    ],
    "it completes no step, but is heard": [
        "islands/rules/test_simulation.py::test_a_mute_island_stalls_nobody",
        "islands/rules/test_syncer.py::test_an_island_that_never_delivers_delays_two_versions",
        "islands/rules/test_syncer.py::"
        "test_a_spare_takes_the_slot_of_one_that_is_silent_or_never_delivers",
    ],
    "its link is cut, or it is paused": [
        "islands/test_island_reports.py::test_islands_know_of_each_other",
        "islands/test_peers.py::test_a_lost_slot_is_an_error_for_people_and_no_end",
        "islands/rules/test_simulation.py::test_any_faults",
    ],
    "the syncer dies": [
        "islands/test_faults.py::test_ten_kills_of_the_syncer_change_no_bit",
        "islands/test_syncing.py::test_a_syncer_takes_the_place_of_one_that_died_with_its_files",
        "islands/test_local.py::test_a_syncer_that_dies_is_started_again",
    ],
    "the syncer's machine is lost": [
        "islands/test_syncing.py::test_a_syncer_on_another_machine_makes_the_same_copies",
        "islands/rules/test_commit.py::test_a_stand_by_takes_over_when_the_number_stands_still",
    ],
    "a paused syncer wakes up beside its successor": [
        "islands/test_syncing.py::test_a_paused_syncer_that_wakes_up_stands_by",
    ],
    "the folder, or the server of the bucket, is away": [
        "islands/test_faults.py::test_islands_train_on_while_the_store_is_away",
        "islands/test_waiting.py::test_a_server_that_is_not_there_yet_is_waited_for",
        "islands/test_waiting.py::test_an_island_at_the_end_says_that_its_store_is_gone",
    ],
    "the machine of the folder loses power": [
        "store/test_folder.py::test_a_content_that_need_not_be_durable_is_not_flushed",
        "islands/rules/test_island.py::test_refused_work_is_sent_again",
    ],
    "SeaweedFS dies, or the machine of `serve` restarts": [
        "islands/test_bucket_server.py::test_seaweedfs_is_killed_and_returns",
        "islands/test_bucket_server.py::test_a_killed_syncer_is_started_again",
    ],
    "the disk is full": [
        "islands/test_waiting.py::test_a_full_disk_delays_and_loses_nothing",
        "islands/test_link.py::"
        "test_an_island_leaves_although_a_full_quota_refuses_to_delete_its_note",
    ],
    "an object cannot be read, although the store is there": [
        "islands/test_link.py::test_what_cannot_be_read_delays_no_other_fragment",
        "islands/test_syncing.py::test_a_part_that_cannot_be_read_is_refused",
    ],
    "all islands die, and the syncer": [
        "islands/test_faults.py::test_all_processes_are_killed_and_go_on",
    ],
    "the store is replaced with an older copy of itself": [
        "islands/rules/test_commit.py::test_a_store_that_was_put_back_is_an_error_for_people",
        "islands/rules/test_island_start.py::test_a_store_that_was_put_back_is_an_error_for_people",
        "islands/test_syncing.py::test_a_decision_of_a_store_before_it_was_put_back_is_named",
    ],
    "the store is lost, or emptied": [
        "islands/rules/test_commit.py::test_a_store_that_was_emptied_is_said_to_be_empty",
        "islands/test_peers.py::test_a_run_without_its_location_is_founded_again_only_if_asked",
        "islands/rules/test_simulation.py::test_a_lost_location_goes_on_from_a_checkpoint",
        "islands/rules/test_island_start.py::"
        "test_an_old_checkpoint_of_a_run_that_was_founded_again_is_not_trained",
    ],
    "a delta is not finite, or far larger than usual": [
        "islands/rules/test_outliers.py::"
        "test_outliers_are_lost_and_rounds_do_not_wait_for_a_sick_island",
        "islands/rules/test_outliers.py::test_a_part_beyond_all_training_is_lost_in_the_first_round",
        "islands/rules/test_island.py::test_a_part_that_is_not_finite_becomes_a_loss",
        "islands/test_ranks.py::test_values_of_one_rank_that_are_not_finite_are_dropped_on_all",
    ],
    "an island is wrong 16 times in a row": [
        "islands/rules/test_outliers.py::"
        "test_outliers_are_lost_and_rounds_do_not_wait_for_a_sick_island",
        "islands/rules/test_island.py::test_a_sick_island_says_so_and_goes_on",
        "islands/test_changes.py::test_islands_leave_and_are_evicted",
    ],
    "an outer step is not finite": [
        "islands/rules/test_outliers.py::test_an_outer_step_that_is_not_finite_is_not_published",
        "islands/test_payload.py::test_a_version_that_is_not_finite_is_dropped",
    ],
    "an island has different bits of a shared copy": [
        "islands/test_peers.py::test_wrong_bits_of_a_copy_are_found_when_the_next_one_is_applied",
        "islands/rules/test_island.py::test_a_wrong_bit_is_mended_by_a_copy",
    ],
    "two islands have the same name": [
        "islands/test_peers.py::test_the_second_start_of_a_name_ends_and_the_first_goes_on",
        "islands/rules/test_syncer.py::test_the_second_of_two_starts_is_told",
    ],
    "fewer islands come than start together": [
        "islands/test_waiting.py::test_what_an_island_waits_for_before_it_trains",
        "islands/rules/test_syncer.py::test_rounds_begin_when_enough_islands_are_there",
    ],
    "an island joins a run that has ended, or is started again then": [
        "islands/test_run.py::test_the_syncer_beside_an_island_outlasts_it",
        "islands/test_waiting.py::test_a_run_that_is_over_says_what_can_be_done",
    ],
    "a login is revoked": [
        "islands/test_served_run.py::test_an_island_whose_login_is_revoked_ends",
        "islands/test_bucket_server.py::test_a_login_is_renewed_and_revoked_while_the_server_runs",
    ],
    "a login writes what it should not": [
        "islands/test_hostile_login.py::test_a_hostile_login_delays_and_ends_nobody",
        "islands/test_bucket_server.py::test_each_login_writes_the_names_that_the_rules_give_it",
        "islands/rules/test_simulation.py::test_an_island_that_lies_starves_nobody",
    ],
    "the run was written by newer code": [
        "islands/rules/test_syncer.py::test_a_decision_of_newer_code_is_an_error_for_people",
    ],
}
"""The events of the page, and the tests of what happens: their files below tests/, and names."""


def test_the_page_and_the_table_have_the_same_rows() -> None:
    section = PAGE.read_text().split("\n## What happens when\n")[1].split("\n## ")[0]
    head, *rows = re.findall(r"^\| (.*?) \| .* \|$", section, re.M)
    assert head == "event"
    assert rows == list(SHOWN)


@cache
def names_in(file: str) -> set[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((REPOSITORY / "tests" / file).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("event", SHOWN)
def test_each_row_is_shown_by_tests_that_exist(event: str) -> None:
    assert SHOWN[event]
    for test in SHOWN[event]:
        file, name = test.split("::")
        assert name in names_in(file), test
