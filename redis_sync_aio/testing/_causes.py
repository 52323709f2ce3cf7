"""Causes that lose a lease within a tenth of a second: silence of the server, a blocked event loop.

The lease gets a short time first, at the server and here. From then on everything is as it is with a long one: the
timer of its coordinator finds that the time is up, and looks for the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from .._core.backoff import wait_until
from .._core.clock import now
from .._core.futures import finish
from .._core.keys import Keys
from .._engine.commands import Commands, Delivery
from .._leases.grant import Grant
from .._leases.manager import GrantManager
from .._leases.settings import HELD
from .._transport.call import Call, time_is_up
from .servers import PATIENCE, SOON

LAST: Final = 0.1
"""Seconds that the lease lasts."""
STALL: Final = LAST / 2
"""Seconds by which the timer is late; a quarter of the time of a lease is enough to be the reason for its loss."""


async def out_of_reach(grant: Grant) -> None:
    """Let a lease be lost because no renewal of it reaches the server, nor anything else about it."""
    manager = cast("GrantManager", grant.manager)
    span = await _shorten(grant)
    if grant.state is not HELD:
        return
    with _cut_off(manager.hub.executor, grant.keys, grant.wire_token):
        manager.renewals.apply(grant, span)
        manager.renewals.renew(grant, round(LAST * 1000))
        await _ended(grant)


async def late(grant: Grant) -> None:
    """Let a lease be lost because the event loop is blocked when a renewal is due: for 0.2 seconds at most."""
    manager = cast("GrantManager", grant.manager)
    while grant.state is HELD:
        await wait_until(lambda: not grant.renewing, SOON, timeout=PATIENCE)
        span = await _shorten(grant)
        if grant.state is HELD and not grant.renewing:
            # No turn of the loop comes between, however long the answer took.
            manager.renewals.apply(grant, span)
            _stand_still(max(grant.deadline, now() + 0.01) + STALL)
            await _ended(grant)


def _stand_still(until: float) -> None:
    while (left := until - now()) > 0:
        time.sleep(left)


async def _shorten(grant: Grant) -> tuple[float, float]:
    """Let the server end the lease soon; return the span that is left of it. Raises LeaseLost if it was gone."""
    manager, weight = cast("GrantManager", grant.manager), grant.weight
    begun = now()

    def send(commands: Commands, delivery: Delivery) -> Call:
        milliseconds = round(LAST * 1000)
        return commands.renew(grant.keys, grant.wire_token, delivery, ttl_ms=milliseconds, weight=weight)

    await manager.ask(grant, send, lambda call: manager.renewals.apply_answer(grant, 0, call, weight))
    return begun, LAST


async def _ended(grant: Grant) -> None:
    await wait_until(lambda: grant.state is not HELD, SOON, timeout=PATIENCE)


async def free(grant: Grant) -> None:
    """Release a grant at the server, whatever its holder thinks of it."""
    manager = cast("GrantManager", grant.manager)
    outcome: asyncio.Future[None] = manager.loop.create_future()

    def done(call: Call) -> None:
        finish(outcome, None, call.error)

    manager.releases.undo(grant.keys, grant.wire_token, release_args=grant.release_args(), done=done)
    await outcome


# -- silence -----------------------------------------------------------------------------------------------


class _Cut:
    """The tokens that an executor sends nothing about, and what it was to send."""

    def __init__(self, executor: Any) -> None:
        self._send, self._answering = executor.send, executor.answering
        self.names: dict[bytes, bytes] = {}  # by token, the key of the name
        self.kept: list[Call] = []
        executor.send, executor.answering = self.send, self.answering

    def send(self, call: Call) -> None:
        if call.arguments and call.arguments[0] in self.names:
            self.kept.append(call)
        else:
            self._send(call)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` answers, as far as can be known of a network that is cut."""
        return keys.all[0] not in self.names.values() and bool(self._answering(keys, stalled))

    def heal(self, token: bytes) -> None:
        """Send what was kept about ``token``, unless its time is up."""
        del self.names[token]
        kept, self.kept = self.kept, []
        for call in kept:
            if now() < call.expires:
                self.send(call)
            else:
                call.fail(time_is_up(call))


_cuts: dict[object, _Cut] = {}


@contextmanager
def _cut_off(executor: Any, keys: Keys, token: bytes) -> Iterator[None]:
    """Let no command about ``token`` reach the server in the ``with`` block, as if the network had lost them."""
    cut = _cuts.get(executor)
    if cut is not None and token in cut.names:  # another task does so already
        yield
        return
    if cut is None:
        cut = _cuts[executor] = _Cut(executor)
    cut.names[token] = keys.all[0]
    try:
        yield
    finally:
        if len(cut.names) == 1:
            del executor.send, executor.answering, _cuts[executor]
        cut.heal(token)
