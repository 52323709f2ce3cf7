"""Reading the keys of locks, and writing a decision about them, by plain commands. See `watch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .._client.replies import Reply, Words
from .._scripts.constants import FOREVER_MS, POLLERS_TICKET, Outcome, Renewed
from .._transport.dialogues import Dialogue
from . import lock_rules as rules
from .snapshot import LockSnapshot, Message, Ticket
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


@dataclass(frozen=True, slots=True)
class LockRead:
    """A lock as it was read."""

    keys: WireKeys
    before: LockSnapshot
    line: QueueView

    def writes(self, after: LockSnapshot) -> list[Words]:
        """Return the commands that bring the keys to the state ``after``."""
        name, _, fence, _ = self.keys
        before, found = self.before, list[Words]()
        if after.holder != before.holder:
            found.append(_held(name, after.holder, after.left))
        elif after.left != before.left:
            found.append((b"PEXPIRE", name, after.left))
        if (after.fence, after.granted) != (before.fence, before.granted):
            found.append((b"SET", fence, b"%016d %b" % (after.fence, after.granted), b"PX", after.kept))
        elif after.kept != before.kept:
            found.append((b"PEXPIRE", fence, after.kept))
        return found + self.line.writes(before, after, ahead=POLLERS_TICKET)


def _held(name: bytes, holder: bytes | None, left: int) -> Words:
    if holder is None:
        return (b"DEL", name)
    return (b"SET", name, holder) if left == FOREVER_MS else (b"SET", name, holder, b"PX", left)


def _questions(keys: WireKeys, own: bytes, window: int) -> list[Words]:
    """Return the questions about one lock; `_view` reads the answers."""
    name, queue, fence, polls = keys
    return [
        (b"GET", name),
        (b"PTTL", name),
        (b"GET", fence),
        (b"PTTL", fence),
        (b"ZRANGE", queue, 0, window - 1, b"WITHSCORES"),
        (b"ZCARD", queue),
        (b"ZRANGE", queue, -1, -1, b"WITHSCORES"),
        (b"ZSCORE", queue, own),
        (b"ZMSCORE", polls, own, POLLERS_TICKET),
    ]


def _read(
    locks: Sequence[WireKeys], own: bytes, window: int, mute: bool, full: bool, former: int | None = None
) -> Dialogue:
    """Return a `LockRead` of each lock. ``own`` is the caller's ticket, or empty.

    ``former``: the place that the ticket had, if the request is repeated.
    """
    asked: list[Words] = [(b"WATCH", *(key for keys in locks for key in keys)), (b"TIME",)]
    for keys in locks:
        asked += _questions(keys, own, window)
    _, time, *replies = checked((yield asked))
    number = len(replies) // len(locks)
    read = [replies[first : first + number] for first in range(0, len(replies), number)]
    heads = [dict(pairs(reply[4])) for reply in read]
    tickets = [ticket for head in heads for member in head if (ticket := Ticket.parse(member)) is not None]
    unheard: frozenset[bytes] = frozenset()
    alive: list[list[Reply]] = [[] for _ in heads]
    if any(heads):
        asked = [(b"PUBSUB", b"NUMSUB", *sorted({ticket.inbox for ticket in tickets if ticket.inbox}))]
        asked += [(b"ZMSCORE", keys[3], *(head or [b""])) for keys, head in zip(locks, heads, strict=True)]
        listening, *scores = yield asked
        unheard, alive = deaf(listening), checked(scores)
    base = LockSnapshot(microseconds(time), deaf=unheard, mute=mute, full=full)
    views = zip(locks, read, heads, alive, strict=True)
    return [_view(keys, base, own, former, reply, places, until) for keys, reply, places, until in views]


def _view(
    keys: WireKeys,
    base: LockSnapshot,
    own: bytes,
    former: int | None,
    reply: list[Reply],
    places: dict[bytes, float],
    alive: list[Reply],
) -> LockRead:
    holder, left, last, kept, _, waiting, tail, place, (own_until, open_since) = reply
    head, last_place = list(places), place_of(keys[1], tail)
    polls = {member: int(float(until)) for member, until in zip(head, alive, strict=False) if until is not None}
    if own_until is not None:
        polls[own] = int(float(own_until))
    if open_since is not None:
        polls[POLLERS_TICKET] = int(float(open_since))
    queue = tuple(head) if place is None or own in head else (*head, own)
    fence, granted = _read_fence(keys[2], last)
    before = replace(
        base,
        holder=holder,
        left=left,
        fence=fence,
        granted=granted,
        kept=kept,
        queue=queue,
        places={member: int(place) for member, place in places.items()},
        polls=polls,
        unread=waiting - len(queue),
    )
    return LockRead(keys, before, QueueView(keys[1], keys[3], last_place, waiting > len(head), own, former))


def _read_fence(key: bytes, found: bytes | None) -> tuple[int, bytes]:
    """Return the last fence and the token that it was granted to; 0 and nothing if none is remembered."""
    if found is None:
        return 0, b""
    if not found[:16].isdigit() or found[16:17] != b" ":
        raise not_ours(key, "it is no fence")
    return int(found[:16]), found[17:]


def _plan(
    views: Sequence[LockRead], decisions: Sequence[rules.LockDecision], reply: object, without: object = None
) -> WritePlan:
    messages, writes = list[Message](), list[Words]()
    for view, decision in zip(views, decisions, strict=True):
        messages += decision.messages
        writes += view.writes(decision.after)
    return WritePlan(reply, writes, tuple(messages), without)


def _one(
    keys: WireKeys,
    own: bytes,
    rule: Callable[[LockSnapshot], rules.LockDecision],
    waits: bool = False,
    former: int | None = None,
) -> Decide:
    """Decide about one lock; ``waits``: a request whose ticket is queued keeps waiting if nothing can be written.

    ``former``: the place that the ticket ``own`` had, if the request is repeated.
    """

    def decide(mute: bool, full: bool) -> Dialogue:
        window = WINDOW
        while True:
            (view,) = yield from _read([keys], own, window, mute, full, former)
            decision = rule(view.before)
            if not view.line.ended(view.before, decision.after):
                break
            window *= 8
        queued = (int(Outcome.QUEUED), 0, view.before.left, view.before.now, 1)
        without = queued if waits and own in view.before.queue else None
        return _plan([view], [decision], decision.reply, without)

    return decide


def acquire(keys: WireKeys, words: Words) -> Decide:
    """Decide as lock/acquire.lua does."""
    token, ttl_ms, member, poll_ms, reusable, *_ = words
    own, ttl, poll, again = blob(member), int(ttl_ms), int(poll_ms), int(reusable) == 1
    most, former, least = (number_at(words, at) for at in (5, 6, 7))
    rule = lambda it: rules.acquire(it, blob(token), ttl, own, poll, again, most, former, least)  # noqa: E731
    return _one(keys, own, rule, waits=True, former=former)


def release(keys: WireKeys, words: Words) -> Decide:
    """Decide as lock/release.lua does."""
    token, member, pending, *gap = words
    own, gap_ms = blob(member), int(gap[0]) if gap else 0
    return _one(keys, own, lambda it: rules.release(it, blob(token), own, pending == b"1", gap_ms))


def renew(keys: WireKeys, words: Words) -> Decide:
    """Decide as lock/renew.lua does."""
    token, ttl_ms, *more = words
    fences = int(more[0]) if more else None
    return _one(keys, b"", lambda it: rules.renew(it, blob(token), int(ttl_ms), fences))


def force(keys: WireKeys, words: Words) -> Decide:
    """Decide as lock/force_release.lua does."""
    return _one(keys, b"", rules.force)


def acquire_all(keys: tuple[bytes, ...], words: Words) -> Decide:
    """Decide as lock/acquire_all.lua does."""
    ttl_ms, prefix, numbers = words
    tokens = tuple(blob(prefix) + number for number in blob(numbers).split())
    locks = [keys[first : first + 4] for first in range(0, len(keys), 4)]

    def decide(mute: bool, full: bool) -> Dialogue:
        window = WINDOW
        while True:
            views = yield from _read(locks, b"", window, mute, full)
            decisions = rules.acquire_all(tuple(view.before for view in views), int(ttl_ms), tokens)
            pairs_of = list(zip(views, decisions, strict=True))
            if not any(view.line.ended(view.before, decision.after) for view, decision in pairs_of):
                return _plan(views, decisions, [decision.reply for decision in decisions])
            window *= 8

    return decide


def mark(keys: WireKeys, words: Words) -> Decide:
    """Decide as lock/mark.lua does."""
    name, key = keys
    token, *new = words

    def decide(mute: bool, full: bool) -> Dialogue:
        _, holder, found = checked((yield [(b"WATCH", name, key), (b"GET", name), (b"GET", key)]))
        if token != b"" and holder != token:
            return WritePlan([int(Renewed.GONE if holder is None else Renewed.TAKEN), found], [])
        replaces = bool(new) and (len(new) < 3 or new[2] == (found or b""))
        return WritePlan([int(Renewed.RENEWED), found], [(b"SET", key, new[0], b"PX", new[1])] if replaces else [])

    return decide
