"""Redlock as the textbooks show it: what it does not do, and that ours does (docs/classic-patterns.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from redis_sync_aio import AsyncRedlock, wait_until
from redis_sync_aio.embedded import EmbeddedServer

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.factories import Client
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.proxy import SWALLOW_REPLY, FaultProxy, command
from ..support.textbook import decoded, give_back_everywhere, take_majority
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.timing
NAME = "everywhere"


@pytest_asyncio.fixture
async def plain(redis: Redis, make_client: MakeClient) -> AsyncIterator[list[Client]]:
    """Five databases stand for five servers."""
    yield [decoded(make_client(db=number, decode_responses=True)) for number in range(5)]


async def holders(plain: list[Client]) -> list[str | None]:
    return [await one.get(NAME) for one in plain]


async def test_textbook_redlock_splits(plain: list[Client]) -> None:
    """Three come together, and each has the answer of some servers first: nobody has a majority, all try again."""
    all_alike = asyncio.Barrier(3).wait
    tried = await asyncio.gather(
        take_majority(plain, NAME, "a", gap=all_alike),
        take_majority(plain[2:] + plain[:2], NAME, "b", gap=all_alike),
        take_majority(plain[4:] + plain[:4], NAME, "c", gap=all_alike),
    )
    assert not any(tried)


async def test_redlock_that_is_split_is_had_by_all_in_turn(plain: list[Client], make_client: MakeClient) -> None:
    order: list[int] = []

    async def work(number: int) -> None:
        async with AsyncRedlock([make_client(db=number) for number in range(5)], NAME):
            order.append(number)

    async with asyncio.timeout(5):
        await asyncio.gather(*(work(number) for number in range(3)))
    assert sorted(order) == [0, 1, 2]


async def test_textbook_redlock_leaves_what_had_no_answer(plain: list[Client], redis: Redis) -> None:
    """Who gives back only where he was told that he has it leaves the lock on the others for its ttl."""
    assert await take_majority(plain[:3], NAME, "a")
    told = plain[:2]  # of the third server no answer came in time
    await give_back_everywhere(told, NAME, "a")
    assert await holders(plain[:3]) == [None, None, "a"]


async def test_redlock_is_given_back_where_no_answer_came(
    plain: list[Client], make_client: MakeClient, server: EmbeddedServer
) -> None:
    async with FaultProxy(server.unix_socket) as proxy:
        silent = Redis(host=proxy.host, port=proxy.port, db=2)
        proxy.on(command("EVALSHA"), SWALLOW_REPLY)
        lock = AsyncRedlock([make_client(db=0), make_client(db=1), silent], NAME, answer_within=0.1)
        async with lock as lease:
            assert lease.held_on == 2

        async def free() -> bool:
            return await holders(plain[:3]) == [None] * 3

        await wait_until(free, FAST, timeout=15)
        await silent.aclose()
