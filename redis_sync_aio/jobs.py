"""Work that must be done once: by schedule (`once`, `once_per`), or for each request (`idempotent`).

All three hold an `AsyncLock` while the work runs, and keep a mark next to it that outlasts the lock. The mark is
written only if the lease holds at that moment (`Lease.transaction`), so a holder that was stopped for too long writes
nothing. [Cron jobs](https://redis-sync-aio.github.io/redis-sync-aio/recipes/cron/) shows them with cron,
APScheduler, taskiq and SAQ.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, get_args

from ._acquire.binding import CoordinatorLike
from ._client.error_replies import is_transient
from ._client.retry import RETRY
from ._client.settings import Client
from ._core.arguments import Seconds, is_async, one_of, timeout_seconds, ttl_ms
from ._core.clock import now, wall_ns
from ._core.display import shown
from ._core.keys import mark_key
from ._core.name_templates import check_template, names_from
from ._leases.cancel_on_loss import is_by_loss
from ._leases.lease import Lease, grant_of
from ._transactions.handle import Transaction
from .errors import FingerprintMismatch, OutcomeUnknown, RunInterrupted, SyncError
from .lock import AsyncLock, ClientSource, Synchronize, SynchronizeOrSkip
from .transaction import transaction

__all__ = ["Codec", "OnCrash", "OnInterrupted", "idempotent", "once", "once_per"]

P = ParamSpec("P")
R = TypeVar("R")

DAY = 86_400.0
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BEGUN = "begun"
"""The part of a mark that has the fence of the run, by which a run knows a mark of its own."""
OnCrash: TypeAlias = Literal["skip", "again"]
"""The rule for a slot whose run did not come to its end: it is over, or the next caller runs it again."""
OnInterrupted: TypeAlias = Literal["again", "raise"]
"""The rule for a request whose run did not come to its end: it runs again, or RunInterrupted is raised."""


class Codec(Protocol):
    """Turns results into text and back. The module `json` is one."""

    def dumps(self, value: Any, /) -> str: ...
    def loads(self, text: str, /) -> Any: ...


def once(
    client: Client | CoordinatorLike,
    name: str,
    *,
    slot: object = "",
    at_least: Seconds = DAY,
    on_crash: OnCrash = "skip",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
) -> AbstractAsyncContextManager[Lease | None]:
    """Return an async context manager: of all that enter it for one slot, one gets a lease. The others get None.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, or a `Coordinator`.
        name: The name of the job.
        slot: What is done once, such as a date. Its text follows the name after a colon.
        at_least: How long the slot stays done: seconds or timedelta, longer than clocks and schedules may differ. It
            counts from the beginning of the run for ``on_crash="skip"``, else from its end. Default: a day.
        on_crash: What happens after a run that raised, was cancelled or was killed. "skip" (default): it is not
            repeated, so the work runs at most once; a caller that comes during a run gets None immediately. "again":
            the next caller runs, so the work runs at least once, and exactly once without a crash; a caller that comes
            during a run waits for its end.
        ttl: The ttl of the lock, renewed during the body: after a crash the next run begins so much later.
        timeout: How long to wait for another run (``on_crash="again"``): seconds or timedelta. None: no limit.

    Raises:
        TypeError, ValueError: At the call: an argument is bad.
        AcquireTimeout: Another run took longer than ``timeout``.
        LeaseLost: The lease was lost. The slot is not marked as done, unless the loss came while it was being marked.
        OutcomeUnknown: The answer to a mark was lost, and nothing told its outcome for ``retry_for`` seconds.
        SyncError: As for `AsyncLock.acquire` at the beginning, and `Lease.transaction` at the beginning and the end.

    On cancellation the lock is released, or was not acquired.

    Example:
        ```python
        from redis_sync_aio.jobs import once

        async with once(sync, "nightly", slot="2026-11-26") as lease:
            if lease is not None:
                await report(fence=lease.fence)
        ```
    """
    one_of(on_crash, get_args(OnCrash), "on_crash")
    text = f"{slot}"
    if not isinstance(name, str):
        raise TypeError(f"name must be str, not {shown(name)}")
    whole, limit = f"{name}:{text}" if text else name, timeout_seconds(timeout)
    lock = AsyncLock(client, whole, ttl=ttl)
    return _once(lock, _Mark(client, lock, at_least, "at_least"), on_crash, limit)


@asynccontextmanager
async def _once(lock: AsyncLock, mark: _Mark, on_crash: OnCrash, timeout: float | None) -> AsyncIterator[Lease | None]:
    skips = on_crash == "skip"
    lease = await (lock.try_acquire() if skips else lock.acquire(timeout=timeout))
    if lease is not None:
        async with lease:
            if await mark.begin(lease, {} if skips else None) is None:
                yield lease
                if not skips:
                    await mark.write(lease, {"done": True})
                return
    yield None


def once_per(
    client: ClientSource,
    name: str,
    *,
    at_least: Seconds = DAY,
    on_crash: OnCrash = "skip",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
    tz: tzinfo = UTC,
) -> SynchronizeOrSkip:
    """Decorate a coroutine function: of all calls for one slot, on all machines, one runs. The others return None.

    Args:
        client: As for `once`, or a function without arguments that returns one, called at each call.
        name: The name of the job with its slot. ``{0}`` is the time of the call by the clock of this machine, as a
            `datetime`. Other fields are arguments of the function: ``"report:{customer}:{0:%Y-%m-%d}"``.
        tz: The time zone of ``{0}``. Default: UTC.

    Raises:
        TypeError, ValueError: At decoration: an argument is bad, or a field is neither ``{0}`` nor an argument.

    The other arguments are those of [`once`][redis_sync_aio.jobs.once]. A call raises whatever the function raises, and
    the errors of `once`.

    Example:
        ```python
        from redis_sync_aio.jobs import once_per

        @once_per(sync, "nightly:{0:%Y-%m-%d}", at_least=3600)
        async def nightly() -> None: ...
        ```
    """
    one_of(on_crash, get_args(OnCrash), "on_crash")
    for time, what in ((at_least, "at_least"), (ttl, "ttl")):
        ttl_ms(time, what)
    timeout_seconds(timeout)
    if not isinstance(name, str):
        raise TypeError(f"name must be str, not {shown(name)}")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        signature = _checked_signature(function, name)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            own = name.format((EPOCH + timedelta(microseconds=wall_ns() // 1000)).astimezone(tz), **bound.arguments)
            options: dict[str, Any] = {"at_least": at_least, "on_crash": on_crash, "ttl": ttl, "timeout": timeout}
            async with once(_client(client), own, **options) as lease:
                return None if lease is None else await function(*args, **kwargs)

        return call

    return decorate


def _checked_signature(function: Callable[..., Any], name: str) -> inspect.Signature:
    """Return the signature; raise TypeError or ValueError unless ``name`` can be made of the time and arguments."""
    if not is_async(function):
        raise TypeError(f"{function!r} is not a coroutine function")
    signature = inspect.signature(function)
    for _, field, _, _ in string.Formatter().parse(name):
        first = None if field is None else field.replace("[", ".").split(".")[0]
        if first is not None and first != "0" and first not in signature.parameters:
            raise ValueError(
                f"{name!r} refers to {first!r}, which is not an argument of {function!r}; {{0}} is the time of the call"
            )
    return signature


def idempotent(
    client: ClientSource,
    key: str,
    *,
    ttl: Seconds = DAY,
    wait: bool | Seconds = True,
    fingerprint: str | None = None,
    on_interrupted: OnInterrupted = "again",
    codec: Codec = json,
    lock_ttl: Seconds = 30.0,
) -> Synchronize:
    """Decorate a coroutine function: of all calls with one key the first one runs, and all get its result.

    The result is kept as text, and each call gets what the codec makes of it. A call that raises keeps nothing.

    Args:
        client: As for `once_per`.
        key: The key of the request. It may refer to arguments of the function: ``"payment:{request_id}"``.
        ttl: How long the result is kept: seconds or timedelta.
        wait: How a call reacts to another one that runs with its key. True (default): wait for its result. Seconds or
            timedelta: wait at most so long. False: raise AcquireTimeout immediately.
        fingerprint: What else must be equal in two calls with one key: ``"{amount}:{account}"``. None: nothing.
        on_interrupted: What the next call does after a run that did not end. "again" (default): run. "raise": raise
            RunInterrupted until ``ttl`` is over or somebody deletes the mark; for work that must not happen twice.
        codec: An object with ``dumps`` and ``loads``. Default: JSON.
        lock_ttl: The ttl of the lock, renewed during the run: after a crash the next call goes on so much later.

    Raises:
        TypeError, ValueError: At decoration: an argument is bad, or a field is not an argument of the function.

    A call raises whatever the function raises, the errors of `AsyncLock.acquire` and `transaction`,
    FingerprintMismatch, RunInterrupted, LeaseLost if it is not known whether the result is kept, and OutcomeUnknown as
    for `once`. On cancellation nothing is kept.

    Example:
        ```python
        from redis_sync_aio.jobs import idempotent

        @idempotent(sync, "payment:{request_id}", fingerprint="{amount}")
        async def pay(request_id: str, amount: int) -> dict[str, str]: ...
        ```
    """
    templates = [check_template(key, "key")]
    if fingerprint is not None:
        templates.append(check_template(fingerprint, "fingerprint"))
    one_of(on_interrupted, get_args(OnInterrupted), "on_interrupted")
    for time, what in ((ttl, "ttl"), (lock_ttl, "lock_ttl")):
        ttl_ms(time, what)
    limit = (None if wait else 0.0) if isinstance(wait, bool) else timeout_seconds(wait)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        names = names_from(function, templates)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            own, *rest = names(args, kwargs)
            source, own_print = _client(client), hashlib.sha256("".join(rest).encode()).hexdigest()
            lock = AsyncLock(source, own, ttl=lock_ttl)
            request = _Request(_Mark(source, lock, ttl, "ttl"), own, own_print, codec, on_interrupted)
            if (found := await request.mark.read()) is not None and "result" in found:
                kept: R = request.result_of(found)
                return kept
            async with lock.hold(timeout=limit) as lease:
                result: R = await request.run(lease, functools.partial(function, *args, **kwargs))
            return result

        return call

    return decorate


class _Request:
    """One call with a key, of which one runs."""

    def __init__(self, mark: _Mark, key: str, fingerprint: str, codec: Codec, on_interrupted: OnInterrupted) -> None:
        self.mark = mark
        self._key = key
        self._fingerprint = fingerprint
        self._codec = codec
        self._on_interrupted = on_interrupted

    def result_of(self, found: Mapping[str, Any]) -> Any:
        """Return the result that another call has kept; raise if it was another request, or did not end."""
        if found["fingerprint"] != self._fingerprint:
            raise FingerprintMismatch(key=self._key)
        if "result" not in found:
            raise RunInterrupted(key=self._key)
        return self._codec.loads(found["result"])

    async def run(self, lease: Lease, function: Callable[[], Awaitable[Any]]) -> Any:
        """Run the function under ``lease``, unless another call has, and return the result that is kept."""
        begun: dict[str, Any] = {"fingerprint": self._fingerprint}
        marks = self._on_interrupted == "raise"
        if (found := await self.mark.begin(lease, begun if marks else None)) is not None:
            return self.result_of(found)
        try:
            result = self._codec.dumps(await function())
        except BaseException as error:
            if marks and isinstance(error, Exception):  # it did end; of a cancelled one that is not known
                await self._forget(lease, error)
            raise
        await self.mark.write(lease, begun | {"result": result})
        return self._codec.loads(result)

    async def _forget(self, lease: Lease, error: Exception) -> None:
        """Delete the mark of a run that raised ``error``, which propagates also if that fails (P7)."""
        try:
            await self.mark.forget(lease)
        except SyncError as other:
            error.add_note(
                f"redis_sync_aio: the next call may get RunInterrupted, as the mark was not deleted: {other}"
            )


class _Mark:
    """The mark that outlasts the lock: a text next to it, which only the holder of the lock may change."""

    def __init__(self, client: Client | CoordinatorLike, lock: AsyncLock, lasts: Seconds, what: str) -> None:
        self._client: Any = client
        self._key = mark_key(lock._keys)
        self._ms = ttl_ms(lasts, what)

    async def read(self) -> dict[str, Any] | None:
        """Return what it says, None if there is none; without the lock."""

        async def body(tx: Transaction) -> Any:
            found = await tx.get(self._key)
            tx.multi()
            return found

        return _read((await transaction(self._client, body, self._key, idempotent=True)).value)

    async def begin(self, lease: Lease, new: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return what it says; None if it said nothing, and now says ``new``, if that is given."""
        begun = None if new is None else {**new, BEGUN: lease.fence}

        async def attempt() -> str | bytes | None:
            async with lease.transaction() as tx:
                found: str | bytes | None = await tx.get(self._key)
                tx.multi()
                if found is None and begun is not None:  # nx: a late copy must not replace what was written since
                    tx.set(self._key, json.dumps(begun), px=self._ms, nx=True)
            return found

        found = _read(await _answered(lease, attempt))
        return None if begun is not None and found == begun else found  # by an attempt whose answer was lost

    async def write(self, lease: Lease, new: Mapping[str, Any]) -> None:
        """Make it say what is ``new``."""

        async def attempt() -> None:
            async with lease.transaction() as tx:
                tx.multi()
                tx.set(self._key, json.dumps(new), px=self._ms)

        await _answered(lease, attempt)

    async def forget(self, lease: Lease) -> None:
        """Delete it."""

        async def attempt() -> None:
            async with lease.transaction() as tx:
                tx.multi()
                tx.delete(self._key)

        await _answered(lease, attempt)


async def _answered(lease: Lease, attempt: Callable[[], Awaitable[R]]) -> R:
    """Await ``attempt()``, again until the server has answered, within ``retry_for``; a repetition must do no harm.

    While the lease holds nobody else writes the mark, and after that an attempt has no effect, however late it arrives.
    """
    grant = grant_of(lease)
    ends, delays = now() + grant.manager.settings.retry_for, iter(RETRY)
    unknown: OutcomeUnknown | None = None
    try:
        while True:
            try:
                return await attempt()
            except SyncError as error:
                if isinstance(error, OutcomeUnknown):
                    unknown = error
                delay = next(delays)
                if now() + delay < ends and (unknown is error or is_transient(error)):
                    await asyncio.sleep(delay)
                elif unknown is None or unknown is error:
                    raise
                else:
                    raise unknown from error
    except asyncio.CancelledError as error:
        if unknown is not None and grant.reason is not None and is_by_loss(error):
            raise unknown from grant.loss()  # LeaseLost would say that nothing was written
        raise


def _read(found: str | bytes | None) -> dict[str, Any] | None:
    if found is None:
        return None
    said: dict[str, Any] = json.loads(found)
    return said


def _client(source: ClientSource) -> Client | CoordinatorLike:
    return source() if callable(source) else source
