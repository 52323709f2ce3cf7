"""Grants and leases of robust locks, with a record of the protected work. See `_recovery.record`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from weakref import ReferenceType

from .._core.arguments import Json, Seconds, positive_seconds
from .._core.cancellation import undo_in
from .._core.clock import now
from .._engine.commands import Delivery
from .._leases.grant import Grant
from .._leases.lease import GuardingLease
from .record import Abandoned, WorkRecord
from .undo import UndoStep, compensate

if TYPE_CHECKING:
    from .._acquire.resource import Resource
    from .._client.resp import Argument


class RobustGrant(Grant):
    """A grant of a robust lock, with the record of the protected work."""

    record: WorkRecord | None = None
    """The record; None until its adoption is sent, which is before the acquisition returns."""

    def writable(self) -> WorkRecord:
        """Return the record for a write. Raises LeaseLost, NotHeld or StaleWriter."""
        assert self.record is not None  # it was adopted before the lease was handed out
        self.record.check_writer(self)
        return self.record

    def release_args(self) -> tuple[Argument, ...]:
        """Return the trailing arguments of its release: the writer of the record, and whether it must be kept."""
        return () if self.record is None else (self.record.writer, b"1" if self.interrupted else b"0")


class RobustLease(GuardingLease):
    """A lease of an `AsyncRobustLock`. Its record outlives it if it ends without a clean release.

    It is a [`GuardingLease`][redis_sync_aio.types.GuardingLease], and has all that such a lease has.
    """

    def __init__(self, grant: RobustGrant, maker: ReferenceType[object]) -> None:
        """Wrap ``grant`` of the primitive ``maker``. The package makes leases; you get one from ``acquire()``."""
        super().__init__(grant, maker)
        self._robust = grant

    @property
    def abandoned(self) -> Abandoned | None:
        """The work that the last holder left behind. None: it ended by a clean release.

        A release is not clean in three cases: the body of ``async with`` ended by an exception, undo steps are left, or
        another lease of the same identity has adopted the record since.

        The value is what was found at the grant, and does not change. If the same identity acquires the lock again,
        that lease finds under `progress` what this one has recorded since.
        """
        record = self._robust.record
        return None if record is None else record.abandoned

    @property
    def progress(self) -> dict[str, Json] | None:
        """The progress that was recorded last, by this lease or by an abandoned one before it. None: none was.

        It changes with each `record` of this lease that the server has confirmed.
        """
        record = self._robust.record
        return None if record is None else record.progress

    async def record(self, progress: Mapping[str, object]) -> None:
        """Record how far the work has come, so that the next holder knows if this one ends without a release.

        It replaces what was recorded before, and a clean release deletes it. It is written in one command together with
        a renewal (if the lock renews its leases), and only if the lease still holds. Undo steps are kept apart. One
        round trip.

        Args:
            progress: A dict that JSON can represent, at most 65,536 bytes.

        Raises:
            TypeError, ValueError: JSON cannot represent it, or it is too large or nested more than 100 levels deep.
                Nothing was sent.
            LeaseLost: The lease was lost already. Nothing was recorded.
            NotHeld: The lease was released.
            StaleWriter: Another lease of the same identity adopted the record later. Nothing was recorded.
            CommandRefused: The server answered with an error.
            Unreachable: The server did not answer. The progress may or may not be recorded.

        On cancellation the recording goes on in the background.

        Example:
            ```python
            from redis_sync_aio import AsyncRobustLock

            async with AsyncRobustLock(redis, "order:7") as lease:
                if lease.abandoned:
                    await finish_or_undo(lease.progress)
                await lease.record({"charged": 120})
            ```
        """
        await self._robust.writable().set_progress(self._robust, progress)

    async def compensate(self, steps: Mapping[str, UndoStep], *, timeout: Seconds = 10.0) -> None:
        """Run the undo steps that an abandoned holder has recorded, in reverse order, and clear the record.

        Each step is removed from the record after it ran, and the progress with the last one. A crash or a loss of the
        lease in the middle therefore leaves the rest to the next holder. A step may run although the action that it
        undoes did not happen, and it may run twice: write steps that do no harm then. A step that fails stays in the
        record, even after a release, and the others are run.

        Call this before the own work of the lease begins: it would undo that, too.

        Args:
            steps: Functions by name, as `UndoSteps`. All names that are recorded must be there.
            timeout: How long each step may take, the recording of its end included: seconds or timedelta.

        Raises:
            UnknownStep: A name is missing. Nothing was run.
            UndoFailed: Some steps raised, or took too long; a group of their errors.
            TypeError, ValueError: An argument is bad. Nothing was run.
            LeaseLost, NotHeld, StaleWriter, CommandRefused, Unreachable: As for `record`.

        On cancellation the present step is finished (within ``timeout``) and recorded. Then the cancellation goes on.
        """
        grant = self._robust
        await compensate(grant, grant.writable(), steps, positive_seconds(timeout, "timeout"))

    async def clear_record(self) -> None:
        """Delete progress and undo steps, as a clean release would. Errors and cancellation are those of `record`."""
        await self._robust.writable().clear(self._robust)


def robust_grant_of(lease: RobustLease) -> RobustGrant:
    """Return the grant that ``lease`` is the face of."""
    return lease._robust


async def adopting(granting: Awaitable[Grant | None], resource: Resource, timeout: float | None) -> RobustGrant | None:
    """Await a grant of a robust lock, and adopt its record. A grant that is not adopted is given back.

    Both have ``timeout`` seconds. A grant that came in time has the time of one more answer.
    """
    ends = math.inf if timeout is None else now() + timeout
    lease = await granting
    if lease is None:
        return None
    assert isinstance(lease, RobustGrant)  # the request asked for one
    record = lease.record = WorkRecord(resource.hub.manager)
    try:
        await record.adopt(lease, max(ends, now() + lease.manager.settings.response_timeout))
    except BaseException:
        undo_in(resource.hub.loop, partial(_not_adopted, resource, lease, record))
        raise
    return lease


def _not_adopted(resource: Resource, lease: RobustGrant, record: WorkRecord) -> None:
    """Give back a grant whose adoption was cancelled, refused or lost, or got no answer.

    The release follows the adoption on the wire, and puts back the record that the adoption may have replaced.
    """
    lease.interrupted = True
    lease.joined |= record.superseded  # by another lease of the identity, which still has it
    if lease.identity is not None:
        _withdraw(resource, lease, record)
    resource.decline(lease)


def _withdraw(resource: Resource, lease: RobustGrant, record: WorkRecord) -> None:
    """Make the lease that adopted the record before this one its writer again, if the identity has one."""
    manager, time = resource.hub.manager, now()
    words = (lease.fence, lease.ttl_ms, record.writer, 1)
    delivery = Delivery(time, time + manager.settings.retry_for, manager.releases.in_flight.finished)
    call = resource.hub.engine.adopt(lease.keys, lease.wire_token, words, delivery)
    manager.releases.in_flight.started(call)
