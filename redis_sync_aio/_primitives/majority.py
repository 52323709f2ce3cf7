"""What a majority of independent servers agrees on, and the errors that say why there is none.

P8 over several servers. A fence is the clock of the server that granted it, or one more than the last one there. So a
server whose clock is an hour ahead grants fences that the others reach an hour later. If such a fence were used, and
the other servers that know of it lost their data, the next majority would grant a lower one. Hence nobody is given a
fence that is more than `APART` ahead of those of a majority. A server that forgot it and stays away for that long comes
back with a clock that is past it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._acquire.hub import Hub
from .._core import logs
from .._transport.failures import message_of
from ..errors import CommandRefused, CoordinatorClosed, SyncError, Unreachable, WrongContext
from .votes import Vote, Votes

APART = 10.0
"""Seconds by which the fences of servers, and so their clocks, may differ."""


def majority_fence(fences: Sequence[int], quorum: int) -> int | None:
    """Return the greatest of ``fences`` that is not far ahead of those of a majority; None if there is none."""
    newest = sorted(fences, reverse=True)
    pairs = zip(newest, newest[quorum - 1 :], strict=False)
    return next((first for first, last in pairs if first - last <= APART * 1_000_000), None)


def report_ahead(name: str, hubs: Sequence[Hub], votes: Votes, fence: int) -> None:
    """Log, once for each server, that its fences are far ahead of ``fence``, which a majority agrees on."""
    for vote, lease in votes.granted:
        ahead, hub = (lease.fence - fence) / 1_000_000, hubs[vote.server]
        if ahead <= APART:
            hub.ahead_reported = False
        elif not hub.ahead_reported:
            hub.ahead_reported = True
            logs.fence_ahead(name, vote.server + 1, len(votes.all), ahead)


def no_majority(name: str, answered: int, servers: int, quorum: int, within: float, more: str) -> Unreachable:
    """Return the error for ``answered`` of so many servers, when ``quorum`` have to answer."""
    return Unreachable(
        f"{answered} of {servers} servers answered about {name!r} within {within:g} seconds, {quorum} have to{more}"
    )


def why_no_answer(name: str, votes: Votes, quorum: int, within: float) -> SyncError:
    """Return why no majority answered."""
    errors = [error for vote in votes.all if (error := vote.error) is not None]
    for error in errors:
        if isinstance(error, (CoordinatorClosed, WrongContext)):
            return error
    refused = [error for error in errors if isinstance(error, CommandRefused)]
    if len(refused) > len(votes.all) - quorum:
        return refused[0]
    answered = sum(vote.answered for vote in votes.all)
    shown = "; ".join(f"{vote.server + 1}: {_said(vote)}" for vote in votes.all if not vote.answered)
    return no_majority(name, answered, len(votes.all), quorum, within, f". No. {shown}")


def _said(vote: Vote) -> str:
    error = vote.error or vote.connection_error
    return "no answer" if error is None else message_of(error)


def why_no_fence(name: str, votes: Votes, quorum: int) -> Unreachable | None:
    """Return the error for clocks that are far apart; None if that is not why there is no lease."""
    granted = votes.granted
    if len(granted) < sum(vote.answered for vote in votes.all):
        return None  # the others may agree, once they are free
    if len(granted) < quorum or majority_fence([lease.fence for _, lease in granted], quorum) is not None:
        return None
    last = min(lease.fence for _, lease in granted)
    shown = ", ".join(f"no. {vote.server + 1}: {(lease.fence - last) / 1_000_000:+.0f} s" for vote, lease in granted)
    return Unreachable(
        f"the fences for {name!r} of the servers that answered differ by more than {APART:g} seconds ({shown}), and "
        f"{quorum} of {len(votes.all)} servers have to agree: set their clocks, or bring the other servers back"
    )
