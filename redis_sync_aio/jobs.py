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
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, tzinfo
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar, get_args

from ._acquire.binding import CoordinatorLike
from ._acquire.implicit import hub_of, keys_of
from ._client.error_replies import is_transient
from ._client.retry import RETRY
from ._client.settings import Client
from ._core import logs
from ._core.arguments import Seconds, one_of, timeout_seconds, ttl_ms
from ._core.clock import now
from ._core.display import shown
from ._core.keys import SlotState, lock_keys, mark_key
from ._core.marks import is_done
from ._core.name_templates import check_template, escaped, names_from, text_of, without_fields
from ._core.slot_times import DAY, SlotName
from ._leases.cancel_on_loss import is_by_loss
from ._leases.hold import leave_unentered
from ._leases.lease import Lease, grant_of
from ._transactions.handle import Transaction
from .errors import FingerprintMismatch, OutcomeUnknown, RunInterrupted, SyncError
from .lock import AsyncLock, ClientSource, Synchronize, SynchronizeOrSkip, checked_source
from .transaction import transaction

__all__ = ["Codec", "OnCrash", "OnInterrupted", "SlotState", "forget", "idempotent", "once", "once_per"]

P = ParamSpec("P")
R = TypeVar("R")

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
    keep: Seconds = DAY,
    on_crash: OnCrash = "skip",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
) -> AbstractAsyncContextManager[Lease | None]:
    """Return an async context manager: of all that enter it for one slot, one gets a lease. The others get None.

    A call that gets None logs the state of the slot (``job_skipped``) and tells observers
    ([`Skipped`][redis_sync_aio.instrumentation.Skipped]): it is done, an earlier run failed, or it is running.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, or a `Coordinator`.
        name: The name of the job.
        slot: What is done once, such as a date. Its text follows the name after a colon, with its own colons escaped
            as ``%3A``. Bytes are UTF-8 text. Default: the job has one slot.
        keep: How long the slot is remembered: seconds or timedelta, longer than clocks and schedules may differ. It
            counts from the beginning of the run for ``on_crash="skip"``, else from its end. Default: a day.
        on_crash: What happens after a run that raised, was cancelled or was killed. "skip" (default): it is not
            repeated, so the work runs at most once; a caller that comes during a run gets None immediately. "again":
            the next caller runs, so the work runs at least once, and exactly once without a crash; a caller that comes
            during a run waits for its end.
        ttl: The ttl of the lock, renewed during the body: after a crash the next run begins so much later.
        timeout: How long to wait for another run (``on_crash="again"``): seconds or timedelta. None: no limit.

    Raises:
        TypeError, ValueError: At the call: an argument is bad, or ``slot`` would be another one at every call (a time
            with microseconds, an object without a text of its own).
        RuntimeError: The result was entered before.
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
    ms, limit = _checked_options(keep, on_crash, ttl, timeout), timeout_seconds(timeout)
    whole = slot_name(name, slot)
    lock = AsyncLock(client, whole, ttl=ttl)
    run = _Run(client, lock, _Mark(client, lock, ms / 1000, "keep"), on_crash, limit)
    return _Once(name, run)


def slot_name(name: str, slot: object) -> str:
    """Return the name of one slot of a job; raise TypeError or ValueError for what is no name or no slot."""
    if not isinstance(name, str):
        raise TypeError(f"name must be str, not {shown(name)}")
    if not name:
        raise ValueError("name must not be empty")
    if slot is None:
        raise TypeError("slot must not be None: leave it out, or name what is done once")
    if isinstance(slot, datetime) and slot.microsecond:
        raise ValueError(f"slot must be the same for all calls, not a time with microseconds: {slot}")
    text = text_of(slot.decode() if isinstance(slot, bytes) else f"{slot}", slot)
    return f"{name}:{escaped(text)}" if text else name


def _checked_options(keep: Seconds, on_crash: OnCrash, ttl: Seconds, timeout: Seconds | None) -> int:
    """Return ``keep`` in milliseconds; raise TypeError or ValueError for a bad argument of `once`."""
    one_of(on_crash, get_args(OnCrash), "on_crash")
    ttl_ms(ttl)
    timeout_seconds(timeout)
    return ttl_ms(keep, "keep")


class _Once(AbstractAsyncContextManager["Lease | None"]):
    """The result of `once`: an ``async with`` that is entered once."""

    def __init__(self, name: str, run: _Run) -> None:
        self._name = name
        self._run = run
        self._body: AbstractAsyncContextManager[Lease | None] | None = None

    async def __aenter__(self) -> Lease | None:
        if self._body is not None:
            raise RuntimeError("this once() was entered before: call once() again for another run")
        self._body = self._run.body()
        return await self._body.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._body is None:
            await leave_unentered("this once()", error)
            return None
        return await self._body.__aexit__(kind, error, trace)

    def __call__(self, function: object) -> NoReturn:
        raise TypeError(
            f"once() is not a decorator, it is entered by `async with`: decorate {function!r} with "
            f"once_per(client, {self._name!r})"
        )


class _Run:
    """One entry into a slot: it runs the body, or is skipped."""

    def __init__(
        self,
        client: Client | CoordinatorLike,
        lock: AsyncLock,
        mark: _Mark,
        on_crash: OnCrash,
        timeout: float | None,
        pattern: str = "",
    ) -> None:
        self._client = client
        self._lock = lock
        self._mark = mark
        self._skips = on_crash == "skip"
        self._timeout = timeout
        self._pattern = lock._pattern = pattern

    @asynccontextmanager
    async def body(self) -> AsyncIterator[Lease | None]:
        """Yield the lease, and mark the slot as done after that; yield None if it is skipped."""
        state = None if (found := await self._mark.read()) is None else await self._state(found)
        if state is None:
            skips, lock = self._skips, self._lock
            lease = await (lock.try_acquire() if skips else lock.acquire(timeout=self._timeout))
            if lease is not None:
                async with lease:
                    begun = now()
                    if (found := await self._mark.begin(lease, {} if skips else None)) is None:
                        yield lease
                        await self._mark.write(lease, {"done": True}, now() - begun if skips else 0.0)
                        return
            state = "running" if found is None else "done" if is_done(found) else "failed"
        logs.job_skipped(self._lock.name, state)
        if (observers := hub_of(self._client).observers) is not None:
            observers.skipped(self._lock.name, self._pattern, state)
        yield None

    async def _state(self, found: Mapping[str, Any] | None) -> SlotState | None:
        """Return the state of a slot whose mark says ``found``; None: nothing any more."""
        while found is not None and not is_done(found):
            if await self._lock.locked():
                return "running"
            before, found = found, await self._mark.read()
            if found == before:  # that run had released its lock, or lost it, and had written nothing after its end
                return "failed"
        return None if found is None else "done"


def once_per(
    client: ClientSource,
    name: str,
    *,
    keep: Seconds | None = None,
    on_crash: OnCrash = "skip",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
    tz: tzinfo = UTC,
) -> SynchronizeOrSkip:
    """Decorate a coroutine function: of all calls for one slot, on all machines, one runs. The others return None.

    A call that returns None without running logs why, and tells observers, as [`once`][redis_sync_aio.jobs.once] does.

    Args:
        client: As for `once`, or a function without arguments that returns one, called at each call.
        name: The name of the job with its slot. ``{now:%Y-%m-%d}`` is the time of the call by the clock of this
            machine, in the format of `datetime.strftime`. Other fields are arguments of the function:
            ``"report:{customer}:{now:%Y-%m-%d}"``. The characters that separate two fields are escaped in the values:
            ``%3A`` for a colon.
        keep: How long the slot is remembered: seconds or timedelta, longer than the time that the format names. None:
            twice that time, and at least a day.
        tz: The time zone of ``{now}``. Default: UTC. When clocks are set back, the hour that comes a second time is a
            slot of its own: its offset follows the time in the name.

    Raises:
        TypeError, ValueError: At decoration: an argument is bad, a field is neither the time nor an argument, the time
            has no format or one that is finer than a minute, or ``keep`` does not fit the format.

    The other arguments are those of [`once`][redis_sync_aio.jobs.once]. A call raises whatever the function raises, and
    the errors of `once`.

    Example:
        ```python
        from redis_sync_aio.jobs import once_per

        @once_per(sync, "nightly:{now:%Y-%m-%d}")
        async def nightly() -> None: ...
        ```
    """
    check_template(name, "name", "; the time of the call is {now:%Y-%m-%d}")
    client_of_call = checked_source(client, without_fields(name), ttl)
    slots = SlotName(name, tz)
    seconds = slots.keep(None if keep is None else ttl_ms(keep, "keep") / 1000)
    _checked_options(seconds, on_crash, ttl, timeout)
    limit = timeout_seconds(timeout)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        signature = slots.signature(function)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            source = client_of_call()
            lock = AsyncLock(source, slots.of(bound.arguments), ttl=ttl)
            run = _Run(source, lock, _Mark(source, lock, seconds, "keep"), on_crash, limit, name)
            async with run.body() as lease:
                return None if lease is None else await function(*args, **kwargs)

        return call

    return decorate


async def forget(client: Client | CoordinatorLike, name: str, *, slot: object = "") -> bool:
    """Forget a slot of a job or the result of a request, so that the next call runs it.

    A run that is in progress is not ended, and marks its slot as done at its end.

    Args:
        client: As for `once`.
        name: The name of the job, or the key of the request, as `inspect` and ``redis-sync-aio ls --all`` show it.
        slot: The slot, as for `once`. That of `once_per` is part of the name.

    Returns:
        True if there was a mark. False: nothing was known of it.

    Raises:
        TypeError, ValueError: At the call: an argument is bad.
        SyncError: As for `transaction`.

    On cancellation the mark was deleted, or is as before.

    Example:
        ```python
        from redis_sync_aio.jobs import forget

        await forget(sync, "nightly", slot="2026-11-26")
        ```
    """
    key = mark_key(keys_of(client, slot_name(name, slot), lock_keys))
    seen = False

    async def body(tx: Transaction) -> None:
        nonlocal seen
        seen = bool(await tx.exists(key)) or seen  # an earlier attempt may have been executed unheard
        tx.multi()
        tx.delete(key)

    await transaction(client, body, key, idempotent=True)
    return seen


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
    client_of_call = checked_source(client, without_fields(key), lock_ttl)
    if not all(callable(getattr(codec, what, None)) for what in ("dumps", "loads")):
        raise TypeError(f"codec must have the functions dumps and loads, as the module json has, not {shown(codec)}")
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
            source, own_print = client_of_call(), hashlib.sha256("".join(rest).encode()).hexdigest()
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

    async def write(self, lease: Lease, new: Mapping[str, Any], since: float = 0.0) -> None:
        """Make it say what is ``new``; ``since``: seconds of its time that have passed."""
        ms = max(1, self._ms - int(since * 1000))

        async def attempt() -> None:
            async with lease.transaction() as tx:
                tx.multi()
                tx.set(self._key, json.dumps(new), px=ms)

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
