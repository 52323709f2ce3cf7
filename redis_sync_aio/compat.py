"""A drop-in replacement for redis-py's lock: ``client.lock("orders:42", lock_class=Lock)``.

Code written for `redis.asyncio.lock.Lock` keeps working, on this package's queue. The improvements:

- A waiter is woken by the release, in the order of arrival. It does not poll, and is not overtaken.
- A cancelled ``acquire()`` leaves nothing behind, and a cancelled ``release()`` still releases.
- After a lost connection ``acquire()`` never returns False for a lock that it took, and ``release()`` never raises
  LockNotOwnedError for a release that happened: commands are repeated with their token until the answer is known, for
  10 seconds.
- A task whose lock ran out cannot release, extend or own what another task holds by now through the same object.
- An error of the release does not replace the error of the ``async with`` body; it becomes a note on it.

As before, possession is a token on the lock object, and a lock lasts until it is released or its ``timeout`` has
passed. It is not renewed, the body is not cancelled when it is lost, and closing the client does not release it.
`redis_sync_aio.AsyncLock` does all that, and gives fences. Locks of all three kinds exclude each other.

[The other differences](https://redis-sync-aio.github.io/redis-sync-aio/migration/redis-py/)
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast
from weakref import WeakKeyDictionary, ref

from redis.asyncio.lock import Lock as RedisLock
from redis.exceptions import LockError, LockNotOwnedError, RedisError

from ._client.replies import redis_errors
from ._client.settings import Client, RedisClient, encode
from ._client.valkey_py import accepted
from ._core import logs
from ._core.arguments import real_seconds, ttl_ms
from ._core.cancellation import give_up_on, leaving, redeliver_cancellation
from ._core.clock import now
from ._core.display import text
from ._core.keys import lock_keys
from ._engine.commands import read_renew
from ._leases.acquisition import Request, acquire
from ._leases.grant import Grant
from ._leases.implicit import hub_of, keys_of
from ._leases.resource import Resource
from ._leases.waits import LAST_LOOK
from ._scripts.constants import FOREVER, ReleaseReply, Renewed
from ._transport.call import Call
from .errors import SyncError, Unreachable

if TYPE_CHECKING:
    from ._core.events import WithdrawnOutcome
    from ._inspection.views import HolderView

__all__ = ["Lock"]

GAP_MS, LOOK_EVERY = 150, 1.0
"""Milliseconds for which a busy lock is left free for stock locks that poll; seconds between two looks of waiters."""


@dataclass(slots=True, eq=False)
class _Acquired:
    """The token of one acquisition, and what became of it."""

    token: bytes
    deadline: float  # local clock
    task: ref[asyncio.Task[object]] | None
    grant: Grant | None = None
    released: bool = False  # through the object by which it was acquired

    def ended(self, *, released: bool) -> None:
        """Note that the lock was released, or was found to have ended before; tell observers, the first time."""
        self.released |= released
        if self.grant is not None and (observation := self.grant.observation) is not None:
            time_is_up = now() >= self.deadline
            observation.end(None if released else "expired" if time_is_up else "taken", time_is_up=time_is_up)


class Lock(RedisLock):
    """A distributed lock with the interface of `redis.asyncio.lock.Lock`, on this package's queue.

    The token is ``lock.local.token`` (bytes; None when not held), and may be set by hand to pass a held lock on to
    another object or process. A task that acquired through this object, and has not released, acts on its own token as
    long as another living task holds the lock through it; otherwise every task acts on the object's token.

    Errors are redis-py's: LockError and LockNotOwnedError as documented there, ConnectionError when Redis is out of
    reach, ResponseError or a subclass when it refuses a command. TypeError and ValueError are for bad arguments.

    Args:
        redis: A `redis.asyncio.Redis` or `RedisCluster`; its implicit coordinator is used.
        name: The key; excludes all other locks on that key.
        timeout: Seconds until the lock ends by itself; None or 0: never.
        sleep: Seconds between two tries of an acquire with ``token=``.
        blocking: True if `acquire` waits.
        blocking_timeout: For how many seconds `acquire` waits; None: forever.
        thread_local: Keep the token in thread-local storage, so that only this thread sees it.
        raise_on_release_error: Raise when the lock is lost at the end of ``async with``; False: log a warning.

    All of these are attributes that may be changed. Seconds are real numbers of any type, or a timedelta. Subclasses
    may override `acquire`, `release`, `extend` and `reacquire`. To override what redis-py's lock has inside
    (``do_acquire``, ``lua_release`` …) is a TypeError when the class is made: it would never be called.
    """

    local: threading.local | SimpleNamespace

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        unused = [name for name in _INSIDE if getattr(cls, name) is not getattr(Lock, name)]
        if unused:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(unused)}, which redis_sync_aio.compat.Lock does not use: "
                "override acquire(), release(), extend() or reacquire()"
            )

    def _inside(self, *args: object, **options: object) -> NoReturn:
        raise NotImplementedError(
            f"this is an inside of redis-py's lock that {type(self).__name__} does not have: use acquire(), release(), "
            "extend() or reacquire()"
        )

    do_acquire: Any = _inside
    do_release: Any = _inside
    do_extend: Any = _inside
    do_reacquire: Any = _inside
    register_scripts: Any = _inside

    def __init__(
        self,
        redis: Client, name: str | bytes | memoryview, timeout: float | None = None, sleep: float = 0.1,
        blocking: bool = True, blocking_timeout: float | None = None, thread_local: bool = True,
        raise_on_release_error: bool = True,
    ) -> None:  # fmt: skip
        self.redis: RedisClient = accepted(redis)  # no RedisLock.__init__: it ties the class to its client's scripts
        self.name = name  # its setter needs the client
        for seconds, what in ((sleep, "sleep"), (blocking_timeout, "blocking_timeout")):
            real_seconds(seconds, what)
        self.timeout: float | None = timeout
        self.sleep: float = sleep
        self.blocking: bool = blocking
        self.blocking_timeout: float | None = blocking_timeout
        self.thread_local: bool = bool(thread_local)
        self.raise_on_release_error: bool = raise_on_release_error
        self.local = threading.local() if self.thread_local else SimpleNamespace()
        self.local.token = None
        self._ttl_ms()

    @property
    def name(self) -> str | bytes | memoryview:
        """The key. Another one may be set: what is held stays held under the old one, as with redis-py's lock."""
        return self._name

    @name.setter
    def name(self, name: str | bytes | memoryview) -> None:
        self._keys = keys_of(self.redis, bytes(name) if isinstance(name, memoryview) else name, lock_keys)
        self._name = name
        self._latest_resource: Resource | None = None  # kept, so that it need not be made for each use
        self._mine: WeakKeyDictionary[asyncio.Task[object], _Acquired] = WeakKeyDictionary()
        self._latest = _Acquired(b"", 0.0, None)
        self._release_uncertain: bytes | None = None  # a release of this token was given up, but continues

    async def __aenter__(self) -> Self:
        if await self.acquire():
            return self
        raise self._error("Unable to acquire lock within the time specified")

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            exits = hub_of(self.redis).exits
            async with asyncio.timeout(None if error is None else exits.timeout_for(error)):
                await self.release()
        except TimeoutError:
            if error is None:
                raise
            give_up_on(text(self._keys.name), error)
        except (RedisError, SyncError) as failure:
            if isinstance(failure, LockError) and not self.raise_on_release_error:
                logs.log("not_owned_at_exit", lock=text(self._keys.name))
            elif error is None:
                raise
            else:
                error.add_note(f"redis_sync_aio: {failure}")
        except asyncio.CancelledError as again:
            # The release continues in the background. The body's error leaves; the cancellation stays due.
            if error is None or isinstance(error, asyncio.CancelledError):
                raise
            redeliver_cancellation(again, 0)  # tasks share this object: the requests before were not counted

    async def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: str | bytes | None = None
    ) -> bool:
        """Take the lock and return True, or return False if it was taken all the time allowed.

        One round trip when it is free; handed over by a push when not. ``blocking`` and ``blocking_timeout`` (0 or
        less: one try) replace the lock's own; they limit the wait for other holders, not for Redis to answer the
        first try. ``token`` is stored in the key instead of a unique one; such a request does not queue, it polls.

        On cancellation whatever the server did for this request is undone, without delaying the cancellation.
        """
        wait = self.blocking if blocking is None else blocking
        limit = real_seconds(
            self.blocking_timeout if blocking_timeout is None else blocking_timeout, "blocking_timeout"
        )
        chosen = None if token is None else encode(self.redis, token, "token")
        granting, observers = partial(self._granted, wait, limit, chosen), hub_of(self.redis).observing.observers
        if observers is None:
            return await granting() is not None
        refused: WithdrawnOutcome = "timeout" if wait and not (limit is not None and limit <= 0) else "taken"
        name = text(self._keys.name)
        return await observers.follow("lock", name, lambda _: granting(), refused=refused) is not None

    async def _granted(self, wait: bool, limit: float | None, chosen: bytes | None) -> Grant | None:
        """Return the grant of an `acquire`; None if the lock was taken all the time allowed."""
        if wait and limit is None and chosen is None:
            return await self._request(wait=True)
        ends = math.inf if limit is None else now() + limit
        if (grant := await self._request(chosen)) is not None:
            return grant
        left = ends - now()
        if not wait or not left > 0:
            return None
        timeout = None if left == math.inf else left
        try:
            if chosen is None:
                return await self._request(wait=True, timeout=timeout)
            async with asyncio.timeout(None if timeout is None else timeout + LAST_LOOK):
                return await self._poll(chosen, ends)
        except (TimeoutError, Unreachable) as error:
            # Without a cause Redis is well: the time was too short to answer this second request.
            if isinstance(error, Unreachable) and (error.__cause__ is not None or now() < ends):
                raise
            return None

    async def _poll(self, token: bytes, ends: float) -> Grant | None:
        """Ask for the lock again and again until ``ends`` (local clock)."""
        sleep = max(real_seconds(self.sleep, "sleep") or 0.0, 0.001)
        while (left := ends - now()) > 0:
            await asyncio.sleep(min(sleep, left))
            if (grant := await self._request(token)) is not None:
                return grant
        return None

    async def _request(
        self, token: bytes | None = None, *, wait: bool = False, timeout: float | None = None
    ) -> Grant | None:
        resource, ttl_ms = self._resource(), self._ttl_ms()
        request = _made(ttl_ms, auto_renew=False, identity=token, joins=False, wait=wait, look_every=LOOK_EVERY)
        with redis_errors():
            lease = await acquire(resource, request, timeout)
        if lease is None:
            return None
        resource.drop(lease)  # not kept for the caller: only a release or its timeout ends it
        task = _task()
        self.local.token = lease.wire_token
        acquired = _Acquired(lease.wire_token, lease.deadline, ref(task), lease)
        self._latest = self._mine[task] = acquired
        self._release_uncertain = None
        return lease

    async def release(self) -> None:
        """Give the lock back; the next waiter has it when this returns.

        The token is cleared when the server has answered, and only then. Raises LockError when nothing was acquired,
        LockNotOwnedError when the lock had ended or another client holds it (nothing was changed then).

        On cancellation, and after a ConnectionError, the release continues in the background. So it does when it is
        called in the clean-up of a cancellation, which waits for the coordinator's ``exit_timeout`` at most.
        """
        token = self._token()
        if token is None:
            raise self._error("Cannot release a lock that's not owned or is already unlocked.")
        if not await self._give_back(token, forget=True, error=leaving()):
            raise self._error("Cannot release a lock that's no longer owned", LockNotOwnedError)

    async def _give_back(self, token: bytes, *, forget: bool, error: BaseException | None = None) -> bool:
        """End the lock if it has this token, and return whether it had. ``forget``: the object's token, too."""
        resource = self._resource()
        outcome: asyncio.Future[Call] = resource.hub.loop.create_future()
        latest, mine = self._latest, self._mine.get(_task())
        uncertain, self._release_uncertain = self._release_uncertain == token, token

        def was_ours(call: Call) -> bool:
            # An earlier copy of this release may have been executed, and its answer lost or not waited for. Before our
            # deadline only this process can have ended the lock, so then it was that copy (P4).
            surely_ours = latest.token == token and call.sent < latest.deadline
            return call.reply == ReleaseReply.RELEASED or (surely_ours and (call.ambiguous or uncertain))

        def answered(call: Call) -> None:
            resource.forget_if_idle()
            if call.error is None:
                if forget and self._stored() == token:
                    self.local.token = None
                for it in (latest, mine):
                    if it is not None and it.token == token:
                        it.ended(released=was_ours(call))
                if self._release_uncertain == token:
                    self._release_uncertain = None
            if not outcome.done():
                outcome.set_result(call)

        resource.hub.manager.releases.undo(resource.keys, token, release_args=(GAP_MS,), done=answered)
        call, limit = None, resource.hub.retry_for
        with suppress(TimeoutError):
            exits = resource.hub.exits
            async with asyncio.timeout(limit if error is None else exits.timeout_for(error)):
                call = await outcome
        if call is None and error is not None:  # it leaves, and its clean-up continues without us
            give_up_on(resource.name, error)
            raise error
        if call is None:
            cause = resource.hub.connection_error_of(resource.keys)
            raise Unreachable(
                f"Redis did not confirm the release of {resource.name!r} in time: it is tried again in "
                "the background; check the server and the network"
            ) from cause
        if call.error is not None:
            with redis_errors():
                raise call.error
        return was_ours(call)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Awaitable[Literal[True]]:
        """Let the lock end ``additional_time`` seconds later, or with ``replace_ttl`` that long from now.

        To add takes two round trips: one asks for the time left, one sets the sum. Repeated, it is not added twice; of
        two additions at the same moment one may be lost. When no time is left the lock ends, and the next waiter has
        it.

        Raises LockError when nothing was acquired or the lock has no timeout, LockNotOwnedError as `release` does.
        """
        more = real_seconds(additional_time, "additional_time")
        if more is None or not math.isfinite(more):
            raise ValueError(f"additional_time must be finite, not {additional_time!r}")
        return self._extend(self._token_to("extend"), more, replace_ttl)

    async def _extend(self, token: bytes, more: float, replace_ttl: bool) -> Literal[True]:
        asked, left = now(), 0.0
        if not replace_ttl:
            holder = await self._holder()
            if holder is None or holder.token != text(token) or holder.remaining is None:
                raise self._error("Cannot extend a lock that's no longer owned", LockNotOwnedError)
            left = holder.remaining - (now() - asked)
        return await self._set(token, left + more, "extend")

    def reacquire(self) -> Awaitable[Literal[True]]:
        """Let the lock end ``timeout`` seconds from now. Raises as `extend` does."""
        return self._set(self._token_to("reacquire"), self._ttl_ms() / 1000, "reacquire")

    async def _set(self, token: bytes, duration: float, what: str) -> Literal[True]:
        ms, sent = round(duration * 1000), now()
        if ms > 0:
            with redis_errors():
                reply = await hub_of(self.redis).ask(
                    lambda commands, call: commands.renew(self._keys, token, call, ttl_ms=ms)
                )
            done = read_renew(reply) is Renewed.RENEWED
        else:
            done = await self._give_back(token, forget=False)
        if not done:
            for it in (self._latest, self._mine.get(_task())):
                if it is not None and it.token == token:
                    it.ended(released=False)
            raise self._error(f"Cannot {what} a lock that's no longer owned", LockNotOwnedError)
        if self._latest.token == token:
            self._latest.deadline = sent + ms / 1000
        return True

    async def locked(self) -> bool:
        """Return whether the lock has a holder."""
        return await self._holder() is not None

    async def owned(self) -> bool:
        """Return whether the lock is held with the caller's token."""
        holder, token = await self._holder(), self._token()
        return holder is not None and token is not None and holder.token == text(token)

    async def _holder(self) -> HolderView | None:
        with redis_errors():
            view = await hub_of(self.redis).look(self._keys, 1, whole=False)
        return view.holders[0] if view.holders else None

    def _stored(self) -> bytes | None:
        token: str | bytes | None = getattr(self.local, "token", None)  # not set in other threads; str if set by hand
        return None if token is None else encode(self.redis, token, "token")

    def _resource(self) -> Resource:
        resource = self._latest_resource = hub_of(self.redis).resource(self._keys, self._latest_resource)
        return resource

    def _token(self) -> bytes | None:
        """Return the token on which the current task may act; see the class."""
        stored, latest, mine = self._stored(), self._latest, self._mine.get(_task())
        if mine is None or mine.released or latest.task is None or latest.token != stored:
            return stored
        holder = latest.task()
        # Python 3.11 runs `wait_for(lock.acquire(), 5)` in a task of its own: what an ended task acquired is for all.
        return stored if holder is None or holder.done() else mine.token

    def _token_to(self, what: str) -> bytes:
        token = self._token()
        if token is None:
            raise self._error(f"Cannot {what} an unlocked lock")
        if not self.timeout:
            raise self._error(f"Cannot {what} a lock with no timeout")
        return token

    def _error(self, message: str, kind: type[LockError] = LockError) -> LockError:
        return kind(message, lock_name=text(self._keys.name))

    def _ttl_ms(self) -> int:
        return ttl_ms(real_seconds(self.timeout, "timeout"), "timeout") if self.timeout else FOREVER


_made = lru_cache(maxsize=100)(Request)  # looking a request up costs less than making one


def _task() -> asyncio.Task[object]:
    return cast("asyncio.Task[object]", asyncio.current_task())


_INSIDE = (
    *("do_acquire", "do_release", "do_extend", "do_reacquire", "register_scripts", "lua_release", "lua_extend"),
    *("lua_reacquire", "LUA_RELEASE_SCRIPT", "LUA_EXTEND_SCRIPT", "LUA_REACQUIRE_SCRIPT"),
)
"""Attributes of redis-py's lock that are not documented."""
