"""P1, P6: a renewal that is refused changes nothing; one that may have been executed counts.

The server refuses by its ACL, in the middle of the script where that allows scripts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Literal

import pytest
import pytest_asyncio

from redis_sync_aio import (
    AsyncLock,
    AsyncMultiLock,
    Coordinator,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CommandRefused, PermissionDenied, Unreachable
from redis_sync_aio.types import BaseLease

from ..support.body import FAST
from ..support.factories import LOCK, SEMAPHORE, Client, Kind
from ..support.one_server import one_server_for_all as one_server_for_all
from ..support.primitives import MAKERS, Maker
from ..support.proxy import DELAY_REPLY, ERROR, SWALLOW_REPLY
from ..support.wired import RENEW, wired
from ..support.wired import quiet_loop as quiet_loop

pytestmark = pytest.mark.timing
NAME = "refused"
Acquire = Callable[[Coordinator, bool], Awaitable[BaseLease]]


async def acquired(make: Maker, sync: Coordinator, renewed: bool) -> BaseLease:
    lease: BaseLease = await make(sync, NAME, auto_renew=renewed).acquire()
    return lease


PRIMITIVES: dict[str, Acquire] = {label: partial(acquired, make) for label, make in MAKERS.items()}


@pytest.fixture(scope="module")
def for_us() -> Iterator[EmbeddedServer]:
    """A server that these tests have to themselves."""
    with EmbeddedServer(port=0) as server:
        yield server


@pytest_asyncio.fixture
async def own_server(for_us: EmbeddedServer) -> EmbeddedServer:
    """A server whose users the test may change."""
    async with for_us.client() as client:
        await client.flushall()
    await rule(for_us, "reset", "on", "nopass")
    return for_us


async def rule(server: EmbeddedServer, *rules: str) -> None:
    """Change what the user of the locks may do."""
    async with server.client() as client:
        admin: Client = client
        await admin.execute_command("ACL", "SETUSER", "locks", *rules)


ALLOWED = ("~*", "&*", "+@all")
NO_PROLONGING = ("-pexpire", "-zadd")


def ends(lease: BaseLease) -> float:
    return time.monotonic() + lease.remaining()


@pytest.mark.parametrize("extends_to", [1, 300], ids=["shorter", "longer"])
@pytest.mark.parametrize("auto_renew", [True, False], ids=["renewed", "not renewed"])
@pytest.mark.parametrize("acquire", PRIMITIVES.values(), ids=PRIMITIVES)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_an_extension_that_is_refused_changes_nothing(
    own_server: EmbeddedServer, acquire: Acquire, push: Literal["auto", "never"], auto_renew: bool, extends_to: float
) -> None:
    """The lease ends as before, and the renewals go on with the ttl that it had."""
    await rule(own_server, *ALLOWED)
    async with own_server.client(username="locks", password="x") as client, Coordinator(client, push=push) as sync:
        lease = await acquire(sync, auto_renew)
        before = ends(lease)
        await rule(own_server, *NO_PROLONGING)
        with pytest.raises(PermissionDenied):
            await lease.extend(extends_to)
        assert abs(ends(lease) - before) < 0.1
        await rule(own_server, *ALLOWED)
        if auto_renew:
            await wait_until(lambda: ends(lease) > before + 0.2, FAST, timeout=20)
        assert 20 < lease.remaining() <= 30
        lease.check()
        await lease.release()


async def test_a_lock_of_several_that_is_refused_for_one_changes_nothing(own_server: EmbeddedServer) -> None:
    """The ACL allows one of the keys: what was extended there is taken back."""
    await rule(own_server, *ALLOWED)
    async with own_server.client(username="locks", password="x") as client, Coordinator(client) as sync:
        lease = await AsyncMultiLock(sync, ["a", "b"]).acquire()
        await rule(own_server, "resetkeys", "~{a}*", "~a")
        with pytest.raises(CommandRefused):
            await lease.extend(1)
        assert lease.remaining() > 25
        async with own_server.client() as admin:
            assert await admin.pttl("a") > 25_000
        await rule(own_server, *ALLOWED)
        await lease.release()


@pytest.mark.parametrize("kind", [LOCK, SEMAPHORE], ids=str)
async def test_the_latest_answer_counts_when_one_of_several_is_refused(server: EmbeddedServer, kind: Kind) -> None:
    """Three extensions at the same time; the second is refused: it lasts as the others say."""
    async with wired(server, kind=kind) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        w.proxy.on(RENEW, ERROR("ERR not now"), skip=1)
        extensions = [asyncio.create_task(lease.extend(ttl)) for ttl in (20, 1, 10)]
        await asyncio.sleep(0)
        assert lease.remaining() <= 1
        outcomes = await asyncio.gather(*extensions, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), CommandRefused, type(None)]
        assert 5 < lease.remaining() <= 10
        assert 5000 < await kind.left_ms(w.direct, w.name) <= 10_000
        await lease.release()


@pytest.mark.parametrize("kind", [LOCK, SEMAPHORE], ids=str)
async def test_a_refusal_does_not_restore_what_another_one_may_have_cut(server: EmbeddedServer, kind: Kind) -> None:
    """P1: the first one has no answer, so the server may have executed it; the second is refused."""
    async with wired(server, kind=kind) as w:
        lease = await w.lock(ttl=30, auto_renew=False).acquire()
        silent = True
        w.proxy.on(lambda args: silent and RENEW(args), SWALLOW_REPLY, times=None)
        with pytest.raises(Unreachable):
            await lease.extend(20)
        silent, left = False, lease.remaining()
        assert left < 20
        await w.lock().statistics()  # there is a connection again
        w.proxy.on(RENEW, ERROR("ERR not now"))
        with pytest.raises(CommandRefused):
            await lease.extend(1)
        assert left - 5 < lease.remaining() <= left
        await lease.release()


async def test_no_renewal_undoes_an_extension_that_is_not_answered(server: EmbeddedServer) -> None:
    """A renewal is due while an extension waits for its answer: it is not sent, as it would have the former ttl."""
    async with wired(server) as w:
        lease = await w.lock(ttl=0.9).acquire()
        w.proxy.on(RENEW, DELAY_REPLY(0.25), times=1)
        await lease.extend(30)
        assert lease.remaining() > 25
        assert await LOCK.left_ms(w.direct, w.name) > 25_000
        await lease.release()


async def test_a_refused_renewal_is_tried_again(own_server: EmbeddedServer) -> None:
    """An ordinary renewal that the ACL refuses for a while costs nothing either."""
    await rule(own_server, *ALLOWED)
    async with own_server.client(username="locks", password="x") as client, Coordinator(client) as sync:
        lease = await AsyncLock(sync, NAME, ttl=3).acquire()
        before = ends(lease)
        await rule(own_server, *NO_PROLONGING)
        await wait_until(lambda: lease.remaining() < 1.7, FAST, timeout=10)
        assert abs(ends(lease) - before) < 0.1
        await rule(own_server, *ALLOWED)
        await wait_until(lambda: lease.remaining() > 2, FAST, timeout=10)
        await lease.release()
