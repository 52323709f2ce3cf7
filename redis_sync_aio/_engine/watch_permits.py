"""Reading the keys of permits, and writing a decision about them, by plain commands. See `watch`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from .._client.replies import Reply, Words
from .._scripts.constants import FREE_MS, HOUR_MS, MAX_NOTIFIED, TEN_YEARS_MS, Outcome
from .._transport.dialogues import Dialogue
from . import permit_rules as rules
from .snapshot import Permit, PermitSnapshot, Sharer, Ticket
from .watch_dialogue import (
    WINDOW,
    Decide,
    QueueView,
    WireKeys,
    WritePlan,
    blob,
    checked,
    deaf,
    microseconds,
    not_ours,
    number_at,
    pairs,
    place_of,
)

BATCH = 1000
"""Most expired permits that are dropped together."""
NO_STATE = "its fields say no limit and fence"
"""The complaint about a STATE that this package did not write: see include/permit_state.lua."""
UNREAD = 1
"""A placeholder for a weight that no decision needs."""


@dataclass(frozen=True, slots=True)
class PermitsRead:
    """Permits as they were read; `before.permits` has those that a decision may need."""

    keys: WireKeys
    before: PermitSnapshot
    kept: int  # until when the keys last; ms, server time
    line: QueueView
    lost: bool  # PERMITS or STATE was lost, so the rest of the other key is void
    many_over: bool  # there are too many expired permits to drop them with the decision
    sharers: dict[bytes, int]  # of the first permits, those of processes that share what they hold: until when

    def writes(self, after: PermitSnapshot) -> list[Words]:
        """Return the commands that bring the keys to the state ``after``."""
        return self._drop(after) + self._put(after) + self.line.writes(self.before, after)

    def swept(self) -> PermitSnapshot:
        """Return the snapshot without the expired permits that were read."""
        before = self.before
        live = {token: permit for token, permit in before.permits.items() if permit.until > before.now}
        over = sum(permit.weight for token, permit in before.permits.items() if token not in live)
        return replace(before, permits=live, used=before.used - over)

    def _drop(self, after: PermitSnapshot) -> list[Words]:
        """Return the commands that delete what ``after`` does not have."""
        permits, state, _, _ = self.keys
        found: list[Words] = [(b"DEL", permits, state)] if self.lost else []
        gone = [token for token in self.before.permits if token not in after.permits]
        if gone:
            found += [(b"ZREM", permits, *gone), (b"HDEL", state, *(b"=" + token for token in gone))]
        return found

    def _put(self, after: PermitSnapshot) -> list[Words]:
        """Return the commands that write what is new in ``after``, and let the keys last as long as they must."""
        permits, state, _, _ = self.keys
        old = self.before.permits
        new = {token: permit for token, permit in after.permits.items() if old.get(token) != permit}
        found: list[Words] = [(b"ZADD", permits, _end(permit), token) for token, permit in new.items()]
        fields = [*(field for item in new.items() for field in _about_permit(*item)), *self._marks(after)]
        if fields or after.least or self._counts_differ(after):
            fields += [b"limit", after.limit, b"used", after.used, b"fence", after.fence]
            kept = self._keep(after, [permit.until for permit in new.values()])
            left = kept - after.now // 1000
            found += [(b"HSET", state, *fields, b"kept", kept), (b"PEXPIRE", state, left)]
            found.append((b"PEXPIRE", permits, left))
        return found

    def _marks(self, after: PermitSnapshot) -> list[bytes | int]:
        """Return the fields of the marks that STATE lacks: permits were shared; a resize set the limit."""
        found: list[bytes | int] = []
        if after.shared and not self.before.shared:
            found += [b"shared", 1]
        if after.resized and (self.lost or not self.before.resized):
            found += [b"resized", 1]
        return found

    def _counts_differ(self, after: PermitSnapshot) -> bool:
        """Return whether STATE lacks the limit, the used permits or the fence of ``after``."""
        before = self.before
        same = (after.limit, after.used, after.fence) == (before.limit, before.used, before.fence)
        return not same or (self.lost and after.limit != 0)

    def _keep(self, after: PermitSnapshot, ends: list[int]) -> int:
        """Return until when the keys last: longer than the permits, the fence (the clock may go back), and an hour."""
        time = after.now // 1000
        if after.lasts:
            return max(time, -(-after.fence // 1000)) + 2 * max(HOUR_MS, math.ceil(1.25 * after.lasts))
        longest = max([after.least, *(end // 1000 - time for end in ends)])
        if after.resized:  # not forgotten as an implied limit is
            longest = max(longest, TEN_YEARS_MS)
        least = max(HOUR_MS, math.ceil(1.25 * longest))
        short = self.kept < max(time, after.fence // 1000) + least
        return max(time, -(-after.fence // 1000)) + 2 * least if short else self.kept


def _end(permit: Permit) -> bytes | int:
    """Return the score of a permit. A tombstone is over half a microsecond earlier: see include/permit_state.lua."""
    return permit.until if permit.weight else b"%d.5" % (permit.until - 1)


_PERMIT = re.compile(rb"(\d+) (\d+) ?(\d*)")
"""The field of STATE for a permit; the scripts take any other for none."""


def _about_permit(token: bytes, permit: Permit) -> tuple[bytes, bytes]:
    """Return the field of STATE for a permit, and its value."""
    previous = b"" if permit.previous is None else b" %d" % permit.previous
    return b"=" + token, b"%d %d%b" % (permit.weight, permit.fence, previous)


def _first_asked(keys: WireKeys, token: bytes, own: bytes, window: int) -> list[Words]:
    permits, state, queue, polls = keys
    return [
        (b"WATCH", *keys),
        (b"TIME",),
        (b"HMGET", state, b"limit", b"used", b"fence", b"kept", b"shared", b"resized", b"=" + token),
        (b"ZMSCORE", permits, token),
        (b"ZRANGE", permits, 0, BATCH + (MAX_NOTIFIED if own else 1), b"WITHSCORES"),
        (b"ZRANGE", queue, 0, window - 1, b"WITHSCORES"),
        (b"ZCARD", queue),
        (b"ZRANGE", queue, -1, -1, b"WITHSCORES"),
        (b"ZSCORE", queue, own),
        (b"ZSCORE", polls, own),
    ]


class Overview(NamedTuple):
    """The answers to the first questions."""

    now: int
    known: list[int]  # limit, used, fence; until when the keys last
    shared: bool
    resized: bool
    ends: dict[bytes, float]  # of the first permits
    named: dict[bytes, Permit]  # those of the caller
    places: dict[bytes, float]  # of the first tickets
    waiting: int
    last_place: int
    own_place: float | None
    own_until: float | None
    lost: bool  # as in `PermitsRead`
    nameless: bool  # STATE has not what this package writes: it does not exist, or it belongs to another program

    @property
    def tickets(self) -> list[Ticket]:
        """The first tickets, without what another client put there."""
        return [ticket for member in self.places if (ticket := Ticket.parse(member)) is not None]


def state_numbers(key: bytes, found: list[Reply]) -> list[int]:
    """Return the numbers in fields of STATE, 0 for each that it lacks."""
    try:
        numbers = [int(value or 0) for value in found]
    except ValueError:
        raise not_ours(key, NO_STATE) from None
    if max(numbers) >= 2**53:
        raise not_ours(key, NO_STATE)
    return numbers


def state_alone(key: bytes, found: list[Reply], left: int) -> list[int]:
    """Return limit, used and last fence by these fields of STATE, and its PTTL; raise ReplyError if it is not ours."""
    if found[1] is None and left != FREE_MS:
        raise not_ours(key, NO_STATE)
    return state_numbers(key, found)


def _overview(keys: WireKeys, answers: list[Reply], tokens: list[bytes]) -> Overview:
    """Read the answers to `_first_asked` about ``keys``; ``tokens``: those of the caller."""
    _, time, state, until, first, head, waiting, tail, place, own_until = answers
    known = state_numbers(keys[1], state[:4])
    ends = dict(pairs(first))
    if math.inf in ends.values():
        raise not_ours(keys[0], "an entry has an infinite score")
    used = known[1]
    lost = not ends if used > 0 else bool(ends) and state[1] is None
    last_place = place_of(keys[2], tail)
    named = permits_of(tokens, state[6:], until)
    shared, resized = state[4] is not None, state[5] is not None
    places = dict(pairs(head))
    return Overview(
        microseconds(time),
        known,
        shared,
        resized,
        ends,
        named,
        places,
        waiting,
        last_place,
        place,
        own_until,
        lost,
        state[1] is None,
    )


def _refuse_foreign(state: bytes) -> Dialogue:
    """Raise ReplyError if STATE exists, although it lacks what this package writes.

    Another client may have created it since it was read: then EXEC fails, and all is read again.
    """
    left, used = checked((yield [(b"PTTL", state), (b"HMGET", state, b"used")]))
    if left != FREE_MS and used[0] is None:
        raise not_ours(state, NO_STATE)


def _look_closer(keys: WireKeys, token: bytes, seen: Overview) -> Dialogue:
    """Return the permits that expired or have a ticket, the deaf inboxes, and until when polling owners live."""
    permits, state, _, polls = keys
    over, tickets = [name for name, until in seen.ends.items() if until <= seen.now], seen.tickets
    if not over and not tickets:
        return {}, frozenset[bytes](), dict[bytes, int]()
    named = list(dict.fromkeys([*over, *(ticket.token for ticket in tickets)]))
    inboxes = sorted({ticket.inbox for ticket in tickets if ticket.inbox} | _sharing([token]))
    listening, *rest = yield [
        (b"PUBSUB", b"NUMSUB", *inboxes),
        (b"HMGET", state, *(b"=" + name for name in named)),
        (b"ZMSCORE", permits, *named),
        (b"ZMSCORE", polls, *(seen.places or [b""])),
    ]
    about, until, alive = checked(rest)
    polled = {member: int(float(at)) for member, at in zip(seen.places, alive, strict=False) if at is not None}
    return permits_of(named, about, until), deaf(listening), polled


def _read(keys: WireKeys, token: bytes, own: bytes, former: int | None, window: int, mute: bool) -> Dialogue:
    """Return a `PermitsRead`. ``own`` is the caller's ticket; or empty.

    ``former``: the place that the ticket had, if the request is repeated.
    """
    seen = _overview(keys, checked((yield _first_asked(keys, token, own, window))), [token])
    if seen.nameless:
        yield from _refuse_foreign(keys[1])
    limit, used, fence, kept = seen.known
    # Two live permits are enough to know which is the first next to the caller's own. Ends that are not whole numbers
    # belong to tombstones.
    live = {name: math.ceil(until) for name, until in seen.ends.items() if until > seen.now}
    worth = (name for name in live if seen.ends[name].is_integer())
    held = {name: Permit(UNREAD, 0, live[name]) for name in islice(worth, 2)}
    held |= seen.named
    found, unheard, polled = yield from _look_closer(keys, token, seen)
    held |= found
    if seen.own_until is not None:
        polled[own] = int(float(seen.own_until))
    places = seen.places
    members = tuple(places) if seen.own_place is None or own in places else (*places, own)
    shared = seen.shared and not seen.lost
    before = PermitSnapshot(
        seen.now,
        limit,
        # When one of the two keys is lost, the rest of the other is meaningless.
        used=0 if seen.lost else used,
        fence=fence,
        permits={} if seen.lost else held,
        queue=members,
        places={member: int(place) for member, place in places.items()},
        polls=polled,
        unread=seen.waiting - len(places) - (len(members) > len(places)),
        shared=shared,
        deaf=unheard,
        mute=mute,
        resized=seen.resized,
    )
    line = QueueView(keys[2], keys[3], seen.last_place, seen.waiting > len(places), own, former)
    sharers = {name: until for name, until in islice(live.items(), MAX_NOTIFIED) if shared and Sharer.of(name)}
    return PermitsRead(keys, before, kept, line, seen.lost, len(seen.ends) - len(live) > BATCH, sharers)


def _with_sharers(view: PermitsRead) -> Dialogue:
    """Return the same `PermitsRead`, with the permits of processes that may have to hear that the name is contended."""
    _, state, _, _ = view.keys
    tokens = list(view.sharers)
    listening, about = yield [
        (b"PUBSUB", b"NUMSUB", *sorted(_sharing(tokens))),
        (b"HMGET", state, *(b"=" + token for token in tokens)),
    ]
    (fields,) = checked([about])
    found = permits_of(tokens, fields, list(view.sharers.values()))
    before = view.before
    before = replace(before, permits={**before.permits, **found}, deaf=before.deaf | deaf(listening))
    return replace(view, before=before)


def _sharing(tokens: list[bytes]) -> set[bytes]:
    """Return the inboxes of the processes that share their leases."""
    return {sharer.inbox for token in tokens if (sharer := Sharer.of(token)) is not None}


def permits_of(tokens: list[bytes], about: list[Reply], ends: list[Reply]) -> dict[bytes, Permit]:
    """Return the permits of ``tokens`` from ``about`` (of STATE) and ``ends`` (of PERMITS)."""
    found = {}
    for token, value, end in zip(tokens, about, ends, strict=True):
        if value is not None and end is not None and (about_it := _PERMIT.fullmatch(value)) and float(end) < math.inf:
            weight, fence, previous = about_it.groups()
            until = math.ceil(float(end))
            found[token] = Permit(int(weight), int(fence), until, int(previous) if previous else None)
    return found


def _waits(decision: rules.PermitDecision) -> bool:
    return isinstance(decision.reply, tuple) and decision.reply[0] == Outcome.QUEUED


def _about(
    keys: WireKeys,
    token: bytes,
    own: bytes,
    rule: Callable[[PermitSnapshot], rules.PermitDecision],
    waits: bool = False,
    former: int | None = None,
) -> Decide:
    """Decide for ``token``.

    ``former``: the place that the ticket ``own`` had, if the request is repeated.

    ``waits``: a request whose ticket is queued keeps waiting if nothing can be written.
    """
    packed = False  # over all steps of this decision

    def decide(mute: bool, full: bool) -> Dialogue:
        nonlocal packed
        seen = WINDOW
        while True:
            view = yield from _read(keys, token, own, former, seen, mute)
            before = view.before
            packed |= before.used >= before.limit != 0
            view = replace(view, before=replace(before, packed=packed))
            queued = (int(Outcome.QUEUED), 0, -1, before.now, 1)
            without = queued if waits and own in before.queue else None
            if view.many_over:
                return WritePlan(None, view.writes(view.swept()), without=without, more=True)
            decision = rule(view.before)
            if view.sharers and _waits(decision):
                view = yield from _with_sharers(view)
                decision = rule(view.before)
            if not view.line.ended(view.before, decision.after):
                break
            seen *= 8
        return WritePlan(decision.reply, view.writes(decision.after), decision.messages, without)

    return decide


def acquire(keys: WireKeys, words: Words) -> Decide:
    """Decide as permits/acquire.lua does."""
    token, own = blob(words[0]), blob(words[2])
    ttl, poll, weight, limit = (int(words[index]) for index in (1, 3, 4, 5))
    whose, most, former = blob(words[6]) if words[6:] else b"", number_at(words, 7), number_at(words, 8)
    rule = lambda it: rules.acquire(it, token, ttl, own, poll, weight, limit, whose, most, former)  # noqa: E731
    return _about(keys, token, own, rule, waits=True, former=former)


def release(keys: WireKeys, words: Words) -> Decide:
    """Decide as permits/release.lua does."""
    token, own, pending = blob(words[0]), blob(words[1]), blob(words[2]) == b"1"
    return _about(keys, token, own, lambda it: rules.release(it, token, own, pending))


def renew(keys: WireKeys, words: Words) -> Decide:
    """Decide as permits/renew.lua does."""
    token, ttl, least, fences = blob(words[0]), int(words[1]), int(words[2]), int(words[3]) if words[3:] else None
    return _about(keys, token, b"", lambda it: rules.renew(it, token, ttl, least, fences))


def resize(keys: WireKeys, words: Words) -> Decide:
    """Decide as permits/resize.lua does."""
    limit = int(words[0])
    return _about(keys, b"", b"", lambda it: rules.resize(it, limit))
