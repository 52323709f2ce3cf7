"""Upgrade a reader to the writer, and downgrade it again: two leases on one permit of the server."""

from __future__ import annotations

import math
from functools import partial

from .._acquire.acquisition import acquire
from .._acquire.request import Request
from .._core.arguments import MIN_TTL_MS, Seconds, timeout_seconds
from .._core.clock import now
from .._core.keys import PermitKeys, upgrade_keys
from .._engine.replies import Answer
from .._leases.grant import Grant
from .._leases.hold import Acquiring, OnLost
from .._leases.lease import GuardingLease, grant_of
from .._leases.manager import GrantManager
from .._leases.permit_grant import UpgradedGrant
from .._leases.terms import HELD, LeaseState
from .._scripts.constants import WRITER_WEIGHT, Outcome, Released
from .._transport.call import Call
from ..errors import AcquireTimeout, NotHeld, SyncError, WouldDeadlock
from .base import PermitPrimitive
from .followed import followed


class Upgrader:
    """Upgrades readers. The lease of the writer has the token of the reader, and its release is a downgrade."""

    def __init__(self, read: PermitPrimitive[GuardingLease], keys: PermitKeys, on_lost: OnLost) -> None:
        self._read = read
        self._on_lost: OnLost = on_lost
        self._keys = upgrade_keys(keys)

    def upgrade(self, reader: GuardingLease, timeout: Seconds | None) -> Acquiring[GuardingLease]:
        limit, lease = timeout_seconds(timeout), grant_of(reader)

        async def enter() -> GuardingLease:
            hub, upgrading = self._read._at_work(), partial(self._upgraded, lease, limit)
            upgraded = await followed(hub, "write", (lease.name,), upgrading, waits=limit != 0)
            assert upgraded is not None  # it raises where there is no grant
            return GuardingLease(upgraded, self._read._itself)

        return Acquiring(enter(), self._on_lost)

    async def _upgraded(self, lease: Grant, limit: float | None) -> UpgradedGrant:
        self._check(lease, 1, "reader")
        permit = lease.permit
        self._check_alone(lease, permit)
        permit.upgrader, lease.above = lease, None
        try:
            upgraded = await self._acquire(lease, limit)
        except BaseException:
            permit.upgrader = None
            raise
        # They have one permit. It ends with the reader's lease, and renewals of the writer are the reader's, too.
        self._read._at_work().manager.renewals.put_above(lease, upgraded)
        if lease.is_lost() or lease.state is not HELD:  # in the same turn of the loop as the grant
            upgraded.give_back()
            self._check(lease, 1, "reader")
        lease.fence = upgraded.fence  # it goes on to read what is written now
        return upgraded

    def _check_alone(self, lease: Grant, permit: Grant) -> None:
        """Raise WouldDeadlock if the permit is upgraded: the release of one writer would turn both into readers."""
        first = permit.upgrader
        writer = None if first is None else first.above
        if first is not None and (writer is None or writer.state is LeaseState.RELEASING or writer.remaining()):
            if first is not lease:
                raise self._deadlock()
            raise WouldDeadlock.upgraded_already(self._read.name)
        known = self._read._at_work().known(self._keys)  # another lease of the same identity
        if known is not None and any(upgraded.wire_token == lease.wire_token for upgraded in known.held()):
            raise self._deadlock()

    async def _acquire(self, lease: Grant, limit: float | None) -> UpgradedGrant:
        # Tasks of this process that read by the same permit must leave, as other readers must.
        begin = now()
        if not await lease.alone(limit):
            raise self._in_use(lease, None)
        self._check(lease, 1, "reader")  # it may have ended, and other readers go on
        if limit:
            limit = max(limit - (now() - begin), MIN_TTL_MS / 1000)
        left = lease.ends_by() - now()
        request = Request(
            lease.ttl_ms if left == math.inf else max(MIN_TTL_MS, min(lease.ttl_ms, math.floor(left * 1000))),
            lease.auto_renew,
            token=lease.wire_token,
            wait=limit != 0,
            timeout=limit or None,
            weight=WRITER_WEIGHT,
            limit=WRITER_WEIGHT,
            upgrade=True,
            grant_type=UpgradedGrant,
            refused=lambda answer, _: self._refused(answer, lease),
        )
        resource = self._read._at_work().resource(self._keys)
        try:
            upgraded = await acquire(resource, request)
        except AcquireTimeout as error:
            raise self._in_use(lease, error.remaining, error.answered) from error
        if upgraded is None:
            raise self._in_use(lease, resource.holder_remaining())
        assert isinstance(upgraded, UpgradedGrant)  # the request asked for one
        return upgraded

    def _in_use(self, lease: Grant, remaining: float | None, answered: bool = True) -> AcquireTimeout:
        here = any(other is not lease for other in self._read._held())
        return AcquireTimeout.of_upgrade(lease.name, remaining=remaining, answered=answered, read_here=here)

    async def downgrade(self, lease: Grant) -> None:
        if lease.keys == self._keys and lease.permit is not lease:
            lease.check_context()
            lease.check()
            await lease.release()  # this is a downgrade: the reader's lease goes on
            return
        self._check(lease, WRITER_WEIGHT, "writer")
        lease.become_reader()  # immediately, and in any case: from here on the caller must not write
        resource = self._read._known()
        here = None if resource is None else resource.identities
        if here is not None:
            here.release_sent(lease.wire_token, at_least=WRITER_WEIGHT)
        manager = lease.permit.manager
        assert isinstance(manager, GrantManager)

        def answered(call: Call) -> SyncError | None:
            if here is not None:
                here.release_answered(lease.wire_token)
            if call.error is not None:
                # On the server it may still be the writer's, and the renewals of the reader would keep that forever.
                # Not after its end: the same identity may have become the writer again.
                if lease.state is HELD:
                    manager.releases.undo(self._keys, lease.wire_token, expires=lease.deadline)
                return call.error
            if call.reply != Released.RELEASED:
                lease.lose("expired")
                return lease.loss()
            return None

        await manager.ask(
            lease, lambda commands, delivery: commands.release(self._keys, lease.wire_token, delivery), answered
        )

    def _check(self, lease: Grant, weight: int, what: str) -> None:
        lease.check_context()
        lease.check()
        if lease.keys != self._read._keys or lease.weight != weight or lease.state is not HELD:
            use = "upgrade() takes one of read()" if weight == 1 else "downgrade() takes one of write() or upgrade()"
            raise NotHeld.other_lease(self._read.name, given=repr(lease), expected=what, use=use)

    def _refused(self, answer: Answer, lease: Grant) -> SyncError:
        if answer.outcome is not Outcome.GONE:
            return self._deadlock()
        if lease.state in (LeaseState.RELEASING, LeaseState.RELEASED):
            return NotHeld.released(lease.name, before="it could be upgraded")
        return lease.loss()

    def _deadlock(self) -> WouldDeadlock:
        return WouldDeadlock.other_upgrade(self._read.name)
