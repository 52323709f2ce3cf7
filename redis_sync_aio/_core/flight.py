"""A call that works for all calls of this process with the same key: the others wait for what it finds."""

from __future__ import annotations

import asyncio


class Flight:
    """The call of one task, its leader, and the news that it has for the others."""

    def __init__(self) -> None:
        self.leader: asyncio.Task[object] | None = asyncio.current_task()
        self._news: bytes | None = None
        self._told = self._new_future()

    def tell(self, news: bytes | None = None) -> None:
        """Wake the others with ``news``; None: with the latest, as the leader leaves."""
        self._news = self._news if news is None else news
        told, self._told = self._told, self._new_future()
        told.set_result(None)

    async def next(self, seen: bytes | None, timeout: float | None) -> bytes | None:
        """Return the news when they are other than ``seen``, when the leader leaves, or after ``timeout`` seconds.

        Safe to cancel.
        """
        if self._news is None or self._news == seen:
            await asyncio.wait([self._told], timeout=timeout)
        return self._news

    @staticmethod
    def _new_future() -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()
