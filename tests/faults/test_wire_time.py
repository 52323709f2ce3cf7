"""P1, P5, P6, FAULTS B3, B5, C4, C6, C9, D12: what delays, black holes and partitions do to deadlines."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any, Literal

import anyio
import pytest

from redis_sync_aio import AcquireTimeout, CommandRefused, LeaseLost, Unreachable, wait_until
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import CoordinatorClosed
from redis_sync_aio.testing.faults import Action, Match, anything
from redis_sync_aio.types import BaseLease

from ..support.body import for_ever, lost_in
from ..support.inside import cohort_of, hub_of, now
from ..support.primitives import KINDS, WATCHED, Primitive
from ..support.sharing import process_grant_of
from ..support.virtual import stall
from ..support.wired import ACQUIRE, MODES, RELEASE, RENEW, RESPONSE_TIMEOUT, RETRY_FOR, SOON, Wired, timed, wired
from ..support.wired import quiet_loop as quiet_loop

modes = pytest.mark.parametrize("mode", ["link", "plain"])
Partition = Literal["refused", "black hole"]
partitions = pytest.mark.parametrize("kind", ["refused", "black hole"])


async def part(w: Wired, kind: Partition) -> None:
    if kind == "black hole":
        w.proxy.black_hole = True
    else:
        w.proxy.refuse = True
        await w.proxy.cut()


def heal(w: Wired) -> None:
    w.proxy.black_hole = w.proxy.refuse = False


# -- deadlines ---------------------------------------------------------------------------------------------


@modes
async def test_a_deadline_counts_from_before_the_send(server: EmbeddedServer, mode: str) -> None:
    """P6, C9: a reply that was in flight for d leaves ttl - d at most; acquire, extend, renew."""
    late = 0.15
    # Patient: a request that is repeated has an answer that is not delayed.
    async with wired(server, mode, response_timeout=2, client={"socket_timeout": 2}) as w:
        begin = now()
        w.proxy.on(ACQUIRE, Action.delay_reply(late))
        lease = await w.lock(ttl=9).acquire()
        assert begin + 9 <= lease._grant.deadline <= now() - late + 9

        first, begin = lease._grant.deadline, now()
        rule = w.proxy.on(RENEW, Action.delay_reply(late))
        await rule.fired.wait()
        await wait_until(lambda: lease._grant.deadline > first, SOON, timeout=15)
        assert begin + 9 <= lease._grant.deadline <= now() - late + 9

        await lease.release()

        lease = await w.lock(ttl=9, auto_renew=False).acquire()
        w.proxy.on(RENEW, Action.delay_reply(late))
        await lease.extend(5)
        assert 4 < lease.remaining() <= 5 - late
        await lease.release()


@modes
async def test_a_renewal_does_not_undo_an_extension(server: EmbeddedServer, mode: str) -> None:
    """P6: a renewal that falls due while the extension is in flight leaves the lease as long as extended."""
    async with asyncio.timeout(60), wired(server, mode, response_timeout=20, client={"socket_timeout": 20}) as w:
        lease = await w.lock(ttl=1.5).acquire()
        sent = w.proxy.on(RENEW, Action.HOLD_REPLY)
        extending = asyncio.create_task(lease.extend(60))
        await sent.fired.wait()
        with suppress(TimeoutError):  # a renewal is due after a third of the ttl, if there is to be one
            await asyncio.wait_for(w.proxy.until(lambda: sent.hits > 1), 0.7)
        sent.release.set()
        await extending
        await w.lock().statistics()  # the answers of all earlier commands are here
        assert 40 < lease.remaining() <= 60
        assert 40_000 < await w.direct.pttl(w.name) < 120_000
        await lease.release()


async def test_the_deadline_of_a_late_push(server: EmbeddedServer) -> None:
    """P6, C9: so does a grant whose push was in flight for d, though the waiter did not ask for it then."""
    late = 0.2
    async with wired(server, claim=5) as w:
        holder = await w.elsewhere().acquire()
        w.proxy.on(ACQUIRE, Action.delay_reply(late / 2))
        waiting = asyncio.create_task(w.lock(ttl=5).acquire())
        await w.queued()
        w.proxy.on_push(anything, Action.delay(late))
        await holder.release()
        lease = await waiting
        assert 4 < lease.remaining() <= 5 - late
        await lease.release()


async def _is_renewed(lease: BaseLease) -> None:
    first = lease._grant.deadline
    await wait_until(lambda: lease._grant.deadline > first, SOON, timeout=lease._grant.period)


@modes
@pytest.mark.parametrize("ttl", [4])
async def test_a_reply_later_than_the_ttl_is_no_grant(server: EmbeddedServer, mode: str, ttl: float) -> None:
    """P1, D12: somebody else had the lock meanwhile; we queue behind, and what we get then is a real lease."""
    async with wired(server, mode, response_timeout=20, client={"socket_timeout": 20}, retry_for=30) as w:
        rule = w.proxy.on(ACQUIRE, Action.HOLD_REPLY)
        acquiring = asyncio.create_task(w.lock(ttl=ttl).acquire())
        await rule.fired.wait()
        token = await w.direct.get(w.name)
        other = await w.elsewhere().acquire(timeout=20)  # when the ttl has passed
        rule.release.set()
        await w.queued()
        assert not acquiring.done()
        await other.release()
        lease = await acquiring
        assert lease.token.encode() != token
        assert lease.fence > other.fence
        await w.check_held(lease)
        await _is_renewed(lease)
        await lease.release()
        await w.check_free(lease.fence)


async def test_a_push_later_than_the_ttl_is_no_grant(server: EmbeddedServer) -> None:
    """P1, D12: as above, for a grant that was handed over."""
    async with wired(server, response_timeout=20, poll_cap=60) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock(ttl=4).acquire())
        await w.queued()
        for _ in range(2):  # the second one longer than `retry_for` after the first
            rule = w.proxy.on_push(anything, Action.HOLD)
            await holder.release()
            await rule.fired.wait()
            holder = await w.elsewhere().acquire(timeout=20)
            rule.release.set()
            await w.queued()
            assert not waiting.done()
        await holder.release()
        lease = await waiting
        assert lease.fence > holder.fence
        await w.check_held(lease)
        await _is_renewed(lease)
        await lease.release()
        await w.check_free(lease.fence)


async def test_p1_a_claim_that_is_almost_over_is_no_grant(server: EmbeddedServer) -> None:
    """It would end before its first renewal is answered, and with it the body. The request is sent again."""
    patient: dict[str, Any] = {"response_timeout": 30, "client": {"socket_timeout": 30}, "retry_for": 30}
    async with wired(server, claim=10, poll_cap=1000, **patient) as w:
        holder = await w.elsewhere(ttl=20).acquire()
        waiting = asyncio.create_task(w.lock(ttl=20).acquire())
        await w.queued()
        late = w.proxy.on_push(anything, Action.delay(9.9))  # of 10, of which the fiftieth part is 0.2
        await holder.release()
        lease = await waiting
        assert late.acted
        assert lease.remaining() > 15
        await lease.release()
        await w.check_free(lease.fence)


@modes
async def test_latency_and_fragments(server: EmbeddedServer, mode: str) -> None:
    """P1, C9: 50 ms each way, in pieces of 1 to 3 bytes: no overlap, fences rise, deadlines are honest."""
    inside, fences = 0, list[int]()

    async def section(w: Wired, lag: float) -> None:
        nonlocal inside
        async with w.lock(ttl=2).acquire() as lease:
            assert lease.remaining() <= 2 - lag
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.01)  # the section's own work
            await w.check_held(lease)
            fences.append(lease.fence)
            inside -= 1

    quick: dict[str, Any] = {"client": {"socket_timeout": 2, "socket_connect_timeout": 2}, "response_timeout": 2}
    async with (
        wired(server, mode, **quick) as far,
        wired(server, mode, **quick) as farther,
        wired(server, mode, **quick) as near,
    ):
        far.proxy.latency, far.proxy.fragment = 0.05, 1
        farther.proxy.latency, farther.proxy.fragment = 0.05, 2
        near.proxy.fragment = 3
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(section(far, 0.05))  # at least the way of the push
                tasks.create_task(section(farther, 0.05))
                tasks.create_task(section(near, 0))
        assert fences == sorted(set(fences))
        assert len(fences) == 6
        await near.check_free(fences[-1])


@modes
@pytest.mark.parametrize("kind", [*KINDS, *WATCHED], ids=str)
async def test_p3_the_end_of_a_lease_that_is_not_renewed_any_more(
    server: EmbeddedServer, mode: str, kind: Primitive
) -> None:
    """A1: its holder has died. The next one has it within 0.2 s of its end, and not before."""
    async with wired(server, mode, kind=kind, poll_cap=60) as w:
        dead = await w.elsewhere(ttl=3, auto_renew=False).acquire()
        ends = now() + dead.remaining()
        lease = await w.lock().acquire()
        assert ends - 0.1 < now() < ends + 0.2
        assert lease.fence > dead.fence
        await lease.release()
        await w.check_free(lease.fence)


@modes
async def test_p3_the_end_of_a_lease_that_was_handed_over_before(server: EmbeddedServer, mode: str) -> None:
    """A1: the one behind it learns that it is next, and looks when that lease ends, not when it polls."""
    async with wired(server, mode, poll_cap=60) as w:
        holder = await w.elsewhere().acquire()
        dying = asyncio.create_task(w.elsewhere(ttl=9, auto_renew=False).acquire())  # longer than a claim
        await w.queued()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued(2)
        await holder.release()
        dead = await dying
        ends = now() + 9
        lease = await waiting
        assert ends - 0.3 < now() < ends + 0.3
        assert lease.fence > dead.fence
        await lease.release()
        await w.check_free(lease.fence)


# -- partitions --------------------------------------------------------------------------------------------


@modes
@partitions
async def test_partition_while_holding(server: EmbeddedServer, mode: str, kind: Partition) -> None:
    """P6, C4, C6: `lost` at the deadline, not before, not after; the body is cancelled then; nothing comes back."""

    async with wired(server, mode) as w:
        cancelled, told = list[float](), list[float]()

        async def watch(lease: BaseLease) -> None:
            await lease.wait_lost()
            told.append(now())

        async def body(lease: BaseLease) -> None:
            watching.append(asyncio.create_task(watch(lease)))
            await part(w, kind)
            try:
                await for_ever()
            finally:
                cancelled.append(now())

        watching = list[asyncio.Task[None]]()
        lease, loss = await lost_in(w.lock(ttl=4).acquire(), body)
        await watching[0]
        assert loss.reason == "unreachable"
        for at in (cancelled[0], told[0]):
            assert abs(at - lease._grant.deadline) <= 0.05
        other = await w.elsewhere().acquire(timeout=1)

        heal(w)
        assert await w.lock().try_acquire() is None  # the wire works again
        assert lease.lost
        assert lease.remaining() == 0
        with pytest.raises(LeaseLost):
            await lease.release()
        await w.check_held(other)
        await other.release()
        await w.check_free(other.fence)


@modes
@partitions
async def test_short_partition_loses_nothing(server: EmbeddedServer, mode: str, kind: Partition) -> None:
    """P6: unknown is not lost; healed before the deadline, the lease goes on."""
    async with wired(server, mode) as w:
        lease = await w.lock(ttl=1.5).acquire()
        renewal = w.proxy.on(RENEW, Action.HOLD)  # the 1st renewal meets the partition
        await renewal.fired.wait()
        await part(w, kind)
        first = lease._grant.deadline
        heal(w)
        renewal.release.set()
        await wait_until(lambda: lease._grant.deadline > first, SOON, timeout=1.5)
        await w.check_held(lease)
        await lease.release()
        await w.check_free(lease.fence)


@modes
@pytest.mark.parametrize("what", ["a grant", "a place in the queue"])
async def test_an_undoing_is_tried_for_a_minute(server: EmbeddedServer, mode: str, what: str) -> None:
    """P5: the way back of a cancelled request may be cut for longer than anybody who asks has patience.

    What it left is undone as soon as the server is back, and not when it ends by itself.
    """
    async with wired(server, mode, retry_for=0.3) as w:
        holder = await w.elsewhere(ttl=60).acquire() if what == "a place in the queue" else None
        bystander = await w.sync.lock("bystander", ttl=60).acquire()  # connected, and needed
        answer = w.proxy.on(ACQUIRE, Action.HOLD_REPLY)
        acquiring = asyncio.create_task(w.lock(ttl=60).acquire())
        await answer.fired.wait()  # the server has done what it was asked
        w.proxy.refuse = True
        await w.proxy.cut()
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        await asyncio.sleep(1.5)  # longer than `retry_for`, and than anything that is tried again at its end
        w.proxy.refuse = False

        async def undone() -> bool:
            found = await w.elsewhere().statistics()
            return await w.kind.token(w.direct, w.name) == (holder and holder._grant.wire_token) and not found.waiting

        await wait_until(undone, SOON, timeout=10)
        await bystander.release()
        if holder is not None:
            await holder.release()


@modes
async def test_every_renewal_is_due_after_a_third_of_the_time(server: EmbeddedServer, mode: str) -> None:
    """P6: not only the first one, so that two more may fail before the lease ends; also after an extension."""
    async with wired(server, mode) as w:
        lease = await w.lock(ttl=2.4).acquire()
        times = [now()]
        for extends in (False, False, True, False):
            if extends:
                await lease.extend(2.4)
            else:
                await _is_renewed(lease)
            times.append(now())
        await lease.release()
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 0.9


async def test_black_holed_idle_link_is_noticed(server: EmbeddedServer) -> None:
    """C4: a waiter's silent connection is found dead within twice `response_timeout` and a tick."""
    async with wired(server) as w:
        holder = await w.elsewhere().acquire()
        waiting = asyncio.create_task(w.lock().acquire())
        await w.queued()
        await part(w, "black hole")
        start = now()
        await wait_until(lambda: w.sync.connection_error is not None, SOON, timeout=15)
        assert now() - start <= 2 * RESPONSE_TIMEOUT + 0.3
        heal(w)
        await holder.release()
        lease = await asyncio.wait_for(waiting, 2)
        await lease.release()
        await w.check_free(lease.fence)


# -- giving up in a black hole -----------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("state", ["acquiring", "waiting", "releasing"])
async def test_cancel_while_black_holed(server: EmbeddedServer, mode: str, state: str) -> None:
    """P5, B5: CancelledError comes out immediately and nothing is left when the wire is back."""
    async with wired(server, mode) as w:
        last, holder = 0, None
        if state == "releasing":
            lease = await w.lock().acquire()
            last = lease.fence
            rule = w.proxy.on(RELEASE, Action.SWALLOW_REQUEST)
            task: asyncio.Task[Any] = asyncio.create_task(lease.release())
            await rule.fired.wait()
        elif state == "waiting":
            holder = await w.elsewhere().acquire()
            task = asyncio.create_task(w.lock().acquire())
            await w.queued()
            await part(w, "black hole")
        else:
            rule = w.proxy.on(ACQUIRE, Action.SWALLOW_REQUEST)
            task = asyncio.create_task(w.lock().acquire())
            await rule.fired.wait()

        start = now()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert now() - start < 0.05

        heal(w)
        if holder is not None:
            last = holder.fence
            await holder.release()

        async def free() -> bool:
            found = await w.elsewhere().statistics()
            return found.waiting == 0 and not await w.elsewhere().locked()

        await wait_until(free, SOON, timeout=15)
        await w.check_free(last)


@modes
async def test_scope_while_black_holed(server: EmbeddedServer, mode: str) -> None:
    """P5, B3: a cancelled anyio scope does not keep the loop busy while the wire is dead."""
    async with wired(server, mode) as w:
        await (await w.lock().acquire()).release()
        await part(w, "black hole")
        start = now()
        with anyio.move_on_after(0.1) as scope:
            async with w.lock().acquire():
                pytest.fail("acquired without a server")
        assert scope.cancelled_caught
        assert now() - start < 0.15
        heal(w)
        lease = await w.lock().acquire()
        await lease.release()
        await w.check_free(lease.fence)


@modes
async def test_response_timeout_holds_without_a_socket_timeout(server: EmbeddedServer, mode: str) -> None:
    """C3: it is our own clock that finds an answer missing, also where the client has none."""
    async with wired(server, mode, client={"socket_timeout": None}) as w:

        async def acquired() -> None:
            w.proxy.on(ACQUIRE, Action.SWALLOW_REPLY)
            lease = await w.lock().acquire()
            await lease.release()
            await w.check_free(lease.fence)

        seconds, _ = await timed(acquired)
        assert seconds < RESPONSE_TIMEOUT + 1


@modes
async def test_a_timeout_does_not_blame_others_unheard(server: EmbeddedServer, mode: str) -> None:
    """Too early to call the server unreachable; but nobody said that the lock is taken."""
    async with wired(server, mode) as w:
        rule = w.proxy.on(ACQUIRE, Action.HOLD_REPLY)
        with pytest.raises(AcquireTimeout, match="has not answered"):
            await w.lock().acquire(timeout=0.05)
        rule.release.set()
        async with w.elsewhere(), asyncio.timeout(5):
            with pytest.raises(AcquireTimeout, match=r"others hold it|held by"):
                await asyncio.create_task(w.lock().acquire(timeout=0.2))
        lease = await w.lock().acquire()
        with pytest.raises(AcquireTimeout, match="waits for itself: use AsyncReentrantLock"):
            await w.lock().acquire(timeout=0.2)
        await lease.release()


@pytest.mark.parametrize(
    ("mode", "share", "foreign"),
    [("plain", False, False), ("plain", True, False), ("link", False, True)],
    ids=["never pushed", "shared", "behind a holder of another library"],
)
async def test_the_last_look_of_a_waiter_that_polls_has_its_time(
    server: EmbeddedServer, mode: str, share: bool, foreign: bool
) -> None:
    """P12: a silent server costs a quarter of a second for the look and one for the holder, no `response_timeout`."""
    async with wired(server, mode, response_timeout=20, client={"socket_timeout": 20}, retry_for=60) as w:
        await (w.direct.set(w.name, "of another", px=60_000) if foreign else w.elsewhere(ttl=60).acquire())

        async def gives_up() -> None:
            with pytest.raises(AcquireTimeout):
                await w.lock(share=share).acquire(timeout=3)

        waiting = asyncio.create_task(timed(gives_up))
        await w.queued()
        await asyncio.sleep(2)
        w.proxy.black_hole = True
        seconds, _ = await waiting
        assert 3 <= seconds < 3.6
        w.proxy.black_hole = False


@modes
async def test_no_time_to_wait(server: EmbeddedServer, mode: str) -> None:
    """P12: ``timeout=0`` does not wait for others, but does wait for the answer."""
    async with wired(server, mode) as w:
        w.proxy.on(ACQUIRE, Action.delay_reply(0.05), times=2)
        lease = await w.lock().acquire(timeout=0)
        await w.check_held(lease)
        with pytest.raises(AcquireTimeout):
            await w.lock().acquire(timeout=0)
        await lease.release()
        await w.check_free(lease.fence)


@pytest.mark.parametrize("mode", MODES)
@partitions
async def test_time_out_while_parted(server: EmbeddedServer, mode: str, kind: Partition) -> None:
    """C4: within `timeout`, and not long before it, acquire says that Redis is out of reach."""
    async with wired(server, mode) as w:
        await (await w.lock().acquire()).release()
        await part(w, kind)

        async def refused() -> None:
            with pytest.raises(Unreachable):
                await w.lock().acquire(timeout=0.3)

        seconds, _ = await timed(refused)
        assert 0.25 < seconds < 0.4
        heal(w)
        lease = await w.lock().acquire()
        await lease.release()
        await w.check_free(lease.fence)


@modes
@partitions
async def test_retries_end(server: EmbeddedServer, mode: str, kind: Partition) -> None:
    """C4, P12: without a `timeout`, Unreachable after `retry_for`; also a release says so, and may be repeated."""
    async with wired(server, mode, retry_for=0.3) as w:
        lease = await w.lock().acquire()
        await part(w, kind)
        for _ in range(2):
            start = now()
            async with asyncio.timeout(3):
                ends = await asyncio.gather(w.lock().try_acquire(), lease.release(), return_exceptions=True)
            assert [type(end) for end in ends] == [Unreachable, Unreachable]
            assert 0.25 < now() - start < 0.3 + RESPONSE_TIMEOUT + 0.2
        heal(w)

        async def released() -> bool:
            with suppress(Unreachable):
                await lease.release()
                return True
            return False

        await wait_until(released, SOON, timeout=15)
        await w.check_free(lease.fence)


async def test_the_error_of_a_task_that_waited_in_the_process(server: EmbeddedServer) -> None:
    """P1, C6: others had it all the time. That the process's latest request has no answer yet is not the reason."""
    async with wired(server, response_timeout=5, client={"socket_timeout": 5}) as w:
        lease = await w.lock(share=True).acquire()
        waiting = asyncio.create_task(w.lock(share=True).acquire(timeout=60))
        elsewhere = asyncio.create_task(w.elsewhere().acquire())
        base = process_grant_of(lease)
        await wait_until(lambda: base.contended, SOON, timeout=15)
        base.budget = 0  # the process has had its turn
        asked = w.proxy.on(ACQUIRE, Action.HOLD)
        await lease.release()
        await asked.fired.wait()
        cohort = cohort_of(hub_of(w.sync).resource(w.lock()._keys), w.lock(share=True)._default)
        ((answer, *_),) = cohort.line
        cohort._time_out(answer, 60)  # that time has passed
        with pytest.raises(AcquireTimeout):
            await waiting
        asked.release.set()
        await (await elsewhere).release()


async def test_calls_of_a_coordinator_that_was_closed_meanwhile(server: EmbeddedServer) -> None:
    """D12: one hangs, another is behind it: both fail by the end of the coordinator, and later nothing else does."""
    async with wired(server, "plain", exit_timeout=0.1) as w:
        hanging = w.proxy.on(ACQUIRE, Action.HOLD_REPLY, times=None)
        first = asyncio.create_task(w.lock().try_acquire())
        await hanging.fired.wait()
        second = asyncio.create_task(w.lock().try_acquire())
        await asyncio.sleep(0.01)
        await w.sync.aclose()
        await asyncio.wait([first, second])
        assert [type(task.exception()) for task in (first, second)] == [CoordinatorClosed] * 2
        await asyncio.sleep(2 * RETRY_FOR)  # see quiet_loop
        hanging.release.set()


# -- P4, P8, FAULTS C4, D9: a call whose time is up says what is known of it, and in time.


READONLY = Action.answer_error("READONLY You can't write against a read only replica.")
PATIENT: dict[str, Any] = {
    "client": {"socket_timeout": None, "socket_connect_timeout": None},
    "retry_for": 0.4,
    "response_timeout": 5,
}
"""An answer may take longer than all attempts together."""
LONGER = {**PATIENT, "retry_for": 1.5}
"""There is a second attempt, even if the machine stands still for a moment."""


def refused_then_silent(w: Wired, match: Match) -> None:
    """Refuse the first attempt; execute the second, and tell nobody."""
    w.proxy.on(match, READONLY)
    w.proxy.on(match, Action.SWALLOW_REPLY)


@modes
@partitions
async def test_the_whole_time_counts(server: EmbeddedServer, mode: str, kind: Partition) -> None:
    """C4: retry_for bounds the waiting, however long an answer may take."""
    async with wired(server, mode, **PATIENT) as w:
        await (await w.lock().acquire()).release()
        await part(w, kind)

        async def refused() -> None:
            with pytest.raises(Unreachable):
                await w.lock().acquire()

        seconds, _ = await timed(refused)
        assert seconds < 0.8
        heal(w)
        await w.proxy.cut()


@modes
async def test_refused_all_the_time(server: EmbeddedServer, mode: str) -> None:
    """D9: nothing was changed, and that is what is said, unless the time ends in the middle of an attempt."""
    async with wired(server, mode, **PATIENT) as w:
        rule = w.proxy.on(ACQUIRE, READONLY, times=None)
        found = set[type[Exception]]()
        for _ in range(3):
            with pytest.raises((CommandRefused, Unreachable), match="READONLY") as raised:
                await w.lock().acquire()
            found.add(raised.type)
        assert CommandRefused in found
        assert rule.acted > 3
        await w.check_free(0)


@modes
async def test_refused_and_then_silent(server: EmbeddedServer, mode: str) -> None:
    """D9: the last attempt may have been executed, so nobody says that nothing was changed."""
    async with wired(server, mode, **LONGER) as w:
        refused_then_silent(w, ACQUIRE)
        with pytest.raises(Unreachable, match="before that it answered READONLY"):
            await w.lock().acquire()
        await w.proxy.cut()
        async with w.elsewhere().acquire(timeout=5) as lease:  # it was withdrawn
            pass
        await w.check_free(lease.fence)


@modes
async def test_a_release_refused_and_then_silent(server: EmbeddedServer, mode: str) -> None:
    """P4: it was executed; the second one finds the key gone, and knows why."""
    async with wired(server, mode, **LONGER) as w:
        lease = await w.lock(ttl=30).acquire()
        refused_then_silent(w, RELEASE)
        with pytest.raises(Unreachable, match="before that it answered READONLY"):
            await lease.release()
        await w.proxy.cut()
        await lease.release()
        await w.check_free(lease.fence)


async def test_p6_a_release_that_was_repeated_after_the_deadline(server: EmbeddedServer) -> None:
    """Nobody knows whether its first copy ended the lease."""
    async with wired(server, **PATIENT) as w:
        lease = await w.lock(ttl=4, auto_renew=False).acquire()
        w.proxy.on(RELEASE, Action.CUT_BEFORE)
        refused = w.proxy.on(RELEASE, Action.answer_error("LOADING Valkey is loading the dataset in memory"))
        releasing = asyncio.create_task(lease.release())
        await refused.fired.wait()
        await asyncio.sleep(0.001)
        stall(5)
        with pytest.raises(LeaseLost):
            await releasing


@modes
async def test_silent_and_then_refused(server: EmbeddedServer, mode: str) -> None:
    """P4, D9: who is refused in the end hears that an earlier copy may have done it; a second release knows why."""
    async with wired(server, mode, **{**PATIENT, "retry_for": 5}) as w:
        lease = await w.lock(ttl=30).acquire()
        w.proxy.on(RELEASE, Action.CUT_AFTER)
        w.proxy.on(RELEASE, Action.answer_error("OOM command not allowed when used memory > 'maxmemory'."))
        with pytest.raises(CommandRefused, match="an earlier copy, whose reply was lost, may have"):
            await lease.release()
        await lease.release()
        await w.check_free(lease.fence)
