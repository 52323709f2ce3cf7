"""Holders and waiters, as tokens and tickets tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from .._client.resp import Reply, ReplyError
from .._core.display import text
from .._core.keys import Maker, label_of
from .._engine.snapshot import Ticket
from .._scripts.constants import POLLERS_TICKET, WRITER_WEIGHT
from .views import Access, HolderView, WaiterView

Listening: TypeAlias = Mapping[bytes, bool]
"""Of each channel whether anybody listens; without those that are not known."""

FIRST_TIME = 10**15
"""Microseconds; a score below it is a place in a queue, not the time when a ticket came."""


class Queued(NamedTuple):
    """A ticket in the queue, and what is known of it."""

    member: bytes
    ticket: Ticket
    since: float | None  # server time in microseconds


def queued(members: Iterable[tuple[bytes, float]], of_lock: bool) -> list[Queued]:
    """Return the tickets among the members of a queue, which come with their scores."""
    read = Ticket.of_lock if of_lock else Ticket.parse
    return [
        Queued(member, ticket, score if score >= FIRST_TIME else None)
        for member, score in members
        if member != POLLERS_TICKET and (ticket := read(member)) is not None
    ]


def channels(tokens: Iterable[bytes], tickets: Iterable[Queued]) -> set[bytes]:
    """Return what the processes that hold and wait listen to if they are connected."""
    found = {one.ticket.inbox for one in tickets if one.ticket.inbox}
    for maker in map(Maker.of, tokens):
        if maker is not None and not maker.polls:
            found |= {maker.inbox, maker.presence}
    return found


def listening_in(reply: Reply) -> dict[bytes, bool]:
    """Return of each channel in a reply to PUBSUB NUMSUB whether anybody listens; nothing if that was refused."""
    if isinstance(reply, ReplyError):
        return {}
    numbers = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {channel: int(number) > 0 for channel, number in numbers}


def absent(tokens: Iterable[bytes], listening: Listening) -> set[bytes]:
    """Return the presences of the processes that hold and are not connected to this server."""
    makers = [maker for token in tokens if (maker := Maker.of(token)) is not None]
    return {maker.presence for maker in makers if _connected(maker, listening) is False}


def _connected(maker: Maker, listening: Listening) -> bool | None:
    """Return whether the process listens to its inbox of then, or has another one now; None if nothing tells."""
    if maker.polls or maker.presence not in listening:
        return None
    return listening.get(maker.inbox, False) or listening[maker.presence]


def waiter(
    one: Queued, now: int, permits: int, polls_until: Reply, listening: Listening, polls_known: bool = True
) -> WaiterView:
    """Return what is known of a ticket.

    ``permits``: the limit; 0: of a lock. ``polls_until``: the score in POLLS, which ``polls_known`` says may be read.
    """
    ticket, maker = one.ticket, Maker.of(one.ticket.token)
    polls = not ticket.inbox
    if not polls:
        alive = listening.get(ticket.inbox)
    else:
        alive = polls_until is not None and float(polls_until) * 1000 > now if polls_known else None
    return WaiterView(
        token=text(ticket.token),
        identity=text(ticket.token) if maker is None else None,
        label=label_of(ticket.token),
        host=maker.host if maker else None,
        pid=maker.pid if maker else None,
        waited=None if one.since is None else max(0.0, (now - one.since) / 1e6),
        weight=1 if permits == WRITER_WEIGHT else ticket.weight,
        access=access(ticket.weight, permits),
        polls=polls,
        alive=alive,
    )


def holder(
    token: bytes,
    now: int,
    fence: int | None,
    remaining: float | None,
    *,
    listening: Listening,
    foreign: bool = False,
    weight: int = 1,
    permits: int = 0,
) -> HolderView:
    """Return what is known of a holder. ``remaining``: seconds; ``permits``: the limit; 0: of a lock."""
    maker = Maker.of(token)
    side = access(weight, permits)
    held_for = None if fence is None or side == "read" else max(0.0, (now - fence) / 1e6)
    return HolderView(
        token=text(token),
        identity=text(token) if maker is None and not foreign else None,
        label=label_of(token),
        host=maker.host if maker else None,
        pid=maker.pid if maker else None,
        held_for=held_for,
        remaining=remaining,
        fence=fence,
        weight=1 if side else weight,
        access=side,
        foreign=foreign,
        connected=_connected(maker, listening) if maker else None,
    )


def access(weight: int, permits: int) -> Access | None:
    """Return the side of a read/write lock that such a weight is on; None if it is none, by its limit."""
    if permits != WRITER_WEIGHT:
        return None
    return "write" if weight == WRITER_WEIGHT else "read"
