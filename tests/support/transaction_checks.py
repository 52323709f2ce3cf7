"""Checks of transactions in simulation (see `gate.py`), for `tests/mutation/test_transaction_mutants.py`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import (
    AsyncLock,
    AsyncSemaphore,
    Backoff,
    CommandRefused,
    Conflict,
    Coordinator,
    Lease,
    LeaseLost,
    OutcomeUnknown,
    Unreachable,
    transaction,
    watch_retry,
)
from redis_sync_aio.errors import TransactionMisuse
from redis_sync_aio.types import Committed, Transaction

from .gate import Command, Gate, Pipe
from .inside import read_through, turn_key
from .mutants import Trial

Check = Callable[["Bench"], Awaitable[None]]
TURN = turn_key(b"n")


@dataclass
class Bench:
    """A counter, whatever increments it, and what is to happen on the way."""

    gate: Gate
    server: Any
    rules: list[tuple[bytes, Callable[[Pipe], object]]] = field(default_factory=list)
    client: Redis = field(init=False)
    turns: int = 0
    forbidden: bytes = b""
    """A command that the user may not run."""

    def on(self, command: str, act: Callable[[Pipe], object]) -> None:
        """Do something when the next such command gets to the server; False: refuse it, or lose it with its pipe."""
        self.rules.append((command.encode(), act))

    def permits(self, pipe: Pipe, words: Command) -> bool:
        if words[0] == self.forbidden:
            return False
        if words[0] in (b"MULTI", b"EXEC") and not pipe.watching:
            return True  # a new connection finds out whether it may use them
        for rule in self.rules:
            if rule[0] == words[0]:
                self.rules.remove(rule)
                return rule[1](pipe) is not False
        return True

    async def body(self, tx: Transaction) -> int:
        self.turns += 1
        count = int(await tx.get("n") or 0) + 1
        tx.multi()
        tx.set("n", count)
        tx.incr("done")
        return count

    async def run(self, **options: Any) -> Committed[int]:
        return await transaction(self.client, self.body, "n", **options)

    def counted(self) -> int:
        """How often it was done; what was counted by reading and writing agrees."""
        count, done = self.server.mget("n", "done")
        assert int(count or 0) == int(done or 0), "lost updates"
        return int(done or 0)

    def ahead(self, _: Pipe) -> None:
        """Somebody else is faster."""
        self.server.incr("n")
        self.server.incr("done")

    def watching(self) -> list[Pipe]:
        return [pipe for pipe in self.gate.pipes if pipe.watching and not pipe.lost]

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        async with self.gate.client() as client, Coordinator(client, response_timeout=1000) as sync:
            lease = await AsyncLock(sync, "l", ttl=600, auto_renew=False).acquire()
            read_through(lease, self.client)
            yield lease

    async def commit(self, lease: Lease) -> None:
        async with lease.transaction() as tx:
            tx.multi()
            tx.incr("n")
            tx.incr("done")


def cut(pipe: Pipe) -> None:
    """It is executed, and its answer is lost."""
    pipe.cut()


def lose(pipe: Pipe) -> bool:
    """It is lost before it is executed."""
    pipe.cut()
    return False


def steal(bench: Bench) -> Callable[[Pipe], None]:
    def stolen(_: Pipe) -> None:
        bench.server.set("l", "somebody else")

    return stolen


# -- conflicts ---------------------------------------------------------------------------------------------


async def check_a_conflict_is_tried_again(bench: Bench) -> None:
    for _ in range(2):
        bench.on("MULTI", bench.ahead)
    done = await bench.run()
    assert (done.value, done.attempts, done.conflicts) == (3, 3, 2)
    assert bench.counted() == 3


async def check_it_gives_up_after_so_many_attempts(bench: Bench) -> None:
    for _ in range(9):
        bench.on("MULTI", bench.ahead)
    with pytest.raises(Conflict) as raised:
        await bench.run(attempts=3)
    assert (raised.value.attempts, raised.value.conflicts, bench.turns) == (3, 3, 3)
    assert bench.counted() == 3


async def check_it_gives_up_in_time(bench: Bench) -> None:
    for _ in range(30):
        bench.on("MULTI", bench.ahead)
    before = bench.gate.time
    with pytest.raises(Conflict):
        await bench.run(timeout=1, attempts=20, backoff=Backoff(initial=0.3, factor=1, cap=0.3, jitter=False))
    assert 0.8 <= bench.gate.time - before <= 1


async def check_a_second_connection_watches_as_well(bench: Bench) -> None:
    """Also what the first attempt had to give up."""
    bench.on("WATCH", lose)
    bench.on("MULTI", bench.ahead)
    assert (await bench.run()).attempts == 3
    assert bench.counted() == 2


# -- the body ----------------------------------------------------------------------------------------------


async def check_the_error_of_the_body_leaves(bench: Bench) -> None:
    async def failing(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.set("n", 1)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await transaction(bench.client, failing, "n")
    assert not bench.server.exists("n")


async def check_an_error_as_ours_leaves_too(bench: Bench) -> None:
    """The body's own Unreachable is about something else."""
    turns = 0

    async def failing(tx: Transaction) -> None:
        nonlocal turns
        turns += 1
        await tx.get("n")
        raise Unreachable("mine")

    with pytest.raises(Unreachable, match="mine"):
        await transaction(bench.client, failing, "n", attempts=3)
    assert turns == 1


async def check_a_cancelled_body_leaves_no_watch(bench: Bench) -> None:
    for command in ("GET", "EXEC"):
        running = asyncio.create_task(bench.run())
        bench.on(command, lambda _, running=running: running.cancel())  # type: ignore[misc]
        await asyncio.wait([running])
        assert running.cancelled()
        assert not bench.watching()
        await bench.client.set("x", command)
        assert await bench.client.get("x") == command.encode(), "out of step"


async def check_a_body_that_is_cancelled_between_commands_leaves_no_watch(bench: Bench) -> None:
    async def waits(tx: Transaction) -> None:
        await tx.get("n")
        await asyncio.sleep(60)

    running = asyncio.create_task(transaction(bench.client, waits, "n"))
    await asyncio.sleep(1)
    assert bench.watching()
    running.cancel()
    await asyncio.wait([running])
    assert not bench.watching()


async def check_a_cancellation_while_it_connects_leaves_nothing(bench: Bench) -> None:
    bench.on("HELLO", lambda _: running.cancel())
    running = asyncio.create_task(bench.run())
    await asyncio.wait([running])
    assert running.cancelled()


# -- the wire ----------------------------------------------------------------------------------------------


async def check_what_is_lost_before_exec_is_tried_again(bench: Bench) -> None:
    for number, command in enumerate(("WATCH", "GET")):
        bench.on(command, lose)
        done = await bench.run()
        assert (done.attempts, done.conflicts, bench.counted()) == (2, 0, number + 1)


async def check_another_connection_may_lead_to_another_server(bench: Bench) -> None:
    bench.gate.refusal = b"-READONLY You can't write against a read only replica.\r\n"
    for number, command in enumerate(("WATCH", "EXEC")):
        bench.on(command, lambda _: False)
        assert (await bench.run()).attempts == 2
        assert sum(pipe.lost for pipe in bench.gate.pipes) == number + 1


async def check_exec_is_not_sent_on_a_lost_connection(bench: Bench) -> None:
    async def body(tx: Transaction) -> int:
        bench.turns += 1
        count = int(await tx.get("n") or 0)
        if bench.turns == 1:
            bench.watching()[0].cut()
            await asyncio.sleep(0.1)
            bench.server.incr("n")
        tx.multi()
        tx.set("n", count + 1)
        return count

    assert (await transaction(bench.client, body, "n")).attempts == 2
    assert bench.server.get("n") == b"2"


async def check_what_is_not_known_is_said(bench: Bench) -> None:
    for lost, done in ((cut, 1), (lose, 1)):
        bench.on("EXEC", lost)
        with pytest.raises(OutcomeUnknown):
            await bench.run()
        assert bench.counted() == done


async def check_the_idempotent_is_tried_again(bench: Bench) -> None:
    bench.on("EXEC", cut)
    assert (await bench.run(idempotent=True)).attempts == 2
    assert bench.counted() == 2


async def check_a_later_run_does_not_deny_an_earlier_exec(bench: Bench) -> None:
    bench.on("EXEC", cut)

    async def body(tx: Transaction) -> None:
        bench.turns += 1
        await tx.get("n")
        if bench.turns == 2:
            bench.server.incr("n")
        tx.multi()
        tx.incr("done")

    with pytest.raises(OutcomeUnknown):
        await transaction(bench.client, body, "n", idempotent=True, attempts=2)
    assert bench.server.get("done") == b"1"


async def check_a_refused_exec_leaves_no_multi_open(bench: Bench) -> None:
    bench.on("EXEC", lambda _: False)
    with pytest.raises(CommandRefused):
        await bench.run()
    assert await bench.client.incr("x") == 1
    assert bench.counted() == 0


async def check_nothing_is_written_without_multi(bench: Bench) -> None:
    """It is found out once for each connection, before anything is written."""
    for bench.forbidden in (b"MULTI", b"EXEC"):
        with pytest.raises(CommandRefused):
            await bench.run()
        assert bench.counted() == 0
    bench.forbidden = b""
    assert (await bench.run()).attempts == 1
    before = bench.gate.delivered
    await bench.run()
    assert bench.gate.delivered - before == len(("WATCH", "GET", "MULTI", "SET", "INCRBY", "EXEC"))


async def check_trouble_in_a_group_is_tried_again(bench: Bench) -> None:
    """As when it is bare."""

    async def body(tx: Transaction) -> int:
        async with asyncio.TaskGroup() as group:
            return await group.create_task(bench.body(tx))

    bench.on("GET", lose)
    assert (await transaction(bench.client, body, "n")).attempts == 2
    assert bench.counted() == 1


async def check_a_failed_body_tells_of_an_earlier_exec(bench: Bench) -> None:
    bench.on("EXEC", cut)

    async def body(tx: Transaction) -> int:
        if bench.turns:
            raise KeyError
        return await bench.body(tx)

    with pytest.raises(KeyError) as raised:
        await transaction(bench.client, body, "n", idempotent=True)
    assert "an earlier run" in "".join(getattr(raised.value, "__notes__", ()))


async def check_what_is_caught_inside_the_loop_is_told(bench: Bench) -> None:
    with pytest.raises(TransactionMisuse, match="inside the loop"):  # noqa: PT012
        async for attempt in watch_retry(bench.client, "n"):
            with suppress(KeyError):
                async with attempt:
                    raise KeyError


# -- the marker --------------------------------------------------------------------------------------------


async def check_the_marker_tells(bench: Bench) -> None:
    bench.on("EXEC", cut)
    done = await bench.run(exactly_once=True)
    assert (done.recovered, done.attempts, bench.counted()) == (True, 1, 1)
    bench.on("EXEC", lose)
    done = await bench.run(exactly_once=True)
    assert (done.recovered, done.attempts, bench.counted()) == (False, 2, 2)


async def check_a_late_exec_is_void(bench: Bench) -> None:
    """Also when nothing else that it watches has changed."""

    async def body(tx: Transaction) -> None:
        await tx.get("n")
        tx.multi()
        tx.incr("done")

    late: list[Pipe] = []
    bench.on("EXEC", lambda pipe: late.append(pipe) or lose(pipe))  # type: ignore[func-returns-value]
    done = await transaction(bench.client, body, "n", exactly_once=True)
    assert (done.attempts, done.recovered) == (2, False)
    late[0].up.append((b"EXEC",))
    await asyncio.sleep(1)
    assert bench.server.get("done") == b"1"


async def check_a_marker_is_not_trusted_for_ever(bench: Bench) -> None:
    """After a minute a "done" would be forgotten."""

    def much_later(pipe: Pipe) -> bool:
        bench.gate.time += 100
        return lose(pipe)

    bench.on("EXEC", much_later)
    with pytest.raises(OutcomeUnknown):
        await bench.run(exactly_once=True)


async def check_a_cancelled_question_leaves_no_answer(bench: Bench) -> None:
    """Its answers are still on their way when somebody else gets the connection."""
    await bench.client.ping()
    running = asyncio.create_task(bench.run(exactly_once=True))

    def asked(_: Pipe) -> None:
        running.cancel()

    def lost(pipe: Pipe) -> bool:
        bench.on("SET", asked)  # the next one is the question
        return lose(pipe)

    bench.on("EXEC", lost)
    await asyncio.wait([running])
    assert running.cancelled()
    assert await bench.client.echo("mine") == b"mine"


# -- turns -------------------------------------------------------------------------------------------------


async def check_it_waits_when_somebody_has_the_turn(bench: Bench) -> None:
    bench.server.set(TURN, "somebody", px=60_000)
    async with bench.gate.client() as client, Coordinator(client, response_timeout=1000) as sync:
        polite = asyncio.create_task(transaction(sync, bench.body, "n", escalate_after=3))
        await asyncio.sleep(5)
        assert not polite.done(), "it did not wait"
        assert not bench.watching(), "it keeps a connection while it waits"
        bench.ahead(bench.gate.pipes[0])
        bench.server.delete(TURN)
        done = await polite
        assert (done.escalated, done.attempts, done.conflicts, done.value) == (True, 1, 0, 2)
        await asyncio.sleep(1)
        assert not bench.server.exists(TURN), "the turn was not given back"


async def check_the_turn_is_due_after_so_many_conflicts(bench: Bench) -> None:
    had: list[bool] = []

    def look(pipe: Pipe) -> None:
        had.append(bool(bench.server.exists(TURN)))
        if len(had) < 4:
            bench.ahead(pipe)

    async with bench.gate.client() as client, Coordinator(client, response_timeout=1000) as sync:
        for _ in range(4):
            bench.on("MULTI", look)
        done = await transaction(sync, bench.body, "n", escalate_after=2)
        assert (done.escalated, done.conflicts, had) == (True, 3, [False, False, True, True])
        await asyncio.sleep(1)
        assert not bench.server.exists(TURN), "the turn was not given back"


async def check_who_has_the_turn_in_vain_waits_as_before(bench: Bench) -> None:
    """Somebody takes no turn, and is faster each time."""
    async with bench.gate.client() as client, Coordinator(client, response_timeout=1000) as sync:
        for _ in range(4):
            bench.on("MULTI", bench.ahead)
        before = bench.gate.time
        pauses = Backoff(initial=1, factor=1, cap=1, jitter=False)
        done = await transaction(sync, bench.body, "n", escalate_after=1, backoff=pauses)
        assert (done.escalated, done.conflicts) == (True, 4)
        assert 3 <= bench.gate.time - before < 4


async def check_waiting_for_the_turn_ends_in_time(bench: Bench) -> None:
    bench.server.set(TURN, "somebody", px=60_000)
    async with bench.gate.client() as client, Coordinator(client, response_timeout=1000) as sync:
        with pytest.raises(Conflict):
            async with asyncio.timeout(10):
                await transaction(sync, bench.body, "n", escalate_after=3, timeout=2)
    bench.server.delete(TURN)


# -- guarded by a lease ------------------------------------------------------------------------------------


async def check_a_lost_lease_writes_nothing(bench: Bench) -> None:
    """Lost before the token is compared, or between that and EXEC; to somebody else, or to nobody."""
    for when in ("WATCH", "MULTI"):
        for what in (steal(bench), lambda _: bench.server.delete("l")):
            async with bench.lease() as lease:
                bench.on(when, what)
                with pytest.raises(LeaseLost):
                    await bench.commit(lease)
                assert bench.counted() == 0
            bench.server.delete("l")


async def check_a_renewal_is_no_conflict(bench: Bench) -> None:
    async with bench.lease() as lease:
        bench.on("MULTI", lambda _: bench.server.pexpire("l", 60_000))
        await bench.commit(lease)
        assert bench.counted() == 1
        await lease.release()


async def check_a_lease_that_is_lost_after_a_renewal_writes_nothing(bench: Bench) -> None:
    async with bench.lease() as lease:
        bench.on("MULTI", lambda _: bench.server.pexpire("l", 60_000))
        bench.on("MULTI", steal(bench))
        with pytest.raises(LeaseLost):
            await bench.commit(lease)
        assert bench.counted() == 0
    bench.server.delete("l")


async def check_what_was_guarded_is_not_repeated_either(bench: Bench) -> None:
    async with bench.lease() as lease:
        bench.on("EXEC", cut)
        with pytest.raises(OutcomeUnknown):
            await bench.commit(lease)
        assert bench.counted() == 1
        bench.on("WATCH", lose)
        await bench.commit(lease)
        assert bench.counted() == 2
        await lease.release()


async def check_a_spent_permit_guards_nothing(bench: Bench) -> None:
    async with bench.gate.client() as client, Coordinator(client, response_timeout=1000) as sync:
        lease = await AsyncSemaphore(sync, "l", limit=3, auto_renew=False).acquire()
        read_through(lease, bench.client)
        bench.server.hset(lease._grant.keys.all[1], b"=" + lease._grant.wire_token, f"0 {lease.fence}")
        with pytest.raises(LeaseLost):
            await bench.commit(lease)
        assert bench.counted() == 0


CHECKS: dict[str, Check] = {
    name: check
    for name, check in list(globals().items())
    if name.startswith("check_") and inspect.iscoroutinefunction(check)
}


def of(check: Check) -> Trial:
    """Return the trial that makes this check."""

    def begin(gate: Gate, server: Any) -> Callable[[], Coroutine[Any, Any, None]]:
        bench = Bench(gate, server)
        gate.permits = bench.permits
        return partial(checked, check, bench)

    return begin


async def checked(check: Check, bench: Bench) -> None:
    """Run a check; no connection is in use or watches at its end, whatever it was about."""
    async with asyncio.timeout(300), bench.gate.client(socket_timeout=10, protocol=3) as bench.client:
        await check(bench)
        await asyncio.sleep(1)
        pool: Any = bench.client.connection_pool
        assert not pool._in_use_connections, "left in use"
        assert not bench.watching(), "left watching"
        assert all(pipe.lost or pipe.queued is None for pipe in bench.gate.pipes), "MULTI left open"
