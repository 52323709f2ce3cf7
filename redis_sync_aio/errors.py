"""The errors of locks, leases and transactions, in one tree.

Each message names the lock, says what was expected and what was found, and what to do about it.
``SyncError`` catches them all; the second base of a class is what callers would catch anyway
(``TimeoutError`` for a timeout, redis-py's ``ConnectionError`` for a server out of reach).
They can be pickled and copied. Not among them: bad arguments are TypeError, ValueError or RuntimeError;
`redis_sync_aio.embedded` has errors of its own, and `redis_sync_aio.compat` raises redis-py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

__all__ = [
    "AcquireTimeout", "CommandRefused", "Conflict", "CoordinatorClosed", "LeaseLost", "LimitMismatch", "LossReason",
    "NotHeld", "OutOfMemory", "OutcomeUnknown", "PartiallyApplied", "PermissionDenied", "PushUnavailable",
    "StaleFence", "StaleWriter", "SyncError", "TransactionMisuse", "UndoFailed", "UnknownStep", "Unreachable",
    "WouldDeadlock", "WrongContext", "WrongKeyType",
]  # fmt: skip

LossReason = Literal["expired", "taken", "unreachable", "late", "closed", "released"]

_EXPLAINED: dict[LossReason, str] = {
    "expired": "it is gone from the server before its time was up: it was released elsewhere (by its identity or by "
    "force), or its key was deleted. Acquire it again",
    "taken": "another token holds the lock now. Do not write any more; acquire it again",
    "unreachable": "Redis could not be reached before the deadline to renew it. Do not write any more; check the "
    "server and the network, or give it a longer ttl",
    "late": "its deadline passed before this process had renewed it, although the server was answering: there is more "
    "to do than one event loop can. Do not write any more; hold fewer leases in one process, or give them a longer ttl",
    "closed": "the coordinator or its client was closed while it was held. Close it after the bodies have ended",
    "released": "another task released it while this body ran. Release it in the task whose body runs, or end the body",
}
_TIME_IS_UP = (
    "its time was up: its ttl ran out without a renewal, or max_hold was reached. Acquire it again, or give it more"
)
_STOOD_STILL = (
    "its deadline passed while this process, or its event loop, stood still for at least {:.1f} seconds, so it was not "
    "renewed. Do not write any more; move blocking work to a thread, hold fewer leases in one process, or give it a "
    "longer ttl"
)


_CLAIM = (
    "{}. It was handed over by its last holder and had a claim of {:g} seconds until its first renewal, not its whole "
    "ttl: a longer ttl does not help. Do not write any more; move blocking work to a thread, or raise "
    "Coordinator(claim=)"
)


def explained(reason: LossReason, *, stalled: float = 0.0, time_is_up: bool = False, claim: float = 0.0) -> str:
    """Return why a lease was lost and what to do about it; the arguments are those of `LeaseLost`."""
    if claim and reason in ("late", "expired", "unreachable"):
        what = "Redis could not be reached before the deadline to renew it"
        if reason != "unreachable":
            still = f"this process, or its event loop, stood still for at least {stalled:.1f} seconds, and"
            what = f"its deadline passed: {still if stalled else 'this process'} had not renewed it"
        return _CLAIM.format(what, claim)
    if reason == "expired" and time_is_up:
        return _TIME_IS_UP
    if reason == "late" and stalled:
        return _STOOD_STILL.format(stalled)
    return _EXPLAINED[reason]


class SyncError(Exception):
    """Base of every error of a lock, a lease or a transaction."""

    def __repr__(self) -> str:
        """Return class and message; redis-py's ConnectionError would show neither."""
        return BaseException.__repr__(self)

    def __reduce__(self) -> tuple[Callable[..., SyncError], tuple[object, ...], dict[str, object]]:
        """Pickle and copy it with its attributes; by default the class is called with ``args`` alone."""
        return _restore, (type(self), self.args), vars(self)


def _restore(kind: type[SyncError], args: tuple[object, ...]) -> SyncError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


E = TypeVar("E", bound=BaseException)


def copy_error(error: E) -> E:
    """Return another error that says the same, to be raised in another task: a traceback and notes are one task's."""
    twin = copy(error)
    twin.__cause__, twin.__suppress_context__ = error.__cause__, error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        twin.__notes__ = [*notes]
    return twin


class AcquireTimeout(SyncError, TimeoutError):
    """The lock was not granted within ``timeout``: others held it, or Redis had not answered yet, as the message says.

    The request is being withdrawn when this is raised; with pushed wake-ups the withdrawal was sent already, behind the
    request and on the same connection. So nothing stays behind.

    ``name`` is the lock's; ``remaining`` is for how many seconds the present holder has it if it does not renew,
    as far as this process or the server's last answer can tell (None: not known, or forever): a hint for
    ``Retry-After``. ``answered`` is False if Redis had not answered yet, so that it may be free.
    """

    def __init__(
        self,
        failed: str,
        *,
        name: str,
        remaining: float | None = None,
        answered: bool = True,
        held_here: bool = False,
        it: str = "it",
        use: str = "",
        why: str = "",
    ) -> None:
        """Word the message.

        Args:
            failed: what was not done, and in what time.
            name, remaining, answered: the attributes.
            held_here: this process holds it; else others do.
            it: what is held, for the sentence about that.
            use: what to do if the task waits for itself.
            why: another reason, with advice; then nothing is said about holders.
        """
        longer = "wait longer, or look at statistics() for the holders"
        if not answered:
            why = f"Redis has not answered yet about {name!r}; allow more time"
        elif not why and held_here:
            itself = "If it is the very task that asks, it waits for itself"
            why = f"this process holds {it}. {itself}{f': {use}' if use else ''}; else {longer}"
        elif not why:
            why = f"others hold {it} or wait for {'them' if it.endswith('them') else 'it'}; {longer}"
        super().__init__(f"{failed}: {why}")
        self.name = name
        self.remaining = remaining
        self.answered = answered


class LeaseLost(SyncError):
    """The lease ended while it was still in use: what it protected is no longer protected.

    ``reason`` says how it was found out:

    - ``"expired"``: its time was up (a ttl without renewals, or ``max_hold``); or it is gone from the server before
      that: it was released elsewhere (by its identity, by force), or its key was deleted. The message says which.
    - ``"taken"``: another token is under the key, so another client holds the lock now.
    - ``"unreachable"``: the deadline passed while Redis could not be reached to renew the lease.
    - ``"late"``: the deadline passed because this process did not renew the lease in time: it, or its event loop, stood
      still, or had too much to do. The server was not asked; another client may hold the lock.
    - ``"closed"``: this process gave it up: its coordinator, or its client, was closed under it.
    - ``"released"``: another task of this process released it while the body ran.

    ``name`` is the lock's, ``fence`` the lease's (None: not known). ``held_for`` is for how many seconds the lease was
    held until the loss was noticed (None: not known). ``stalled`` is for how many seconds at least this process, or its
    event loop, stood still since the latest renewal. ``time_is_up``: its time had ended by the clock of this process.
    ``claim``: seconds for which it had been handed over, without a renewal since (0: it had its whole ttl).

    ``given_back`` names the other locks of a multi-lock; ``servers`` has, of a Redlock, on how many servers it was held
    still, of how many, and how many are needed.
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
        why = explained(reason, stalled=stalled, time_is_up=time_is_up, claim=claim)
        if servers is not None:
            held, of, needed = servers
            why = f"{held} of {of} servers hold it, {needed} have to; of the last one that did, {why}"
        if given_back:
            why += f". With it {', '.join(map(repr, given_back))} are given back"
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


class LimitMismatch(SyncError, ValueError):
    """The server's limit is another than the caller's, or too small for the weight asked for. Nothing was changed.

    ``expected`` is the limit that the caller gave (None: it was left to the server); if a `resize` made a waiting
    request too heavy, the limit when it asked. ``found`` is the server's (None: it knows none yet).
    """

    def __init__(self, why: str, *, name: str, expected: int | None, found: int | None) -> None:
        super().__init__(f"{name!r}: {why}")
        self.name = name
        self.expected = expected
        self.found = found


class WouldDeadlock(SyncError, RuntimeError):
    """Waiting would never end: two wait for each other, or one for itself. Nothing was changed."""


class UnknownStep(SyncError, LookupError):
    """Undo steps are recorded under names that the registry does not have. None was run.

    ``steps`` are those names.
    """

    def __init__(self, *, name: str, steps: tuple[str, ...], known: tuple[str, ...]) -> None:
        """Word the message: ``known`` are the names that the registry of the lock ``name`` has."""
        super().__init__(
            f"undo steps of {name!r} without a function: {', '.join(steps)}; the registry has "
            f"{', '.join(known) or 'nothing'}. Nothing was run: register them (also under old names that may still be "
            "recorded)"
        )
        self.steps = steps


class UndoFailed(SyncError, ExceptionGroup[Exception]):
    """Some undo steps raised, or took too long; the others were run. ``exceptions`` are their errors, as they ran."""

    def derive(self, excs: Sequence[Exception]) -> UndoFailed:  # type: ignore[override]
        """Return a part of the group, for ``except*``."""
        return UndoFailed(self.message, excs)


class StaleFence(SyncError):
    """A resource was used under a fence that is older than one it has seen: that lease is over. Nothing was changed.

    ``fence`` is the one that was refused, ``highest`` the highest that was accepted before.
    """

    def __init__(self, *, name: str, fence: int, highest: int) -> None:
        super().__init__(
            f"the fence {fence} is too old for {name!r}, which has accepted {highest}: another holder came after that "
            "lease. Do not write; acquire the lock again"
        )
        self.name = name
        self.fence = fence
        self.highest = highest


class NotHeld(SyncError):
    """A release, or a check, of something that is not held (by this task, or by this identity).

    Also the end of an ``async with`` that did not begin, as after ``push_async_exit(lock)``.
    """


class StaleWriter(NotHeld):
    """Another lease of the same identity adopted the record of the robust lock later, and writes it from then on.

    Nothing was recorded by this lease. It still holds the lock, together with that other one. ``name`` is the lock's,
    ``fence`` that of the lease.
    """

    def __init__(self, *, name: str, identity: str | None, fence: int) -> None:
        super().__init__(
            f"nothing was recorded under {name!r}: a later lease of the identity {identity!r} has adopted the record "
            f"and writes it now. Record by that lease, or acquire again (this lease has the fence {fence})"
        )
        self.name = name
        self.fence = fence


class Unreachable(SyncError, RedisConnectionError):
    """Redis did not answer within the time allowed, after bounded retries: the outcome is not known.

    Of a transaction it is: nothing was written (`OutcomeUnknown` is raised when that is not certain).

    What a request that was given up may have left on the server is withdrawn as soon as the server is back,
    and otherwise ends with its ttl.
    """


class CommandRefused(SyncError):
    """The server answered with an error, so nothing was changed.

    Unless the message says that an earlier copy of the command may have been executed: the answer to that was lost.

    ``code`` is the first word of the server's answer, for instance ``"OOM"`` or ``"MISCONF"``.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class PermissionDenied(CommandRefused):
    """The ACL user may not run a command, use a key or a channel, or its credentials are missing or wrong.

    docs/servers.md has the least rule.
    """


class OutOfMemory(CommandRefused):
    """The server is at ``maxmemory``: nothing new can be acquired.

    With scripts, releases and renewals still work; with WATCH (``engine="watch"``) those of permits do not.
    """


class WrongKeyType(CommandRefused):
    """The key of this lock holds something that is not a lock (a list, a hash, …)."""


class PushUnavailable(SyncError):
    """``push="always"`` was asked for; the server, its user or the client's kind of connection does not allow it."""


class CoordinatorClosed(SyncError):
    """The coordinator, or the client behind it, was closed: create a new one."""


class WrongContext(SyncError, RuntimeError):
    """Used from another event loop, or from another process after a fork."""

    def about(self, what: str) -> WrongContext:
        """Return the same error, naming ``what`` was used."""
        return WrongContext(f"{what} cannot be used here: {self}")


class Conflict(SyncError):
    """Others changed the watched keys in each attempt, until attempts or time were used up: nothing was done.

    ``attempts`` says how often the body ran, ``conflicts`` how often EXEC found a change, ``elapsed`` how many seconds
    it took, ``keys`` which keys were watched.
    """

    def __init__(self, message: str, *, attempts: int, conflicts: int, elapsed: float, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.attempts = attempts
        self.conflicts = conflicts
        self.elapsed = elapsed
        self.keys = keys


class OutcomeUnknown(SyncError):
    """EXEC was sent and its answer was lost: the writes of the transaction were made, all of them, or none.

    ``attempts`` says how often the body ran, ``keys`` which keys were watched.
    """

    def __init__(self, message: str, *, attempts: int, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.attempts = attempts
        self.keys = keys


class PartiallyApplied(SyncError):
    """Some commands of a transaction failed when they ran: Redis does not take the others back.

    Or all were executed, and a reply cannot be read. ``replies`` has the reply of each command in order, an exception
    in place of each that failed or cannot be read.
    """

    def __init__(self, message: str, *, replies: tuple[object, ...]) -> None:
        super().__init__(message)
        self.replies = replies


class TransactionMisuse(SyncError, RuntimeError):
    """The body of a transaction did what cannot work; the message says what to do instead. Nothing was written."""
