"""When which lease is looked at: by the time at which it is due, and not by how many there are."""

from __future__ import annotations

import math
from typing import cast

from redis_sync_aio._leases.manager import Schedule

from ..support.inside import Grant


class Due:
    """What a schedule needs of a lease."""

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline


def lease(deadline: float = math.inf) -> Grant:
    return cast("Grant", Due(deadline))


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
        schedule.enter(one, when, slack=0.5)
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
        schedule.enter(one, when, slack=0.5)
    time = schedule.next_due()
    found = taken(schedule, time)
    assert time == 100.0
    assert all(leases[one] <= time + 0.5 for one in found)


def test_what_has_ended_comes_first_and_then_what_lasts_shortest() -> None:
    schedule = Schedule()
    long, short, ended = lease(), lease(), lease(deadline=9.0)
    for one, slack in ((long, 0.5), (ended, 0.5), (short, 0.004)):
        schedule.enter(one, 8.0, slack)
    assert taken(schedule, 10.0) == [ended, short, long]


def test_it_is_moved_to_an_earlier_time_and_found_too_early_for_a_later_one() -> None:
    schedule = Schedule()
    one = lease()
    assert schedule.enter(one, 10.0, slack=0.5)
    assert schedule.enter(one, 5.0, slack=0.5)
    assert not schedule.enter(one, 20.0, slack=0.5), "it is looked at at 5, and entered again then"
    assert taken(schedule, 5.0) == [one]
    assert taken(schedule, 30.0) == [], "once"


def test_what_has_left_is_not_looked_at() -> None:
    schedule = Schedule()
    early, late = lease(), lease()
    schedule.enter(early, 5.0, slack=0.5)
    schedule.enter(late, 5.0, slack=0.5)
    schedule.leave(early)
    schedule.collect(6.0)
    schedule.leave(late)
    assert schedule.take() is None
    assert not schedule.behind
    schedule.leave(late)
