"""Calls that follow an ASK to the node that a hash slot is being moved to.

An interrupted move leaves some keys of a slot at its new node, which accepts commands on them behind an ASKING only.
That takes a connection of its own, for one call: it is rare, and the new node may have no slots yet, and so no link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import redis.exceptions

from .._client.cluster import Cluster
from .._client.error_replies import error_answer
from .._client.primary_pool import Address
from .._client.redis_py import write
from .._client.resp import Reply, ReplyError, Words, pack
from .._client.retry import MIN_ATTEMPT
from .._core.cancellation import cancel_repeatedly
from .._core.clock import now
from .call import Call
from .dialogues import CONFLICT, Converse, advance


class Asking:
    """The calls of one link that are being asked elsewhere; ``again`` gets those that were not answered there."""

    def __init__(
        self, cluster: Cluster, converse: Converse, response_timeout: float, again: Callable[[Call, str], None]
    ) -> None:
        self._cluster = cluster
        self._converse = converse
        self._response_timeout = response_timeout
        self._again = again
        self._tasks: dict[Call, asyncio.Task[Reply]] = {}

    def follow(self, call: Call, answer: str, watch: bool) -> None:
        """Ask the node that ``answer`` (an ASK) names; ``watch``: without scripts."""
        node = self._cluster.node_of_ask(answer)
        if node is None:
            self._again(call, answer)
            return
        task = asyncio.Task(self._ask(call, node, watch), name="redis_sync_aio asking")
        self._tasks[call] = task
        task.add_done_callback(partial(self._ended, call, answer))

    async def _ask(self, call: Call, node: Address, watch: bool) -> Reply:
        call.sent = now()
        limit = min(max(call.expires - call.sent, MIN_ATTEMPT), self._response_timeout)
        async with asyncio.timeout(limit):
            with cancel_repeatedly(limit):
                return await ask(self._cluster, node, call, self._converse if watch else None)

    def _ended(self, call: Call, answer: str, task: asyncio.Task[Reply]) -> None:
        unsettled = self._tasks.pop(call, None) is not None
        error = None if task.cancelled() else task.exception()
        if call.over or not unsettled:
            return
        if not task.cancelled() and error is None:
            call.answer(task.result())
            return
        call.ambiguous |= error is not None and error_answer(error) is None
        self._again(call, answer)

    def take(self) -> list[Call]:
        """End all of them, and hand them over: whether they were executed is not known."""
        tasks, self._tasks = self._tasks, {}
        for call, task in tasks.items():
            call.ambiguous = True
            call.widen()
            task.cancel()
        return [call for call in tasks if not call.over]


async def ask(cluster: Cluster, node: Address, call: Call, converse: Converse | None) -> Reply:
    """Return what ``node`` answers to ``call``; ``converse`` if scripts are not to be used.

    Raises ReplyError, and as redis-py when it is out of reach.
    """
    async with cluster.connected(node) as connection:
        if converse is None:
            (reply,) = await _say(connection, [call.command(with_source=True)])
            if isinstance(reply, ReplyError):
                raise reply
            return reply
        dialogue = converse(call)
        try:
            commands = advance(dialogue, call.name, None)
            while True:
                commands = advance(dialogue, call.name, await _say(connection, commands))
        except StopIteration as end:
            if end.value is CONFLICT:
                raise ReplyError("TRYAGAIN the keys were changed by others meanwhile") from None
            return end.value


async def _say(connection: Any, commands: list[Words]) -> list[Reply]:
    """Return the replies to ``commands``, error answers as `ReplyError`, with the leave to ask for each."""
    batch: list[Words] = []
    inside = False  # a transaction has the leave of its MULTI
    for words in commands:
        batch += [words] if inside else [(b"ASKING",), words]
        inside = words[0] == b"MULTI" or (inside and words[0] != b"EXEC")
    write(connection, b"".join(map(pack, batch)))
    replies: list[Reply] = []
    for words in batch:
        try:
            reply: Reply = await connection.read_response(disable_decoding=True, timeout=float("inf"))
        except redis.exceptions.ResponseError as error:
            reply = error_answer(error)
        if words[0] != b"ASKING":
            replies.append(reply)
    return replies
