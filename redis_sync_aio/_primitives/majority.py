"""Redlock: a lock on a majority of independent servers, and the errors that say why there is none.

P8 over several servers. A fence is the clock of the server that granted it, or one more than the last one there. So a
server whose clock is an hour ahead grants fences that the others reach an hour later. If such a fence were used, and
the other servers that know of it lost their data, the next majority would grant a lower one. Hence no holder is given a
fence that is more than `APART` ahead of those of a majority. A server that forgot it and stays away for that long comes
back with a clock that is past it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from .._client.replies import is_transient
from .._client.settings import RedisClient, Same, address_of, is_client, is_cluster, running_loop
from .._core import logs
from .._core.backoff import Backoff
from .._core.clock import now
from .._core.display import shown
from .._core.keys import Keys
from .._leases.acquisition import Request
from .._leases.grant import Grant
from .._leases.hub import Hub
from .._leases.implicit import binding_of
from .._scripts.constants import APART_US
from .._transport.call import Call, message_of
from ..errors import CommandRefused, CoordinatorClosed, SyncError, Unreachable, WouldDeadlock, WrongContext
from .base import Wanted
from .lock import PlainLock
from .multilock import GroupGrant
from .quorum import Attempt, QuorumGroup, Vote, in_time, is_silent, link_of, majority, raise_fence

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


def check_independent(name: str, hubs: Sequence[Hub]) -> None:
    """Raise ValueError if two of ``hubs`` lead to one server, or to a replica of it: it would count twice.

    Independent servers have data of different histories. One that is unreachable, or does not tell (an ACL, a proxy),
    is not compared.
    """
    seen: dict[bytes, int] = {}
    for number, hub in enumerate(hubs, 1):
        if history := link_of(hub).history or hub.history:
            first = seen.setdefault(history, number)
            if first != number:
                where = address_of(hub.client)
                raise ValueError(
                    f"clients no. {first} and {number} of {name!r} lead to one server ({where}), or to its replica: it "
                    "would count twice, so that its failure alone could cost the majority. Give one client for each "
                    "server"
                )


BETWEEN_ATTEMPTS = Backoff(initial=0.02, cap=0.5)
"""Pauses between attempts that found no majority."""

APART = APART_US / 1_000_000
"""Seconds by which the fences of servers, and so their clocks, may differ."""


def majority_fence(fences: Sequence[float], quorum: int) -> float | None:
    """Return the greatest of ``fences`` that is not far ahead of those of a majority; None if there is none."""
    newest = sorted(fences, reverse=True)
    pairs = zip(newest, newest[quorum - 1 :], strict=False)
    return next((first for first, last in pairs if first - last <= APART_US), None)


def agreed_fence(fences: Sequence[int], quorum: int) -> int | None:
    """Return the fence that a majority has granted; None if there is none."""
    return next((fence for fence in fences[: len(fences) - quorum + 1] if fences.count(fence) >= quorum), None)


# -- The clocks of the servers, as far as this process knows them, so that one fence suits all ------------------
#
# An answer to TIME bounds the clock of a server from above: it shows at most that, plus what has passed since the
# question was sent. A server grants a fence that is a little past all these bounds as it is, so no server need be told
# afterwards which fence counts.


MARGIN_US = 50_000
"""Microseconds by which the fence is past the clocks: a request may take longer than the question."""
FRESH = 60.0
"""Seconds for which an answer counts: clocks drift."""
_HISTORY = re.compile(rb"\bmaster_replid:([0-9a-f]+)")


def candidate_fence(hubs: Sequence[Hub], quorum: int, granted: int = 0) -> int:
    """Return the fence that the servers of ``hubs`` are asked for; 0 if too few clocks are known.

    ``granted``: what another server has granted already. It is returned if the others can grant it, too.
    """
    time = now()
    clocks = [(hub.clock_ahead + time) * 1_000_000 for hub in hubs if hub.clock_ahead is not None]
    newest = majority_fence(clocks, quorum)
    if newest is None:
        return granted
    # A fifth of the margin is left for the way of the request.
    return granted if granted - newest > MARGIN_US / 5 else math.ceil(newest) + MARGIN_US


def ask_clock(hub: Hub, keys: Keys, time: float) -> None:
    """Ask a server for its time, and for the history of its data unless its link knows that. Nothing waits for it."""
    hub.clock_asked = time

    def answered(call: Call) -> None:
        if call.error is None:
            (seconds, micros), *told = call.reply
            hub.clock_ahead = int(seconds) + int(micros) / 1e6 - call.sent
            found = _HISTORY.search(told[0]) if told and isinstance(told[0], bytes) else None
            hub.history = found[1].strip(b"0") if found else b""

    more = () if link_of(hub).history else ((b"INFO", b"replication"),)
    hub.commands.read(keys, more, Call(time, time + hub.retry_for, answered))


# -- Why there is no majority -----------------------------------------------------------------------------------


def report_ahead(name: str, granted: Iterable[tuple[Vote, Grant]], servers: int, fence: int) -> None:
    """Log, once for each server, that its fences are far ahead of ``fence``, which a majority agrees on."""
    for vote, lease in granted:
        ahead, hub = (lease.fence - fence) / 1_000_000, vote.resource.hub
        if ahead <= APART:
            hub.ahead_reported = False
        elif not hub.ahead_reported:
            hub.ahead_reported = True
            logs.log("fence_ahead", lock=name, server=vote.server + 1, servers=servers, seconds=ahead)


def why_no_answer(name: str, votes: Sequence[Vote], hubs: Sequence[Hub], quorum: int, within: float) -> SyncError:
    """Return why no majority answered."""
    errors = [error for vote in votes if isinstance(error := vote.error, SyncError)]
    for error in errors:
        if isinstance(error, (CoordinatorClosed, WrongContext)):
            return error
    refused = sorted((error for error in errors if isinstance(error, CommandRefused)), key=is_transient)
    if len(refused) > (spared := len(hubs) - quorum):
        return refused[spared]  # transient unless so many are permanent that a later attempt cannot succeed
    known = {vote.server: vote for vote in votes}
    answered = [server for server, vote in known.items() if vote.known]
    silent = [server for server in range(len(hubs)) if server not in answered]
    shown = "; ".join(f"{server + 1}: {_said(known.get(server), hubs[server])}" for server in silent)
    return Unreachable.minority(
        name, answered=len(answered), servers=len(hubs), needed=quorum, seconds=within, others=f"No. {shown}"
    )


def _said(vote: Vote | None, hub: Hub) -> str:
    error = (vote and vote.error) or hub.link.connection_error
    return "no answer" if error is None else message_of(error)


def why_no_fence(name: str, votes: Sequence[Vote], servers: int, quorum: int) -> Unreachable | None:
    """Return the error for clocks that are far apart; None if that is not why there is no lease."""
    granted = [(vote, lease) for vote in votes if (lease := vote.lease()) is not None]
    if len(granted) < sum(vote.known for vote in votes):
        return None  # the others may agree, once they are free
    if len(granted) < quorum or majority_fence([lease.fence for _, lease in granted], quorum) is not None:
        return None
    last = min(lease.fence for _, lease in granted)
    ahead = {vote.server + 1: (lease.fence - last) / 1_000_000 for vote, lease in granted}
    shown = ", ".join(f"no. {number}: {seconds:+.0f} s" for number, seconds in sorted(ahead.items()))
    return Unreachable(
        f"the fences for {name!r} of the servers that answered differ by more than {APART:g} seconds ({shown}), and "
        f"{quorum} of {servers} servers have to agree: set their clocks, or bring the other servers back"
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


GRACE = 0.5
"""The part of the time until a majority has answered for which more answers are awaited: that of the first server."""
LEAST_GRACE = 0.0005
"""The least of that, in seconds."""
LATE = 3
"""Number of times in a row that the first server may answer later than that; then it is not awaited."""
AGAIN = 1.0
"""Seconds after which a silent server is asked again although the others are a majority."""
LOOK = 1.0
"""Most seconds between two looks at the server at which a request waits, and of its silence until it is asked."""


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
            with Attempt(running_loop()) as attempt:
                grant, stale_server, error = await self._attempt(attempt, wanted, ends, stale_server)
            if grant is not None:
                return grant
            if error is None:
                unanswered_until = math.inf
            elif unanswered_until == math.inf:
                unanswered_until = now() + self._hubs()[0].retry_for
            delay = next(delays)
            if error is not None and (not is_transient(error) or now() + delay >= min(unanswered_until, ends)):
                raise error
            if now() + delay >= ends:
                return None
            await asyncio.sleep(delay)

    async def try_acquire(self, wanted: Wanted) -> RedlockGrant | None:
        """Ask once; None: others hold it, or wait for it. Raises what `acquire` raises, after one attempt."""
        with Attempt(running_loop()) as attempt:
            grant, _, error = await self._ask_all(attempt, wanted, math.inf, None, wait=False)
        if grant is None and error is not None:
            raise error
        return grant

    # -- one attempt -----------------------------------------------------------------------------------

    async def _attempt(
        self, attempt: Attempt, wanted: Wanted, ends: float, stale_server: int | None
    ) -> tuple[RedlockGrant | None, int | None, SyncError | None]:
        """Return a grant; or the server at which waiting makes no sense; or why there is no majority that answers.

        A request that has to wait stands in the queue of one server, the gate. Once that grants it, it asks the others
        and waits there, not for long: another request may queue at another server, and wait for this one.
        """
        hubs = self._hubs()
        if stale_server != 0 and self._is_contended(hubs[0]):
            request = self._request(wanted, candidate_fence(hubs, self.quorum), wait=True)
            gate = attempt.ask(0, self.locks[0]._resource(), request)
        else:
            grant, waiting, error = await self._ask_all(attempt, wanted, ends, stale_server, wait=True)
            if waiting is None:
                return grant, stale_server, error
            gate = waiting
        stale = await self._granted_there(gate, attempt, ends)
        if isinstance(gate.error, WouldDeadlock):
            raise gate.error
        lease = gate.lease()
        if lease is None:
            return None, gate.server if stale else None, None
        request = self._request(wanted, candidate_fence(hubs, self.quorum, lease.fence), wait=True)
        there = {vote.server for vote in attempt.votes if vote.grant is not None or not vote.settled}
        for server, awaited in self._worth_asking(hubs).items():
            if server not in there:
                attempt.ask(server, self.locks[server]._resource(), request, awaited)
        await self._answers(attempt, gate, min(ends, now() + self._answer_within), queues=True)
        return await self._enter(attempt, wanted), None, None

    def _is_contended(self, hub: Hub) -> bool:
        """Return whether this process knows that the lock is taken or waited for, so that asking all is useless."""
        known = hub.resources.get(self.locks[0]._keys.id)
        return bool(known and (known.acquisitions or known.leases)) and not is_silent(hub, self._answer_within)

    async def _ask_all(
        self, attempt: Attempt, wanted: Wanted, ends: float, stale_server: int | None, *, wait: bool
    ) -> tuple[RedlockGrant | None, Vote | None, SyncError | None]:
        """Ask all servers: return a grant; or the vote that waits at a gate; or why there is no majority that answers.

        The gate is the first server that answers. With ``wait`` the request for it stands in its queue.
        """
        hubs, began = self._hubs(), now()
        asked = self._worth_asking(hubs)
        answering = [server for server, awaited in asked.items() if awaited]
        first = next((server for server in answering if server != stale_server), answering[0])
        fence = candidate_fence(hubs, self.quorum)
        waiting, other = self._request(wanted, fence, wait=True), self._request(wanted, fence, wait=False)
        gate = attempt.ask(first, self.locks[first]._resource(), waiting if wait else other)
        for server, awaited in asked.items():
            if server != first:
                attempt.ask(server, self.locks[server]._resource(), other, awaited)
        for hub, lock in zip(hubs, self.locks, strict=True):
            if began - hub.clock_asked > FRESH:
                ask_clock(hub, lock._keys, began)
        await self._answers(attempt, gate, min(ends, began + self._answer_within), queues=False)
        hubs[first].late = 0 if gate.known else hubs[first].late + 1
        check_independent(self.name, hubs)
        if len(attempt.leases()) >= self.quorum:
            if gate.known and gate.lease() is None:
                # Its holder there has no majority, or it is just being handed over: do not pass its waiters.
                found = await self.answer(self.locks[gate.server]._look(1))
                if found is not None and found.waiting > gate.waits:
                    attempt.drop(keep=gate)
                    return None, gate if wait else None, None
            grant = await self._enter(attempt, wanted)
            apart = None if grant is not None else why_no_fence(self.name, attempt.votes, len(hubs), self.quorum)
            if grant is not None or apart is not None:
                return grant, None, apart
        answered = [vote.server for vote in attempt.votes if vote.known]
        if len(answered) < self.quorum:
            return None, None, why_no_answer(self.name, attempt.votes, hubs, self.quorum, self._answer_within)
        if not wait:
            return None, None, None
        if gate.waits:
            attempt.drop(keep=gate)
        elif gate.lease() is None:
            attempt.drop()
            server = next((server for server in sorted(answered) if server != stale_server), answered[0])
            gate = attempt.ask(server, self.locks[server]._resource(), waiting)
        return None, gate, None

    def _worth_asking(self, hubs: Sequence[Hub]) -> dict[int, bool]:
        """Return the servers to ask, each with whether its answer is awaited.

        A silent server is left out if the others are a majority: it is asked from time to time, and not awaited.
        """
        found = {server: True for server, hub in enumerate(hubs) if not is_silent(hub, self._answer_within)}
        if len(found) == len(hubs):
            return found
        time, enough = now(), len(found) >= self.quorum
        for server in set(range(len(hubs))).difference(found):
            if not enough or time >= hubs[server].ask_again_at:
                hubs[server].ask_again_at = time + AGAIN
                found[server] = not enough
        return found

    def _hubs(self) -> list[Hub]:
        """Return the hub of each server."""
        found = []
        for lock in self.locks:
            if lock._hub is None or not lock._hub.usable():
                lock._hub = lock._at_work()
            found.append(lock._hub)
        return found

    def _request(self, wanted: Wanted, fence: int, *, wait: bool) -> Request:
        """Return a request for ``fence`` at least; 0: any."""
        request = self.locks[0]._request(wanted.ttl, None, wanted.label, wait=wait)
        return replace(request, unqueued=(b"", b"", b"%016d" % fence)) if fence else request

    async def _answers(self, attempt: Attempt, gate: Vote, limit: float, *, queues: bool) -> None:
        """Wait for the answers that decide, until ``limit``, and for more of them half as long again if they matter.

        ``queues``: whether requests wait in the queues of other servers than the gate, too.
        """
        began = now()
        await attempt.until(partial(self._is_decided, attempt, queues), limit)
        grace = max(LEAST_GRACE, (now() - began) * GRACE)
        await attempt.until(partial(self._is_complete, attempt, gate), min(limit, now() + grace))

    def _is_decided(self, attempt: Attempt, queues: bool) -> bool:
        """Return whether a majority has granted it, or cannot grant it now."""
        granted = len(attempt.leases())
        waiting = sum(vote.waits for vote in attempt.votes) if queues else 0
        return granted >= self.quorum or granted + attempt.unknown + waiting < self.quorum

    def _is_complete(self, attempt: Attempt, gate: Vote) -> bool:
        """Return whether no further answer would change what is done now.

        The gate has the queue. Others may make the fence a common one, or show that two clients lead to one server.
        """
        if not attempt.unknown:
            return True
        fences = [lease.fence for _, lease in attempt.leases()]
        common = len(fences) < self.quorum or agreed_fence(fences, self.quorum) is not None
        known = gate.known or gate.settled or gate.resource.hub.late >= LATE
        return common and known and all(vote.resource.hub.link.connections for vote in attempt.votes if vote.awaited)

    async def _granted_there(self, gate: Vote, attempt: Attempt, ends: float) -> bool:
        """Wait until a server grants, or waiting there makes no sense. Return whether the others would be free.

        They are asked as often as a lease is renewed.
        """
        every = self.locks[gate.server]._ttl_ms / 3000
        look = now() + every
        hub = gate.resource.hub
        while not gate.settled and now() < ends and not is_silent(hub, self._answer_within):
            link_of(hub).ping_after(LOOK)
            until = min(look, ends, now() + min(LOOK, self._answer_within))
            await attempt.until(lambda: gate.settled, until)
            if not gate.settled and now() >= look:
                found = await self.held()
                if found[gate.server] is None:  # hung
                    return False
                if found.count(False) >= self.quorum:
                    return True
                look = now() + every
        return False

    async def _enter(self, attempt: Attempt, wanted: Wanted) -> RedlockGrant | None:
        """Make one grant of those of the servers; None if they are no majority.

        P8. The fence is one that a majority has granted, or else the greatest that a majority is not far behind. Then,
        before anybody has it, it is raised on those that granted less, at the price of a round trip. So of the next
        majority one server knows it, and grants a greater one. (A server that is far ahead holds the lock like the
        others, but knows of no fence.)
        """
        granted, within, servers = attempt.leases(), self._answer_within, len(self.locks)
        if len(granted) < self.quorum:
            return None
        fences = [lease.fence for _, lease in granted]
        fence = agreed_fence(fences, self.quorum)
        if fence is None:
            found = majority_fence(fences, self.quorum)
            if found is None:
                return None
            fence = int(found)
            raised = await asyncio.gather(*(raise_fence(vote, lease, fence, within) for vote, lease in granted))
            granted = [it for it, done in zip(granted, raised, strict=True) if done]
            if sum(lease.fence <= fence for _, lease in granted) < self.quorum:
                return None
        report_ahead(self.name, granted, servers, fence)
        held = {vote.server: lease for vote, lease in granted}
        request = self._request(wanted, fence, wait=False)

        def ask(group: QuorumGroup, server: int) -> None:
            Vote(group, server, self.locks[server]._resource(), request)

        group = QuorumGroup(self.key(), held, servers, fence, within, ask)
        if group.lost is not None:  # some were about to end
            return None
        used = [vote for vote, _ in granted]
        votes, attempt.votes = attempt.votes, []
        for vote in votes:
            if vote not in used:
                group.adopt(vote)
                continue
            vote.owner = None
            if (task := asyncio.current_task()) is not None:
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
