"""One name, read by a coordinator: behind all that it has sent about the name, and each round at one moment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from .._client.cluster import Cluster
from .._client.error_replies import refusal, with_own_errors
from .._client.resp import Replies, Reply
from .._client.topology import Topology
from .._core.keys import Keys
from .._engine.watch_dialogue import microseconds
from .._transport.call import not_understood
from ..errors import SyncError
from .parties import Listening, listening_in
from .reading import TOMBSTONES, Reading, reading_of
from .views import NameView

Read: TypeAlias = Callable[..., Awaitable[Replies]]
"""Runs commands on keys at one moment, as `Hub.read`."""

ATTEMPTS = 3
"""Number of attempts at a name that changes between the two rounds. After that, what went meanwhile is left out."""
MANY = 10_000
"""Number of permits that are read beyond those shown where many requests were undone."""


async def look(read: Read, servers: Topology, keys: Keys, shown: int, *, whole: bool) -> NameView:
    """Return the view of a name; raise CommandRefused if the server refuses to show a part of it.

    ``whole``: in two round trips; else in one, without the weights and fences of permits, connections and marks.
    """
    now, more = 0, TOMBSTONES
    try:
        for _ in range(ATTEMPTS):
            reading = reading_of(keys, shown, more)
            replies = await read(reading.keys, *reading.first_asked(now))
            now = microseconds(replies[0])
            reading.first(replies[1:], now)
            if reading.stale and more < MANY:
                more = MANY
                continue
            view = await _details(read, servers, reading, whole)
            if not reading.stale:
                break
    except SyncError:
        raise
    except (ValueError, TypeError) as error:
        raise not_understood(keys.name, error) from error
    if reading.refused is not None:
        raise refusal(keys.name, str(reading.refused), keys=keys.all)
    return view


async def _details(read: Read, servers: Topology, reading: Reading, whole: bool) -> NameView:
    listening: Listening = {}
    replies: Replies = []
    if whole and reading.known:
        channels = sorted(reading.channels())
        _, *replies, heard = await read(reading.keys, *reading.then_asked(), (b"PUBSUB", b"NUMSUB", *channels))
        listening = listening_in(heard)
        if isinstance(servers, Cluster):  # a process that is not connected to this shard may be connected to another
            absent = reading.absent(listening)
            listening = {channel: here for channel, here in listening.items() if channel not in absent}
    return reading.view(replies, servers.address_at(reading.keys.all[0]), listening)


def brief_view(reading: Reading, reply: Reply) -> NameView | None:
    """Return the view of a name by the reply to its first round alone; None: the server refused a part of it."""
    time, *replies = with_own_errors(reply)
    reading.first(replies, microseconds(time))
    return None if reading.refused is not None else reading.view([], "", {})
