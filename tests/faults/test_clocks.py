"""P1, P6, P8, FAULTS D13, D14: the wall clock of the server, or of a client, is set ahead or back.

The server's clock decides when a lease ends, so setting it ahead ends leases early, and setting it back lets that
of a crashed holder live longer. What has to hold all the same: fences rise, commits with an old one are refused,
and holders learn it at their next renewal. A client's clock has no effect at all.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRedlock, Coordinator, Lease, LeaseLost, Unreachable, once_per, wait_until
from redis_sync_aio.embedded import EmbeddedServer, ServerNotStarted, find_server
from redis_sync_aio.jobs import OnCrash

from ..support.body import FAST, for_ever, lost_in, waits
from ..support.inside import now
from ..support.processes import Answer, Child
from ..support.views import holder_of, remaining_of

pytestmark = pytest.mark.real
NAME = "clocks"
JUMPS = (15, 30, -3600)
TTL = 20.0


def library() -> Path:
    """Return the path of the library to preload; LookupError says why there is none."""
    found = importlib.util.find_spec("libfaketime")  # finding does not run it: what it imports is not needed
    name = "libfaketime.1.dylib" if sys.platform == "darwin" else "libfaketime.so.1"
    for place in found.submodule_search_locations or () if found else ():
        for path in Path(place).rglob(name):
            return path
    raise LookupError("no libfaketime: pip install --group clocks (needs make and a C compiler)")


class FakeClock:
    """A wall clock that can be set, for processes that are started with it; their other clocks stay as they are.

    LookupError: there is no libfaketime. ``pip install --group clocks`` gets it, and needs make and a C compiler.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        preload = "DYLD_INSERT_LIBRARIES" if sys.platform == "darwin" else "LD_PRELOAD"
        self.environment = {
            preload: str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.jump(0)

    def jump(self, seconds: float) -> None:
        """Let the clock be so many seconds ahead of the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+}")
        os.replace(new, self._file)

    def wrapped(self, program: str) -> Path:
        """Return an executable that runs ``program`` under this clock."""
        script = self._file.with_suffix(".sh")
        settings = " ".join(f"{name}='{value}'" for name, value in self.environment.items())
        script.write_text(f"#!/bin/sh\n{settings} exec '{program}' \"$@\"\n")
        script.chmod(0o755)
        return script


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    try:
        return FakeClock(tmp_path)
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture
def server(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    """A server of our own, whose wall clock is ``clock``."""
    with monkeypatch.context() as patch:
        patch.setenv("REDIS_SYNC_AIO_SERVER", str(clock.wrapped(find_server())))
        server = EmbeddedServer(port=0)
        try:
            server.start()
        except ServerNotStarted as error:
            pytest.skip(f"this server does not run under libfaketime: {error}")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedServer]:
    """A server whose clock is right."""
    with EmbeddedServer(port=0) as running:
        yield running


async def server_jump(redis: Redis, clock: FakeClock, seconds: float) -> None:
    """Set the server's clock; return when it shows, which may take some milliseconds."""
    clock.jump(seconds)

    async def shows() -> bool:
        shown, _ = await redis.time()
        return abs(int(shown) - time.time() - seconds) < 2

    await wait_until(shows, FAST, timeout=15)


async def left_between(redis: Redis, low: float, high: float) -> bool:
    """Return whether the lock's key has so many seconds left."""
    return low * 1000 < int(await redis.pttl(NAME)) <= high * 1000


class Resource:
    """What the lock protects: takes no commit that is older than what it has seen."""

    def __init__(self) -> None:
        self.last = 0

    def commit(self, lease: Lease) -> bool:
        if lease.fence < self.last:
            return False
        self.last = lease.fence
        return True


# -- D13: the server's clock ---------------------------------------------------------------------------------


async def test_p8_d13_fences_rise_whatever_the_clock_does(clock: FakeClock, redis: Redis, sync: Coordinator) -> None:
    lock = AsyncLock(sync, NAME)
    fence = 0
    for seconds in (0, 15, 30, -3600, 0, -3600, -7200, 30):
        await server_jump(redis, clock, seconds)
        for _ in range(3):
            lease = await lock.acquire(timeout=15)
            assert lease.fence > fence
            fence = lease.fence
            await lease.release()


async def test_d13_ahead_by_less_than_the_ttl(clock: FakeClock, redis: Redis, sync: Coordinator) -> None:
    """15 of 20 s are gone in one step: nobody else has it, and the next renewal makes up for it."""
    lock = AsyncLock(sync, NAME, ttl=TTL)
    lease = await lock.acquire()
    await server_jump(redis, clock, 15)
    assert 0 < (remaining_of(await lock.statistics()) or 0) <= 5
    assert await lock.try_acquire() is None
    await lease.extend(TTL)
    assert TTL / 2 < (remaining_of(await lock.statistics()) or 0) <= TTL
    await lease.release()


async def test_p8_d13_ahead_by_more_than_the_ttl(clock: FakeClock, redis: Redis, sync: Coordinator) -> None:
    """Another has it early; the fence refuses the first one's commit, which the next renewal would have told him."""
    lock, resource = AsyncLock(sync, NAME, ttl=TTL), Resource()
    lease = await lock.acquire()
    assert resource.commit(lease)
    await server_jump(redis, clock, 30)
    other = await lock.acquire(timeout=15)
    assert other.fence > lease.fence
    assert resource.commit(other)
    lease.check()  # it cannot know yet
    assert not resource.commit(lease)
    with pytest.raises(LeaseLost) as caught:
        await lease.extend(TTL)
    assert caught.value.reason == "taken"
    assert await redis.get(NAME) == other.token.encode()
    await other.release()


async def test_p6_d13_ahead_is_noticed_at_the_next_renewal(clock: FakeClock, redis: Redis, sync: Coordinator) -> None:
    ttl, jumped = 3.0, []

    async def body(_: Lease) -> None:
        await server_jump(redis, clock, 30)
        jumped.append(now())
        await for_ever()

    _, loss = await lost_in(AsyncLock(sync, NAME, ttl=ttl).acquire(), body)
    assert loss.reason == "expired"
    assert now() - jumped[0] <= ttl / 3 + 5


async def test_p6_d13_back_loses_nothing(clock: FakeClock, redis: Redis, sync: Coordinator) -> None:
    """An hour back: renewals set the remaining time right, and the hand-over works."""
    ttl = 3.0
    lock = AsyncLock(sync, NAME, ttl=ttl)
    async with lock as lease:
        await server_jump(redis, clock, -3600)
        assert await redis.pttl(NAME) > 3_000_000
        await wait_until(partial(left_between, redis, 0, ttl), FAST, timeout=15)
        first = lease._grant.deadline
        await wait_until(lambda: lease._grant.deadline > first, FAST, timeout=15)
        waiter = asyncio.create_task(lock.acquire())
        await wait_until(waits(lock), FAST, timeout=15)
        lease.check()
    other = await asyncio.wait_for(waiter, 15)
    assert other.fence > lease.fence
    assert other.remaining() <= ttl
    await other.release()


async def test_d13_back_makes_a_crashed_holder_last_longer(clock: FakeClock, redis: Redis, sync: Coordinator) -> None:
    """As documented; an operator can end it."""
    lock = AsyncLock(sync, NAME, ttl=TTL, auto_renew=False)
    dead = await lock.acquire()  # and is never heard of again
    await server_jump(redis, clock, -3600)
    found = await lock.statistics()
    assert 3600 < (remaining_of(found) or 0) <= 3600 + TTL
    assert await lock.try_acquire() is None
    await lock.force_release()
    lease = await lock.acquire(timeout=15)
    assert lease.fence > dead.fence
    await lease.release()


@pytest.mark.parametrize("seconds", JUMPS)
async def test_p6_d13_set_while_one_waits(clock: FakeClock, redis: Redis, sync: Coordinator, seconds: int) -> None:
    """Between request and grant: the lease that is handed over is never longer than what was granted."""
    lock = AsyncLock(sync, NAME, ttl=TTL)
    holder = await lock.acquire()
    waiter = asyncio.create_task(lock.acquire())
    await wait_until(waits(lock), FAST, timeout=15)
    await server_jump(redis, clock, seconds)
    if seconds < TTL:
        await holder.release()
    else:
        with pytest.raises(LeaseLost):
            await holder.extend(TTL)  # finds it gone, and settles the name
    lease = await asyncio.wait_for(waiter, 15)
    assert lease.fence > holder.fence
    assert 0 < lease.remaining() <= TTL
    found = await lock.statistics()
    assert holder_of(found) == lease.token
    assert lease.remaining() <= (remaining_of(found) or 0) + 0.001
    await lease.release()


# -- D14: a client's clock -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_d14_the_clock_of_a_client_has_no_effect(shared: EmbeddedServer, clock: FakeClock, seconds: int) -> None:
    """It holds, renews, is waited for and waits, and hands over, as if nothing had happened."""
    ttl = 4.0
    child = Child(clock.environment)
    try:
        child.attach()
        async with shared.client() as redis, Coordinator(redis) as sync:
            await redis.flushall()
            lock = AsyncLock(sync, NAME, ttl=5)
            await child.open(shared.url)
            body = await child.ask("body", "held", NAME, ttl)
            waiter = asyncio.create_task(lock.acquire())
            await wait_until(waits(lock), FAST, timeout=15)
            clock.jump(seconds)

            async def shows() -> bool:
                shown: float = (await child.ask("lease", "held"))["wall"]
                return abs(shown - time.time() - seconds) < 2

            await wait_until(shows, FAST, timeout=15)
            for _ in range(2):  # renewals
                await wait_until(partial(left_between, redis, 0, 0.85 * ttl), FAST, timeout=15)
                await wait_until(partial(left_between, redis, 0.9 * ttl, ttl), FAST, timeout=15)
            found = await child.ask("lease", "held")
            assert found["lost"] is False
            assert 0 < found["remaining"] <= ttl
            assert not waiter.done()
            assert (await child.ask("leave", "held"))["raised"] == ""
            lease = await asyncio.wait_for(waiter, 15)
            assert lease.fence > body.fence
            waiting = child.acquire(NAME, ttl)
            await wait_until(waits(lock), FAST, timeout=15)
            clock.jump(-seconds)
            await lease.release()
            granted = await asyncio.wait_for(waiting, 15)
            assert granted.fence > lease.fence
            assert 0 < granted["remaining"] <= ttl
            await child.release()
            assert not await lock.locked()
    finally:
        child.detach()
        child.end()


async def test_p8_fences_of_a_redlock_with_a_server_an_hour_ahead(clock: FakeClock, redis: Redis) -> None:
    """Its fences are not used: when it hangs, and another one has forgotten, those of the others still rise."""
    await server_jump(redis, clock, 3600)
    fences: list[int] = []
    async with AsyncExitStack() as stack:
        second, third = [stack.enter_context(EmbeddedServer()) for _ in range(2)]
        clients = [redis, *[await stack.enter_async_context(server.client()) for server in (second, third)]]
        lock = AsyncRedlock(clients, NAME, ttl=3)
        third.kill()
        with pytest.raises(Unreachable, match="differ by more than 10 seconds"):
            fences.append((await lock.acquire(timeout=3)).fence)
        second.kill()
        second.restart(keep_data=False)
        third.restart(keep_data=False)
        async with lock.acquire(timeout=10) as lease:
            await wait_until(lambda: lease.held_on == 3, FAST, timeout=15)
            fences.append(lease.fence)
    assert fences == sorted(set(fences))
    assert fences[-1] < (time.time() + 60) * 1_000_000


# -- jobs by clocks that differ ------------------------------------------------------------------------------


PROCESSES, DAYS, DAY = 20, 8, 86_400
CRASHES = ("2001-02-04", "2001-02-06")
"""The slots whose first run is killed."""


async def run_nightly(sync: Coordinator, directory: str, on_crash: OnCrash, ahead: str) -> dict[str, object]:
    """In a child: go from day to day by a clock of its own, and run the job of a millisecond once for each."""
    client, clock = sync.client, FakeClock(Path(directory))
    difference = time.time() - time.monotonic()  # between a clock that is right and one that cannot be set
    seen: set[str] = set()

    @once_per(sync, "nightly:{now:%Y-%m-%d}", on_crash=on_crash, ttl=8)
    async def nightly() -> None:
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        if await client.incr(f"began:{day}") == 1 and day in CRASHES:
            os.kill(os.getpid(), signal.SIGKILL)
        await client.incr(f"ended:{day}")

    for day in range(DAYS):
        shown = datetime(2001, 2, 1, 12, tzinfo=UTC).timestamp() + day * DAY + float(ahead)
        seconds = shown - time.monotonic() - difference
        clock.jump(seconds)
        while abs(time.time() - time.monotonic() - difference - seconds) > 60:
            await asyncio.sleep(0.001)
        seen.add(f"{datetime.now(UTC):%Y-%m-%d}")
        await nightly()
    return {"seen": sorted(seen)}


@pytest.mark.ci
@pytest.mark.parametrize("on_crash", ["skip", "again"])
async def test_p1_d14_each_slot_runs_once_by_clocks_that_differ(
    shared: EmbeddedServer, tmp_path: Path, on_crash: OnCrash
) -> None:
    """Twenty processes, by clocks up to 18 hours ahead or late; but for two slots whose first run is killed."""
    children: list[Child] = []
    try:
        async with shared.client() as redis:
            await redis.flushall()
            answers = []
            for number in range(PROCESSES):
                directory = tmp_path / str(number)
                directory.mkdir()
                try:
                    children.append(Child(FakeClock(directory).environment))
                except LookupError as error:
                    pytest.skip(str(error))
                children[-1].attach()
            for child in children:
                await child.open(shared.url, claim=None)
            for number, child in enumerate(children):
                ahead = 36 / PROCESSES * (number - PROCESSES // 2) * 3600
                answers.append(child.run(run_nightly, tmp_path / str(number), on_crash, ahead))
            found = await asyncio.gather(*answers, return_exceptions=True)
            lived = [one for one in found if isinstance(one, Answer)]
            assert len(lived) == PROCESSES - len(CRASHES), found
            days = {day for one in lived for day in one["seen"]}
            assert len(days) == DAYS + 2  # those ahead see a day more, and those that are late an earlier one
            for day in days:
                runs = [int(await redis.get(f"{what}:{day}") or 0) for what in ("began", "ended")]
                expected = [1, 1] if day not in CRASHES else [1, 0] if on_crash == "skip" else [2, 1]
                assert runs == expected, day
    finally:
        for child in children:
            child.detach()
            child.end()
