"""Losses on demand: each reason for which a lease is lost, without waiting for its ttl."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, cast, get_args

from .._client.settings import Client, RedisClient
from .._core.arguments import Name, Seconds, ttl_ms
from .._core.backoff import wait_until
from .._core.clock import now
from .._core.display import shown
from .._core.futures import finish
from .._core.keys import Keys, PermitKeys
from .._engine.commands import Commands
from .._leases.grant import Grant
from .._leases.hub import Hub, living
from .._leases.implicit import CoordinatorLike, client_of, hub_of
from .._leases.lease import BaseLease, grant_of
from .._leases.manager import GrantManager
from .._leases.settings import HELD
from .._primitives.lock import AsyncLock
from .._transport.call import Call, time_is_up
from ..errors import LeaseLost, LossReason
from .servers import PATIENCE, SOON


async def lose(lease: BaseLease, reason: LossReason = "taken") -> None:
    """Make ``lease`` lost for ``reason``, and return when it is.

    Its cause happens, within half a second.

    - "expired": The server releases the lease, which is then renewed.
    - "taken": Another token is put under the key of the lock, for a minute. Then the lease is renewed.
    - "unreachable": The server lets the lease end in 0.1 seconds, and no command about it gets there meanwhile.
    - "late": The same, and this event loop is blocked for up to 0.2 seconds.
    - "closed": The coordinator gives this lease up as if it closed, and keeps running.
    - "released": Another task releases the lease while its body runs.

    A lease that is not renewed cannot be late, and one without an end (``ttl=None``) asks the server nothing: these are
    declared lost without a cause. A lost lease is then released on the server, unless it is "taken". If the body of the
    lease calls this itself, it is cancelled at its next ``await``, perhaps in here.

    Raises:
        ValueError: There is no such reason, the reason is "taken" for permits, or "released" without a body.
        TypeError: ``lease`` is no lease.
        LeaseLost, NotHeld: The lease is not held any more.

    Example:
        ```python
        import pytest

        from redis_sync_aio import LeaseLost
        from redis_sync_aio.testing import lose

        lease = await sync.lock("orders:42").acquire()
        await lose(lease, "taken")
        with pytest.raises(LeaseLost):
            lease.check()
        ```
    """
    if reason not in get_args(LossReason):
        raise ValueError(f"reason is one of {', '.join(get_args(LossReason))}; not {reason!r}")
    if not isinstance(lease, BaseLease):
        raise TypeError(f"lease must be a lease, not {shown(lease)}")
    grant = grant_of(lease)
    grant.check()
    if reason == "released":
        if grant.body is None:
            raise ValueError("reason 'released' is for a lease with a running body: enter it by `async with`")
        await asyncio.create_task(lease.release(), name="redis_sync_aio testing loss")
        return
    for part in grant.members:
        if not grant.is_lost() and part.state is HELD:
            await _lose(part, reason)


async def steal(client: Client | CoordinatorLike, name: Name, *, ttl: Seconds = 60.0) -> str:
    """Take a lock by force, as a client that disregards it would, and return the token that holds it now.

    Holders in this event loop have noticed the loss when this returns (reason "taken"). Others notice at their next
    renewal. Waiters go on waiting. ``await lock.release(identity=token)`` gives the lock to the next of them.

    Args:
        client: An asyncio client or a `Coordinator`, on the server of the lock.
        name: The name of a lock. Semaphores and read/write locks have other keys.
        ttl: How long the lock is taken (seconds).
    """
    key, token = AsyncLock(client, name)._keys.all[0], f"stolen:{secrets.token_hex(8)}"
    await _put(client_of(client), key, token, ttl_ms(ttl))
    for hub in _hubs_here():
        for grant in [it for it in hub.all_leases() if it.keys.all[0] == key]:
            await _notice(grant, "taken")
    return token


def freeze_renewals(client: Client | CoordinatorLike) -> AbstractContextManager[None]:
    """Send no renewals in the ``with`` block, so that leases end with their ttl (reason "expired").

    `Lease.extend` still works. At the end of the block the leases that are still held are renewed.

    Args:
        client: A `Coordinator`, or a client, which stands for its implicit coordinator.

    Raises:
        RuntimeError: Renewals are frozen already.

    Example:
        ```python
        from redis_sync_aio.testing import freeze_renewals

        with freeze_renewals(sync):
            lease = await sync.lock("orders:42", ttl=0.5).acquire()
            await lease.wait_lost()
        ```
    """
    return _Frozen(client)


class _Frozen(AbstractContextManager[None]):
    """A context manager that is no decorator: over a coroutine function it would end before the function runs."""

    def __init__(self, client: Client | CoordinatorLike) -> None:
        self._client = client

    def __enter__(self) -> None:
        self._hub = hub_of(self._client)
        renewals: Any = self._hub.manager.renewals
        if "renew_if_due" in vars(renewals):
            raise RuntimeError("the renewals of this coordinator are frozen already")

        def put_off(grant: Grant) -> None:
            grant.renew_at = grant.deadline

        renewals.renew_if_due = put_off

    def __exit__(self, *error: object) -> None:
        renewals: Any = self._hub.manager.renewals
        del renewals.renew_if_due
        for grant in list(self._hub.all_leases()):
            if grant.state is HELD and grant.ttl_ms and not grant.renewing:
                renewals.renew_if_due(grant)
                self._hub.manager.keep(grant)


def _hubs_here() -> list[Hub]:
    loop = asyncio.get_running_loop()
    hubs = [closing.hub for closing in list(living.values())]
    return [hub for hub in hubs if hub.loop is loop and hub.why_closed is None and not hub.forked]


async def _lose(grant: Grant, reason: LossReason) -> None:
    manager = cast("GrantManager", grant.manager)
    if reason == "taken":
        if isinstance(grant.keys, PermitKeys):
            raise ValueError("permits are never 'taken': others get permits of their own. Use reason 'expired'")
        await _put(manager.hub.client, grant.keys.all[0], f"stolen:{secrets.token_hex(8)}", 60_000)
        await _notice(grant, "taken")
    elif reason == "expired":
        await free(grant)
        await _notice(grant, "expired")
    elif reason == "closed":
        manager.take_away(grant)
    else:
        await _cause(grant, reason)
        await free(grant)


async def _cause(grant: Grant, reason: LossReason) -> None:
    """Let time pass without a renewal, if a grant is renewed at all; else declare it lost."""
    if reason == "unreachable" and grant.ttl_ms:
        await unreachable(grant)
    elif reason == "late" and grant.ttl_ms and grant.auto_renew:
        await late(grant)
    else:
        grant.lose(reason)


async def _put(client: RedisClient, key: bytes, token: str, milliseconds: int) -> None:
    await client.set(key, token, px=milliseconds)


async def _notice(grant: Grant, reason: LossReason) -> None:
    """Let the holder learn from the server that a grant is gone."""
    if grant.state is not HELD:
        return
    if grant.ttl_ms:
        with suppress(LeaseLost):
            await grant.manager.extend(grant, grant.ttl_ms)
    else:  # it has no end, and so no renewals
        grant.lose(reason)


# -- Causes that lose a lease within a tenth of a second: silence of the server, a blocked event loop ----------------
#
# The lease gets a short time first, at the server and here. From then on everything is as it is with a long one: the
# timer of its coordinator finds that the time is up, and looks for the reason.


LAST: Final = 0.1
"""Seconds that the lease lasts."""
STALL: Final = LAST / 2
"""Seconds by which the timer is late; a quarter of the time of a lease is enough to be the reason for its loss."""


async def unreachable(grant: Grant) -> None:
    """Let a lease be lost because no renewal of it reaches the server, nor anything else about it."""
    manager = cast("GrantManager", grant.manager)
    span = await _shorten(grant)
    if grant.state is not HELD:
        return
    with _cut_off(manager.hub.link, grant.keys, grant.wire_token):
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
            _block(max(grant.deadline, now() + 0.01) + STALL)
            await _ended(grant)


def _block(until: float) -> None:
    while (left := until - now()) > 0:
        time.sleep(left)


async def _shorten(grant: Grant) -> tuple[float, float]:
    """Let the server end the lease soon; return the span that is left of it. Raises LeaseLost if it was gone."""
    manager, weight = cast("GrantManager", grant.manager), grant.weight
    begun = now()

    def send(commands: Commands, call: Call) -> None:
        commands.renew(grant.keys, grant.wire_token, call, ttl_ms=round(LAST * 1000), weight=weight)

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
    """The tokens that a link sends nothing about, and what it was to send."""

    def __init__(self, link: Any) -> None:
        self._send, self._answering = link.send, link.answering
        self.names: dict[bytes, bytes] = {}  # by token, the key of the name
        self.kept: list[Call] = []
        link.send, link.answering = self.send, self.answering

    def send(self, call: Call) -> None:
        if call.arguments and call.arguments[0] in self.names:
            self.kept.append(call)
        else:
            self._send(call)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` answers, as far as can be known of a network that is cut."""
        return keys.all[0] not in self.names.values() and bool(self._answering(keys, stalled))

    def heal(self, token: bytes) -> None:
        """Send the messages that were kept about ``token``, unless its time is up."""
        del self.names[token]
        kept, self.kept = self.kept, []
        for call in kept:
            if now() < call.expires:
                self.send(call)
            else:
                call.fail(time_is_up(call))


_cuts: dict[object, _Cut] = {}


@contextmanager
def _cut_off(link: Any, keys: Keys, token: bytes) -> Iterator[None]:
    """Let no command about ``token`` reach the server in the ``with`` block, as if the network had lost them."""
    cut = _cuts.get(link)
    if cut is not None and token in cut.names:  # another task does so already
        yield
        return
    if cut is None:
        cut = _cuts[link] = _Cut(link)
    cut.names[token] = keys.all[0]
    try:
        yield
    finally:
        if len(cut.names) == 1:
            del link.send, link.answering, _cuts[link]
        cut.heal(token)
