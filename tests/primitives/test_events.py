"""Events: what observers are told of requests, leases and coordinators."""

from __future__ import annotations

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, Coordinator
from redis_sync_aio.instrumentation import Event, Granted, Released, Requested, observe_all


async def test_a_lease_is_told_from_its_request_to_its_release(redis: Redis) -> None:
    told: list[Event] = []
    async with Coordinator(redis, observe=told.append) as sync, sync.lock("orders:42") as lease:
        fence, token = lease.fence, lease.token
    requested, granted, released = told
    assert isinstance(requested, Requested)
    assert isinstance(granted, Granted)
    assert isinstance(released, Released)
    assert granted.fence == fence
    assert granted.token == token
    assert not granted.contended
    assert {(event.kind, event.name, event.pattern) for event in told} == {("lock", "orders:42", "orders:*")}
    assert len({event.request for event in told}) == 1
    assert requested.time <= granted.time <= released.time


async def test_all_coordinators_are_observed_those_made_before_and_implicit_ones_too(redis: Redis) -> None:
    told: list[Event] = []
    async with Coordinator(redis) as before:
        with observe_all(told.append):
            async with before.lock("a"), AsyncLock(redis, "b"):
                pass
        async with before.lock("c"):
            pass
    assert [type(event).__name__ + " " + event.name for event in told] == [
        *("Requested a", "Granted a", "Requested b", "Granted b", "Released b", "Released a"),
    ]
