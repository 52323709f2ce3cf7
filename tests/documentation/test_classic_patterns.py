"""The classic patterns: docs/classic-patterns.md runs the textbook's code; here ours stands the same tests.

What most rows need (late releases, lost replies, crashed holders, timeouts) is proved for every primitive in
`conformance` and `faults`. Here are the clocks of clients, a client that is cut off on its way, and the market.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from pathlib import Path

import pytest
import pytest_asyncio
import redis as blocking
from redis.asyncio import Redis

from benchmarks.market import (
    MARKET,
    ByLock,
    ByTransaction,
    ByWatch,
    Market,
    audit,
    funds,
    open_market,
)
from redis_sync_aio import AsyncSemaphore, Coordinator, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing.faults import Action, anything
from redis_sync_aio.types import Push

from ..conftest import MakeClient
from ..support.body import FAST
from ..support.pairwise import first_of
from ..support.wired import wired
from .site import anchors

PAGE = Path(__file__).parents[2] / "docs" / "classic-patterns.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")
def test_every_row_of_the_table_leads_to_a_section_and_every_section_advises() -> None:
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| \[[^\]]+\]\(#([\w-]+)\)", text, re.M)
    assert len(rows) == 15
    assert set(rows) <= anchors(text)
    for section in text.split("\n## ")[1:]:
        assert "**Where it fails.**" in section
        assert "**Write instead**" in section


# -- locks and semaphores --------------------------------------------------------------------------------------


MOST_MS = 300_000
"""Ten times the ttl: a stall of the machine may make a key a little too young."""


async def cut_off(server: EmbeddedServer, mode: str, way: Action, number: int) -> bool:
    """Acquire; after so many commands the client is cut off for good. Return whether it was acquired before."""
    async with wired(server, mode, retry_for=2, name=f"cut off {mode} {way is Action.CUT_AFTER} {number}") as w:
        w.proxy.on(anything, way, times=None, skip=number)
        try:
            await w.lock().acquire()
        except Unreachable:
            left = await w.direct.pttl(w.name)
            assert left == -2 or 0 < left < MOST_MS
            return False
        assert 0 < await w.direct.pttl(w.name) < MOST_MS
        return True


@pytest.mark.parametrize("mode", first_of("link", "plain"))
async def test_p12_no_crash_leaves_a_lock_without_a_ttl(server: EmbeddedServer, mode: str) -> None:
    """P12: wherever on its way the client is cut off for good, there is no lock, or it has a ttl."""
    for way in (Action.CUT_BEFORE, Action.CUT_AFTER):
        got = [await cut_off(server, mode, way, number) for number in (*range(13), 120)]
        assert not got[0]
        assert got[-1], "not all points were met"
        assert sorted(got) == got


SKEWS = (0.0, 10.0, -10.0)
"""Seconds by which the clocks of three clients are apart from the server's."""
SKEW = ContextVar("SKEW", default=0.0)
TTL = 5.0


@pytest.mark.parametrize("push", ["always", "never"])
async def test_p1_p2_d14_clients_whose_clocks_are_10_seconds_apart(
    redis: Redis, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, push: Push
) -> None:
    """P1, P2: never more than the limit, in the order of arrival; a renewal keeps what it says.

    The wall clock depends on the task that looks. The ttl is shorter than the clocks are apart.
    """
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + SKEW.get())
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(SKEW.get() * 1e9))
    watch, inside, may_leave = AsyncSemaphore(redis, "semaphore", limit=2), set[str](), asyncio.Event()

    async def work(semaphore: AsyncSemaphore, who: str) -> int:
        lease = await semaphore.acquire(identity=who)
        inside.add(who)
        assert len(inside) <= 2, inside
        await lease.extend(TTL)
        assert TTL - 1 < lease.remaining() <= TTL
        holders = {one.token: one.remaining or 0.0 for one in (await watch.statistics()).holders}
        assert TTL - 1 < holders[who] <= TTL
        await may_leave.wait()
        inside.remove(who)
        await lease.release()
        return lease.fence

    def arrived(count: int) -> Callable[[], Awaitable[bool]]:
        async def condition() -> bool:
            seen = await watch.statistics()
            return seen.held + seen.waiting == count

        return condition

    clients = []
    for skew in SKEWS:
        context = copy_context()
        context.run(SKEW.set, skew)
        clients.append((context, context.run(Coordinator, make_client(), push=push)))
    working: list[asyncio.Task[int]] = []
    for number in range(9):
        context, sync = clients[number % len(clients)]
        asking = work(AsyncSemaphore(sync, "semaphore", limit=2, ttl=TTL), str(number))
        working.append(asyncio.create_task(asking, context=context))
        await wait_until(arrived(number + 1), FAST, timeout=15)
    assert (await watch.statistics()).held == 2
    may_leave.set()
    fences = await asyncio.gather(*working)
    assert fences == sorted(fences), "P2"
    for _, sync in clients:
        await sync.aclose()


# -- the market ------------------------------------------------------------------------------------------------

SELLERS, BUYERS, ITEMS, MONEY = ["s0", "s1", "s2"], ["b0", "b1", "b2"], 10, 10_000


def client_of(sync: Coordinator) -> Redis:
    assert isinstance(sync.client, Redis)
    return sync.client


WAYS: Mapping[str, Callable[[Coordinator], Market]] = {
    "watch": lambda sync: ByWatch(client_of(sync), fine=False),
    "watch-fine": lambda sync: ByWatch(client_of(sync), fine=True),
    "lock": lambda sync: ByLock(client_of(sync), lambda goods: sync.lock("lock:market")),
    "lock-fine": lambda sync: ByLock(client_of(sync), lambda goods: sync.lock(f"lock:{goods}")),
    "transaction": lambda sync: ByTransaction(client_of(sync), sync, fine=False),
    "transaction-fine": lambda sync: ByTransaction(client_of(sync), sync, fine=True),
}
each_way = pytest.mark.parametrize("way", WAYS)


@pytest_asyncio.fixture
async def ledger(server: EmbeddedServer, redis: Redis) -> AsyncIterator[blocking.Redis]:
    """A client that has opened the market, to look into the books."""
    with blocking.Redis.from_url(server.url) as client:
        open_market(client, SELLERS, BUYERS, ITEMS, MONEY)
        yield client


def wrong(ledger: blocking.Redis) -> list[str]:
    return audit(ledger, SELLERS, BUYERS, ITEMS, MONEY)


def soon() -> float:
    return time.monotonic() + 60


def between(market: Market, gap: Callable[[], Awaitable[object]]) -> None:
    """Let ``gap`` happen between looking and writing, from now on."""

    async def looked() -> None:
        await gap()

    market.looked = looked  # type: ignore[method-assign]


async def test_the_audit_finds_what_a_market_without_protection_does(sync: Coordinator, ledger: blocking.Redis) -> None:
    """It sells an item twice. Money and items that are missing, or too many, are found, too."""
    first, second = (ByLock(client_of(sync), lambda goods: nullcontext()) for _ in range(2))
    await first.list_item("s0", "s0:0", 10)

    async def meanwhile() -> None:
        assert await second.purchase("b1", "s0:0.s0", soon())

    between(first, meanwhile)
    assert await first.purchase("b0", "s0:0.s0", soon())
    assert wrong(ledger) == ["1 items are in two places"]
    ledger.srem("inventory:b0", "s0:0")
    assert wrong(ledger) == []
    ledger.srem("inventory:s0", "s0:3")
    ledger.incr(funds("b0"))
    assert wrong(ledger) == ["there were 30000 in money, and now 30001", "1 items are gone, 0 came from nowhere"]
    ledger.sadd("inventory:b0", "s9:3")
    assert wrong(ledger)[1:] == ["1 items are gone, 1 came from nowhere"]


@each_way
async def test_p1_money_and_items_are_conserved_between_two_processes(
    sync: Coordinator, other: Coordinator, ledger: blocking.Redis, way: str
) -> None:
    """P1: all that is listed is bought, once, and paid for, once."""
    markets, sold = [WAYS[way](one) for one in (sync, other)], list[str]()

    async def sell(number: int, seller: str) -> None:
        for item in range(ITEMS):
            assert await markets[number % 2].list_item(seller, f"{seller}:{item}", 1 + item)

    async def buy(number: int, buyer: str) -> None:
        chance = random.Random(number)
        while len(sold) < len(SELLERS) * ITEMS:
            offers = await markets[number % 2].offers(5)
            if offers and await markets[number % 2].purchase(buyer, chance.choice(offers), soon()):
                sold.append(buyer)

    async with asyncio.timeout(600):
        await asyncio.gather(*(sell(*it) for it in enumerate(SELLERS)), *(buy(*it) for it in enumerate(BUYERS)))
    assert ledger.zcard(MARKET) == 0
    assert wrong(ledger) == []
