"""Problems of a name, each in a sentence that says what it means and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from .._core.display import not_a_lock, release_command, text
from ..errors._wording import page
from .views import HolderView, Problem, ProblemCode, WaiterView

CLOCK = 1_000_000
"""Microseconds by which a fence may be ahead of the server's clock: a range of fences, or many grants in a row."""

TRANSIENT: frozenset[ProblemCode] = frozenset(
    {"holder_disconnected", "queue_without_holder", "fence_lost", "permits_lost", "dead_waiters"}
)
"""Problems that may only be the moment between two reads: they are looked at twice."""


def foreign_without_ttl(key: bytes, value: bytes) -> Problem:
    """Describe a key with a value of another program that will not end."""
    return Problem("foreign_without_ttl", not_a_lock(key, value))


def holder_disconnected(key: bytes, token: bytes, holder: HolderView) -> Problem:
    """Describe a lock without a ttl whose process is not connected."""
    return Problem(
        "holder_disconnected",
        f"process {holder.pid} on {holder.host} holds it without a ttl, and is not connected to the server: it has "
        "ended, is cut off, or polls since the server refused it messages (polling_instead in its log). Look there; if "
        f"it has ended, nobody else will release the lock, so do: {release_command(key, token)}",
    )


def dead_waiters(waiters: list[WaiterView]) -> Problem:
    """Describe tickets of processes that are not there any more."""
    number = len(waiters)
    whose = ", ".join(sorted({f"{it.host}:{it.pid}" if it.host else repr(it.token) for it in waiters})[:5])
    return Problem(
        "dead_waiters",
        f"{number} of its waiters {'is' if number == 1 else 'are'} gone ({whose}): nobody listens for the grant. "
        "There is nothing to do: the next release passes them over",
    )


def queue_without_holder(polled: bool) -> Problem:
    """Describe a queue that nobody is ahead of."""
    return Problem(
        "queue_without_holder",
        "requests wait although it is free: "
        + (
            "the first one polls and will take it at its next look"
            if polled
            else "its key was deleted by another program, or it expired. The waiters look again within their poll_cap "
            "(2.5 seconds); if it stays so, no process that waits is running"
        ),
    )


def fence_lost() -> Problem:
    """Describe a lock of ours whose fence key is gone."""
    return Problem(
        "fence_lost",
        "its holder's token is one of this package, but the key that remembers its fence is gone or names another "
        "grant: a memory limit evicted it, or another program wrote one of the two. Later fences are still greater; "
        "set maxmemory-policy to noeviction",
    )


def permits_lost() -> Problem:
    """Describe permits of which one key is gone."""
    return Problem(
        "permits_lost",
        "one of its two keys is gone, so nobody is known to hold anything, and its holders lose their leases at "
        "the next renewal: a memory limit evicted it, or another program deleted it. Set maxmemory-policy "
        "to noeviction",
    )


def over_limit(held: int, limit: int) -> Problem:
    """Describe permits of which more are held than there are."""
    return Problem(
        "over_limit",
        f"{held} permits are held, and the limit is {limit}: it was lowered by a resize. Nothing is granted until "
        "enough of them were released",
    )


def broken() -> Problem:
    """Describe a barrier that was broken, and not reset."""
    return Problem(
        "broken",
        "a party ended while it waited, or abort() was called: the barrier is broken, so all parties that come get "
        "BrokenBarrierError. Once all have got it, await AsyncBarrier(…).reset()",
    )


def clock_behind(ahead: float) -> Problem:
    """Describe a fence from the future."""
    return Problem(
        "clock_behind",
        f"its last fence is {ahead:.1f} seconds ahead of the server's clock: that clock was set back, or the data came "
        "from a server whose clock is ahead. Fences go on rising; compare the clocks of the servers",
    )


def wrong_type(keys: list[bytes]) -> Problem:
    """Describe keys that are no lock's."""
    return Problem(
        "wrong_type",
        f"another program uses {', '.join(map(text, keys))} for something else, so requests fail with WrongKeyType. "
        "Give the lock another name, or delete the key if nobody needs what is in it",
    )


def unreadable(refused: Mapping[str, str]) -> Problem:
    """Describe a name of which the user may not read these facts, with the answers of the server."""
    *facts, last = refused
    answer = next(iter(refused.values())).rstrip(".")
    return Problem(
        "unreadable",
        f"the server refused to show {', '.join(facts)}{' and ' if facts else ''}{last}: {answer}. "
        f"Extend the rights of this user: {page('operations/inspection', 'rights')}",
    )
