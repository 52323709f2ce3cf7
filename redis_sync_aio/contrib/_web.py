"""Parts of the integrations with web frameworks: names made of requests, waiting clients, answers to errors."""

from __future__ import annotations

import asyncio
import math
import string
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias, TypedDict, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

import anyio

from .._client.settings import Client
from .._coordinator import Coordinator
from .._core import logs
from .._core.arguments import Seconds, count, is_async, require_bool, timeout_seconds, ttl_ms
from .._core.keys import lock_keys
from .._core.name_templates import check_template, fields_of, fill_of, without_fields
from .._leases.hold import Acquiring
from .._leases.implicit import client_of
from .._leases.lease import BaseLease, Lease
from ..errors import (
    AcquireTimeout,
    CoordinatorClosed,
    LeaseLost,
    NotReplicated,
    OutOfMemory,
    QueueFull,
    Unreachable,
    WaitTimeout,
)

L = TypeVar("L", bound=BaseLease)

# -- answers -----------------------------------------------------------------------------------------------

LOCKED = 423
"""The status for a resource that others are working on: send the same request again later."""
FULL = 429
"""The status for a resource whose queue is full."""
UNAVAILABLE = 503
GONE = 499
"""The status that logs show for a client that has disconnected; no client gets it."""
BUSY_TEXT = "other requests are at work on this: try again later"
FULL_TEXT = "too many requests wait for this: try again later"
UNAVAILABLE_TEXT = "the service is not available: try again"
GONE_TEXT = "the client has gone"
TRY_AGAIN_LATER = 1013
"""The code that closes a websocket for one of these reasons."""

NOT_SERVED: tuple[type[Exception], ...] = (
    *(AcquireTimeout, NotReplicated, WaitTimeout, Unreachable, CoordinatorClosed, LeaseLost, OutOfMemory),
)
"""Errors after which the outcome of a request is unknown, or nothing was done, and a later one may succeed."""


def answered_kinds(also: Collection[type[Exception]]) -> tuple[type[Exception], ...]:
    """Return the errors to answer, ``also`` among them; raise TypeError for what is no class of exceptions."""
    kinds = (*NOT_SERVED, *also)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"also must be classes of exceptions, not {kind!r}")
    return kinds


def reasons(error: Exception, kinds: tuple[type[Exception], ...]) -> list[Exception]:
    """Return the errors of ``kinds`` that ``error`` consists of; an empty list if it has any other.

    A TaskGroup raises the errors of its tasks as a group. One other error among them, which may be a bug, must not be
    hidden by an answer that asks for another try. Groups of other types (`UndoFailed`) have a meaning of their own.
    """
    if isinstance(error, kinds):
        return [error]
    if type(error) is not ExceptionGroup:
        return []
    found = [reasons(one, kinds) for one in error.exceptions]
    return [one for several in found for one in several] if all(found) else []


_busy: WeakKeyDictionary[AcquireTimeout, int] = WeakKeyDictionary()
"""The statuses for leases that a request itself asked for, as opposed to those of locks inside its handler."""


def answer_to(method: str, path: str, error: Exception, *more: Exception) -> tuple[int, str, str]:
    """Return status, text and Retry-After for errors of a request; log them, unless others were just in the way.

    Retry-After has the whole seconds until the lease of the holder ends unless it is renewed.
    """
    if isinstance(error, AcquireTimeout) and (status := _busy.get(error)) is not None:
        return status, FULL_TEXT if status == FULL else BUSY_TEXT, str(max(1, math.ceil(error.remaining or 0)))
    logs.request_not_served(method, path, error, *more)
    return UNAVAILABLE, UNAVAILABLE_TEXT, "1"


def check_status(status: object) -> int:
    """Return ``status`` if it can say that a request was refused, else raise TypeError or ValueError."""
    number = count(status, "status", 400)
    if number > 599:
        raise ValueError(f"status must be 400 to 599, not {status!r}")
    return number


# -- what an application has -------------------------------------------------------------------------------


class SyncState(TypedDict):
    """The state of an application while it runs.

    Attributes:
        redis: The client of the application.
        sync: The coordinator of that client.
    """

    redis: Client
    sync: Coordinator


Source = Client | Coordinator | Callable[[], Client | Coordinator]
"""A client or a coordinator, or a function that makes one when the application starts."""


def check_source(source: Source) -> Source:
    """Return ``source``; raise TypeError unless it is a client, a coordinator, or a function that may return one."""
    if not callable(source):
        client_of(source)
    elif isinstance(source, type) or is_async(source):
        raise TypeError(
            "expected a client, a Coordinator, or a function without arguments that returns one, not "
            f"{'the class' if isinstance(source, type) else 'the coroutine function'} {source!r}"
        )
    return source


@asynccontextmanager
async def running(source: Source) -> AsyncIterator[SyncState]:
    """Yield client and coordinator, and close at the end what was made here."""
    async with AsyncExitStack() as stack:
        made = source() if callable(source) else source
        client = client_of(made)
        if callable(source):
            stack.push_async_callback(client.aclose)
        sync = made if isinstance(made, Coordinator) else Coordinator(client)
        if sync is not source:
            await stack.enter_async_context(sync)
        yield SyncState(redis=client, sync=sync)


# -- names -------------------------------------------------------------------------------------------------

TYPES: Mapping[str, type] = {"": str, "str": str, "int": int, "uuid": UUID}


class RequestName:
    """A template for the name of a lock, with the types of the values that come from the request.

    Raises TypeError or ValueError for what is wrong with the template, whatever the request is. ``others``: fields
    whose values do not come from the request.
    """

    def __init__(self, template: str, others: Collection[str] = ()) -> None:
        self.template = check_template(template, "name")
        lock_keys(without_fields(template).encode())
        if unused := set(others) - fields_of(template):
            raise ValueError(f"name {template!r} does not refer to {', '.join(sorted(map(repr, unused)))}")
        self.types: dict[str, type] = {}
        parts = []
        for literal, field, spec, conversion in string.Formatter().parse(template):
            parts.append(literal.replace("{", "{{").replace("}", "}}"))
            if field is None:
                continue
            if field in others or not field.isidentifier():
                self._check_value(field, others)
                parts.append(f"{{{field}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}")
                continue
            if spec is None or spec not in TYPES or conversion:
                raise ValueError(
                    f"name {template!r}: expected {{{field}}} or {{{field}:TYPE}} for a value of the request, with "
                    f"int, str or uuid as TYPE, not {f'!{conversion}' if conversion else spec!r}"
                )
            if self.types.setdefault(field, TYPES[spec]) is not TYPES[spec]:
                raise ValueError(f"name {template!r} gives {field!r} two types")
            parts.append(f"{{{field}}}")
        self._fill = fill_of("".join(parts))

    def _check_value(self, field: str, others: Collection[str]) -> None:
        """Raise ValueError for attributes and items of a value of the request, which is text or a number."""
        if missing := fields_of(f"{{{field}}}") - set(others):
            raise ValueError(
                f"name {self.template!r}: {field!r} looks into {missing.pop()!r}, a value of the request, which has "
                "no attributes or items here: say where it comes from (values=)"
            )

    def of(self, values: Mapping[str, object]) -> str:
        """Return the name for a request."""
        return self._fill(values)


# -- holding -----------------------------------------------------------------------------------------------


class Holding:
    """The lease that a handler asks for, and the answers if others are in the way.

    Raises TypeError or ValueError for a bad argument, whatever the request is.

    Args:
        template: The template of the name.
        others: The fields whose values do not come from the request.
        limit: The limit of the semaphore, checked. None: it is a lock.
        timeout: How long a request waits.
        ttl: How long the lease lasts unless it is renewed.
        max_waiting: How many requests may wait.
        status: The status of the answer for a busy name.
        leave_when_gone: True if a request leaves the queue when its client disconnects.
    """

    def __init__(
        self,
        template: str,
        others: Collection[str],
        limit: int | None,
        timeout: Seconds | None,
        ttl: Seconds,
        max_waiting: int | None,
        status: int,
        leave_when_gone: bool,
    ) -> None:
        self.name = RequestName(template, others)
        self.kind = "lock" if limit is None else "semaphore"
        busy = check_status(status)
        self.statuses = (busy,) if max_waiting is None else (busy, FULL)
        """The statuses of the answers: for a busy name first, for a full queue if there may be one."""
        self.leave_when_gone = require_bool(leave_when_gone, "leave_when_gone")
        self._limit = limit
        self._timeout, self._ttl = timeout_seconds(timeout), ttl_ms(ttl) / 1000
        self._max_waiting = None if max_waiting is None else count(max_waiting, "max_waiting")

    def of(
        self,
        held: Held,
        sync: Coordinator,
        name: str,
        gone: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> RequestLease:
        """Return the lease of a request, to be entered in its task; raise ValueError for a name that cannot be used.

        Args:
            held: The leases that the request holds already.
            sync: The coordinator.
            name: The name for this request.
            gone: A coroutine function that returns when the client has gone; None: this does not matter.
        """
        key = (self.kind, name, asyncio.current_task())
        return held.get(key) or RequestLease(self._acquire(sync, name), gone, self.statuses[0], held, key)

    def _acquire(self, sync: Coordinator, name: str) -> Acquiring[Lease]:
        ttl, most = self._ttl, self._max_waiting
        primitive = (
            sync.lock(name, ttl=ttl, max_waiting=most)
            if self._limit is None
            else sync.semaphore(name, limit=self._limit, on_mismatch="keep", ttl=ttl, max_waiting=most)
        )
        primitive._pattern = self.name.template
        return primitive.acquire(timeout=self._timeout)


@dataclass(eq=False)
class RequestLease:
    """A lease that all holds of its name in a task of a request share: the last of them to end releases it.

    Otherwise the second one would wait for the first. Entered, it gives the lease, or None if the client has gone.
    """

    own: Acquiring[Lease]
    gone: Callable[[], Coroutine[Any, Any, None]] | None
    status: int
    held: Held
    key: object
    lease: Lease | None = None
    holds: int = 0

    async def __aenter__(self) -> Lease | None:
        if self.lease is None:
            try:
                entering = self.own.__aenter__() if self.gone is None else enter_unless_gone(self.own, self.gone)
                self.lease = await entering
            except AcquireTimeout as error:
                if error.answered:
                    _busy[error] = FULL if isinstance(error, QueueFull) else self.status
                raise
            if self.lease is None:
                return None
            self.held[self.key] = self
        else:
            self.lease.check()
        self.holds += 1
        return self.lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lease is None:
            return
        self.holds -= 1
        if not self.holds:
            del self.held[self.key]
            await self.own.__aexit__(kind, error, trace)


Held: TypeAlias = dict[object, RequestLease]
"""The leases that a request holds."""


# -- waiting -----------------------------------------------------------------------------------------------


async def enter_unless_gone(hold: Acquiring[L], gone: Callable[[], Coroutine[Any, Any, None]]) -> L | None:
    """Enter ``hold``, or return None, with nothing held or queued, if ``gone()`` returns before that.

    The hold is entered in the task that calls this, so a loss cancels that one. On cancellation nothing is held. What
    ``gone()`` raises is raised.
    """
    lease: L | None = None
    watcher = asyncio.create_task(gone(), name="redis_sync_aio waits for a disconnect")
    try:
        with anyio.CancelScope() as scope:
            watcher.add_done_callback(lambda _: scope.cancel())
            lease = await hold.__aenter__()
    finally:
        watcher.cancel()
    if lease is None:
        watcher.result()
        return None
    try:  # nothing else may read from the client until this has ended
        await asyncio.wait([watcher])
        if not watcher.cancelled():
            watcher.result()
    except BaseException as error:
        await hold.__aexit__(type(error), error, error.__traceback__)
        raise
    return lease


def coordinator_in(state: object, where: str) -> Coordinator:
    """Return the coordinator of an application's ``state``; raise RuntimeError with advice if there is none."""
    sync = cast("Mapping[str, object]", state).get("sync") if isinstance(state, Mapping) else None
    if not isinstance(sync, Coordinator):
        raise RuntimeError(
            f"there is no Coordinator in the state of {where}. In tests, let the lifespan run: `with TestClient(app)` "
            "does that, httpx.ASGITransport does not: use redis_sync_aio.testing.run_lifespan(app)"
        )
    return sync
