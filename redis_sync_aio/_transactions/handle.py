"""The handle of a transaction's body: its commands run immediately, or are queued, by the state of the transaction.

The conversation with the server is that of `watch_session`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from enum import Enum
from typing import Any, Literal, TypeVar

import redis.exceptions
from redis.commands import AsyncCoreCommands

from .._client.checkout import NEVER_DECODE, Encodables
from .._client.settings import encode
from .._core.arguments import Name
from ..errors import TransactionMisuse
from .command_flags import CONTROL, blocks, changes_session, first_word, known_to_read, only_reads, without_effect
from .exec_replies import Command, ExecUnanswered, Replies
from .queued_reply import QueuedReply
from .watch_session import WatchSession

T = TypeVar("T")


class TransactionState(Enum):
    """The states of a transaction."""

    NEW = "not entered"
    READING = "reading"
    QUEUING = "queuing"
    ENDED = "ended"


class Transaction(AsyncCoreCommands):
    """The handle of a transaction's body: all commands of the client, on one connection that watches the keys.

    Before `multi` commands are awaited, and only those that read are allowed. After it they are queued, reads as well:
    nothing is sent and no reply is known before the end of the body. Replies look as they do from the client.

    One task at a time uses it, and only while the body runs.

    Example:
        ```python
        from redis_sync_aio.types import Transaction

        async def deduct(tx: Transaction, amount: int) -> int:
            stock = int(await tx.get("stock:1") or 0)
            if stock < amount:
                raise Insufficient
            tx.multi()
            tx.set("stock:1", stock - amount)
            return stock - amount
        ```
    """

    _is_async_client: Literal[True] = True  # redis-py's types ask for both
    _event_dispatcher: Any = None

    _needs_watch = True
    """Whether the writes may depend on nothing but what was read through the transaction."""

    def __init__(self, session: WatchSession) -> None:
        self._session = session
        self._state = TransactionState.READING
        self._busy = False
        self._queue: list[Command] = []

    # -- for the body ----------------------------------------------------------------------------------

    async def watch(self, *names: Name) -> None:  # type: ignore[override]  # redis-py's types contradict each other
        """Watch more keys, together with all that were named before. One round trip.

        Needed before the body reads in another way than through this transaction.

        Raises:
            TransactionMisuse: It is called after `multi`, or for a key in another hash slot of a cluster.
            TypeError, ValueError: A name is bad.

        On cancellation the transaction is over.
        """
        self._check_reading("watch()")
        keys = [encode(self._session.client, name, "a key") for name in names]
        if self._session.add(keys):
            await self._in_turn(self._session.send([]))

    async def unwatch(self) -> None:  # type: ignore[override]
        """Raise TransactionMisuse: the keys stay watched until the body ends."""
        raise TransactionMisuse.unwatch()

    def multi(self) -> None:
        """End the reading. From now on commands are queued, and executed together at the end of the body.

        Raises:
            TransactionMisuse: It was called before. Or nothing was read or watched yet, so that the data behind the
                writes would be older than the WATCH.
        """
        self._check_reading("multi()")
        if self._busy:
            raise TransactionMisuse.multi_in_flight()
        if self._needs_watch and not self._session.watched:
            raise TransactionMisuse.nothing_read()
        self._state = TransactionState.QUEUING

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """Run a command now, or queue it after `multi`. Every command method of the client ends here.

        Raises:
            TransactionMisuse: The command cannot be part of a transaction.
        """
        name = first_word(args[0]) if args else ""
        self._check_open(name)
        if not name:
            raise TransactionMisuse.without_name()
        if name in CONTROL:
            raise TransactionMisuse.control(name)
        if changes_session(args):
            raise TransactionMisuse.changes_session(name)
        if blocks(args):
            raise TransactionMisuse.blocks(name)
        if self._state is TransactionState.READING:
            return self._in_turn(self._read(args, options))
        self._queue.append((self._session.pack(args), args, options))
        return QueuedReply(name, reads=known_to_read(args))

    def get_encoder(self) -> Any:
        """Return what encodes names and values: the client's own."""
        client: Any = self._session.client
        return client.get_encoder()

    def get_connection_kwargs(self) -> dict[str, Any]:
        """Return the options of the client's connections."""
        client: Any = self._session.client
        options: dict[str, Any] = client.get_connection_kwargs()
        return options

    def __repr__(self) -> str:
        return f"<Transaction on {self._session.shown()}: {self._state.value}, {len(self._queue)} queued>"

    # -- inside ----------------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._session.error is not None:
            raise self._session.error
        if self._state is TransactionState.NEW:
            raise TransactionMisuse.not_begun(what)
        if self._state is TransactionState.ENDED:
            raise TransactionMisuse.ended(what)

    def _check_reading(self, what: str) -> None:
        self._check_open(what)
        if self._state is TransactionState.QUEUING:
            raise TransactionMisuse.after_multi(what)

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one command at a time: replies belong to commands by their order."""
        if self._busy or self._state is not TransactionState.READING:
            work.close()
            self._check_reading("a command that was made before")
            raise TransactionMisuse.two_commands()
        self._busy = True
        try:
            return await work
        finally:
            self._busy = False
            if self._has_ended():  # the body left while this ran in another task
                await self._session.give_back(drop=True)

    def _has_ended(self) -> bool:
        return self._state is TransactionState.ENDED

    async def _read(self, words: Encodables, options: dict[str, Any]) -> Any:
        """Run one command of the body; its error comes out as from the client."""
        if not known_to_read(words) and not await self._only_reads(words):
            raise TransactionMisuse.write_before_multi(first_word(words[0]))
        session = self._session
        (reply,) = await session.send([without_effect(words)], raw=NEVER_DECODE in options)
        if isinstance(reply, redis.exceptions.ResponseError):
            raise session.transient(reply) or reply
        return await session.opened().as_from_client(words, options, reply)

    async def _only_reads(self, words: Encodables) -> bool:
        session = self._session
        with session.reporting():
            found = await only_reads(session.client, await session.open(), words)
        if isinstance(found, bool):
            return found
        if (error := session.transient(found)) is not None:
            raise error
        raise TransactionMisuse.unknown_before_multi(first_word(words[0]), reply=str(found)) from found

    # -- its end ---------------------------------------------------------------------------------------

    async def _commit(self) -> Replies | ExecUnanswered | None:
        """Execute the queued commands. Return the replies; None when a watched key was changed; ExecUnanswered.

        Raises TransactionMisuse, CommandRefused, Unreachable: nothing was done; PartiallyApplied: some commands failed.
        """
        self._check_commit()
        return await self._session.execute(self._queue)

    def _check_commit(self) -> None:
        self._check_open("the commit")
        if self._busy:
            raise TransactionMisuse.ended_in_flight()
        if self._state is TransactionState.READING:
            raise TransactionMisuse.without_multi()
        self._state = TransactionState.ENDED

    async def _end(self, *, drop: bool) -> None:
        """Give the connection back; nothing works any more. On cancellation that is finished first."""
        self._state = TransactionState.ENDED
        if not self._busy:  # else a task that the body left behind uses it, and gives it back
            await self._session.give_back(drop)
