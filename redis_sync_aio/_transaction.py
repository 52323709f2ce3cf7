"""Optimistic transactions that end: WATCH, read, MULTI, write, EXEC, and again when others were faster.

Three forms of the same::

    done = await transaction(redis, body, "stock:1")       # body(tx) is a function; done.value is what it returns

    @watch_retry(redis, "stock:{item}")                    # a function that always is a transaction
    async def deduct(tx: Transaction, item: int, n: int) -> int: ...

    async for attempt in watch_retry(redis, "stock:1"):    # in place, where a function would be in the way
        async with attempt as tx:
            ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from ._client.cluster import servers_of
from ._client.settings import RETRY_FOR, Client, encode, is_cluster
from ._core.arguments import Name, Seconds, count, require_bool, timeout_seconds
from ._core.backoff import Backoff
from ._core.display import shown
from ._core.keys import check_slot, lock_keys, turn_key
from ._core.name_templates import check_template, names_from, signature_without_first
from ._leases.implicit import CoordinatorLike, binding_of, client_of, prefix_of
from ._leases.lease import grant_of
from ._primitives.multilock import AsyncMultiLock, MultiLease
from ._transactions.attempts import Attempt, Attempts
from ._transactions.handle import Committed, Transaction, TransactionOptions

__all__ = ["Attempt", "Committed", "Transaction", "WatchRetry", "transaction", "watch_retry"]

P = ParamSpec("P")
T = TypeVar("T")

BACKOFF = Backoff(initial=0.001, cap=0.1)
ATTEMPTS = 20
TURN_TTL = 2.0
"""Seconds that a turn lasts unless renewed: the cost of a crashed process for the queue behind it."""
TURN_MAX = 30.0
"""Seconds after which a turn is lost, and the others go on, however long the body takes."""


async def transaction(
    client: Client | CoordinatorLike,
    body: Callable[[Transaction], Awaitable[T]],
    *keys: Name,
    attempts: int = ATTEMPTS,
    timeout: Seconds | None = None,
    backoff: Backoff | None = None,
    idempotent: bool = False,
    exactly_once: bool = False,
    escalate_after: int | None = None,
) -> Committed[T]:
    """Run ``body(tx)`` as a transaction: its writes are made together, and only if none of ``keys`` changed meanwhile.

    The body reads (``await tx.get(...)``), calls ``tx.multi()``, and queues writes (``tx.set(...)``). If another client
    changes one of the keys meanwhile, nothing is written, and the whole body runs again after a pause. So except
    through ``tx``, it must do nothing that cannot be done twice. This is Redis's optimistic locking (WATCH, MULTI,
    EXEC), with bounded retries.

    Guarantees:

    - All writes are made, or none.
    - What the body read was true at the moment of the writes.
    - A body whose writes may have been made never runs again, unless it is declared idempotent.
    - No connection is left watching, whatever happens.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, or a `Coordinator`, whose client is used.
        body: A coroutine function of one argument, a [`Transaction`][redis_sync_aio.types.Transaction].
        keys: All keys that the body reads and that decide about its writes: str or bytes, at least one.
        attempts: How often the body may run, 1 or more.
        timeout: Seconds or timedelta from the call. No attempt begins after that; one that runs is finished. None: no
            limit. For as long (None: for ``retry_for``) it waits in order for a connection of the client's pool.
        backoff: The pauses between attempts. Default: 1 ms, doubled up to 100 ms, with jitter.
        idempotent: A second run of the body does no harm although its writes were made already. The body then runs
            again when the answer to EXEC was lost.
        exactly_once: When the answer to EXEC was lost, run the body again only if EXEC was not executed. A marker
            tells, which is written with the rest and stays for a minute. While Redis is unreachable this takes up to 20
            seconds, also beyond ``timeout``; then OutcomeUnknown is raised.
        escalate_after: After so many conflicts, or if another client has a turn, take a turn on these keys in a fair
            lock until the commit. All transactions that often write these keys should use it. It needs the rights of
            locks ([Rights](https://redis-sync-aio.github.io/redis-sync-aio/operations/servers/#rights)).
            None: never.

    Returns:
        The value of the body, the replies to the writes, and how many attempts and conflicts it took.

    Raises:
        Conflict: The keys were changed during each attempt, until attempts or time were used up. Nothing was written.
        OutcomeUnknown: The answer to EXEC was lost, and nothing tells whether it was executed. For an idempotent body
            also when another of these errors ended a later run, which is then the cause.
        Unreachable: Redis was unreachable before EXEC was sent, for ``timeout`` or ``retry_for`` (10 seconds). Nothing
            was written. The command in flight then ends by ``socket_timeout`` of the client (None: no limit) or
            ``response_timeout`` of the `Coordinator`.
        CommandRefused: Redis refused a command. Nothing was written. PermissionDenied if the user may not use MULTI or
            EXEC.
        PartiallyApplied: A queued command failed when it ran, and the others were executed. Or all were, and a reply
            cannot be read.
        CoordinatorClosed, WrongContext: While it waited for its turn (``escalate_after``).
        TransactionMisuse: The body did what cannot work, such as a read after ``multi()`` or, in a cluster, a key in
            another hash slot.
        TypeError, ValueError: An argument is bad, or the keys are in several hash slots of a cluster. Nothing was sent.

    An exception of the body propagates, and nothing was written in that run. If an earlier run of an idempotent body
    may have been committed, it has a note that says so. On cancellation nothing was written, unless EXEC was in flight:
    then all was, or nothing; an earlier run may have been committed.

    Example:
        ```python
        from redis_sync_aio import transaction
        from redis_sync_aio.types import Transaction

        async def deduct(tx: Transaction) -> int:
            left = int(await tx.get("stock:1") or 0) - 1
            if left < 0:
                raise LookupError("sold out")
            tx.multi()
            tx.set("stock:1", left)
            return left

        await redis.set("stock:1", 5)
        done = await transaction(redis, deduct, "stock:1")
        print(done.value, done.conflicts)
        ```
    """
    if not callable(body):
        raise TypeError(f"body must be a coroutine function of one argument, the transaction, not {shown(body)}")
    retry = watch_retry(
        client,
        *keys,
        attempts=attempts,
        timeout=timeout,
        backoff=backoff,
        idempotent=idempotent,
        exactly_once=exactly_once,
        escalate_after=escalate_after,
    )
    return await _run(aiter(retry), body)


def watch_retry(
    client: Client | CoordinatorLike,
    *keys: Name,
    attempts: int = ATTEMPTS,
    timeout: Seconds | None = None,
    backoff: Backoff | None = None,
    idempotent: bool = False,
    exactly_once: bool = False,
    escalate_after: int | None = None,
) -> WatchRetry:
    """Return a decorator that turns functions into transactions. The result is also a loop over attempts.

    As a decorator: the first argument of the function is the [`Transaction`][redis_sync_aio.types.Transaction].
    Callers leave it out, and get the result of the function. ``keys`` are text and may refer to the other arguments:
    ``"stock:{item}"``. (Double the braces of a hash tag.) Not for methods, whose first argument is their object: use
    `transaction` or the loop inside them.

    As a loop: write ``async for attempt in watch_retry(...)`` and in it ``async with attempt as tx``. EXEC follows at
    the end of that block. The loop ends after a commit, and ``attempt.committed`` describes it. Leave the block by its
    end or by an exception, not by ``return`` or ``break``. An exception ends the transaction: let it leave the loop, or
    catch it and ``break``; a loop that continues raises TransactionMisuse.

    Arguments, guarantees, errors and cancellation are those of [`transaction`][redis_sync_aio.transaction].

    Raises:
        TypeError, ValueError: An argument is bad. At decoration: ``keys`` refer to something that is not an argument of
            the function, or the function is not a coroutine function.

    Example:
        ```python
        from redis_sync_aio import watch_retry
        from redis_sync_aio.types import Transaction

        @watch_retry(redis, "stock:{item}", attempts=50)
        async def deduct(tx: Transaction, item: int, n: int) -> int:
            left = int(await tx.get(f"stock:{item}") or 0) - n
            tx.multi()
            tx.set(f"stock:{item}", left)
            return left

        left = await deduct(7, 2)

        async for attempt in watch_retry(redis, "stock:7"):
            async with attempt as tx:
                left = int(await tx.get("stock:7") or 0)
                tx.multi()
                tx.set("stock:7", left + 10)
        ```
    """
    if backoff is not None and not isinstance(backoff, Backoff):
        raise TypeError(f"backoff must be a Backoff or None, not {shown(backoff)}")
    if require_bool(idempotent, "idempotent") and require_bool(exactly_once, "exactly_once"):
        raise ValueError(
            "idempotent and exactly_once exclude each other: either running twice does no harm, or it must not"
        )
    encoded = _encoded(client, keys)
    for key in encoded if exactly_once or escalate_after is not None else ():
        if is_cluster(client_of(client)):
            check_slot(key)  # there will be keys next to it
        turn_key(key)
    terms = TransactionOptions(
        encoded,
        prefix_of(client),
        count(attempts, "attempts", least=1),
        timeout_seconds(timeout, "timeout"),
        backoff or BACKOFF,
        idempotent,
        require_bool(exactly_once, "exactly_once"),
        None if escalate_after is None else count(escalate_after, "escalate_after", least=1),
    )
    return WatchRetry(client, keys, terms)


class WatchRetry:
    """A decorator, and a loop over attempts: the result of `watch_retry`. It may be used any number of times.

    Examples, errors and cancellation: see `watch_retry`.
    """

    def __init__(self, client: Client | CoordinatorLike, keys: tuple[Name, ...], terms: TransactionOptions) -> None:
        self._client = client
        self._keys = keys
        self._terms = terms

    def __call__(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]]
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        """Decorate a coroutine function whose first argument is the transaction.

        The signature of what is returned is the caller's: without the transaction.
        """
        names = names_from(function, [check_template(key, "a key") for key in self._keys], given=True, verbatim=True)

        @functools.wraps(function)
        async def transacted(*args: P.args, **kwargs: P.kwargs) -> T:
            terms = replace(self._terms, keys=_encoded(self._client, names(args, kwargs)))
            attempts = _attempts(self._client, terms)
            return (await _run(attempts, lambda tx: function(tx, *args, **kwargs))).value

        _show_to_callers(transacted, function)
        return transacted

    def __aiter__(self) -> Attempts:
        return _attempts(self._client, self._terms)


def _show_to_callers(transacted: Any, function: Callable[..., Any]) -> None:
    """Give the wrapper the signature and annotations of its calls, for other decorators and for frameworks."""
    transacted.__signature__ = shown = signature_without_first(function)
    annotated = getattr(function, "__annotations__", {})
    kept = {*shown.parameters, "return"}
    transacted.__annotations__ = {name: kind for name, kind in annotated.items() if name in kept}


async def _run(attempts: Attempts, body: Callable[[Transaction], Awaitable[T]]) -> Committed[T]:
    value: Any = None  # bound by the attempt that is committed
    async for attempt in attempts:
        async with attempt as tx:
            running = body(tx)
            if not inspect.isawaitable(running):
                raise TypeError(
                    f"body must be a coroutine function; {body!r} returned {running!r}. Nothing was written"
                )
            value = await running
    assert attempts.outcome is not None
    done: Committed[Any] = attempts.outcome
    return replace(done, value=value)


def _attempts(client: Client | CoordinatorLike, terms: TransactionOptions) -> Attempts:
    redis = servers_of(client_of(client)).client_of(*terms.keys)
    turn = None if terms.escalate_after is None else LockTurn(client, terms.keys)
    if (binding := binding_of(client)) is not None:
        options = binding.options
        return Attempts(redis, terms, options.retry_for, turn, options.asked_response_timeout)
    return Attempts(redis, terms, RETRY_FOR, turn)


class LockTurn:
    """The turn on some keys: a multi-lock on names derived from them."""

    def __init__(self, client: Client | CoordinatorLike, keys: tuple[bytes, ...]) -> None:
        self._client = client
        self._names = tuple(map(turn_key, keys))
        self.keys: tuple[bytes, ...] = tuple(lock_keys(name, prefix_of(client)).all[0] for name in self._names)
        self._lease: MultiLease | None = None

    @property
    def held(self) -> bool:
        """True if it was taken, and lasts."""
        return self._lease is not None and self._lease.remaining() > 0

    async def take(self, timeout: float | None) -> None:
        """Wait for the turn. Raises AcquireTimeout. On cancellation nothing is left."""
        lock = AsyncMultiLock(self._client, self._names, ttl=TURN_TTL, max_hold=TURN_MAX)
        self._lease = await lock.acquire(timeout=timeout)

    def give_back(self) -> None:
        """Give the turn back, if it was taken. A turn that was lost belongs to another client already."""
        lease, self._lease = self._lease, None
        if lease is not None:
            grant = grant_of(lease)
            grant.check_context()
            grant.give_back()


def _encoded(client: Client | CoordinatorLike, keys: tuple[Name, ...]) -> tuple[bytes, ...]:
    """Return the keys as bytes, each once."""
    redis = client_of(client)
    if not keys:
        raise ValueError("no keys: name those that the body reads, so that they can be watched")
    return tuple(dict.fromkeys(encode(redis, key, "a key") for key in keys))
