"""The judge of the chaos runs is no rubber stamp: each kind of wrong history is found out."""

from __future__ import annotations

from typing import Any

from .history import US, Commit, Death, History, percentile

T = 1_700_000_000 * US
GOOD = [
    Commit("begin", T + 1, "a", T + 2, 0),
    Commit("end", T + 1, "a", T + 5, 0),
    Commit("begin", T + 6, "b", T + 7, 1),
    Commit("end", T + 6, "b", T + 9, 1),
]
REFUSED = {"refused": "end", "name": "n", "fence": 5, "newer": 6, "since": 90, "asked": 80, "held": False}


def history(log: list[Commit], *told: dict[str, Any], deaths: tuple[Death, ...] = ()) -> History:
    return History({"n": log}, list(told), list(deaths))


def test_a_good_history() -> None:
    found = history(GOOD, REFUSED)
    assert found.overlaps() == []
    assert found.stale() == []
    assert found.sections == 2
    assert found.waits() == [(2 / US, T + 7, "n")]


def test_a_grant_while_another_holds() -> None:
    early = [*GOOD[:2], Commit("begin", T + 4, "b", T + 7, 1)]
    assert len(history(early).overlaps()) == 1
    assert len(history(GOOD, REFUSED | {"held": True}).overlaps()) == 1


def test_a_late_write_is_no_overlap() -> None:
    """Who knows that the lease is lost and writes all the same; nobody else has written yet, so it is taken."""
    late = [GOOD[0], Commit("late", T + 1, "a", T + 8, 0), GOOD[2]]
    assert history(late).overlaps() == []
    assert history(late).stale() == []


def test_fences_that_do_not_rise() -> None:
    again = [*GOOD, Commit("begin", T + 6, "c", T + 10, 2)]
    assert len(history(again).stale()) == 1
    assert len(history([*GOOD[2:], *GOOD[:2]]).stale()) == 1
    assert len(history(GOOD, REFUSED | {"newer": 5}).stale()) == 1
    assert len(history(GOOD, REFUSED | {"since": 70}).stale()) == 1  # in use before this one was asked for


def test_after_the_death_of_a_holder() -> None:
    log = [Commit("begin", T, "a", T, 0), Commit("begin", T + US, "b", T + US, 1)]
    dead = Death(0, T + US // 2, "inside", frozenset({"n"}))
    assert history(log, deaths=(dead,)).after_deaths() == [0.5]
    next_dead = Death(2, T + US // 4 * 3, "granted", frozenset({"n"}))
    assert history(log, deaths=(dead, next_dead)).after_deaths() == [0.25]
    assert history(log, deaths=(Death(0, T + 1, "waiting", frozenset()),)).after_deaths() == []


def test_first_grant_after_a_restart() -> None:
    """From the restart, or from the release of who held the lock through it."""
    log = [*GOOD, Commit("begin", T + US, "c", T + US, 2)]
    assert history(log).first_grants([T + US // 2]) == [0.5]
    assert history(log).first_grants([T + 8]) == [(US - 9) / US]


def test_percentile() -> None:
    assert percentile([]) == 0
    assert percentile([3.0, 1.0, 2.0]) == 3.0
    assert percentile([float(number) for number in range(1, 201)]) == 198.0
