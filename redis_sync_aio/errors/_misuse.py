"""The error of a transaction whose body does what cannot work."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from ._base import SyncError, listed


class Misuse(Enum):
    """Mistakes in the body of a transaction, with their messages. ``{}`` is a command, a call, keys or a reply."""

    # -- a command that cannot be part of a transaction
    WITHOUT_NAME = "a command without a name: the first argument is the name, as in ('GET', key)"
    BAD_NAME = "the name of a command must be str or bytes, not {}"
    CONTROL = "{} is not for the body: use tx.watch() and tx.multi(); EXEC follows the body"
    UNWATCH = "unwatch() is not for the body: raise an error to give up, or return after multi()"
    CHANGES_SESSION = "{} would change a connection that others use, too: send it through the client"
    BLOCKS = "{} cannot block inside a transaction: call it before the transaction starts"

    # -- reading and writing
    NOTHING_READ = (
        "multi() before anything was read: what the body knows may be older than the WATCH. Read through the "
        "transaction, as in `await tx.get(key)`; or call `await tx.watch()` first, if it reads in other ways"
    )
    AFTER_MULTI = "{} after multi(): read and watch first, then call tx.multi() once, then write"
    WRITE_BEFORE_MULTI = "{} before multi() would run in each attempt, committed or not. Call tx.multi() first"
    UNKNOWN_BEFORE_MULTI = (
        "{} before multi(), and the server does not say whether it only reads: {}. Call tx.multi() "
        "first; or, if it reads, let this user ask (+command|info)"
    )
    AWAITED_READ = (
        "{} was awaited after multi(), when no reply comes before the end: read before tx.multi(). Or "
        "leave out the `await`, and look at the replies to the transaction"
    )
    REPLY_NOT_KNOWN = (
        "the reply to {} is not known before EXEC, so the body cannot use it: read before tx.multi(), or "
        "look at the replies to the transaction"
    )

    # -- one command at a time
    TWO_COMMANDS = "two commands at the same time: await one before the next, or use one like MGET"
    MULTI_IN_FLIGHT = "multi() while a command is in flight: await it first"
    ENDED_IN_FLIGHT = "the body ended while a command was in flight in another task: await it before the body ends"

    # -- the beginning and the end of a body, and the loop of attempts
    NOT_BEGUN = "{} before the transaction began: enter it by `async with lease.transaction() as tx`"
    ENDED = "{} after the end: a transaction lives as long as the body it was given to"
    WITHOUT_MULTI = (
        "the body ended without multi(): call tx.multi() before the writes, and also when there is nothing to "
        "write (EXEC then confirms that all reads were true at one moment)"
    )
    ENTERED_TWICE = (
        "a second `async with`: a transaction lives as long as the body it was given to; call lease.transaction() again"
    )
    NESTED = (
        "a transaction inside the body of another one, on the same client: it would wait for a connection that the "
        "outer one has, and make it conflict. Do all in one, or begin it after the other has ended"
    )
    NOT_ENTERED = (
        "an attempt at {} was not entered: nothing was written. In the loop, enter the attempt: "
        "`async with attempt as tx`"
    )
    CAUGHT = (
        "the last attempt at {} was ended by {}, which was caught inside the loop: nothing was "
        "written, and there is no next attempt. Catch it outside the loop, or leave the loop with `break`"
    )


class TransactionMisuse(SyncError, RuntimeError):
    """The body of a transaction did what cannot work. Nothing was written.

    Examples: a write before ``multi()``, a read after it, or no ``multi()``; a queued command that is awaited; a nested
    transaction on the same client; BLPOP, SELECT; keys in several hash slots of a cluster; in the loop form, an error
    caught inside the loop.

    **State:** nothing was written.

    **Do:** follow the message. It is a mistake in the program, and fails every time. Keys that are used together need a
    common hash tag: ``{user:7}:lock`` and ``{user:7}:balance``. It is also a `RuntimeError`.
    """

    @staticmethod
    def of(misuse: Misuse, *facts: str) -> TransactionMisuse:
        """Return the error for a mistake, with its facts in the message."""
        return TransactionMisuse(misuse.value.format(*facts))

    @staticmethod
    def other_slot(name: str, *, key: str = "", keys: Collection[str] = ()) -> TransactionMisuse:
        """Return the error for a key in another hash slot of the cluster than ``name``.

        ``key`` is that key. If it is not known, ``keys`` are those of the transaction.
        """
        what = f"{key!r} is" if key else f"a command of the transaction on {listed(keys)} has a key"
        return TransactionMisuse(
            f"{what} in another hash slot of the cluster than {name!r}: nothing was written. Give all keys a common "
            "hash tag, {like}:this and {like}:that"
        )
