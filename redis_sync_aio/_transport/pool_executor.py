"""The executor without a link: the same scripts through the client's own pool, and no pushes.

It is used where a link is impossible (a proxy that speaks only RESP2, a user without pub/sub) or not asked for. Every
call runs in a task of its own. So the caller's cancellation never reaches redis-py, which swallows it on Python < 3.12
if its socket timeout is set, and never closes a connection of the pool.

A pool has many connections, so this module keeps the order: the calls of one name run one after the other. That keeps a
clean-up behind the command that it cleans up.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import suppress
from functools import partial

import redis.exceptions
from redis.asyncio import Redis

from .._client.checkout import checkout
from .._client.cluster import OneServer, Topology
from .._client.redis_py import bare, dead_end_pool, drop_idle, probe, send_once
from .._client.replies import TRANSIENT, Reply, answered, error_answer, pack, scripts_refused
from .._client.settings import AFTER_CONFLICT, MIN_ATTEMPT, RETRY, address_of
from .._core import logs
from .._core.cancellation import cancel_repeatedly, cancelled, heeded
from .._core.clock import now
from .._core.keys import Endpoint, Keys
from ..errors import SyncError
from ..errors._base import copy_error
from .call import EXPECTED, REFUSED, Call, closed, never_answered, not_from_outside, time_is_up, too_late, unanswered
from .endpoint import EndpointWatch
from .executor import CONFLICT, Converse, advance
from .link import Patience
from .outage import FIRST_CONTACT, find_sentinel, has_answered, is_refused, note_answer

# -- One attempt at a call over connections of the client's pools: by a script, or by a dialogue under WATCH ---


class PoolAttempt:
    """Executes calls once each. It remembers that scripts were refused, and follows the endpoint of one server."""

    def __init__(self, servers: Topology, response_timeout: float, converse: Converse) -> None:
        self._servers = servers
        self._response_timeout = response_timeout
        self._converse = converse
        self._endpoint_watch = EndpointWatch(servers.clients()[0]) if isinstance(servers, OneServer) else None
        self.no_scripts = ""
        """The error reply that refused scripts; empty if none was."""

    async def execute(self, call: Call) -> Reply:
        """Return the reply to ``call``; raise as redis-py does, ReplyError, or SyncError for an unusable reply."""
        if self._endpoint_watch is not None:
            await self._endpoint_watch.follow()
        engine = call.keys.engine
        if engine != "watch" and not (engine == "auto" and self.no_scripts):
            try:
                return await self._run_script(call)
            except redis.exceptions.ResponseError as error:
                if engine == "lua" or not scripts_refused(str(error)):
                    raise
                if not self.no_scripts:
                    logs.log("watch_instead", why=str(error))
                self.no_scripts = str(error)
        return await self._watch(call)

    async def _run_script(self, call: Call) -> Reply:
        with suppress(redis.exceptions.NoScriptError):
            return await send_once(self.client_of(call), call.command())
        # Outside the handler: else NOSCRIPT would be the context of a timeout here, and taken for the reply.
        return await send_once(self.client_of(call), call.command(with_source=True))

    def client_of(self, call: Call) -> Redis:
        """Return the client whose pool leads to the server that has the keys of ``call``."""
        return self._servers.client_of(call.keys.all[0])

    async def _watch(self, call: Call) -> Reply:
        for delay in AFTER_CONFLICT:
            call.sent = now()
            reply = await self._converse_once(call)
            if reply is not CONFLICT or call.over:  # over: it was withdrawn, and nothing was executed
                return reply
            await asyncio.sleep(delay)

    async def _converse_once(self, call: Call) -> Reply:
        connection = await checkout(self.client_of(call), self._response_timeout)
        connection.watching = True  # until the dialogue ends with EXEC
        dialogue = self._converse(call)
        try:
            await connection.prove()
            commands = advance(dialogue, call.name, None)
            while True:
                replies = await connection.exchange([pack(words) for words in commands], raw=range(len(commands)))
                replies = [error_answer(it) if isinstance(it, Exception) else it for it in replies]
                commands = advance(dialogue, call.name, replies)
        except StopIteration as end:
            connection.watching = False
            return end.value
        finally:
            await connection.give_back(drop=connection.watching)


class PoolExecutor:
    """Sends calls through the pools of clients, in order for each name."""

    pushes = False
    alone = False
    connections = 0
    connection_error: Exception | None = None
    """The reason that the latest attempt of all got no reply."""

    def __init__(self, servers: Topology, endpoint: Endpoint, response_timeout: float, converse: Converse) -> None:
        self._servers = servers
        self._endpoint = endpoint.polling()
        self._response_timeout = response_timeout
        self._patience = Patience(servers.clients()[0], response_timeout)
        self._heard = math.inf  # when the latest call was answered; local clock
        self._attempt = PoolAttempt(servers, response_timeout, converse)
        self._silent = False  # the latest attempt of all ended without a sign of the server
        self._logged: type[Exception] | None = None  # the latest unexpected error that was logged
        self._queues: dict[bytes, deque[Call]] = {}
        self._timers: dict[Call, asyncio.TimerHandle] = {}  # of calls whose turn has not come
        self._tasks: set[asyncio.Task[None]] = set()
        self._contacted = False  # true once a server has answered
        self._closed = False

    def connection_error_of(self, keys: Keys) -> Exception | None:
        """Return None: each call has its own connection."""
        return None

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return False: each call has its own connection."""
        return False

    def endpoint_of(self, keys: Keys) -> Endpoint:
        """Return the endpoint by which servers know us: one without an inbox."""
        return self._endpoint

    def send(self, call: Call) -> None:
        """Send ``call`` after the earlier calls about the same name."""
        queue = self._queues.get(call.name)
        if self._closed:
            too_late(call)
        elif queue is not None:
            if (error := queue[0].connection_error) is not None:
                call.delayed_by(copy_error(error))
            queue.append(call)
            # An earlier call may be retried for longer than this one has time.
            left = max(0.0, call.expires - now())
            self._timers[call] = asyncio.get_running_loop().call_later(left, self._expire, call)
        else:
            self._queues[call.name] = deque([call])
            self._start(call.name)

    def _expire(self, call: Call) -> None:
        del self._timers[call]
        if not call.over:
            call.fail(self._queues[call.name][0].connection_error or time_is_up(call))

    def _start(self, name: bytes) -> None:
        # Not by the loop's factory: an eager task would run inside `send`.
        task = asyncio.Task(self._work(name), loop=asyncio.get_running_loop(), name="redis_sync_aio calls")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: bytes, task: asyncio.Task[None]) -> None:
        """Go on with the next call, and fail this one with the defect that ended the task."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            queue = self._queues[name]
            queue[0].fail(unanswered(queue[0].keys, error))
            logs.raise_later(error, of_task=True)
            self._start(name)

    async def _work(self, name: bytes) -> None:
        queue = self._queues[name]
        try:
            while queue:
                if timer := self._timers.pop(queue[0], None):
                    timer.cancel()
                if not queue[0].over:
                    await self._run(queue[0])
                queue.popleft()
            del self._queues[name]
        except asyncio.CancelledError:
            if self._closed:
                raise
            # `asyncio.run` cancels all tasks at its end, and tasks that release then still need this one.
            queue[0].ambiguous = True
            if queue[0].at_most_once:
                queue[0].fail(unanswered(queue[0].keys))
            self._start(name)

    async def _run(self, call: Call) -> None:
        """Try until answered, refused or expired."""
        task = asyncio.current_task()
        assert task is not None
        for delay in RETRY:
            call.sent = now()
            call.attempts += 1
            patience = self._patience.after(call.sent - self._heard if call.attempts == 1 else 0)
            limit = min(max(call.expires - call.sent, MIN_ATTEMPT), patience)
            if call.attempts == 1 and not (self._contacted or call.at_most_once or self._has_answered(call)):
                limit = min(limit, FIRST_CONTACT)  # redis-py would try for longer
            try:
                async with asyncio.timeout(limit):
                    # The blocks of `heeded` inside do not see what redis-py swallowed between them.
                    with cancel_repeatedly(limit), heeded():
                        reply = await self._attempt.execute(call)
            except SyncError as error:  # raised while a reply was read
                call.fail(error)
            except (Exception, asyncio.CancelledError) as error:
                error = not_from_outside(error, self._closed)
                if patience < self._response_timeout and isinstance(error, TimeoutError):
                    await drop_idle(self._attempt.client_of(call))  # they have rested as long
                    self._failed(call, error)
                else:
                    error = await self._cause_of(call, error)
                    if not await self._nothing_answers(call, error):
                        self._failed(call, error)
            else:
                self._silent, self._logged, self.connection_error = False, None, None
                self._heard = now()
                self._note_answer(call)
                call.answer(reply)
            if task.cancelling():
                raise asyncio.CancelledError  # redis-py swallowed it, on Python 3.11 at the end of a wait
            if call.over:
                return
            await asyncio.sleep(max(0.0, min(delay, call.expires - now())))
            if now() >= call.expires:
                call.fail(time_is_up(call))
                return

    def _has_answered(self, call: Call) -> bool:
        return has_answered(self._attempt.client_of(call))

    def _note_answer(self, call: Call) -> None:
        if not self._contacted:
            note_answer(self._attempt.client_of(call))
            self._contacted = True

    async def _nothing_answers(self, call: Call, error: Exception) -> bool:
        """Fail ``call`` and return True if nothing has ever answered, and connections are refused for a second.

        ``error`` may be older, as redis-py pauses between its attempts: so connect once more.
        """
        client = self._attempt.client_of(call)
        if call.over or now() < call.begun + FIRST_CONTACT or not is_refused(error) or has_answered(client):
            return False
        try:
            async with asyncio.timeout(FIRST_CONTACT):
                with cancel_repeatedly(FIRST_CONTACT):
                    await find_sentinel(client, self._response_timeout)
                    await probe(client, self._response_timeout)
        except (redis.exceptions.RedisError, OSError) as refused:
            if is_refused(refused):
                call.fail(never_answered(call, address_of(client), refused))
        return call.over

    async def _cause_of(self, call: Call, error: Exception) -> Exception:
        """Return the error that redis-py was retrying when its time was up.

        It cannot be seen if redis-py was just about to try again. Then we try to connect, so that a refusal, such as of
        a password, is reported soon; but not if ``call`` has no time left, or no reply has come since the last try.
        """
        error = _context(error)
        silent, self._silent = self._silent, isinstance(error, TimeoutError)
        limit = min(call.expires - now(), self._response_timeout)
        if silent or not self._silent or limit <= 0:
            return error
        try:
            async with asyncio.timeout(limit):
                with cancel_repeatedly(limit):
                    await probe(self._attempt.client_of(call), limit)
        except REFUSED as refused:
            self._silent = False
            return refused
        except (redis.exceptions.RedisError, OSError) as unreachable:
            if is_refused(unreachable):
                return unreachable
        return error  # the server is unreachable

    def _failed(self, call: Call, error: Exception) -> None:
        refused = answered(call.name, error, self._attempt.no_scripts, call.keys.all, call.ambiguous)
        call.ambiguous |= refused is None
        self.connection_error = error if refused is None else None
        if refused is None and not isinstance(error, EXPECTED) and type(error) is not self._logged:
            self._logged = type(error)
            logs.connecting_failed(address_of(self._servers.clients()[0]), error)
        if call.over:
            return
        waited = round(now() - call.begun, 1) or None
        why = refused or unanswered(call.keys, error, call.connection_error, within=waited, script=call.script.name)
        definite = refused is not None and refused.code not in TRANSIENT
        if definite or call.at_most_once:
            call.fail(why)
            return
        call.delayed_by(why)
        for behind in self._queues[call.name]:
            if behind.refused is not None and behind is not call and not behind.over:
                behind.delayed_by(copy_error(why))
        if now() >= call.expires:
            call.fail(time_is_up(call))

    def after_fork(self) -> None:
        """Give up everything in a forked child, and never use the parent's connections."""
        self._closed = True
        for client in self._servers.clients():
            dead_end_pool(client)

    def close_without_loop(self) -> None:
        """Stop after the event loop was closed: the connections belong to the client."""
        self._closed = True

    async def close(self) -> None:
        """Cancel all calls in flight: they fail with CoordinatorClosed."""
        self._closed = True
        left = [call for queue in self._queues.values() for call in queue]
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        try:
            await cancelled(*self._tasks)
        finally:
            for call in left:
                call.fail(closed(call))


def _context(error: Exception) -> Exception:
    """Return the error that redis-py was retrying when its time was up, as far as it can be seen."""
    found: BaseException | None = error
    while isinstance(found, (TimeoutError, asyncio.CancelledError)):
        found = found.__cause__ or found.__context__
    found = None if found is None else bare(found)
    return found if isinstance(found, Exception) else error
