"""Each pattern of docs/classic-patterns.md has tests: of the textbook's code, and of ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "classic-patterns.md"
TESTS = {
    "SET NX and DEL": (
        "test_textbook_a_late_del_frees_the_lock_of_another",
        "test_textbook_ex_is_in_whole_seconds",
        "test_p1_basic_lock",
        "test_basic_lock_ttl_is_seconds_or_timedelta",
        "test_p3_a_lock_that_is_free_again_wakes_its_waiters",
    ),
    "An identity, GET then DEL": (
        "test_textbook_get_then_del_frees_the_lock_of_another",
        "test_p1_a_release_that_comes_too_late_frees_nobody_elses_lock",
        "test_p1_identities",
    ),
    "An identity, WATCH": (
        "test_textbook_a_release_by_watch_fails_when_its_own_renewal_comes_between",
        "test_p7_a_renewal_that_comes_between_does_not_hinder_a_release",
    ),
    "SETNX, then EXPIRE": (
        "test_textbook_a_crash_between_setnx_and_expire_locks_forever",
        "test_textbook_mending_it_puts_an_end_to_a_lock_that_was_to_have_none",
        "test_p12_no_crash_leaves_a_lock_without_a_ttl",
        "test_p11_a_foreign_lock_without_ttl_is_reported_and_stays_as_it_is",
    ),
    "The reply is lost": (
        "test_textbook_redis_py_repeats_set_nx_and_is_refused_by_itself",
        "test_textbook_get_asks_before_the_lost_set_nx_arrives",
        "test_p4_a_lost_reply_is_found_out_and_a_late_copy_is_spent",
    ),
    "An alarm as a timeout": (
        "test_textbook_the_alarm_rings_in_whatever_task_runs",
        "test_textbook_no_alarms_beside_the_main_thread",
        "test_p12_a_timeout_is_the_tasks_own",
        "test_p7_release_errors_have_names",
    ),
    "Holders in a set": (
        "test_textbook_two_see_the_last_place",
        "test_textbook_a_crashed_holder_keeps_its_place",
        "test_textbook_no_size_set",
        "test_p1_counting_semaphore_by_identities",
        "test_p1_few_of_many_that_see_a_free_place_get_in",
    ),
    "A sorted set of times": (
        "test_textbook_the_earlier_clock_gets_in_next_to_the_holders",
        "test_textbook_a_clock_that_is_ahead_expels_a_holder",
        "test_p1_p2_clocks_that_are_10_seconds_apart",
        "test_p1_d14_processes_whose_clocks_are_10_seconds_apart",
    ),
    "A counter for fairness": (
        "test_textbook_a_counter_is_not_the_order_of_arrival",
        "test_textbook_a_lock_around_it_has_an_end_of_its_own",
        "test_textbook_a_refresh_by_a_clock_that_is_behind_is_none",
        "test_p6_a_refresh_is_a_renewal",
    ),
    "INCRBY": (
        "test_textbook_a_crash_after_incrby_leaks_forever",
        "test_textbook_what_is_too_much_keeps_others_out_meanwhile",
        "test_p6_a_crash_leaks_no_permits",
    ),
    "An optimistic counter": (
        "test_textbook_get_then_set_loses_an_update",
        "test_textbook_watch_tries_forever",
        "test_textbook_redis_py_transaction_tries_forever",
        "test_p1_a_transaction_is_done_again_and_loses_nothing",
        "test_p12_a_transaction_gives_up_by_name",
    ),
    "Stock": (
        "test_textbook_insufficient_stock_leaves_the_lock_behind",
        "test_p7_insufficient_comes_out_bare_and_the_lock_is_free",
        "test_p1_exact_totals_in_two_processes",
    ),
    "The market": (
        "test_textbook_unguarded_it_sells_twice",
        "test_textbook_watch_is_disturbed_by_what_others_sell",
        "test_textbook_watch_gives_up_when_its_time_is_over",
        "test_p1_keys_of_ones_own_are_not_disturbed",
        "test_p2_a_transaction_that_is_disturbed_takes_its_turn",
        "test_p1_under_a_lock_what_others_sell_does_not_disturb",
        "test_p1_money_and_items_are_conserved_in_two_processes",
        "test_the_audit_finds_what_is_missing",
        "test_p7_too_poor_comes_out_bare_and_nothing_is_changed",
        "test_the_ways_are_those_of_the_benchmark",
    ),
    "Redlock": (
        "test_textbook_redlock_splits",
        "test_textbook_redlock_leaves_what_had_no_answer",
        "test_redlock_that_is_split_is_had_by_all_in_turn",
        "test_redlock_is_given_back_where_no_answer_came",
    ),
}
"""The sections of the page, and the tests of each."""
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def titles() -> list[str]:
    return re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.M)


def written() -> list[str]:
    """Return the tests that there are."""
    files = (path for path in HERE.glob("test_classic_*.py") if path != Path(__file__))
    nodes = (node for path in files for node in ast.parse(path.read_text("utf-8")).body)
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function.name for function in functions if function.name.startswith("test_")]


def test_every_test_belongs_to_a_pattern() -> None:
    assert sorted(name for names in TESTS.values() for name in names) == sorted(written())


def test_every_pattern_has_tests_of_the_textbook_and_of_ours() -> None:
    assert list(TESTS) == titles()
    for title, names in TESTS.items():
        assert [name for name in names if name.startswith("test_textbook_")], title
        assert [name for name in names if not name.startswith("test_textbook_")], title


def test_every_row_of_the_table_leads_to_its_section() -> None:
    rows = re.findall(r"^\| \[[^\]]+\]\(#([\w-]+)\)", PAGE.read_text("utf-8"), re.M)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles()}
    assert len(rows) == 15
    assert set(rows) == anchors
