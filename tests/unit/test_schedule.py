"""When which lease is looked at: by the time at which it is due, and not by how many there are."""

from __future__ import annotations

import math
from typing import cast
from weakref import ref

from redis_sync_aio._leases.manager import Schedule

from ..support.inside import Grant


class Due:
    """What a schedule needs of a lease."""

    due_at = math.inf

    def __init__(self, deadline: float, period: float) -> None:
        self.deadline, self.period = deadline, period


def lease(deadline: float = 1000.0, period: float = 30.0) -> Grant:
    return cast("Grant", Due(deadline, period))


def taken(schedule: Schedule, time: float) -> list[Grant]:
    """Return what is looked at at that time, in this order."""
    schedule.collect(time)
    found = []
    while (one := schedule.take()) is not None:
        found.append(one)
    return found


def test_each_is_looked_at_when_it_is_due() -> None:
    schedule = Schedule()
    first, second, third = lease(), lease(), lease()
    for one, when in ((first, 10.0), (second, 20.0), (third, 20.1)):
        schedule.enter(one, when)
    assert schedule.next_due() == 10.0
    assert taken(schedule, 9.9) == []
    assert taken(schedule, 10.0) == [first]
    assert schedule.next_due() == 20.0
    assert set(taken(schedule, 20.0)) == {second, third}, "what is due soon after is taken along"
    assert schedule.next_due() == math.inf


def test_nothing_is_taken_along_for_longer_than_its_slack() -> None:
    schedule = Schedule()
    leases = {lease(): 100 + n / 100 for n in range(200)}
    for one, when in leases.items():
        schedule.enter(one, when)
    time = schedule.next_due()
    found = taken(schedule, time)
    assert time == 100.0
    assert all(leases[one] <= time + 0.5 for one in found)


def test_what_has_ended_comes_first_and_then_what_lasts_shortest() -> None:
    schedule = Schedule()
    long, short, ended = lease(28.0), lease(10.1, period=0.1), lease(9.0)
    for one in (long, ended, short):
        schedule.enter(one, 8.0)
    assert taken(schedule, 10.0) == [ended, short, long]


def test_an_end_is_not_looked_for_early() -> None:
    schedule = Schedule()
    one = lease(deadline=10.0)
    schedule.enter(one, 10.0)
    assert taken(schedule, 9.9) == []
    assert taken(schedule, 10.0) == [one]


def test_leases_that_have_left_are_not_kept() -> None:
    schedule = Schedule()
    kept = lease()
    schedule.enter(kept, 5.0)
    references = []
    for _ in range(3000):
        one = lease()
        references.append(ref(one))
        schedule.enter(one, 10.0)
        schedule.leave(one)
        del one
    assert all(reference() is None for reference in references)
    assert taken(schedule, 20.0) == [kept]


def test_it_is_moved_to_an_earlier_time_and_found_too_early_for_a_later_one() -> None:
    schedule = Schedule()
    one = lease()
    assert schedule.enter(one, 10.0)
    assert schedule.enter(one, 5.0)
    assert not schedule.enter(one, 20.0), "it is looked at at 5, and entered again then"
    assert taken(schedule, 5.0) == [one]
    assert taken(schedule, 30.0) == [], "once"


def test_what_has_left_is_not_looked_at() -> None:
    schedule = Schedule()
    early, late = lease(), lease()
    schedule.enter(early, 5.0)
    schedule.enter(late, 5.0)
    schedule.leave(early)
    schedule.collect(6.0)
    schedule.leave(late)
    assert schedule.take() is None
    assert not schedule.behind()
    schedule.leave(late)
