"""P5: `inspect` is cancelled at any await, or loses an answer, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from redis_sync_aio import Coordinator, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import NameView, inspect
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.sweep import Outcome, sweep


@contextmanager
def abandoned() -> Iterator[list[str]]:
    """Collect the names of generators of this package that nobody closes; the loop would start a task for each."""
    names: list[str] = []
    hooks = sys.get_asyncgen_hooks()

    def finalize(generator: Any) -> None:
        if "redis_sync_aio" in generator.ag_code.co_filename:
            names.append(generator.ag_code.co_name)
        if hooks.finalizer is not None:
            hooks.finalizer(generator)

    sys.set_asyncgen_hooks(finalizer=finalize)
    try:
        yield names
    finally:
        sys.set_asyncgen_hooks(*hooks)


async def usable_again(looker: Redis) -> None:
    """Wait until the only connection of the pool is back, in step, and leads to the server."""

    async def answers() -> bool:
        try:
            return bool(await looker.ping())
        except RedisConnectionError as error:  # MaxConnectionsError since redis-py 7.2
            if str(error) != "Too many connections":
                raise
            return False

    await wait_until(answers, FAST, timeout=20)


async def test_p5_cancelled_at_any_await(redis: Redis, make_client: MakeClient, sync: Coordinator) -> None:
    """In both rounds, in the pause before the second look, and with the pool's only connection."""
    looker = make_client(max_connections=1)
    async with sync.lock("cut:lock", ttl=600), sync.semaphore("cut:permits", limit=2, ttl=600):
        state = await redis.dump("{cut:permits}:sem:state")
        await redis.delete("{cut:permits}:sem:state")  # may be the moment between two reads: it is looked at twice
        problems = {it.name: [one.code for one in it.problems] for it in await inspect(looker, "cut:*")}
        assert problems == {"cut:lock": [], "cut:permits": ["permits_lost"]}

        async def check(outcome: Outcome[tuple[NameView, ...]]) -> None:
            await usable_again(looker)

        with abandoned() as generators:
            result = await sweep(lambda: inspect(looker, "cut:*"), check)
        assert sum(result.cancellations.values()) >= 10
        assert generators == []
        assert state is not None
        await redis.restore("{cut:permits}:sem:state", 0, state)  # so that the permit can be released


@pytest.mark.parametrize("pattern", ["few:*", "few:1"])
async def test_it_closes_its_search_when_it_has_enough(redis: Redis, sync: Coordinator, pattern: str) -> None:
    async with sync.lock("few:1"), sync.lock("few:2"):
        with abandoned() as generators:
            assert len(await inspect(redis, pattern, limit=1)) == 1
        assert generators == []


@pytest.mark.parametrize(
    "action", [Action.CUT_BEFORE, Action.CUT_AFTER, Action.SWALLOW_REPLY], ids=["cut-before", "cut-after", "swallow"]
)
async def test_p4_an_answer_is_lost(server: EmbeddedServer, sync: Coordinator, action: Action) -> None:
    """It says so, and the next call works: the connection that lost it is not used again."""
    async with (
        sync.lock("lost:1"),
        FaultProxy(server.unix_socket) as proxy,
        Redis(
            host=proxy.host, port=proxy.port, max_connections=1, socket_timeout=2, retry=Retry(NoBackoff(), 0)
        ) as looker,
    ):
        for command in ("SCAN", "GET", "PUBSUB", "HGET"):
            rule = proxy.on(command, action)
            with pytest.raises(Unreachable, match="did not answer while its names were read"):
                await inspect(looker, "lost:*")
            assert rule.fired.is_set(), command
            await usable_again(looker)
            assert [it.name for it in await inspect(looker, "lost:*")] == ["lost:1"]
