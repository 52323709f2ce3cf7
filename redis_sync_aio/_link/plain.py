"""The executor without a link: the same scripts through the client's own pool, and no pushes.

Used where a link is impossible (a proxy that speaks RESP2 only, a user without pub/sub) or not wanted.
Every call runs in a task of its own, so the caller's cancellation never reaches redis-py (which swallows it
on Python < 3.12 when its socket timeout is set) and never closes a pooled connection.

A pool has many connections, so order must be made: the calls of one name run one after the other. That
is what keeps a clean-up behind the command it cleans up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial

import redis.exceptions
from redis.asyncio import Redis

from .._clock import now
from .._types import text
from ..backoff import Backoff
from ..errors import CoordinatorClosed, SyncError, Unreachable
from .adopt import dead_end_pool, send_once
from .call import TRANSIENT, Call, Reply, error_code, refusal

RETRY = Backoff(initial=0.01, cap=0.5)

# redis-py takes the code away from an error answer and makes it a class.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (redis.exceptions.NoScriptError, "NOSCRIPT"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
    (redis.exceptions.TryAgainError, "TRYAGAIN"),
    (redis.exceptions.AuthenticationError, "NOAUTH"),
)


class PlainExecutor:
    """Sends calls through ``client``, in order for each name."""

    pushes = False

    def __init__(self, client: Redis, response_timeout: float) -> None:
        self._client = client
        self._response_timeout = response_timeout
        self._queues: dict[bytes, deque[Call]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(self, call: Call) -> None:
        """Send ``call`` after the earlier calls about the same name."""
        queue = self._queues.get(call.name)
        if queue is not None:
            queue.append(call)
            # The one before it may be retried for longer than this one has time.
            asyncio.get_running_loop().call_later(max(0.0, call.expires - now()), self._expire, call)
        elif not self._closed:
            self._queues[call.name] = deque([call])
            self._start(call.name)

    def _expire(self, call: Call) -> None:
        if call.attempts == 0:
            call.fail(self.unreachable(call.name))

    def _start(self, name: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._work(name), name="redis_sync_aio calls")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: bytes, task: asyncio.Task[None]) -> None:
        """An unexpected error (of a credential provider, say) must not become a hang: the caller gets it."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            queue = self._queues[name]
            queue[0].fail(_unreachable(queue[0], error))
            self._start(name)

    async def _work(self, name: bytes) -> None:
        queue = self._queues[name]
        try:
            while queue:
                if not queue[0].over:
                    await self._run(queue[0])
                queue.popleft()
            del self._queues[name]
        except asyncio.CancelledError:
            if self._closed:
                raise
            # Not by us: `asyncio.run` cancels all tasks at its end, and those that release then need us still.
            queue[0].ambiguous = True
            if queue[0].once:
                queue[0].fail(self.unreachable(name))
            self._start(name)

    async def _run(self, call: Call) -> None:
        """Try until answered, refused or expired."""
        for delay in RETRY:
            call.sent = now()
            call.attempts += 1
            try:
                async with asyncio.timeout(max(min(call.expires - call.sent, self._response_timeout), 0.001)):
                    reply = await self._execute(call)
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                self._failed(call, error)
            else:
                call.answer(reply)
            if call.over:
                return
            await asyncio.sleep(max(0.0, min(delay, call.expires - now())))
            if now() >= call.expires:
                call.fail(call.trouble or self.unreachable(call.name))
                return

    async def _execute(self, call: Call) -> Reply:
        with suppress(redis.exceptions.NoScriptError):
            return await send_once(self._client, call.command())
        # Not while that error is handled: it would be the context of a timeout here, and be taken for the answer.
        return await send_once(self._client, call.command(with_source=True))

    def _failed(self, call: Call, error: Exception) -> None:
        error = _behind(error)
        code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
        if code is None and isinstance(error, redis.exceptions.ResponseError):
            trouble: SyncError = refusal(call.name, str(error))
            code = error_code(str(error))
        elif code is not None:
            trouble = refusal(call.name, f"{code} {error}")
        else:
            call.ambiguous = True
            trouble = _unreachable(call, error)
        if call.over:
            return
        definite = code is not None and code not in TRANSIENT
        if definite or call.once or now() >= call.expires:
            call.fail(trouble)
        else:
            call.trouble = trouble

    def unreachable(self, name: bytes) -> Unreachable:
        """Return the error for a command about ``name`` that was not answered in time."""
        return Unreachable(f"Redis did not answer a command for {text(name)!r} in time")

    def abandon(self) -> None:
        """In a forked child: never use the parent's connections."""
        self._closed = True
        dead_end_pool(self._client)

    async def close(self) -> None:
        """Cancel what is under way: it ends with CoordinatorClosed."""
        self._closed = True
        left = [call for queue in self._queues.values() for call in queue]
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for call in left:
            call.fail(CoordinatorClosed(f"closed before the answer about {text(call.name)!r} arrived"))


def _behind(error: Exception) -> Exception:
    """Return what redis-py was retrying when its time was up."""
    found: BaseException | None = error
    while isinstance(found, (TimeoutError, asyncio.CancelledError)):
        found = found.__cause__ or found.__context__
    return found if isinstance(found, Exception) else error


def _unreachable(call: Call, error: BaseException) -> Unreachable:
    unreachable = Unreachable(
        f"Redis did not answer a command for {text(call.name)!r} in time: {type(error).__name__}: {error}; "
        "check the server and the network, or allow more time (retry_for, timeout)"
    )
    unreachable.__cause__ = error
    return unreachable
