"""Redlock: a lock on a majority of independent servers, and the errors that say why there is none.

P8 over several servers. A fence is the clock of the server that granted it, or one more than the last one there. So a
server whose clock is an hour ahead grants fences that the others reach an hour later. If such a fence were used, and
the other servers that know of it lost their data, the next majority would grant a lower one. Hence nobody is given a
fence that is more than `APART` ahead of those of a majority. A server that forgot it and stays away for that long comes
back with a clock that is past it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from .._client.replies import is_transient
from .._client.settings import RedisClient, Same, address_of, is_client, is_cluster, running_loop
from .._core import logs
from .._core.backoff import Backoff
from .._core.clock import now
from .._core.display import shown
from .._leases.hub import Hub
from .._leases.implicit import binding_of
from .._transport.call import message_of
from .._transport.endpoint import run_id
from ..errors import CommandRefused, CoordinatorClosed, SyncError, Unreachable, WrongContext
from .base import Wanted
from .lock import PlainLock
from .multilock import GroupGrant
from .quorum import QuorumGroup, Vote, Votes, in_time, is_silent, majority, raise_fence

# -- The servers of a Redlock: several, and independent of each other ------------------------------------------


T = TypeVar("T")


def several(clients: Iterable[T]) -> tuple[T, ...]:
    """Return ``clients`` as a tuple; raise TypeError for a single one."""
    if is_client(clients) or binding_of(clients) or not isinstance(clients, Iterable):
        raise TypeError(f"clients must be several, one for each server, not {shown(clients)}; AsyncLock takes one")
    return tuple(clients)


def check_apart(clients: Sequence[RedisClient]) -> None:
    """Raise TypeError or ValueError unless ``clients`` can be those of several servers."""
    if any(map(is_cluster, clients)):
        raise TypeError("clients must be of servers that know nothing of each other; AsyncLock takes a RedisCluster")
    if not clients:
        raise ValueError("clients is empty: it needs one for each server")
    if len({id(client) for client in clients}) < len(clients):
        raise ValueError("clients has one of them twice: each server counts once")
    if len(clients) == 1:
        raise ValueError("clients has one server, and its failure would be that of all: give three, or use AsyncLock")


async def check_independent(name: str, hubs: Sequence[Hub], within: float) -> None:
    """Raise ValueError if two of ``hubs`` lead to one server: it would count twice for a majority.

    A server is known by its run_id, which is asked for once and has ``within`` seconds to arrive. One that is
    unreachable is asked again at the next use. One that does not tell (an ACL, a proxy, a slow one) is not compared.
    """
    unknown = [hub for hub in hubs if hub.server_id is None and hub.link.connection_error is None]
    if unknown:
        await asyncio.gather(*(_identify(hub, within) for hub in unknown))
    seen: dict[bytes, int] = {}
    for number, hub in enumerate(hubs, 1):
        if hub.server_id:
            first = seen.setdefault(hub.server_id, number)
            if first != number:
                where = address_of(hub.client)
                raise ValueError(
                    f"clients no. {first} and {number} of {name!r} lead to one server ({where}): it would count twice, "
                    "so that its failure alone could cost the majority. Give one client for each server"
                )


async def _identify(hub: Hub, within: float) -> None:
    found = await run_id(hub.client, within)
    if found is not None:
        hub.server_id = found


BETWEEN_ATTEMPTS = Backoff(initial=0.02, cap=0.5)
"""Pauses between attempts that found no majority."""

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
            logs.log("fence_ahead", lock=name, server=vote.server + 1, servers=len(votes.all), seconds=ahead)


def why_no_answer(name: str, votes: Votes, quorum: int, within: float) -> SyncError:
    """Return why no majority answered."""
    errors = [error for vote in votes.all if (error := vote.error) is not None]
    for error in errors:
        if isinstance(error, (CoordinatorClosed, WrongContext)):
            return error
    refused = sorted((error for error in errors if isinstance(error, CommandRefused)), key=is_transient)
    if len(refused) > (spared := len(votes.all) - quorum):
        return refused[spared]  # transient unless so many are permanent that a later attempt cannot succeed
    answered = sum(vote.answered for vote in votes.all)
    shown = "; ".join(f"{vote.server + 1}: {_said(vote)}" for vote in votes.all if not vote.answered)
    return Unreachable.minority(
        name, answered=answered, servers=len(votes.all), needed=quorum, seconds=within, others=f"No. {shown}"
    )


def _said(vote: Vote) -> str:
    error = vote.error or vote.resource.hub.link.connection_error
    return "no answer" if error is None else message_of(error)


def why_no_fence(name: str, votes: Votes, quorum: int) -> Unreachable | None:
    """Return the error for clocks that are far apart; None if that is not why there is no lease."""
    granted = votes.granted
    if len(granted) < sum(vote.answered for vote in votes.all):
        return None  # the others may agree, once they are free
    if len(granted) < quorum or majority_fence([lease.fence for _, lease in granted], quorum) is not None:
        return None
    last = min(lease.fence for _, lease in granted)
    ahead = {vote.server + 1: (lease.fence - last) / 1_000_000 for vote, lease in granted}
    shown = ", ".join(f"no. {number}: {seconds:+.0f} s" for number, seconds in ahead.items())
    return Unreachable(
        f"the fences for {name!r} of the servers that answered differ by more than {APART:g} seconds ({shown}), and "
        f"{quorum} of {len(votes.all)} servers have to agree: set their clocks, or bring the other servers back"
    )


class RedlockGrant(GroupGrant):
    """A grant of a majority of servers."""

    lease_group: QuorumGroup
    reports_loss = True

    @property
    def outlives(self) -> bool:  # type: ignore[override]
        """True if it may be held on other servers when one coordinator is closed; not after a release that failed."""
        return self.lease_group.renewed

    def _report_loss(self, tasks: int = 1) -> None:
        logs.lease_lost(self.lease_group.loss(), self.observed(), tasks)


class Majority:
    """The algorithm of Redlock, over one lock on each of several independent servers.

    Args:
        locks: the lock on each server, in their order.
        answer_within: seconds that a server has to answer.
    """

    def __init__(self, locks: tuple[PlainLock, ...], answer_within: float) -> None:
        self.locks = locks
        self.quorum = majority(len(locks))
        self.name = locks[0].name
        self._answer_within = answer_within

    def key(self) -> Hashable:
        """Return the identity of the lock in this process."""
        return running_loop(), tuple(Same(lock._client) for lock in self.locks), self.locks[0]._keys.all[0]

    async def acquire(self, wanted: Wanted, ends: float) -> RedlockGrant | None:
        """Wait for a majority until ``ends`` (local clock); None when others held it for all that time.

        Raises Unreachable, CommandRefused, CoordinatorClosed or WrongContext when no majority answered.
        """
        unanswered_until, delays = math.inf, iter(BETWEEN_ATTEMPTS)
        stale_server = None  # the holder on this server has no majority
        while True:
            grant, queue_server, error = await self.ask_all(wanted, ends, stale_server)
            if grant is None and queue_server is not None:
                grant, stale = await self._wait_in_turn(queue_server, wanted, ends)
                stale_server = queue_server if stale else None
            if grant is not None:
                return grant
            if error is None:
                unanswered_until = math.inf
            elif unanswered_until == math.inf:
                unanswered_until = now() + self.locks[0]._resource().hub.retry_for
            delay = next(delays)
            if error is not None and (not is_transient(error) or now() + delay >= min(unanswered_until, ends)):
                raise error
            if now() + delay >= ends:
                return None
            await asyncio.sleep(delay)

    async def ask_all(
        self, wanted: Wanted, ends: float, stale_server: int | None = None
    ) -> tuple[RedlockGrant | None, int | None, SyncError | None]:
        """Ask all servers: return a grant; or the server to queue at; or why there is no majority that answers."""
        await check_independent(self.name, [lock._at_work() for lock in self.locks], self._answer_within)
        with Votes(self.quorum, self._answer_within) as votes:
            for server in range(len(self.locks)):
                self._ask(votes, server, wanted, wait=False)
            await votes.answers(ends)
            answered = [vote.server for vote in votes.all if vote.answered]
            if len(answered) < self.quorum:
                return None, None, why_no_answer(self.name, votes, self.quorum, self._answer_within)
            queue_server = next((server for server in answered if server != stale_server), answered[0])
            if votes.suffice and votes.all[queue_server].lease is None:
                # Its holder there has no majority, or it is just being handed over: do not pass its waiters.
                found = await self.answer(self.locks[queue_server]._look(1))
                if found is not None and found.waiting:
                    return None, queue_server, None
            grant = await self._enter(votes, wanted)
            apart = None if grant is not None else why_no_fence(self.name, votes, self.quorum)
            return grant, None if apart is not None else queue_server, apart

    async def _wait_in_turn(self, queue_server: int, wanted: Wanted, ends: float) -> tuple[RedlockGrant | None, bool]:
        """Wait at one server, and then at all others: the first one there gets them.

        Return None when there is no majority all the same, and whether the holder at that server has none, either.
        Only the request that was granted at one queue server waits at the others, and not for long: another request
        may queue at another server, and wait for this one.
        """
        with Votes(self.quorum, self._answer_within) as votes:
            stale = await self._granted_there(self._ask(votes, queue_server, wanted, wait=True), ends)
            if not votes.granted:
                return None, stale
            for server in range(len(self.locks)):
                if server != queue_server:
                    self._ask(votes, server, wanted, wait=True)
            await votes.answers(ends)
            return await self._enter(votes, wanted), False

    def _ask(self, votes: Votes, server: int, wanted: Wanted, *, wait: bool) -> Vote:
        lock = self.locks[server]
        return votes.ask(server, lock._resource(), lock._request(wanted.ttl, None, wanted.label, wait=wait))

    async def _granted_there(self, vote: Vote, ends: float) -> bool:
        """Wait until a server grants, or waiting there makes no sense. Return whether the others would be free.

        They are asked as often as a lease is renewed.
        """
        every = self.locks[vote.server]._ttl_ms / 3000
        look = now() + every
        hub = vote.resource.hub
        while not vote.future.done() and now() < ends and not is_silent(hub, self._answer_within):
            await asyncio.wait([vote.future], timeout=min(look, ends, now() + 1.0) - now())
            if not vote.future.done() and now() >= look:
                found = await self.held()
                if found[vote.server] is None:  # hung
                    return False
                if found.count(False) >= self.quorum:
                    return True
                look = now() + every
        return False

    async def _enter(self, votes: Votes, wanted: Wanted) -> RedlockGrant | None:
        """Make one grant of those of the servers; None if they are no majority.

        P8. The fence is the greatest of those granted that a majority is not far behind, and before anybody has it no
        server of a majority grants one that is not greater: of the next majority one server is among those. The price
        is a round trip. (A server that is far ahead holds the lock like the others, but knows of no fence.)
        """
        if not votes.suffice:
            return None
        granted, within = votes.granted, self._answer_within
        fence = majority_fence([lease.fence for _, lease in granted], self.quorum)
        if fence is None:
            return None
        report_ahead(self.name, [lock._at_work() for lock in self.locks], votes, fence)
        raised = await asyncio.gather(*(raise_fence(vote, lease, fence, within) for vote, lease in granted))
        held = {vote.server: lease for (vote, lease), done in zip(granted, raised, strict=True) if done}
        if sum(lease.fence <= fence for lease in held.values()) < self.quorum:
            return None
        again = partial(self._ask, wanted=wanted, wait=False)
        group = QuorumGroup(self.key(), held, len(self.locks), fence, within, again)
        if group.lost is not None:  # some were about to end
            return None
        for vote in votes.all:
            vote.used = vote.server in held
            if vote.used and (task := asyncio.current_task()) is not None:
                vote.resource.leases.acquired(held[vote.server], task)
        return group.enter(RedlockGrant)

    # -- looking -----------------------------------------------------------------------------------------

    async def held(self) -> list[bool | None]:
        """Return of each server whether the lock is held there; None: it did not answer in time."""
        return await self.answers_of(lambda lock: lock.locked())

    async def answers_of(self, ask: Callable[[PlainLock], Awaitable[T]]) -> list[T | None]:
        """Return the answer of each server; None: it did not answer in time."""
        return await asyncio.gather(*(self.answer(ask(lock)) for lock in self.locks))

    async def answer(self, asked: Awaitable[T]) -> T | None:
        """Return the answer of one server; None: nothing in time, or an error."""
        found = await in_time(asked, self._answer_within)
        if isinstance(found, (CoordinatorClosed, WrongContext)):
            raise found
        return None if isinstance(found, SyncError) else found

    def most(self, answers: Iterable[T | None]) -> list[T]:
        """Return the answers that came; raises Unreachable unless they are those of a majority."""
        found = [answer for answer in answers if answer is not None]
        if len(found) < self.quorum:
            raise Unreachable.minority(
                self.name,
                answered=len(found),
                servers=len(self.locks),
                needed=self.quorum,
                seconds=self._answer_within,
            )
        return found
