"""Requests for several locks that leave in one write, none of which waits.

Each lock has a ticket of its own, so what becomes of a request (late, cancelled, lost and repeated, undone) is
decided where it is for a single lock. Locks of one hash slot are asked for by one script, all or none, and
its answer is dealt out to the tickets.

Only over a link, where what is sent later is executed later: the undoing of a cancelled request goes out for each
lock, and in a client's pool it could overtake a script that is about several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from .._clock import now
from .._engine.outcomes import Outcome
from .._engine.several import acquire_all, joined
from .._link.call import Call
from ..lease import Lease
from .local import LocalName
from .request import Request
from .ticket import Ticket

FREE_MS = -2
"""What is left of a holder that is not there, in the answer about a lock that was not taken because others are."""


async def try_together(names: Sequence[LocalName], request: Request) -> tuple[list[Lease | None], list[bool]]:
    """Ask for all ``names`` in one round trip: for each a lease, or None; and whether it is free all the same.

    ``request`` must not wait and must not bring a token or an identity.

    When one request fails, and on cancellation, all are undone.
    """
    futures: list[asyncio.Future[Lease | None]] = [name.hub.loop.create_future() for name in names]
    tickets = [Ticket(name, request, future) for name, future in zip(names, futures, strict=True)]
    free = [False] * len(names)
    keys = joined([name.keys for name in names]) if len(names) > 1 and names[0].hub.pushes else None
    if keys is None:
        for ticket in tickets:
            ticket.ask()
    else:
        hub = names[0].hub
        sent = now()
        numbers = [ticket.number for ticket in tickets]
        call = acquire_all(
            hub.engine,
            keys,
            hub.token_prefix,
            numbers,
            request.ttl_ms,
            sent,
            sent + hub.retry_for,
            _deal_out(tickets, free),
        )
        for ticket in tickets:
            ticket.sent, ticket.call = sent, call
    try:
        return [await future for future in futures], free
    except BaseException:
        for ticket, future in zip(tickets, futures, strict=True):
            future.cancel()
            ticket.abandon(future)
        raise


def _deal_out(tickets: Sequence[Ticket], free: list[bool]) -> Callable[[Call], None]:
    """Return what gives each ticket its part of the answer, and notes who is ``free``."""

    def answered(call: Call) -> None:
        replies = [None] * len(tickets) if call.error is not None else call.reply
        free[:] = [type(reply) is list and reply[0] == Outcome.BUSY and reply[2] == FREE_MS for reply in replies]
        for ticket, reply in zip(tickets, replies, strict=True):
            part = Call(call.keys, call.script, (), call.sent, call.expires, call.done)
            part.over, part.reply, part.error = True, reply, call.error
            part.attempts, part.ambiguous = call.attempts, call.ambiguous
            ticket._answered(part)

    return answered
