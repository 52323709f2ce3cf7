"""The error of a transaction whose body does what cannot work."""

from __future__ import annotations

from collections.abc import Collection

from ._base import SyncError, listed


class TransactionMisuse(SyncError, RuntimeError):
    """The body of a transaction did what cannot work. Nothing was written.

    This is a mistake in the program; the message says what to do instead. Examples are a blocking command, a read after
    ``multi()``, or keys in several hash slots of a cluster. It is also a `RuntimeError`.
    """

    # -- a command that cannot be part of a transaction ------------------------------------------------

    @staticmethod
    def without_name() -> TransactionMisuse:
        """Return the error for a command that has no name."""
        return TransactionMisuse("a command without a name: the first argument is the name, as in ('GET', key)")

    @staticmethod
    def bad_name(shown: str) -> TransactionMisuse:
        """Return the error for a name of a command that is neither text nor bytes; ``shown`` is its repr."""
        return TransactionMisuse(f"the name of a command must be str or bytes, not {shown}")

    @staticmethod
    def control(command: str) -> TransactionMisuse:
        """Return the error for a command that begins or ends transactions."""
        return TransactionMisuse(f"{command} is not for the body: use tx.watch() and tx.multi(); EXEC follows the body")

    @staticmethod
    def unwatch() -> TransactionMisuse:
        """Return the error for ``unwatch()``."""
        return TransactionMisuse("unwatch() is not for the body: raise an error to give up, or return after multi()")

    @staticmethod
    def changes_session(command: str) -> TransactionMisuse:
        """Return the error for a command that changes its connection."""
        return TransactionMisuse(
            f"{command} would change a connection that others use, too: send it through the client"
        )

    @staticmethod
    def blocks(command: str) -> TransactionMisuse:
        """Return the error for a command that waits for another client."""
        return TransactionMisuse(f"{command} waits, and nobody could wake it here: wait before the transaction begins")

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

    # -- reading and writing ---------------------------------------------------------------------------

    @staticmethod
    def nothing_read() -> TransactionMisuse:
        """Return the error for ``multi()`` before anything was read or watched."""
        return TransactionMisuse(
            "multi() before anything was read: what the body knows may be older than the WATCH. Read through the "
            "transaction, as in `await tx.get(key)`; or call `await tx.watch()` first, if it reads in other ways"
        )

    @staticmethod
    def after_multi(what: str) -> TransactionMisuse:
        """Return the error for ``what`` is possible only while the transaction reads."""
        return TransactionMisuse(f"{what} after multi(): read and watch first, then call tx.multi() once, then write")

    @staticmethod
    def write_before_multi(command: str) -> TransactionMisuse:
        """Return the error for a command that writes before ``multi()``."""
        return TransactionMisuse(
            f"{command} before multi() would run in each attempt, committed or not. Call tx.multi() first"
        )

    @staticmethod
    def unknown_before_multi(command: str, *, reply: str) -> TransactionMisuse:
        """Return the error for a command before ``multi()`` of which the server does not say whether it only reads."""
        return TransactionMisuse(
            f"{command} before multi(), and the server does not say whether it only reads: {reply}. Call tx.multi() "
            "first; or, if it reads, let this user ask (+command|info)"
        )

    @staticmethod
    def awaited_read(command: str) -> TransactionMisuse:
        """Return the error for a queued read that was awaited."""
        return TransactionMisuse(
            f"{command} was awaited after multi(), when no reply comes before the end: read before tx.multi(). Or "
            "leave out the `await`, and look at the replies to the transaction"
        )

    @staticmethod
    def reply_not_known(command: str) -> TransactionMisuse:
        """Return the error for the use of the reply to a queued command."""
        return TransactionMisuse(
            f"the reply to {command} is not known before EXEC, so the body cannot use it: read before tx.multi(), or "
            "look at the replies to the transaction"
        )

    # -- one command at a time -------------------------------------------------------------------------

    @staticmethod
    def two_commands() -> TransactionMisuse:
        """Return the error for a command while another one is in flight."""
        return TransactionMisuse("two commands at the same time: await one before the next, or use one like MGET")

    @staticmethod
    def multi_in_flight() -> TransactionMisuse:
        """Return the error for ``multi()`` while a command is in flight."""
        return TransactionMisuse("multi() while a command is in flight: await it first")

    @staticmethod
    def ended_in_flight() -> TransactionMisuse:
        """Return the error for a body that ends while a command is in flight."""
        return TransactionMisuse(
            "the body ended while a command was in flight in another task: await it before the body ends"
        )

    # -- the beginning and the end of a body -----------------------------------------------------------

    @staticmethod
    def not_begun(what: str) -> TransactionMisuse:
        """Return the error for ``what`` before the body of a guarded transaction."""
        return TransactionMisuse(
            f"{what} before the transaction began: enter it by `async with lease.transaction() as tx`"
        )

    @staticmethod
    def ended(what: str) -> TransactionMisuse:
        """Return the error for ``what`` after the body."""
        return TransactionMisuse(f"{what} after the end: a transaction lives as long as the body it was given to")

    @staticmethod
    def without_multi() -> TransactionMisuse:
        """Return the error for a body that ends without ``multi()``."""
        return TransactionMisuse(
            "the body ended without multi(): call tx.multi() before the writes, and also when there is nothing to "
            "write (then it is confirmed that all that was read was true at one moment)"
        )

    @staticmethod
    def entered_twice() -> TransactionMisuse:
        """Return the error for a second ``async with`` on a guarded transaction."""
        return TransactionMisuse(
            "a second `async with`: a transaction lives as long as the body it was given to; call lease.transaction() "
            "again"
        )

    @staticmethod
    def nested() -> TransactionMisuse:
        """Return the error for a transaction inside the body of another one on the same client."""
        return TransactionMisuse(
            "a transaction inside the body of another one, on the same client: it would wait for a connection that the "
            "outer one has, and make it conflict. Do all in one, or begin it after the other is over"
        )

    # -- the loop of attempts --------------------------------------------------------------------------

    @staticmethod
    def not_entered(keys: Collection[str]) -> TransactionMisuse:
        """Return the error for an attempt in whose place the loop asks for the next one."""
        return TransactionMisuse(
            f"an attempt at {listed(keys)} was not entered: nothing was written. In the loop, enter the attempt: "
            "`async with attempt as tx`"
        )

    @staticmethod
    def caught(keys: Collection[str], error: str) -> TransactionMisuse:
        """Return the error for a loop that goes on after the ``error`` that ended its last attempt."""
        return TransactionMisuse(
            f"the last attempt at {listed(keys)} was ended by {error}, which was caught inside the loop: nothing was "
            "written, and there is no next attempt. Catch it outside the loop, or leave the loop with `break`"
        )

    # -- the guard -------------------------------------------------------------------------------------
