"""A limit on the requests in flight, over all processes of a service, as ASGI middleware; needs no other package.

For Starlette and FastAPI, and for every other ASGI application (Litestar, Quart) by wrapping it::

    app.add_middleware(Limit, limit=100, client=redis)
    app = Limit(app, limit=100, client=redis)

[Starlette and ASGI](https://redis-sync-aio.github.io/redis-sync-aio/recipes/starlette/) explains it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

from .._client.settings import Client
from .._coordinator import Coordinator
from .._core.arguments import Seconds, count, permit_limit, require_function, timeout_seconds, ttl_ms
from .._core.keys import permit_keys
from .._leases.implicit import client_of
from .._primitives.semaphore import AsyncSemaphore
from ..errors import AcquireTimeout, LeaseLost, QueueFull
from . import _web
from ._web import Source, SyncState

__all__ = ["Limit", "SyncState", "lifespan_of"]

Scope: TypeAlias = MutableMapping[str, object]
"""Properties of a connection by ASGI, such as its path and its headers."""
Message: TypeAlias = MutableMapping[str, object]
"""An event of ASGI, such as a part of the body."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
"""A coroutine function that returns the next event of the client."""
Send: TypeAlias = Callable[[Message], Awaitable[None]]
"""A coroutine function that sends an event to the client."""
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

MAX_AHEAD = 65_536
"""Bytes of a body that are read before its request is admitted; then it is the client's turn to wait."""


def lifespan_of(client: Source) -> Callable[[object], AbstractAsyncContextManager[SyncState]]:
    """Return a lifespan for Starlette that puts a client and its coordinator into the state, for `Limit` among others.

    FastAPI applications use [`lifespan_of`][redis_sync_aio.contrib.fastapi.lifespan_of] of the module for FastAPI.

    Args:
        client: As for that function.

    Raises:
        TypeError: The client is none of those.
    """
    _web.check_source(client)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[SyncState]:
        async with _web.running(client) as state:
            yield state

    return lifespan


class Limit:
    """ASGI middleware that lets at most ``limit`` requests in at a time, over all processes that share a Redis.

    A request has a permit until the application returns: a stream to its end, a websocket until it is closed.

    - If all permits are in use, or Redis does not answer, the answer is 503 with Retry-After. A websocket gets the same
      if the server can answer it, otherwise it is closed.
    - The loss of a permit cancels the application. The answer is 503 if none has begun. Otherwise LeaseLost is raised,
      and the server closes the connection (a websocket with code 1013).

    Args:
        app: The application.
        limit: How many requests at a time, 1 to 1,000,000,000. 0: none, until `resize` raises it. While others use
            another limit, as in a rolling deployment, theirs counts.
        client: A client, a `Coordinator`, or a function without arguments that returns one of these, called at each
            request. None: the coordinator in the state of the lifespan (`lifespan_of`).
        name: The name of the semaphore.
        timeout: How long a request waits (seconds). 0 (default): not at all. None: no limit. A request
            whose client disconnects leaves the queue.
        ttl: How long the lease lasts, 0.01 s to ten years; it is renewed meanwhile.
        max_waiting: How many requests may wait, 0 or more; a further one gets 429 immediately. None: any number.
        status: The status of the answer if no permit is free in time, 400 to 599, such as 429.
        retry_after: The seconds in Retry-After, 0 or more.
        applies_to: A function of the scope of a request that returns whether the request counts. None: all count.

    Raises:
        TypeError, ValueError: An argument is bad.

    A request raises whatever the application raises.

    Example:
        ```python
        from starlette.applications import Starlette

        from redis_sync_aio.contrib.asgi import Limit

        app = Starlette()
        app.add_middleware(Limit, limit=100, timeout=1, applies_to=lambda scope: scope["path"] != "/health")
        ```
    """

    def __init__(
        self,
        app: App,
        *,
        limit: int,
        client: Source | None = None,
        name: str = "requests",
        timeout: Seconds | None = 0,
        ttl: Seconds = 30.0,
        max_waiting: int | None = None,
        status: int = _web.UNAVAILABLE,
        retry_after: int = 1,
        applies_to: Callable[[Scope], bool] | None = None,
    ) -> None:
        if not callable(app):
            raise TypeError(f"app must be an ASGI application, not {app!r}")
        self.app = app  # as middleware of Starlette calls it
        self._client = None if client is None else _web.check_source(client)
        self._timeout = timeout_seconds(timeout)
        self._status = _web.check_status(status)
        self._retry_after = str(count(retry_after, "retry_after"))
        self.applies_to = applies_to
        if not isinstance(name, str):
            raise TypeError(f"name must be str, not {name!r}")
        permit_keys(name.encode(), "sem")
        self._make = partial(
            AsyncSemaphore,
            name=name,
            limit=permit_limit(limit, "limit"),
            on_mismatch="keep",
            ttl=ttl_ms(ttl) / 1000,
            max_waiting=None if max_waiting is None else count(max_waiting, "max_waiting"),
        )
        if applies_to is not None:
            require_function(applies_to, "applies_to")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request: the server calls this."""
        counts = scope["type"] in ("http", "websocket") and (self.applies_to is None or self.applies_to(scope))
        if not counts:
            await self.app(scope, receive, send)
            return
        request, answer = _Request(receive), _Answer(scope, send, self._status, self._retry_after)
        semaphore = self._semaphore(scope)
        hold = semaphore.acquire(timeout=self._timeout)
        try:
            if self._timeout == 0:
                await hold.__aenter__()
            elif await _web.enter_unless_gone(hold, request.gone) is None:
                await answer.gone()
                return
        except _web.NOT_SERVED as error:
            await answer.refuse(error)
            return
        try:
            async with AsyncExitStack() as stack:
                stack.push_async_exit(hold)
                await self.app(scope, request.receive, answer.send)
        except LeaseLost as lost:
            if lost.name != semaphore.name or not (request.ended or await answer.refuse(lost)):
                raise

    def _semaphore(self, scope: Scope) -> AsyncSemaphore:
        client: Client | Coordinator
        if self._client is None:
            where = "the lifespan: use lifespan_of(redis), or Limit(..., client=redis)"
            client = _web.coordinator_in(scope.get("state"), where)
        else:
            client = self._client() if callable(self._client) else self._client
            client_of(client)
        return self._make(client)


class _Request:
    """The messages of the client: read ahead while the request waits, and kept for the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()
        self.ended = False
        """True if the application knows that the client has disconnected."""

    async def gone(self) -> None:
        """Return when the client has disconnected. If it sends too much before that, do not return."""
        size = 0
        while size <= MAX_AHEAD:
            message = await self._receive()
            self._kept.append(message)
            if message["type"] in _DISCONNECTS:
                return
            size += len(cast("bytes", message.get("body", b"")))
        await asyncio.Event().wait()

    async def receive(self) -> Message:
        """Return the next message, as the application expects it."""
        message = self._kept.popleft() if self._kept else await self._receive()
        self.ended = self.ended or message["type"] in _DISCONNECTS
        return message


_DISCONNECTS = ("http.disconnect", "websocket.disconnect")


@dataclass(eq=False)
class _Answer:
    """The answer to a request, as far as it was sent."""

    _scope: Scope
    _send: Send
    _busy: int
    _retry_after: str
    _begun = _open = _complete = False
    """True if anything was sent; a websocket is open; nothing more may be sent."""

    async def send(self, message: Message) -> None:
        """Send a message of the application."""
        kind = message["type"]
        self._begun = True
        self._open = kind in ("websocket.accept", "websocket.send")
        self._complete = kind == "websocket.close" or (
            kind in ("http.response.body", "websocket.http.response.body") and not message.get("more_body", False)
        )
        await self._send(message)

    async def gone(self) -> None:
        """Answer a client that has disconnected: middleware that wraps this one expects an answer to a request."""
        if self._scope["type"] == "http":
            with suppress(OSError):  # servers ignore what is sent to it, or raise this
                await self._send({"type": "http.response.start", "status": _web.GONE, "headers": []})
                await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: Exception) -> bool:
        """Answer that the service is not available, and log why; return False if a part of another answer was sent.

        All permits in use is no incident, so it is not logged.
        """
        if isinstance(error, AcquireTimeout) and error.answered:
            full = isinstance(error, QueueFull)
            status, text = (_web.FULL, _web.FULL_TEXT) if full else (self._busy, _web.UNAVAILABLE_TEXT)
        else:
            method = str(self._scope.get("method", "WEBSOCKET"))
            status, text, _ = _web.answer_to(method, str(self._scope["path"]), error)
        if self._begun:
            if self._open:
                await self._send({"type": "websocket.close", "code": _web.TRY_AGAIN_LATER, "reason": ""})
            return self._open or self._complete
        prefix = ""
        if self._scope["type"] == "websocket":
            if "websocket.http.response" not in cast("Mapping[str, object]", self._scope.get("extensions") or {}):
                await self._send({"type": "websocket.close", "code": _web.TRY_AGAIN_LATER, "reason": ""})
                return True
            prefix = "websocket."
        body = json.dumps({"detail": text}).encode()
        headers: Iterable[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", self._retry_after.encode()),
        ]
        await self._send({"type": f"{prefix}http.response.start", "status": status, "headers": headers})
        await self._send({"type": f"{prefix}http.response.body", "body": body})
        return True
