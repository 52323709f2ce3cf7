"""The manager of task grants: it extends, releases and forgets the parts that tasks hold of process grants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import get_ident

from .._acquire.resource import Resource
from .._core.clock import now
from .._core.keys import Keys
from .._leases.grant import Grant
from .._leases.terms import LeaseState
from ..errors import LeaseLost
from .shared_grant import ProcessGrant, TaskGrant


class LastShare:
    """Takes the outcome of the release of a process grant, for the task that held it last."""

    def __init__(self, lease: TaskGrant) -> None:
        self._lease = lease

    def done(self) -> bool:
        return False

    def set_result(self, result: None, /) -> None:
        self._lease.release_ended(None)

    def set_exception(self, error: Exception, /) -> None:
        lease = self._lease
        if isinstance(error, LeaseLost):
            lease.lose(error.reason)
            lease.release_ended(lease.loss())
        else:  # it is still held, and may be released again
            lease.process_grant.shares.append(lease)
            lease.release_ended(error)


class TaskGrantManager(ABC):
    """A `LeaseManager` (see `_leases.grant`) of task grants, on top of that of process grants."""

    def __init__(self, resource: Resource) -> None:
        hub = resource.hub
        self.resource = resource
        self.hub = hub
        self.loop = hub.loop
        self.thread = get_ident()
        """The thread in which grants are handed on while the loop runs there; 0 when that has ended for good."""
        self.settings = hub.manager.settings
        self.listed = False
        """Whether the parts are indexed by the task that acquired them."""

    @abstractmethod
    def passed_on(self, lease: TaskGrant) -> bool:
        """End ``lease`` without a command if possible; else change nothing, and return False."""

    @abstractmethod
    def part_with(self, grant: ProcessGrant) -> None:
        """Stop handing ``grant`` on."""

    @abstractmethod
    def give_back(self, grant: ProcessGrant) -> None:
        """Give ``grant`` back to the server."""

    def check_context(self) -> None:
        """Raise WrongContext in another event loop, or after a fork."""
        self.hub.manager.check_context()

    def stalled_since(self, time: float) -> float:
        """Return for how many seconds, at least, the event loop stood still since ``time`` (local clock)."""
        return self.hub.manager.stalled_since(time)

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return whether the server that has ``keys`` answers; ``stalled``: or silence could not be noticed."""
        return self.hub.manager.answering(keys, stalled)

    def members_of(self, lease: Grant) -> tuple[Grant, ...]:
        """Return the grant that ``lease`` is a part of."""
        assert isinstance(lease, TaskGrant)
        return (lease.process_grant,)

    async def extend(self, lease: Grant, ttl: int) -> None:
        """Renew the grant now with another ttl, and let ``lease`` end then if it is not renewed."""
        assert isinstance(lease, TaskGrant)
        await self.hub.manager.renewals.extend(lease.process_grant, ttl)
        lease.extended(ttl)

    def release(self, lease: Grant) -> None:
        """End ``lease``, with a command unless another task gets the grant."""
        assert isinstance(lease, TaskGrant)
        grant = lease.process_grant
        if self.thread and self.passed_on(lease):
            lease.release_ended(None)
            return
        grant.shares.remove(lease)
        lease.leave()
        if grant.shares:
            lease.release_ended(None)
            return
        grant.releasers = [*(grant.releasers or ()), LastShare(lease)]
        self.give_back(grant)

    def let_go(self, lease: Grant) -> None:
        """Let ``lease`` go, which is forgotten. No other task gets its grant, which ends with its last part."""
        assert isinstance(lease, TaskGrant)
        grant = lease.process_grant
        self.part_with(grant)
        grant.shares.remove(lease)
        lease.state = LeaseState.RELEASED
        lease.leave()
        lease.notify_ended()
        if not grant.shares:
            grant.auto_renew, grant.renew_at = False, grant.deadline

    def forget(self, lease: Grant) -> None:
        """Forget ``lease``, which is lost. If it ended by itself, the grant is not handed on: its task may write."""
        assert isinstance(lease, TaskGrant)
        grant = lease.process_grant
        lease.leave()
        if lease not in grant.shares:
            return  # the grant is lost
        grant.shares.remove(lease)
        if now() >= grant.deadline:
            grant.lose("expired")
        elif grant.shares:
            self.part_with(grant)
        else:
            self.give_back(grant)
