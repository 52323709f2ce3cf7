"""The check that the connection of a link still answers, in every tick while there is a reason for it."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

from redis.asyncio import Redis

from .._client.settings import health_check_interval_of
from .._core.clock import now
from .connection import Connection
from .endpoint import EndpointWatch

MAX_TICK = 0.25
"""Most seconds between two ticks."""

RESTED = 2.0
"""Seconds of silence after which a connection may have been dropped without notice, as by a NAT, when it is used."""
PROMPT = 1.0
"""Seconds that the first answer on a connection that has rested may take."""


class Patience:
    """The seconds that an answer may take: fewer when the connection has rested.

    A ``health_check_interval`` of the client that is shorter than either limit takes its place.
    """

    def __init__(self, client: Redis, response_timeout: float) -> None:
        interval = health_check_interval_of(client)
        self.usual = response_timeout
        self.prompt: float = min(PROMPT, interval, response_timeout)
        self._rested = min(RESTED, interval)

    def after(self, silence: float) -> float:
        """Return the limit for a command that was sent after so many seconds of silence."""
        return self.prompt if silence > self._rested else self.usual


class Watched(Protocol):
    """A link, as its ticks know it. None of its methods raises."""

    def present_connection(self) -> Connection | None:
        """Return the connection in use, if there is one."""
        ...

    def needed(self) -> bool:
        """Return whether a lease or a request depends on pushes."""
        ...

    def drop(self, why: str) -> None:
        """Give up the connection, and open another."""

    def ping(self, connection: Connection) -> None:
        """Ask the server for a sign of life."""

    def tick(self, late: bool) -> None:
        """Do what is due in every tick: fail the calls whose time is up, tell the log of outages.

        ``late``: the event loop did not run for a while, so there may be replies that it has not read.
        """

    def goes_on(self) -> bool:
        """Return whether another tick is needed."""
        ...


class Liveness:
    """Notices overdue replies, silent connections and connections that no longer lead to the right server."""

    def __init__(self, client: Redis, response_timeout: float, link: Watched) -> None:
        self._patience = Patience(client, response_timeout)
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pinged = 0.0  # local clock
        self._due = math.inf  # the next tick, by the local clock
        self._resumed = 0.0  # when a tick was late for the last time: what is waited for may not have been sent before
        self._endpoint = EndpointWatch(client, link.drop)
        self._stopped = False

    def start(self) -> None:
        """Tick from now on, until the link has nothing to look at."""
        if self._timer is None and not self._stopped:
            tick = min(MAX_TICK, self._patience.prompt / 4)
            self._due = now() + tick
            self._timer = self._loop.call_later(tick, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if late := now() > self._due + MAX_TICK:
            self._resumed = now()
        self._link.tick(late)
        if (connection := self._link.present_connection()) is not None:
            self._check(connection)
        if self._link.goes_on():
            self.start()

    def _check(self, connection: Connection) -> None:
        needed, time = self._link.needed, now()
        oldest, heard = connection.oldest(self._pinged), connection.heard
        if oldest is not None:
            since = max(oldest, heard, self._resumed)
            limit = self._patience.after(max(oldest, self._resumed) - heard)
            if time - since > limit:
                self._link.drop(f"no answer for {limit:g} seconds")
        elif needed() and time - heard > self._patience.usual:
            self._pinged = time
            self._link.ping(connection)
        self._endpoint.check(connection, connection.leads_to, needed)

    def stop(self) -> None:
        """Stop ticking for good, and cancel the check of the endpoint without waiting for its end."""
        self._stopped = True
        self._endpoint.stop()
        if self._timer is not None:
            self._timer.cancel()

    def abandon(self) -> None:
        """Start no more ticks: there is no event loop, or it is the parent's."""
        self._stopped = True

    async def close(self) -> None:
        """Stop ticking for good, and wait for the end of the check of the endpoint."""
        self.stop()
        await self._endpoint.close()
