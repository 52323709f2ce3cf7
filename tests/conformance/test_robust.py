"""Robust locks: what a holder recorded and left behind is told to the next one, and nothing of it is lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncRobustLock,
    Compensation,
    Coordinator,
    LeaseLost,
    NotHeld,
    wait_until,
)
from redis_sync_aio.compat import Lock as CompatLock
from redis_sync_aio.errors import StaleWriter, UndoFailed, WrongKeyType
from redis_sync_aio.types import RobustLease

from ..support.body import FAST, assert_undisturbed, for_ever, waits
from ..support.sweep import sweep
from .robust import KEYS, NAME, RECORD, crash, is_of
from .robust import lock as lock
from .robust import way as way

# -- crash and release -------------------------------------------------------------------------------------


async def test_after_a_crash_the_next_lease_knows_the_holder_its_time_and_progress(
    lock: AsyncRobustLock, redis: Redis
) -> None:
    first = await lock.acquire()
    assert (first.abandoned, first.progress) == (None, None)
    await first.record({"charged": 120, "items": ["a", None, 1.5, {"b": True}], "né": "\ud800"})
    seconds, _ = await redis.time()
    await crash(redis, first)
    second = await lock.acquire()
    found = second.abandoned
    assert is_of(found, first)
    assert found is not None
    assert abs(found.at.timestamp() - seconds) < 5
    assert found.progress == {"charged": 120, "items": ["a", None, 1.5, {"b": True}], "né": "\ud800"}
    assert found.steps == ()
    assert second.progress == found.progress
    await second.release()


async def test_a_clean_release_leaves_nothing(lock: AsyncRobustLock, redis: Redis) -> None:
    async with lock as lease:
        await lease.record({"half": "done"})
        assert lease.progress == {"half": "done"}
    assert not await redis.exists(RECORD)
    async with lock as lease:
        assert lease.abandoned is None


async def test_a_second_crash_loses_nothing(lock: AsyncRobustLock, redis: Redis) -> None:
    first = await lock.acquire()
    await first.record({"step": 1})
    await crash(redis, first)
    second = await lock.acquire()
    await crash(redis, second)
    third = await lock.acquire()
    assert is_of(third.abandoned, second)
    assert third.progress == {"step": 1}
    await third.record({"step": 2})
    await crash(redis, third)
    async with lock as fourth:
        assert is_of(fourth.abandoned, third)
        assert fourth.progress == {"step": 2}


async def test_a_handed_over_lock_is_told_too(lock: AsyncRobustLock, redis: Redis) -> None:
    first = await lock.acquire()
    await first.record({"step": 1})
    waiting = asyncio.create_task(lock.acquire())
    await wait_until(waits(lock), FAST, timeout=5)
    assert await lock.force_release()
    second = await waiting
    assert is_of(second.abandoned, first), "who took it away does not know how far the work was"
    await second.release()
    with pytest.raises(LeaseLost):
        await first.release()
    assert (await lock.acquire()).abandoned is None


async def test_a_body_that_raises_leaves_its_progress(lock: AsyncRobustLock) -> None:
    holders: list[RobustLease] = []
    with pytest.raises(KeyError) as raised:  # noqa: PT012
        async with lock as lease:
            holders.append(lease)
            await lease.record({"step": 1})
            raise KeyError("mine")
    assert not hasattr(raised.value, "__notes__")
    first = holders[0]
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with lock as second:  # and so does one that fails before it recorded anything itself
            assert is_of(second.abandoned, first)
            raise ZeroDivisionError
    async with lock as third:
        assert is_of(third.abandoned, first), "what the second one found was put back"
        assert third.progress == {"step": 1}
    async with lock as fourth:
        assert fourth.abandoned is None


async def test_closing_the_coordinator_breaks_work_off(redis: Redis, lock: AsyncRobustLock) -> None:
    async with Coordinator(redis) as other:
        lease = await AsyncRobustLock(other, NAME).acquire()
        await lease.record({"step": 1})
    async with lock as next_one:
        assert is_of(next_one.abandoned, lease)


async def test_clear_record_is_as_a_clean_release(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire()
    await lease.record({})
    assert lease.progress == {}
    await lease.clear_record()
    assert lease.progress is None
    await crash(redis, lease)
    async with lock as following:
        assert is_of(following.abandoned, lease)
        assert following.progress is None


# -- other locks on the name -------------------------------------------------------------------------------


async def test_locks_that_are_not_robust_neither_read_nor_clear_the_record(
    lock: AsyncRobustLock, redis: Redis, sync: Coordinator
) -> None:
    first = await lock.acquire()
    await first.record({"step": 1})
    assert await AsyncLock(sync, NAME).try_acquire() is None
    await crash(redis, first)
    async with AsyncLock(sync, NAME):
        assert await lock.try_acquire() is None
    compat = CompatLock(redis, NAME, timeout=10)
    assert await compat.acquire()
    await compat.release()
    async with lock as lease:
        assert is_of(lease.abandoned, first)


# -- identities --------------------------------------------------------------------------------------------


async def test_an_identity_that_asks_again_has_the_same_lease_and_its_progress(
    lock: AsyncRobustLock, redis: Redis
) -> None:
    before = await lock.acquire()
    await crash(redis, before)
    one = await lock.acquire(identity="w")
    again = await lock.acquire(identity="w")
    assert is_of(one.abandoned, before)
    assert again.abandoned == one.abandoned, "the same lease, so it found the same"
    await again.record({"step": 1})
    async with Coordinator(redis) as elsewhere:
        restarted = await AsyncRobustLock(elsewhere, NAME).acquire(identity="w")
        assert restarted.fence == one.fence
        assert restarted.abandoned is None
        assert restarted.progress == {"step": 1}
        await restarted.record({"step": 2})
        assert (await redis.hget(RECORD, "progress")) == b'{"step":2}'
        await AsyncRobustLock(elsewhere, NAME).release(identity="w")
    assert not await redis.exists(RECORD)


@pytest.mark.parametrize("where", ["one process", "two processes"])
async def test_of_two_leases_of_an_identity_the_later_one_writes_and_the_other_is_told(
    lock: AsyncRobustLock, redis: Redis, where: str
) -> None:
    """Neither knows what the other records: what both could write would be lost without a word."""
    async with Coordinator(redis) as elsewhere:
        source = lock if where == "one process" else AsyncRobustLock(elsewhere, NAME)
        first = await lock.acquire(identity="w")
        for number in (1, 2, 3):
            await first.record({"first": number})
        second = await source.acquire(identity="w")
        assert second.progress == {"first": 3}
        await second.record({"second": 1})
        assert await redis.hget(RECORD, "progress") == b'{"second":1}', "recorded means that it is on the server"
        for _ in range(2):  # told by the server, and then without it
            with pytest.raises(StaleWriter, match="a later lease of the identity 'w'") as raised:
                await first.record({"first": 4})
            assert (raised.value.name, raised.value.fence) == (NAME, first.fence)
        with pytest.raises(StaleWriter):
            await first.clear_record()
        assert await redis.hget(RECORD, "progress") == b'{"second":1}'
        first.check()  # it holds the lock still
        await first.extend(20)
        await crash(redis, first)
        second._grant.manager.forget(second._grant)
        async with lock as following:
            assert following.progress == {"second": 1}


async def test_steps_that_a_later_lease_of_the_identity_adopts_meanwhile_are_left_to_it(
    lock: AsyncRobustLock, redis: Redis
) -> None:
    """The running step ends, and cannot say so; no other one begins here."""
    done: list[int] = []

    async def refund(*, order: int) -> None:
        done.append(order)
        if len(done) == 1:
            await AsyncRobustLock(elsewhere, NAME).acquire(identity="w")

    async with Coordinator(redis) as elsewhere:
        undo = Compensation(await lock.acquire(identity="w"), {"refund": refund})
        await undo.__aenter__()
        for order in (1, 2, 3):
            await undo.push("refund", order=order)
        first = await lock.acquire(identity="w")
        with pytest.raises(UndoFailed, match="1 of 1 undo steps") as failed:
            await first.compensate({"refund": refund})
        assert [type(error) for error in failed.value.exceptions] == [StaleWriter]
        assert done == [3]
        second = await AsyncRobustLock(elsewhere, NAME).acquire(identity="w")
        await second.compensate({"refund": refund})
        assert done == [3, 3, 2, 1]


async def test_a_release_by_the_earlier_lease_of_an_identity_leaves_what_the_later_one_recorded(
    lock: AsyncRobustLock, sync: Coordinator, redis: Redis
) -> None:
    async with Coordinator(redis) as elsewhere:
        first = await lock.acquire(identity="w")
        second = await AsyncRobustLock(elsewhere, NAME).acquire(identity="w")
        await second.record({"second": 1})
        await first.release()
        async with lock as following:
            assert following.progress == {"second": 1}, "nobody said that this was done"


async def test_a_lease_of_an_identity_whose_adoption_fails_leaves_the_other_the_writer(
    lock: AsyncRobustLock, redis: Redis
) -> None:
    first = await lock.acquire(identity="w")
    await first.record({"step": 1})
    await redis.hset(RECORD, "progress", "no json")
    with pytest.raises(WrongKeyType):
        await lock.acquire(identity="w")
    await first.record({"step": 2})
    assert await redis.hget(RECORD, "progress") == b'{"step":2}'


async def test_a_release_of_an_identity_from_elsewhere_is_clean(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire(identity="w")
    await lease.record({"step": 1})
    async with Coordinator(redis) as elsewhere:
        other = AsyncRobustLock(elsewhere, NAME)
        with pytest.raises(NotHeld):
            await other.release(identity="x")
        assert await redis.exists(RECORD)
        await other.release(identity="w")
    assert not await redis.exists(RECORD)


# -- recording ---------------------------------------------------------------------------------------------


async def test_recording_renews(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire()
    await redis.pexpire(NAME, 5000)
    await lease.record({"a": 1})
    assert await redis.pttl(NAME) > 20_000
    assert lease.remaining() > 20
    assert await redis.pttl(RECORD) > 7 * 86_400_000
    assert await redis.pttl(KEYS.fence) > 3_500_000


@pytest.mark.parametrize("options", [{"auto_renew": False}, {"max_hold": 20}, {"ttl": None}], ids=str)
async def test_recording_does_not_renew_what_is_not_to_be_renewed(
    sync: Coordinator, redis: Redis, options: dict[str, Any]
) -> None:
    lease = await AsyncRobustLock(sync, NAME, **options).acquire()
    ends, left = lease._grant.deadline, await redis.pttl(NAME)
    await lease.record({"a": 1})
    assert lease._grant.deadline == ends
    assert left - 5000 < await redis.pttl(NAME) <= left + 50
    assert await redis.pttl(RECORD) > 7 * 86_400_000
    await lease.release()
    assert await redis.exists(NAME, RECORD) == 0


async def test_renewals_keep_the_record(sync: Coordinator, redis: Redis) -> None:
    lease = await AsyncRobustLock(sync, NAME, ttl=3).acquire()
    await redis.pexpire(RECORD, 60_000)

    async def refreshed() -> bool:
        return await redis.pttl(RECORD) > 60_000

    await wait_until(refreshed, FAST, timeout=5)
    lease.check()


CIRCLE: dict[str, object] = {}
CIRCLE["a"] = CIRCLE
BAD: dict[str, tuple[object, type[Exception], str]] = {
    "a list": ([1], TypeError, "dict"),
    "None": (None, TypeError, "dict"),
    "a set": ({"a": {1}}, TypeError, "set"),
    "bytes": ({"a": b"x"}, TypeError, "bytes"),
    "a tuple": ({"a": (1,)}, TypeError, "tuples"),
    "a number as key": ({1: "a"}, TypeError, "keys"),
    "nan": ({"a": float("nan")}, ValueError, "Out of range"),
    "infinity": ({"a": float("inf")}, ValueError, "Out of range"),
    "a circle": (CIRCLE, ValueError, "Circular"),
    "too large": ({"a": "x" * 65_536}, ValueError, "65,536 bytes"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_what_json_can_not_say_is_refused(
    lock: AsyncRobustLock, redis: Redis, bad: tuple[Any, type[Exception], str]
) -> None:
    given, error, why = bad
    async with lock as lease:
        await lease.record({"good": 1})
        with pytest.raises(error, match=why):
            await lease.record(given)
        assert lease.progress == {"good": 1}
        assert await redis.hget(RECORD, "progress") == b'{"good":1}'


async def test_what_another_python_could_not_read_is_refused(lock: AsyncRobustLock) -> None:
    """How deep JSON may be nested, and how long numbers may be, is another matter with each version of Python."""
    deepest: dict[str, object] = {"a": 1}
    for _ in range(99):
        deepest = {"a": deepest}
    async with lock as lease:
        await lease.record(deepest)
        with pytest.raises(ValueError, match="100 levels"):
            await lease.record({"a": deepest})
        with pytest.raises(ValueError, match="100 levels"):
            await lease.record({"a": [[deepest, 1]]})
        too_deep: object = 1
        for _ in range(100_000):
            too_deep = [too_deep]
        with pytest.raises(ValueError, match="nested"):
            await lease.record({"a": too_deep})
        limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            with pytest.raises(ValueError, match="14,000 bits"):
                await lease.record({"a": [10**5000]})
        finally:
            sys.set_int_max_str_digits(limit)
        assert lease.progress == deepest
        await lease.record({"a": 10**4000})


async def test_the_last_of_many_recordings_counts(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire()
    await asyncio.gather(*(lease.record({"n": n}) for n in range(20)))
    assert await redis.hmget(RECORD, "seq", "progress") == [b"20", b'{"n":19}']


async def test_what_is_recorded_is_a_copy(lock: AsyncRobustLock) -> None:
    async with lock as lease:
        mine: dict[str, object] = {"done": [1]}
        await lease.record(mine)
        mine["done"] = 2
        assert lease.progress == {"done": [1]}


@pytest.mark.parametrize("gone", ["expired", "taken"])
async def test_recording_under_a_lost_lease_raises_and_cancels_the_body(
    lock: AsyncRobustLock, redis: Redis, gone: str
) -> None:
    async def body() -> None:
        async with lock as lease:
            holding.set_result(lease)
            await for_ever()

    holding: asyncio.Future[RobustLease] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(body())
    lease = await holding
    await lease.record({"mine": 1})
    await redis.delete(NAME)
    following = await AsyncRobustLock(redis, NAME).acquire() if gone == "taken" else None
    with pytest.raises(LeaseLost) as lost:
        await lease.record({"mine": 2})
    assert lost.value.reason == gone
    with pytest.raises(LeaseLost):
        await task
    assert await redis.hget(RECORD, "progress") == b'{"mine":1}'
    if following is not None:
        assert following.progress == {"mine": 1}
        await following.release()


async def test_recording_after_the_release_says_so(lock: AsyncRobustLock) -> None:
    async with lock as lease:
        pass
    with pytest.raises(NotHeld):
        await lease.record({"a": 1})
    with pytest.raises(NotHeld):
        await lease.clear_record()


# -- errors on the way in ----------------------------------------------------------------------------------


async def test_a_foreign_key_in_place_of_the_record_is_refused_and_the_lock_given_back(
    lock: AsyncRobustLock, redis: Redis
) -> None:
    await redis.set(RECORD, "mine")
    for _ in range(2):
        with pytest.raises(WrongKeyType):
            await lock.acquire()
        await wait_until(lambda: _free(redis), FAST, timeout=5)
    assert await redis.get(RECORD) == b"mine"
    assert await redis.pttl(RECORD) == -1


async def _subscribed(redis: Redis) -> set[str]:
    """Return the ids of the connections that listen to an inbox at this server."""
    return {client["id"] for client in await redis.client_list() if client["sub"] != "0"}


DEEP = '{"a":' * 1200 + "1" + "}" * 1200
UNREADABLE = {
    "a fence that is no number": {"fence": "abc"},
    "a time beyond all dates": {"at": "9" * 30},
    "a predecessor beyond all dates": {"before": "1234567890123456 " + "9" * 30 + " x"},
    "a predecessor without a fence": {"before": "abc 1234567890123456 x"},
    "half a predecessor": {"before": "12"},
    "a number beyond all numbers": {"seq": "9e99"},
    "deeply nested progress": {"progress": DEEP},
    "deeply nested steps": {"undo": f'[["a",{DEEP}]]'},
    "progress that is a list": {"progress": "[1]"},
    "progress that is nothing": {"progress": "null"},
    "progress that JSON does not know": {"progress": '{"a":NaN}'},
    "a number that becomes infinite": {"progress": '{"a":1e999}'},
    "a number with too many digits": {"progress": '{"a":' + "9" * 5000 + "}"},
    "a step without a name": {"undo": "[[1,{}]]"},
    "a step without arguments": {"undo": '[["a",1]]'},
    "steps that are none": {"undo": "7"},
    "bytes that are no text": {"progress": b'{"a":"\xff"}'},
}


@pytest.mark.parametrize("asks", ["the next one", "the same identity"])
@pytest.mark.parametrize("wrong", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_record_that_cannot_be_read_costs_nobody_else_anything(
    lock: AsyncRobustLock, sync: Coordinator, redis: Redis, wrong: dict[str, str | bytes], asks: str
) -> None:
    """A request for the lock hears what is wrong; what else is held goes on, by the same connection."""
    await AsyncLock(sync, "bystander").acquire()
    first = await lock.acquire(identity="w")
    connections = await _subscribed(redis)
    if asks == "the next one":
        await crash(redis, first)
        if "before" in wrong:  # only who repeats the adoption looks at it
            wrong = {"fence": "x"}
    await redis.hset(RECORD, mapping=wrong)  # type: ignore[arg-type]
    found = await redis.hgetall(RECORD)
    async with asyncio.timeout(10):
        with pytest.raises(WrongKeyType, match="not written by redis_sync_aio") as raised:
            await lock.acquire(timeout=1, identity="w" if asks == "the same identity" else None)
    assert RECORD.decode() in str(raised.value), "it says what to delete"
    if asks == "the next one":
        await wait_until(lambda: _free(redis), FAST, timeout=5)
    else:
        await first.extend(20)
    assert {**await redis.hgetall(RECORD), b"seq": 0, b"writers": 0} == {**found, b"seq": 0, b"writers": 0}
    assert await _subscribed(redis) <= connections, "no new one; the server may hear late of ends of others"
    await redis.delete(RECORD)
    if asks == "the next one":
        async with lock as lease:
            assert lease.abandoned is None


async def test_a_spoiled_record_does_not_keep_the_lock(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire()
    await redis.delete(RECORD)
    await redis.set(RECORD, "mine")
    with pytest.raises(WrongKeyType):
        await lease.record({"a": 1})
    await lease.extend(20)
    await lease.release()
    assert not await redis.exists(NAME)
    assert (await redis.get(RECORD), await redis.pttl(RECORD)) == (b"mine", -1)


async def _free(redis: Redis) -> bool:
    return not await redis.exists(NAME)


async def test_a_record_that_was_evicted_is_written_again(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire()
    await redis.delete(RECORD)
    await lease.record({"a": 1})
    await crash(redis, lease)
    async with lock as following:
        assert is_of(following.abandoned, lease)
        assert following.progress == {"a": 1}
    await assert_undisturbed()


async def test_a_robust_lock_needs_scripts(redis: Redis) -> None:
    with pytest.raises(ValueError, match="needs scripts"):
        AsyncRobustLock(redis, NAME, engine="watch")
    assert AsyncRobustLock(redis, NAME)._keys.engine == "lua", "it does not fall back to what it cannot do"


# -- P5: whichever task is cancelled, the lock is free, and nothing that was recorded is lost ------------------

OLD, NEW = b'{"step":1}', b'{"step":2}'
TURNS = (*range(24), *range(24, 60, 12))
"""After so many turns of the loop a task is cancelled, too: also where something else happens meanwhile."""

Operation: TypeAlias = Callable[[], Coroutine[Any, Any, object]]
Check: TypeAlias = Callable[[bool, object], Coroutine[Any, Any, None]]


async def cancelled_everywhere(operation: Operation, check: Check, *, twice: bool = False) -> None:
    """Cancel it at each of its suspension points, and after each number of turns, and check what is left then."""
    result = await sweep(operation, lambda outcome: check(outcome.cancelled, outcome.value), twice=twice)
    assert result.cancellations.total() >= 2
    for turns in TURNS:
        task = asyncio.create_task(operation())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await check(task.cancelled(), None if task.cancelled() else task.result())


async def abandoned(lock: AsyncRobustLock, redis: Redis) -> RobustLease:
    """Leave a record behind."""
    lease = await lock.acquire()
    await lease.record({"step": 1})
    await crash(redis, lease)
    return lease


async def freed(lock: AsyncRobustLock) -> None:
    async def free() -> bool:
        found = await lock.statistics()
        return (found.held, found.waiting) == (0, 0)

    await wait_until(free, FAST, timeout=5)


async def acquires(lock: AsyncRobustLock) -> object:
    return await lock.acquire()


async def tries(lock: AsyncRobustLock) -> object:
    return await lock.try_acquire()


async def identifies(lock: AsyncRobustLock) -> object:
    return await lock.acquire(identity="w")


async def is_handed_over(lock: AsyncRobustLock) -> object:
    """Get it from a holder that is not robust, so the record stays as it is."""
    plain = AsyncLock(lock._source, NAME)
    theirs = await plain.acquire(timeout=5)

    async def let_go() -> None:
        try:
            await wait_until(waits(plain), FAST, timeout=5)
        finally:
            await theirs.release()

    helper = asyncio.create_task(let_go())
    try:
        return await lock.acquire(timeout=5)
    finally:
        helper.cancel()


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("acquire", [acquires, tries, identifies, is_handed_over])
async def test_a_cancelled_acquire_puts_the_record_back(
    lock: AsyncRobustLock, redis: Redis, acquire: Callable[[AsyncRobustLock], Coroutine[Any, Any, object]], twice: bool
) -> None:
    left_by = await abandoned(lock, redis)
    record = await redis.hgetall(RECORD)

    async def check(cancelled: bool, lease: object) -> None:
        if isinstance(lease, RobustLease):
            assert is_of(lease.abandoned, left_by)
            with pytest.raises(KeyError):
                async with lease:
                    raise KeyError  # a body that fails leaves the record as it found it
        await freed(lock)
        assert await redis.hgetall(RECORD) in (record, {**record, b"seq": b"0", b"writers": b""})

    await cancelled_everywhere(lambda: acquire(lock), check, twice=twice)


async def test_a_cancelled_record_is_written_or_not_and_the_lease_lives(lock: AsyncRobustLock, redis: Redis) -> None:
    async def check(cancelled: bool, _: object) -> None:
        lease.check()
        await lease.record({"step": 1})  # behind the one that was cancelled, and so the last word
        assert await redis.hget(RECORD, "progress") == OLD

    async with lock as lease:
        await lease.record({"step": 1})
        await cancelled_everywhere(lambda: lease.record({"step": 2}), check, twice=True)
    assert not await redis.exists(RECORD)


async def test_a_cancelled_body_never_loses_what_was_recorded(lock: AsyncRobustLock, redis: Redis) -> None:
    done = 0

    async def body() -> None:
        async with lock as lease:
            assert lease.progress == {"step": 1}
            await lease.record({"step": 2})

    async def check(cancelled: bool, _: object) -> None:
        nonlocal done
        await freed(lock)
        progress = await redis.hget(RECORD, "progress")
        if not cancelled or progress is None:  # at its end: cancelled while it was released, the body was done
            assert progress is None
            done += 1
        else:
            assert progress in (OLD, NEW)
        await redis.delete(RECORD)
        await abandoned(lock, redis)

    await abandoned(lock, redis)
    await cancelled_everywhere(body, check)
    assert done >= 3


async def test_a_cancelled_twin_of_an_identity_leaves_the_lease_alone(lock: AsyncRobustLock, redis: Redis) -> None:
    lease = await lock.acquire(identity="w")
    await lease.record({"step": 1})

    async def check(cancelled: bool, twin: object) -> None:
        nonlocal lease
        if isinstance(twin, RobustLease):  # that one records from now on
            lease = twin
        await lease.record({"step": 1})  # the adoption of one that was cancelled is withdrawn
        await lease.extend(30)
        assert await redis.hget(RECORD, "progress") == OLD

    await cancelled_everywhere(lambda: lock.acquire(identity="w"), check)
    await lease.release()
