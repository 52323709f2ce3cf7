"""Errors of acquiring, holding and releasing; of robust locks, jobs, and processes that wait for each other."""

from __future__ import annotations

from asyncio import BrokenBarrierError as AsyncioError
from collections.abc import Sequence
from typing import Literal

from ._base import SyncError, no_answer, time_allowed


class AcquireTimeout(SyncError, TimeoutError):
    """The lock was not granted within ``timeout``: others held it, or Redis had not answered yet.

    **State:** you hold nothing. The request is withdrawn, or its withdrawal is on its way.

    Causes, the likeliest first:

    - Others hold it or are ahead of you in the queue.
    - "Redis has not answered yet" (``answered`` is False): allow at least a second.
    - "This process holds it": another task of your program, or the very task that asks.
    - "Its key has the value … and no ttl": another program wrote it. If it is data, give the lock another name. If it
      is a lock that another program forgot, release it: ``redis-sync-aio release NAME --token VALUE``.
    - A semaphore has fewer free permits than you asked for. A crashed process keeps its permits for its ttl.

    **Do:** look at ``redis-sync-aio show NAME``. Hold the lock more briefly, split the name, or turn work away
    (`try_acquire()`, ``max_waiting``). It is also a `TimeoutError`.

    Attributes:
        name: The name of the lock.
        remaining: Seconds until the lease of the present holder ends if it is not renewed, as far as is known here.
            None: not known, or forever. A hint for ``Retry-After``.
        answered: True if Redis had answered. False: it is not known whether the lock was free.
        held_by: The holders, with their labels: ``web-3:812 'nightly import'``. The server is asked at the end of a
            ``timeout``. Empty: not known, or this process.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str,
        remaining: float | None = None,
        answered: bool = True,
        held_by: str = "",
    ) -> None:
        super().__init__(message)
        self.held_by = held_by
        self.name = name
        self.remaining = remaining
        self.answered = answered

    @staticmethod
    def taken(name: str, *, remaining: float | None, weight: int = 0, data: str | None = None) -> AcquireTimeout:
        """Return the error for ``timeout=0`` and something that is not free.

        ``weight`` is that of the permits that were asked for, ``data`` what to say of the key of a
        lock, if that is no lock.
        """
        failed = f"{name!r} did not have {weight} of its permits free" if weight else f"{name!r} is taken"
        advice = ", and timeout=0 means do not wait: pass a timeout, or try again later"
        why = advice if data is None else f": {data}"
        return AcquireTimeout(failed + why, name=name, remaining=remaining)


class QueueFull(AcquireTimeout):
    """The request was not queued, since ``max_waiting`` others waited already. It left nothing behind.

    **State:** you hold nothing, and were not queued.

    **Do:** try again later, or turn the work away: a longer ``timeout`` does not help. The web integrations answer
    [503](https://redis-sync-aio.github.io/redis-sync-aio/recipes/fastapi/#what-the-client-sees). For 429, register
    ``@app.exception_handler(QueueFull)`` after ``answer_errors``.

    Attributes:
        name: The name of the lock.
        waiting: How many requests were in the queue.
        max_waiting: How many requests may wait, as the caller gave it.
        remaining: Seconds until the lease of the present holder ends, as for `AcquireTimeout`.
    """

    def __init__(self, *, name: str, waiting: int, max_waiting: int, remaining: float | None) -> None:
        requests = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        super().__init__(
            f"{name!r} is not free, and {requests} for it: with max_waiting={max_waiting} this one was not queued. "
            "Try again later, or turn the work away",
            name=name,
            remaining=remaining,
        )
        self.waiting = waiting
        self.max_waiting = max_waiting


class NotReplicated(SyncError):
    """The lock was granted, and fewer replicas than ``replicas`` had the grant in time. It was given back.

    A replica is down, stopped, behind or not connected; the server has fewer replicas than were asked for; or it was
    replaced after the grant, by a failover. The message says what is known.

    **State:** you hold nothing. The release is on its way, behind all that was sent before.

    **Do:** look at ``INFO replication`` of the server. Acquire again later, ask for fewer replicas, or allow more time
    (``replicated_within``). In a web service answer 503.

    Attributes:
        name: The name of the lock.
        replicas: How many replicas were asked for.
        found: How many had the grant, as far as is known.
    """

    def __init__(self, *, name: str, replicas: int, found: int, within: float, why: str = "") -> None:
        """Word the message; ``why`` is the reason of the last failure, if there was one."""
        super().__init__(
            f"{name!r} was granted, and {found} of the {replicas} replicas that were asked for had the grant"
            f"{time_allowed(within)}{f' ({why})' if why else ''}: it was given back. Look at INFO replication of the "
            "server; acquire it again, ask for fewer replicas, or allow more time (replicated_within)"
        )
        self.name = name
        self.replicas = replicas
        self.found = found


class LimitMismatch(SyncError, ValueError):
    """The limit on the server is not that of the caller, or is too small for the weight. Nothing was changed.

    It is also raised for the parties of a barrier and the count of a latch. A deployment changes the limit, two
    semaphores have one name, or `resize` was called.

    **State:** you hold nothing, and nothing was changed.

    **Do:** choose ``on_mismatch`` of the [`AsyncSemaphore`][redis_sync_aio.AsyncSemaphore], or ``limit=None``. After a
    `resize`, only ``await AsyncSemaphore(redis, NAME, None).resize(N)`` with the N of your code ends the errors.
    ``redis-sync-aio show NAME`` prints the limit; a limit of 0 is a
    [pause](https://redis-sync-aio.github.io/redis-sync-aio/guides/semaphores/#changing-the-limit).

    Attributes:
        name: The name of the semaphore, the barrier or the latch.
        expected: The limit of the caller, at the time of the request. None: that of the server.
        found: The limit on the server, 0 while it is paused. None: the server knows none yet.
    """

    def __init__(
        self,
        *,
        name: str,
        expected: int | None,
        found: int | None,
        weight: int = 0,
        resized: bool = False,
        why: str = "",
    ) -> None:
        """Word the message.

        Args:
            name: The semaphore's.
            expected: The attribute.
            found: The attribute.
            weight: What was asked for, if it is too heavy for the server's limit.
            resized: The server's limit was set by `resize`.
            why: The message of a latch or a barrier.
        """
        now = "0 (paused)" if found == 0 else found
        if why:
            said = why
        elif found is None:
            said = "the server knows no limit of it yet, and limit=None takes the server's: create it with a limit"
        elif weight:
            said = f"a weight of {weight} never fits into its limit of {found}: ask for less, or resize() it"
        elif found == expected:
            said = f"its limit became {now} while this was asked for: ask again"
        elif resized:
            said = f"its limit is {now}, not {expected}: resize() set it, and only resize() changes it: call it, or "
            said += "use limit=None"
        else:
            said = f"its limit is {now}, not {expected}: use the same limit everywhere, limit=None, on_mismatch, or "
            said += "resize(); once no permit is held or awaited, another limit is accepted"
        super().__init__(f"{name!r}: {said}")
        self.name = name
        self.expected = expected
        self.found = found


class WouldDeadlock(SyncError, RuntimeError):
    """Waiting would never end: two requests wait for each other, or a task waits for itself. Nothing was changed.

    A function that holds the lock calls another one that acquires it, perhaps through another object, client or
    ``engine``; or a reader asks for the write side, or the reverse.

    **State:** nothing was changed. You still hold what you held.

    **Do:** pass the lease to the inner code, use an [`AsyncReentrantLock`][redis_sync_aio.AsyncReentrantLock] in both
    places, or release the reader before you acquire the write side. It is also a `RuntimeError`.
    """

    @staticmethod
    def own_body(name: str, *, fence: int, use: str) -> WouldDeadlock:
        """Return the error for a task that would wait for its own body; ``use`` says what to do instead."""
        return WouldDeadlock(
            f"a body of this task holds {name!r} (fence {fence}), so the task would wait for itself: {use}"
        )


class NotHeld(SyncError):
    """A lease was released or checked that this task, or this identity, does not hold. Nothing was changed.

    It was released before, by hand and then by ``async with``; another task acquired it; the body has ended; the text
    was attached before, or its lease has ended; or ``async with`` did not begin, as after ``push_async_exit(lock)``.

    **State:** nothing was changed. If another task or process holds the lock, it still does.

    **Do:** prefer ``async with``, or call ``lease.release()``, twice and in any task if need be. After a failed
    `attach`, do not do the work.
    """

    @staticmethod
    def released(name: str, *, before: str = "") -> NotHeld:
        """Return the error for the use of a lease that was released; ``before`` says before what."""
        return NotHeld(
            f"the lease on {name!r} was released{f' before {before}' if before else ''}; acquire the lock again"
        )


class StaleFence(SyncError):
    """A resource refused a fence that is older than one it has seen: that lease has ended. Nothing was changed.

    Your process was stopped, and another holder came in the meantime.

    **State:** nothing was changed. Your lease has ended.

    **Do:** do not write; acquire the lock again. A gate does not fit a semaphore of several permits.

    Attributes:
        name: The name of the gate.
        fence: The fence that was refused.
        highest: The highest fence that the gate has accepted.
    """

    def __init__(self, *, name: str, fence: int, highest: int) -> None:
        super().__init__(
            f"the fence {fence} is too old for {name!r}, which has accepted {highest}: another holder came after that "
            "lease. Do not write; acquire the lock again"
        )
        self.name = name
        self.fence = fence
        self.highest = highest


# -- The reason of a loss in words, and what to do about it ----------------------------------------------------


LossReason = Literal["expired", "taken", "unreachable", "late", "closed", "released"]
"""The reason for which a lease was lost, as `LeaseLost` explains it."""

_EXPLAINED: dict[LossReason, str] = {
    "expired": "it is gone from the server before its time was up: it was released elsewhere (by its identity or by "
    "force), its key was deleted, or the server lost it (a restart, a failover, an eviction, FLUSHALL). Others may "
    "have held it since. Do not write any more; acquire it again",
    "taken": "another token holds the lock now: this lease was released elsewhere, had run out, or its key was "
    "deleted, overwritten or lost by the server. Do not write any more; acquire it again",
    "unreachable": "Redis could not be reached before the deadline to renew it. Do not write any more; check the "
    "server and the network, or give it a longer ttl",
    "late": "its deadline passed before this process had renewed it, although the server was answering: this "
    "event loop has more work than it can keep up with. Do not write any more; hold fewer leases in one process, or "
    "give them a longer ttl",
    "closed": "the coordinator or its client was closed while it was held. Do not write any more; close it after "
    "the bodies have ended",
    "released": "another task released it while this body ran. Do not write any more; release it in the task whose "
    "body runs, or end the body",
}
_TIME_IS_UP = (
    "its time was up: it was not to be renewed (auto_renew=False), max_hold was reached, or Redis refused to renew it "
    "(then the log says why: renewal_refused). Do not write any more; acquire it again, or give it more time"
)
_STALLED = (
    "its deadline passed while this process was suspended, or its event loop blocked, for at least {:.1f} seconds. Do "
    "not write any more; move blocking work to a thread, hold fewer leases in one process, or give it a longer ttl"
)


_CLAIM = (
    "{}. It was handed over by its last holder and had a claim of {:g} seconds until its first renewal, not its whole "
    "ttl: a longer ttl does not help. Do not write any more; {}, or raise Coordinator(claim=)"
)


def _explained(reason: LossReason, *, stalled: float = 0.0, time_is_up: bool = False, claim: float = 0.0) -> str:
    """Return why a lease was lost and what to do about it; the arguments are those of `LeaseLost`."""
    if claim and reason in ("late", "expired", "unreachable"):
        what, remedy = "Redis could not be reached before the deadline to renew it", "check the server and the network"
        if reason != "unreachable":
            remedy = "move blocking work to a thread"
            blocked = f"this process was suspended, or its event loop blocked, for at least {stalled:.1f} seconds, and"
            what = f"its deadline passed: {blocked if stalled else 'this process'} had not renewed it"
            if reason == "expired":
                what += ", or Redis refused to renew it (then the log says why: renewal_refused)"
        return _CLAIM.format(what, claim, remedy)
    if reason == "expired" and time_is_up:
        return _TIME_IS_UP
    if reason == "late" and stalled:
        return _STALLED.format(stalled)
    return _EXPLAINED[reason]


class LeaseLost(SyncError):
    """The lease ended while it was still in use. The lock no longer protects what the body did.

    **State:** you hold nothing, and another client may hold the lock. The body was cancelled, unless you said
    ``on_lost="event"``. Its writes from before the loss stay. Writes in
    [`Lease.transaction`][redis_sync_aio.Lease.transaction] are not made after it.

    **Do:** do not write any more. Find out what is half done, and acquire the lock again.
    [Why was my lease lost?](https://redis-sync-aio.github.io/redis-sync-aio/operations/when-it-goes-wrong/#why-was-my-lease-lost)
    has the causes of each ``reason``:

    - ``"expired"``: Its time was up, or it is gone from the server. The message says which.
    - ``"taken"``: Another client holds the lock now.
    - ``"unreachable"``: The deadline passed while Redis was unreachable.
    - ``"late"``: The deadline passed because this process did not renew in time: it was suspended, blocked or too busy.
      Another client may hold the lock.
    - ``"closed"``: This process closed the coordinator or its client.
    - ``"released"``: Another task of this process released the lease while the body ran.

    Attributes:
        name: The name of the lock.
        reason: How the lease ended: one of the words above.
        fence: The fence of the lease. None: not known.
        held_for: Seconds from the acquisition until the loss was noticed. None: not known.
        stalled: Seconds, at least, for which this process or its event loop was stopped since the latest renewal.
        time_is_up: True if the time of the lease had ended by the clock of this process.
        claim: Seconds for which the lease had been handed over, if it was not renewed since. 0: it had its whole ttl.
        given_back: The names of the other locks of a multi-lock, which were given back with it.
        servers: Of a Redlock: on how many servers it was held, of how many, and how many are needed. Else None.
    """

    def __init__(
        self,
        *,
        name: str,
        reason: LossReason,
        fence: int | None = None,
        held_for: float | None = None,
        stalled: float = 0.0,
        time_is_up: bool = False,
        claim: float = 0.0,
        given_back: tuple[str, ...] = (),
        servers: tuple[int, int, int] | None = None,
    ) -> None:
        which = "" if fence is None else f" (fence {fence})"
        lasted = "" if held_for is None else f" after {held_for:.1f} seconds"
        why = _explained(reason, stalled=stalled, time_is_up=time_is_up, claim=claim)
        if servers is not None:
            held, of, needed = servers
            why = f"{held} of {of} servers hold it, {needed} have to; the last loss: {why}"
        if given_back:
            why += f". {', '.join(map(repr, given_back))} {'is' if len(given_back) == 1 else 'are'} given back with it"
        super().__init__(f"the lease on {name!r}{which} was lost{lasted}: {why}")
        self.name = name
        self.reason: LossReason = reason
        self.fence = fence
        self.held_for = held_for
        self.stalled = stalled
        self.time_is_up = time_is_up
        self.claim = claim
        self.given_back = given_back
        self.servers = servers


# -- Errors of work that is done once --------------------------------------------------------------------------


class FingerprintMismatch(SyncError, ValueError):
    """Two different requests used the same name of `idempotent`. The second one did not run.

    A client reuses its idempotency key, or ``fingerprint`` contains what changes, such as the time.

    **State:** the second request did not run. The result of the first one is kept.

    **Do:** answer 422: the client has to choose a new key. See [`idempotent`][redis_sync_aio.idempotent].

    Attributes:
        name: The name of the run, with the arguments of the call in it.
    """

    def __init__(self, *, name: str) -> None:
        super().__init__(
            f"{name!r} was used for another request, with another fingerprint: give each request its own name"
        )
        self.name = name


class ResultNotKept(SyncError):
    """An earlier run for this name returned, and its result could not be kept for later calls. It did not run again.

    **State:** the earlier run had its effects, and its caller got its result. It does not run again.

    **Do:** return what the codec can represent, or pass another ``codec``. Read the result where it had its effect.

    Attributes:
        name: The name of the run, with the arguments of the call in it.
        mark: The key of the mark on the server.
        cause: What failed.
    """

    def __init__(self, *, name: str, mark: str, cause: str) -> None:
        super().__init__(
            f"a run for {name!r} returned, but its result was not kept: {cause}; it does not run again. Fix the cause, "
            f"and find out what the run did. To let it run again, delete {mark!r}"
        )
        self.name = name
        self.mark = mark
        self.cause = cause


class RunInterrupted(SyncError):
    """An earlier run for this name began and did not end, and ``on_crash="raise"`` forbids a second run.

    It was killed, cancelled or lost its lease.

    **State:** nothing ran now. How far the earlier run came is unknown.

    **Do:** find out what it did, then delete the mark to let it run again. If a second run does no harm, say
    ``on_crash="again"``.

    Attributes:
        name: The name of the run, with the arguments of the call in it.
        mark: The key of the mark on the server.
    """

    def __init__(self, *, name: str, mark: str) -> None:
        super().__init__(
            f"an earlier run for {name!r} started but never finished; it may have had side effects: find out what it "
            f"did. To let it run again, delete {mark!r}"
        )
        self.name = name
        self.mark = mark


# -- Errors of robust locks and their undo steps ---------------------------------------------------------------


class UnknownStep(SyncError, LookupError):
    """Undo steps are recorded under names that the registry does not have. No step was run.

    A deployment renamed or removed a step. It is also a `LookupError`.

    **State:** no step was run. All are still recorded.

    **Do:** register a function for each name, and keep old names as long as they may be recorded.

    Attributes:
        steps: The names of the recorded undo steps that the registry has no function for.
    """

    def __init__(self, *, name: str, steps: tuple[str, ...], known: tuple[str, ...]) -> None:
        """Word the message: ``known`` are the names that the registry of the lock ``name`` has."""
        super().__init__(
            f"undo steps of {name!r} have no function: {', '.join(steps)}; the registry has "
            f"{', '.join(known) or 'nothing'}. Nothing was run: register them (also under old names that may still be "
            "recorded)"
        )
        self.steps = steps


class UndoFailed(SyncError, ExceptionGroup[Exception]):
    """Some undo steps raised, or took too long. The other steps were run.

    It is an `ExceptionGroup`. In a `Compensation` it is ``undo.errors``, and the body's own error is raised.

    **State:** the failed steps stay recorded, also after the release, until they succeed or you call `clear_record`.

    **Do:** fix the causes, then call `compensate` again: a failed step runs again, so it must be harmless to run twice.

    Attributes:
        exceptions: The errors of the steps, in the order in which they ran.
    """

    @staticmethod
    def of_steps(errors: Sequence[Exception], *, steps: int, lock: str = "", after: str = "") -> UndoFailed:
        """Return the error for ``errors`` of so many ``steps``.

        They were recorded under ``lock``, or run after an error of the type ``after``.
        """
        about = f"for {lock!r}" if lock else f"after {after}"
        return UndoFailed(f"{len(errors)} of {steps} undo steps {about} failed", errors)

    @staticmethod
    def too_long(step: str, *, seconds: float, ended: bool) -> TimeoutError:
        """Return the error for a step that took longer than ``seconds``; ``ended``: its cancellation ended it."""
        then = " and was cancelled" if ended else ", and keeps running although cancelled"
        return TimeoutError(f"the undo step {step} took longer than {seconds:g} seconds{then}")

    def derive(self, excs: Sequence[Exception]) -> UndoFailed:  # type: ignore[override]
        """Return a part of the group, for ``except*``."""
        return UndoFailed(self.message, excs)


class StaleWriter(NotHeld):
    """Another lease of the same identity adopted the record of the robust lock later, and is its writer from then on.

    A worker was started again under its identity while the old one runs.

    **State:** this lease recorded nothing. It still holds the lock, together with the other one.

    **Do:** end one of the two. Give each process its own identity, unless a successor has to find the lock.

    Attributes:
        name: The name of the lock.
        fence: The fence of the lease that may not write the record any more.
    """

    def __init__(self, *, name: str, identity: str | None, fence: int) -> None:
        super().__init__(
            f"nothing was recorded under {name!r}: a later lease of the identity {identity!r} has adopted the record "
            f"and writes it now. Record by that lease, or acquire again (this lease has the fence {fence})"
        )
        self.name = name
        self.fence = fence


# -- Errors of processes that wait for each other --------------------------------------------------------------


class WaitTimeout(SyncError, TimeoutError):
    """An event, a latch or a barrier did not open within ``timeout``, or Redis had not answered yet.

    **State:** nothing stays behind: the waiter has left the queue, or leaves it in the background. A barrier is not
    broken by that.

    **Do:** wait longer, or find out
    [which process is missing](https://redis-sync-aio.github.io/redis-sync-aio/operations/#waiters-of-an-event-a-latch-or-a-barrier).
    It is also a `TimeoutError`.

    Attributes:
        name: The name of the event, latch or barrier.
        answered: True if Redis had answered. False: it is not known whether it was open.
    """

    def __init__(self, *, name: str, within: float | None, closed: str, answered: bool = True) -> None:
        """Word the message.

        Args:
            name: The attribute.
            within: The seconds that it was waited for.
            closed: The reason why it is not open.
            answered: The attribute.
        """
        why = f"{closed}; allow more time, or find out which process is missing" if answered else no_answer(name)
        super().__init__(f"{name!r} did not open{time_allowed(within)}: {why}")
        self.name = name
        self.answered = answered


class BrokenBarrierError(SyncError, AsyncioError):
    """A barrier is broken, or was reset while this party waited.

    A barrier breaks when a party dies or is cut off for longer than its ttl, or when `abort` is called. A party that is
    cancelled or times out breaks nothing.

    **State:** no party passed. Later ones get the same error.

    **Do:** when all parties have got it, one calls [`AsyncBarrier.reset`][redis_sync_aio.AsyncBarrier.reset]. After a
    reset, or a restart of the server, wait again if all parties do. It is also an `asyncio.BrokenBarrierError`.

    Attributes:
        name: The name of the barrier.
    """

    def __init__(self, *, name: str, broken: bool) -> None:
        """Word the message; ``broken``: until a reset."""
        if broken:
            why = (
                "is broken: it was aborted, or a party died or was cut off for longer than its ttl. "
                "When all parties can begin again, call reset()"
            )
        else:
            why = (
                "was reset while this party waited, or the server was replaced or lost its data. "
                "It is not known whether this party was counted. Call wait() again if all parties do"
            )
        super().__init__(f"the barrier {name!r} {why}")
        self.name = name
