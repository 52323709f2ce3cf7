"""P8, P10, P12, FAULTS D3, D9, D15, D16: the server says no: not now, not you, not this key.

Every test has a server of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from redis_sync_aio import AsyncSemaphore, CommandRefused, Coordinator, Lease, LeaseLost, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied, PushUnavailable, WrongKeyType
from redis_sync_aio.testing.faults import Action, FaultProxy

from ..support.body import waits
from ..support.inside import hub_of, now
from ..support.served import NAME, ORDERS, Served, everything, modes, say, served, served_to, user
from ..support.views import holder_of
from ..support.wired import MODES, RESPONSE_TIMEOUT, SOON, timed
from ..support.wired import quiet_loop as quiet_loop

# -- not now -----------------------------------------------------------------------------------------------


async def demote(s: Served) -> None:
    await s.admin.replicaof("127.0.0.1", "1")  # nobody is there


@modes
async def test_readonly_for_a_while(mode: str) -> None:
    """D6, D9: demoted and promoted again: who asks, renews or releases meanwhile succeeds within a second after."""
    async with served(mode) as s:
        held = await s.sync.lock("held", ttl=4).acquire()
        given = await s.sync.lock("given").acquire()
        await demote(s)
        acquiring = asyncio.create_task(s.lock().acquire())
        extending = asyncio.create_task(held.extend(4))
        releasing = asyncio.create_task(given.release())
        done, _ = await asyncio.wait([acquiring, extending, releasing], timeout=0.2)
        assert not done
        await s.admin.replicaof("NO", "ONE")
        async with asyncio.timeout(1.1):
            lease = await acquiring
            await asyncio.gather(extending, releasing)
        await s.check_held(lease)
        held.check()
        await held.release()
        await lease.release()
        await s.check_free(lease.fence)


@modes
async def test_readonly_for_good(mode: str) -> None:
    """D9: a typed error in bounded time, at most `retry_for`; a lease ends at its deadline."""
    async with served(mode, retry_for=0.6) as s:
        lease = await s.lock(ttl=4.0).acquire()
        await demote(s)
        lost = asyncio.create_task(_late_lost(lease))
        for _ in range(2):  # the second waits behind the end of the first
            seconds, error = await timed(lambda: _refused(s))
            assert "READONLY" in str(error)  # and CommandRefused, unless its time was up in the middle of an attempt
            assert seconds < 0.6 + RESPONSE_TIMEOUT
        assert await lost <= 0.05
        with pytest.raises(LeaseLost):
            await lease.release()


async def _refused(s: Served) -> Exception:
    with pytest.raises((CommandRefused, Unreachable), match="new") as raised:
        await s.sync.lock("new").acquire()
    return raised.value


async def _late_lost(lease: Lease) -> float:
    """Return how many seconds from its deadline the lease was lost."""
    await lease.wait_lost()
    return abs(now() - lease._grant.deadline)


async def run_on(client: Redis) -> Any:
    untyped: Any = client
    return await untyped.execute_command("EVAL", "while true do end", 0)


@pytest.mark.real
@modes
@pytest.mark.parametrize("connected", [True, False])
async def test_busy(mode: str, connected: bool) -> None:
    """D9: another client's script runs on and on; killed, who asked meanwhile has the lock then."""
    async with served(mode, args=("--busy-reply-threshold", "20")) as s:
        if connected:
            await (await s.sync.lock("warm").acquire()).release()
        async with s.server.client(socket_timeout=None) as hog:
            looping = asyncio.create_task(run_on(hog))

            async def busy() -> bool:
                with suppress(redis.exceptions.ResponseError):
                    await s.admin.get(NAME)
                    return False
                return True

            await wait_until(busy, SOON, timeout=15)
            acquiring = asyncio.create_task(s.lock().acquire())
            done, _ = await asyncio.wait([acquiring], timeout=0.1)
            assert not done
            await s.admin.script_kill()
            lease = await asyncio.wait_for(acquiring, 20)
            with pytest.raises(redis.exceptions.ResponseError):
                await looping
        await lease.release()


@pytest.mark.real
async def test_loading() -> None:
    """D1, D9: restarted, the server says for a while that it is loading; the lock survives, nobody is refused."""
    slow = ("--key-load-delay", "100")
    once = Retry(NoBackoff(), 0)
    async with served(args=slow, persistent=True, retry_for=5) as s, s.server.client(retry=once) as probe:
        lease = await s.lock(ttl=8).acquire()
        async with s.admin.pipeline(transaction=False) as pipe:
            for number in range(6000):
                pipe.set(f"filler {number}", number)
            await pipe.execute()
        restarting = asyncio.create_task(asyncio.to_thread(s.server.restart, True))

        async def loading() -> bool:
            try:
                await probe.get(NAME)
            except redis.exceptions.BusyLoadingError:
                return True
            except redis.exceptions.ConnectionError:
                pass
            assert not restarting.done(), "it was too fast for this test"
            return False

        await wait_until(loading, SOON, timeout=15)
        assert await s.lock().try_acquire() is None  # answered when all is there
        await restarting
        await s.check_held(lease)
        await lease.release()
        await s.check_free(lease.fence)


# -- not you -----------------------------------------------------------------------------------------------

ALL = "resetkeys ~* resetchannels &* +@all"
USERS = {
    "no scripting, no WATCH": "-@scripting -@transaction",
    "no such key": "resetkeys ~other:*",
    "no such channel": "resetchannels &other:*",
    "no subscribe": "-subscribe",
}


@pytest.mark.real
async def test_refused_in_the_middle() -> None:
    """D16, P12: the script was allowed its first command and not its second; what it had done is undone."""
    async with served_to(ALL, "-time") as s:
        with pytest.raises(PermissionDenied, match="'time'"):
            await s.lock().acquire()
        await user(s, ALL)
        await s.lock().statistics()  # follows whatever undoes it
        await s.check_free(0)


@pytest.mark.parametrize("push", ["auto", "always", "never"])
@pytest.mark.parametrize("rules", USERS.values(), ids=USERS)
async def test_no_right_to_acquire(rules: str, push: Any, caplog: pytest.LogCaptureFixture) -> None:
    """D16: refused by name at first use, or, without channels, polling, and one word about it."""
    caplog.set_level(logging.WARNING)
    pushless = rules in (USERS["no such channel"], USERS["no subscribe"])
    async with served_to(ALL, rules, push=push) as s:
        start = now()
        if not pushless:
            with pytest.raises(PermissionDenied, match=NAME):
                await s.lock().acquire()
        elif push == "always":
            with pytest.raises(PushUnavailable, match='push="never"'):
                await s.lock().acquire()
        else:
            for _ in range(3):
                await everything(s.sync)
        assert now() - start < 1
        warned = [record for record in caplog.records if "polls instead" in record.message]
        assert len(warned) == (1 if pushless and push == "auto" else 0)
        assert await s.admin.exists(NAME, ORDERS) == 0


@pytest.mark.parametrize("push", ["auto", "always"])
@pytest.mark.parametrize("rules", USERS.values(), ids=USERS)
async def test_no_right_to_wait(rules: str, push: Any) -> None:
    """D16: the right goes while somebody waits: a typed error, or polling in its place; nothing is left queued."""
    pushless = rules in (USERS["no such channel"], USERS["no subscribe"])
    async with served_to(ALL, push=push, poll_cap=0.1, claim=0.2) as s:
        holder = await s.elsewhere().acquire()
        waiting = asyncio.create_task(s.lock().acquire())
        await s.queued()
        await user(s, rules)
        if pushless:
            await s.kill_ours()
        if pushless and push == "auto":
            await holder.release()
            lease = await asyncio.wait_for(waiting, 1)
            await lease.release()
        else:
            with pytest.raises(PushUnavailable if pushless else PermissionDenied):
                await asyncio.wait_for(waiting, 1)
            await user(s, ALL)
            await holder.release()
        await wait_until(lambda: _nothing_left(s), SOON, timeout=15)
        await s.check_free(holder.fence)


async def _nothing_left(s: Served) -> bool:
    found = await s.elsewhere().statistics()
    return holder_of(found) is None and found.waiting == 0


@pytest.mark.parametrize("push", ["auto", "always", "never"])
@pytest.mark.parametrize("rules", USERS.values(), ids=USERS)
async def test_no_right_to_release(rules: str, push: Any) -> None:
    """D16, P12: a refused release says so; with the right back it succeeds."""
    pushless = rules in (USERS["no such channel"], USERS["no subscribe"])
    async with served_to(ALL, push=push) as s:
        lease = await s.lock(ttl=5).acquire()
        await user(s, rules)
        if pushless and push != "never":
            await s.kill_ours()
            await wait_until(lambda: s.sync.connection_error is not None or not hub_of(s.sync).pushes, SOON, timeout=15)
        if not pushless or push == "always":
            with pytest.raises(PushUnavailable if pushless else PermissionDenied):
                await lease.release()
            await user(s, ALL)
            async with asyncio.timeout(2):
                await lease.release()
        else:
            await lease.release()
        await s.check_free(lease.fence)


async def test_a_time_out_that_meets_the_end_of_a_wait() -> None:
    """P4, D16: on Python 3.11 redis-py swallows it, and would go on with its own retries for seconds."""
    random = Random(7)

    async def refused(server: EmbeddedServer) -> float:
        soon = random.uniform(0.002, 0.03)  # that is when redis-py connects, again and again
        async with (
            server.client(password=None) as client,
            Coordinator(client, push="never", response_timeout=soon, retry_for=0.3) as sync,
        ):
            start = now()
            with pytest.raises((PermissionDenied, Unreachable)):
                await sync.lock(NAME).acquire()
            return now() - start

    async with served() as s:
        await say(s.admin, "ACL SETUSER default resetpass >right")
        for _ in range(6):
            assert max(await asyncio.gather(*(refused(s.server) for _ in range(10)))) < 1.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("password", ["wrong", None])
async def test_wrong_password(mode: str, password: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """D16: a typed error, soon, however often redis-py would try; no polling with the same password."""
    caplog.set_level(logging.WARNING)
    client_options, coordinator_options = MODES[mode]
    async with served() as s:
        await say(s.admin, "ACL SETUSER default resetpass >right")
        async with (
            s.server.client(password=password, **client_options) as client,
            Coordinator(client, response_timeout=RESPONSE_TIMEOUT, **coordinator_options) as sync,
        ):
            for _ in range(2):
                seconds, _ = await timed(lambda: _no_password(sync))
                assert seconds < 2 * RESPONSE_TIMEOUT + 0.2
        assert caplog.records == []
        await say(s.admin, "ACL SETUSER default nopass")


async def _no_password(sync: Coordinator) -> None:
    with pytest.raises(PermissionDenied, match="password"):
        await sync.lock(NAME).acquire()


# -- not this server: what managed services and proxies leave out --------------------------------------------

POLLS, WATCHES = "polling_instead", "watch_instead"
HANDSHAKE = "CLIENT INFO CONFIG COMMAND CLUSTER ACL"
DATA = "AUTH PING EVAL EVALSHA GET SET DEL PTTL PEXPIRE TIME ZADD ZREM ZRANGE ZSCORE ZCARD"
SHAPES: dict[str, tuple[str, str]] = {
    # commands that the server does not have, and the event that says what is done instead
    "no CLIENT": ("CLIENT", ""),
    "no CLIENT, INFO, CONFIG, COMMAND, CLUSTER, ACL": (HANDSHAKE, ""),
    "no PUBSUB": ("PUBSUB", ""),
    "RESP2 only": ("HELLO", POLLS),
    "no pub/sub": ("SUBSCRIBE PUBLISH PUBSUB", POLLS),
    "no EVALSHA": ("EVALSHA", ""),
    "no scripts": ("EVAL EVALSHA", WATCHES),
}


@asynccontextmanager
async def two_on(address: Callable[[], Redis]) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Coordinators of two processes."""
    async with address() as first, address() as second, Coordinator(first) as sync, Coordinator(second) as other:
        yield sync, other


async def contend(sync: Coordinator, other: Coordinator, caplog: pytest.LogCaptureFixture, event: str) -> None:
    """Acquire, hand over, release, and everything else that a lock does; ``event`` is logged once by each process."""
    caplog.set_level(logging.WARNING)
    lease = await sync.lock(NAME).acquire(timeout=60)
    waiting = asyncio.create_task(other.lock(NAME).acquire(timeout=60))
    await wait_until(waits(sync.lock(NAME)), SOON, timeout=60)
    await lease.release()
    granted = await waiting
    assert granted.fence > lease.fence
    await granted.release()
    await everything(sync, other)
    assert [getattr(record, "event", "") for record in caplog.records] == ([event] * 2 if event else [])


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_server_that_lacks_commands(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    """P10: neither the server nor its scripts know them; locks work, and the log says if they do so otherwise."""
    missing, event = SHAPES[shape]
    renamed = [word for command in missing.split() for word in ("--rename-command", command, "")]
    async with EmbeddedServer(args=renamed) as server, two_on(lambda: server.client(protocol=2)) as (sync, other):
        await contend(sync, other, caplog, event)


async def test_a_proxy_that_knows_data_commands_only(
    server: EmbeddedServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """P10: and PING, as Envoy."""
    known = {word.encode() for word in DATA.split()}
    async with FaultProxy(server) as proxy, two_on(lambda: proxy.client(protocol=2)) as (sync, other):
        proxy.on(lambda words: words[0].upper() not in known, Action.answer_error("ERR unknown command"), times=None)
        await contend(sync, other, caplog, POLLS)


async def test_a_server_whose_data_have_no_history(
    server: EmbeddedServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """P10: INFO says nothing of replication, and nobody may end or count connections, as at Upstash."""
    async with FaultProxy(server) as proxy, two_on(proxy.client) as (sync, other):
        proxy.on("INFO", Action(reply=lambda it: it.rewrite(lambda _: b"$0\r\n\r\n")), times=None)
        for command in ("CLIENT ID", "CLIENT KILL", "PUBSUB"):
            proxy.on(command, Action.answer_error("ERR unknown command"), times=None)
        await contend(sync, other, caplog, "")
        await proxy.cut()
        await contend(sync, other, caplog, "")


@pytest.mark.parametrize(("missing", "named"), [("EVAL EVALSHA WATCH", "WATCH"), ("EVAL EVALSHA MULTI", "MULTI")])
async def test_a_server_without_scripts_and_transactions(missing: str, named: str) -> None:
    """P12: the error names what was refused first, and last."""
    renamed = [word for command in missing.split() for word in ("--rename-command", command, "")]
    async with EmbeddedServer(args=renamed) as server, server.client() as client, Coordinator(client) as sync:
        for _ in range(2):
            with pytest.raises(CommandRefused, match=f"EVALSHA.*; without scripts it answered .*{named}"):
                await sync.lock(NAME).acquire(timeout=60)


@pytest.mark.real
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_connections_that_are_closed_by_age(
    server: EmbeddedServer, redis: Redis, push: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """P2, P10: while one holds and others wait: each has its turn, in order."""
    async with (
        FaultProxy(server) as proxy,
        proxy.client() as client,
        Coordinator(client, push=push) as sync,
        asyncio.TaskGroup() as group,
    ):
        order: list[int] = []

        async def turn(number: int) -> None:
            async with sync.lock(NAME).acquire(timeout=60):
                order.append(number)
                await proxy.cut()
                await wait_until(lambda: sync.connections > 0 and sync.connection_error is None, SOON, timeout=15)

        for number in range(5):
            group.create_task(turn(number))
            await asyncio.sleep(0)
    assert order == list(range(5))
    assert {getattr(record, "event", "") for record in caplog.records} <= {"connection_restored"}


# -- not this key ------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("key", [NAME, f"{{{NAME}}}:queue", f"{{{NAME}}}:fence"])
async def test_wrong_type(mode: str, key: str) -> None:
    """D15: raised immediately, naming the lock; the foreign key stays as it was, and nothing stays next to it."""
    async with served(mode) as s:
        await say(s.admin, "RPUSH", key, "foreign")
        asked: list[Callable[[], Awaitable[object]]] = [s.lock().acquire, s.lock().try_acquire]
        for ask in asked:
            begin = now()
            with pytest.raises(WrongKeyType, match=NAME):
                await ask()
            assert now() - begin < 0.2
        assert await say(s.admin, "LRANGE", key, "0 -1") == [b"foreign"]
        assert await s.admin.dbsize() == 1


@modes
async def test_wrong_type_of_a_semaphore(mode: str) -> None:
    """D15: the error names the keys it may be, which are not called like the semaphore."""
    async with served(mode) as s:
        await s.admin.rpush(f"{{{NAME}}}:sem", "foreign")
        with pytest.raises(WrongKeyType, match=rf"{{{NAME}}}:sem, .*belongs to another program"):
            await AsyncSemaphore(s.sync, NAME, limit=2).acquire()
