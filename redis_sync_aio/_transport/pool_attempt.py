"""One attempt at a call over connections of the client's pools: by a script, or by a dialogue under WATCH."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import redis.exceptions
from redis.asyncio import Redis

from .._client.checkout import checkout
from .._client.cluster import Cluster
from .._client.error_replies import error_answer, scripts_refused
from .._client.redis_py import send_once
from .._client.resp import Reply, ReplyError, pack
from .._client.retry import AFTER_CONFLICT
from .._client.topology import OneServer, Topology
from .._core import logs
from .._core.clock import now
from .asking import ask
from .call import Call
from .dialogues import CONFLICT, Converse, advance
from .endpoint import EndpointWatch


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
        try:
            return await self._decide(call)
        except (ReplyError, redis.exceptions.ResponseError) as error:
            cluster = self._servers
            if not (call.narrowed and isinstance(cluster, Cluster)):
                raise
            node = cluster.nodes.node_of_ask(str(error))
            if node is None:
                raise
        return await ask(cluster.nodes, node, call, self._converse if self._by_watch(call) else None)

    def _by_watch(self, call: Call) -> bool:
        return call.keys.engine == "watch" or (call.keys.engine == "auto" and self.no_scripts != "")

    async def _decide(self, call: Call) -> Reply:
        engine = call.keys.engine
        if not self._by_watch(call):
            try:
                return await self._run_script(call)
            except redis.exceptions.ResponseError as error:
                if engine == "lua" or not scripts_refused(str(error)):
                    raise
                if not self.no_scripts:
                    logs.watch_instead(str(error))
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
