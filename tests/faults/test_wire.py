"""P4, FAULTS C1-C5, D3, D9: every operation, with every fault of the wire at every command it sends.

Whatever happens to a command or to its answer, the operation succeeds within `retry_for`: a lock that is ours is
never reported as taken, a lock that was released never as not held; the lock is free when its release returned,
nothing is queued, and the next client gets it immediately, under a greater fence. A count counts once.

Each test runs all faults for one operation at the same time, each behind a proxy and on a lock of its own, and
reports every fault that went wrong. A fault counts when the proxy has really taken its action.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from itertools import product

import pytest

from redis_sync_aio import (
    AcquireTimeout,
    AsyncBarrier,
    AsyncCountDownLatch,
    AsyncEvent,
    AsyncLock,
    AsyncMultiLock,
    AsyncReadWriteLock,
    AsyncSemaphore,
    Lease,
    QueueFull,
    Unreachable,
    wait_until,
)
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import PermissionDenied
from redis_sync_aio.testing.faults import Action, Match, Rule, anything, script

from ..support.body import waits
from ..support.inside import load, parties
from ..support.pairwise import each_value
from ..support.primitives import (
    KINDS,
    LOCK,
    SEMAPHORE,
    SHARED_LOCK,
    SHARED_SEMAPHORE,
    WATCHED,
    WATCHED_LOCK,
    Client,
    Primitive,
)
from ..support.views import holder_of, readers_of, writer_of
from ..support.wire_sweep import (
    ANSWERS,
    LIMIT,
    OPERATIONS,
    PUSHES,
    SEVERAL,
    WIRE,
    Arm,
    Case,
    Operation,
    acquire_pushed,
    hold,
    sweep,
    try_acquire,
)
from ..support.wired import ACQUIRE, BREAK, COUNT_DOWN, JOIN, MODES, RELEASE, SOON, Wired, wired
from ..support.wired import quiet_loop as quiet_loop

FAULTS = WIRE | ANSWERS
RESIZE, DOWNGRADE, COUNT = (
    script(load("permits/resize").sha),
    script(load("permits/downgrade").sha),
    script(COUNT_DOWN.sha),
)
modes = pytest.mark.parametrize("mode", ["link", "plain"])


# -- requests that are refused, several permits, readers and writers -----------------------------------------


async def queue_full(w: Wired, arm: Arm) -> int:
    """Ask for what is held, and waited for by as many as may wait: nothing is left in the queue."""
    holder = await w.elsewhere().acquire()
    waiting = asyncio.create_task(w.elsewhere().acquire())
    await w.queued(waiting=waiting)
    arm(ACQUIRE)
    with pytest.raises(QueueFull, match="1 request waits"):
        await w.lock(max_waiting=1).acquire()

    async def alone() -> bool:
        return (await w.elsewhere().statistics()).waiting == 1

    await wait_until(alone, SOON, timeout=15)
    await holder.release()
    lease = await waiting
    await lease.release()
    return lease.fence


def ours(w: Wired) -> AsyncSemaphore:
    """The semaphore behind the proxy."""
    return AsyncSemaphore(w.sync, w.name, limit=LIMIT)


def theirs(w: Wired, limit: int | None = None) -> AsyncSemaphore:
    """The same one, on a good connection; with the server's limit, but for the first use."""
    return AsyncSemaphore(w.other, w.name, limit=limit)


async def check_all_free(w: Wired) -> int:
    """All permits are free, and the whole can be had. Return its fence."""
    found = await theirs(w).statistics()
    assert (found.held, found.waiting, found.holders) == (0, 0, ()), found
    whole = await theirs(w).try_acquire(weight=LIMIT)
    assert whole is not None
    await whole.release()
    return whole.fence


async def held(w: Wired, *leases: Lease) -> None:
    """These and no others."""
    found = await theirs(w).statistics()
    assert {one.token: one.weight for one in found.holders} == {one.token: one.weight for one in leases}
    assert found.held == sum(one.weight for one in leases)
    for lease in leases:
        lease.check()


async def queue_up(w: Wired, *weights: int) -> list[asyncio.Task[Lease]]:
    waiting = []
    for number, weight in enumerate(weights, start=1):
        waiting.append(asyncio.create_task(theirs(w).acquire(weight=weight)))
        await w.queued(number)
    return waiting


async def weighted_contended(w: Wired, arm: Arm) -> int:
    """A heavy request waits for two holders, and a light one behind it for nothing else."""
    one, two = await ours(w).acquire(weight=3), await theirs(w).acquire(weight=2)
    arm(ACQUIRE)
    heavy = asyncio.create_task(ours(w).acquire(weight=4))
    await w.queued()
    light = asyncio.create_task(theirs(w).acquire())
    await w.queued(2)
    await two.release()
    await one.release()
    leases = await heavy, await light
    await held(w, *leases)
    for lease in leases:
        await lease.release()
    return await check_all_free(w)


async def release_to_several(w: Wired, arm: Arm) -> int:
    """The release whose answer is lost has granted three waiters; the next copy of it grants no other."""
    kept, lease = await ours(w).acquire(), await ours(w).acquire(weight=4)
    waiting = await queue_up(w, 1, 2, 1, 1)
    arm(RELEASE)
    await lease.release()
    async with asyncio.timeout(1):
        leases = [await task for task in waiting[:3]]
    await held(w, kept, *leases)
    assert not waiting[3].done()
    await kept.release()
    leases.append(await waiting[3])
    for one in leases:
        await one.release()
    return await check_all_free(w)


async def resize(w: Wired, arm: Arm) -> int:
    """Growing grants who fits, once."""
    holder = await theirs(w, LIMIT).acquire(weight=4)
    waiting = await queue_up(w, 2, 1, 3)
    admin = ours(w)
    arm(RESIZE)
    await admin.resize(7)
    leases = [await waiting[0], await waiting[1]]
    await held(w, holder, *leases)
    assert (await admin.get_limit(), admin.limit) == (7, 7)
    await admin.resize(LIMIT)
    for one in (holder, *leases):
        await one.release()
    await (await waiting[2]).release()
    return await check_all_free(w)


async def pause(w: Wired, arm: Arm) -> int:
    """A limit of 0 grants nothing, also when its reply is lost and it is set twice; it is raised again by others."""
    holder = await theirs(w, LIMIT).acquire(weight=LIMIT)
    (waiting,) = await queue_up(w, 2)
    admin = ours(w)
    arm(RESIZE)
    await admin.resize(0)
    await holder.release()
    assert (await admin.get_limit(), admin.limit) == (0, 0)
    found = await admin.statistics()
    assert (found.held, found.waiting) == (0, 1)
    await theirs(w).resize(LIMIT)
    await (await waiting).release()
    await admin.resize(LIMIT)
    return await check_all_free(w)


async def downgrade(w: Wired, arm: Arm) -> int:
    """Without a gap: a writer that waits stays out."""
    await w.direct.script_load(load("permits/downgrade").source.decode())
    mine, others = AsyncReadWriteLock(w.sync, w.name), AsyncReadWriteLock(w.other, w.name)
    writer = await mine.write().acquire()
    waiting = asyncio.create_task(others.write().acquire())
    await wait_until(waits(others), SOON, timeout=15)
    arm(DOWNGRADE)
    await mine.downgrade(writer)
    found = await others.statistics()
    assert (writer_of(found), readers_of(found), found.waiting) == (None, 1, 1)
    writer.check()
    await writer.release()
    last = await waiting
    assert last.fence > writer.fence
    await last.release()
    found = await others.statistics()
    assert (writer_of(found), readers_of(found), found.waiting) == (None, 0, 0), found
    return last.fence


# -- several locks together ----------------------------------------------------------------------------------


def of_several(command: str, skip: int, together: bool) -> Operation:
    """Return the operation of a multi-lock of three names whose fault is at a call of that script."""

    async def several(w: Wired, arm: Arm) -> int:
        base = f"{{{w.name}}}" if together else w.name
        lock = AsyncMultiLock(w.sync, [f"{base}:{number}" for number in (1, 2, 3)])
        await w.direct.script_load(load("lock/acquire_all").source.decode())
        left = skip

        def later(args: list[bytes]) -> bool:
            nonlocal left
            left -= script(load(command).sha)(args)
            return left < 0 and script(load(command).sha)(args)

        arm(later)
        lease = await lock.acquire()
        lease.check()
        for name, fence in lease.fences.items():
            found = await AsyncLock(w.other, name).statistics()
            assert holder_of(found) in lease.token.split(), f"{name} is not ours"
            assert found.fence == fence
        await lease.release()
        await check_free(w, lock)
        return 0

    several.__name__ = f"{command}, call {skip + 1}"
    return several


async def check_free(w: Wired, lock: AsyncMultiLock) -> None:
    async def free() -> bool:
        found = await AsyncMultiLock(w.other, lock.names).statistics()
        return not any(one.held or one.waiting for one in found)

    await wait_until(free, SOON, timeout=15)


SEVERAL_LOCKS = (
    of_several("lock/acquire_all", 0, True),
    of_several("lock/acquire", 0, False),
    of_several("lock/acquire", 2, False),
    of_several("lock/release", 1, True),
)


@modes
@pytest.mark.parametrize("which", range(2))
async def test_p4_a_release_that_was_done_in_part_is_tried_again(server: EmbeddedServer, mode: str, which: int) -> None:
    """One of the two was refused. The other one is free, which is no loss."""
    names = ["first", "second"]
    async with wired(server, mode, name=names[0]) as w:
        lock = AsyncMultiLock(w.sync, names)
        lease = await lock.acquire()
        refused = names[which].encode()
        w.proxy.on(lambda args: RELEASE(args) and refused in args, Action.answer_error("NOPERM not permitted"))
        with pytest.raises(PermissionDenied):
            await lease.release()
        assert lease.remaining() > 0
        await lease.release()
        await check_free(w, lock)


# -- events, latches and barriers ----------------------------------------------------------------------------


async def count_down(w: Wired, arm: Arm) -> int:
    mine, others = AsyncCountDownLatch(w.sync, w.name, 5), AsyncCountDownLatch(w.other, w.name, 5)
    arm(COUNT)
    assert await mine.count_down() == await others.count() == 4
    assert await mine.count_down(2) == await others.count() == 2
    return 0


async def set_again(w: Wired, arm: Arm) -> int:
    """A set that is repeated has one effect: when it has been answered, a clear is the last word."""
    mine, others = AsyncEvent(w.sync, w.name), AsyncEvent(w.other, w.name)
    arm(COUNT)
    await mine.set()
    assert await others.is_set()
    await others.clear()
    assert not await mine.is_set()
    return 0


async def wait(w: Wired, arm: Arm) -> int:
    """Also when the gate opened and closed before the request was repeated."""
    mine, others = AsyncEvent(w.sync, w.name), AsyncEvent(w.other, w.name)
    arm(ACQUIRE)
    waiting = asyncio.create_task(mine.wait())

    async def there() -> bool:
        return waiting.done() or await w.direct.zcard(f"{{{w.name}}}:event:queue") == 1

    await wait_until(there, SOON, timeout=15)
    await others.set()
    await others.clear()
    assert await waiting
    return 0


def joined(barrier: AsyncBarrier, task: asyncio.Task[int] | None = None) -> Callable[[], Awaitable[bool]]:
    """Return a condition: one party waits, or the task's wait has ended."""

    async def there() -> bool:
        return (task is not None and task.done()) or await barrier.n_waiting() == 1

    return there


async def meet(w: Wired, **options: float) -> int:
    """Two rounds: in the first one the faulty party joins first, in the second one last. Each has its rank."""
    faulty, sound = (AsyncBarrier(sync, w.name, 2, **options) for sync in (w.sync, w.other))  # type: ignore[arg-type]
    first = asyncio.create_task(faulty.wait())
    await wait_until(joined(sound, first), SOON, timeout=30)
    assert {await sound.wait(), await first} == {0, 1}
    second = asyncio.create_task(sound.wait())
    await wait_until(joined(sound), SOON, timeout=30)
    assert {await faulty.wait(), await second} == {0, 1}
    assert (await sound.n_waiting(), await sound.broken()) == (0, False)
    return 0


async def join_first(w: Wired, arm: Arm) -> int:
    arm(script(JOIN.sha))
    return await meet(w)


async def join_last(w: Wired, arm: Arm) -> int:
    joins = 0

    def second(args: list[bytes]) -> bool:
        nonlocal joins
        joins += script(JOIN.sha)(args)
        return joins > 1 and script(JOIN.sha)(args)

    arm(second)
    return await meet(w)


async def pass_on(w: Wired, arm: Arm) -> int:
    """A pass whose push is lost is found when the party asks again."""
    arm(anything)
    return await meet(w, ttl=6)


async def reset(w: Wired, arm: Arm) -> int:
    """When a reset has been answered, no copy of it meets those that come afterwards."""
    await AsyncBarrier(w.other, w.name, 2).abort()
    arm(script(BREAK.sha))
    await AsyncBarrier(w.sync, w.name, 2).reset()
    return await meet(w)


async def test_a_waiter_gets_in_however_late_the_push_comes(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the event is cleared before, and the server has forgotten whom it let in."""
    monkeypatch.setattr(parties, "REMEMBERED", 0.2)
    async with wired(server, name="late", kind=SEMAPHORE, response_timeout=30) as w, asyncio.timeout(60):
        late, sound = AsyncEvent(w.sync, "late"), AsyncEvent(w.other, "late")
        waiting = asyncio.create_task(late.wait())

        async def there() -> bool:
            return await w.direct.zcard("{late}:event:queue") == 1

        await wait_until(there, SOON, timeout=30)
        rule = w.proxy.on_push(anything, Action.delay(1.0))
        await sound.set()
        await sound.clear()
        assert await waiting
        assert rule.acted


async def test_a_party_passes_however_late_the_answer_comes(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have passed with it. If it joined again, it would wait for those that do not come again."""
    monkeypatch.setattr(parties, "REMEMBERED", 0.2)
    async with wired(server, name="late", kind=SEMAPHORE, response_timeout=30) as w, asyncio.timeout(60):
        late, sound = AsyncBarrier(w.sync, "late", 2), AsyncBarrier(w.other, "late", 2)
        assert not await late.broken()  # its connection is there
        rule = w.proxy.on(script(JOIN.sha), Action.delay_reply(1.0))
        first = asyncio.create_task(sound.wait())
        await wait_until(joined(sound), SOON, timeout=30)
        assert (await late.wait(), await first) == (1, 0)
        assert rule.acted


async def test_a_count_without_an_answer_may_have_counted(server: EmbeddedServer) -> None:
    async with wired(server, retry_for=0.4) as w:
        w.proxy.on(COUNT, WIRE["black-holed request"], times=99)
        with pytest.raises(Unreachable):
            await AsyncCountDownLatch(w.sync, "unheard", 1).count_down()


# -- the sweeps ----------------------------------------------------------------------------------------------

WITH_PERMITS = (weighted_contended, release_to_several, resize, pause, downgrade)
OF_PARTIES = (count_down, set_again, wait, join_first, join_last, reset)
IN_THE_GATE = (release_to_several, pause, set_again, join_first, *SEVERAL_LOCKS[:2], SEVERAL_LOCKS[3])
"""Operations whose faults others meet in the same way."""
CASES = [
    *product(OPERATIONS, (LOCK,), MODES),
    *product(OPERATIONS, (SEMAPHORE,), ("link", "plain")),
    *product(OPERATIONS, (SHARED_LOCK, SHARED_SEMAPHORE), ("link",)),
    *product((queue_full,), (LOCK, SEMAPHORE), ("link", "plain")),
    *product(WITH_PERMITS, (SEVERAL,), ("link", "plain")),
    *product(SEVERAL_LOCKS, (LOCK,), ("link", "plain")),
    *product(OF_PARTIES, (SEMAPHORE,), ("link", "plain")),
]


@pytest.mark.parametrize(
    ("operation", "kind", "mode"),
    [
        *each_value([case for case in CASES if case[0] not in IN_THE_GATE]),
        *[pytest.param(*case, marks=pytest.mark.ci) for case in CASES if case[0] in IN_THE_GATE],
    ],
)
async def test_sweep(server: EmbeddedServer, operation: Operation, kind: Primitive, mode: str) -> None:
    """C1-C5, D3, D9: 18 faults for each operation, by each way to connect."""
    cases = [Case(operation, mode, fault, FAULTS[fault], kind=kind) for fault in FAULTS]
    assert await sweep(server, cases) == len(cases) == 18


@pytest.mark.parametrize(
    ("operation", "kind"),
    [*product((acquire_pushed,), (*KINDS, SHARED_LOCK, SHARED_SEMAPHORE, *WATCHED)), (pass_on, SEMAPHORE)],
)
async def test_sweep_of_the_push(server: EmbeddedServer, operation: Operation, kind: Primitive) -> None:
    """P3, C7: the grant itself, or the pass of a barrier, is lost or late; the waiter heals."""
    cases = [Case(operation, "link", fault, PUSHES[fault], push=True, kind=kind) for fault in PUSHES]
    assert await sweep(server, cases, **({} if operation is pass_on else {"poll_cap": 0.3})) == len(cases) == 3


@pytest.mark.ci
@pytest.mark.parametrize("mode", MODES)
async def test_sweep_of_the_whole(server: EmbeddedServer, mode: str) -> None:
    """C1-C5: the 1st, 2nd, … command of connecting, acquiring and releasing: 220 faults in the 3 modes."""
    faults = WIRE | {"LOADING": ANSWERS["LOADING"]}
    async with wired(server, mode, response_timeout=5, client={"socket_timeout": 5}) as w:  # so that it repeats nothing
        await hold(w, lambda _: w.proxy.on(anything, Action.PASS))
        commands = sum(w.proxy.commands.values())
    cases = [Case(hold, mode, fault, faults[fault], skip) for skip in range(commands) for fault in faults]
    connecting = 9 if int(version("redis").split(".")[0]) >= 8 else 8  # redis-py 7 sends one command less
    assert await sweep(server, cases) == len(cases) >= (connecting if mode == "link" else 4) * len(faults)


def at(command: bytes, operation: Operation) -> Operation:
    """Return the operation with its fault at the first such command after the moment it would be armed."""

    async def watching(w: Wired, arm: Arm) -> int:
        def arm_here(_: Match) -> Rule:
            return arm(lambda words: words[0] == command)

        return await operation(w, arm_here)

    watching.__name__ = f"{command.decode()} of {operation.__name__}"
    return watching


def faults_at(command: bytes) -> dict[str, Action]:
    """Return the faults at a command of a talk under WATCH.

    An error answer in the place of MULTI, of a queued command or of EXEC is not tried: a real server that gives one
    does not leave the transaction open behind it, as a proxy would.
    """
    if command == b"WATCH":
        return WIRE | {name: action for name, action in ANSWERS.items() if name != "NOSCRIPT"}
    return {name: action for name, action in WIRE.items() if action is not Action.DUPLICATE or command == b"EXEC"}


TALKING = [operation for operation in OPERATIONS if operation is not try_acquire]
TALKS = [
    *product(TALKING, WATCHED, ("link",), (b"WATCH", b"MULTI", b"EXEC")),
    *product(TALKING, (WATCHED_LOCK,), ("plain",), (b"WATCH", b"EXEC")),
]


@pytest.mark.parametrize(("operation", "kind", "mode", "command"), each_value(TALKS))
async def test_sweep_by_watch(
    server: EmbeddedServer, operation: Operation, kind: Primitive, mode: str, command: bytes
) -> None:
    """C1-C5, D9: 34 faults for each of 6 operations and 2 kinds over the link; 26 of the lock on pooled connections."""
    cases = [
        Case(at(command, operation), mode, fault, action, kind=kind) for fault, action in faults_at(command).items()
    ]
    assert await sweep(server, cases) == len(cases) == {b"WATCH": 17, b"MULTI": 8, b"EXEC": 9}[command]


# -- late copies of requests for permits ---------------------------------------------------------------------


async def repeated_and_released(w: Wired, arm: Arm) -> None:
    arm(ACQUIRE)
    lease = await ours(w).acquire(weight=2)
    await held(w, lease)
    await lease.release()


async def queued_and_released(w: Wired, arm: Arm) -> None:
    holder = await theirs(w, LIMIT).acquire(weight=LIMIT)
    arm(ACQUIRE)
    waiting = asyncio.create_task(ours(w).acquire(weight=2))
    await w.queued()
    await holder.release()
    lease = await waiting
    await held(w, lease)
    await lease.release()


async def cancelled_while_it_asks(w: Wired, arm: Arm) -> None:
    await ours(w).statistics()  # connected
    rule = arm(ACQUIRE)
    acquiring = asyncio.create_task(ours(w).acquire(weight=2))
    await rule.fired.wait() if rule.action is not Action.PASS else await asyncio.sleep(0)
    acquiring.cancel()
    await asyncio.wait([acquiring])


async def cancelled_while_queued(w: Wired, arm: Arm) -> None:
    holder = await theirs(w, LIMIT).acquire(weight=LIMIT)
    arm(ACQUIRE)
    waiting = asyncio.create_task(ours(w).acquire(weight=2))
    await w.queued()
    waiting.cancel()
    await asyncio.wait([waiting])
    await holder.release()


async def timed_out(w: Wired, arm: Arm) -> None:
    holder = await theirs(w, LIMIT).acquire(weight=LIMIT)
    arm(ACQUIRE)
    with pytest.raises((AcquireTimeout, Unreachable)):
        await ours(w).acquire(weight=2, timeout=0.5)
    await holder.release()


COPIED: tuple[tuple[Callable[[Wired, Arm], Awaitable[None]], Action], ...] = (
    *product((repeated_and_released,), (Action.CUT_AFTER, Action.CUT_BEFORE, Action.SWALLOW_REPLY, ANSWERS["LOADING"])),
    *product((queued_and_released, cancelled_while_it_asks), (Action.CUT_AFTER, Action.SWALLOW_REPLY)),
    *product((cancelled_while_queued, timed_out), (Action.PASS, Action.CUT_AFTER)),
)


@modes
@pytest.mark.parametrize(("operation", "action"), COPIED)
async def test_p4_late_copies_of_what_is_over_find_it_spent(
    server: EmbeddedServer, mode: str, operation: Callable[[Wired, Arm], Awaitable[None]], action: Action
) -> None:
    """P4, B4: every copy of an acquire that was repeated or undone, arriving after the end: no ghost permit."""
    copies: list[list[bytes]] = []

    def acquires(args: list[bytes]) -> bool:
        if ACQUIRE(args):
            copies.append(args)
        return ACQUIRE(args)

    async with wired(server, mode, kind=SEVERAL) as w:
        await (await theirs(w, LIMIT).acquire()).release()
        await operation(w, lambda _: w.proxy.on(acquires, action))
        await ours(w).statistics()  # whatever undoes it was executed before
        assert copies
        direct: Client = w.direct
        for copy in copies * 2:
            reply = await direct.execute_command(*copy)
            assert isinstance(reply, list), "granted"
            assert reply[0] == 4, "not spent"
        await check_all_free(w)


@modes
@pytest.mark.parametrize("fault", ["LOADING", "cut after"])
async def test_p4_an_identity_is_never_spent(server: EmbeddedServer, mode: str, fault: str) -> None:
    """P4: its request was repeated, it was released; it is granted again immediately."""
    async with wired(server, mode, kind=SEVERAL) as w:
        fence = 0
        for _ in range(3):
            w.proxy.on(ACQUIRE, FAULTS[fault])
            lease = await ours(w).acquire(weight=2, identity="worker-7")
            assert lease.fence > fence
            fence = lease.fence
            await lease.release()
            async with asyncio.timeout(1), ours(w).acquire(identity="worker-7") as again:
                assert again.fence > fence
                fence = again.fence
        await check_all_free(w)
