"""The placeholder for the reply to a queued command, which is not known before EXEC."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NoReturn

from ..errors import TransactionMisuse


class QueuedReply:
    """The result of a queued command. Its reply comes with EXEC, so whatever looks at it raises TransactionMisuse.

    Awaiting that of a write does nothing, since redis-py's types ask for an ``await``. Code that awaits a read wants to
    decide by what it says, and cannot.
    """

    __slots__ = ("_name", "_reads")

    def __init__(self, name: str, reads: bool) -> None:
        self._name = name
        self._reads = reads

    def __await__(self) -> Generator[Any, Any, QueuedReply]:
        if self._reads:
            raise TransactionMisuse.awaited_read(self._name)
        return self
        yield

    def __repr__(self) -> str:
        return f"<{self._name}, queued: the reply comes with EXEC>"

    def _not_known(self, *_: object) -> NoReturn:
        """Raise TransactionMisuse."""
        raise TransactionMisuse.reply_not_known(self._name)

    __bool__ = __str__ = __format__ = __int__ = __float__ = __index__ = __bytes__ = __len__ = _not_known
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __getitem__ = __contains__ = _not_known
    __hash__ = object.__hash__
