"""Ways to meet each error, through the public API and on a real server: docs/assets/messages-of-errors.txt has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncBarrier,
    AsyncRobustLock,
    AsyncSemaphore,
    CommandRefused,
    Compensation,
    Coordinator,
    FenceGate,
    LeaseLost,
    Unreachable,
    idempotent,
    transaction,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PushUnavailable, UndoFailed
from redis_sync_aio.testing import lose
from redis_sync_aio.testing.faults import Action, FaultProxy, script
from redis_sync_aio.types import UndoSteps

from .inside import load, logs

NAME = "orders:42"


class Situation:
    """A server, a client of it, and two processes' worth of coordinators."""

    def __init__(self, server: EmbeddedServer, redis: Redis, sync: Coordinator, other: Coordinator) -> None:
        self.server = server
        self.redis: Any = redis
        self.sync = sync
        self.other = other

    async def user(self, *rules: str) -> Redis:
        """Return a client of a user with these rights only."""
        await self.redis.execute_command("ACL", "SETUSER", "app", "on", ">secret", "resetkeys", "resetchannels", *rules)
        return Redis.from_url(self.server.url, username="app", password="secret")


Raises = Callable[[Situation], Awaitable[object]]


async def acquire_timeout(it: Situation) -> None:
    await it.other.lock(NAME).acquire(label="nightly import")
    await it.sync.lock(NAME).locked()  # it is connected: the timeout is for the holder alone
    await it.sync.lock(NAME).acquire(timeout=2.0)


async def queue_full(it: Situation) -> None:
    await it.other.lock(NAME).acquire()
    await it.sync.lock(NAME, max_waiting=0).acquire(timeout=5)


async def not_held(it: Situation) -> None:
    await it.sync.lock(NAME).release()


async def would_deadlock(it: Situation) -> None:
    async with it.sync.lock(NAME), it.sync.lock(NAME):
        pass


async def lease_lost(it: Situation) -> None:
    async with it.sync.lock(NAME) as lease:
        await lose(lease, "taken")
        await asyncio.Event().wait()


async def limit_mismatch(it: Situation) -> None:
    await AsyncSemaphore(it.other, "exports", limit=3).acquire()
    await AsyncSemaphore(it.sync, "exports", limit=5).acquire()


async def stale_fence(it: Situation) -> None:
    gate = FenceGate(it.sync, NAME)
    old = await it.sync.lock(NAME).acquire()
    await old.release()
    await gate.accept((await it.sync.lock(NAME).acquire()).fence)
    await gate.accept(old.fence)


async def unreachable(it: Situation) -> None:
    gone = Redis.from_url("redis://127.0.0.1:1")
    async with gone, Coordinator(gone, retry_for=1.0) as sync:
        await sync.lock(NAME).acquire()


async def command_refused(it: Situation) -> None:
    await it.redis.config_set("min-replicas-to-write", 1)
    try:
        await it.sync.lock(NAME).acquire(timeout=1.0)
    finally:
        await it.redis.config_set("min-replicas-to-write", 0)


async def permission_denied(it: Situation) -> None:
    async with await it.user("~invoices:*", "&*", "+@all") as redis, Coordinator(redis) as sync:
        await sync.lock(NAME).acquire()


async def out_of_memory(it: Situation) -> None:
    await it.redis.config_set("maxmemory", 1)
    try:
        await it.sync.lock(NAME).acquire()
    finally:
        await it.redis.config_set("maxmemory", 0)


async def wrong_key_type(it: Situation) -> None:
    await it.redis.rpush(NAME, "a list")
    await it.sync.lock(NAME).acquire()


async def push_unavailable(it: Situation) -> None:
    async with await it.user("~*", "+@all", "-subscribe") as redis, Coordinator(redis, push="always") as sync:
        await sync.lock(NAME).acquire()


async def coordinator_closed(it: Situation) -> None:
    await it.sync.aclose()
    await it.sync.lock(NAME).acquire()


async def wrong_context(it: Situation) -> None:
    await it.sync.lock(NAME).acquire()
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, asyncio.run, it.sync.lock(NAME).acquire())


async def wait_timeout(it: Situation) -> None:
    await it.sync.event("migrated:2026-11").wait(timeout=2)


async def broken_barrier(it: Situation) -> None:
    barrier = AsyncBarrier(it.sync, "start", 2)
    await barrier.abort()
    await barrier.wait()


async def conflict(it: Situation) -> None:
    async def body(tx: Any) -> None:
        await tx.get("stock:7")
        await it.redis.incr("stock:7")
        tx.multi()
        tx.set("stock:7", 0)

    await transaction(it.redis, body, "stock:7", attempts=3)


async def outcome_unknown(it: Situation) -> None:
    async with FaultProxy(it.server) as proxy, proxy.client() as redis:

        async def body(tx: Any) -> None:
            await tx.get("stock:7")
            tx.multi()
            tx.incr("stock:7")

        await transaction(redis, body, "stock:7")  # the first EXEC of a connection asks whether it is allowed
        proxy.on("EXEC", Action.CUT_AFTER)
        await transaction(redis, body, "stock:7")


async def partially_applied(it: Situation) -> None:
    await it.redis.rpush("log", "a")

    async def body(tx: Any) -> None:
        await tx.get("stock:7")
        tx.multi()
        tx.set("stock:7", 1)
        tx.incr("log")

    await transaction(it.redis, body, "stock:7")


async def transaction_misuse(it: Situation) -> None:
    async def body(tx: Any) -> None:
        await tx.get("stock:7")

    await transaction(it.redis, body, "stock:7")


steps = UndoSteps()


@steps.step("refund")
async def refund(*, order: int) -> None:
    """Fail."""
    raise RuntimeError("the bank does not answer")


async def _leave_a_step(lock: AsyncRobustLock) -> None:
    """Record a step and release the lock as a process does that dies."""
    lease = await lock.acquire()
    undo = await Compensation(lease, steps).__aenter__()
    await undo.push("refund", order=42)
    await lock.force_release()


async def unknown_step(it: Situation) -> None:
    lock = AsyncRobustLock(it.sync, NAME)
    await _leave_a_step(lock)
    async with lock as lease:
        await lease.compensate(UndoSteps())


async def undo_failed(it: Situation) -> None:
    lock = AsyncRobustLock(it.sync, NAME)
    await _leave_a_step(lock)
    async with lock as lease:
        await lease.compensate(steps)


async def stale_writer(it: Situation) -> None:
    lock = AsyncRobustLock(it.sync, NAME)
    earlier = await lock.acquire(identity="worker-7")
    await lock.acquire(identity="worker-7")
    await earlier.record({"line": 1})


async def fingerprint_mismatch(it: Situation) -> None:
    @idempotent(it.sync, "payment:{key}", keep=60, fingerprint="{amount}")
    async def pay(key: str, amount: int) -> str:
        return "paid"

    await pay("9f3", 10)
    await pay("9f3", 99)


async def run_interrupted(it: Situation) -> None:
    @idempotent(it.sync, "payment:{key}", keep=60, on_crash="raise")
    async def pay(key: str) -> str:
        await asyncio.Event().wait()
        return "paid"

    task = asyncio.create_task(pay("9f3"))
    while not await it.redis.exists("{payment:9f3}:mark"):
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    await pay("9f3")


async def result_not_kept(it: Situation) -> None:
    @idempotent(it.sync, "payment:{key}", keep=60)
    async def pay(key: str) -> object:
        return datetime.now()

    await pay("9f3")
    await pay("9f3")


async def nonsense(it: Situation) -> None:
    reply = Action(reply=lambda frame: frame.rewrite(lambda _: b"*1\r\n$1\r\nx\r\n"))
    async with FaultProxy(it.server) as proxy, proxy.client() as redis, Coordinator(redis) as sync:
        proxy.on(script(load("lock/acquire").sha), reply)
        await sync.lock(NAME).acquire()


async def lock_error(it: Situation) -> None:
    await it.redis.lock(NAME, timeout=10, lock_class=Lock).release()


async def lock_not_owned(it: Situation) -> None:
    lock = it.redis.lock(NAME, timeout=10, lock_class=Lock)
    await lock.acquire()
    await it.redis.delete(NAME)
    await lock.release()


async def server_not_found(it: Situation) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDIS_SYNC_AIO_SERVER", "/opt/valkey-server")
        EmbeddedServer().start()


async def server_not_started(it: Situation) -> None:
    EmbeddedServer(args=["--maxmemory-polici", "noeviction"]).start()


ERRORS: dict[str, Raises] = {
    "SyncError": nonsense,
    "AcquireTimeout": acquire_timeout,
    "WaitTimeout": wait_timeout,
    "QueueFull": queue_full,
    "NotHeld": not_held,
    "WouldDeadlock": would_deadlock,
    "LeaseLost": lease_lost,
    "LimitMismatch": limit_mismatch,
    "StaleFence": stale_fence,
    "Unreachable": unreachable,
    "CommandRefused": command_refused,
    "PermissionDenied": permission_denied,
    "OutOfMemory": out_of_memory,
    "WrongKeyType": wrong_key_type,
    "PushUnavailable": push_unavailable,
    "CoordinatorClosed": coordinator_closed,
    "WrongContext": wrong_context,
    "BrokenBarrierError": broken_barrier,
    "Conflict": conflict,
    "OutcomeUnknown": outcome_unknown,
    "PartiallyApplied": partially_applied,
    "TransactionMisuse": transaction_misuse,
    "UnknownStep": unknown_step,
    "UndoFailed": undo_failed,
    "StaleWriter": stale_writer,
    "FingerprintMismatch": fingerprint_mismatch,
    "ResultNotKept": result_not_kept,
    "RunInterrupted": run_interrupted,
    "LockError": lock_error,
    "LockNotOwnedError": lock_not_owned,
    "ServerNotFound": server_not_found,
    "ServerNotStarted": server_not_started,
}
"""A way to meet each error."""

LOST = LeaseLost(name=NAME, reason="late", fence=1795711537967982, held_for=41.3, stalled=31.2)
REFUSED = CommandRefused("OOM command not allowed when used memory > 'maxmemory'.", code="OOM")
HOST = "redis.internal:6379"


def useless_message() -> None:
    """Log the line as from a handler."""
    try:
        raise ValueError
    except ValueError:
        logs.log("useless_message", payload=b"grant 1 2")


def _undo_failed(error: UndoFailed) -> None:
    logs.log("undo_failed", raised=error, what=error.message)


LINES: dict[str, Callable[[], object]] = {
    "lease_lost": lambda: logs.lease_lost(LOST, None),
    "lease_forgotten": lambda: logs.lease_forgotten(NAME, 1795711537967982, 30),
    "job_skipped": lambda: logs.job_skipped("nightly:2026-11-27", "failed"),
    "stands_again": lambda: logs.log(
        "stands_again", lock="scheduler", delay=0.02, kind="Unreachable", why="Redis did not answer"
    ),
    "renewal_late": lambda: logs.renewal_late(NAME, 14.2, 5.8, 30.0, 0, None),
    "renewal_refused": lambda: logs.log("renewal_refused", lock=NAME, error=REFUSED, left=19.8),
    "waiting_long": lambda: logs.log(
        "waiting_long",
        lock=NAME,
        seconds=12.0,
        holder="'worker-3:28376:18c434d5a4abd0b6:1' holds it for 21.4 seconds more unless it renews",
        waiting=3,
        advice="",
    ),
    "fence_ahead": lambda: logs.log("fence_ahead", lock=NAME, server=2, servers=3, seconds=180.0),
    "coordinator_dropped": lambda: logs.coordinator_dropped("<Coordinator of redis.internal:6379>"),
    "not_owned_at_exit": lambda: logs.log("not_owned_at_exit", lock=NAME),
    "connection_dropped": lambda: logs.log("connection_dropped", server=HOST, why="no answer for 5 seconds"),
    "connection_lost": lambda: logs.log("connection_lost", server=HOST, seconds=1.0, why="Connection refused"),
    "connection_restored": lambda: logs.log("connection_restored", server=HOST, after=8.4),
    "connecting_failed": lambda: logs.connecting_failed(HOST, KeyError("token")),
    "read_only": lambda: logs.log("read_only", server=HOST, why="READONLY You can't write against a read only replica"),
    "polling_instead": lambda: logs.log(
        "polling_instead",
        why=PushUnavailable(
            "the server does not allow SUBSCRIBE and PUBLISH on rsa:*, which pushed wake-ups need: NOPERM User app has "
            "no permissions to run the 'subscribe' command; allow it, or use Coordinator(client, push=\"never\") to "
            "poll instead"
        ),
    ),
    "watch_instead": lambda: logs.log(
        "watch_instead", why="NOPERM User app has no permissions to run the 'evalsha' command"
    ),
    "slots_unknown": lambda: logs.log("slots_unknown", why=TimeoutError()),
    "stray_message": lambda: logs.log("stray_message", payload=b"hello"),
    "useless_message": useless_message,
    "useless_answer": lambda: logs.log("useless_answer", raised=ValueError(), lock=NAME),
    "outcome_not_taken": lambda: logs.log("outcome_not_taken", lock=NAME),
    "observer_failed": lambda: logs.log("observer_failed", raised=KeyError("x"), observer="<function observe>"),
    "request_not_served": lambda: logs.request_not_served("POST", "/orders/42", Unreachable("Redis did not answer")),
    "lease_ends_early": lambda: logs.log(
        "lease_ends_early",
        method="POST",
        path="/orders/{order_id}",
        lock="order:{order_id:int}",
        dependency="get_session",
    ),
    "undo_failed": lambda: _undo_failed(UndoFailed.of_steps([KeyError()], steps=2, lock=NAME)),
    "result_not_kept": lambda: logs.result_not_kept("payment:9f3", "{payment:9f3}:mark", TypeError("no JSON")),
    "undo_ended_late": lambda: logs.log("undo_ended_late", raised=KeyError("x"), step="refund"),
}
