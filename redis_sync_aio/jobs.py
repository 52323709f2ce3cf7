"""Work that must be done once: by schedule (`once`, `once_per`), or for each request (`idempotent`).

All three hold an `AsyncLock` while the work runs, and keep a mark next to it that outlasts the lock. The mark is
written only if the lease holds at that moment, by the server's word, so a holder that was stopped for too long writes
nothing. When the work has been done, a cancellation does not keep the mark from being written.
[Cron jobs](https://redis-sync-aio.github.io/redis-sync-aio/guides/jobs/#with-a-scheduler) shows them with cron,
APScheduler, taskiq and SAQ.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import hashlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import is_dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from numbers import Number
from types import TracebackType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

from ._client.settings import Client
from ._core import logs
from ._core.arguments import Seconds, one_of, require_text, timeout_seconds, ttl_ms
from ._core.clock import now
from ._core.display import called, shown, text
from ._core.futures import Flight
from ._core.keys import (
    BEGINNING,
    DONE,
    FINGERPRINT,
    NOT_KEPT,
    RESULT,
    SlotState,
    is_done,
    is_forgotten,
    lock_keys,
    mark_key,
)
from ._core.name_templates import DAY, SlotName, check_template, escaped, names_from, text_of, without_fields
from ._core.redis_py_words import explains_words_of_redis_py
from ._leases.hold import leave_unentered
from ._leases.implicit import CoordinatorLike, keys_of
from ._leases.lease import Lease
from ._primitives.lock import AsyncLock, ClientSource, Synchronize, SynchronizeOrSkip, checked_source
from ._primitives.mark import JobMark
from ._transaction import transaction
from ._transactions.handle import Transaction
from .errors import CommandRefused, FingerprintMismatch, LeaseLost, NotHeld, ResultNotKept, RunInterrupted, SyncError

__all__ = ["Codec", "OnCrash", "forget", "idempotent", "once", "once_per"]

P = ParamSpec("P")
R = TypeVar("R")

NOT_JSON = (bytes, bytearray, set, frozenset, dt.date, dt.time, timedelta, UUID)
"""Types whose values JSON cannot represent, besides numbers that are neither int nor float; a datetime is a date."""
OnCrash: TypeAlias = Literal["again", "skip"]
"""The rule for a slot whose run did not come to its end: the next caller runs it again, or it is skipped."""


class Codec(Protocol):
    """Turns results into text and back. The module `json` is one."""

    def dumps(self, value: Any, /) -> str: ...
    def loads(self, text: str, /) -> Any: ...


@explains_words_of_redis_py
def once(
    client: Client | CoordinatorLike,
    name: str,
    *,
    slot: object = "",
    keep: Seconds = DAY,
    on_crash: OnCrash = "again",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
) -> AbstractAsyncContextManager[Lease | None]:
    """Return an async context manager: of all that enter it for one slot, one gets a lease. The others get None.

    A call that gets None logs the state of the slot (``job_skipped``) and tells observers
    ([`Skipped`][redis_sync_aio.instrumentation.Skipped]): it is done, an earlier run failed, or it is running.

    Args:
        client: A `redis.asyncio.Redis` or `RedisCluster`, or a `Coordinator`.
        name: The name of the job.
        slot: What is done once, such as a date. Its text follows the name after a colon, its own colons as ``%3A``.
            Bytes are UTF-8 text. Default: the job has one slot.
        keep: How long the slot is remembered (seconds), longer than clocks and schedules may differ. It
            counts from the end of the run, for ``on_crash="skip"`` from its beginning. Default: a day.
        on_crash: What happens after a run that raised, was cancelled or was killed. "again" (default): the next caller
            runs, so the work runs at least once, and exactly once without a crash; a caller during a run waits for its
            end. "skip": the work runs at most once; a caller during a run gets None immediately.
        ttl: The ttl of the lock, renewed during the run: after a crash the next run begins so much later.
        timeout: How long to wait for another run in seconds (not for ``on_crash="skip"``). None: no limit.

    Raises:
        TypeError, ValueError: At the call: an argument is bad, or ``slot`` would differ at every call (a time with
            microseconds, an object without a text of its own).
        RuntimeError: The result was entered before.
        AcquireTimeout: Another run took longer than ``timeout``.
        LeaseLost: The lease was lost. The slot is not marked as done, unless the loss came while it was being marked.
        OutcomeUnknown: The answer to a mark was lost, and nothing told its outcome for ``retry_for`` seconds.
        WrongKeyType: The mark is of another program, or of `idempotent`. The body did not run.
        SyncError: As for `AsyncLock.acquire` at the beginning and the end.

    On cancellation the lock is released, or was not acquired. After the end of the body the mark is written all the
    same, in the background.

    Example:
        ```python
        from redis_sync_aio.jobs import once

        async with once(sync, "nightly", slot="2026-11-26") as lease:
            if lease is not None:
                await report(fence=lease.fence)
        ```
    """
    options = _checked(keep, on_crash, get_args(OnCrash), ttl, timeout)
    return _Once(client, slot_name(name, slot), options)


def slot_name(name: str, slot: object) -> str:
    """Return the name of one slot of a job; raise TypeError or ValueError for what is no name or no slot."""
    require_text(name, "name")
    if slot is None:
        raise TypeError("slot must not be None: leave it out, or name what is done once")
    if isinstance(slot, datetime) and slot.microsecond:
        raise ValueError(f"slot must be the same for all calls, not a time with microseconds: {slot}")
    text = text_of(slot.decode() if isinstance(slot, bytes) else f"{slot}", slot)
    return f"{name}:{escaped(text)}" if text else name


class _Options(NamedTuple):
    """The checked options of work that is done once."""

    keep_ms: int
    repeats: bool
    """True if work whose run did not come to its end is run again."""
    ttl: Seconds
    timeout: float | None


def _checked(keep: Seconds, on_crash: str, choices: tuple[str, ...], ttl: Seconds, timeout: Seconds | None) -> _Options:
    """Return the options; raise TypeError or ValueError for a bad one."""
    one_of(on_crash, choices, "on_crash")
    ttl_ms(ttl)
    return _Options(ttl_ms(keep, "keep"), on_crash == "again", ttl, timeout_seconds(timeout))


class _Work:
    """One call of work that is done once: its lock, and the mark next to it."""

    def __init__(self, client: Client | CoordinatorLike, name: str, options: _Options, pattern: str = "") -> None:
        self._lock = AsyncLock(client, name, ttl=options.ttl)
        self._lock._pattern = pattern
        self._mark = JobMark(client, self._lock._keys, options.keep_ms)
        self._options = options


class _Once(_Work, AbstractAsyncContextManager["Lease | None"]):
    """One entry into a slot, an ``async with`` that is entered once: it runs the body, or is skipped."""

    _entered: AbstractAsyncContextManager[Lease | None] | None = None

    async def __aenter__(self) -> Lease | None:
        if self._entered is not None:
            raise RuntimeError("this once() was entered before: call once() again for another run")
        self._entered = self._body()
        return await self._entered.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._entered is None:
            await leave_unentered("this once()", error)
            return None
        return await self._entered.__aexit__(kind, error, trace)

    def __call__(self, function: object) -> NoReturn:
        raise TypeError(
            f"once() is not a decorator, it is entered by `async with`: decorate {called(function)} with "
            f"once_per(client, {self._lock.name!r})"
        )

    @asynccontextmanager
    async def _body(self) -> AsyncIterator[Lease | None]:
        """Yield the lease, and mark the slot as done after that; yield None if it is skipped."""
        state = await self._state(await self._read())
        if state is None:
            skips, lock, said = not self._options.repeats, self._lock, None
            lease = await (lock.try_acquire() if skips else lock.acquire(timeout=self._options.timeout))
            if lease is not None:
                async with lease:
                    begun, mark = now(), self._mark
                    said = self._parsed(await (mark.begin(lease, {}) if skips else mark.read_under(lease)))
                    if said is None or not (skips or is_done(said)):
                        yield lease
                        # The body has had its effect: on cancellation this is finished in the background.
                        await mark.write(lease, {DONE: True}, now() - begun if skips else 0.0)
                        return
            state = "running" if said is None else "done" if is_done(said) else "failed"
        logs.job_skipped(self._lock.name, state)
        if (observers := self._mark.hub().observing.observers) is not None:
            observers.skipped(self._lock.name, self._lock._pattern, state)
        yield None

    async def _state(self, said: Mapping[str, Any] | None) -> SlotState | None:
        """Return the state of a slot whose mark says ``said``; None: the body may run."""
        while said is not None and not is_done(said):
            if self._options.repeats:
                return None  # it waits for a run, and repeats one that failed
            if await self._lock.locked():
                return "running"
            before, said = said, await self._read()
            if said == before:  # that run had released its lock, or lost it, and had written nothing after its end
                return "failed"
        return None if said is None else "done"

    async def _read(self) -> dict[str, Any] | None:
        return self._parsed(await self._mark.read())

    def _parsed(self, found: bytes | None) -> dict[str, Any] | None:
        said = None if found is None else self._mark.parsed(found)
        if said is not None and FINGERPRINT in said:
            raise self._mark.foreign("idempotent() has written it", by="once() or once_per()")
        return said


@explains_words_of_redis_py
def once_per(
    client: ClientSource,
    name: str,
    *,
    keep: Seconds | None = None,
    on_crash: OnCrash = "again",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
    tz: tzinfo = UTC,
) -> SynchronizeOrSkip:
    """Decorate a coroutine function: of all calls for one slot, on all machines, one runs. The others return None.

    A call that returns None without running logs why, and tells observers, as [`once`][redis_sync_aio.once] does.

    Args:
        client: As for `once`, or a function without arguments that returns one, called at each call.
        name: The name of the job with its slot. ``{now:%Y-%m-%d}`` is the time of the call by the clock of this
            machine, in the format of `datetime.strftime`. Other fields are arguments of the function:
            ``"report:{customer}:{now:%Y-%m-%d}"``. The characters that separate two fields are escaped in the values:
            ``%3A`` for a colon.
        keep: How long the slot is remembered (seconds), longer than the time that the format names. None:
            twice that time, and at least a day.
        tz: The time zone of ``{now}``. Default: UTC. When clocks are set back, the second hour is a slot of its own,
            with its offset in the name.

    Raises:
        TypeError, ValueError: At decoration: an argument is bad, a field is neither the time nor an argument, the time
            has no format or one that is finer than a minute, or ``keep`` does not fit the format.

    The other arguments are those of [`once`][redis_sync_aio.once]. A call raises whatever the function raises, and
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
    options = _checked(seconds, on_crash, get_args(OnCrash), ttl, timeout)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        signature = slots.signature(function)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            async with _Once(client_of_call(), slots.of(bound.arguments), options, name) as lease:
                return None if lease is None else await function(*args, **kwargs)

        return call

    return decorate


async def forget(client: Client | CoordinatorLike, name: str, *, slot: object = "") -> bool:
    """Forget a slot of a job or the result of a request, so that the next call runs it.

    A run that is in progress is not ended, and marks its slot as done at its end.

    Args:
        client: As for `once`.
        name: The name of the job, or that of the request, as `inspect` and ``redis-sync-aio ls --all`` show it.
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
        found = await tx.getrange(key, 0, BEGINNING - 1)
        seen = bool(found and not is_forgotten(found)) or seen  # an earlier attempt may have been executed unheard
        tx.multi()
        tx.delete(key)

    await transaction(client, body, key, idempotent=True)
    return seen


@explains_words_of_redis_py
def idempotent(
    client: ClientSource,
    name: str,
    *,
    keep: Seconds = DAY,
    on_crash: Literal["again", "raise"] = "again",
    ttl: Seconds = 30.0,
    timeout: Seconds | None = None,
    fingerprint: str | None = None,
    codec: Codec = json,
) -> Synchronize:
    """Decorate a coroutine function: of all calls with one name the first one runs, and all get its result.

    The result is kept as text, and each call gets what the codec makes of it. A call that raises keeps nothing.

    If the result cannot be encoded, decoded or written, the call that ran returns the value of the function itself, the
    log says why, and later calls raise ResultNotKept. Only if the server takes no mark at all, they do what
    ``on_crash`` says.

    Args:
        client: As for `once_per`.
        name: The name of the request. It may refer to arguments of the function: ``"payment:{request_id}"``.
        keep: How long the result is kept (seconds). Default: a day.
        on_crash: What the next call does after a run that did not end. "again" (default): run. "raise": raise
            RunInterrupted until ``keep`` has passed or the mark is deleted; for work that must not happen twice.
        ttl: The ttl of the lock, renewed during the run: after a crash the next run begins so much later.
        timeout: How long a call waits for another one that runs with its name (seconds). 0: raise
            AcquireTimeout immediately. None: until it has a result.
        fingerprint: What else must be equal in two calls with one name: ``"{amount}:{account}"``. None: nothing. A call
            that differs is refused immediately, also while the first one runs.
        codec: An object with ``dumps``, which returns text, and ``loads``. Default: JSON.

    Raises:
        TypeError, ValueError: At decoration: an argument is bad, a field is not an argument of the function, or the
            function is annotated to return what JSON cannot represent, and there is no other codec.

    A call raises whatever the function raises, the errors of `AsyncLock.acquire`, FingerprintMismatch, RunInterrupted,
    ResultNotKept, WrongKeyType for a mark of another program, and LeaseLost if the lock was lost during the run: then
    nothing is kept, or it is not known. On cancellation during the run nothing is kept; after it, the result is kept in
    the background.

    Example:
        ```python
        from redis_sync_aio.jobs import idempotent

        @idempotent(sync, "payment:{request_id}", fingerprint="{amount}")
        async def pay(request_id: str, amount: int) -> dict[str, str]: ...
        ```
    """
    templates = [check_template(name, "name")]
    client_of_call = checked_source(client, without_fields(name), ttl)
    if not all(callable(getattr(codec, what, None)) for what in ("dumps", "loads")):
        raise TypeError(f"codec must have the functions dumps and loads, as the module json has, not {shown(codec)}")
    if fingerprint is not None:
        templates.append(require_text(check_template(fingerprint, "fingerprint"), "fingerprint"))
    options = _checked(keep, on_crash, ("again", "raise"), ttl, timeout)

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        names = names_from(function, templates)
        if codec is json:
            _check_returned(function)

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            own, *rest = names(args, kwargs)
            own_print = hashlib.sha256("".join(rest).encode()).hexdigest()
            request = _JobCall(client_of_call(), own, options, own_print, codec)
            result: R = await request.answer(functools.partial(function, *args, **kwargs))
            return result

        return call

    return decorate


class _JobCall(_Work):
    """One call with a name, of which one runs."""

    _answered = False
    """True if ``_result`` is what the call returns: whatever fails after that is no failure of the call."""
    _result: Any = None

    def __init__(
        self, client: Client | CoordinatorLike, name: str, options: _Options, fingerprint: str, codec: Codec
    ) -> None:
        super().__init__(client, name, options)
        self._fingerprint, self._codec = fingerprint, codec

    async def answer(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result that another call has kept, or run ``function`` under the lock.

        Of the calls of this process one waits for the lock, for all of them (`Flight`). The others get what it finds,
        and one takes its place if it leaves without a result.
        """
        timeout = self._options.timeout
        ends = math.inf if timeout is None else now() + timeout
        seen, flights = await self._mark.read(), self._mark.hub().flights
        while not self._is_kept(seen):
            others, left = flights.get(self._mark.id), ends - now()
            if others is None or left <= 0 or others.leader is asyncio.current_task():
                await self._lead(None if ends == math.inf else max(0.0, left), function, seen, flights)
                return self._result
            seen = await others.next(seen, None if ends == math.inf else left)
        return self._read_result(seen)

    async def _lead(
        self,
        timeout: float | None,
        function: Callable[[], Awaitable[Any]],
        seen: bytes | None,
        flights: dict[bytes, Flight],
    ) -> None:
        """Acquire the lock, and get a result."""
        flight = Flight()
        leads = flights.setdefault(self._mark.id, flight) is flight
        try:
            async with self._lock.acquire(timeout=timeout) as lease:
                await self._run(lease, function, seen, flight)
        except SyncError:
            if not self._answered:  # else the release failed, and the lock ends with its ttl
                raise
        finally:
            if leads:
                del flights[self._mark.id]
            flight.tell()

    async def _run(
        self, lease: Lease, function: Callable[[], Awaitable[Any]], seen: bytes | None, flight: Flight
    ) -> None:
        """Run the function under ``lease``, unless another call has kept a result."""
        begun, repeats = {FINGERPRINT: self._fingerprint}, self._options.repeats
        # A run that did not end is replaced, unless it must be reported. ``seen`` may be outdated: `begin` compares.
        while (found := await self._mark.begin(lease, begun, seen if repeats else None)) is not None:
            if self._is_kept(found):
                flight.tell(found)
                self._result, self._answered = self._read_result(found), True
                return
            if not repeats:
                raise RunInterrupted(name=self._lock.name, mark=self._mark.key)
            seen = found
        flight.tell(self._mark.text_of(lease, begun))
        try:
            value = await function()
        except BaseException as error:
            if repeats or isinstance(error, Exception):  # of a cancelled run it is not known how far it came
                self._mark.forget(lease, begun, functools.partial(_note, error))
            raise
        # The function has had its effect. Nothing is awaited before the result is sent, and nothing makes the mark
        # one of a run that did not end.
        self._result, outcome = self._encoded(value)
        kept = await self._keep(lease, begun, outcome)
        self._answered = True
        if kept is not None:
            flight.tell(kept)

    def _encoded(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Return the result of a call whose function returned ``value``, and what the mark says of it."""
        try:
            kept = self._codec.dumps(value)
            if not isinstance(kept, str):
                raise TypeError(f"dumps() of the codec must return str, not {shown(kept)}")
            return self._codec.loads(kept), {RESULT: kept}
        except Exception as error:
            logs.result_not_kept(self._lock.name, self._mark.key, error)
            return value, {NOT_KEPT: _described(error)}

    async def _keep(self, lease: Lease, begun: dict[str, str], outcome: dict[str, str]) -> bytes | None:
        """Write the outcome of the run, and return the text of the mark; None if the server did not take it."""
        try:
            try:
                return await self._mark.write(lease, begun | outcome)
            except CommandRefused as error:
                if RESULT not in outcome:
                    raise
                logs.result_not_kept(self._lock.name, self._mark.key, error)
                return await self._mark.write(lease, begun | {NOT_KEPT: _described(error)})
        except (LeaseLost, NotHeld):
            raise  # another run may have begun
        except SyncError as error:
            logs.result_not_kept(self._lock.name, self._mark.key, error)
            return None

    def _is_kept(self, found: bytes | None) -> bool:
        """Return whether ``found`` is the mark of a run that has returned; raise if it is of another request."""
        said = None if found is None else self._parsed(found)
        if said is None:
            return False
        if said[FINGERPRINT] != self._fingerprint:
            raise FingerprintMismatch(name=self._lock.name)
        return RESULT in said or NOT_KEPT in said

    def _read_result(self, found: bytes | None) -> Any:
        """Return the result that a mark has; raise ResultNotKept if it has none, or none that can be read."""
        said = None if found is None else self._parsed(found)
        assert said is not None
        if NOT_KEPT in said:
            raise ResultNotKept(name=self._lock.name, mark=self._mark.key, cause=said[NOT_KEPT])
        try:
            return self._codec.loads(said[RESULT])
        except Exception as error:
            raise ResultNotKept(name=self._lock.name, mark=self._mark.key, cause=_described(error)) from error

    def _parsed(self, found: bytes) -> dict[str, Any] | None:
        said = self._mark.parsed(found)
        if said is not None and not all(isinstance(said.get(part, ""), str) for part in (RESULT, NOT_KEPT)):
            raise self._mark.foreign(f"it says {text(found)[:100]!r}")
        if said is not None and not isinstance(said.get(FINGERPRINT), str):
            raise self._mark.foreign("once() or once_per() has written it", by="idempotent()")
        return said


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")


def _note(error: BaseException, other: SyncError) -> None:
    """Attach to ``error`` of a run that its mark was not deleted."""
    error.add_note(f"redis_sync_aio: the next call may get RunInterrupted, as the mark was not deleted: {other}")


def _check_returned(function: Callable[..., Any]) -> None:
    """Raise TypeError if ``function`` is annotated to return something that JSON certainly cannot represent."""
    try:
        returned = get_type_hints(function).get("return")
    except Exception:
        return  # an annotation that is not known at run time
    if (part := _not_json(returned)) is not None:
        raise TypeError(
            f"{called(function)} returns {part.__name__}, which JSON cannot represent, so its result could not be "
            "kept: return dicts, lists, text and numbers, or pass a codec"
        )


def _not_json(annotation: Any) -> type | None:
    """Return a type in ``annotation`` whose values JSON cannot represent; None if there is certainly none."""
    origin = get_origin(annotation) or annotation
    if isinstance(origin, type):
        other_number = issubclass(origin, Number) and not issubclass(origin, (int, float))
        if other_number or is_dataclass(origin) or issubclass(origin, NOT_JSON):
            return origin
    parts = get_args(annotation)
    if origin is dict and parts and (get_origin(parts[0]) or parts[0]) is tuple:
        return tuple
    inner = parts if origin in (dict, list, tuple, Union, UnionType) else ()
    return next((found for part in inner if (found := _not_json(part)) is not None), None)
