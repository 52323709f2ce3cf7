"""Every error says what to do, and its message, as met on a real server, is quoted."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest
from redis.asyncio import Redis

import redis_sync_aio
from redis_sync_aio import (
    AsyncBarrier,
    AsyncRobustLock,
    AsyncSemaphore,
    Compensation,
    Coordinator,
    FenceGate,
    LeaseLost,
    idempotent,
    transaction,
)
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LossReason
from redis_sync_aio.testing import lose
from redis_sync_aio.testing.faults import Action, FaultProxy, script
from redis_sync_aio.types import UndoSteps

from ..support.inside import load

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "when-it-goes-wrong.md"
ASSETS = PAGE.parents[1] / "assets"
OF_REDIS_PY = {"LockError", "LockNotOwnedError"}
"""Errors of redis-py that `compat.Lock` raises: `Unreachable` is its ConnectionError anyway."""

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def entries(heading: str) -> dict[str, str]:
    """The text below each ``###`` of the sections whose ``##`` begins with ``heading``."""
    sections = re.findall(rf"^## {heading}.*\n((?:(?!## ).*\n?)*)", PAGE.read_text("utf-8"), re.M)
    found = re.findall(r"^### `?(\w+)`?(?: \{ #[\w-]+ \})?\n((?:(?!### ).*\n?)*)", "\n".join(sections), re.M)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def quoted(messages: str) -> dict[str, list[str]]:
    """What the list of messages, which a page puts in, says for each name."""
    found: dict[str, list[str]] = {}
    for message in messages.strip().split("\n\n"):
        name, _, said = message.partition(": ")
        found.setdefault(name, []).append(plain(said.partition("\n    facts: ")[0]))
    return found


def plain(message: str) -> str:
    """A message in one line; its numbers, and the name of this machine, are not compared."""
    return re.sub(
        r"\d+", "0", re.sub(r"\s+", " ", message.replace(f" {socket.gethostname()[:32]}:", " web-3:"))
    ).strip()


MESSAGES = quoted((ASSETS / "messages-of-errors.txt").read_text("utf-8")) if PAGE.exists() else {}


def public_errors() -> dict[str, type[BaseException]]:
    """The exceptions that public modules export, wherever they are defined."""
    found: dict[str, type[BaseException]] = {}
    for info in pkgutil.walk_packages(redis_sync_aio.__path__, "redis_sync_aio."):
        if any(part.startswith("_") for part in info.name.split(".")) or ".cli" in info.name:
            continue
        module = importlib.import_module(info.name)
        exported = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        found |= {name: it for name, it in exported.items() if inspect.isclass(it) and issubclass(it, BaseException)}
    return found


# -- ways to meet each error, on a real server -----------------------------------------------------------------

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
ERRORS: dict[str, Raises] = {}
"""A way to meet each error."""


def meets(name: str) -> Callable[[Raises], Raises]:
    """Enter a way to meet an error."""

    def enter(way: Raises) -> Raises:
        ERRORS[name] = way
        return way

    return enter


@meets("AcquireTimeout")
async def acquire_timeout(it: Situation) -> None:
    await it.other.lock(NAME).acquire(label="nightly import")
    await it.sync.lock(NAME).locked()  # it is connected: the timeout is for the holder alone
    await it.sync.lock(NAME).acquire(timeout=2.0)


@meets("QueueFull")
async def queue_full(it: Situation) -> None:
    await it.other.lock(NAME).acquire()
    await it.sync.lock(NAME, max_waiting=0).acquire(timeout=5)


@meets("NotReplicated")
async def not_replicated(it: Situation) -> None:
    await it.sync.lock(NAME, replicas=1).acquire()


@meets("NotHeld")
async def not_held(it: Situation) -> None:
    await it.sync.lock(NAME).release()


@meets("WouldDeadlock")
async def would_deadlock(it: Situation) -> None:
    async with it.sync.lock(NAME), it.sync.lock(NAME):
        pass


@meets("LeaseLost")
async def lease_lost(it: Situation) -> None:
    async with it.sync.lock(NAME) as lease:
        await lose(lease, "taken")
        await asyncio.Event().wait()


@meets("LimitMismatch")
async def limit_mismatch(it: Situation) -> None:
    await AsyncSemaphore(it.other, "exports", limit=3).acquire()
    await AsyncSemaphore(it.sync, "exports", limit=5).acquire()


@meets("StaleFence")
async def stale_fence(it: Situation) -> None:
    gate = FenceGate(it.sync, NAME)
    old = await it.sync.lock(NAME).acquire()
    await old.release()
    await gate.accept((await it.sync.lock(NAME).acquire()).fence)
    await gate.accept(old.fence)


@meets("Unreachable")
async def unreachable(it: Situation) -> None:
    gone = Redis.from_url("redis://127.0.0.1:1")
    async with gone, Coordinator(gone, retry_for=1.0) as sync:
        await sync.lock(NAME).acquire()


@meets("CommandRefused")
async def command_refused(it: Situation) -> None:
    await it.redis.config_set("min-replicas-to-write", 1)
    try:
        await it.sync.lock(NAME).acquire(timeout=1.0)
    finally:
        await it.redis.config_set("min-replicas-to-write", 0)


@meets("PermissionDenied")
async def permission_denied(it: Situation) -> None:
    async with await it.user("~invoices:*", "&*", "+@all") as redis, Coordinator(redis) as sync:
        await sync.lock(NAME).acquire()


@meets("OutOfMemory")
async def out_of_memory(it: Situation) -> None:
    await it.redis.config_set("maxmemory", 1)
    try:
        await it.sync.lock(NAME).acquire()
    finally:
        await it.redis.config_set("maxmemory", 0)


@meets("WrongKeyType")
async def wrong_key_type(it: Situation) -> None:
    await it.redis.rpush(NAME, "a list")
    await it.sync.lock(NAME).acquire()


@meets("PushUnavailable")
async def push_unavailable(it: Situation) -> None:
    async with await it.user("~*", "+@all", "-subscribe") as redis, Coordinator(redis, push="always") as sync:
        await sync.lock(NAME).acquire()


@meets("CoordinatorClosed")
async def coordinator_closed(it: Situation) -> None:
    await it.sync.aclose()
    await it.sync.lock(NAME).acquire()


@meets("WrongContext")
async def wrong_context(it: Situation) -> None:
    await it.sync.lock(NAME).acquire()
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, asyncio.run, it.sync.lock(NAME).acquire())


@meets("WaitTimeout")
async def wait_timeout(it: Situation) -> None:
    await it.sync.event("migrated:2026-11").wait(timeout=2)


@meets("BrokenBarrierError")
async def broken_barrier(it: Situation) -> None:
    barrier = AsyncBarrier(it.sync, "start", 2)
    await barrier.abort()
    await barrier.wait()


@meets("Conflict")
async def conflict(it: Situation) -> None:
    async def body(tx: Any) -> None:
        await tx.get("stock:7")
        await it.redis.incr("stock:7")
        tx.multi()
        tx.set("stock:7", 0)

    await transaction(it.redis, body, "stock:7", attempts=3)


@meets("OutcomeUnknown")
async def outcome_unknown(it: Situation) -> None:
    async with FaultProxy(it.server) as proxy, proxy.client() as redis:

        async def body(tx: Any) -> None:
            await tx.get("stock:7")
            tx.multi()
            tx.incr("stock:7")

        await transaction(redis, body, "stock:7")  # the first EXEC of a connection asks whether it is allowed
        proxy.on("EXEC", Action.CUT_AFTER)
        await transaction(redis, body, "stock:7")


@meets("PartiallyApplied")
async def partially_applied(it: Situation) -> None:
    await it.redis.rpush("log", "a")

    async def body(tx: Any) -> None:
        await tx.get("stock:7")
        tx.multi()
        tx.set("stock:7", 1)
        tx.incr("log")

    await transaction(it.redis, body, "stock:7")


@meets("TransactionMisuse")
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


@meets("UnknownStep")
async def unknown_step(it: Situation) -> None:
    lock = AsyncRobustLock(it.sync, NAME)
    await _leave_a_step(lock)
    async with lock as lease:
        await lease.compensate(UndoSteps())


@meets("UndoFailed")
async def undo_failed(it: Situation) -> None:
    lock = AsyncRobustLock(it.sync, NAME)
    await _leave_a_step(lock)
    async with lock as lease:
        await lease.compensate(steps)


@meets("StaleWriter")
async def stale_writer(it: Situation) -> None:
    lock = AsyncRobustLock(it.sync, NAME)
    earlier = await lock.acquire(identity="worker-7")
    await lock.acquire(identity="worker-7")
    await earlier.record({"line": 1})


@meets("FingerprintMismatch")
async def fingerprint_mismatch(it: Situation) -> None:
    @idempotent(it.sync, "payment:{key}", keep=60, fingerprint="{amount}")
    async def pay(key: str, amount: int) -> str:
        return "paid"

    await pay("9f3", 10)
    await pay("9f3", 99)


@meets("RunInterrupted")
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


@meets("ResultNotKept")
async def result_not_kept(it: Situation) -> None:
    @idempotent(it.sync, "payment:{key}", keep=60)
    async def pay(key: str) -> object:
        return datetime.now()

    await pay("9f3")
    await pay("9f3")


@meets("SyncError")
async def nonsense(it: Situation) -> None:
    reply = Action(reply=lambda frame: frame.rewrite(lambda _: b"*1\r\n$1\r\nx\r\n"))
    async with FaultProxy(it.server) as proxy, proxy.client() as redis, Coordinator(redis) as sync:
        proxy.on(script(load("lock/acquire").sha), reply)
        await sync.lock(NAME).acquire()


@meets("LockError")
async def lock_error(it: Situation) -> None:
    await it.redis.lock(NAME, timeout=10, lock_class=Lock).release()


@meets("LockNotOwnedError")
async def lock_not_owned(it: Situation) -> None:
    lock = it.redis.lock(NAME, timeout=10, lock_class=Lock)
    await lock.acquire()
    await it.redis.delete(NAME)
    await lock.release()


@meets("ServerNotFound")
async def server_not_found(it: Situation) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDIS_SYNC_AIO_SERVER", "/opt/valkey-server")
        EmbeddedServer().start()


@meets("ServerNotStarted")
async def server_not_started(it: Situation) -> None:
    EmbeddedServer(args=["--maxmemory-polici", "noeviction"]).start()


# -- the page --------------------------------------------------------------------------------------------------


def test_every_public_error_is_met_and_no_other() -> None:
    assert {"LeaseLost", "ServerNotFound", "QueueFull"} < public_errors().keys()
    assert set(ERRORS) == public_errors().keys() | OF_REDIS_PY
    assert all(f"**`{name}`**: " in PAGE.read_text("utf-8") for name in OF_REDIS_PY)


def test_every_reason_of_a_loss_has_an_entry_and_nothing_else_has() -> None:
    """`forgotten` is the reason of an event only."""
    assert set(entries("Why was my lease lost")) == {*get_args(LossReason), "forgotten"}


LOSSES: dict[str, list[LossReason | dict[str, Any]]] = {
    "late": [{"reason": "late", "stalled": 31.2}, "late"],
    "unreachable": ["unreachable", {"reason": "unreachable", "claim": 4.5, "held_for": 4.5}],
    "expired": [{"reason": "expired", "time_is_up": True}, "expired"],
    "taken": ["taken"],
    "closed": ["closed"],
    "released": ["released"],
    "forgotten": [],
}
"""What is quoted in the entry of a reason, in this order: facts of a loss, or only the reason."""


@pytest.mark.parametrize("reason", LOSSES)
def test_the_messages_of_a_loss_are_quoted(reason: str) -> None:
    """So the search of the site finds them."""
    of_all: dict[str, Any] = {"name": "orders:42", "fence": 1795711537967982, "held_for": 41.3}
    facts: list[dict[str, Any]] = [{"reason": it} if isinstance(it, str) else it for it in LOSSES[reason]]
    wanted = [plain(str(LeaseLost(**of_all | more))) for more in facts]
    assert MESSAGES.get(f"LeaseLost, {reason}", []) == wanted


def test_every_error_says_in_which_state_and_what_to_do() -> None:
    """In the docstring of its class. No lock has to do with the errors of the embedded server."""
    texts = {name: " ".join(inspect.cleandoc(kind.__doc__ or "").split()) for name, kind in public_errors().items()}
    assert {name for name, text in texts.items() if not re.search(r"\*\*State:\*\* \w", text)} == {
        "ServerNotFound",
        "ServerNotStarted",
    }
    assert [name for name, text in texts.items() if not re.search(r"\*\*Do:\*\* [\w`]", text)] == []


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of this module: some errors are met by another configuration, or by users with few rights."""
    with EmbeddedServer(port=0) as running:
        yield running


IN_REAL_TIME = {"Unreachable", "NotReplicated"}
"""A real loop words why it could not connect, and WAIT blocks the server's connection."""


async def check_quoted(own: EmbeddedServer, name: str) -> None:
    """Meet an error; the end of one message is left out of its quotation."""
    async with own.client() as redis:
        await redis.flushall()
        async with Coordinator(redis) as sync, Coordinator(redis) as other:
            with pytest.raises(Exception) as raised:
                await ERRORS[name](Situation(own, redis, sync, other))
    assert type(raised.value).__name__ == name
    (said,) = MESSAGES["LeaseLost, taken" if name == "LeaseLost" else name]
    assert plain(str(raised.value)).startswith(said)
    assert name == "ServerNotStarted" or plain(str(raised.value)) == said


@pytest.mark.parametrize("name", sorted(ERRORS.keys() - IN_REAL_TIME))
async def test_the_quoted_message_is_that_of_the_error(own: EmbeddedServer, name: str) -> None:
    await check_quoted(own, name)


@pytest.mark.real
@pytest.mark.parametrize("name", sorted(IN_REAL_TIME))
async def test_the_quoted_message_of_an_error_in_real_time(own: EmbeddedServer, name: str) -> None:
    await check_quoted(own, name)


def test_every_error_is_met_and_quoted() -> None:
    assert set(ERRORS) - {"LeaseLost"} == {name for name in MESSAGES if not name.startswith("LeaseLost, ")}


def test_a_message_that_has_changed_is_noticed() -> None:
    message = "NotHeld: this task holds no lease on 'orders:42'"
    assert quoted(message) == quoted(message.replace("42", "7"))
    assert quoted(message) != quoted(message.replace("holds no lease", "has no lease"))
