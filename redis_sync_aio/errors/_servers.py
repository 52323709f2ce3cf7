"""Errors of servers, connections, coordinators and transactions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from redis.exceptions import ConnectionError as RedisConnectionError

from ._base import SyncError, listed, page


class Unreachable(SyncError, RedisConnectionError):
    """Redis did not answer within the time allowed, after bounded retries. The outcome is not known.

    **State:** it depends on the request.

    - Acquiring: you hold nothing. A grant whose answer was lost is withdrawn later; it ends with its ttl at the latest.
    - Waiting for an event, a latch or a barrier: it may have opened.
    - Releasing: it is repeated in the background. The lease ends with its ttl at the latest.
    - Extending: the deadline is the old one.
    - Downgrading: you are the writer or already a reader. Write no more; it is repeated in the background.
    - A transaction: nothing was written; otherwise you get `OutcomeUnknown`.

    **Do:** check the server and the network (``redis-sync-aio doctor``), or allow more time (``retry_for``,
    ``timeout``). Other causes: a wrong address, port or TLS; a client that raised while it connected; a ttl below a
    round trip ("takes longer to answer"); too few answers to a Redlock, or clocks that are far apart. "No Redis has
    answered at …" comes after about a second, if an address that never answered refuses connections. It is also
    redis-py's `ConnectionError`.
    """

    @staticmethod
    def minority(
        name: str, *, answered: int, servers: int, needed: int, seconds: float, others: str = ""
    ) -> Unreachable:
        """Return the error for too few answers of several servers; ``others`` says what the other servers did."""
        return Unreachable(
            f"{answered} of {servers} servers answered about {name!r} within {seconds:g} seconds, {needed} have to"
            f"{f'. {others}' if others else '; check the servers and the network'}"
        )


class CommandRefused(SyncError):
    """The server answered with an error, so nothing was changed.

    **State:** nothing was changed, unless the answer to an earlier copy was lost; the message then says so.

    **Do:** look up the
    [code](https://redis-sync-aio.github.io/redis-sync-aio/operations/when-it-goes-wrong/#commandrefused).
    ``redis-sync-aio doctor`` names the setting.

    Attributes:
        code: The first word of the reply, for instance ``"OOM"`` or ``"MISCONF"``.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class PermissionDenied(CommandRefused):
    """The ACL user may not run a command or use a key or channel, or its credentials are missing or wrong.

    Often the rule has ``~orders:*`` and lacks ``~{orders:*``: a lock has more keys than its name.

    **State:** nothing was changed. A lease whose rights are removed cannot be renewed.

    **Do:** copy [the least rule](https://redis-sync-aio.github.io/redis-sync-aio/operations/servers/#rights).
    ``redis-sync-aio doctor``, run as this user, tests scripts and messages; with
    ``+acl|dryrun +acl|getuser +acl|whoami`` it also lists commands and keys. Missing channels (``&rsa:*``) only make
    waiters poll.

    Attributes:
        code: The first word of the reply: ``"NOPERM"``, ``"NOAUTH"`` or ``"WRONGPASS"``.
    """


class OutOfMemory(CommandRefused):
    """The server is at ``maxmemory``, so nothing new can be acquired.

    **State:** you hold nothing new. With scripts, releases, renewals and hand-overs still work. With ``engine="watch"``
    renewals of permits do not.

    **Do:** free memory, or raise ``maxmemory``. A policy that evicts would evict locks.

    Attributes:
        code: ``"OOM"``.
    """


class WrongKeyType(CommandRefused):
    """A key of this name holds data of another program: a list, a hash, or a text in another form.

    For example a lock ``user:7`` next to a hash ``user:7``.

    **State:** nothing was changed.

    **Do:** choose another name for the lock, such as ``lock:user:7``, or delete the key.

    Attributes:
        code: ``"WRONGTYPE"``.
    """

    @staticmethod
    def not_ours(name: str, *, what: str, key: str, problem: str, by: str = "redis_sync_aio") -> WrongKeyType:
        """Return the error for data about ``name`` in another form than that of this package.

        ``what`` says what belongs under ``key``, as in "the record", ``problem`` what was found there, and ``by`` what
        should have written it.
        """
        return WrongKeyType(f"{what} of {name!r} was not written by {by}: {problem}; delete {key!r}", code="WRONGTYPE")


BY_CODE: dict[str, tuple[type[CommandRefused], str]] = {
    "OOM": (OutOfMemory, "free memory or raise maxmemory"),
    "NOPERM": (
        PermissionDenied,
        f"extend the ACL rule of this user; {page('operations/servers', 'rights')} has the least one",
    ),
    "NOAUTH": (PermissionDenied, "give the client a username and password"),
    "WRONGPASS": (PermissionDenied, "check the username and password of the client"),
    "MOVED": (CommandRefused, "the server is a node of a cluster: use a redis.asyncio.RedisCluster"),
    "TRYAGAIN": (
        CommandRefused,
        "nothing was changed; if its hash slot stays between two nodes, finish the move: redis-cli --cluster fix",
    ),
    "WRONGTYPE": (WrongKeyType, "choose another name, or delete what is there"),
}
"""The class for an error reply with this code, and what to do about it."""
LACKING = {
    "cluster": "the server is not a cluster: use a redis.asyncio.Redis",
    "scripts": 'the server has no scripts: use engine="auto" or "watch"; only locks and semaphores work so',
}
"""The advice for a server that lacks this."""


class PushUnavailable(SyncError):
    """``push="always"`` requires pushed wake-ups, and this server, user or client does not allow them.

    The user may not SUBSCRIBE or PUBLISH on ``rsa:*``; a proxy speaks RESP2 only, or sends SUBSCRIBE to another node
    ("finds no listener"); or the client is fakeredis, or has connections of its own kind.

    **State:** nothing was sent for the lock.

    **Do:** allow it, connect to a cluster with `RedisCluster` and no proxy, or use ``push="auto"`` or ``"never"``:
    waiters then poll.
    """


HeldBack: TypeAlias = "Callable[[], Awaitable[None]]"


class CoordinatorClosed(SyncError):
    """The coordinator, or the client behind it, was closed.

    A shutdown closes the client before the tasks have ended, or a global lock outlives its coordinator.

    **State:** you hold nothing new. "May have been executed or not": a command had no answer yet; its lease ends with
    its ttl at the latest.

    **Do:** end the tasks, then close, or create a new one. In a service that shuts down, answer 503.
    """

    _held_back: HeldBack | None = None
    """Function to await before it is raised; None: it is raised immediately."""

    @staticmethod
    def used(why: str) -> CoordinatorClosed:
        """Return the error for the use of a coordinator that was closed; ``why`` is the reason."""
        return CoordinatorClosed(f"this coordinator cannot be used any more: {why}. Create a new one")


class WrongContext(SyncError, RuntimeError):
    """A coordinator, a lock or a lease was used in another event loop, or in another process after a fork.

    Examples are a loop for each test, ``async_to_sync``, gunicorn with ``preload_app``, and Celery's prefork.

    **State:** nothing was sent. A lease of the parent process stays the parent's.

    **Do:** create client and coordinator where the loop starts: in the lifespan, the fixture, the child (``spawn``). Or
    give locks the bare client: then each loop gets its own coordinator. It is also a `RuntimeError`.
    """

    def about(self, what: str) -> WrongContext:
        """Return the same error, naming ``what`` was used."""
        return WrongContext(f"{what} cannot be used here: {self}")


# -- Errors of transactions ------------------------------------------------------------------------------------


class Conflict(SyncError):
    """Others changed the watched keys in each attempt, until attempts or time were used up. Nothing was written.

    Many clients write one key, the body is long or watches too much, or it writes a watched key without ``tx``.

    **State:** nothing was written.

    **Do:** allow more attempts or time, watch fewer keys, use a lock, or let all transactions that often write these
    keys take turns (``escalate_after=3``). See
    [optimistic or pessimistic?](https://redis-sync-aio.github.io/redis-sync-aio/guides/transactions/#optimistic-or-pessimistic)

    Attributes:
        attempts: How often the body ran.
        conflicts: How many attempts were not committed because another client had changed a watched key.
        elapsed: Seconds that all attempts took, with the pauses.
        keys: The keys that were watched.
    """

    def __init__(
        self,
        *,
        attempts: int,
        conflicts: int,
        elapsed: float,
        keys: tuple[str, ...],
        lease: str = "",
        more_attempts: bool = False,
        escalates: bool = False,
        turn_taken: bool = False,
    ) -> None:
        """Word the message.

        Args:
            attempts: The attribute.
            conflicts: The attribute.
            elapsed: The attribute.
            keys: The attribute.
            lease: The lock whose lease guarded the commit, if one did.
            mark: The mark of a job was written, and nothing else. ``keys`` has its key.
            more_attempts: The number of attempts was the limit; else the time was.
            escalates: The transaction takes turns after some conflicts.
            turn_taken: Others had the turn until the deadline.
        """
        if lease:
            found = f"others changed {listed(keys)}, or " if keys else ""
            found += (
                f"{lease!r} itself was touched meanwhile (renewed; a semaphore or read/write lock also acquired or "
                f"released by others), at each of {conflicts} commits"
            )
            advice = f"The lease on {lease!r} still holds: read and write again"
            advice += ", without tx.watch() for what the lock protects" if keys else " when there is less contention"
        else:
            what = [f"others had the turn on {listed(keys)} until the deadline"] if turn_taken else []
            if conflicts or not turn_taken:
                what.append(f"others changed {listed(keys)} during {conflicts} of {attempts} attempts")
            found = f"{', and before that '.join(what)}, in {elapsed:.3f} seconds"
            advice = self._less_conflicts(len(keys), conflicts, more_attempts, escalates)
        super().__init__(f"{found}: nothing was written. {advice}")
        self.attempts = attempts
        self.conflicts = conflicts
        self.elapsed = elapsed
        self.keys = keys

    @staticmethod
    def _less_conflicts(keys: int, conflicts: int, more_attempts: bool, escalates: bool) -> str:
        """Return advice that the caller does not follow already."""
        advice = ["allow more attempts" if more_attempts else "allow more time (deadline)"]
        if keys > 1:
            advice.append("watch fewer keys")
        if not escalates:
            advice.append("let it take turns with the others (escalate_after=3)")
        elif conflicts:
            advice.append("let all who often write these keys take turns, too (escalate_after)")
        return ", or ".join(advice).capitalize()


class OutcomeUnknown(SyncError):
    """EXEC was sent and its answer was lost. All writes of the transaction were made, or none.

    For a job (`once`): the answer to the writing of its mark was lost, and the mark was written or not.

    **State:** all writes were made, or none. A lease that guarded them is held if ``lease.check()`` passes.

    **Do:** look at the data, or declare the transaction ``idempotent=True`` or ``exactly_once=True``.

    Attributes:
        attempts: How often the body ran.
        keys: The keys that were watched.
    """

    def __init__(
        self,
        *,
        attempts: int,
        keys: tuple[str, ...],
        lease: str = "",
        mark: bool = False,
        declared: Literal["", "idempotent", "exactly_once"] = "",
        cancelled: bool = False,
        later_error: str = "",
        marker_error: str = "",
    ) -> None:
        """Word the message.

        Args:
            attempts: The attribute.
            keys: The attribute.
            lease: The lock whose lease guarded the commit, if one did.
            declared: What the caller declared about repeating the body.
            cancelled: The loop was cancelled while EXEC was in flight.
            later_error: The type of the error that ended a later run of the body; then an earlier EXEC is meant.
            marker_error: Why the marker that tells could not be read.
        """
        what = f"what was guarded by the lease on {lease!r}" if lease else f"the transaction on {listed(keys)}"
        if cancelled:
            advice = "it was cancelled inside the loop, with EXEC in flight. Look at the data"
        elif later_error:
            advice = f"a later run ended with {later_error}, which is the cause of this. Look at the data"
        elif marker_error:
            advice = f"the marker that tells could not be read: {marker_error}. Look at the data"
        elif declared == "idempotent":
            advice = "look at the data, or allow more attempts or time (deadline): it was not run again"
        elif declared == "exactly_once":
            advice = "look at the data: the marker was unreachable"
        elif lease:
            advice = "look at the data"
        else:
            advice = "look at the data, or declare the body idempotent=True, or let a marker tell (exactly_once=True)"
        message = (
            f"the answer to {'an earlier ' if later_error else ''}EXEC was lost: {what} was committed as a whole, or "
            f"not at all; {advice}"
        )
        if mark:
            message = (
                f"the answer was lost: the mark {keys[0]!r} of the job {lease!r} was written, or not; call again, or "
                "look at the mark"
            )
        super().__init__(message)
        self.attempts = attempts
        self.keys = keys


class PartiallyApplied(SyncError):
    """Some commands of a transaction failed when they ran. The others were executed, and Redis does not undo them.

    **State:** each command has one entry in ``replies``.

    **Do:** repair the data by it. Read a key whose type is not certain before ``multi()``; queue EVAL instead of an
    EVALSHA or FCALL that the server may not know. "Cannot be read": all commands were executed, and a response callback
    of your client raised. "MULTI was refused": the user lost the right, and each command was executed by itself.

    Attributes:
        replies: The reply of each command, in order. An exception stands for each that failed or cannot be read.
    """

    def __init__(
        self, *, replies: tuple[object, ...], command: str = "", index: int = 0, failed: int = 0, multi: str = ""
    ) -> None:
        """Word the message.

        Args:
            replies: The attribute.
            command: The name of the first command that failed; if none did, of the first whose reply cannot be read.
            index: Its index in ``replies``.
            failed: How many commands failed.
            multi: The error reply to MULTI, if that was refused and each command was executed on its own.
        """
        count = len(replies)
        which = f"command {index + 1} of {count} ({command})"
        if multi:
            message = (
                f"MULTI was refused: {multi}. The commands after it were executed one by one, watched by nothing; "
                "`replies` has their replies. Let this user run MULTI and EXEC"
            )
        elif failed:
            message = (
                f"{which} failed when it ran: {replies[index]}. {count - failed} of {count} commands were executed, "
                "and Redis does not take them back; `replies` has the details"
            )
        else:
            message = (
                f"all commands were executed, but the reply to {which} cannot be read: "
                f"{type(replies[index]).__name__}: {replies[index]}; `replies` has the others"
            )
        super().__init__(message)
        self.replies = replies
