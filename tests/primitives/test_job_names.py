"""The names of jobs and slots: each thing to do has one name, and no two things have the same."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator, idempotent, once, once_per, synchronized, watch_retry
from redis_sync_aio.errors import FingerprintMismatch
from redis_sync_aio.types import Transaction

DAY = 86_400
BERLIN = ZoneInfo("Europe/Berlin")


async def nothing() -> None: ...


async def marks(redis: Redis) -> set[str]:
    return {key.decode() async for key in redis.scan_iter("*:mark")}


async def seconds_kept(redis: Redis) -> float:
    """The time that the only mark lasts, and which it has just begun."""
    (mark,) = await marks(redis)
    return round(await redis.pttl(mark) / 1000)


async def runs(sync: Coordinator, name: str, slot: object) -> bool:
    async with once(sync, name, slot=slot) as lease:
        return lease is not None


# -- values ------------------------------------------------------------------------------------------------

PAIRS = [("a:b", "c"), ("a", "b:c"), ("a%3Ab", "c"), ("a", "b%3Ac")]


async def test_two_requests_never_share_a_result(sync: Coordinator) -> None:
    """Whatever colons their arguments have. Nor do two fingerprints become the same."""

    @idempotent(sync, "pay:{account}:{key}")
    async def pay(account: str, key: str) -> list[str]:
        return [account, key]

    @idempotent(sync, "pay", fingerprint="{account}:{key}")
    async def same(account: str, key: str) -> None: ...

    assert [await pay(*pair) for pair in PAIRS] == [list(pair) for pair in PAIRS]
    await same(*PAIRS[0])
    for pair in PAIRS[1:]:
        with pytest.raises(FingerprintMismatch):
            await same(*pair)


async def test_two_slots_are_never_the_same(sync: Coordinator) -> None:
    @once_per(sync, "report:{customer}:{kind}:{now:%Y-%m-%d}")
    async def report(customer: str, kind: str) -> bool:
        return True

    assert [await report(*pair) for pair in PAIRS] == [True] * len(PAIRS)
    assert [await runs(sync, *pair) for pair in (("a:b", "c"), ("a", "b:c"), ("a", "b%3Ac"))] == [True] * 3


async def test_two_calls_never_exclude_each_other_by_their_colons(sync: Coordinator) -> None:
    """And the call of plain values has the name that other programs spell."""
    held: list[str] = []

    @synchronized(sync, "user:{{{tenant}}}:{user.name}-{kind}", timeout=0)
    async def outer(tenant: str, user: Any, kind: str, then: Callable[[], Awaitable[None]]) -> None:
        held.extend(one.name for one in sync.statistics())
        await then()

    class User:
        name = "ann"

    class Other:
        name = "a-n"

    async def inner() -> None:
        await outer("acme", User, "x-y", nothing)
        await outer("acme", Other, "y", nothing)
        await outer("a}:b", User, "x", nothing)

    await outer("acme", User, "x", inner)
    assert held[0] == "user:{acme}:ann-x"
    assert set(held) == {
        "user:{acme}:ann-x",
        "user:{acme}:ann-x%2Dy",
        "user:{acme}:a%2Dn-y",
        "user:{a%7D:b}:ann-x",
    }


async def test_a_name_of_one_value_is_that_value(sync: Coordinator) -> None:
    """It can be the whole name of a lock that other programs use; bytes are text."""

    @synchronized(sync, "{name}")
    async def held(name: str | bytes) -> bool:
        return await AsyncLock(sync, "orders:42%").locked()

    assert await held("orders:42%")
    assert await held(b"orders:42%")


async def test_keys_of_data_are_not_escaped(sync: Coordinator, redis: Redis) -> None:
    """The body of a transaction spells them as well."""

    @watch_retry(sync, "seat:{hall}:{number}")
    async def book(tx: Transaction, hall: str, number: str) -> Any:
        found = await tx.get(f"seat:{hall}:{number}")
        tx.multi()
        return found

    await redis.set("seat:a:b:c", "free")
    assert await book("a:b", "c") == b"free"


@pytest.mark.parametrize("name", ["{a}{b}", "{a}x{b}", "{a}%{b}", "{a}{now:%Y}", "{now:%Y}{a}"])
async def test_fields_that_nothing_separates_are_refused(sync: Coordinator, name: str) -> None:
    async def function(a: str, b: str) -> None: ...

    with pytest.raises(ValueError, match="separate them"):
        once_per(sync, name)(function)
    if "now" not in name:
        with pytest.raises(ValueError, match="separate them"):
            idempotent(sync, "key", fingerprint=name)(function)
        with pytest.raises(ValueError, match="separate them"):
            synchronized(sync, name)(function)


async def test_a_slot_is_its_text(sync: Coordinator, redis: Redis) -> None:
    assert await runs(sync, "job", date(2026, 1, 2))
    assert not await runs(sync, "job", "2026-01-02")
    assert not await runs(sync, "job", b"2026-01-02")
    assert await marks(redis) == {"{job:2026-01-02}:mark"}


@pytest.mark.parametrize(
    "slot", [None, datetime(2026, 1, 2, 3, 4, 5, 6), object(), nothing, b"\xff"], ids=lambda slot: type(slot).__name__
)
async def test_a_slot_that_no_other_call_names_is_refused(sync: Coordinator, slot: object) -> None:
    """None is one that was forgotten, and a time with microseconds or an address is another one at every call."""
    with pytest.raises((TypeError, ValueError)):
        once(sync, "job", slot=slot)


async def test_an_argument_without_a_text_is_refused(sync: Coordinator) -> None:
    @once_per(sync, "job:{user}")
    async def job(user: object) -> None: ...

    with pytest.raises(TypeError, match="no text of its own"):
        await job(object())


# -- the time of a call --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("job:{0:%Y-%m-%d}", r"the time of the call is \{now:%Y-%m-%d\}"),
        ("job:{now}", "no format"),
        ("job:{now!s}", "no format"),
        ("job:{now.year}", "no format"),
        ("job:{now:{kind}}", "not only a format"),
        ("job:{now:day}", "the same at all times"),
        ("job:{now:%Y-%m-%d %H:%M:%S}", "finer than a minute"),
        ("job:{now:%f}", "finer than a minute"),
        ("job:{now:%c}", "finer than a minute"),
        ("job:{now!z}", "not a template"),
        ("job:{day}", "does not take"),
        ("", "must not be empty"),
    ],
)
async def test_a_name_that_makes_no_slots_is_refused_at_decoration(sync: Coordinator, name: str, matches: str) -> None:
    async def function(kind: str) -> None: ...

    with pytest.raises(ValueError, match=matches):
        once_per(sync, name)(function)


class Abstract(tzinfo):
    """A time zone without an offset."""

    utcoffset = dst = tzname = tzinfo.utcoffset  # type: ignore[assignment]


@pytest.mark.parametrize("tz", ["Europe/Berlin", Abstract()], ids=lambda tz: type(tz).__name__)
async def test_a_time_zone_is_a_tzinfo_with_an_offset(sync: Coordinator, tz: Any) -> None:
    with pytest.raises(TypeError, match="tz must be a tzinfo"):
        once_per(sync, "job:{now:%Y}", tz=tz)


async def test_an_argument_is_not_taken_for_the_time(sync: Coordinator) -> None:
    async def function(now: str) -> None: ...

    with pytest.raises(ValueError, match="rename the argument"):
        once_per(sync, "job:{now:%Y}")(function)


@pytest.mark.parametrize(
    ("name", "tz", "kept"),
    [
        ("job", UTC, DAY),
        ("job:{now:%Y-%m-%dT%H:%M}", UTC, DAY),
        ("job:{now:%Y-%m-%d}:{now:%H}", UTC, DAY),
        ("job:{now:%Y-%m-%d}", UTC, 2 * DAY),
        ("job:{now:%G-W%V}", UTC, 14 * DAY),
        ("job:{now:%Y-%m}", UTC, 62 * DAY),
        ("job:{now:%Y-%m}", BERLIN, 62 * DAY + 7200),
        ("job:{now:%Y}", UTC, 732 * DAY),
        ("job:{now:%H:%M}", UTC, DAY - 60),  # it comes again each day
        ("job:{now:%A}", UTC, 2 * DAY),
        ("job:{now:%U}", UTC, 14 * DAY),
    ],
)
async def test_a_slot_is_kept_for_longer_than_it_lasts(
    sync: Coordinator, redis: Redis, name: str, tz: tzinfo, kept: float
) -> None:
    """And, if its name comes again, not until then."""
    await once_per(sync, name, tz=tz)(nothing)()
    assert await seconds_kept(redis) == kept


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("job:{now:%Y-%m-%d}", DAY),
        ("job:{now:%Y-%m}", timedelta(days=31)),
        ("job:{now:%Y}", 366 * DAY),
        ("job:{now:%Y-%m-%d %H}", 3600),
        ("job:{now:%H}", DAY - 3599),
        ("job:{now:%d}", 28 * DAY),
    ],
)
async def test_a_time_that_does_not_fit_the_slot_is_refused(sync: Coordinator, name: str, keep: Any) -> None:
    with pytest.raises(ValueError, match=r"keep must be .* Leave keep out"):
        once_per(sync, name, keep=keep)
    once_per(sync, "job", keep=keep)


@pytest.mark.real
async def test_the_hour_that_comes_twice_is_two_slots(
    sync: Coordinator, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs once. A day with such an hour is one slot, and an hour with its offset in the name is told by that."""
    at = {
        "first": datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        "second": datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    }
    names = "{now:%Y-%m-%d %H}", "with an offset {now:%H%z %d %m %Y}", "{now:%Y-%m-%d}"
    hourly, offset, daily = (once_per(sync, name, tz=BERLIN)(work) for name in names)
    found = []
    for time_of_day in at.values():
        monkeypatch.setattr(time, "time_ns", lambda it=time_of_day: int(it.timestamp()) * 1_000_000_000)
        for job in (hourly, offset, daily):
            found.append([await job(), await job()])
    assert found == [[True, None]] * 3 + [[True, None], [True, None], [None, None]]
    assert {mark for mark in await marks(redis) if "offset" not in mark} == {
        f"{{2026-10-25{hour}}}:mark" for hour in (" 02", " 02+0100", "")
    }


async def work() -> bool:
    return True
