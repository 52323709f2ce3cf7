"""The reason of a loss in words, and what to do about it."""

from __future__ import annotations

from typing import Literal

from ._base import SyncError

LossReason = Literal["expired", "taken", "unreachable", "late", "closed", "released"]
"""The reason for which a lease was lost, as `LeaseLost` explains it."""

_EXPLAINED: dict[LossReason, str] = {
    "expired": "it is gone from the server before its time was up: it was released elsewhere (by its identity or by "
    "force), its key was deleted, or the server lost it (a restart, a failover, an eviction, FLUSHALL). Others may "
    "have held it since. Do not write any more; acquire it again",
    "taken": "another token holds the lock now: this lease was released elsewhere, had run out, or its key was "
    "deleted, overwritten or lost by the server. Do not write any more; acquire it again",
    "unreachable": "Redis could not be reached before the deadline to renew it. Do not write any more; check the "
    "server and the network, or give it a longer ttl",
    "late": "its deadline passed before this process had renewed it, although the server was answering: there is more "
    "to do than one event loop can. Do not write any more; hold fewer leases in one process, or give them a longer ttl",
    "closed": "the coordinator or its client was closed while it was held. Do not write any more; close it after "
    "the bodies have ended",
    "released": "another task released it while this body ran. Do not write any more; release it in the task whose "
    "body runs, or end the body",
}
_TIME_IS_UP = (
    "its time was up: it was not to be renewed (auto_renew=False), max_hold was reached, or Redis refused to renew it "
    "(then the log says why: renewal_refused). Do not write any more; acquire it again, or give it more time"
)
_STOOD_STILL = (
    "its deadline passed while this process, or its event loop, stood still for at least {:.1f} seconds, so it was not "
    "renewed. Do not write any more; move blocking work to a thread, hold fewer leases in one process, or give it a "
    "longer ttl"
)


_CLAIM = (
    "{}. It was handed over by its last holder and had a claim of {:g} seconds until its first renewal, not its whole "
    "ttl: a longer ttl does not help. Do not write any more; {}, or raise Coordinator(claim=)"
)


def _explained(reason: LossReason, *, stalled: float = 0.0, time_is_up: bool = False, claim: float = 0.0) -> str:
    """Return why a lease was lost and what to do about it; the arguments are those of `LeaseLost`."""
    if claim and reason in ("late", "expired", "unreachable"):
        what, remedy = "Redis could not be reached before the deadline to renew it", "check the server and the network"
        if reason != "unreachable":
            remedy = "move blocking work to a thread"
            still = f"this process, or its event loop, stood still for at least {stalled:.1f} seconds, and"
            what = f"its deadline passed: {still if stalled else 'this process'} had not renewed it"
            if reason == "expired":
                what += ", or Redis refused to renew it (then the log says why: renewal_refused)"
        return _CLAIM.format(what, claim, remedy)
    if reason == "expired" and time_is_up:
        return _TIME_IS_UP
    if reason == "late" and stalled:
        return _STOOD_STILL.format(stalled)
    return _EXPLAINED[reason]


class LeaseLost(SyncError):
    """The lease ended while it was still in use. The lock no longer protects what the body did.

    Do not write any more. Find out what is half done, and acquire the lock again. Writes in
    [`Lease.transaction`][redis_sync_aio.Lease.transaction] are not made after the loss. A resource that checks the
    fence refuses them as soon as it has seen the next holder. ``reason`` is one of:

    - ``"expired"``: The time of the lease was up (not renewed on purpose, ``max_hold``, renewals refused). Or it is
      gone from the server before that: it was released by its identity or by force, its key was deleted, or
      the server lost it. The message says which of the two happened; it cannot say who did it.
    - ``"taken"``: Another token is under the key. Another client holds the lock now.
    - ``"unreachable"``: The deadline passed while Redis could not be reached to renew the lease.
    - ``"late"``: The deadline passed because this process did not renew in time: it, or its event loop, stood still or
      had too much to do. The server was not asked. Another client may hold the lock.
    - ``"closed"``: This process closed the coordinator or its client.
    - ``"released"``: Another task of this process released the lease while the body ran.

    Attributes:
        name: The name of the lock.
        reason: How the lease ended: one of the words above.
        fence: The fence of the lease. None: not known.
        held_for: Seconds from the acquisition until the loss was noticed. None: not known.
        stalled: Seconds for which this process, or its event loop, stood still since the latest renewal, at least. 0.0:
            no standstill was noticed.
        time_is_up: Whether the time of the lease had ended by the clock of this process.
        claim: Seconds for which the lease had been handed over, if it was not renewed since. 0: it had its whole ttl.
        given_back: The names of the other locks of a multi-lock, which were given back with it. Else empty.
        servers: Of a Redlock: on how many servers it was still held, of how many, and how many are needed. Else None.
    """

    def __init__(
        self,
        *,
        name: str,
        reason: LossReason,
        fence: int | None = None,
        held_for: float | None = None,
        stalled: float = 0.0,
        time_is_up: bool = False,
        claim: float = 0.0,
        given_back: tuple[str, ...] = (),
        servers: tuple[int, int, int] | None = None,
    ) -> None:
        which = "" if fence is None else f" (fence {fence})"
        lasted = "" if held_for is None else f" after {held_for:.1f} seconds"
        why = _explained(reason, stalled=stalled, time_is_up=time_is_up, claim=claim)
        if servers is not None:
            held, of, needed = servers
            why = f"{held} of {of} servers hold it, {needed} have to; the last loss: {why}"
        if given_back:
            why += f". {', '.join(map(repr, given_back))} {'is' if len(given_back) == 1 else 'are'} given back with it"
        super().__init__(f"the lease on {name!r}{which} was lost{lasted}: {why}")
        self.name = name
        self.reason: LossReason = reason
        self.fence = fence
        self.held_for = held_for
        self.stalled = stalled
        self.time_is_up = time_is_up
        self.claim = claim
        self.given_back = given_back
        self.servers = servers
