"""The conversation with the server behind one transaction: WATCH and reads, then MULTI … EXEC in one write.

WATCH is sent together with the first command of the body, so it costs no round trip of its own. That is safe
because a transaction refuses `multi()` when nothing was watched yet: what a body knows it has read through it.

A `Precheck` asks its question in that same write. It can end the transaction, or make it wait and begin again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import redis.exceptions
from redis.asyncio import Redis
from redis.crc import key_slot

from .._client.checkout import EXEC, MULTI, OUT_OF_REACH, CheckedOut, Encodables, Pack, checkout, in_turn, packer
from .._client.cluster import SlotMoved, slot_of
from .._client.replies import TRANSIENT, Reply, answered
from .._core.clock import now
from .._core.display import listed, text
from ..errors import PartiallyApplied, SyncError, TransactionMisuse, Unreachable
from .exec_replies import Command, CommitMarker, ExecUnanswered, Replies, read_replies

Wait: TypeAlias = Callable[[], Awaitable[None]]
"""A coroutine function to await before a transaction begins again. Its errors end the transaction."""


class Precheck(Protocol):
    """A condition of a transaction. It is read right behind the first WATCH, in the same write."""

    keys: tuple[bytes, ...]
    """The keys that change with the answer; they are watched, too."""

    def commands(self) -> Sequence[Encodables]:
        """Return the commands that read it; none when there is nothing to ask."""
        ...

    def verify(self, replies: Sequence[Reply]) -> Wait | None:
        """Judge the (undecoded) replies to those commands.

        Return None to go on, or what to wait for: meanwhile the connection is free for others, and then everything is
        watched again. Raises a SyncError to end the transaction.
        """
        ...


class WatchSession:
    """One connection of the client that watches keys, reads, and executes what was queued.

    Args:
        client: of the server that has the keys.
        keys: the keys to watch, next to those of ``precheck``.
        marker: is watched, too, and set before the queued commands are executed.
        precheck: what has to be true at the first WATCH.
        response_timeout: seconds for each answer; None: as the client says.
        patience: returns for how many seconds it may wait for a connection of the pool.
    """

    error: SyncError | None = None
    """The reason that it cannot commit any more."""
    in_doubt: bool = False
    """EXEC may have been sent, and is not answered."""
    watched: bool = False
    """The keys are watched, and the precheck has passed."""

    def __init__(
        self,
        client: Redis,
        keys: tuple[bytes, ...],
        *,
        marker: CommitMarker | None = None,
        precheck: Precheck | None = None,
        response_timeout: float | None = None,
        patience: Callable[[], float],
    ) -> None:
        self.client = client
        self.pack: Pack = packer(client)
        in_order = keys if precheck is None else (*precheck.keys, *keys)
        self.keys: dict[bytes, None] = dict.fromkeys(in_order)
        self.asked: float = now()
        """Time when the latest wait for the server began."""
        self._name = next(iter(self.keys))
        self._slot = slot_of(client)
        self._also_watched: tuple[bytes, ...] = () if marker is None else (marker.key,)
        self._first: tuple[Encodables, ...] = () if marker is None else (marker.done,)
        self._precheck = precheck
        self._response_timeout = response_timeout
        self._patience = patience
        self._to_watch = [*self.keys, *self._also_watched]
        self._looked_elsewhere = False  # where a cluster has the keys, after it said that they have moved
        self._connection: CheckedOut | None = None

    def add(self, keys: Sequence[bytes]) -> bool:
        """Watch more keys with the next command. Return whether there is something that is not watched yet.

        Raises TransactionMisuse for a key in another slot, also of the same shard: a slot may be moved any time.
        """
        other = None if self._slot is None else next((key for key in keys if key_slot(key) != self._slot), None)
        if other is not None:
            raise TransactionMisuse.other_slot(text(self._name), key=text(other))
        for key in keys:
            if key not in self.keys:
                self.keys[key] = None
                self._to_watch.append(key)
        return bool(self._to_watch)

    def watch_only(self, keys: Sequence[bytes]) -> None:
        """Watch these keys with the next command, and no others. For a session that began again."""
        self.keys, self._to_watch = dict.fromkeys(keys), list(keys)

    # -- before EXEC -----------------------------------------------------------------------------------

    async def send(self, commands: Sequence[Encodables], raw: bool = False) -> list[Reply]:
        """Send commands, and WATCH before them for what is not watched yet, in one write; return their replies."""
        of_body = [self.pack(words) for words in commands]  # bad arguments are an error of the body
        with self.reporting():
            connection = await self.open()
            # Without MULTI what follows it would be executed immediately, so we find out before: an EXEC ends a WATCH.
            proof: list[Encodables] = [] if connection.executes else [("MULTI",), ("EXEC",)]
            first = [*proof]
            if self._to_watch:
                first.append(("WATCH", *self._to_watch))
                connection.watching = True
            if not self.watched and self._precheck is not None:
                first += self._precheck.commands()
            packed = [*map(self.pack, first), *of_body]
            replies = await connection.exchange(packed, range(len(packed) if raw else len(first)))
        if proof:
            connection.check_executes(*replies[:2])
        self._check_slots(replies)
        refused = next((it for it in replies[: len(first)] if isinstance(it, redis.exceptions.ResponseError)), None)
        if isinstance(refused, SlotMoved) and not self.watched and not self._looked_elsewhere:
            self._looked_elsewhere = True
            await self.begin_again()
            return await self.send(commands, raw)
        if refused is not None:
            raise self.refused(refused)
        self._to_watch.clear()
        if not self.watched:
            self.watched = await self._verified(replies[len(proof) + 1 : len(first)])
            if not self.watched:
                return await self.send(commands, raw)
        return replies[len(first) :]

    async def _verified(self, replies: Sequence[Reply]) -> bool:
        """Return whether the precheck lets the transaction go on; False: it waited, and has to begin again."""
        if self._precheck is None:
            return True
        try:
            wait = self._precheck.verify(replies)
            if wait is None:
                return True
            # The connection goes back first: a waiter must not keep it from the transaction that it waits for.
            await self.begin_again()
            await wait()
        except SyncError as error:
            self.error, self.asked = error, now()  # the server has answered
            raise
        return False

    async def begin_again(self) -> None:
        """Give the connection back; the next command watches everything again, on whatever connection."""
        await self.give_back(drop=False)
        self._to_watch = [*self.keys, *self._also_watched]
        self.watched = False

    async def open(self) -> CheckedOut:
        """Return the connection, checked out of the client's pool when there is none yet."""
        if self._connection is None:
            self._connection = await in_turn(
                self.client.connection_pool, lambda: checkout(self.client, self._response_timeout), self._patience()
            )
        return self._connection

    def opened(self) -> CheckedOut:
        """Return the connection that is checked out."""
        assert self._connection is not None
        return self._connection

    async def give_back(self, drop: bool) -> None:
        """Give the connection back, if there is one; ``drop``: close it. On cancellation that is finished first."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.give_back(drop=drop)

    # -- EXEC ------------------------------------------------------------------------------------------

    async def execute(self, queue: Sequence[Command]) -> Replies | ExecUnanswered | None:
        """Execute the queued commands. Return the replies; None when a watched key was changed; ExecUnanswered.

        Raises TransactionMisuse, CommandRefused, Unreachable: nothing was done; PartiallyApplied: some commands failed.
        """
        connection = self.opened()
        self.asked = now()
        packed = [MULTI, *map(self.pack, self._first), *(command for command, _, _ in queue), EXEC]
        self.in_doubt = True
        try:
            multi, *queued, executed = await connection.exchange(packed, raw=range(len(packed)))
        except OUT_OF_REACH as error:
            # An error that the server answered came before EXEC, or instead of it: nothing was executed.
            if not connection.written or answered(self._name, error) is not None:
                self.in_doubt = False
                raise self._failed(error) from error
            return ExecUnanswered(error)
        self.in_doubt = False
        self._check_slots([*queued, executed])
        if isinstance(multi, redis.exceptions.ResponseError):
            # What followed was executed, each command on its own.
            raise PartiallyApplied(replies=tuple(queued[len(self._first) :]), multi=str(multi))
        if isinstance(executed, redis.exceptions.ResponseError):
            # EXECABORT ends the transaction; any other refusal of EXEC leaves MULTI open: the connection is closed.
            connection.in_step = isinstance(executed, redis.exceptions.ExecAbortError)
            connection.watching = not connection.in_step
            first = next((it for it in queued if isinstance(it, redis.exceptions.ResponseError)), executed)
            raise self.refused(first)
        connection.watching = False
        if executed is None:
            return None
        # A command that was refused when it was queued has no reply (then the server says EXECABORT, a proxy may not).
        answers = iter(executed)
        raw = [it if isinstance(it, Exception) else next(answers) for it in queued]
        return await read_replies(connection, queue, raw[len(self._first) :])

    # -- errors ----------------------------------------------------------------------------------------

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report a connection that is lost in the block: before EXEC that means that nothing was done.

        Whatever the body makes of the error, it cannot commit.
        """
        self.asked = now()
        try:
            yield
        except OUT_OF_REACH as error:
            raise self._failed(error) from error

    def transient(self, reply: Any) -> SyncError | None:
        """Return the typed error for an answer that may be another one later; None: it is final, or no error."""
        refused = answered(self._name, reply)
        return self.refused(reply) if refused is not None and refused.code in TRANSIENT else None

    def refused(self, reply: redis.exceptions.ResponseError) -> SyncError:
        """Return the typed error for an answer after which nothing of the transaction was executed, nor can be."""
        error = answered(self._name, reply)
        assert error is not None
        if error.code in TRANSIENT and self._connection is not None:
            self._connection.in_step = False  # close it: the next one may lead to another server
        self.error = error
        return error

    def _failed(self, error: Exception) -> SyncError:
        self.error = answered(self._name, error) or Unreachable(
            f"the connection failed in a transaction on {self.shown()}: {type(error).__name__}: {error}; "
            "nothing was written. Check the server and the network"
        )
        return self.error

    def _check_slots(self, replies: Sequence[Reply]) -> None:
        """Raise TransactionMisuse if a cluster said that a key is not in the slot of those that are watched."""
        for reply in replies:
            moved = isinstance(reply, SlotMoved) and reply.slot != self._slot
            if moved or isinstance(reply, redis.exceptions.ClusterCrossSlotError):
                raise TransactionMisuse.other_slot(text(self._name), keys=tuple(map(text, self.keys)))

    def shown(self) -> str:
        """Return the keys, for a message."""
        return listed(self.keys)
