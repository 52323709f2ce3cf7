"""Renewals and releases while a hash slot is being moved, by plain commands: see NARROW in `_scripts`, and `watch`.

The rules are the usual ones. They see only the keys that exist, and only those are written. The next request looks at
the queue, which may be at the other node by now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .._client.replies import Argument, Reply, ReplyError, Words
from .._scripts.constants import Renewed
from .._transport.executor import Dialogue
from . import lock_rules, permit_rules
from .snapshot import LockSnapshot, PermitSnapshot
from .watch_dialogue import Decide, QueueView, WritePlan, blob, checked, microseconds
from .watch_lock import LockRead
from .watch_permits import PermitsRead, permits_of

NOBODY = QueueView(b"", b"", 0, more=False, own=b"")

LockRule: TypeAlias = Callable[[LockSnapshot], lock_rules.LockDecision]
PermitsRule: TypeAlias = Callable[[PermitSnapshot], permit_rules.PermitDecision]


def _lock(name: bytes, rule: LockRule, more: tuple[int, ...] = ()) -> Decide:
    """Decide about a lock of which only the holder is known; ``more`` is the rest of the reply."""

    def decide(mute: bool, full: bool) -> Dialogue:
        _, time, holder, left = checked((yield [(b"WATCH", name), (b"TIME",), (b"GET", name), (b"PTTL", name)]))
        before = LockSnapshot(microseconds(time), holder, left)
        decision = rule(before)
        writes = LockRead((name, b"", b"", b""), before, NOBODY).writes(decision.after)
        reply = _with(decision.reply, more)
        return WritePlan(reply, [words for words in writes if words[1] == name])

    return decide


def _permits(keys: tuple[bytes, ...], token: bytes, rule: PermitsRule, more: tuple[int, ...] = ()) -> Decide:
    """Decide about permits of which only that of ``token`` is known; ``more`` is the rest of the reply."""
    permits, state = keys

    def decide(mute: bool, full: bool) -> Dialogue:
        fields = (b"limit", b"used", b"fence", b"kept", b"shared", b"resized", b"=" + token)
        asked: list[Words] = [(b"WATCH", *keys), (b"TIME",), (b"HMGET", state, *fields), (b"ZSCORE", permits, token)]
        _, time, known, until = checked((yield asked))
        limit, used, fence, kept = (int(value or 0) for value in known[:4])
        own = permits_of([token], known[6:], [until])
        shared, resized = known[4] is not None, known[5] is not None
        before = PermitSnapshot(microseconds(time), limit, used, fence, own, shared=shared, resized=resized)
        view = PermitsRead((permits, state, b"", b""), before, kept, NOBODY, lost=False, many_over=False, sharers={})
        decision = rule(before)
        reply = _with(decision.reply, more)
        return WritePlan(reply, view.writes(decision.after))

    return decide


def _with(reply: Reply, more: tuple[int, ...]) -> Reply:
    """Return the reply to a renewal with ``more``, if it was renewed."""
    return (*reply, *more) if more and reply[0] == Renewed.RENEWED else reply


def _only_held(member: Argument, pending: Argument) -> None:
    """Refuse a call that needs keys which may be at the other node."""
    if blob(member) or blob(pending) == b"1":
        raise ReplyError("TRYAGAIN the hash slot is being moved to another node")


def renew(keys: tuple[bytes, ...], words: Words) -> Decide:
    """Decide as lock/narrow_renew.lua does."""
    token, ttl_ms, *fences = words
    return _lock(keys[0], lambda it: lock_rules.renew(it, blob(token), int(ttl_ms)), (0, 0) if fences else ())


def release(keys: tuple[bytes, ...], words: Words) -> Decide:
    """Decide as lock/narrow_release.lua does."""
    token, member, pending, *_ = words
    _only_held(member, pending)
    return _lock(keys[0], lambda it: lock_rules.release(it, blob(token), b"", pending=False))


def renew_permit(keys: tuple[bytes, ...], words: Words) -> Decide:
    """Decide as permits/narrow_renew.lua does."""
    token, ttl, least, more = blob(words[0]), int(words[1]), int(words[2]), (0, 0) if words[3:] else ()
    return _permits(keys, token, lambda it: permit_rules.renew(it, token, ttl, least), more)


def release_permit(keys: tuple[bytes, ...], words: Words) -> Decide:
    """Decide as permits/narrow_release.lua does."""
    token = blob(words[0])
    _only_held(words[1], words[2])
    return _permits(keys, token, lambda it: permit_rules.release(it, token, b"", pending=False))
