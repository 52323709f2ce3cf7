"""The observers of one hub, and what they hear about each request.

Each request has one `Observation`, from the call until its lease has ended, if anything observes the hub. An
observer gets the events of a request only if it was attached at its start, so it never sees an end alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import ReferenceType, ref

from ..errors import AcquireTimeout, WaitTimeout
from .clock import now
from .events import (
    ConnectionLost,
    ConnectionRestored,
    Event,
    Granted,
    HandedOver,
    Lost,
    LostReason,
    Released,
    RenewedLate,
    Requested,
    Skipped,
    Stalled,
    Withdrawn,
    WithdrawnOutcome,
)
from .keys import SlotState

if TYPE_CHECKING:
    from .observing import Attached

_next_request = itertools.count(1).__next__


class ObservedGrant(Protocol):
    """A grant, as its observation knows it."""

    observation: Observation | None

    @property
    def fence(self) -> int: ...
    @property
    def token(self) -> str: ...
    @property
    def reason(self) -> LostReason | None: ...
    @property
    def time_is_up(self) -> bool: ...
    @property
    def queued(self) -> bool: ...
    @property
    def handed_over(self) -> bool: ...
    @property
    def over(self) -> bool: ...
    @property
    def outlives(self) -> bool: ...


G = TypeVar("G", bound=ObservedGrant)


class Observation:
    """The observation of one request. The grant keeps it; it does not keep the grant alive.

    Invariant: of `withdrawn`, and the end of the grant, one has an effect, once.
    """

    __slots__ = ("__weakref__", "_attached", "_facts", "_grant", "_observers", "_since", "request", "waits")

    def __init__(self, observers: Observers, kind: str, name: str, pattern: str, label: str) -> None:
        self.request: int = _next_request()
        self.waits: bool = False
        """True if tasks of this process had it when this request began, and it had to wait for them."""
        self._observers = observers
        self._attached = observers.attached
        self._facts = kind, name, pattern or observers.pattern(name), observers.server, label
        self._grant: ReferenceType[ObservedGrant] | None = None
        self._since = now()
        self._tell(Requested, self._since)

    def _tell(self, event: Callable[..., Event], time: float, **facts: object) -> None:
        kind, name, pattern, server, label = self._facts
        whose = {"server": server, "request": self.request, "label": label}
        told = event(kind=kind, name=name, pattern=pattern, time=time, **whose, **facts)
        for attached in self._attached:
            attached._take(told)

    def withdrawn(self, outcome: WithdrawnOutcome, error: BaseException | None = None) -> None:
        """Report that the request ended without a lease."""
        time = now()
        self._tell(Withdrawn, time, outcome=outcome, waited=time - self._since, error=error)

    def failed(self, error: BaseException, waits: bool) -> None:
        """Report that the request ended with ``error``; ``waits``: as `Observers.follow`."""
        if isinstance(error, (AcquireTimeout, WaitTimeout)):
            self.withdrawn(*(("timeout", error) if waits else ("taken", None)))
        elif isinstance(error, Exception):
            self.withdrawn("error", error)
        else:  # GeneratorExit: its coroutine was closed; KeyboardInterrupt, SystemExit: they end the task, too
            self.withdrawn("cancelled")

    def granted(self, grant: ObservedGrant) -> None:
        """Report that the request was granted, and observe the end of ``grant``."""
        handed_over, time = grant.handed_over, now()
        waited, self._since = time - self._since, time
        contended = grant.queued or (handed_over and self.waits)
        self._grant = ref(grant, self._collected)
        grant.observation = self
        self._observers.open[self.request] = self
        if handed_over:
            self._tell(HandedOver, time)
        self._tell(Granted, time, waited=waited, contended=contended, fence=grant.fence, token=grant.token)
        if grant.over:  # it ended after it had arrived, and before its task ran
            self.ended(grant)

    def renewed_late(self, lateness: float, left: float) -> None:
        """Report that a renewal of the lease was sent late, unless its end was reported before."""
        if self.request in self._observers.open:
            self._tell(RenewedLate, now(), lateness=lateness, left=left)

    # -- the end of the grant --------------------------------------------------------------------------

    def ended(self, grant: ObservedGrant) -> None:
        """Report that ``grant`` has ended, the first time."""
        self.end(grant.reason, time_is_up=grant.time_is_up)

    def end(self, reason: LostReason | None, *, time_is_up: bool = False) -> None:
        """Report that the lease was lost for ``reason``, or released (None), unless its end was reported before."""
        if self._observers.open.pop(self.request, None) is None:
            return
        time = now()
        held = time - self._since
        if reason is None:
            self._tell(Released, time, held=held)
        else:
            self._tell(Lost, time, reason=reason, time_is_up=time_is_up, held=held)

    def hub_closed(self) -> None:
        """Report that the lease was lost with its hub, unless it may still be held on other servers."""
        grant = None if self._grant is None else self._grant()
        if grant is None or not (grant.over or grant.outlives):
            self.end("closed")

    def _collected(self, grant: ReferenceType[ObservedGrant]) -> None:
        """Tell, in the event loop, that the grant was forgotten; the garbage collector runs in any thread."""
        if self.request in self._observers.open:
            with suppress(RuntimeError):  # the loop is closed; `Observers.close` tells the end
                self._observers.loop.call_soon_threadsafe(self.end, "forgotten")


class Observers:
    """The observers of one hub; None without observers."""

    def __init__(self, server: str, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.attached: tuple[Attached, ...] = ()
        self.open: dict[int, Observation] = {}
        """Observations whose leases have not ended."""

    def pattern_of_all(self, names: Iterable[str]) -> str:
        """Return the patterns of ``names``, each once."""
        return ", ".join(dict.fromkeys(map(self.pattern, names)))

    def pattern(self, name: str) -> str:
        """Return the pattern of ``name``, as `Event.pattern` says."""
        for attached in self.attached:
            if (pattern := attached._pattern(name)) is not None:
                return pattern
        begin, colon, _ = name.partition(":")
        return f"{begin}:*" if colon else name

    async def follow(
        self,
        kind: str,
        name: str,
        granting: Callable[[Observation], Awaitable[G | None]],
        pattern: str = "",
        *,
        waits: bool = True,
        refused: WithdrawnOutcome = "taken",
        label: str = "",
    ) -> G | None:
        """Await the result of ``granting``, and tell the observers the outcome of this request.

        ``waits``: whether it waits for other holders, so that a timeout says that its time was up. ``refused``:
        what it means that nothing is returned. ``label``: of the request.
        """
        observation = Observation(self, kind, name, pattern, label)
        try:
            grant = await granting(observation)
        except BaseException as error:
            observation.failed(error, waits)
            raise
        if grant is None:
            observation.withdrawn(refused)
        else:
            observation.granted(grant)
        return grant

    def _tell(self, event: Callable[..., Event], server: str, **facts: object) -> None:
        told = event(**{"kind": "", "name": "", "pattern": "", **facts}, server=server, time=now(), request=0)
        for attached in self.attached:
            attached._take(told)

    def skipped(self, name: str, pattern: str, state: SlotState) -> None:
        """Report that a call of the job ``name`` did not run it."""
        self._tell(Skipped, self.server, kind="job", name=name, pattern=pattern or self.pattern(name), state=state)

    def stalled(self, seconds: float) -> None:
        """Report that the event loop ran nothing for ``seconds``."""
        self._tell(Stalled, self.server, seconds=seconds)

    def connection_lost(self, server: str) -> None:
        """Report that the connection to ``server`` was lost."""
        self._tell(ConnectionLost, server)

    def connection_restored(self, server: str, after: float, rechecked: int) -> None:
        """Report that there is a connection to ``server`` again."""
        self._tell(ConnectionRestored, server, after=after, rechecked=rechecked)

    def close(self) -> None:
        """Tell the end of all leases that have none: the hub is closed, and looks after them no more."""
        for observation in list(self.open.values()):
            observation.hub_closed()

    def leave_to_parent(self) -> None:
        """Tell nothing any more: this is a forked child, and what is open is the parent's."""
        self.open.clear()
        self.attached = ()
