"""One attempt at a transaction: WATCH and reads now, then writes queued, then MULTI … EXEC in one write.

WATCH is sent together with the first command of the body, so it costs no round trip of its own. That is safe
because `multi` refuses to go on when nothing was watched yet: what a body knows it has read through the transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal, TypeVar

import redis.exceptions
from redis.asyncio import Redis
from redis.commands import AsyncCoreCommands
from redis.crc import key_slot

from .._client.checkout import EXEC, MULTI, NEVER_DECODE, OUT_OF_REACH, CheckedOut, Encodables, checkout, packer
from .._client.cluster import SlotMoved
from .._client.error_replies import TRANSIENT, answered
from .._client.resp import Reply
from .._client.settings import encode
from .._client.topology import slot_of
from .._core.arguments import Name
from .._core.clock import now
from .._core.display import listed, text
from ..errors import SyncError, TransactionMisuse, Unreachable
from .command_flags import CONTROL, blocks, changes_session, first_word, known_to_read, only_reads, without_effect
from .exec_replies import Command, ExecUnanswered, Replies, read_replies, without_multi
from .queued import Queued

T = TypeVar("T")


class TransactionState(Enum):
    """Where a transaction is in its life."""

    NEW = "not entered"
    READING = "reading"
    QUEUING = "queuing"
    ENDED = "ended"


class Transaction(AsyncCoreCommands):
    """What the body of a transaction works with: all commands of the client, on one connection that watches the keys.

    Before `multi` commands are awaited, and only those that read are allowed. After it they are queued, reads as well:
    nothing is sent and no reply is known before the end of the body. Replies look as they do from the client.

    One task at a time uses it, and only while the body runs.

    Example:
        async def deduct(tx: Transaction, amount: int) -> int:
            stock = int(await tx.get("stock:1") or 0)
            if stock < amount:
                raise Insufficient
            tx.multi()
            tx.set("stock:1", stock - amount)
            return stock - amount
    """

    _is_async_client: Literal[True] = True  # redis-py's types ask for both
    _event_dispatcher: Any = None

    _needs_watch = True
    """What is written may depend on what was read, and on nothing else."""

    def __init__(
        self,
        client: Redis,
        keys: tuple[bytes, ...],
        also_watched: tuple[bytes, ...] = (),
        first: Sequence[Encodables] = (),
        response_timeout: float | None = None,
    ) -> None:
        self._client = client
        self._name = keys[0]
        self._keys = dict.fromkeys(keys)  # in their order
        self._slot = slot_of(client)
        self._also_watched = also_watched  # keys of ours
        self._first = first  # executed before what the body queues; their replies are not the body's
        self._to_watch = [*keys, *also_watched]
        self._watched = False
        self._looked_elsewhere = False  # where a cluster has the keys, after it said that they have moved
        self._pack = packer(client)
        self._response_timeout = response_timeout
        self._connection: CheckedOut | None = None
        self._state = TransactionState.READING
        self._busy = False
        self._queue: list[Command] = []
        self._connection_error: SyncError | None = None
        """Why it cannot commit any more."""
        self._asked = now()
        """When it began to wait for the server, most recently."""
        self._in_doubt = False
        """EXEC may have been sent, and is not answered."""

    # -- for the body ----------------------------------------------------------------------------------

    async def watch(self, *names: Name) -> None:  # type: ignore[override]  # redis-py's types contradict each other
        """Watch more keys, and from now on for certain all that were named before. One round trip.

        Needed before something is read in another way than through this transaction. Raises TransactionMisuse after
        `multi`, and for a key in another hash slot of a cluster; TypeError and ValueError for a bad name.

        On cancellation the transaction is over.
        """
        self._check_reading("watch()")
        keys = [encode(self._client, name, "a key") for name in names]
        self._check_slot(keys)
        for key in keys:
            if key not in self._keys:
                self._keys[key] = None
                self._to_watch.append(key)
        if self._to_watch:
            await self._in_turn(self._send([]))

    async def unwatch(self) -> None:  # type: ignore[override]
        """Raise TransactionMisuse: the keys stay watched until the body ends."""
        raise TransactionMisuse("unwatch() is not for the body: raise an error to give up, or return after multi()")

    def multi(self) -> None:
        """End the reading: commands are queued from now on, and executed together at the end of the body.

        Raises TransactionMisuse when it is called twice, or when nothing was read or watched before: then what
        decides about the writes is older than the WATCH.
        """
        self._check_reading("multi()")
        if self._busy:
            raise TransactionMisuse("multi() while a command is in flight: await it first")
        if self._needs_watch and not self._watched:
            raise TransactionMisuse(
                "multi() before anything was read: what the body knows may be older than the WATCH. Read through the "
                "transaction, as in `await tx.get(key)`; or call `await tx.watch()` first, if it reads in other ways"
            )
        self._state = TransactionState.QUEUING

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """Run a command now, or queue it after `multi`; every method of the client's commands ends here.

        Raises TransactionMisuse for a command that cannot be part of a transaction.
        """
        name = first_word(args[0]) if args else ""
        self._check_open(name)
        if not name:
            raise TransactionMisuse("a command without a name")
        if name in CONTROL:
            raise TransactionMisuse(f"{name} is not for the body: use tx.watch() and tx.multi(); EXEC follows the body")
        if changes_session(args):
            raise TransactionMisuse(
                f"{name} would change a connection that others use, too: send it through the client"
            )
        if blocks(args):
            raise TransactionMisuse(f"{name} waits, and nobody could wake it here: wait before the transaction begins")
        if self._state is TransactionState.READING:
            return self._in_turn(self._read(args, options))
        self._queue.append((self._pack(args), args, options))
        return Queued(name, reads=known_to_read(args))

    def get_encoder(self) -> Any:
        """Return what encodes names and values: the client's own."""
        client: Any = self._client
        return client.get_encoder()

    def get_connection_kwargs(self) -> dict[str, Any]:
        """Return the options of the client's connections."""
        client: Any = self._client
        options: dict[str, Any] = client.get_connection_kwargs()
        return options

    def __repr__(self) -> str:
        return f"<Transaction on {self._shown()}: {self._state.value}, {len(self._queue)} queued>"

    # -- inside ----------------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._connection_error is not None:
            raise self._connection_error
        if self._state is TransactionState.NEW:
            raise TransactionMisuse(f"{what} before the beginning: `async with lease.transaction() as tx`")
        if self._state is TransactionState.ENDED:
            raise TransactionMisuse(f"{what} after the end: a transaction lives as long as the body it was given to")

    def _check_reading(self, what: str) -> None:
        self._check_open(what)
        if self._state is TransactionState.QUEUING:
            raise TransactionMisuse(
                f"{what} after multi(): read and watch first, then call tx.multi() once, then write"
            )

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        """One command at a time: replies belong to commands by their order."""
        if self._busy or self._state is not TransactionState.READING:
            work.close()
            self._check_reading("a command that was made before")
            raise TransactionMisuse("two commands at the same time: await one before the next, or use one like MGET")
        self._busy = True
        try:
            return await work
        finally:
            self._busy = False
            if self._has_ended():  # the body left while this ran in another task
                await self._give_back(drop=True)

    def _has_ended(self) -> bool:
        return self._state is TransactionState.ENDED

    async def _read(self, words: Encodables, options: dict[str, Any]) -> Any:
        """Run one command of the body; its error comes out as from the client."""
        if not known_to_read(words) and not await self._only_reads(words):
            raise TransactionMisuse(
                f"{first_word(words[0])} before multi() would run in each attempt, committed or not. Call tx.multi()"
            )
        (reply,) = await self._send([without_effect(words)], raw=NEVER_DECODE in options)
        if isinstance(reply, redis.exceptions.ResponseError):
            refused = answered(self._name, reply)
            raise self._refused(reply) if refused is not None and refused.code in TRANSIENT else reply
        return await self._opened().as_from_client(words, options, reply)

    async def _only_reads(self, words: Encodables) -> bool:
        with self._reporting():
            found = await only_reads(self._client, await self._open(), words)
        if isinstance(found, bool):
            return found
        refused = answered(self._name, found)
        if refused is not None and refused.code in TRANSIENT:
            raise self._refused(found)
        raise TransactionMisuse(
            f"{first_word(words[0])} before multi(), and the server does not say whether it only reads: {found}. Call "
            "tx.multi() first; or, if it reads, let this user ask (+command|info)"
        ) from found

    async def _send(self, commands: Sequence[Encodables], raw: bool = False) -> list[Reply]:
        """Send commands, and WATCH before them for what is not watched yet, in one write; return their replies."""
        of_body = [self._pack(words) for words in commands]  # whose bad arguments are an error of its own
        with self._reporting():
            connection = await self._open()
            # Without MULTI what follows it would be executed immediately, so we find out before: an EXEC ends a WATCH.
            proof: list[Encodables] = [] if connection.executes else [("MULTI",), ("EXEC",)]
            first = [*proof]
            if self._to_watch:
                first.append(("WATCH", *self._to_watch))
                connection.watching = True
            if not self._watched:
                first += self._questions()
            packed = [*map(self._pack, first), *of_body]
            replies = await connection.exchange(packed, range(len(packed) if raw else len(first)))
        if proof:
            connection.check_executes(*replies[:2])
        self._check_slots(replies)
        refused = next((it for it in replies[: len(first)] if isinstance(it, redis.exceptions.ResponseError)), None)
        if isinstance(refused, SlotMoved) and not self._watched and not self._looked_elsewhere:
            self._looked_elsewhere = True
            await self._begin_again()
            return await self._send(commands, raw)
        if refused is not None:
            raise self._refused(refused)
        self._to_watch.clear()
        if not self._watched:
            self._watched = await self._answered(replies[len(proof) + 1 : len(first)])
            if not self._watched:
                return await self._send(commands, raw)
        return replies[len(first) :]

    def _check_slot(self, keys: Sequence[bytes]) -> None:
        """Raise TransactionMisuse for a key in another slot, also of the same shard: a slot may be moved any time."""
        other = None if self._slot is None else next((key for key in keys if key_slot(key) != self._slot), None)
        if other is not None:
            raise self._other_slot(f"{text(other)!r} is")

    def _check_slots(self, replies: Sequence[Reply]) -> None:
        """Raise TransactionMisuse if a cluster said that a key is not in the slot of those that are watched."""
        for reply in replies:
            moved = isinstance(reply, SlotMoved) and reply.slot != self._slot
            if moved or isinstance(reply, redis.exceptions.ClusterCrossSlotError):
                raise self._other_slot(f"a command of the transaction on {self._shown()} has a key")

    def _other_slot(self, what: str) -> TransactionMisuse:
        return TransactionMisuse(
            f"{what} in another hash slot of the cluster than {text(self._name)!r}: nothing was written. Give all keys "
            "a common hash tag, {like}:this and {like}:that"
        )

    def _questions(self) -> Sequence[Encodables]:
        """Return what is asked right after the first WATCH, for those who do more than a plain transaction."""
        return ()

    async def _answered(self, replies: Sequence[Reply]) -> bool:
        """Take the (undecoded) answers; return whether to go on, or to begin again."""
        return True

    async def _begin_again(self) -> None:
        """Give the connection back; the next command watches everything anew, on whatever connection."""
        await self._give_back(drop=False)
        self._to_watch = [*self._keys, *self._also_watched]
        self._watched = False

    async def _open(self) -> CheckedOut:
        if self._connection is None:
            self._connection = await checkout(self._client, self._response_timeout)
        return self._connection

    def _opened(self) -> CheckedOut:
        assert self._connection is not None
        return self._connection

    # -- its end ---------------------------------------------------------------------------------------

    async def _commit(self) -> Replies | ExecUnanswered | None:
        """Execute the queued commands. Return the replies; None when a watched key was changed; ExecUnanswered.

        Raises TransactionMisuse, CommandRefused, Unreachable: nothing was done; PartiallyApplied: some commands failed.
        """
        self._check_commit()
        return await self._execute()

    def _check_commit(self) -> None:
        self._check_open("the commit")
        if self._busy:
            raise TransactionMisuse("the body ended while a command was in flight in another task: await it before")
        if self._state is TransactionState.READING:
            raise TransactionMisuse(
                "the body ended without multi(): call tx.multi() before the writes, and also when there is nothing to "
                "write (then it is confirmed that all that was read was true at one moment)"
            )
        self._state = TransactionState.ENDED

    async def _execute(self) -> Replies | ExecUnanswered | None:
        connection = self._opened()
        self._asked = now()
        packed = [MULTI, *map(self._pack, self._first), *(command for command, _, _ in self._queue), EXEC]
        self._in_doubt = True
        try:
            multi, *queued, executed = await connection.exchange(packed, raw=range(len(packed)))
        except OUT_OF_REACH as error:
            # An error that the server answered came before EXEC, or instead of it: nothing was executed.
            if not connection.written or answered(self._name, error) is not None:
                self._in_doubt = False
                raise self._failed(error) from error
            return ExecUnanswered(error)
        self._in_doubt = False
        self._check_slots([*queued, executed])
        if isinstance(multi, redis.exceptions.ResponseError):
            raise without_multi(multi, queued[len(self._first) :])
        if isinstance(executed, redis.exceptions.ResponseError):
            # EXECABORT ends the transaction; any other refusal of EXEC leaves MULTI open: the connection is closed.
            connection.in_step = isinstance(executed, redis.exceptions.ExecAbortError)
            connection.watching = not connection.in_step
            first = next((it for it in queued if isinstance(it, redis.exceptions.ResponseError)), executed)
            raise self._refused(first)
        connection.watching = False
        if executed is None:
            return None
        # A command that was refused when it was queued has no reply (then the server says EXECABORT, a proxy may not).
        answers = iter(executed)
        raw = [it if isinstance(it, Exception) else next(answers) for it in queued]
        return await read_replies(connection, self._queue, raw[len(self._first) :])

    async def _end(self, *, drop: bool) -> None:
        """Give the connection back; nothing works any more. On cancellation that is finished first."""
        self._state = TransactionState.ENDED
        if not self._busy:  # else a task that the body left behind uses it, and gives it back
            await self._give_back(drop)

    async def _give_back(self, drop: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.give_back(drop=drop)

    # -- trouble ---------------------------------------------------------------------------------------

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Before EXEC a lost connection means: nothing was done. Whatever the body makes of it, it cannot commit."""
        self._asked = now()
        try:
            yield
        except OUT_OF_REACH as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> SyncError:
        refused = answered(self._name, error)
        self._connection_error = refused or Unreachable(
            f"the connection failed in a transaction on {self._shown()}: {type(error).__name__}: {error}; nothing was "
            "written. Check the server and the network"
        )
        return self._connection_error

    def _refused(self, error: redis.exceptions.ResponseError) -> SyncError:
        """Return the typed error for an answer after which nothing of the transaction was executed, nor can be."""
        trouble = answered(self._name, error)
        assert trouble is not None
        if trouble.code in TRANSIENT and self._connection is not None:
            self._connection.in_step = False  # close it: the next one may lead to another server
        self._connection_error = trouble
        return trouble

    def _shown(self) -> str:
        return listed(self._keys)
