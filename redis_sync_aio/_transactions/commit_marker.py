"""The marker of one attempt at a transaction: it tells whether an EXEC whose answer was lost was executed.

The marker is a key of its own for each attempt. It is watched with the other keys, and set to "done" in the same
MULTI. When the answer to EXEC is lost, there are three cases: it was executed; it never will be; or it is still on its
way, in some socket, and will be executed later (a clean-up can be overtaken by what it cleans up). So to look is not
enough. We set the marker to "void", if it does not exist:

- it says "done": EXEC came first, and all writes were made;
- it says "void": EXEC was not executed before. Should it arrive now, it finds that a key which it watches was changed,
  and does nothing. So the body may run again, immediately.

Either way the answer holds forever. Asking twice gives the same answer: a client that finds "void" has set it itself.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Any

import redis.exceptions
from redis.asyncio import Redis

from .._client.checkout import OUT_OF_REACH, Encodables, checkout, packer
from .._client.error_replies import TRANSIENT, answered
from .._client.retry import RETRY
from .._client.settings import response_timeout_of
from .._core.clock import now
from .._core.keys import marker_key

DONE, VOID = b"done", b"void"
MARKER_TTL = 60.0
"""Seconds that a marker stays on the server."""
RETRY_FOR = 20.0
"""Seconds for which the server is asked while it is out of reach."""


class CommitMarker:
    """The mark that says whether one attempt was committed."""

    def __init__(self, client: Redis, key: bytes, prefix: bytes, response_timeout: float | None = None) -> None:
        self._client = client
        self._response_timeout = response_timeout_of(client, response_timeout)
        self.key = marker_key(key, secrets.token_hex(8).encode(), prefix)
        self.done: Encodables = self._set(DONE)

    def _set(self, value: bytes, *options: str) -> Encodables:
        return ("SET", self.key, value, "PX", int(MARKER_TTL * 1000), *options)

    async def find_out(self, sent: float) -> bool | None:
        """Return whether EXEC, sent at that local time, was executed (True) or never will be (False); None: not known.

        Takes as long as Redis is out of reach, 20 seconds at most; raises CommandRefused when the server refuses to
        tell. On cancellation the question may still be answered.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_FOR):
                for delay in RETRY:
                    value = await self._ask()
                    if value == DONE:
                        return True
                    if value == VOID:  # after `MARKER_TTL` a "done" would be forgotten, and our "void" prove nothing
                        return False if now() < sent + MARKER_TTL else None
                    await asyncio.sleep(delay)
        return None

    async def _ask(self) -> bytes | None:
        try:
            connection = await checkout(self._client, self._response_timeout)
        except OUT_OF_REACH as error:
            self._check_passing(error)
            return None
        try:
            pack = packer(self._client)
            packed = [pack(words) for words in (self._set(VOID, "NX"), ("GET", self.key))]
            replies: list[Any] = await connection.exchange(packed, raw=(0, 1))
        except OUT_OF_REACH as error:
            self._check_passing(error)
            return None
        finally:
            await connection.give_back(drop=not connection.in_step)
        stored, value = replies
        refused = stored if value is None else value
        if isinstance(refused, redis.exceptions.ResponseError):
            self._check_passing(refused)
            return None
        found: bytes | None = value
        return found

    def _check_passing(self, error: Exception) -> None:
        """Raise CommandRefused if the server will not tell however often it is asked."""
        refused = answered(self.key, error)
        if refused is not None and refused.code not in TRANSIENT:
            raise refused
