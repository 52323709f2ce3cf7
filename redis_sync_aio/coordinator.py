"""The coordinator owns what the locks of one client share: the link, the waiters, the renewals.

A service creates one at its start and closes it at its end::

    async with Coordinator(redis) as sync:
        async with sync.lock("orders:42"):
            ...

A lock that was given a bare client uses its implicit coordinator for the running loop (`_primitives/implicit.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

from ._acquire.hub import Hub
from ._client.cluster import Cluster
from ._client.redis_py import CloseObserver, close_idle
from ._client.resp import Reply
from ._client.retry import RETRY_FOR
from ._client.settings import Client, address_of, check_client, connect_timeout_of, response_timeout_of, running_loop
from ._client.topology import servers_of
from ._core import logs
from ._core.arguments import Seconds, count, one_of, positive_seconds, seconds, ttl_ms
from ._core.backoff import Backoff
from ._core.cancellation import outcome_of, wait_shielded
from ._core.clock import now
from ._core.display import shown
from ._core.keys import Endpoint, Keys
from ._engine.commands import Commands, Send
from ._engine.watch import converse
from ._leases.renewals import Renewals
from ._transport.call import Call
from ._transport.cluster_link import ClusterLink
from ._transport.executor import Executor, LinkOptions
from ._transport.link import Link
from ._transport.owner import Unclosed, WeakOwner
from ._transport.pool_executor import PoolExecutor
from .errors import CoordinatorClosed, PushUnavailable, SyncError, copy_error

__all__ = ["Coordinator", "Push"]

if TYPE_CHECKING:
    from .lock import AsyncLock

MOST_POLL_CAP = 300.0
"""Seconds: the queue of who waits lives for twice as long after the latest look."""

Push: TypeAlias = Literal["auto", "always", "never"]

living: weakref.WeakSet[Coordinator] = weakref.WeakSet()  # all that were started in this process


class Coordinator(Hub):
    """Runs the locks of one client in one event loop, over one connection to each server.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`, however configured. Its pool is not used for locks; one
            connection is opened beside it, with the client's own settings, to each shard of a cluster.
        push: "auto" (default): wake-ups are pushed; where the server or the ACL user does not allow that, waiters
            poll and a warning is logged. "always": raise PushUnavailable instead. "never": poll, and send
            commands through the client's pool.
        claim: for how many seconds a lock that is handed to a waiter is granted at first, if it is renewed.
            The first renewal, after a sixth of it, extends it to the full ttl. It bounds what a stopped or unplugged
            (not dead) waiter costs the others; an event loop that stalls longer than this right after a hand-over
            loses the lease, whatever its ttl. Seconds or timedelta, 0.01 to ten years, default 4.5: a stall of 4
            seconds costs no lease, a stopped waiter less than 5 seconds.
        burst: a lease that tasks of this process share is handed on so often, once others wait for it at the server;
            then it is their turn. Default 64; 0: the order of the server is strict, and nothing is shared.
        slice: for how long it is handed on, once others wait. Seconds or timedelta, more than 0, default 0.005.
        retry_for: for how long a command is repeated while Redis is out of reach, before Unreachable is
            raised; its last attempt has 0.05 seconds at least. Seconds or timedelta, default 10.
        poll_cap: while tasks wait for a name, one command of this process looks at it at least this often. So what
            other clients do with its keys (DEL, PEXPIRE, SET) is noticed. Seconds or timedelta, default 2.5; more
            than 300 counts as 300.
        poll: the back-off of waiters that nobody will wake: polling, or behind a foreign holder. They look when the key
            should end, too, and once more when their timeout is over. Default: ``Backoff(initial=0.01, cap=0.1)``.
        exit_timeout: for how long the end of a body that failed or was cancelled waits for the answer to its release.
            Then its error comes out, and the release goes on in the background. Closing waits for each answer as long.
            Seconds or timedelta, default 1.
        response_timeout: an answer that takes longer means that the connection is dead; a silent connection is
            tested as often while needed. So a black hole is noticed within twice this time and a quarter of a
            second. Seconds or timedelta; default: the client's ``socket_timeout``, else 5 (transactions: no limit).

    Raises:
        TypeError: not an asyncio Redis client, or an argument of the wrong type. ValueError: one out of range.

    One that is dropped without `close` is noticed once it is collected, and neither holds nor waits for anything: its
    connection is closed, and a ResourceWarning is given.

    For users there are ``async with``, `lock`, `close`, `client`, `connections`, `trouble` and `why_closed`. All else
    is for the modules of this package, and may change with any release.

    Example:
        async with Coordinator(redis, claim=5) as coordinator:
            async with coordinator.lock("orders:7"):
                ...
    """

    def __init__(
        self,
        client: Client,
        *,
        push: Push = "auto",
        claim: Seconds = 4.5,
        burst: int = 64,
        slice: Seconds = 0.005,
        retry_for: Seconds = RETRY_FOR,
        poll_cap: Seconds = 2.5,
        poll: Backoff | None = None,
        exit_timeout: Seconds = 1.0,
        response_timeout: Seconds | None = None,
    ) -> None:
        check_client(client)
        one_of(push, get_args(Push), "push")
        self._client = client
        self._servers = servers_of(client)
        self._push: Push = push
        self.claim_ms = ttl_ms(claim, "claim")
        self.burst = count(burst, "burst")
        self.slice = positive_seconds(slice, "slice")
        self.retry_for = positive_seconds(retry_for, "retry_for")
        self.poll_cap = min(positive_seconds(poll_cap, "poll_cap"), MOST_POLL_CAP)
        if poll is not None and not isinstance(poll, Backoff):
            raise TypeError(f"poll must be a Backoff or None, not {shown(poll)}")
        self.poll = poll if poll is not None else Backoff(initial=0.01, cap=0.1)
        self._exit_timeout = positive_seconds(exit_timeout, "exit_timeout")
        self._response_timeout = response_timeout_of(client, response_timeout)
        self._drain_timeout = min(self._exit_timeout, self._response_timeout)
        self.asked_response_timeout = None if response_timeout is None else self._response_timeout
        self._closing: asyncio.Task[None] | None = None
        self._why_closed: str | None = None
        self._client_closed = False
        self.on_close: Callable[[], None] = lambda: None  # called once it cannot be used any more

    # -- life ------------------------------------------------------------------------------------------

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the running loop. Nothing is sent before the first use."""
        self._loop = self.loop = loop
        self._thread = get_ident()
        self._endpoint = Endpoint.new(f"{socket.gethostname()[:32]}:{os.getpid()}", secrets.token_hex(8))
        self.asking = 0
        self._numbers = itertools.count(1)
        self.next_number = self._numbers.__next__
        self._know_nothing()
        self._executor: Executor
        self._link: Link | ClusterLink | None = None
        if self._push == "never":
            self._use(self._new_plain())
        else:
            self._link = self._new_link()
            self._use(self._link)
        self.renewals = Renewals(
            lambda: self.engine,
            self._all_leases,
            self._forget_lease,
            self._keeps_lease,
            self._loosen_lease,
            self.retry_for,
            self._response_timeout,
            self._exit_timeout,
            self.check_context,
            self._client,
        )
        self.renewals.asked_response_timeout = self.asked_response_timeout
        self._witness = CloseObserver(self._servers.clients()[0], self._client_closes)
        self._unclosed = Unclosed(self, self._link)
        living.add(self)

    def _new_link(self) -> Link | ClusterLink:
        connect_timeout = connect_timeout_of(self._client, self._response_timeout)
        options = LinkOptions(self._response_timeout, connect_timeout, converse)
        servers = self._servers
        if isinstance(servers, Cluster):
            return ClusterLink(servers, self._endpoint, WeakOwner(self), options)
        return Link(servers.clients()[0], self._endpoint, WeakOwner(self), options)

    def _new_plain(self) -> PoolExecutor:
        return PoolExecutor(self._servers, self._endpoint, self._response_timeout, converse)

    def _use(self, executor: Executor) -> None:
        self._executor = executor
        self.engine = Commands(executor)
        self.pushes = executor.pushes
        self.endpoint_of = executor.endpoint_of
        self.connection_error_of = executor.connection_error_of
        # For how long a polling waiter's ticket stays alive between two looks.
        self.poll_ms = 0 if self.pushes else max(2000, int(self.poll.cap * 4000))

    async def loop_ends(self) -> None:
        """Close at the end of the event loop. Nothing runs after it, so a closing that has begun ends first."""
        if self._closing is not asyncio.current_task():  # else that one asks the loop to notice nothing more
            await self.close()

    async def __aenter__(self) -> Self:
        self.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, drain: Seconds = 0.0) -> None:
        """Release what is held, end what waits, close the connection. Idempotent.

        Bodies that still run are cancelled with LeaseLost (reason "closed"), waiters get CoordinatorClosed.
        Takes a round trip. When Redis is out of reach no release is waited for longer than ``exit_timeout`` seconds;
        what has no answer by then ends with its ttl. The end of the event loop closes in the same way.

        ``drain``: seconds (or timedelta) for which bodies may go on before that. They are renewed, nothing new is
        granted, and waiters get CoordinatorClosed immediately. It ends as soon as nothing is held.

        Raises WrongContext in another event loop. On cancellation the closing goes on, without draining, and the
        cancellation is raised when it is done.
        """
        within = seconds(drain, "drain")
        if self._loop is None or self._forked:
            self._why_closed = self._why_closed or "it was closed"
            return
        self.check_context()
        try:
            if within and self._why_closed is None:
                await self._drain(within)
        finally:
            await wait_shielded(self._start_closing())  # bounded by `_drain_timeout` and the close of connections

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None or self._closing.cancelled():  # `asyncio.run` cancels all tasks at its end
            self._why_closed = self._why_closed or "it was closed"
            self._stop_sharing()
            # Not by the loop's factory: an eager task would end the loop's generator before it is known here.
            self._closing = asyncio.Task(self._close(), loop=self._loop, name="redis_sync_aio close")
        return self._closing

    async def _close(self) -> None:
        self.on_close()
        self._end_all()
        await self.renewals.slices.done()
        self.renewals.stop()
        await self.renewals.under_way.drained(self._drain_timeout)
        await self._executor.close()
        self._witness.leave()
        if self._client_closed:
            for client in self._servers.clients():
                await close_idle(client)
        await self._unclosed.closed()

    def __repr__(self) -> str:
        return f"<Coordinator of {address_of(self._client)}{'' if self._why_closed is None else ', closed'}>"

    def check(self) -> None:
        """Raise unless this coordinator may be used here and now; the first use binds it to the running loop."""
        self.check_context()
        if self._why_closed is not None:
            raise CoordinatorClosed(f"this coordinator can not be used any more, make another one: {self._why_closed}")
        if self._loop is None:
            self._start(running_loop())

    # -- for primitives --------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client it was made from."""
        return self._client

    def lock(self, name: str | bytes, *, ttl: Seconds | None = 30.0) -> AsyncLock:
        """Return ``AsyncLock(self, name, ttl=ttl)``, with its errors; use the class for more options."""
        from .lock import AsyncLock  # noqa: PLC0415  (the layer above: a coordinator can not import it earlier)

        return AsyncLock(self, name, ttl=ttl)

    def usable(self) -> bool:
        """Return whether it may be used here and now; `check` says why not."""
        return self._thread == get_ident() and self._why_closed is None and self.loop.is_running()

    async def ask(self, send: Send, *, goes_on: bool = False) -> Reply:
        """Run one command and return its reply. ``send(engine, sent, expires, done)`` sends it.

        On cancellation it is not sent again and its answer is ignored, unless it ``goes_on``: then ``done`` is called.
        """
        self.check()
        outcome: asyncio.Future[Reply] = self.loop.create_future()

        def done(call: Call) -> None:
            if outcome.done():
                return
            if call.error is None:
                outcome.set_result(call.reply)
            else:
                outcome.set_exception(call.error)

        time = now()
        call = send(self.engine, time, time + self.retry_for, done)
        self.next_number()  # that shows that it is in use
        self.asking += 1
        try:
            return await outcome_of(outcome)
        finally:
            self.asking -= 1
            if not goes_on:
                call.drop()

    @property
    def why_closed(self) -> str | None:
        """Why it can not be used any more; None while it can."""
        return self._why_closed

    def retire(self, why: str) -> None:
        """Close it in the background; it can not be used from now on, since locks remember their coordinator."""
        self._why_closed = self._why_closed or why
        self.on_close()
        self._start_closing()

    @property
    def connections(self) -> int:
        """How many connections the link has opened so far."""
        return 0 if self._loop is None else self._executor.connections

    @property
    def connection_error(self) -> Exception | None:
        """Why Redis can not be reached at the moment, if it can not."""
        return None if self._loop is None else self._executor.connection_error

    # -- what the link tells (and see `Hub`) ---------------------------------------------------------

    def link_refused(self, error: SyncError, concerns: Callable[[Keys], bool]) -> None:
        """A server or the user's rights there do not allow the link."""
        if self._push == "auto" and isinstance(error, PushUnavailable):
            self._fall_back(error)
            return
        for resource in list(self.resources.values()):
            for ticket in list(resource.tickets.values()) if concerns(resource.keys) else ():
                ticket.withdraw(copy_error(error))

    def _fall_back(self, error: SyncError) -> None:
        if self._link is None:
            return  # another shard was first
        logs.polling_instead(error)
        link, self._link = self._link, None
        self._use(self._new_plain())
        self.link_moved()
        for call in link.detach():
            self._executor.send(call)

    async def link_closing(self) -> None:
        """The client closes our connection: first give back what no task has."""
        if self._forked or self._loop is not running_loop():
            return
        if self._give_back_resting():
            await self.renewals.under_way.drained(self._drain_timeout)

    def link_client_closed(self) -> None:
        """The client or its pool was closed, and with it our connection if there is one."""
        if self._forked or self._why_closed is not None or self._loop is not running_loop():
            return
        self._client_closed = True
        self.retire("its client was closed (aclose(), or disconnect() of its pool); create a new client")
        self._end_all()

    def _end_all(self) -> None:
        self.renewals.slices.stop()
        self.renewals.slices.run(self._give_up(f"the coordinator can not be used any more: {self._why_closed}"))

    def _client_closes(self) -> None:
        """Word from the witness. A link that is up learns it by itself, once its connection is closed."""
        if self.connections == 0 or self.connection_error is not None:
            self.link_client_closed()

    def after_fork(self) -> None:
        """In the child: the sockets belong to the parent. Never use or close them here."""
        self._forked, self._thread = True, 0
        if self._loop is not None:
            self._stop_at_once()
            self._executor.after_fork()

    def close_without_loop(self) -> None:
        """Its event loop was closed without a word: give up its places in the client's pool, and its connection."""
        self._why_closed = self._why_closed or "its event loop was closed"
        if self._loop is not None:
            self._stop_at_once()
            self._executor.close_without_loop()

    def _stop_at_once(self) -> None:
        self._unclosed.forget()
        self._stop_sharing()
        self.renewals.stop()
        self._witness.leave()
