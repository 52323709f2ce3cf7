"""Calls that follow an ASK to the node to which a hash slot is being moved.

An interrupted move leaves some keys of a slot at its new node, which accepts commands on them only after an ASKING.
Each such call has a connection of its own: it is rare, and the new node may have no slots yet, and so no link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import redis.exceptions

from .._client.cluster_nodes import ClusterNodes
from .._client.error_replies import error_answer
from .._client.primary_pool import Address
from .._client.redis_py import write
from .._client.resp import Reply, ReplyError, Words, pack
from .._client.retry import MIN_ATTEMPT
from .._core import logs
from .._core.cancellation import cancel_repeatedly
from .._core.clock import now
from .call import Call
from .dialogues import CONFLICT, Converse, advance


class Asking:
    """The calls of one link that follow an ASK. Calls that are not answered there go to ``again``."""

    def __init__(
        self, nodes: ClusterNodes, converse: Converse, response_timeout: float, again: Callable[[Call, str], None]
    ) -> None:
        self._nodes = nodes
        self._converse = converse
        self._response_timeout = response_timeout
        self._again = again
        self._tasks: dict[Call, asyncio.Task[Reply]] = {}

    def follow(self, call: Call, answer: str, watch: bool) -> None:
        """Send ``call`` to the node that ``answer``, an ASK, names; without scripts if ``watch`` is true."""
        node = self._nodes.node_of_ask(answer)
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
                return await ask(self._nodes, node, call, self._converse if watch else None)

    def _ended(self, call: Call, answer: str, task: asyncio.Task[Reply]) -> None:
        unsettled = self._tasks.pop(call, None) is not None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logs.raise_later(error, of_task=True)
        if call.over or not unsettled:
            return
        if not task.cancelled() and error is None:
            call.answer(task.result())
            return
        call.ambiguous |= error is not None and error_answer(error) is None
        self._again(call, answer)

    def take(self) -> list[Call]:
        """Cancel all of them, and hand over the calls, which may have been executed."""
        tasks, self._tasks = self._tasks, {}
        for call, task in tasks.items():
            call.ambiguous = True
            call.widen()
            task.cancel()
        return [call for call in tasks if not call.over]


async def ask(nodes: ClusterNodes, node: Address, call: Call, converse: Converse | None) -> Reply:
    """Return the reply of ``node`` to ``call``; without scripts if there is ``converse``.

    Raise ReplyError, and as redis-py does when the node cannot be reached.
    """
    async with nodes.connected(node) as connection:
        if converse is None:
            (reply,) = await _exchange(connection, [call.command(with_source=True)])
            if isinstance(reply, ReplyError):
                raise reply
            return reply
        dialogue = converse(call)
        try:
            commands = advance(dialogue, call.name, None)
            while True:
                commands = advance(dialogue, call.name, await _exchange(connection, commands))
        except StopIteration as end:
            if end.value is CONFLICT:
                raise ReplyError("TRYAGAIN the keys were changed by another client meanwhile") from None
            return end.value


async def _exchange(connection: Any, commands: list[Words]) -> list[Reply]:
    """Send ``commands``, each with its ASKING, and return their replies, error replies as `ReplyError`."""
    batch: list[Words] = []
    inside = False  # the ASKING of its MULTI covers a transaction
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
